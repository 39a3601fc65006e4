"""The network of DiffusionGemma (transformers: DiffusionGemmaForBlockDiffusion, text part) of Megatron-Core's parts.

One stack reads [clean tokens | canvas] in a single pass. The released code runs it twice, first over the clean tokens
(encoder) and then over the canvas with the encoder's keys and values. That is the same: clean rows never look at canvas
rows, experts are chosen token by token, and what else differs between the runs (input, mask, position, scale of the
layer's output) differs by row. So nothing is stored beside activations, and recomputation, pipelines and context
parallelism need nothing special. (Stored keys and values would be made without a graph under recomputation, and the
encoder's gradient would be lost without an error.)

    a   = attention(RMS(x)) with softmax scale 1; of full layers the value is the un-normed, unrotated key
    x  += RMS(a)
    h1  = RMS(mlp(RMS(x)));   h2 = RMS(experts(RMS(x), chosen by x))
    x   = (x + RMS(h1 + h2)) · s,   s of the layer: one for clean rows, one for canvas rows

Sliding layers see a window of W tokens back from a token's anchor: from itself, or for a canvas from the first
position of its block. Full layers have other heads and another rotation.

Shapes: Q rows of the sequence (a rank's, and under sequence parallelism its shard), B batch rows, D width.
"""

import copy
import functools
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.models.dlm import own_rows, parallel_layers
from megatron_dllm.models.norms import HeadRMSNorm, RMSNorm, rms_norm
from megatron_dllm.modes.base import ANCHOR, CLEAN, DOCUMENT, POSITION, STREAM, Rule


def mlp_parts(config) -> MLPSubmodules:
    """Norms are modules of their own here, Transformer Engine's layers too: what it can fuse is a norm before a layer,
    and half of these come after one."""
    layers = parallel_layers(config)
    return MLPSubmodules(linear_fc1=layers.column_parallel_linear(), linear_fc2=layers.row_parallel_linear())


@dataclass(frozen=True)
class Shape:
    """What Megatron's configuration has no place for. full_layers: which, from 0; kv_channels, query_groups, rotary_*:
    of full layers, beside the configuration's own of sliding layers; window: tokens; softcap: of the logits."""

    full_layers: tuple[int, ...]
    kv_channels: int
    query_groups: int
    rotary_base: float
    rotary_percent: float
    window: int
    softcap: float

    @classmethod
    def of(cls, args: Namespace) -> "Shape":
        return cls(
            tuple(args.dllm_full_attention_layers),
            args.dllm_full_kv_channels,
            args.dllm_full_query_groups,
            args.dllm_full_rotary_base,
            args.dllm_full_rotary_percent,
            args.dllm_window,
            args.dllm_logit_softcap,
        )


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def configure(config) -> None:
    """What the network needs of Megatron's configuration, in place."""
    config.activation_func = gelu_tanh  # the gate's; Megatron's flags know the exact gelu
    config.bias_activation_fusion = False
    config.hetereogenous_dist_checkpoint = True  # Megatron's spelling: layers differ in shape, and have their own keys


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm without a weight."""
    return rms_norm(x, None, eps)


def within_window(query: torch.Tensor, key: torch.Tensor, rule: Rule, window: int) -> torch.Tensor:
    """`rule`, and of clean tokens only those less than `window` before the query's anchor."""
    near = query[..., ANCHOR] - key[..., POSITION] < window
    return rule(query, key) & ((key[..., STREAM] != CLEAN) | near)


class GemmaAttention(SelfAttention):
    """Attention of a layer whose heads are `kv_channels` wide. shared: values are made of the keys' projection, which
    linear_qkv then holds once: for each key/value group its query heads and its key."""

    def __init__(self, config, submodules, layer_number, kv_channels: int, query_groups: int, shared: bool, **options):
        # a copy that is not validated again; the block and the experts keep theirs
        config = copy.copy(config)
        config.kv_channels, config.num_query_groups, config.softmax_scale = kv_channels, query_groups, 1.0
        if shared:
            submodules = copy.copy(submodules)
            build, values = submodules.linear_qkv, kv_channels * query_groups
            submodules.linear_qkv = lambda width, rows, **more: build(width, rows - values, **more)
        super().__init__(config, submodules, layer_number, **options)
        self._shared = shared

    def get_query_key_value_tensors(self, hidden_states, key_value_states=None, output_gate=False, split_qkv=True):
        """query [Q, B, h, d], key and value [Q, B, g, d], of this rank's heads."""
        rows, _ = self.linear_qkv(hidden_states)
        tp, groups, d = self.world_size, self.config.num_query_groups, self.hidden_size_per_attention_head
        if groups < tp:  # a group is cut over ranks: put it together, and then share out its query heads
            rows = tensor_parallel.all_gather_last_dim_from_tensor_parallel_region(rows, group=self.pg_collection.tp)
            group, member = divmod(self.pg_collection.tp.rank(), tp // groups)
            rows = rows.chunk(groups, -1)[group]
        rows = rows.unflatten(-1, (self.num_query_groups_per_partition, -1, d))
        heads = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        query, key, value = rows[..., :heads, :].flatten(2, 3), rows[..., heads, :], rows[..., -1, :]
        if groups < tp:
            query = query.chunk(tp // groups, 2)[member]
        return self.q_layernorm(query), self.k_layernorm(key), rms(value, self.config.layernorm_epsilon)


class GemmaRouter(TopKRouter):
    """softmax over the chosen experts of W (RMS(x) · scale / sqrt(D)), each times a factor of the expert's."""

    def __init__(self, config, pg_collection=None, **options):
        super().__init__(config=config, pg_collection=pg_collection, **options)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.per_expert_scale = torch.nn.Parameter(torch.ones(config.num_moe_experts, dtype=config.params_dtype))
        for parameter in (self.scale, self.per_expert_scale):
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_QBD, padding_mask=None):
        normed = rms(hidden_QBD, self.config.layernorm_epsilon) * self.scale * self.config.hidden_size**-0.5
        probabilities, chosen = super().forward(normed.contiguous(), padding_mask)
        return probabilities * self.per_expert_scale.to(probabilities.dtype), chosen


class GemmaExperts(MoELayer):
    """Megatron's, but that the router looks at other rows than the experts compute on."""

    def forward(self, hidden_QBD, routed_by_QBD, padding_QB):
        def run(hidden, routed_by, padding):
            probabilities, chosen = self.route(routed_by, padding)
            hidden, probabilities = self.preprocess(hidden, probabilities, chosen)
            hidden, probabilities = self.dispatch(hidden, probabilities)
            output, _ = self.routed_experts_compute(hidden, probabilities)
            return self.postprocess(self.combine(output), None)

        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_QBD, routed_by_QBD, padding_QB)
        return run(hidden_QBD, routed_by_QBD, padding_QB)


class GemmaLayer(TransformerLayer):
    """See the head of this file. `mlp` is the dense one, `moe` the experts beside it."""

    def __init__(self, config, submodules, full: bool, rotary: slice, **options):
        """full: attends without a window; rotary: its part of the angles."""
        super().__init__(config, submodules, **options)
        self.full, self._rotary = full, rotary
        norm = lambda: RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_self_attn_layernorm, self.post_mlp_layernorm, self.post_dense_layernorm = norm(), norm(), norm()
        self.pre_moe_layernorm, self.post_moe_layernorm = norm(), norm()
        experts = functools.partial(SequentialMLP, submodules=mlp_parts(config))
        parts = MoESubmodules(experts=experts, router=GemmaRouter)
        self.moe = GemmaExperts(config, parts, layer_number=self.layer_number, pg_collection=self.pg_collection)
        self.moe.set_layer_number(self.layer_number)
        # not trained, as in the released code
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))
        self.register_buffer("encoder_layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None, **unused):
        """attention_mask: attributes of all ranks' rows [B, S, A]. Returns (hidden states, None)."""
        x, own_QBA = hidden_states, own_rows(attention_mask, self.config, self.pg_collection)
        padding_QB, clean_QB1 = own_QBA[..., DOCUMENT] < 0, (own_QBA[..., STREAM, None] == CLEAN).contiguous()
        attended, _ = self.self_attention(
            self.input_layernorm(x),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb[..., self._rotary],
        )
        x = x + self.post_self_attn_layernorm(attended)
        dense, _ = self.mlp(self.pre_mlp_layernorm(x))
        sparse = self.moe(self.pre_moe_layernorm(x), x, padding_QB.contiguous())
        x = x + self.post_mlp_layernorm(self.post_dense_layernorm(dense) + self.post_moe_layernorm(sparse))
        return x * torch.where(clean_QB1, self.encoder_layer_scalar, self.layer_scalar).to(x.dtype), None


def layers_spec(config, shape: Shape, rule: Rule, backend: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """This stage's layers."""
    narrow, wide = config.kv_channels, shape.kv_channels
    sliding = functools.partial(within_window, rule=rule, window=shape.window)
    first, linears = get_transformer_layer_offset(config, vp_stage), parallel_layers(config)
    layers = []
    for number in range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)):
        full = number in shape.full_layers
        attention = ModuleSpec(
            module=GemmaAttention,
            params=dict(
                attn_mask_type=AttnMaskType.arbitrary,
                kv_channels=wide if full else narrow,
                query_groups=shape.query_groups if full else config.num_query_groups,
                shared=full,
            ),
            submodules=SelfAttentionSubmodules(
                linear_qkv=linears.column_parallel_linear(),
                core_attention=functools.partial(RuleAttention, visible=rule if full else sliding, backend=backend),
                linear_proj=linears.row_parallel_linear(),
                q_layernorm=HeadRMSNorm,
                k_layernorm=HeadRMSNorm,
            ),
        )
        parts = TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            pre_mlp_layernorm=RMSNorm,
            mlp=functools.partial(MLP.as_mlp_submodule, submodules=mlp_parts(config)),
        )
        angles = slice(narrow, narrow + wide) if full else slice(0, narrow)
        layers.append(ModuleSpec(module=GemmaLayer, params=dict(full=full, rotary=angles), submodules=parts))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
