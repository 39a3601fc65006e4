"""DiffusionGemma as the training loop knows a model: the layers of gemma_layers.py between a scaled embedding with
self-conditioning and a tied head whose logits are capped.

Self-conditioning (Chen et al. 2022): a canvas may know what an earlier pass has made of it, as the expectation of the
token embedding under that pass's prediction:

    soft = softmax(c·tanh(h E^T / c)) E √D,   h: the earlier pass's last hidden states
    x    = RMS(e + W_d (gelu(W_g y) · W_u y)),   y = RMS(soft)          on canvas rows; clean rows stay e

soft = 0 where nothing is known: x = RMS(e). Of the two passes only the second has a graph, but soft is made in it: E
gets a gradient through soft, h does not. So what goes from the last pipeline stage to the first is h, and neither
logits nor probabilities are ever kept: `SoftEmbedding` makes them chunk by chunk, and again in backward.

Shapes: Q rows of the sequence, of them the last C are canvas rows; B batch rows, D width, V vocabulary.
"""

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule

from megatron_dllm.models import gemma_layers
from megatron_dllm.models.dlm import DiffusionLM, own_rows
from megatron_dllm.models.gemma_layers import Shape, mlp_parts, rms
from megatron_dllm.models.norms import RMSNorm
from megatron_dllm.models.rope import angles
from megatron_dllm.models.scoring import HEAD_CHUNK_ROWS
from megatron_dllm.modes.base import CLEAN, STREAM


class DiffusionGemma(DiffusionLM):
    """shape: what is beside the configuration; train_router: otherwise experts are chosen as before training, as in the
    published recipe. Parameters are GPTModel's where it has them; see diffusion_gemma.py."""

    def __init__(self, config, rule, shape: Shape, train_router: bool = False, **options):
        gemma_layers.configure(config)
        self._shape = shape
        super().__init__(config, rule, share_embeddings_and_output_weights=True, **options)
        if self.pre_process:
            self.self_conditioning = SelfConditioning(config, self.pg_collection)
        if self.post_process:
            self.output_layer.softcap = shape.softcap
        for layer in self.decoder.layers:
            layer.moe.router.requires_grad_(train_router)

    def forward(self, tokens_BQ, position_ids_BQ, attributes_BQA, canvas_rows: int | None = None, **options):
        """A DiffusionLM's, and of a first pass (`canvas_rows` given) on the last stage [C, B, D] `canvas_states`. soft:
        what such a pass returned, see `embed`."""
        if canvas_rows is not None:
            options["loss"] = lambda view: self.canvas_states(view.hidden_QBD, canvas_rows)
        return super().forward(tokens_BQ, position_ids_BQ, attributes_BQA, **options)

    def rotary_frequencies(self, base, percent, scaling):
        """Those of sliding layers, then those of full ones: the exponents are fractions of the whole head, and beyond
        the rotated part ("proportional", transformers) angles are zero."""
        sliding, factor = super().rotary_frequencies(base, percent, scaling)
        shape = self._shape
        with torch.device("cpu"):
            rotated = int(shape.rotary_percent * shape.kv_channels // 2)
            exponent = torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / shape.kv_channels
            full = torch.zeros(shape.kv_channels // 2)
            full[:rotated] = 1.0 / (shape.rotary_base**exponent)
        return torch.cat([sliding, full]), factor

    def _rotary(self, position_ids_BQ):
        """[Q, B, 1, d + d'] angles: of sliding layers, then of full ones."""
        if self.inverse_frequencies.device != position_ids_BQ.device:  # once
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids_BQ.device)
        kinds = self.inverse_frequencies.split([self.config.kv_channels // 2, self._shape.kv_channels // 2])
        return torch.cat([angles(position_ids_BQ, inverse) for inverse in kinds], -1)

    def layers_spec(self, rule, backend, vp_stage):
        return gemma_layers.layers_spec(self.config, self._shape, rule, backend, vp_stage)

    def embed(self, tokens_BQ, position_ids_BQ, attributes_BQA, soft=None, expected=None):
        """soft: (hidden_CbD of an earlier pass, which rows of the batch these are [b]); None: nothing is known.
        expected: instead, in a decoding loop, (rows_N int64, index q·B + b; their `soft_embeddings`)."""
        scale = self._scale()
        embedded = self.embedding(input_ids=tokens_BQ, position_ids=position_ids_BQ) * scale
        if soft is not None:
            signal = self._soft_embeddings(*soft, scale.item(), *tokens_BQ.shape)
        else:
            signal = torch.zeros_like(embedded)
            if expected is not None:
                signal.view(-1, signal.shape[-1])[expected[0]] = expected[1]
        stream_QB1 = own_rows(attributes_BQA, self.config, self.pg_collection)[..., STREAM, None]
        # of all rows, also clean ones: under sequence parallelism canvas rows are no slice, and this is one MLP
        return torch.where((stream_QB1 == CLEAN).contiguous(), embedded, self.self_conditioning(embedded, signal))

    def _scale(self) -> torch.Tensor:
        """Of the embedding, rounded to its precision, as theirs."""
        dtype = self.embedding.word_embeddings.weight.dtype
        return torch.tensor(self.config.hidden_size**0.5, dtype=torch.float32).to(dtype)

    def soft_embeddings(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N, D]: the expectation of the scaled embedding under softmax(logits), which every tensor-parallel rank has
        whole, without the padding of the vocabulary. First stage, no graph. Rounded where transformers rounds."""
        table_VD, tp = self.embedding.word_embeddings.weight, self.pg_collection.tp
        first = tp.rank() * len(table_VD)
        probabilities_NV = logits_NV.to(table_VD.dtype).float().softmax(-1)[:, first : first + len(table_VD)]
        partial_ND = probabilities_NV.to(table_VD.dtype) @ table_VD[: probabilities_NV.shape[1]]
        return tensor_parallel.reduce_from_tensor_model_parallel_region(partial_ND, group=tp) * self._scale()

    def _soft_embeddings(self, hidden_CbD, rows_b, scale: float, B: int, length: int) -> torch.Tensor:
        """[Q, B, D] (a shard under sequence parallelism), zero where nothing is known."""
        tp = self.pg_collection.tp
        partial_ND = SoftEmbedding.apply(
            hidden_CbD.flatten(0, 1),
            self.embedding.word_embeddings.weight,
            self.true_vocab_size,
            self._shape.softcap,
            tp,
            HEAD_CHUNK_ROWS,
        )
        partial_CbD = partial_ND.view_as(hidden_CbD) * scale
        partial_QBD = partial_CbD.new_zeros(length, B, partial_CbD.shape[2])
        partial_QBD[length - len(hidden_CbD) :].index_copy_(1, rows_b, partial_CbD)
        if self.config.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(partial_QBD, group=tp)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(partial_QBD, group=tp)

    def canvas_states(self, hidden_QBD: torch.Tensor, canvas_rows: int) -> torch.Tensor:
        """[C, B, D] last hidden states of this rank's canvas rows, whole on every tensor-parallel rank; no graph."""
        hidden_QBD = hidden_QBD.detach()
        if self.config.sequence_parallel:
            hidden_QBD = tensor_parallel.gather_from_sequence_parallel_region(hidden_QBD, group=self.pg_collection.tp)
        return hidden_QBD[len(hidden_QBD) - canvas_rows :].contiguous()


class SelfConditioning(MegatronModule):
    """RMS(e + MLP(RMS(soft))) of embeddings e and soft embeddings, [Q, B, D] both."""

    def __init__(self, config, pg_collection):
        super().__init__(config)
        self.pre_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config, mlp_parts(config), tp_group=pg_collection.tp)

    def forward(self, embedded, soft):
        signal, _ = self.mlp(self.pre_norm(soft))
        return rms(embedded + signal, self.config.layernorm_epsilon)


class SoftEmbedding(torch.autograd.Function):
    """[N, D]: this rank's part of softmax(c·tanh(h E^T / c)) E, to be summed over tensor-parallel ranks.

    hidden_ND: without gradient; table_VD: this rank's rows of E, whose gradient goes through the second factor alone;
    vocab_size: rows that are tokens, of all ranks; softcap: c; chunk_rows: of which probabilities exist at a time.
    """

    @staticmethod
    def forward(ctx, hidden_ND, table_VD, vocab_size, softcap, group, chunk_rows):
        ctx.save_for_backward(hidden_ND, table_VD)
        ctx.options = vocab_size, softcap, group, chunk_rows
        soft_ND = torch.empty_like(hidden_ND)
        for rows in _chunks(len(hidden_ND), chunk_rows):
            soft_ND[rows] = _probabilities(hidden_ND[rows], table_VD, vocab_size, softcap, group) @ table_VD
        return soft_ND

    @staticmethod
    def backward(ctx, upstream_ND):
        hidden_ND, table_VD = ctx.saved_tensors
        vocab_size, softcap, group, chunk_rows = ctx.options
        gradient_VD = torch.zeros_like(table_VD, dtype=torch.promote_types(table_VD.dtype, torch.float32))
        for rows in _chunks(len(hidden_ND), chunk_rows):
            probabilities_NV = _probabilities(hidden_ND[rows], table_VD, vocab_size, softcap, group)
            gradient_VD += probabilities_NV.t() @ upstream_ND[rows]
        return None, gradient_VD.to(table_VD.dtype), None, None, None, None


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _probabilities(hidden_nD, table_VD, vocab_size: int, softcap: float, group) -> torch.Tensor:
    """[n, V/tp] of this rank's tokens, normalised over all ranks', in the table's precision."""
    logits_nV = softcap * torch.tanh((hidden_nD @ table_VD.t()).float() / softcap)
    tokens = vocab_size - group.rank() * len(table_VD)  # of this rank; the rest is padding
    if tokens < len(table_VD):
        logits_nV[:, max(0, tokens) :] = float("-inf")
    largest_n1 = logits_nV.amax(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(largest_n1, dist.ReduceOp.MAX, group=group)
    logits_nV.sub_(largest_n1).exp_()
    total_n1 = logits_nV.sum(-1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total_n1, group=group)
    return logits_nV.div_(total_n1).to(table_VD.dtype)
