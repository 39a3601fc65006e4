"""Rotary frequencies, plain or scaled. Scaled ones (linear, llama3, yarn) are computed by transformers, which released
checkpoints follow to the bit."""

import json
import math

import torch

# Keys that a type must have, and may have. transformers takes what is missing from the model's length.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {
    "yarn": (
        "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate llama_4_scaling_beta "
        "max_position_embeddings"
    ).split()
}
SCALINGS = tuple(_NEEDED)


def frequencies(
    head_dim: int, base: float, percent: float = 1.0, scaling: dict | None = None
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotated part / 2], fp32, and the factor on cosine and sine.

    scaling: transformers' `rope_parameters` without base and partial factor. Also on the meta device, where a model
    is built that only tells shapes, these are numbers.
    """
    with torch.device("cpu"):
        return _frequencies(head_dim, base, percent, scaling)


def angles(position_ids_BQ: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """[Q, B, 1, 2 x frequencies] of the positions, fp32, as Megatron's attention wants them."""
    half = position_ids_BQ.t()[..., None].float() * inverse
    return torch.cat((half, half), dim=-1)[:, :, None]


def _frequencies(head_dim: int, base: float, percent: float, scaling: dict | None) -> tuple[torch.Tensor, float]:
    rotary_dim = int(head_dim * percent)
    if scaling is None:
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / (base**exponent), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longest = int(scaling.get("original_max_position_embeddings", 4096) * scaling.get("factor", 1.0))
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=longest,
        rope_parameters=scaling | dict(rope_theta=float(base), partial_rotary_factor=percent),
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    return inverse.float(), float(factor)


def parse_scaling(text: str) -> dict:
    """The value of --dllm-rope-scaling. Raises ValueError (one sentence)."""
    try:
        scaling = json.loads(text)
        kind = scaling.get("rope_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--dllm-rope-scaling {text!r} is not a JSON object: {error}.") from error
    if kind not in SCALINGS:
        raise ValueError(f"--dllm-rope-scaling has rope_type {kind!r}: choose one of {', '.join(SCALINGS)}.")
    check_scaling(scaling, "--dllm-rope-scaling")
    return dict(sorted(scaling.items()))


def check_scaling(scaling: dict, where: str) -> None:
    """ValueError (one sentence) unless `scaling` is complete, all of it is known, and frequencies follow from it."""
    kind = scaling["rope_type"]
    what = f"{where} has rotary embeddings of the type {kind!r}"
    for key in _NEEDED[kind]:
        value = scaling.get(key)
        if value is None:
            raise ValueError(f"{what} without {key}: add it.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{what} with {key} = {value!r}: it must be a positive number.")
    if unknown := sorted(set(scaling) - {"rope_type", *_NEEDED[kind], *_OPTIONAL.get(kind, ())}):
        raise ValueError(f"{what} with {unknown[0]}, which is not implemented.")
    try:
        inverse, factor = frequencies(64, 10000.0, scaling=scaling)
    except Exception as error:  # whatever transformers makes of the optional values
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{what} that transformers does not accept: {reason}") from error
    if not (inverse.isfinite().all() and math.isfinite(factor)):
        raise ValueError(f"{what} whose frequencies are not finite: {scaling}.")


def last_position(scaling: dict | None) -> int | None:
    """Positions from here on would need llama-4 query scaling, which is not implemented; None: there is no limit."""
    if scaling is None or not scaling.get("llama_4_scaling_beta"):
        return None
    return scaling["original_max_position_embeddings"]
