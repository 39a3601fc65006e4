"""config.json <-> arguments: what is released is read exactly, what is not implemented is refused by name."""

import copy
import math
from argparse import Namespace

import pytest
import transformers

from megatron_dllm.conversion.flags import check_conversion
from megatron_dllm.models import FAMILIES, get_family, recognise
from megatron_dllm.models.hf import read_config
from megatron_dllm.models.rope import last_position, parse_scaling
from megatron_dllm.models.weights import megatron_shapes
from megatron_dllm.presets import PRESETS
from tests.hf_models import MODELS, SHAPE, make

COMMON = dict(hidden_act="silu", tie_word_embeddings=False, rms_norm_eps=1e-6, attention_dropout=0.0, use_cache=True)
YARN = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()


def sizes(*values):
    return dict(zip(SIZES, values, strict=True))


LLADA_8B = dict(
    architectures=["LLaDAModelLM"],
    model_type="llada",
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    mlp_hidden_size=12288,
    mlp_ratio=4,
    vocab_size=126464,
    embedding_size=126464,
    max_sequence_length=4096,
    rms_norm_eps=1e-5,
    rope=True,
    rope_theta=500000.0,
    rope_full_precision=True,
    activation_type="silu",
    alibi=False,
    alibi_bias_max=8.0,
    attention_dropout=0.0,
    attention_layer_norm=False,
    attention_layer_norm_with_affine=True,
    bias_for_layer_norm=False,
    block_group_size=1,
    block_type="llama",
    embedding_dropout=0.0,
    flash_attention=False,
    include_bias=False,
    include_qkv_bias=False,
    init_device="meta",
    init_fn="mitchell",
    init_std=0.02,
    input_emb_norm=False,
    layer_norm_type="rms",
    layer_norm_with_affine=True,
    multi_query_attention=None,
    precision="amp_bf16",
    residual_dropout=0.0,
    scale_logits=False,
    weight_tying=False,
    mask_token_id=126336,
    eos_token_id=126081,
    pad_token_id=126081,
)
LLADA_MOE = dict(
    COMMON,
    architectures=["LLaDAMoEModelLM"],
    model_type="llada",
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=16,
    dense_intermediate_size=8192,
    expert_intermediate_size=1024,
    shared_expert_intermediate_size=None,
    num_experts=64,
    num_experts_per_tok=8,
    vocab_size=157184,
    max_position_embeddings=8192,
    moe_layer_freq=[1] * 16,
    moe_router_enable_expert_bias=False,
    moe_router_score_function="softmax",
    norm_topk_prob=None,
    qk_layernorm=True,
    clip_qkv=None,
    router_num_group=None,
    router_topk_group=None,
    routed_scaling_factor=1.0,
    rope_scaling=None,
    rope_theta=50000,
    partial_rotary_factor=1,
    attention_bias=False,
    router_aux_loss_coef=0.01,
)
LLADA2_MINI = dict(
    COMMON,
    **sizes(2048, 20, 16, 4, 5120, 157184),
    architectures=["LLaDA2MoeModelLM"],
    model_type="llada2_moe",
    head_dim=128,
    moe_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
    num_shared_experts=1,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    router_dtype="fp32",
    rope_theta=600000,
    rope_scaling=None,
    partial_rotary_factor=0.5,
    rotary_dim=64,
    max_position_embeddings=32768,
    use_bias=False,
    use_qkv_bias=False,
    use_qk_norm=True,
    use_rmsnorm=True,
    sliding_window=4096,
    use_sliding_window=False,
    norm_head=False,
    norm_softmax=False,
    num_nextn_predict_layers=0,
)
NEMOTRON_8B = dict(
    COMMON,
    **sizes(4096, 34, 32, 8, 14336, 131072),
    architectures=["NemotronLabsDiffusionModel"],
    model_type="nemotron_labs_diffusion",
    head_dim=128,
    rope_parameters=YARN,
    max_position_embeddings=262144,
    sliding_window=None,
    attention_bias=False,
    mlp_bias=False,
    mask_token_id=100,
)
DREAM_7B = dict(
    COMMON,
    **sizes(3584, 28, 28, 4, 18944, 152064),
    architectures=["DreamModel"],
    model_type="Dream",
    rope_theta=1e6,
    rope_scaling=None,
    max_position_embeddings=131072,
    max_window_layers=28,
    sliding_window=None,
    use_sliding_window=False,
    use_mrope=False,
    mask_token_id=151666,
)
QWEN3_8B = dict(
    COMMON,
    **sizes(4096, 36, 32, 8, 12288, 151936),
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    head_dim=128,
    attention_bias=False,
    max_position_embeddings=40960,
    max_window_layers=36,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    use_sliding_window=False,
)
QWEN3_30B = QWEN3_8B | dict(
    sizes(2048, 48, 32, 4, 6144, 151936),
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    decoder_sparse_step=1,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
    max_window_layers=48,
)
DFLASH_8B = QWEN3_8B | dict(
    architectures=["DFlashDraftModel"],
    auto_map={"AutoModel": "dflash.DFlashDraftModel"},
    block_size=16,
    dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]),
    layer_types=["full_attention"] * 5,
    max_window_layers=5,
    num_hidden_layers=5,
    num_target_layers=36,
)
SMOLLM2 = COMMON | dict(
    sizes(576, 30, 9, 3, 1536, 49152),
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    is_llama_config=True,
    rope_interleaved=False,
    rope_scaling=None,
    rope_theta=100000,
    pretraining_tp=1,
    max_position_embeddings=8192,
    torch_dtype="bfloat16",
    initializer_range=0.041666666666666664,
    **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
)
# name -> (config.json, family, parameters in billions, some of what it means)
RELEASED = {
    "LLaDA-8B": (LLADA_8B, "llada", 8.02, dict(rotary_base=500000, kv_channels=128, ffn_hidden_size=12288)),
    "LLaDA-MoE-7B-A1B": (LLADA_MOE, "llada_moe", 7.36, dict(moe_router_pre_softmax=True, moe_ffn_hidden_size=1024)),
    "LLaDA2.0-mini": (
        LLADA2_MINI,
        "llada2",
        16.26,
        dict(
            rotary_base=600000,
            rotary_percent=0.5,
            moe_layer_freq=[0] + [1] * 19,
            moe_router_num_groups=8,
            moe_router_group_topk=4,
            moe_router_topk=8,
            moe_router_topk_scaling_factor=2.5,
            moe_shared_expert_intermediate_size=512,
        ),
    ),
    "Nemotron-Labs-Diffusion-8B": (NEMOTRON_8B, "nemotron", 8.49, dict(rotary_base=1000000, num_query_groups=8)),
    "Nemotron-Labs-Diffusion-14B": (
        NEMOTRON_8B | sizes(5120, 40, 32, 8, 16384, 131072) | dict(rope_parameters=YARN | dict(rope_theta=1e9)),
        "nemotron",
        13.51,
        dict(rotary_base=1000000000, kv_channels=128),
    ),
    "Dream-7B": (DREAM_7B, "dream", 7.62, dict(add_qkv_bias=True, rotary_base=1000000, num_query_groups=4)),
    "Qwen3-8B": (QWEN3_8B, "qwen3", 8.19, dict(qk_layernorm=True, untie_embeddings_and_output_weights=True)),
    "Qwen3-30B-A3B": (QWEN3_30B, "qwen3_moe", 30.53, dict(moe_router_topk=8, moe_router_pre_softmax=False)),
    "DFlash-Qwen3-8B": (
        DFLASH_8B,
        "dflash_draft",
        1.049,
        dict(
            dflash_target_layers=[1, 9, 17, 25, 33],
            dflash_num_target_layers=36,
            dllm_block_size=16,
            dllm_mask_token_id=151669,
            qk_layernorm=True,
        ),
    ),
    "SmolLM2-135M": (SMOLLM2, "llama", 0.1345, dict(rotary_base=100000, untie_embeddings_and_output_weights=False)),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_configuration(name):
    config, family_name, billions, wanted = RELEASED[name]
    before = copy.deepcopy(config)
    family = recognise(config)
    arguments = family.read(config)
    assert config == before, "reading must not write into what it reads"
    assert family.name == family_name
    assert {key: arguments[key] for key in wanted} == wanted
    count = sum(math.prod(shape) for shape in megatron_shapes(Namespace(**arguments)).values())
    assert count / 1e9 == pytest.approx(billions, rel=0.002)
    assert family.read(family.write(Namespace(**arguments))) == arguments


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(tmp_path, name):
    config = read_config(make(name, tmp_path)[0])
    family = recognise(config)
    arguments = family.read(config)
    written = family.write(Namespace(**arguments))
    assert recognise(written) is family and family.read(written) == arguments
    stock = get_family(family.stock or family.name)
    as_stock = stock.write(Namespace(**arguments))
    assert stock.read(as_stock) == arguments, "the equal family of transformers means the same"
    getattr(transformers, stock.transformers_config)(**as_stock)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_the_mask_token_that_exports_write(name):
    config = next((config for config, family, *_ in RELEASED.values() if family == name), None)
    if config is None:
        config = dict(model_type=get_family(name).types[0], num_nextn_predict_layers=0)
        config = config | (DREAM_7B if name == "fast_dllm_v2" else {})
        config = config | (PRESETS["diffusion-gemma-26b-a4b"].config if name == "diffusion_gemma" else {})
        config.pop("use_mrope", None)
    assert get_family(name).read(config | dict(mask_token_id=5)) == get_family(name).read(config)


def changed(base, **changes):
    config = {key: value for key, value in (copy.deepcopy(base) | changes).items() if value is not ...}
    return config


# (what is changed, how) -> the sentence must name it
REFUSED = [
    ("SmolLM2-135M", dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "'dynamic'"),
    (
        "SmolLM2-135M",
        dict(rope_scaling=dict(rope_type="longrope", short_factor=[1.0] * 32, long_factor=[2.0] * 32)),
        "'longrope'",
    ),
    ("SmolLM2-135M", dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention"),
    ("SmolLM2-135M", dict(rope_scaling=dict(rope_type="yarn", factor=0.0)), "factor"),
    ("SmolLM2-135M", dict(rope_scaling=dict(rope_type="linear")), "factor"),
    ("SmolLM2-135M", dict(rope_scaling=dict(rope_type="linear", factor=2.0, mrope_section=[1])), "mrope_section"),
    ("SmolLM2-135M", dict(rope_interleaved=True), "rope_interleaved"),
    ("SmolLM2-135M", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("SmolLM2-135M", dict(attention_bias=True), "attention_bias"),
    ("SmolLM2-135M", dict(mlp_bias=True), "mlp_bias"),
    ("SmolLM2-135M", dict(hidden_act="gelu"), "hidden_act"),
    ("SmolLM2-135M", dict(attn_logit_softcapping=50), "attn_logit_softcapping"),
    ("SmolLM2-135M", dict(quantization_config=dict(quant_method="fp8")), "quantization_config"),
    ("SmolLM2-135M", dict(num_key_value_heads=2), "num_key_value_heads"),
    ("SmolLM2-135M", dict(hidden_size="576"), "hidden_size"),
    ("SmolLM2-135M", dict(num_attention_heads=0), "transformers does not accept"),
    ("SmolLM2-135M", dict(rope_theta=float("inf")), "rope_theta"),
    ("SmolLM2-135M", dict(rope_theta=[1]), "rope_theta"),
    ("Qwen3-8B", dict(use_sliding_window=True), "use_sliding_window"),
    ("Qwen3-8B", dict(layer_types=["sliding_attention"] + ["full_attention"] * 35), "sliding_attention"),
    ("Qwen3-8B", dict(attention_bias=True), "attention_bias"),
    ("Qwen3-30B-A3B", dict(decoder_sparse_step=2), "decoder_sparse_step"),
    ("Qwen3-30B-A3B", dict(mlp_only_layers=[0]), "mlp_only_layers"),
    ("LLaDA-8B", dict(alibi=True), "alibi"),
    ("LLaDA-8B", dict(rope=...), "rope = False"),
    ("LLaDA-8B", dict(include_bias=...), "include_bias"),
    ("LLaDA-8B", dict(block_type="sequential"), "block_type"),
    ("LLaDA-8B", dict(layer_norm_type="default"), "layer_norm_type"),
    ("LLaDA-8B", dict(multi_query_attention=True), "multi_query_attention"),
    ("LLaDA-8B", dict(rope_theta=...), "lacks rope_theta"),
    ("LLaDA-8B", dict(d_model=...), "lacks d_model"),
    ("LLaDA-8B", dict(d_model="4096"), "d_model"),
    ("LLaDA-8B", dict(d_model=4095), "n_heads"),
    ("LLaDA-8B", dict(n_layers=0), "n_layers"),
    ("LLaDA-8B", dict(n_heads=True), "n_heads"),
    ("LLaDA-8B", dict(vocab_size=-1), "vocab_size"),
    ("LLaDA-8B", dict(embedding_size=1.5), "embedding_size"),
    ("LLaDA-8B", dict(rms_norm_eps="small"), "rms_norm_eps"),
    ("LLaDA-MoE-7B-A1B", dict(clip_qkv=8.0), "clip_qkv"),
    ("LLaDA-MoE-7B-A1B", dict(moe_router_enable_expert_bias=True), "moe_router_enable_expert_bias"),
    ("LLaDA-MoE-7B-A1B", dict(moe_layer_freq=[0] + [1] * 15), "moe_layer_freq"),
    ("LLaDA-MoE-7B-A1B", dict(moe_layer_freq=2), "moe_layer_freq"),
    ("LLaDA-MoE-7B-A1B", dict(shared_expert_intermediate_size=1024), "shared_expert_intermediate_size"),
    ("LLaDA-MoE-7B-A1B", dict(qk_layernorm=False), "qk_layernorm"),
    ("LLaDA-MoE-7B-A1B", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("LLaDA2.0-mini", dict(use_bias=True), "use_bias"),
    ("LLaDA2.0-mini", dict(use_bias=...), "use_bias"),
    ("LLaDA2.0-mini", dict(use_qkv_bias=True), "use_qkv_bias"),
    ("LLaDA2.0-mini", dict(norm_head=True), "norm_head"),
    ("LLaDA2.0-mini", dict(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
    ("LLaDA2.0-mini", dict(topk_group=2), "two experts a group"),
    ("LLaDA2.0-mini", dict(topk_group=0), "topk_group"),
    ("LLaDA2.0-mini", dict(n_group=...), "lacks n_group"),
    ("LLaDA2.0-mini", dict(n_group=7), "n_group"),
    ("LLaDA2.0-mini", dict(norm_topk_prob=False), "norm_topk_prob"),
    ("LLaDA2.0-mini", dict(score_function="softmax"), "score_function"),
    ("LLaDA2.0-mini", dict(first_k_dense_replace=20), "first_k_dense_replace"),
    ("LLaDA2.0-mini", dict(num_shared_experts="1"), "num_shared_experts"),
    ("LLaDA2.0-mini", dict(moe_shared_expert_intermediate_size=100), "moe_shared_expert_intermediate_size"),
    ("LLaDA2.0-mini", dict(use_sliding_window=True), "use_sliding_window"),
    ("LLaDA2.0-mini", dict(rope_scaling=dict(type="yarn", factor=4.0)), "'yarn'"),
    ("LLaDA2.0-mini", dict(partial_rotary_factor=1.5), "partial_rotary_factor"),
    ("Dream-7B", dict(use_mrope=True), "use_mrope"),
    ("Dream-7B", dict(use_sliding_window=True), "use_sliding_window"),
    ("DFlash-Qwen3-8B", dict(architectures=["DFlash2DraftModel"], conv_kernel_size=3), "conv_kernel_size"),
    ("DFlash-Qwen3-8B", dict(dflash_config=dict(mask_token_id=5, conv_group_size=64)), "conv_group_size"),
    ("DFlash-Qwen3-8B", dict(dflash_config=dict(mask_token_id=5, output_multiplier=0.5)), "output_multiplier"),
    ("DFlash-Qwen3-8B", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ("DFlash-Qwen3-8B", dict(dflash_config=...), "mask_token_id = None"),
    ("DFlash-Qwen3-8B", dict(dflash_config=[1]), "dflash_config = [1]"),
    ("DFlash-Qwen3-8B", dict(dflash_config=dict(mask_token_id=5, target_layer_ids=[1, 36])), "target's 36"),
    ("DFlash-Qwen3-8B", dict(dflash_config=dict(mask_token_id=5, target_layer_ids=[])), "target_layer_ids"),
    ("DFlash-Qwen3-8B", dict(dflash_config=dict(mask_token_id=5, target_layer_ids=3)), "wrong type"),
    ("DFlash-Qwen3-8B", dict(num_target_layers=...), "lacks num_target_layers"),
    ("DFlash-Qwen3-8B", dict(block_size=...), "lacks block_size"),
    ("DFlash-Qwen3-8B", dict(block_size=1), "block_size = 1"),
    ("DFlash-Qwen3-8B", dict(layer_types=["sliding_attention"] * 4 + ["full_attention"]), "sliding_attention"),
    ("DFlash-Qwen3-8B", dict(is_causal=True), "is_causal"),
    ("DFlash-Qwen3-8B", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("Nemotron-Labs-Diffusion-8B", dict(sliding_window=4096), "sliding_window"),
    ("Nemotron-Labs-Diffusion-8B", dict(rope_parameters=...), "lacks rope_theta"),
    (
        "Nemotron-Labs-Diffusion-8B",
        dict(rope_parameters={key: YARN[key] for key in YARN if key != "original_max_position_embeddings"}),
        "without original_max_position_embeddings",
    ),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_not_implemented_is_refused_by_name(name, changes, named):
    config = changed(RELEASED[name][0], **changes)
    with pytest.raises(ValueError) as error:
        recognise(config).read(config)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ("SmolLM2-135M", "Qwen3-8B", "Qwen3-30B-A3B"))
def test_both_notations_mean_the_same(name):
    base = changed(RELEASED[name][0], rope_theta=..., rope_scaling=..., torch_dtype=...)
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048)
    family = recognise(base)
    old = base | dict(rope_theta=5e5, rope_scaling=dict(scaling, rope_type="llama3"), torch_dtype="bfloat16")
    new = base | dict(rope_parameters=dict(scaling, rope_type="llama3", rope_theta=5e5), dtype="bfloat16")
    assert family.read(old) == family.read(new)
    assert family.read(old)["dllm_rope_scaling"] == dict(scaling, rope_type="llama3")
    oldest = old | dict(rope_scaling=dict(type="linear", factor=2.0))
    assert family.read(oldest)["dllm_rope_scaling"] == dict(rope_type="linear", factor=2.0)


@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if not family.has_own_code and family.text_config is None]
)
def test_what_is_missing_is_the_class_s_default(name):
    family = get_family(name)
    defaults = getattr(transformers, family.transformers_config)()
    arguments = family.read(dict(model_type=family.types[0], num_nextn_predict_layers=0))  # 1 by default, refused
    assert arguments["untie_embeddings_and_output_weights"] is not defaults.tie_word_embeddings
    assert arguments["hidden_size"] == defaults.hidden_size
    assert arguments["rotary_base"] == defaults.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("config", "family"),
    (
        (dict(architectures="LlamaForCausalLM"), "llama"),
        (dict(architectures=["LLaDAModelLM"], model_type="llada"), "llada"),
        (dict(architectures=["LLaDAMoEModelLM"], model_type="llada"), "llada_moe"),
        (dict(architectures=None, model_type="llada"), "llada"),
        (dict(architectures=["A2DQwen3LMHeadModel"], model_type="a2d-qwen3"), "qwen3"),
        (dict(architectures=["DFlashDraftModel"], model_type="qwen3"), "dflash_draft"),
    ),
)
def test_recognised(config, family):
    assert recognise(config).name == family


@pytest.mark.parametrize("config", ({}, dict(model_type="gemma"), dict(architectures=[["LlamaForCausalLM"]])))
def test_not_recognised(config):
    with pytest.raises(ValueError, match="which is none of llama"):
        recognise(config)


# arguments of a run -> families that cannot say so, and what they name
NOT_EXPRESSED = [
    ("Qwen3-8B", dict(qk_layernorm=False), "qwen3", "--qk-layernorm"),
    ("Qwen3-8B", dict(), "llama", "--qk-layernorm"),
    ("Qwen3-8B", dict(), "dflash_draft", "this is a whole model"),
    ("DFlash-Qwen3-8B", dict(), "qwen3", "this is a draft"),
    ("Dream-7B", dict(), "qwen3", "--"),
    ("SmolLM2-135M", dict(add_bias_linear=True), "llama", "--add-bias-linear"),
    ("SmolLM2-135M", dict(normalization="LayerNorm"), "llama", "--normalization"),
    ("SmolLM2-135M", dict(no_rope_freq=4), "llama", "--no-rope-freq"),
    ("SmolLM2-135M", dict(rotary_percent=0.5), "llama", "--rotary-percent"),
    ("SmolLM2-135M", dict(), "qwen3_moe", "experts"),
    ("SmolLM2-135M", dict(kv_channels=128), "llada", "--kv-channels"),
    ("Nemotron-Labs-Diffusion-8B", dict(kv_channels=128), "llada", "--dllm-rope-scaling"),
    ("Qwen3-30B-A3B", dict(moe_layer_freq=[0] + [1] * 47), "qwen3_moe", "--moe-layer-freq"),
    ("Qwen3-30B-A3B", dict(moe_shared_expert_intermediate_size=768), "qwen3_moe", "--moe-shared-expert"),
    ("LLaDA2.0-mini", dict(moe_router_topk=4), "llada2", "--moe-router-topk"),
    ("LLaDA2.0-mini", dict(moe_shared_expert_intermediate_size=500), "llada2", "--moe-shared-expert"),
    ("LLaDA2.0-mini", dict(moe_layer_freq=[1, 0] * 10), "llada2", "layers without experts must come first"),
    ("LLaDA2.0-mini", dict(moe_layer_freq=[0] * 20), "llada2", "layers without experts"),
]


@pytest.mark.parametrize(("name", "changes", "family", "named"), NOT_EXPRESSED, ids=lambda x: str(x)[:40])
def test_what_a_family_cannot_say_is_refused(name, changes, family, named):
    config = RELEASED[name][0]
    args = Namespace(**recognise(config).read(config) | changes)
    with pytest.raises(ValueError) as error:
        get_family(family).write(args)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_experts_of_the_dense_width():
    """Megatron's experts are as wide as its MLPs unless --moe-ffn-hidden-size says otherwise."""
    args = Namespace(**recognise(QWEN3_30B).read(QWEN3_30B) | dict(moe_ffn_hidden_size=None))
    assert get_family("qwen3_moe").write(args)["moe_intermediate_size"] == args.ffn_hidden_size
    assert args.moe_ffn_hidden_size is None


def test_no_scaling_of_the_chosen_experts_is_a_factor_of_one():
    args = Namespace(**recognise(LLADA2_MINI).read(LLADA2_MINI) | dict(moe_router_topk_scaling_factor=None))
    assert get_family("llada2").write(args)["routed_scaling_factor"] == 1.0


@pytest.mark.parametrize(
    ("text", "named"),
    (
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"rope_type": "dynamic"}', "choose one of linear, llama3, yarn"),
        ('{"rope_type": "yarn", "factor": 16}', "without original_max_position_embeddings"),
        ('{"rope_type": "linear", "factor": -2}', "factor = -2"),
        ('{"rope_type": "linear", "factor": "2"}', "factor = '2'"),
        ('{"rope_type": "linear", "factor": Infinity}', "factor = inf"),
        ('{"rope_type": "linear", "fcator": 2, "factor": 2}', "fcator"),
        ('{"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "beta_fast": "x"}', "transformers"),
    ),
)
def test_bad_scaling_on_the_command_line(text, named):
    with pytest.raises(ValueError) as error:
        parse_scaling(text)
    assert named in str(error.value) and "--dllm-rope-scaling" in str(error.value)


def test_sequences_beyond_the_first_window_of_query_scaling_are_refused():
    arguments = get_family("nemotron").read(NEMOTRON_8B)
    assert last_position(arguments["dllm_rope_scaling"]) == 16384
    assert last_position(arguments["dllm_rope_scaling"] | dict(llama_4_scaling_beta=0.0)) is None
    run = dict(dllm_rope_scaling=arguments["dllm_rope_scaling"], hf_model=None, init_from_hf=False)
    check_conversion(Namespace(seq_length=16384, save_hf_interval=None, **run), set())
    with pytest.raises(ValueError, match="--seq-length 16385.*use at most 16384"):
        check_conversion(Namespace(seq_length=16385, save_hf_interval=None, **run), set())


@pytest.mark.parametrize("name", ("ministral3", "nemotron"))
def test_ministral_needs_to_know_how_queries_are_scaled(name):
    """Its code reads both keys in any case: a folder without them would not run."""
    config = transformers.LlamaConfig(**(SHAPE | MODELS["llama llama3"][1])).to_dict()
    args = Namespace(**FAMILIES["llama"].read(config))
    with pytest.raises(ValueError, match="does not say llama_4_scaling_beta, which their code needs"):
        FAMILIES[name].write(args)
