"""LLaDA 8B and 1.5 (arXiv:2502.09992): a Llama in OLMo's notation, attending in both directions.

Equal to LlamaForCausalLM without a causal mask. In a block, ff_proj is the gate and ff_out the down projection;
transformer.ff_out is the head.
"""

from megatron_dllm.models.entries import Entry, Heads, Only, Rope, Same, Untied, positive
from megatron_dllm.models.family import Family
from megatron_dllm.models.weights import Interleaved, Stacked

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.transformer.blocks.{layer}."


class _Rows(Entry):
    """The embedding may have more rows than the tokenizer has tokens: the model knows all of them."""

    keys = ("embedding_size",)

    def read(self, config):
        return dict(vocab_size=positive(config, "embedding_size" if config.get("embedding_size") else "vocab_size"))

    def write(self, args):
        return dict(embedding_size=args.vocab_size)


LLADA = Family(
    name="llada",
    types=("llada",),
    architecture="LLaDAModelLM",
    also_architectures=("LLaDAModel",),
    entries=(
        Same("d_model", "hidden_size"),
        Same("mlp_hidden_size", "ffn_hidden_size"),
        Same("n_layers", "num_layers"),
        Heads("n_heads", "n_kv_heads", size=None),
        Same("rms_norm_eps", "layernorm_epsilon", default=1e-5, whole=False),
        Same("max_sequence_length", "max_position_embeddings"),
        _Rows(),
        Untied("weight_tying"),
        Rope(old_notation=True, scalings=()),
        Only("rope", True, default=False),
        Only("alibi", False),
        Only("block_type", "llama", default="sequential"),
        Only("activation_type", "silu", default="swiglu"),
        Only("layer_norm_type", "rms", default="default"),
        Only("layer_norm_with_affine", True),
        Only("attention_layer_norm", False),
        Only("input_emb_norm", False),
        Only("scale_logits", False),
        Only("include_bias", False, default=True),
        Only("include_qkv_bias", False, also=(None,)),
        Only("bias_for_layer_norm", False, also=(None,)),
        Only("multi_query_attention", None, also=(False,)),
        Only("block_group_size", 1),
    ),
    weights=(
        {
            "embedding.word_embeddings.weight": "model.transformer.wte.weight",
            _OURS + "input_layernorm.weight": _THEIRS + "attn_norm.weight",
            _OURS + "self_attention.linear_qkv.weight": Interleaved(*(_THEIRS + f"{x}_proj.weight" for x in "qkv")),
            _OURS + "self_attention.linear_proj.weight": _THEIRS + "attn_out.weight",
            _OURS + "pre_mlp_layernorm.weight": _THEIRS + "ff_norm.weight",
            _OURS + "mlp.linear_fc1.weight": Stacked(_THEIRS + "ff_proj.weight", _THEIRS + "up_proj.weight"),
            _OURS + "mlp.linear_fc2.weight": _THEIRS + "ff_out.weight",
            "decoder.final_layernorm.weight": "model.transformer.ln_f.weight",
            "output_layer.weight": "model.transformer.ff_out.weight",
        },
    ),
    stock="llama",
    mode="mdlm",
    mask_token_id=126336,
    harmless=tuple(
        "mlp_ratio precision rope_full_precision flash_attention alibi_bias_max init_cutoff_factor "
        "init_device init_fn init_std attention_layer_norm_with_affine".split()
    ),
)
