"""Prompts -> canvases: token sequences with masks where text is to be written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dllm.data.chat import render_prompt
from megatron_dllm.data.messages import Message
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.generation.config import GenerationConfig

Prompt = str | Sequence[int] | Sequence[Message]
"""Text (encoded as it is), token ids, or a conversation (through the chat template)."""

_GAP = re.compile(r"\[MASK(?::(\d+))?\]")


@dataclass(frozen=True)
class Canvas:
    """tokens: given tokens and masks; start: where the first block begins (0 when infilling)."""

    tokens: list[int]
    start: int


def build_canvases(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, config: GenerationConfig, mask_id: int, longest: int
) -> list[Canvas]:
    """One canvas per prompt. Raises ValueError (one sentence) for a prompt that cannot be decoded:
    longer than the model's `longest` positions, holding masks, or without gaps when infilling."""
    build = _gaps if config.infill else _answer
    canvases = []
    for number, prompt in enumerate(prompts, 1):
        canvas = build(prompt, tokenizer, config, mask_id, f"prompt {number}")
        if len(canvas.tokens) > longest:
            new = "" if config.infill else f" with {config.max_new_tokens} new tokens"
            raise ValueError(
                f"prompt {number}{new} is {len(canvas.tokens)} tokens long, but the model has {longest} positions: "
                "shorten the prompt or generate less."
            )
        canvases.append(canvas)
    return canvases


def _answer(prompt: Prompt, tokenizer: Tokenizer, config: GenerationConfig, mask_id: int, name: str) -> Canvas:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif prompt and isinstance(prompt[0], dict):
        ids = render_prompt(prompt, tokenizer)
    else:
        ids = list(prompt)
    if mask_id in ids:
        raise ValueError(f"{name} contains the mask token {mask_id}: remove it, or fill it in with --infill.")
    return Canvas(ids + [mask_id] * config.max_new_tokens, start=len(ids))


def _gaps(prompt: Prompt, tokenizer: Tokenizer, config: GenerationConfig, mask_id: int, name: str) -> Canvas:
    if isinstance(prompt, str):
        # the stretches between gaps are encoded one by one: none of their tokens may reach into a gap
        ids, end = [], 0
        for gap in _GAP.finditer(prompt):
            length = config.gap_length if gap[1] is None else int(gap[1])
            ids += tokenizer.encode(prompt[end : gap.start()]) + [mask_id] * length
            end = gap.end()
        ids += tokenizer.encode(prompt[end:])
    elif prompt and isinstance(prompt[0], dict):
        raise ValueError(f"{name} is a conversation: --infill fills gaps in plain text.")
    else:
        ids = list(prompt)
    if mask_id not in ids:
        raise ValueError(f"{name} has no gap to fill: write [MASK] or [MASK:12] where text is missing.")
    return Canvas(ids, start=0)
