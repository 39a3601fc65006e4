"""Flags, blocks and given scores for the tests of mode dflash."""

import dataclasses
from types import SimpleNamespace

import torch

from megatron_dllm.data.sample import Sample
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.modes import dflash
from megatron_dllm.modes.base import ModelInput
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import shard
from tests.unit.block_cases import MASK, PAD, GivenLogits


def flags(**changes) -> SimpleNamespace:
    """Arguments as `validate` leaves them, in one process."""
    values = dict(
        dllm_mask_token_id=MASK,
        dllm_pad_token_id=PAD,
        dllm_block_size=4,
        dllm_compat=None,
        dflash_num_anchors=8,
        dflash_anchor_sampling="supervised",
        dflash_loss="decay",
        dflash_loss_decay=7.0,
        dflash_dpace_alpha=0.5,
        dflash_kl_weight=0.0,
        dflash_kl_temperature=1.0,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
    )
    return SimpleNamespace(**(values | changes))


def anchored(sample: Sample, anchors: list[int], kept: list[bool] | None = None, **changes) -> dflash.Anchored:
    """The sample with these anchors, whatever would have been drawn. changes: of the other fields."""
    drawn = dflash.corrupt(
        sample, Draws(1, sample.index), flags(dflash_num_anchors=len(anchors), dllm_mask_token_id=-1)
    )
    kept_N = torch.tensor([True] * len(anchors) if kept is None else kept).bool()
    return dataclasses.replace(drawn, anchors_N=torch.tensor(anchors), kept_N=kept_N, **changes)


def view_of(batch: ModelInput, logits_BRV: torch.Tensor) -> tuple[ScoreView, dict]:
    """(view, counts) of a batch whose R = N·K rows of blocks have these scores."""
    rank = shard(batch, list(range(len(logits_BRV))), 1, 0, False)
    context = logits_BRV.new_zeros(len(logits_BRV), batch.tokens_BQ.shape[1] - batch.drafted, logits_BRV.shape[-1])
    scores_QBV = torch.cat([context, logits_BRV], dim=1).transpose(0, 1)
    return ScoreView(GivenLogits(logits_BRV.shape[-1]), scores_QBV, rank.terms), rank.counts


def scored(batch: ModelInput, logits_BRV: torch.Tensor, args) -> tuple[torch.Tensor, float, dict[str, list[float]]]:
    """(undivided loss, its count, measures as [sum, count])."""
    view, counts = view_of(batch, logits_BRV)
    (term,) = dflash.loss(view, args)
    measures = dflash.measure(view, args)
    return term.sum, counts["dllm"], {name: [x.item() for x in pair] for name, pair in measures.items()}
