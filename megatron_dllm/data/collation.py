"""Padding, in two stages that mean different things.

1. *Fill*: EOS up to a multiple of the block size. It belongs to the answer and is supervised: a model that
   denoises whole blocks must learn to put EOS behind the end of what it says.
2. *Pad*: up to the length that the batch shares. By default it is nobody's: not attended and not scored, so
   that the length of other samples changes nothing. With supervised padding (as LLaDA was trained) it
   continues the answer: it is scored, and so must be attended.

`filled_length`, `common_length` and `collate` compute what the reference recipes compute; training pads
single samples with `fill_sample` and `pad_sample`. All zones come from lengths, never from ids: the pad id
may be the EOS id.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import lcm

import torch

from megatron_dllm.data.sample import PADDING_DOCUMENT, Sample


def filled_length(content_length: int, prefix: int = 0, block: int | None = None) -> int:
    """Length after stage 1: the part behind `prefix` in whole blocks (no fill if block is None or 1)."""
    if block is None or block <= 1:
        return content_length
    return prefix + _round_up(content_length - prefix, block)


def common_length(
    filled_lengths: Sequence[int],
    block: int | None = None,
    divisible: int | None = None,
    max_length: int | None = None,
) -> int:
    """Length of a batch: the longest row, rounded up to a multiple of `divisible` (and then of `block` too),
    at most `max_length`, at least 1.

    The cap comes last, so a capped length need not be divisible. Where it must be (sequence and context
    parallel cut it), pass `max_length=divisible_cap(...)`.
    """
    length = max(filled_lengths, default=0)
    if divisible is not None and divisible > 1:
        length = _round_up(length, lcm(block or 1, divisible))
    if max_length:
        length = min(length, max_length)
    return max(length, 1)


def divisible_cap(max_length: int, block: int | None = None, divisible: int | None = None) -> int:
    """The longest length up to `max_length` that is a multiple of both `block` and `divisible`.

    Raises ValueError if there is none.
    """
    multiple = lcm(block or 1, divisible or 1)
    if max_length < multiple:
        raise ValueError(
            f"A sequence length of {max_length} is shorter than {multiple}, of which it must be a multiple "
            f"(block size {block or 1}, divisor {divisible or 1}): raise the sequence length."
        )
    return max_length - max_length % multiple


def collate(
    rows: Sequence[dict],
    pad_token_id: int = 0,
    eos_token_id: int | None = None,
    block_size: int | None = None,
    pad_seq_len_divisible: int | None = None,
    max_seq_len: int | None = None,
    supervise_padding: bool = False,
    response_window: bool = False,
) -> dict[str, torch.Tensor]:
    """Pads B rows of equally long int lists {"input_ids", "loss_mask", "attention_mask"} to one length S.

    Returns input_ids_BS int64, loss_mask_BS float32, attention_mask_BS int64, input_lengths_B int64 (of the
    content, also where it was cut to `max_seq_len`).

    Fill is EOS (pad where the tokenizer has none) and supervised; pad is supervised if `supervise_padding`.
    response_window: blocks are counted from the first supervised token instead of from the beginning, and the
    fill is attended. That needs a single supervised turn in each row.
    Raises ValueError: no rows, lists of unequal length, several supervised turns in a response window.
    """
    if not rows:
        raise ValueError("There are no rows to collate: drop empty batches before.")
    for i, row in enumerate(rows):
        if not len(row["input_ids"]) == len(row["loss_mask"]) == len(row["attention_mask"]):
            raise ValueError(
                f"Row {i} has {len(row['input_ids'])} ids, {len(row['loss_mask'])} loss mask and "
                f"{len(row['attention_mask'])} attention mask values: give one of each a token."
            )
        turns = sum(bool(supervised) for supervised, _ in groupby(row["loss_mask"], key=bool))
        if response_window and turns > 1:
            raise ValueError(
                f"Row {i} has {turns} separate supervised runs, but a response window holds one: supervise "
                "the last assistant turn only (--sft-last-turn-only)."
            )
    filled = []
    for row in rows:
        content = len(row["input_ids"])
        content = min(content, max_seq_len) if max_seq_len else content
        prefix = min(_first_supervised(row["loss_mask"]), content) if response_window else 0
        filled.append(filled_length(content, prefix, block_size))
    length = common_length(filled, block_size, pad_seq_len_divisible, max_seq_len)

    shape = (len(rows), length)
    input_ids_BS = torch.full(shape, pad_token_id, dtype=torch.int64)
    loss_mask_BS = torch.full(shape, float(supervise_padding), dtype=torch.float32)
    attention_mask_BS = torch.zeros(shape, dtype=torch.int64)
    for b, (row, fill) in enumerate(zip(rows, filled, strict=True)):
        n = min(len(row["input_ids"]), length)
        input_ids_BS[b, :n] = torch.tensor(row["input_ids"][:n], dtype=torch.int64)
        loss_mask_BS[b, :n] = torch.tensor(row["loss_mask"][:n], dtype=torch.float32)
        attention_mask_BS[b, :n] = torch.tensor(row["attention_mask"][:n], dtype=torch.int64)
        input_ids_BS[b, n:fill] = pad_token_id if eos_token_id is None else eos_token_id
        loss_mask_BS[b, n:fill] = 1
        attention_mask_BS[b, n:fill] = int(response_window)
    return {
        "input_ids": input_ids_BS,
        "loss_mask": loss_mask_BS,
        "attention_mask": attention_mask_BS,
        "input_lengths": torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int64),
    }


def fill_sample(sample: Sample, block: int | None, eos_id: int, max_length: int | None = None) -> Sample:
    """Stage 1 for one sample: supervised EOS up to a multiple of `block`, but not beyond `max_length`."""
    length = filled_length(len(sample), block=block)
    length = max(len(sample), min(length, max_length or length))
    return pad_sample(sample, length, eos_id, supervise=True)


def pad_sample(sample: Sample, length: int, pad_id: int, supervise: bool) -> Sample:
    """Pads a sample of S tokens to `length` with `pad_id`.

    supervise False: the padding is document -1 (seen by nobody), position 0 and not supervised.
    supervise True: the padding is part of the answer: it continues the last document and its positions.
    Raises ValueError if the sample is longer than `length`, or is to be continued behind padding.
    """
    missing = length - len(sample)
    if missing < 0:
        raise ValueError(f"Sample {sample.index} has {len(sample)} tokens and cannot be padded to {length}: cut it.")
    if missing == 0:
        return sample
    document, position = PADDING_DOCUMENT, torch.zeros(missing, dtype=torch.int64)
    if supervise:
        document, start = (int(sample.document_S[-1]), int(sample.position_S[-1]) + 1) if len(sample) else (0, 0)
        if document == PADDING_DOCUMENT:
            raise ValueError(
                f"Sample {sample.index} already ends in unsupervised padding: pad it in one way or the other."
            )
        position = torch.arange(start, start + missing, dtype=torch.int64)
    return replace(
        sample,
        tokens_S=torch.cat([sample.tokens_S, sample.tokens_S.new_full((missing,), pad_id)]),
        loss_mask_S=torch.cat([sample.loss_mask_S, sample.loss_mask_S.new_full((missing,), supervise)]),
        document_S=torch.cat([sample.document_S, sample.document_S.new_full((missing,), document)]),
        position_S=torch.cat([sample.position_S, position]),
    )


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _first_supervised(loss_mask: Sequence[int]) -> int:
    return next((i for i, supervised in enumerate(loss_mask) if supervised), len(loss_mask))
