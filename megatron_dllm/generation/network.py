"""The model as a decoding loop sees it: ragged passes in, full logits of a few rows out, on every rank.

A pass is a part of one row, any of its tokens in any order, with their positions, streams and blocks; `visible` of the
mode decides what they attend to, in the pass and among the tokens that a cache kept from earlier ones. Tensor- and
pipeline-parallel ranks call it with the same passes and get the same logits. So every rank has what a self-conditioned
model is told of its last prediction, and nothing is sent for that.

Shapes: B passes, Q tokens of the longest, N rows of logits in all, C of one pass, V vocabulary without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.models.cache import KeyValueCache
from megatron_dllm.modes.base import ANCHOR, BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM


@dataclass(frozen=True)
class Pass:
    """What the network is shown of one row, and what is asked of it.

    tokens, positions [n] int64; noisy [n] bool and blocks [n] int64: which stream and block each belongs to
    wanted [C] int64: tokens (by their place in this pass) whose logits are returned
    cached: how many tokens of the row the cache holds from earlier passes, in their order; this pass's come after them
    anchor: the position at which the noisy block begins, of modes whose canvases stand beside the text
    earlier [K, V]: logits of the last K tokens that the network is told (self-conditioning); None: nothing
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    noisy: torch.Tensor
    blocks: torch.Tensor
    wanted: torch.Tensor
    cached: int = 0
    anchor: int | None = None
    earlier: torch.Tensor | None = None


class Network:
    """model: a DiffusionLM, whole or this rank's pipeline stage, bare or wrapped; vocab_size: ids of the tokenizer;
    full: the mode's `visible` is "same document" and nothing else."""

    def __init__(self, model: torch.nn.Module, vocab_size: int, full: bool):
        self._model, self._bare, self._vocab_size, self._full = model, unwrap_model(model), vocab_size, full
        self._attentions = [module for module in self._bare.modules() if isinstance(module, RuleAttention)]
        self._attributes = None  # on the CPU and on the device; masks are remembered by the tensor they were made from

    def __call__(self, passes: Sequence[Pass], cache: KeyValueCache | None = None) -> list[torch.Tensor]:
        """[C, V] fp32 logits of the tokens that each pass wants. cache: one row for each pass."""
        tokens_BQ, positions_BQ, attributes_BQA = _side_by_side(passes)
        B, Q = tokens_BQ.shape
        device = torch.cuda.current_device()
        if cache is not None:
            cache.begin(attributes_BQA, [one.cached for one in passes])
        elif self._full and all(len(one.tokens) == Q for one in passes):
            attributes_BQA = None
        if attributes_BQA is not None:
            attributes_BQA = self._on(device, attributes_BQA)
        rows_N = torch.cat([one.wanted * B + b for b, one in enumerate(passes)])
        for attention in self._attentions:
            attention.cache = cache
        try:
            told = self._told(passes, device)
            inputs = tokens_BQ.to(device), positions_BQ.to(device), attributes_BQA
            logits_NV = self._run(*inputs, rows_N.to(device), told)
        finally:
            for attention in self._attentions:
                attention.cache = None
        return list(logits_NV.split([len(one.wanted) for one in passes]))

    def _on(self, device, attributes_BQA: torch.Tensor) -> torch.Tensor:
        if self._attributes is None or not torch.equal(self._attributes[0], attributes_BQA):
            self._attributes = attributes_BQA, attributes_BQA.to(device, copy=True)
        return self._attributes[1]

    def _told(self, passes: Sequence[Pass], device) -> dict:
        """What goes into the first layer beside tokens: soft embeddings, and the rows (q·B + b) that they are of."""
        knowing = [(b, one) for b, one in enumerate(passes) if one.earlier is not None]
        if not knowing or not self._bare.pre_process:
            return {}
        # one canvas at a time: probabilities are as wide as the vocabulary
        soft_ND = torch.cat([self._bare.soft_embeddings(one.earlier.to(device)) for _, one in knowing])
        ends = [(b, len(one.tokens), len(one.earlier)) for b, one in knowing]
        rows_N = torch.cat([torch.arange(end - count, end) * len(passes) + b for b, end, count in ends])
        return dict(expected=(rows_N.to(device), soft_ND))

    def _run(self, tokens_BQ, positions_BQ, attributes_BQA, rows_N, told: dict) -> torch.Tensor:
        """[N, V] logits, through all pipeline stages."""
        bare, groups = self._bare, self._bare.pg_collection
        if not bare.pre_process:
            B, Q = tokens_BQ.shape
            hidden = torch.empty(Q, B, bare.config.hidden_size, dtype=bare.config.params_dtype, device=tokens_BQ.device)
            torch.distributed.recv(hidden, group=groups.pp, group_src=groups.pp.rank() - 1)
            bare.set_input_tensor(hidden)
        output = self._model(tokens_BQ, positions_BQ, attributes_BQA, rows_N=rows_N, **told)
        if bare.post_process:
            logits_NV = tensor_parallel.gather_from_tensor_model_parallel_region(output, group=groups.tp)
            logits_NV = logits_NV[:, : bare.true_vocab_size].float().contiguous()
            # rows of the head beyond the tokenizer's ids stand for no text; a finite number, as guidance subtracts
            logits_NV[:, self._vocab_size :] = torch.finfo(logits_NV.dtype).min
        else:
            torch.distributed.send(output.contiguous(), group=groups.pp, group_dst=groups.pp.rank() + 1)
            logits_NV = torch.empty(len(rows_N), bare.true_vocab_size, device=tokens_BQ.device)
        if groups.pp.size() > 1:
            torch.distributed.broadcast(logits_NV, group=groups.pp, group_src=groups.pp.size() - 1)
        return logits_NV


def _side_by_side(passes: Sequence[Pass]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens_BQ, positions_BQ, attributes_BQA) of padded passes."""
    B, Q = len(passes), max(len(one.tokens) for one in passes)
    tokens_BQ, positions_BQ = torch.zeros(B, Q, dtype=torch.int64), torch.zeros(B, Q, dtype=torch.int64)
    anchored = passes[0].anchor is not None
    attributes_BQA = torch.zeros(B, Q, NUM_ATTRIBUTES + anchored, dtype=torch.int32)
    attributes_BQA[..., DOCUMENT] = -1
    for b, one in enumerate(passes):
        n = len(one.tokens)
        tokens_BQ[b, :n], positions_BQ[b, :n] = one.tokens, one.positions
        attributes_BQA[b, :n, STREAM] = torch.where(one.noisy, NOISY, CLEAN).int()
        attributes_BQA[b, :n, BLOCK] = one.blocks.int()
        attributes_BQA[b, :n, POSITION] = one.positions.int()
        attributes_BQA[b, :n, DOCUMENT] = 0
        if anchored:
            attributes_BQA[b, :n, ANCHOR] = torch.where(one.noisy, one.anchor, one.positions).int()
    return tokens_BQ, positions_BQ, attributes_BQA
