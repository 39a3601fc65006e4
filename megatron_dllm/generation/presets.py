"""Options that published models and methods are decoded with: `--preset`.

A value is the default of the released code, or what its model card or paper uses; `source` says which. Options that are
not listed keep our defaults. The number of new tokens is part of them because steps and speed depend on it; it may be
more than a small model has positions, and is then given with --max-new-tokens.
"""

from dataclasses import dataclass
from typing import Any

from megatron_dllm.generation.config import flag


@dataclass(frozen=True)
class Preset:
    """options: of a GenerationConfig, the sampler among them; source: where they are from."""

    options: dict[str, Any]
    source: str


def _preset(source: str, **options: Any) -> Preset:
    return Preset(options, source)


_LLADA2_1 = dict(sampler="llada2", max_post_steps=16, stop_at_eos=True)
_FAST_DLLM = dict(sampler="llada", gen_block_length=32, threshold=0.9)

PRESETS: dict[str, Preset] = {
    "llada": _preset(
        "LLaDA (arXiv:2502.09992), defaults of its generate.py: 128 tokens in one block of 128, a step for each",
        sampler="llada",
        max_new_tokens=128,
        steps=128,
        gen_block_length=128,
        remasking="low_confidence",
    ),
    "llada2": _preset(
        "LLaDA2.0 (arXiv:2512.15745), defaults of its generate: 32 steps for each block of the model's 32, cut at EOS",
        sampler="llada2",
        max_new_tokens=2048,
        steps_per_block=32,
        threshold=0.95,
        stop_at_eos=True,
    ),
    "llada2.1": _preset(
        "LLaDA2.1 (arXiv:2602.08676), defaults of its generate, the number of tokens and the threshold as LLaDA2.0",
        **_LLADA2_1,
        max_new_tokens=2048,
        threshold=0.95,
        editing_threshold=0.9,
    ),
    "llada2.1_speed": _preset(
        "LLaDA2.1's speed mode as NeMo AutoModel 0.7.0 presets it: writes early, then edits whatever it now prefers",
        **_LLADA2_1,
        max_new_tokens=128,
        threshold=0.5,
        editing_threshold=0.0,
    ),
    "nemotron": _preset(
        "Nemotron-Labs-Diffusion as NeMo AutoModel 0.7.0 presets it",
        sampler="nemotron",
        mode="diffusion",
        max_new_tokens=1024,
        gen_block_length=32,
        threshold=0.9,
        stop_at_eos=True,
    ),
    "nemotron_speculative": _preset(
        "Nemotron-Labs-Diffusion, defaults of its linear_spec_generate: drafts of 32; as many tokens as `nemotron`",
        sampler="nemotron",
        mode="speculative",
        max_new_tokens=1024,
        gen_block_length=32,
        stop_at_eos=True,
    ),
    "dream": _preset(
        "Dream 7B (arXiv:2508.15487), its model card's example",
        sampler="dream",
        max_new_tokens=512,
        steps=512,
        temperature=0.2,
        top_p=0.95,
        algorithm="entropy",
        algorithm_temperature=0.0,
    ),
    "idlm": _preset(
        "I-DLM as NeMo AutoModel 0.7.0 presets it, without the threshold 0.9 of its loop, which is not exact",
        sampler="idlm",
        max_new_tokens=256,
        gen_block_length=4,
        stop_at_eos=True,
    ),
    "diffusion_gemma": _preset(
        "DiffusionGemma (Google 2026), defaults of its generate in transformers 5.24, cut at EOS",
        sampler="diffusion_gemma",
        max_new_tokens=256,
        steps_per_block=48,
        t_min=0.4,
        t_max=0.8,
        entropy_bound=0.1,
        stability_threshold=1,
        confidence_threshold=0.005,
        stop_at_eos=True,
    ),
    "fast_dllm": _preset(
        "Fast-dLLM (arXiv:2505.22618), defaults of its code: parallel decoding, without a cache", **_FAST_DLLM
    ),
    "fast_dllm_prefix": _preset(
        "Fast-dLLM (arXiv:2505.22618), the same with its prefix cache (approximate)", **_FAST_DLLM, cache="prefix"
    ),
    "fast_dllm_dual": _preset(
        "Fast-dLLM (arXiv:2505.22618), the same with its dual cache (approximate)", **_FAST_DLLM, cache="dual"
    ),
}

# Of these only one says something; the user's own takes the preset's away.
_RIVALS = (("steps", "steps_per_block"), ("threshold", "factor"))


def apply_preset(name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Options of a GenerationConfig: those of the preset, if any, and over them the `given` ones.

    An option that excludes one of the preset's replaces it. Raises ValueError for an unknown preset, and for another
    sampler or mode than the preset's, of which nothing would be left.
    """
    if name is None:
        return given
    if name not in PRESETS:
        raise ValueError(f"--preset {name} is unknown: choose one of {', '.join(PRESETS)}.")
    options = dict(PRESETS[name].options)
    for own in ("sampler", "mode"):
        if given.get(own, options.get(own)) != options.get(own):
            raise ValueError(f"--preset {name} is not for {flag(own)} {given[own]}: leave one of them out.")
    for pair in _RIVALS:
        for mine, other in (pair, pair[::-1]):
            if given.get(mine) is not None:
                options.pop(other, None)
    if given.get("temperature") == 0:  # nothing is drawn
        options.pop("top_p", None)
        options.pop("top_k", None)
    if given.get("remasking") == "random":  # confidences are not looked at
        options.pop("threshold", None)
        options.pop("factor", None)
    return options | given
