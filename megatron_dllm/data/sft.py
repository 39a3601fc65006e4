"""Conversations from JSONL or parquet files, as training samples.

Nothing is tokenised ahead: a sample is read, rendered and tokenised when it is asked for. But every conversation is
looked at once, at start (`chat_checks.py`).
"""

import copy
import os
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from megatron_dllm.data import chat
from megatron_dllm.data.chat_checks import ConversationCheck
from megatron_dllm.data.chat_files import open_chat_file
from megatron_dllm.data.collation import fill_sample
from megatron_dllm.data.order import Epochs
from megatron_dllm.data.sample import Sample

_VALIDATION_SEED = 0  # validation reads the same samples in the same order in every run


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
    Raises ValueError for files that are missing, empty or malformed, and for conversations that cannot be trained
    on (see `chat_checks.py`), with file and line or row.
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
        check = ConversationCheck(tokenizer, template, last_turn_only)
        self._files = [open_chat_file(path, check, column) for path in paths]
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


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    if not os.path.isfile(path):
        raise ValueError(f"The chat template {path} does not exist: --chat-template takes the path of a Jinja file.")
    return Path(path).read_text(encoding="utf-8")
