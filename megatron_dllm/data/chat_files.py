"""Files of conversations, one a JSONL line or a parquet row, read at random.

A file is read once when it is opened, to find its conversations and to check every one of them (`chat_checks.py`),
so that a broken one stops the run at once and not after a day.
"""

import os
import warnings
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_dllm.data.documents import first_line
from megatron_dllm.data.messages import Message, check_messages, read_json

Check = Callable[[list[Message]], None]
"""Raises ValueError for a conversation that cannot be trained on."""

_check_any = partial(check_messages, training=False)
_SHOW_PROGRESS_BYTES = 50 * 2**20
_ROW_GROUP_CACHE_BYTES = 256 * 2**20
_ROWS_AT_ONCE = 1024  # decoded together while a parquet file is checked


def open_chat_file(path: str, check: Check, column: str = "messages") -> "JsonLines | Parquet":
    """Parquet by its suffix, else JSONL. Raises ValueError for a file that is missing, empty, malformed, or holds a
    conversation that `check` refuses; the sentence names the file and the line or row."""
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, and chat data are files: name those in it.")
    if not os.path.isfile(path):
        raise ValueError(f"The chat file {path} does not exist: correct the path.")
    return Parquet(path, check, column) if path.endswith(".parquet") else JsonLines(path, check, column)


class JsonLines:
    """One conversation a line, found by byte offset. Raises ValueError as `open_chat_file` does."""

    def __init__(self, path: str, check: Check = check_messages, column: str = "messages"):
        self.path, self.column = path, column
        offsets, lines = array("q"), array("q")  # of the lines that are not blank; lines count from 1
        position = 0
        with open(path, "rb") as file, _progress(path, os.path.getsize(path), "B") as bar:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._parse(line, number, check)
                    offsets.append(position)
                    lines.append(number)
                position += len(line)
                bar.update(len(line))
        if not offsets:
            raise ValueError(f"{path} has no samples: give a file with one JSON object a line.")
        self._offsets = np.array([*offsets, position], dtype=np.int64)
        self._lines = np.array(lines, dtype=np.int64)
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, row: int) -> str:
        """Name of a row for messages to the user."""
        return f"{self.path}, line {self._lines[row]}"

    def messages(self, row: int) -> list[Message]:
        """The conversation. Raises ValueError if the file has changed and holds none there any more."""
        return self._read(row, check_messages)[self.column]

    def record(self, row: int) -> dict[str, Any]:
        """All fields of the line that holds the conversation, which may be without an answer. Raises ValueError as
        `messages` does."""
        return self._read(row, _check_any)

    def _read(self, row: int, check: Check) -> dict[str, Any]:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        # pread has no file position, so that forked workers can share the descriptor
        return self._parse(os.pread(self._descriptor, stop - start, start), int(self._lines[row]), check)

    def _parse(self, line: bytes, number: int, check: Check) -> dict[str, Any]:
        try:
            record = read_json(line)
            if not isinstance(record, dict) or self.column not in record:
                raise ValueError(f'it must be a JSON object with the key "{self.column}".')
            check(record[self.column])
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{self.path}, line {number}: a field is nested too deep: leave it out.") from error
        return record

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self):
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)


class Parquet:
    """One conversation a row, in a column of lists of {role, content}; memory-mapped.

    Rows are decoded a row group at a time, and the latest groups are kept (as Arrow memory, 256 MiB). Shuffled
    reading of a file that does not fit is fast only if its row groups are small. Raises ValueError as
    `open_chat_file` does; rows count from 0.
    """

    def __init__(self, path: str, check: Check = check_messages, column: str = "messages"):
        self.path, self.column = path, column
        self._file, self._process = None, None
        file = self._open()
        if column not in file.schema_arrow.names:
            raise ValueError(
                f'{path} has no column "{column}", only {", ".join(file.schema_arrow.names)}: rename the one with '
                "the conversations."
            )
        groups = [file.metadata.row_group(g) for g in range(file.metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        if not self._ends or not self._ends[-1]:
            raise ValueError(f"{path} has no samples: give a file with one conversation a row.")
        sizes = [group.total_byte_size for group in groups]
        if sum(sizes) > _ROW_GROUP_CACHE_BYTES and max(sizes) > _ROW_GROUP_CACHE_BYTES // 64:
            warnings.warn(
                f"{path} has row groups of up to {max(sizes) >> 20} MiB, of which shuffled reading decodes one for "
                "almost every sample: write it with fewer rows a group, or as JSONL.",
                stacklevel=2,
            )
        self._check_rows(check, sum(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, row: int) -> str:
        """Name of a row for messages to the user."""
        return f"{self.path}, row {row}"

    def messages(self, row: int) -> list[Message]:
        """The conversation. Raises ValueError if the file has changed and holds none there any more."""
        group, place = self._find(row)
        return self._parse(self._group(group, self.column)[self.column][place], row, check_messages)

    def record(self, row: int) -> dict[str, Any]:
        """All columns of the row that holds the conversation, which may be without an answer. Raises ValueError as
        `messages` does."""
        group, place = self._find(row)
        table = self._group(group, None)
        self._parse(table[self.column][place], row, _check_any)
        return table.slice(place, 1).to_pylist()[0]

    def _find(self, row: int) -> tuple[int, int]:
        """(row group, place in it)"""
        group = bisect_right(self._ends, row)
        return group, row - (self._ends[group - 1] if group else 0)

    def _parse(self, value, row: int, check: Check) -> list[Message]:
        try:
            messages = value.as_py()
            check(messages)
        except ValueError as error:  # also where a string is not UTF-8
            raise ValueError(f"{self.where(row)}: {error}") from error
        return messages

    def _check_rows(self, check: Check, size: int) -> None:
        import pyarrow

        row = 0
        with _progress(self.path, size, "B") as bar:
            try:
                for batch in self._open().iter_batches(_ROWS_AT_ONCE, columns=[self.column], use_threads=False):
                    for value in batch.column(0):
                        self._parse(value, row, check)
                        row += 1
                    bar.update(size * len(batch) // len(self))
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(
                    f"{self.path} is damaged behind row {row} ({first_line(error)}): replace it."
                ) from error

    def _group(self, group: int, column: str | None):
        """A row group as an Arrow table: of one column or, for None, of all."""
        file, key = self._open(), (group, column)
        if key not in self._cache:
            columns = None if column is None else [column]
            self._cache[key] = file.read_row_group(group, columns=columns, use_threads=False)
            while len(self._cache) > 1 and sum(c.nbytes for c in self._cache.values()) > _ROW_GROUP_CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _open(self):
        if self._process != os.getpid():  # a forked worker opens its own: Arrow's threads did not come along
            import pyarrow.parquet

            try:
                self._file = pyarrow.parquet.ParquetFile(self.path, memory_map=True)
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(
                    f"{self.path} is not a parquet file ({first_line(error)}): convert or remove it."
                ) from error
            self._cache, self._process = OrderedDict(), os.getpid()
        return self._file

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_file": None, "_process": None, "_cache": None}


def _progress(path: str, size: int, unit: str):
    from tqdm import tqdm

    hidden = size < _SHOW_PROGRESS_BYTES or os.environ.get("RANK", "0") != "0"
    return tqdm(total=size, unit=unit, unit_scale=True, desc=f"check {path}", disable=hidden)
