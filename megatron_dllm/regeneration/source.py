"""The conversations to be answered, with the other columns of their rows, and the columns of the output.

Everything is looked at before the first request: a row that could not be sent or written stops the run at once.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from megatron_dllm.data.chat_files import open_chat_file
from megatron_dllm.data.messages import Message, check_characters, check_messages
from megatron_dllm.data.order import permutation
from megatron_dllm.regeneration.conversations import json_text, normal, prompt_of

INDEX, MESSAGES, ORIGINAL, TOOLS = "index", "messages", "original_messages", "tools"
_OWN = {INDEX, MESSAGES, ORIGINAL}

TEXT, INTEGER, NUMBER, TRUTH, JSON = "text", "integer", "number", "truth", "json"
"""Kinds of values in a column of the output; JSON stands for everything without a kind, as text."""


class Source:
    """Rows of one or several chat files, counted through.

    paths: JSONL or parquet files. column: where conversations are. shuffle_seed: another order, None for the files'.
    progress: given an iterable of rows, shows how far it is. Raises ValueError for input that cannot be regenerated.

    Attributes: `order`, row numbers in the order of the output; `usable`, by row: it has a user turn; `columns`, kinds
    of the rows' other columns by name; `fields`, kinds of the messages' fields besides role, content and tool_calls;
    `calls_tools`, a message may hold tool_calls; `left_out`, names of columns that are not kept.
    """

    def __init__(self, paths: Sequence[str], column: str = MESSAGES, shuffle_seed: int | None = None, progress=iter):
        self.paths, self.column = list(paths), column
        self._files = [open_chat_file(path, partial(check_messages, training=False), column) for path in paths]
        self._ends = list(accumulate(map(len, self._files)))
        self.columns: dict[str, str] = {}
        self.fields: dict[str, str] = {}
        self.left_out: set[str] = set()
        self.calls_tools = False
        self.usable = bytearray(len(self))
        for row in progress(range(len(self))):
            try:
                self._look_at(row)
            except (ValueError, TypeError, RecursionError) as error:
                where = self.where(row)
                raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
        for name in self.left_out:
            self.columns.pop(name, None)
        if not any(self.usable):
            raise ValueError(f"No conversation of {', '.join(self.paths)} has a user turn to answer: add some.")
        rows = range(len(self)) if shuffle_seed is None else permutation(shuffle_seed, 0, len(self), "regenerate")
        self.order: Sequence[int] = rows

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, row: int) -> str:
        """Name of a row for messages to the user."""
        file, own = self._find(row)
        return file.where(own)

    def messages(self, row: int) -> list[Message]:
        """The conversation in its normal form. Raises ValueError if the file has changed."""
        file, own = self._find(row)
        return normal(file.record(own)[self.column])

    def others(self, row: int) -> dict[str, Any]:
        """The row's other columns, as they go into the output."""
        file, own = self._find(row)
        record = file.record(own)
        return {name: encode(record.get(name), kind, name) for name, kind in self.columns.items()}

    def tools(self, row: int) -> list[dict] | None:
        """Schemas of the tools that the conversation offers; None if there are none."""
        if TOOLS not in self.columns:
            return None
        file, own = self._find(row)
        return read_tools(file.record(own).get(TOOLS))

    def digest(self) -> list[str]:
        """SHA-256 of each file: the input's identity, wherever it lies."""
        found = []
        for path in self.paths:
            with open(path, "rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        return found

    def _find(self, row: int):
        file = bisect_right(self._ends, row)
        return self._files[file], int(row) - (self._ends[file - 1] if file else 0)

    def _look_at(self, row: int) -> None:
        file, own = self._find(row)
        record = file.record(own)
        messages = normal(record.pop(self.column))
        self.usable[row] = prompt_of(messages) is not None
        for message in messages:
            self.calls_tools |= "tool_calls" in message
            for field, value in message.items():
                if field not in ("role", "content", "tool_calls"):
                    self.fields[field] = joint(self.fields.get(field), kind_of(value, field))
        for name, value in record.items():
            if name in _OWN:
                self.left_out.add(name)
            elif name == TOOLS:
                self.calls_tools |= read_tools(value) is not None
                self.columns[name] = JSON
            elif value is not None and name not in self.left_out:
                try:
                    self.columns[name] = joint(self.columns.get(name), kind_of(value, name))
                except TypeError:  # an image, a date: JSON has no such thing
                    self.left_out.add(name)


def read_tools(value: Any) -> list[dict] | None:
    """Of a list of schemas or its JSON text. Raises ValueError for anything else."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'"{TOOLS}" is text that is not JSON ({error}): correct it.') from error
    if not value or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f'"{TOOLS}" must be a list of objects, or that as JSON text: rewrite it.')
    json_text(value, f'"{TOOLS}"')
    return value


def kind_of(value: Any, name: str) -> str:
    """Raises TypeError for what JSON cannot hold, ValueError for text that is not UTF-8 and numbers that are none."""
    if isinstance(value, str):
        check_characters(value, f'"{name}"')
        return TEXT
    if isinstance(value, bool):
        return TRUTH
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return INTEGER
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return NUMBER
    json.dumps(value)
    json_text(value, f'"{name}"')
    return JSON


def joint(one: str | None, other: str) -> str:
    """Kind of a column that holds both."""
    if one is None or one == other:
        return other
    return NUMBER if {one, other} == {INTEGER, NUMBER} else JSON


def encode(value: Any, kind: str, name: str) -> Any:
    """A value as its column holds it."""
    if value is None or (kind == JSON and name == TOOLS and isinstance(value, str)):
        return value
    return json_text(value, f'"{name}"') if kind == JSON else float(value) if kind == NUMBER else value
