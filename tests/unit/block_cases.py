"""Samples, flags and given scores for the tests of modes."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.models.distillation import RowKL
from megatron_dllm.models.head import RowNLL, WeightedNLL
from megatron_dllm.models.reductions import WeightedLoss
from megatron_dllm.modes import bd3lm, hybrid, idlm
from tests.one_process import OneRank

MASK, PAD = 60, 7
MODES = {"bd3lm": bd3lm, "hybrid": hybrid, "idlm": idlm}


def golden(name: str) -> list[dict]:
    return json.loads((Path(__file__).parents[1] / "golden" / name).read_text())["cases"]


def flags(mode="hybrid", validate=True, **changes) -> SimpleNamespace:
    """Arguments as parsed, with the mode's checks and defaults applied."""
    values = dict(
        dllm_mode=mode,
        dllm_mask_token_id=MASK,
        dllm_pad_token_id=PAD,
        dllm_eps=1e-3,
        dllm_loss_normalization=None,
        dllm_block_size=4,
        dllm_block_origin="sequence",
        dllm_compat=None,
        dllm_state={},
        diffusion_loss_weight=1.0,
        ar_loss_weight=1.0,
        dllm_corruption="uniform",
        dllm_half_life_ratio=None,
        dllm_blockwise_weights=None,
        idlm_clean_loss_weight=None,
        idlm_auto_balance=False,
        bd3lm_complementary_masks=False,
        dllm_block_size_schedule=None,
        dllm_block_size_schedule_iters=None,
        step_batch_size_schedule=None,
        context_parallel_size=1,
        global_batch_size=8,
    )
    args = SimpleNamespace(**(values | changes))
    if validate:
        MODES[mode].validate(args)
    return args


def make_sample(documents: list[int], supervised=None, index: int = 0, tokens=None) -> Sample:
    """documents: number of each token's document; positions restart with each."""
    n = len(documents)
    ids = torch.arange(n) % 50 if tokens is None else torch.as_tensor(tokens)
    loss_mask = torch.ones(n) if supervised is None else torch.as_tensor(supervised)
    positions = [i - documents.index(d) for i, d in enumerate(documents)]
    return Sample(ids, loss_mask.bool(), torch.tensor(documents, dtype=torch.int32), torch.tensor(positions), index)


class GivenLogits:
    """A model whose scores are given: the head's weight is the identity, so hidden states are the logits."""

    share_embeddings_and_output_weights = False

    def __init__(self, vocab_size):
        self.true_vocab_size = vocab_size
        self.weight = torch.eye(vocab_size)

    def select_rows(self, hidden_QBD, rows_N):
        return hidden_QBD.flatten(0, 1)[rows_N]

    def output_layer(self, hidden_ND, weight, vocab, weights_N=None, targets_N=None, loss=None, teacher=None):
        if teacher is not None:
            return RowKL.apply(hidden_ND, self.weight, *teacher, OneRank(), vocab, 3)
        if weights_N is None:
            return RowNLL.apply(hidden_ND, self.weight, targets_N, OneRank(), vocab, 3)
        if loss is None:
            return WeightedNLL.apply(hidden_ND, self.weight, targets_N, weights_N, OneRank(), vocab, 3)
        return WeightedLoss.apply(hidden_ND, self.weight, weights_N, OneRank(), vocab, *loss)
