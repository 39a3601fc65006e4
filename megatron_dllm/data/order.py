"""The order in which samples are seen: pure functions of an index, nothing remembered, nothing drawn ahead.

Training asks for global index 0, 1, 2, ... without end. Which item that is depends on (seed, epoch) alone and
never on how many iterations were asked for or how they were batched, so a run that is resumed with another
`--train-iters`, batch size or layout continues exactly where it stopped.
"""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from megatron_dllm.data.datasets import Samples
from megatron_dllm.data.sample import Sample
from megatron_dllm.noise import hashed_seed

_LONGEST_CYCLE = 1 << 20


def permutation(seed: int, epoch: int, n: int, stream: str = "order") -> np.ndarray:
    """A permutation of 0..n-1, int32 if it fits, else int64; a function of the arguments alone.

    Sorts raw PCG64 output: numpy promises that stream for all versions, but not what `permutation` makes of
    it, and a run must not change its order because numpy was upgraded.
    """
    keys = np.random.PCG64(hashed_seed(seed, stream, epoch)).random_raw(n)
    order = np.argsort(keys, kind="stable")
    return order.astype(np.int32) if n <= np.iinfo(np.int32).max else order


class Epochs:
    """Reads n items over and over, every epoch in a new order."""

    def __init__(self, seed: int, n: int, stream: str = "order"):
        """Raises ValueError if there is nothing to read (n < 1)."""
        if n < 1:
            raise ValueError("There are no samples to draw from; give a data set with at least one sample.")
        self.seed, self.n, self.stream = seed, n, stream
        self._orders: dict[int, np.ndarray] = {}

    def locate(self, index: int) -> tuple[int, int]:
        """Global index >= 0 -> (epoch, item in 0..n-1)."""
        if index < 0:
            raise ValueError(f"Sample index {index} is negative; global indices count from 0.")
        epoch, place = divmod(int(index), self.n)
        return epoch, int(self.order(epoch)[place])

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of 0..n-1 that `epoch` reads."""
        if epoch not in self._orders:
            while len(self._orders) > 1:  # batches around the turn of an epoch need two
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = permutation(self.seed, epoch, self.n, self.stream)
        return self._orders[epoch]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_orders": {}}  # workers rebuild orders; a pickle should stay small


class Blend:
    """Mixes data sets by weight, by random access.

    One cycle of P positions holds data set k exactly P * weight_k times, spread as evenly as possible: its
    j-th sample of c stands at (j + 1/2) / c of the cycle (the Sainte-Lague apportionment of every prefix).
    Position i belongs to cycle i // P, so nothing but i is needed to know whose sample it is, and which.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[float] | None = None):
        """weights None: in proportion to the sizes. Raises ValueError for weights that cannot be honoured."""
        if not datasets:
            raise ValueError("A blend needs at least one data set; check the list of data paths.")
        if weights is None:
            weights = [len(dataset) for dataset in datasets]
        if len(weights) != len(datasets):
            raise ValueError(f"The blend has {len(datasets)} data sets but {len(weights)} weights; give one each.")
        self.datasets = list(datasets)
        counts = _cycle_counts(weights)
        place = [(2 * np.arange(count) + 1) / (2 * count) for count in counts]
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        own = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        order = np.argsort(np.concatenate(place), kind="stable")
        self._counts, self._owner, self._own = counts, owner[order], own[order]

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)

    def locate(self, index: int) -> tuple[int, int]:
        """Global index >= 0 -> (number of the data set, index in it)."""
        if index < 0:
            raise ValueError(f"Sample index {index} is negative; global indices count from 0.")
        cycle, place = divmod(int(index), len(self._owner))
        k = int(self._owner[place])
        return k, cycle * self._counts[k] + int(self._own[place])

    def sample(self, index: int) -> Sample:
        """The sample at `index`, labelled with it: noise follows the global index, not the member's own."""
        k, own = self.locate(index)
        return replace(self.datasets[k].sample(own), index=index)


def _cycle_counts(weights: Sequence[float]) -> list[int]:
    """How often each data set occurs in a cycle: the shortest exact cycle, or 2**20 positions rounded."""
    try:
        exact = [Fraction(Decimal(str(weight))) for weight in weights]  # 0.3 is 3/10, not its binary neighbour
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise ValueError(f"Blend weights {list(weights)} are not all finite numbers; correct them.") from error
    if min(exact) <= 0:
        raise ValueError(f"Blend weights {list(weights)} must be positive; leave a data set out instead.")
    scale = lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    common = gcd(*counts)
    counts = [count // common for count in counts]
    total = sum(counts)
    if total <= _LONGEST_CYCLE:
        return counts
    shares = [Fraction(count * _LONGEST_CYCLE, total) for count in counts]
    rounded = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: rounded[k] - shares[k])
    for k in by_remainder[: _LONGEST_CYCLE - sum(rounded)]:
        rounded[k] += 1
    if min(rounded) == 0:
        raise ValueError(
            f"Blend weight {weights[rounded.index(0)]} is less than a millionth of the sum; "
            "raise it or leave that data set out."
        )
    return rounded
