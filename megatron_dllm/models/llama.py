"""Llama and models of its shape (SmolLM2, ...). transformers: LlamaForCausalLM. The other families build on these."""

from megatron_dllm.models.entries import Heads, Only, Rope, Same, Untied
from megatron_dllm.models.family import Family
from megatron_dllm.models.weights import Interleaved, Stacked, Table

LAYERS = (
    Same("hidden_size", "hidden_size"),
    Same("intermediate_size", "ffn_hidden_size"),
    Same("num_hidden_layers", "num_layers"),
    Same("rms_norm_eps", "layernorm_epsilon", whole=False),
    Same("max_position_embeddings", "max_position_embeddings"),
    Only("hidden_act", "silu"),
)
SIZES = (*LAYERS, Untied())


def decoder_weights(prefix: str = "model.", head: str = "lm_head.weight") -> Table:
    """Names that most of transformers' decoders share."""
    return {
        "embedding.word_embeddings.weight": prefix + "embed_tokens.weight",
        **layer_weights(prefix),
        "output_layer.weight": head,
    }


def layer_weights(prefix: str = "model.") -> Table:
    """The same without embedding and head."""
    ours, theirs = "decoder.layers.{layer}.", prefix + "layers.{layer}."
    return {
        ours + "input_layernorm.weight": theirs + "input_layernorm.weight",
        ours + "self_attention.linear_qkv.weight": Interleaved(
            *(theirs + f"self_attn.{x}_proj.weight" for x in "qkv"),
        ),
        ours + "self_attention.linear_proj.weight": theirs + "self_attn.o_proj.weight",
        ours + "pre_mlp_layernorm.weight": theirs + "post_attention_layernorm.weight",
        ours + "mlp.linear_fc1.weight": Stacked(theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight"),
        ours + "mlp.linear_fc2.weight": theirs + "mlp.down_proj.weight",
        "decoder.final_layernorm.weight": prefix + "norm.weight",
    }


def qkv_bias(prefix: str = "model.") -> Table:
    theirs = prefix + "layers.{layer}.self_attn."
    ours = "decoder.layers.{layer}.self_attention.linear_qkv.bias"
    return {ours: Interleaved(*(theirs + f"{x}_proj.bias" for x in "qkv"))}


def head_norms(prefix: str = "model.") -> Table:
    """RMS norms of query and key heads."""
    return {
        f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight": prefix
        + f"layers.{{layer}}.self_attn.{x}_norm.weight"
        for x in "qk"
    }


def experts(prefix: str = "model.") -> Table:
    """A router and experts one by one."""
    ours, theirs = "decoder.layers.{layer}.mlp.", prefix + "layers.{layer}.mlp."
    expert = theirs + "experts.{expert}."
    return {
        ours + "router.weight": theirs + "gate.weight",
        ours + "experts.local_experts.{expert}.linear_fc1.weight": Stacked(
            expert + "gate_proj.weight", expert + "up_proj.weight"
        ),
        ours + "experts.local_experts.{expert}.linear_fc2.weight": expert + "down_proj.weight",
    }


def shared_experts(prefix: str = "model.") -> Table:
    ours, theirs = "decoder.layers.{layer}.mlp.shared_experts.", prefix + "layers.{layer}.mlp.shared_experts."
    return {
        ours + "linear_fc1.weight": Stacked(theirs + "gate_proj.weight", theirs + "up_proj.weight"),
        ours + "linear_fc2.weight": theirs + "down_proj.weight",
    }


LLAMA = Family(
    name="llama",
    types=("llama",),
    architecture="LlamaForCausalLM",
    transformers_config="LlamaConfig",
    entries=(*SIZES, Heads(), Rope(), Only("attention_bias", False), Only("mlp_bias", False)),
    weights=(decoder_weights(),),
)
