"""Prompts -> canvases: token sequences with masks where text is to be written."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_dllm.data.chat import render_prompt
from megatron_dllm.data.messages import Message, check_characters
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.generation.config import GenerationConfig

Prompt = str | Sequence[int] | Sequence[Message]
"""Text (encoded as it is), token ids, or a conversation (through the chat template)."""

BLANK = -1
"""What a canvas holds where nothing is written yet, of models without a mask token."""

_GAP = re.compile(r"\[MASK(?::(\d+))?\]")
_NO_GAP = re.compile(r"\[MASK:(?!\d+\])[^\]]*\]")


@dataclass(frozen=True)
class Canvas:
    """tokens: given tokens and masks; start: where the first block begins (0 when infilling); copy: how many equal
    canvases come before it, over all batches, so that each is another draw; name: what errors call it."""

    tokens: list[int]
    start: int
    copy: int = 0
    name: str = field(default="a prompt", compare=False)


def build_canvases(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: GenerationConfig,
    mask_id: int | None,
    longest: int,
    names: Sequence[str] | None = None,
) -> list[Canvas]:
    """One canvas per prompt; mask_id: None of models without a mask token; names: what errors call the prompts, default
    "prompt 1" and so on.

    Raises ValueError (one sentence) for a prompt that cannot be decoded: longer than the model's `longest` positions,
    holding masks, half characters or ids that the tokenizer lacks, rejected by the chat template, or without gaps when
    infilling.
    """
    pieces_of = _gaps if config.infill else _answer
    canvases = []
    for name, prompt in zip(names or [f"prompt {n + 1}" for n in range(len(prompts))], prompts, strict=True):
        if isinstance(prompt, str):
            check_characters(prompt, name)
        pieces = pieces_of(prompt, tokenizer, config, mask_id, name)
        unknown = next((id for ids, _ in pieces for id in ids if not _is_known(id, tokenizer, mask_id)), None)
        if unknown is not None:
            raise ValueError(
                f"{name} holds the id {unknown}, but the tokenizer has {tokenizer.vocab_size}: correct it."
            )
        length = sum(len(ids) + masks for ids, masks in pieces)
        if length > longest:  # before the masks are written down: the user may have asked for billions
            new = "" if config.infill else f" with {config.max_new_tokens} new tokens"
            raise ValueError(
                f"{name}{new} is {length} tokens long, but the model has {longest} positions: "
                "shorten the prompt or generate less."
            )
        blank = BLANK if mask_id is None else mask_id
        tokens = [token for ids, masks in pieces for token in (*ids, *[blank] * masks)]
        canvases.append(Canvas(tokens, start=0 if config.infill else len(pieces[0][0]), name=name))
    return number_copies(canvases)


def number_copies(canvases: Sequence[Canvas]) -> list[Canvas]:
    """The same canvases, each knowing how many equal ones come before it."""
    seen: Counter = Counter()
    numbered = []
    for canvas in canvases:
        key = tuple(canvas.tokens)
        numbered.append(replace(canvas, copy=seen[key]))
        seen[key] += 1
    return numbered


def _is_known(id: int, tokenizer: Tokenizer, mask_id: int | None) -> bool:
    return 0 <= id < tokenizer.vocab_size or id == mask_id


Pieces = list[tuple[list[int], int]]
"""Given tokens, and how many masks follow them."""


def _answer(prompt: Prompt, tokenizer: Tokenizer, config: GenerationConfig, mask_id: int | None, name: str) -> Pieces:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif prompt and isinstance(prompt[0], dict):
        try:
            ids = render_prompt(prompt, tokenizer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    else:
        ids = list(prompt)
    if mask_id in ids:
        raise ValueError(f"{name} contains the mask token {mask_id}: remove it, or fill it in with --infill.")
    return [(ids, config.max_new_tokens)]


def _gaps(prompt: Prompt, tokenizer: Tokenizer, config: GenerationConfig, mask_id: int | None, name: str) -> Pieces:
    if isinstance(prompt, str):
        # the stretches between gaps are encoded one by one: none of their tokens may reach into a gap
        pieces, end = [], 0
        if wrong := _NO_GAP.search(prompt):
            raise ValueError(f"{name} has {wrong[0]}, which is no gap: write how many tokens it has, as [MASK:12].")
        for gap in _GAP.finditer(prompt):
            pieces.append((tokenizer.encode(prompt[end : gap.start()]), _gap_length(gap[1], config, name)))
            end = gap.end()
        pieces.append((tokenizer.encode(prompt[end:]), 0))
    elif prompt and isinstance(prompt[0], dict):
        raise ValueError(f"{name} is a conversation: --infill fills gaps in plain text.")
    else:
        pieces = [(list(prompt), 0)]
    if not any(masks or mask_id in ids for ids, masks in pieces):
        raise ValueError(f"{name} has no gap to fill: write [MASK] or [MASK:12] where text is missing.")
    return pieces


def _gap_length(digits: str | None, config: GenerationConfig, name: str) -> int:
    if digits is None:
        return config.gap_length
    length = int(digits) if len(digits) < 19 else 10**18  # int() refuses thousands of digits
    if length == 0:
        raise ValueError(f"{name} has a gap of length 0: write [MASK:1] or more, or leave it out.")
    return length
