"""The only randomness of training: every draw is a function of (run seed, stream, sample index).

`index` is the sample's position in the global, shuffled training stream. It is the same number whatever
the data-, tensor-, pipeline- or context-parallel layout, micro-batch size or accumulation, so peers that
share a sample compute the same noise without communicating, and a resumed run continues it exactly.

Two seed formulas live here:

* the *corruption* stream keeps the published one (`corruption_sample_seed`), so that noise is bit-identical
  with runs of the reference recipes;
* every other stream is hashed. torch's CPU generator (MT19937) keeps only the low 32 bits of a seed, so
  streams that differ by a large additive offset would silently be the same stream.
"""

import hashlib
import math

import torch

_KNUTH = 2654435761  # multiplicative hash constant, odd: no two indices below 2**32 collide
_OFFSET = 2 << 42
_POSITIVE_INT64 = (1 << 63) - 1

CORRUPTION = "corruption"


def seed_for_index(base_seed: int, index: int) -> int:
    """Published corruption seed of the sample at global position `index` (63-bit non-negative int)."""
    return (base_seed + _OFFSET + _KNUTH * index) & _POSITIVE_INT64


def corruption_sample_seed(
    base_seed: int,
    step: int,
    dp_rank: int,
    dp_size: int,
    local_batch_size: int,
    grad_acc_steps: int,
    microbatch_idx: int,
    offset: int,
) -> int:
    """Published per-row corruption seed, from the row's place in a strided data-parallel schedule.

    Row `offset` of micro-batch `microbatch_idx` on data-parallel rank `dp_rank` in optimizer step `step`
    (from 0) has global index `step * (local_batch_size * dp_size * grad_acc_steps) + dp_rank +
    (microbatch_idx * local_batch_size + offset) * dp_size`. Training does not rebuild the index this way
    (Megatron's data order is contiguous per rank, not strided): it takes it from the sample.
    """
    global_batch_size = local_batch_size * dp_size * grad_acc_steps
    index = step * global_batch_size + dp_rank + (microbatch_idx * local_batch_size + offset) * dp_size
    return seed_for_index(base_seed, index)


def hashed_seed(*parts: int | str) -> int:
    """A well-mixed 63-bit seed from integers and names; all of its bits, the low 32 too, depend on all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _POSITIVE_INT64


def generator(seed: int, stream: str, index: int) -> torch.Generator:
    """CPU generator of one sample in one named stream; independent of every other stream and index."""
    value = seed_for_index(seed, index) if stream == CORRUPTION else hashed_seed(seed, stream, index)
    return torch.Generator().manual_seed(value)


class Draws:
    """Everything random that happens to one sample; handed to `Mode.corrupt`."""

    def __init__(self, seed: int, index: int):
        self.seed, self.index = seed, index

    def generator(self, stream: str = CORRUPTION) -> torch.Generator:
        return generator(self.seed, stream, self.index)

    def level(self, g: torch.Generator, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
        """Uniform float32 noise levels in [0, 1), the first draw from `g`."""
        return torch.rand(shape, generator=g)


class ValidationDraws(Draws):
    """Noise of validation sample `index`: the same in every run, at every step and in every layout.

    It does not depend on the run's seed, so that two checkpoints, also of different runs, are compared on
    the same corrupted tokens. Levels are stratified: a golden-ratio sequence puts any n consecutive samples
    nearly evenly into [0, 1), which removes most of the variance that independent levels would add. It begins in
    the middle: at 0, a loss that grows without bound at low noise would have an outlier in every evaluation.
    Of several levels in a sample (one a block) each place goes through such a sequence over the samples, and the
    places of a sample through another one.
    """

    _OVER_SAMPLES, _OVER_PLACES = 0.6180339887498949, 0.41421356237309515  # (√5 - 1) / 2 and √2 - 1

    def __init__(self, index: int):
        super().__init__(seed=0, index=index)

    def generator(self, stream: str = CORRUPTION) -> torch.Generator:
        return generator(self.seed, f"validation/{stream}", self.index)

    def level(self, g: torch.Generator, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
        places = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
        levels = 0.5 + self.index * self._OVER_SAMPLES + places * self._OVER_PLACES
        return (levels % 1.0).float().clamp_(max=1 - 2**-24)
