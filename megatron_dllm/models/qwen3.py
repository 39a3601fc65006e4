"""Qwen3, dense and with experts (RMS norms of query and key heads); A2D and I-DLM models are Qwen3 in their weights.

transformers: Qwen3ForCausalLM, Qwen3MoeForCausalLM. The experts' router is a softmax over the chosen logits
(norm_topk_prob) or over all of them.
"""

from megatron_dllm.models.entries import AllFull, Choice, Heads, Only, Rope, Same
from megatron_dllm.models.family import Family
from megatron_dllm.models.llama import SIZES, decoder_weights, experts, head_norms

_ENTRIES = (*SIZES, Heads(), Rope(), AllFull(), Only("use_sliding_window", False), Only("attention_bias", False))
_BEFORE_TOP_K = {True: dict(moe_router_pre_softmax=False), False: dict(moe_router_pre_softmax=True)}
_HARMLESS = ("sliding_window", "max_window_layers")

QWEN3 = Family(
    name="qwen3",
    types=("qwen3", "a2d-qwen3"),
    architecture="Qwen3ForCausalLM",
    transformers_config="Qwen3Config",
    entries=_ENTRIES,
    weights=(decoder_weights() | head_norms(),),
    arguments=dict(qk_layernorm=True),
    harmless=(*_HARMLESS, "block_size"),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    transformers_config="Qwen3MoeConfig",
    entries=(
        *_ENTRIES,
        Same("num_experts", "num_experts", alias="num_local_experts"),
        Same("num_experts_per_tok", "moe_router_topk"),
        Same("moe_intermediate_size", "moe_ffn_hidden_size"),
        Choice("norm_topk_prob", _BEFORE_TOP_K, False),
        Only("decoder_sparse_step", 1),
        Only("mlp_only_layers", [], also=(None,)),
    ),
    weights=(decoder_weights() | head_norms() | experts(),),
    arguments=dict(qk_layernorm=True),
    harmless=(*_HARMLESS, "router_aux_loss_coef", "output_router_logits"),
)
