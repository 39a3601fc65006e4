"""Conversations from JSONL or parquet files, as training samples.

Nothing is tokenised ahead: a sample is read, rendered and tokenised when it is asked for. A JSONL file is read
once at start to find its lines and to check every one of them, so that a broken line stops the run at once and
not after a day. Of a parquet file only the schema is checked at start; a broken row is an error when it is read.
"""

import copy
import json
import os
import warnings
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from megatron_dllm.data import chat
from megatron_dllm.data.collation import fill_sample
from megatron_dllm.data.order import Epochs
from megatron_dllm.data.sample import Sample

_SHOW_PROGRESS_BYTES = 50 * 2**20
_ROW_GROUP_CACHE_BYTES = 256 * 2**20
_VALIDATION_SEED = 0  # validation reads the same samples in the same order in every run


class JsonLines:
    """One conversation a line, found by byte offset. Raises ValueError for a missing, empty or malformed file."""

    def __init__(self, path: str, column: str = "messages"):
        self.path, self.column = path, column
        offsets = array("q")
        self._lines = array("q")  # numbers of the non-blank lines, from 1
        position = 0
        with open(path, "rb") as file, _progress(path) as bar:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._parse(line, number)
                    offsets.append(position)
                    self._lines.append(number)
                position += len(line)
                bar.update(len(line))
        if not offsets:
            raise ValueError(f"{path} has no samples: give a file with one JSON object a line.")
        self._offsets = np.array([*offsets, position], dtype=np.int64)
        self._lines = np.array(self._lines, dtype=np.int64)
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, row: int) -> str:
        """Name of a row for messages to the user."""
        return f"{self.path}, line {self._lines[row]}"

    def messages(self, row: int) -> list[chat.Message]:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        start, stop = int(self._offsets[row]), int(self._offsets[row + 1])
        # pread has no file position, so that forked workers can share the descriptor
        return self._parse(os.pread(self._descriptor, stop - start, start), int(self._lines[row]))

    def _parse(self, line: bytes, number: int) -> list[chat.Message]:
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or self.column not in record:
                raise ValueError(f'it must be a JSON object with the key "{self.column}".')
            chat.check_messages(record[self.column])
        except ValueError as error:  # json's errors are ValueErrors
            raise ValueError(f"{self.path}, line {number}: {error}") from error
        return record[self.column]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self):
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)


class Parquet:
    """One conversation a row, in a column of lists of {role, content}; memory-mapped.

    Rows are decoded a row group at a time, and the latest groups are kept (as Arrow memory, 256 MiB). Shuffled
    reading of a file that does not fit is fast only if its row groups are small. Raises ValueError for a missing
    file or column.
    """

    def __init__(self, path: str, column: str = "messages"):
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

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, row: int) -> str:
        """Name of a row for messages to the user."""
        return f"{self.path}, row {row}"

    def messages(self, row: int) -> list[chat.Message]:
        group = bisect_right(self._ends, row)
        first = self._ends[group - 1] if group else 0
        messages = self._group(group).slice(row - first, 1).to_pylist()[0]
        try:
            chat.check_messages(messages)
        except ValueError as error:
            raise ValueError(f"{self.where(row)}: {error}") from error
        return messages

    def _group(self, group: int):
        file = self._open()
        if group not in self._cache:
            self._cache[group] = file.read_row_group(group, columns=[self.column], use_threads=False).column(0)
            while len(self._cache) > 1 and sum(c.nbytes for c in self._cache.values()) > _ROW_GROUP_CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return self._cache[group]

    def _open(self):
        if self._process != os.getpid():  # a forked worker opens its own: Arrow's threads did not come along
            import pyarrow.parquet

            try:
                self._file = pyarrow.parquet.ParquetFile(self.path, memory_map=True)
            except pyarrow.ArrowInvalid as error:
                raise ValueError(f"{self.path} is not a parquet file ({error}): convert or remove it.") from error
            self._cache, self._process = OrderedDict(), os.getpid()
        return self._file

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_file": None, "_process": None, "_cache": None}


class ChatDataset:
    """Conversations as samples, by global index; every epoch is a new permutation of the items.

    paths: .jsonl/.json (one object a line) or .parquet files, one after the other.
    tokenizer: see `tokenizer.py`; template: Jinja text that replaces its chat template.
    seq_length: longer conversations are cut; `truncated_samples` and `lost_supervised_tokens` count what was lost
    in this process, and the first loss is warned of.
    items: which of all conversations belong to the data set (default all).
    last_turn_only: supervise only the last assistant turn.
    fill_block: append supervised EOS up to a multiple of this block size.
    column: name of the key or column with the messages.
    Raises ValueError for files that are missing, empty or malformed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer,
        seq_length: int,
        seed: int,
        items: range | None = None,
        last_turn_only: bool = False,
        template: str | None = None,
        fill_block: int | None = None,
        column: str = "messages",
    ):
        if not paths:
            raise ValueError("There are no chat files: name at least one with --sft-data-path.")
        self._files = [_open_file(path, column) for path in paths]
        self._ends = list(accumulate(len(file) for file in self._files))
        self.tokenizer, self.seq_length = tokenizer, seq_length
        self.last_turn_only, self.template, self.fill_block = last_turn_only, template, fill_block
        self.truncated_samples = self.lost_supervised_tokens = 0
        self._choose(range(self._ends[-1]) if items is None else items, seed)

    def subset(self, items: range, seed: int) -> "ChatDataset":
        """Other items of the same files, which are not scanned again."""
        other = copy.copy(self)
        other._choose(items, seed)
        return other

    def _choose(self, items: range, seed: int) -> None:
        if not items or min(items) < 0 or max(items) >= self._ends[-1]:
            raise ValueError(
                f"Items {items.start} to {items.stop} cannot be taken from {self._ends[-1]} conversations: give more "
                "data or another --split."
            )
        self.items, self._epochs = items, Epochs(seed, len(items))

    def __len__(self) -> int:
        """Samples an epoch."""
        return len(self.items)

    def sample(self, index: int) -> Sample:
        """The sample at global index 0, 1, ...; at most `seq_length` tokens, one document."""
        _, item = self._epochs.locate(index)
        item = self.items[item]
        which = bisect_right(self._ends, item)
        file, row = self._files[which], item - (self._ends[which - 1] if which else 0)
        messages = file.messages(row)
        try:
            ids, mask = chat.render(messages, self.tokenizer, self.template, self.last_turn_only)
        except ValueError as error:
            raise ValueError(f"{file.where(row)}: {error}") from error
        if len(ids) > self.seq_length:
            self._note_truncation(file.where(row), len(ids), sum(mask[self.seq_length :]))
        n = min(len(ids), self.seq_length)
        sample = Sample(
            tokens_S=torch.tensor(ids[:n], dtype=torch.int64),
            loss_mask_S=torch.tensor(mask[:n], dtype=torch.bool),
            document_S=torch.zeros(n, dtype=torch.int32),
            position_S=torch.arange(n, dtype=torch.int64),
            index=index,
        )
        return fill_sample(sample, self.fill_block, self.tokenizer.eos_id, self.seq_length)

    __getitem__ = sample

    def _note_truncation(self, where: str, length: int, lost: int) -> None:
        self.truncated_samples += 1
        self.lost_supervised_tokens += lost
        if self.truncated_samples == 1:
            warnings.warn(
                f"{where}: the conversation has {length} tokens and is cut to --seq-length {self.seq_length}, which "
                f"loses {lost} supervised tokens; others may be cut too, without another warning.",
                stacklevel=3,
            )


def build_chat(args, tokenizer) -> tuple[ChatDataset, ChatDataset | None, ChatDataset | None]:
    """Training, validation and test data from the command line.

    Reads args.sft_data_path, sft_valid_data_path, split, sft_last_turn_only, chat_template (a file or None),
    dllm_pad_block_size, seq_length, seed. With --split the conversations are divided in file order; with a
    validation path, or neither, all of --sft-data-path is trained on.
    Raises ValueError: as ChatDataset, a missing template, a split that leaves a part without conversations.
    """
    options = {
        "tokenizer": tokenizer,
        "seq_length": args.dllm_sequence_length,
        "last_turn_only": args.sft_last_turn_only,
        "template": _read_template(args.chat_template),
        "fill_block": args.dllm_pad_block_size,
    }
    train = ChatDataset(args.sft_data_path, seed=args.seed, **options)
    if args.sft_valid_data_path:
        if args.split is not None:
            raise ValueError("--split and --sft-valid-data-path both define validation data: give one of them.")
        return train, ChatDataset(args.sft_valid_data_path, seed=_VALIDATION_SEED, **options), None
    if args.split is None:
        return train, None, None
    parts = [
        train.subset(items, args.seed if part == 0 else _VALIDATION_SEED) if items is not None else None
        for part, items in enumerate(split_items(args.split, len(train)))
    ]
    if parts[0] is None:
        raise ValueError(f"--split {args.split} leaves nothing to train on: give the first part a weight.")
    return tuple(parts)


def split_items(split: str, count: int) -> list[range | None]:
    """Contiguous training, validation and test parts of `count` items, from weights such as "98,2" or
    "969,30,1"; None for a part of weight 0. Raises ValueError for weights that are none, or too small."""
    try:
        weights = [float(weight) for weight in split.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ValueError(f"--split {split} must be one to three non-negative weights, such as 98,1,1.")
    weights += [0.0] * (3 - len(weights))
    bounds = [0, *(round(count * part / sum(weights)) for part in accumulate(weights))]
    parts = [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    for name, weight, part in zip(("training", "validation", "test"), weights, parts, strict=True):
        if weight and not part:
            raise ValueError(f"--split {split} leaves no {name} data of {count} conversations: give it more weight.")
    return [part if weight else None for weight, part in zip(weights, parts, strict=True)]


def _open_file(path: str, column: str) -> JsonLines | Parquet:
    if not os.path.isfile(path):
        raise ValueError(f"The chat file {path} does not exist: correct the path.")
    return Parquet(path, column) if path.endswith(".parquet") else JsonLines(path, column)


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    if not os.path.isfile(path):
        raise ValueError(f"The chat template {path} does not exist: --chat-template takes the path of a Jinja file.")
    return Path(path).read_text(encoding="utf-8")


def _progress(path: str):
    from tqdm import tqdm

    size = os.path.getsize(path)
    return tqdm(total=size, unit="B", unit_scale=True, desc=f"scan {path}", disable=size < _SHOW_PROGRESS_BYTES)
