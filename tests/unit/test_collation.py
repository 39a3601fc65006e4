"""Two-stage padding: the published numbers, the zones as properties, and both padding policies."""

import json
from math import lcm
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.collation import (
    collate,
    common_length,
    divisible_cap,
    fill_sample,
    filled_length,
    pad_sample,
)
from megatron_dllm.data.sample import PADDING_DOCUMENT, Sample

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "18_collate.json").read_text())["cases"]
PAD, EOS = 0, 2


@pytest.mark.parametrize("case", [case for case in GOLDEN if "out" in case])
def test_published_batches(case):
    out = collate(case["batch"], **case["kwargs"])
    assert {key: value.tolist() for key, value in out.items()} == case["out"]
    dtypes = {key: value.dtype for key, value in out.items()}
    assert dtypes.pop("loss_mask") == torch.float32
    assert set(dtypes.values()) == {torch.int64}


def test_response_window_refuses_several_turns():
    """The published collator raises AssertionError here; ours a ValueError, which says what to do."""
    (case,) = [case for case in GOLDEN if "multi_turn" in case]
    row = _row(5, [1, 0, 1, 0, 0])
    with pytest.raises(ValueError, match=f"{case['runs']} separate .*--sft-last-turn-only"):
        collate([row], PAD, EOS, block_size=4, response_window=True)
    collate([row], PAD, EOS, block_size=4)


def _row(n, loss_mask=None):
    return {
        "input_ids": list(range(10, 10 + n)),
        "loss_mask": [1] * n if loss_mask is None else loss_mask,
        "attention_mask": [1] * n,
    }


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    block=st.sampled_from([None, 1, 3, 4, 8]),
    divisible=st.sampled_from([None, 1, 6, 8]),
    cap=st.one_of(st.none(), st.integers(1, 24)),
    supervise=st.booleans(),
    window=st.booleans(),
    data=st.data(),
)
def test_zones(lengths, block, divisible, cap, supervise, window, data):
    prefixes = [data.draw(st.integers(0, n)) for n in lengths]
    rows = [_row(n, [0] * p + [1] * (n - p)) for n, p in zip(lengths, prefixes, strict=True)]
    out = collate(rows, PAD, EOS, block, divisible, cap, supervise, window)
    size = out["input_ids"].shape[1]
    assert all(out[key].shape == (len(rows), size) for key in ("loss_mask", "attention_mask"))
    assert cap is None or size <= cap
    multiple = lcm(block or 1, divisible) if divisible and divisible > 1 else 1
    assert size % multiple == 0 or size == cap
    for b, (n, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        kept = min(n, cap or n)
        start = min(prefix, kept) if window else 0
        fill = filled_length(kept, start, block)
        assert kept <= fill < kept + (block or 1) and (fill - start) % (block or 1) == 0
        content, filled, padded = slice(0, kept), slice(kept, fill), slice(max(fill, kept), size)
        ids, loss, seen = (out[key][b].tolist() for key in ("input_ids", "loss_mask", "attention_mask"))
        assert ids[content] == rows[b]["input_ids"][:kept]
        assert loss[content] == rows[b]["loss_mask"][:kept]
        assert set(ids[filled]) <= {EOS} and set(ids[padded]) <= {PAD}
        assert set(loss[filled]) <= {1} and set(loss[padded]) <= {int(supervise)}
        assert set(seen[content]) == {1} and set(seen[filled]) <= {int(window)} and set(seen[padded]) <= {0}


def test_row_that_is_already_padded_keeps_its_unattended_tail():
    row = {"input_ids": [5, 6, 0, 0], "loss_mask": [1, 1, 0, 0], "attention_mask": [1, 1, 0, 0]}
    out = collate([row, _row(6)], PAD, EOS)
    assert out["attention_mask"][0].tolist() == [1, 1, 0, 0, 0, 0]
    assert out["loss_mask"][0].tolist() == [1, 1, 0, 0, 0, 0]


def test_pad_equal_to_eos_is_told_apart_by_position():
    out = collate([{**_row(3), "input_ids": [5, 6, EOS]}, _row(6)], pad_token_id=EOS, eos_token_id=EOS)
    assert out["input_ids"][0].tolist() == [5, 6, EOS, EOS, EOS, EOS]
    assert out["loss_mask"][0].tolist() == [1, 1, 1, 0, 0, 0]


def test_malformed_batches():
    with pytest.raises(ValueError, match="no rows"):
        collate([], PAD)
    with pytest.raises(ValueError, match="Row 1 has 3 ids, 2 loss mask"):
        collate([_row(3), _row(3, [1, 1])], PAD)


@given(length=st.integers(1, 500), block=st.integers(1, 32), divisible=st.integers(1, 32))
def test_divisible_cap(length, block, divisible):
    multiple = lcm(block, divisible)
    if length < multiple:
        with pytest.raises(ValueError, match=f"{length} is shorter than {multiple}"):
            divisible_cap(length, block, divisible)
        return
    cap = divisible_cap(length, block, divisible)
    assert cap % multiple == 0 and length - multiple < cap <= length
    assert common_length([10 * length], block, divisible, cap) == cap  # capped, and still divisible


def _sample(n=5):
    return Sample(
        tokens_S=torch.arange(10, 10 + n),
        loss_mask_S=torch.arange(n) >= 2,
        document_S=torch.zeros(n, dtype=torch.int32),
        position_S=torch.arange(n),
        index=3,
    )


def test_padding_that_is_nobodys():
    out = pad_sample(_sample(), 8, PAD, supervise=False)
    assert out.tokens_S.tolist() == [10, 11, 12, 13, 14, PAD, PAD, PAD]
    assert out.loss_mask_S.tolist() == [False, False, True, True, True, False, False, False]
    assert out.document_S.tolist() == [0] * 5 + [PADDING_DOCUMENT] * 3
    assert out.index == 3


def test_padding_that_continues_the_answer():
    out = pad_sample(_sample(), 8, PAD, supervise=True)
    assert out.loss_mask_S.tolist() == [False, False] + [True] * 6
    assert out.document_S.tolist() == [0] * 8
    assert out.position_S.tolist() == list(range(8))


@given(n=st.integers(0, 9), more=st.integers(0, 9), supervise=st.booleans())
def test_padding_keeps_the_sample_and_its_dtypes(n, more, supervise):
    before = _sample(n)
    after = pad_sample(before, n + more, PAD, supervise)
    assert len(after) == n + more
    for name in ("tokens_S", "loss_mask_S", "document_S", "position_S"):
        old, new = getattr(before, name), getattr(after, name)
        assert new.dtype == old.dtype and new.shape == (n + more,) and torch.equal(new[:n], old)
    assert (after.document_S[n:] >= 0).all() == (supervise or not more)


def test_padding_a_fill_leaves_the_fill_supervised():
    out = pad_sample(fill_sample(_sample(), 4, EOS), 10, EOS, supervise=False)
    assert out.tokens_S.tolist() == [10, 11, 12, 13, 14, EOS, EOS, EOS, EOS, EOS]
    assert out.loss_mask_S.tolist() == [False, False] + [True] * 6 + [False] * 2
    assert out.position_S[:8].tolist() == list(range(8))


def test_fill_stops_at_the_sequence_length():
    assert len(fill_sample(_sample(), 4, EOS, max_length=7)) == 7
    assert len(fill_sample(_sample(), None, EOS)) == 5


def test_padding_that_cannot_be():
    with pytest.raises(ValueError, match="5 tokens and cannot be padded to 4"):
        pad_sample(_sample(), 4, PAD, supervise=False)
    with pytest.raises(ValueError, match="already ends in unsupervised padding"):
        pad_sample(pad_sample(_sample(), 6, PAD, supervise=False), 8, PAD, supervise=True)
