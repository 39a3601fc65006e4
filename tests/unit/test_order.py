"""The order of samples is a pure function of (seed, epoch, index)."""

import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.order import Blend, Epochs, permutation
from megatron_dllm.data.sample import Sample

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)

PINNED = (
    [4, 1, 0, 5, 7, 2, 6, 3],
    [3, 2, 7, 5, 6, 4, 1, 0],
    [7, 6, 3, 0, 1, 2, 5, 4],
)


class Numbers:
    """A data set whose sample i holds the token 1000 * name + i."""

    def __init__(self, name, size):
        self.name, self.size = name, size

    def __len__(self):
        return self.size

    def sample(self, index):
        one = torch.ones(1, dtype=torch.int64)
        return Sample(one * (1000 * self.name + index), one > 0, one.int() * 0, one * 0, index)


@given(seeds, st.integers(0, 1000), st.integers(0, 200))
def test_permutation(seed, epoch, n):
    order = permutation(seed, epoch, n)
    assert order.dtype == np.int32
    assert sorted(order) == list(range(n))
    assert (order == permutation(seed, epoch, n)).all()


def test_permutation_is_pinned():
    """Changing these would change the order of every run that is resumed."""
    assert permutation(1234, 0, 8).tolist() == PINNED[0]
    assert permutation(1234, 1, 8).tolist() == PINNED[1]
    assert permutation(1234, 0, 8, "documents").tolist() == PINNED[2]


def test_seed_epoch_and_stream_all_matter():
    orders = {
        permutation(seed, epoch, 50, stream).tobytes()
        for seed in range(3)
        for epoch in range(3)
        for stream in ("order", "documents")
    }
    assert len(orders) == 18


def test_places_are_spread_evenly():
    """No item prefers a place: chi-squared of the (item, place) counts over many epochs."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), permutation(7, epoch, 8)] += 1
    chi2 = ((counts - 500) ** 2 / 500).sum()
    assert chi2 < 49 + 5 * (2 * 49) ** 0.5


@given(seeds, sizes)
def test_every_epoch_reads_every_item_once(seed, n):
    epochs = Epochs(seed, n)
    for epoch in range(3):
        located = [epochs.locate(epoch * n + i) for i in range(n)]
        assert {e for e, _ in located} == {epoch}
        assert sorted(item for _, item in located) == list(range(n))


@given(seeds, sizes, st.lists(st.integers(0, 10**15), min_size=1, max_size=20))
def test_an_index_means_the_same_whatever_was_asked_before(seed, n, indices):
    epochs = Epochs(seed, n)
    here = [epochs.locate(i) for i in indices]
    assert here == [Epochs(seed, n).locate(i) for i in indices]
    assert here == [pickle.loads(pickle.dumps(epochs)).locate(i) for i in indices]


@settings(deadline=None, max_examples=20)
@given(seeds, st.integers(5, 40), st.data())
def test_a_run_in_two_parts_of_any_batching_reads_what_one_run_reads(seed, n, data):
    total = 4 * n
    whole = [Epochs(seed, n).locate(i) for i in range(total)]
    resumed, at = [], 0
    while at < total:  # a new process, another --train-iters, another batch size
        batch, iterations = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
        epochs = Epochs(seed, n)
        stop = min(total, at + batch * iterations)
        resumed += [epochs.locate(i) for i in range(at, stop)]
        at = stop
    assert resumed == whole


def test_epochs_errors():
    with pytest.raises(ValueError, match="at least one sample"):
        Epochs(0, 0)
    with pytest.raises(ValueError, match="negative"):
        Epochs(0, 3).locate(-1)


blend_weights = st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(blend_weights)
def test_every_prefix_follows_the_weights(weights):
    blend = Blend([Numbers(k, 10) for k in range(len(weights))], weights)
    seen = np.zeros(len(weights))
    share = np.array(weights) / sum(weights)
    for i in range(500):
        k, own = blend.locate(i)
        assert own == seen[k]  # each data set is read in its own order, without gaps
        seen[k] += 1
        assert (abs(seen - share * (i + 1)) <= 0.5 + share * len(weights) / 2 + 1e-3).all()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 10**12))
def test_integer_weights_are_exact_over_any_cycle(weights, start):
    blend = Blend([Numbers(k, 10) for k in range(len(weights))], weights)
    located = [blend.locate(start + i) for i in range(sum(weights))]
    assert Counter(k for k, _ in located) == Counter(dict(enumerate(weights)))
    assert len(set(located)) == len(located)


def test_decimal_weights_are_taken_as_written():
    blend = Blend([Numbers(0, 9), Numbers(1, 9), Numbers(2, 9)], [0.1, 0.2, 0.7])
    assert Counter(blend.locate(i)[0] for i in range(10)) == {0: 1, 1: 2, 2: 7}


def test_weights_by_size_read_all_once_an_epoch():
    blend = Blend([Numbers(1, 7), Numbers(2, 14), Numbers(3, 3)])
    assert len(blend) == 24
    read = sorted(int(blend.sample(i).tokens_S) for i in range(24))
    assert read == [*range(1000, 1007), *range(2000, 2014), *range(3000, 3003)]


def test_a_long_cycle_is_rounded_and_keeps_its_sum():
    sizes = [3_000_001, 2_000_003, 999_983]
    blend = Blend([Numbers(k, size) for k, size in enumerate(sizes)])
    seen = Counter(blend.locate(i)[0] for i in range(10_000))
    for k, size in enumerate(sizes):
        assert abs(seen[k] - 10_000 * Fraction(size, sum(sizes))) < 3


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=20))
def test_blend_index_purity_and_labels(indices):
    def make():
        return Blend([Numbers(0, 5), Numbers(1, 3)], [2, 1])

    one = make()
    for i in indices:
        sample = one.sample(i)
        assert sample.index == i  # noise follows the global index, not the member's own
        assert torch.equal(sample.tokens_S, make().sample(i).tokens_S)


def test_blend_errors():
    members = [Numbers(0, 5), Numbers(1, 5)]
    cases = [
        ([], None, "at least one"),
        (members, [1], "give one each"),
        (members, [1, 0], "must be positive"),
        (members, [1, -2], "must be positive"),
        (members, [1, float("nan")], "finite"),
        (members, [1, float("inf")], "finite"),
        (members, [1, 1e-9], "millionth"),
    ]
    for datasets, weights, message in cases:
        with pytest.raises(ValueError, match=message):
            Blend(datasets, weights)
    with pytest.raises(ValueError, match="negative"):
        Blend(members).locate(-1)
