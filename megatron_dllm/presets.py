"""Named model shapes for `--model-preset`: defaults for Megatron's flags, each number still overridable by its flag."""

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

PRESETS: dict[str, dict] = {
    # A debug model that trains in seconds on a laptop; divisible by TP 4 and PP 4.
    "tiny": _TINY,
    "tiny-moe": _TINY
    | dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=192, moe_token_dispatcher_type="alltoall"),
}


def get_preset(name: str) -> dict:
    """Flag defaults of a preset; ValueError naming the known ones otherwise."""
    if name not in PRESETS:
        raise ValueError(f"unknown --model-preset {name!r}: choose one of {', '.join(sorted(PRESETS))}.")
    return PRESETS[name]
