"""LLaDA-MoE 7B-A1B: experts in every layer, chosen by a softmax over all of them that is not normalised again.

Equal to Qwen3MoeForCausalLM with norm_topk_prob off, whatever this configuration says about it: the released code
ignores norm_topk_prob and routed_scaling_factor. Its model_type is LLaDA's ("llada"); the architecture tells which.
"""

from megatron_dllm.models.entries import Entry, Heads, Only, Rope, Same
from megatron_dllm.models.family import Family
from megatron_dllm.models.llama import SIZES, decoder_weights, experts, head_norms


class _AllLayers(Entry):
    keys = ("moe_layer_freq",)

    def read(self, config):
        frequency = config.get("moe_layer_freq") or [1]
        if set(frequency) != {1}:
            raise ValueError(f"config.json has moe_layer_freq = {frequency}, and only ones are implemented.")
        return {}

    def write(self, args):
        return dict(moe_layer_freq=[1] * args.num_layers)


LLADA_MOE = Family(
    name="llada_moe",
    types=("llada", "lladamoe", "llada_moe"),
    architecture="LLaDAMoEModelLM",
    also_architectures=("LLaDAMoEModel",),
    entries=(
        *(entry for entry in SIZES if entry.keys != ("intermediate_size",)),
        Same("dense_intermediate_size", "ffn_hidden_size"),
        Same("expert_intermediate_size", "moe_ffn_hidden_size"),
        Same("num_experts", "num_experts"),
        Same("num_experts_per_tok", "moe_router_topk"),
        Heads(size=None),
        Rope(old_notation=True, scalings=()),
        _AllLayers(),
        Only("attention_bias", False),
        Only("qk_layernorm", True),
        Only("clip_qkv", None),
        Only("moe_router_score_function", "softmax"),
        Only("moe_router_enable_expert_bias", False),
        Only("shared_expert_intermediate_size", None, also=(0,)),
        Only("router_num_group", None),
        Only("router_topk_group", None),
    ),
    weights=(decoder_weights() | head_norms() | experts(),),
    arguments=dict(qk_layernorm=True, moe_router_pre_softmax=True),
    stock="qwen3_moe",
    mode="mdlm",
    mask_token_id=156895,
    harmless=tuple(
        "output_router_logits router_aux_loss_coef routed_scaling_factor norm_topk_prob".split()
    ),
)
