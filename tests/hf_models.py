"""Tiny Hugging Face folders of every family, with wide random weights, and the transformers model that each one equals.

Folders of families whose code is not in transformers are made from the equal class by naming tensors one by one, so
that nothing here depends on our tables.
"""

import json
import os

import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_dllm.models.hf import read_config

VOCABULARY = 91  # odd on purpose
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=1,
    attn_implementation="eager",
)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
GROUPED = dict(
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    moe_intermediate_size=24,
    use_qk_norm=True,
    attention_bias=False,
    num_nextn_predict_layers=0,
)
HYBRID = dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    ssm_state_size=8,
    mamba_num_heads=8,
    mamba_head_dim=10,
    n_groups=2,
    chunk_size=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=24,
)
HEAD = dict(head_dim=16)  # x 4 heads is not the width
# name -> (class, changes of SHAPE)
MODELS = {
    "llama": ("Llama", dict(HEAD, rope_parameters=PLAIN_ROPE)),
    "llama tied": ("Llama", dict(HEAD, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)),
    "llama llama3": ("Llama", dict(HEAD, rope_parameters=LLAMA3)),
    "llama square": ("Llama", dict(hidden_size=48, num_key_value_heads=4, rope_parameters=PLAIN_ROPE)),
    "qwen2": ("Qwen2", dict(rope_parameters=PLAIN_ROPE)),
    "qwen2 tied": ("Qwen2", dict(rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(HEAD, rope_parameters=PLAIN_ROPE)),
    "qwen3 tied": ("Qwen3", dict(HEAD, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3Moe", dict(HEAD, rope_parameters=PLAIN_ROPE) | EXPERTS),
    "ministral3": ("Ministral3", dict(HEAD, rope_parameters=YARN)),
    "ministral3 factor": ("Ministral3", dict(HEAD, rope_parameters=YARN | dict(mscale=2.0, mscale_all_dim=0.5))),
    "glm4_moe": ("Glm4Moe", dict(HEAD, rope_parameters=PLAIN_ROPE | dict(partial_rotary_factor=0.5)) | GROUPED),
    # families with code of their own: (equal class, ..., renamed below)
    "dream": ("Qwen2", dict(rope_parameters=PLAIN_ROPE)),
    "llada": ("Llama", dict(num_key_value_heads=4, rope_parameters=PLAIN_ROPE)),
    "llada_moe": ("Qwen3Moe", dict(EXPERTS, norm_topk_prob=False, head_dim=10, rope_parameters=PLAIN_ROPE)),
    "llada2": ("Glm4Moe", dict(HEAD, rope_parameters=PLAIN_ROPE | dict(partial_rotary_factor=0.5)) | GROUPED),
    "llada2 merged": ("Glm4Moe", dict(HEAD, rope_parameters=PLAIN_ROPE | dict(partial_rotary_factor=0.5)) | GROUPED),
    "nemotron": ("Ministral3", dict(HEAD, rope_parameters=YARN)),
}

FOREIGN = {"nemotron_h": ("NemotronH", HEAD | HYBRID)}  # none of our families


def make(name: str, folder, dtype=torch.float32, shape: dict | None = None, shards: str | None = None):
    """Write the folder, return (its path, the transformers model)."""
    kind, changes = (MODELS | FOREIGN)[name]
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | changes | (shape or {})))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    randomize(model)
    model = model.to(dtype).eval()
    path = str(folder / name.replace(" ", "_"))
    model.save_pretrained(path, **(dict(max_shard_size=shards) if shards else {}))
    write_tokenizer(path, config.vocab_size)
    if rename := RENAME.get(name):
        assert shards is None
        file = os.path.join(path, "model.safetensors")
        saved, their_config = load_file(file), read_config(path)
        tensors, new_config = rename(saved, their_config)
        save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
        with open(os.path.join(path, "config.json"), "w") as out:
            json.dump(new_config, out)
    return path, model


def randomize(model) -> None:
    """Wide weights: at the usual 0.02 a wrong mask or position hides below any tolerance."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if parameter.dim() == 1 else 0.2 * drawn)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name:
                tensor.copy_(0.2 * torch.rand(tensor.shape, generator=generator))
            elif name.endswith("_proj.bias"):
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))


def write_tokenizer(path: str, size: int) -> None:
    """One word a token: <pad> 0, <eos> 1, <mask> 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<mask>", "<unk>"] + [f"w{i}" for i in range(4, size)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>", unk_token="<unk>"
    ).save_pretrained(path)


def _dream(saved, config):
    new = {key: config[key] for key in _COMMON} | dict(
        architectures=["DreamModel"], model_type="Dream", mask_token_id=2, rope_theta=5000.0, use_sliding_window=False
    )
    return saved, new


_COMMON = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "max_position_embeddings rms_norm_eps tie_word_embeddings pad_token_id eos_token_id"
).split()


def _llada(saved, config):
    names = {
        "model.embed_tokens.weight": "model.transformer.wte.weight",
        "model.norm.weight": "model.transformer.ln_f.weight",
        "lm_head.weight": "model.transformer.ff_out.weight",
    }
    inner = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    for layer in range(config["num_hidden_layers"]):
        for theirs, new in inner.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"model.transformer.blocks.{layer}.{new}.weight"
    new = dict(
        architectures=["LLaDAModelLM"],
        model_type="llada",
        d_model=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        mlp_hidden_size=config["intermediate_size"],
        mlp_ratio=4,
        vocab_size=config["vocab_size"],
        embedding_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope=True,
        rope_theta=5000.0,
        rope_full_precision=True,
        activation_type="silu",
        block_type="llama",
        layer_norm_type="rms",
        layer_norm_with_affine=True,
        include_bias=False,
        include_qkv_bias=False,
        weight_tying=False,
        alibi=False,
        mask_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return {names[key]: value for key, value in saved.items()}, new


def _llada_moe(saved, config):
    new = {key: config[key] for key in _COMMON if key != "intermediate_size"} | dict(
        architectures=["LLaDAMoEModelLM"],
        model_type="llada",
        dense_intermediate_size=config["intermediate_size"],
        expert_intermediate_size=config["moe_intermediate_size"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_layer_freq=[1] * config["num_hidden_layers"],
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        norm_topk_prob=None,
        qk_layernorm=True,
        shared_expert_intermediate_size=None,
        routed_scaling_factor=1,
        rope_theta=5000.0,
        partial_rotary_factor=1,
        mask_token_id=2,
    )
    return saved, new


def _llada2(saved, config):
    out = {}
    for key, value in saved.items():
        key = key.replace("embed_tokens", "word_embeddings").replace("e_score_correction_bias", "expert_bias")
        for theirs, new in (("o_proj", "dense"), ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")):
            key = key.replace(f"self_attn.{theirs}", f"attention.{new}")
        out[key] = value
    for layer in range(config["num_hidden_layers"]):
        parts = [out.pop(f"model.layers.{layer}.self_attn.{x}_proj.weight") for x in "qkv"]
        out[f"model.layers.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
    new = {key: config[key] for key in _COMMON} | dict(
        architectures=["LLaDA2MoeModelLM"],
        model_type="llada2_moe",
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        use_qk_norm=True,
        use_bias=False,
        use_qkv_bias=False,
        rope_theta=5000.0,
        rope_scaling=None,
        partial_rotary_factor=0.5,
        sliding_window=4096,
        use_sliding_window=False,
        score_function="sigmoid",
        router_dtype="fp32",
        moe_router_enable_expert_bias=True,
    )
    return out, new


def _llada2_merged(saved, config):
    out, new = _llada2(saved, config)
    for layer in range(1, config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts."
        for x in ("gate_proj", "up_proj", "down_proj"):
            out[experts + x] = torch.stack([out.pop(f"{experts}{e}.{x}.weight") for e in range(16)])
    return out, new | dict(model_type="llada2_moe_veomni")


def _nemotron(saved, config):
    rename = lambda key: key.replace("model.", "encoder.", 1).replace("lm_head", "diffusion_head")
    new = {key: config[key] for key in [*_COMMON, "head_dim", "rope_parameters"]} | dict(
        architectures=["NemotronLabsDiffusionModel"],
        model_type="nemotron_labs_diffusion",
        attention_bias=False,
        mlp_bias=False,
        sliding_window=None,
        mask_token_id=2,
        dlm_paradigm="block_diff",
        block_size=4,
        attn_implementation="sdpa",
    )
    return {rename(key): value for key, value in saved.items()}, new


RENAME = {
    "dream": _dream,
    "llada": _llada,
    "llada_moe": _llada_moe,
    "llada2": _llada2,
    "llada2 merged": _llada2_merged,
    "nemotron": _nemotron,
}
