"""DiffusionGemma 26B-A4B (transformers: DiffusionGemmaForBlockDiffusion): an encoder and a canvas decoder that share
one stack. Of the released model the text part; its vision tower is carried along. The network is in gemma.py.

Layers are sliding and full ones, with heads of their own; full layers make values of the keys' projection. Experts are
[experts, rows, columns] in one tensor. The head is the embedding. Encoder and decoder have the same weights but for one
factor a layer.
"""

from dataclasses import dataclass

from megatron_dllm.models.entries import Entry, Heads, Only, Same, plain_number, positive
from megatron_dllm.models.family import Family
from megatron_dllm.models.weights import GEMMA, ExpertSlice, Interleaved, Stacked, Table

_SLIDING, _FULL = "sliding_attention", "full_attention"
_CAP = "final_logit_softcapping"


@dataclass
class _Layers(Entry):
    """Which layers are full, what of the sliding ones differs there, and the rotations of both."""

    def __post_init__(self):
        self.keys = ("layer_types", "per_layer_config", "sliding_window", "rope_parameters", _CAP)
        self.keys += ("global_head_dim", "num_global_key_value_heads")  # in place of per_layer_config
        self.arguments = tuple(
            "dllm_full_attention_layers dllm_window dllm_full_kv_channels dllm_full_query_groups rotary_base "
            "dllm_full_rotary_base dllm_full_rotary_percent dllm_logit_softcap".split()
        )

    def read(self, config):
        kinds = config.get("layer_types") or []
        if set(kinds) - {_SLIDING, _FULL} or len(kinds) != config.get("num_hidden_layers"):
            raise ValueError(
                f"config.json has layer_types = {kinds}: give {_SLIDING} or {_FULL} for each of its "
                f"{config.get('num_hidden_layers')} layers."
            )
        full = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
        own = {int(layer): dict(what) for layer, what in (config.get("per_layer_config") or {}).items()}
        shapes = [own.pop(layer, {}) for layer in full]
        known = {"head_dim", "num_key_value_heads"}
        if own or not full or any(shape != shapes[0] or set(shape) - known for shape in shapes):
            raise ValueError(
                "config.json gives layers shapes of their own (per_layer_config) other than one of all full layers: "
                "only that is implemented."
            )
        shape = {key: config.get(key) for key in ("head_dim", "num_key_value_heads")} | shapes[0]
        ropes = config.get("rope_parameters") or {}
        sliding, wide = ropes.get(_SLIDING) or {}, ropes.get(_FULL) or {}
        if sliding.get("rope_type") != "default" or wide.get("rope_type") != "proportional":
            raise ValueError(
                f"config.json has rope_parameters = {ropes}: only a default rotation of sliding layers and a "
                "proportional one of full layers are implemented."
            )
        return dict(
            dllm_full_attention_layers=full,
            dllm_window=positive(config, "sliding_window"),
            dllm_full_kv_channels=positive(shape, "head_dim"),
            dllm_full_query_groups=positive(shape, "num_key_value_heads"),
            rotary_base=plain_number(positive(sliding, "rope_theta", whole=False)),
            dllm_full_rotary_base=float(positive(wide, "rope_theta", whole=False)),
            dllm_full_rotary_percent=float(positive(wide, "partial_rotary_factor", whole=False)),
            dllm_logit_softcap=float(positive({_CAP: 30.0} | config, _CAP, whole=False)),
        )

    def write(self, args):
        full = set(args.dllm_full_attention_layers)
        shape = dict(head_dim=args.dllm_full_kv_channels, num_key_value_heads=args.dllm_full_query_groups)
        wide = dict(
            rope_type="proportional",
            rope_theta=float(args.dllm_full_rotary_base),
            partial_rotary_factor=args.dllm_full_rotary_percent,
        )
        return dict(
            layer_types=[_FULL if layer in full else _SLIDING for layer in range(args.num_layers)],
            per_layer_config={str(layer): shape for layer in sorted(full)},
            sliding_window=args.dllm_window,
            rope_parameters={_SLIDING: dict(rope_type="default", rope_theta=float(args.rotary_base)), _FULL: wide},
        ) | {_CAP: args.dllm_logit_softcap}


@dataclass
class _Canvas(Entry):
    """How many tokens a canvas has."""

    def __post_init__(self):
        self.keys, self.arguments = ("canvas_length",), ("dllm_block_size",)

    def read(self, config):
        return dict(dllm_block_size=positive({"canvas_length": 256} | config, "canvas_length"))

    def write(self, args):
        return dict(canvas_length=args.dllm_block_size)


class _Vision(Entry):
    """A tower of its own, or none."""

    keys = ("vision_config",)

    def read(self, config):
        return {}

    def write(self, args):
        return dict(vision_config=None)  # a reference's own replaces it


def _weights() -> Table:
    ours, theirs = "decoder.layers.{layer}.", "model.decoder.layers.{layer}."
    norms = dict(
        input_layernorm="input_layernorm",
        post_self_attn_layernorm="post_attention_layernorm",
        pre_mlp_layernorm="pre_feedforward_layernorm",
        post_dense_layernorm="post_feedforward_layernorm_1",
        pre_moe_layernorm="pre_feedforward_layernorm_2",
        post_moe_layernorm="post_feedforward_layernorm_2",
        post_mlp_layernorm="post_feedforward_layernorm",
    )
    expert, conditioning = ours + "moe.experts.local_experts.{expert}.", "model.decoder.self_conditioning."
    pair = lambda prefix: Stacked(prefix + "gate_proj.weight", prefix + "up_proj.weight")
    return {
        "embedding.word_embeddings.weight": "model.decoder.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",  # the same, where a folder stores it all the same
        "decoder.final_layernorm.weight": "model.decoder.norm.weight",
        "self_conditioning.pre_norm.weight": conditioning + "pre_norm.weight",
        "self_conditioning.mlp.linear_fc1.weight": pair(conditioning),
        "self_conditioning.mlp.linear_fc2.weight": conditioning + "down_proj.weight",
        **{f"{ours}{mine}.weight": f"{theirs}{name}.weight" for mine, name in norms.items()},
        **{f"{ours}self_attention.{x}_layernorm.weight": f"{theirs}self_attn.{x}_norm.weight" for x in "qk"},
        ours + "self_attention.linear_qkv.weight": Interleaved(*(f"{theirs}self_attn.{x}_proj.weight" for x in "qkv")),
        ours + "self_attention.linear_proj.weight": theirs + "self_attn.o_proj.weight",
        ours + "mlp.linear_fc1.weight": pair(theirs + "mlp."),
        ours + "mlp.linear_fc2.weight": theirs + "mlp.down_proj.weight",
        ours + "moe.router.weight": theirs + "router.proj.weight",
        ours + "moe.router.scale": theirs + "router.scale",
        ours + "moe.router.per_expert_scale": theirs + "router.per_expert_scale",
        expert + "linear_fc1.weight": ExpertSlice(theirs + "experts.gate_up_proj"),
        expert + "linear_fc2.weight": ExpertSlice(theirs + "experts.down_proj"),
        ours + "layer_scalar": theirs + "layer_scalar",
        ours + "encoder_layer_scalar": "model.encoder.language_model.layers.{layer}.layer_scalar",
    }


DIFFUSION_GEMMA = Family(
    name="diffusion_gemma",
    types=("diffusion_gemma",),
    architecture="DiffusionGemmaForBlockDiffusion",
    transformers_config="DiffusionGemmaTextConfig",
    text_config="text_config",
    entries=(
        Same("hidden_size", "hidden_size"),
        Same("intermediate_size", "ffn_hidden_size"),
        Same("num_hidden_layers", "num_layers"),
        Same("rms_norm_eps", "layernorm_epsilon", whole=False),
        Same("max_position_embeddings", "max_position_embeddings"),
        Same("num_experts", "num_experts"),
        Same("top_k_experts", "moe_router_topk"),
        Same("moe_intermediate_size", "moe_ffn_hidden_size"),
        Heads(),
        _Layers(),
        Only("hidden_activation", "gelu_pytorch_tanh"),
        Only("attention_bias", False),
        Only("use_bidirectional_attention", None, also=("vision",)),  # of images, which are not trained
        Only("tie_word_embeddings", True),
    ),
    outer=(_Canvas(), Only("tie_word_embeddings", True), _Vision()),
    weights=(_weights(),),
    arguments=dict(dllm_architecture=GEMMA, qk_layernorm=True, untie_embeddings_and_output_weights=False),
    mode="block_diffusion",
    suggested=dict(moe_router_dtype="fp32", moe_router_load_balancing_type="none"),
    harmless=tuple(
        "audio_config boi_token_id eoi_token_id image_token_id boa_token_id eoa_token_id audio_token_id "
        "video_token_id vision_soft_tokens_per_image".split()
    ),
    carried=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
)
