"""Named models for `--model-preset`: defaults for Megatron's flags, each of them still overridable by its flag.

A released model is its family and the values of its config.json, which the family turns into flags. So a preset and the
model's own folder (`--hf-model`) say the same, and here is nothing to keep in step. A preset gives the shape; the
weights come from a folder, whose config.json counts where copies of a model differ. The mask token is the tokenizer's,
else the family's.

Sources, beside the configuration classes: LLaDA (arXiv:2502.09992), LLaDA2.0 (arXiv:2512.15745), Dream
(arXiv:2508.15487), Fast-dLLM v2 (arXiv:2509.26328), Qwen3 (arXiv:2505.09388), SmolLM2 (arXiv:2502.02737), and the model
cards of LLaDA-MoE-7B-A1B, of Nemotron-Labs-Diffusion and of DiffusionGemma 26B-A4B.
"""

from dataclasses import dataclass

from megatron_dllm.conversion.defaults import config_defaults
from megatron_dllm.models import get_family


@dataclass(frozen=True)
class Released:
    """family: its name; config: the keys of config.json that say something about the network."""

    family: str
    config: dict


_TINY = dict(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
    kv_channels=16,
    qk_layernorm=True,
    make_vocab_size_divisible_by=32,
)


def _llada2(layers: int, hidden: int, heads: int, dense: int, expert: int) -> Released:
    return Released(
        "llada2",
        dict(
            vocab_size=157184,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=dense,
            first_k_dense_replace=1,
            moe_intermediate_size=expert,
            num_experts=256,
            num_experts_per_tok=8,
            num_shared_experts=1,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
            use_bias=False,
            partial_rotary_factor=0.5,
            rope_theta=600000.0,
            rms_norm_eps=1e-6,
            max_position_embeddings=16384,
        ),
    )


def _nemotron(layers: int, hidden: int, ffn: int, theta: float = 1e6) -> Released:
    """Copies of the 8B's configuration differ in yarn's factor; 16 is the configuration class's own."""
    return Released(
        "nemotron",
        dict(
            vocab_size=131072,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=ffn,
            rms_norm_eps=1e-5,
            max_position_embeddings=262144,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=theta,
                factor=16.0,
                original_max_position_embeddings=16384,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            ),
        ),
    )


_QWEN25_7B = dict(
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    vocab_size=152064,
)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False, **more) -> Released:
    config = dict(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )
    return Released("qwen3_moe" if "num_experts" in more else "qwen3", config | more)


PRESETS: dict[str, dict | Released] = {
    # A debug model that trains in seconds on a laptop; divisible by TP 4 and PP 4.
    "tiny": _TINY,
    "tiny-moe": _TINY | dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=192),
    # The same of DiffusionGemma: every other layer sees everything.
    "tiny-diffusion-gemma": _TINY
    | dict(
        dllm_architecture="diffusion_gemma",
        untie_embeddings_and_output_weights=False,
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        dllm_full_attention_layers=[1, 3],
        dllm_window=32,
        dllm_full_kv_channels=32,
        dllm_full_query_groups=2,
        dllm_full_rotary_base=1e6,
        dllm_full_rotary_percent=0.25,
        dllm_logit_softcap=30.0,
        dllm_block_size=16,
    ),
    # The text part of DiffusionGemma 26B-A4B.
    "diffusion-gemma-26b-a4b": Released(
        "diffusion_gemma",
        dict(
            canvas_length=256,
            text_config=dict(
                vocab_size=262144,
                hidden_size=2816,
                num_hidden_layers=30,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=2,
                intermediate_size=2112,
                num_experts=128,
                top_k_experts=8,
                moe_intermediate_size=704,
                sliding_window=1024,
                rms_norm_eps=1e-6,
                max_position_embeddings=262144,
            ),
        ),
    ),
    "llada-8b": Released(
        "llada",
        dict(
            vocab_size=126464,
            embedding_size=126464,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            mlp_hidden_size=12288,
            max_sequence_length=4096,
            rms_norm_eps=1e-5,
            rope=True,
            rope_theta=500000.0,
            block_type="llama",
            activation_type="silu",
            layer_norm_type="rms",
            include_bias=False,
        ),
    ),
    "llada-moe-7b": Released(
        "llada_moe",
        dict(
            vocab_size=157184,
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
            dense_intermediate_size=8192,  # of no layer
            expert_intermediate_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
            rms_norm_eps=1e-5,
            rope_theta=50000.0,
            max_position_embeddings=8192,
        ),
    ),
    "llada2-mini": _llada2(layers=20, hidden=2048, heads=16, dense=5120, expert=512),
    "llada2-flash": _llada2(layers=32, hidden=4096, heads=32, dense=9216, expert=1024),
    "nemotron-labs-diffusion-3b": _nemotron(layers=26, hidden=3072, ffn=9216),
    "nemotron-labs-diffusion-8b": _nemotron(layers=34, hidden=4096, ffn=14336),
    "nemotron-labs-diffusion-14b": _nemotron(layers=40, hidden=5120, ffn=16384, theta=1e9),
    "dream-7b": Released("dream", dict(_QWEN25_7B, max_position_embeddings=131072)),
    "fast-dllm-v2-7b": Released("fast_dllm_v2", dict(_QWEN25_7B, max_position_embeddings=32768)),
    "qwen3-0.6b": _qwen3(layers=28, hidden=1024, heads=16, ffn=3072, tied=True),
    "qwen3-4b": _qwen3(layers=36, hidden=2560, heads=32, ffn=9728, tied=True),
    "qwen3-8b": _qwen3(layers=36, hidden=4096, heads=32, ffn=12288),
    "qwen3-30b-a3b": _qwen3(
        layers=48,
        hidden=2048,
        heads=32,
        ffn=6144,  # of no layer
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "smollm2-135m": Released(
        "llama",
        dict(
            vocab_size=49152,
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=100000.0),
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
}


def get_preset(name: str) -> dict:
    """Flag defaults of a preset; ValueError naming the known ones otherwise."""
    if name not in PRESETS:
        raise ValueError(f"unknown --model-preset {name!r}: choose one of {', '.join(sorted(PRESETS))}.")
    preset = PRESETS[name]
    return preset if isinstance(preset, dict) else config_defaults(preset.config, get_family(preset.family))
