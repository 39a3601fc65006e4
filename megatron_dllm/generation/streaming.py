"""The text of an answer while it is denoised.

On a terminal it is drawn again and again in place, with a light block for every mask. Elsewhere nothing can be taken
back: a stretch is written once no later step can change it or what comes before it (`Row.settled`). Both end with
exactly the text of the completion. Prompts come one after the other: batches of one.
"""

import shutil
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TextIO

from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.display import say, width
from megatron_dllm.generation.rows import Row

_MASK, _ASCII_MASK = "░", "_"
_TAB = "    "
_BROKEN = "\N{REPLACEMENT CHARACTER}"


def spoken(ids: list[int], eos_id: int | None, infill: bool) -> list[int]:
    """The ids whose text an answer is: those before its first EOS; of a filled sequence all."""
    return ids if infill or eos_id not in ids else ids[: ids.index(eos_id)]


class Appended:
    """Writes what is settled. `observe` is for `generation.stream`; `finish` takes the completion's text."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO):
        self._tokenizer, self._out = tokenizer, out
        self._said = ""

    def observe(self, rows: Sequence[Row]) -> None:
        (row,) = rows
        ids = spoken(row.tokens[row.start : row.settled].tolist(), self._tokenizer.eos_id, row.config.infill)
        # the bytes of a character may be several tokens
        text = self._tokenizer.decode(ids).rstrip(_BROKEN)
        if len(text) > len(self._said) and text.startswith(self._said):
            say(text[len(self._said) :], self._out)
            self._said = text

    def finish(self, text: str) -> None:
        if not text.startswith(self._said):  # a tokenizer that writes a text otherwise than its beginnings
            text = "\n" + text
            self._said = ""
        say(text[len(self._said) :] + "\n", self._out)
        self._said = ""


class Redrawn:
    """Draws everything, masks too, over what it drew before. interval: seconds between drawings at least."""

    def __init__(self, tokenizer: Tokenizer, out: TextIO, interval: float = 0.04):
        self._tokenizer, self._out, self._interval = tokenizer, out, interval
        self._piece = lru_cache(maxsize=None)(tokenizer.piece)
        self._lines, self._when = 0, float("-inf")
        try:
            _MASK.encode(out.encoding or "utf-8")
            self._mask = _MASK
        except UnicodeEncodeError:
            self._mask = _ASCII_MASK

    def observe(self, rows: Sequence[Row]) -> None:
        (row,) = rows
        if time.monotonic() - self._when < self._interval:
            return
        columns, height = shutil.get_terminal_size()
        lines, first = wrapped(self._text(row), columns, self._mask)
        # no more than can be drawn over, around where the answer is being written
        room = max(1, height - 1)
        begin = max(0, min(first - room // 2, len(lines) - room))
        shown = lines[begin : begin + room]
        say(self._back() + "".join(line + "\n" for line in shown), self._out)
        self._lines, self._when = len(shown), time.monotonic()

    def finish(self, text: str) -> None:
        say(self._back() + text + "\n", self._out)
        self._lines, self._when = 0, float("-inf")

    def _back(self) -> str:
        """To where the drawing began, and nothing there."""
        return f"\033[{self._lines}A\r\033[J" if self._lines else ""

    def _text(self, row: Row) -> str:
        ids = row.tokens[row.start :].tolist()
        until = len(spoken(ids[: row.settled - row.start], self._tokenizer.eos_id, row.config.infill))
        if until < row.settled - row.start:
            ids = ids[:until]
        pieces = []
        for id in ids:
            if id == row.mask_id:
                pieces.append(self._mask)
            elif not self._tokenizer.is_special(id):
                pieces.append(self._piece(id))
        return printable("".join(pieces))


def printable(text: str) -> str:
    """What keeps to its columns, and tells the terminal nothing: no control characters but the newline."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\t", _TAB)
    return "".join(c if c.isprintable() or c == "\n" else _BROKEN for c in text)


def wrapped(text: str, columns: int, mask: str = _MASK) -> tuple[list[str], int]:
    """Lines of a terminal, and which of them has the first mask (the last one if there is none)."""
    lines, used, first = [""], 0, None
    for c in text:
        wide = 0 if c == "\n" else width(c)
        if c == "\n" or used + wide > columns:
            lines.append("")
            used = 0
        if c != "\n":
            lines[-1] += c
            used += wide
        if c == mask and first is None:
            first = len(lines) - 1
    return lines, len(lines) - 1 if first is None else first
