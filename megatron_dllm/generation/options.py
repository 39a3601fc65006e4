"""Command-line flags of a GenerationConfig, for every tool that decodes."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from megatron_dllm.generation.config import ALGORITHMS, CACHES, DECODING_MODES, REMASKING, GenerationConfig
from megatron_dllm.generation.presets import PRESETS, apply_preset

_DEFAULT = GenerationConfig()


def add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    """--preset and the flags of how to decode. What is not given is not in the namespace: `decoding_config` needs to
    know."""
    presets = ", ".join(PRESETS)

    def add(flag: str, *, help: str, **more: Any) -> None:
        default = getattr(_DEFAULT, flag[2:].replace("-", "_"), None)
        said = "" if default is None or isinstance(default, bool) else f" ({default})"
        group.add_argument(flag, default=argparse.SUPPRESS, help=help + said, **more)

    group = parser.add_argument_group("decoding", "Explicit flags override --preset; a number may be `none`.")
    add("--preset", metavar="NAME", help=f"published options: {presets}")
    add("--sampler", metavar="NAME", help="the decoding loop; default: that of the model's mode (docs/generation.md)")
    add("--mode", metavar="MODE", help=f"of nemotron and idlm models and of drafts: {', '.join(DECODING_MODES)}")
    add("--max-new-tokens", type=int, metavar="N", help="exactly so many")
    add(
        "--steps",
        type=optional(int),
        metavar="N",
        help="denoising steps, shared out over the blocks, rounded up; default: one a token",
    )
    add("--steps-per-block", type=optional(int), metavar="N", help="instead: most steps of a block of the answer")
    add(
        "--gen-block-length",
        type=optional(int),
        metavar="N",
        help="tokens of the answer that are finished before later ones are begun: a schedule of decoding, where "
        "--dllm-block-size says who attends to whom in training; default 128, or the block size that a model was "
        "trained with",
    )
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token")
    add("--top-k", type=optional(int), metavar="K", help="draw only from the likeliest K tokens")
    add("--top-p", type=optional(float), metavar="P", help="draw only from the likeliest tokens that have P together")
    add("--remasking", metavar="RULE", help=f"which tokens of a block wait: {' or '.join(REMASKING)}")
    add("--threshold", type=optional(float), metavar="P", help="also commit tokens of the block at least this probable")
    add("--factor", type=optional(float), metavar="F", help="also commit as many as are trusted together (Fast-dLLM)")
    add(
        "--editing-threshold",
        type=optional(float),
        metavar="P",
        help="llada2: overwrite tokens of the current block where another is more probable than this (LLaDA2.1)",
    )
    add("--max-post-steps", type=int, metavar="N", help="llada2: most steps of a block that only edit")
    add("--algorithm", metavar="RULE", help=f"dream: which tokens are committed: {', '.join(ALGORITHMS)}")
    add("--algorithm-temperature", type=float, metavar="T", help="dream: above 0, draw which")
    add("--t-min", type=float, metavar="T", help="diffusion_gemma: temperature at the last of a canvas's steps")
    add("--t-max", type=float, metavar="T", help="diffusion_gemma: temperature at the first")
    add(
        "--entropy-bound",
        type=float,
        metavar="H",
        help="diffusion_gemma: accept the surest tokens, as long as the entropies of those before add up to H",
    )
    add(
        "--stability-threshold",
        type=int,
        metavar="N",
        help="diffusion_gemma: a canvas is finished when its likeliest tokens were the same for N steps before",
    )
    add(
        "--confidence-threshold",
        type=float,
        metavar="H",
        help="diffusion_gemma: ... and the mean entropy of its tokens is below H; 0: take all steps",
    )
    add(
        "--cache",
        metavar="KIND",
        help=f"keys and values of earlier tokens: {', '.join(CACHES)}; auto is exact, prefix and dual are approximate",
    )
    add("--cfg-scale", type=float, metavar="W", help="llada: classifier-free guidance")
    add(
        "--stop-at-eos",
        action=argparse.BooleanOptionalAction,
        help="finish an answer at its first EOS, compute no later block, and fill up with EOS",
    )
    add("--seed", type=int, metavar="N", help="of what is drawn")
    add("--batch-size", type=int, metavar="N", help="prompts at a time; changes no answer")


def decoding_config(given: dict[str, Any]) -> GenerationConfig:
    """What parsed flags ask for; other names are left alone. Raises ValueError (one sentence)."""
    names = {field.name for field in fields(GenerationConfig)}
    options = {name: value for name, value in given.items() if name in names}
    return GenerationConfig(**apply_preset(given.get("preset"), options))


def optional(kind: type) -> Callable[[str], Any]:
    """A type for argparse: `none` takes away what a preset says."""

    def parse(word: str) -> Any:
        return None if word == "none" else kind(word)

    parse.__name__ = kind.__name__  # as argparse calls it
    return parse
