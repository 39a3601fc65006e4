"""Where the blocks of a draft begin, and how many of their tokens are known (modes/dflash.py).

Each way of sampling returns (anchors_N int64, kept_N bool) of a sample: N places, and which of them count, those first.
Shapes: N blocks of K tokens.
"""

import torch

from megatron_dllm.data.sample import Sample

PREFIX_BASE = 0.9  # as published


def supervised(sample: Sample, N: int, K: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to N distinct supervised tokens that K - 1 others of their document follow, in order. Draws: one uniform for
    each place that a block of the sample can begin at."""
    anchors_N, kept_N = torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.bool)
    places = len(sample) - K + 1
    if places < 1:
        return anchors_N, kept_N
    valid = sample.loss_mask_S[:places] & (sample.document_S[:places] == sample.document_S[K - 1 :])
    order = torch.rand(places, generator=g).masked_fill(~valid, 2.0).argsort(stable=True)
    count = min(N, int(valid.sum()))
    anchors_N[:count] = order[:count].sort().values
    kept_N[:count] = True
    return anchors_N, kept_N


def overlap(sample: Sample, N: int, K: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """N places from the second on, drawn independently; the first and the last half as often as others."""
    length = len(sample)
    last = max(length - K, 1)
    anchors_N = (1 + (torch.rand(N, generator=g) * (last - 1)).round().long()).clamp(1, last)
    return _published(sample, anchors_N, torch.ones(N, dtype=torch.bool), K)


def nonoverlap(sample: Sample, N: int, K: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that do not overlap, as many as fit, with random gaps between them. (The published way draws one set for a
    whole batch, which would make a sample's blocks depend on its neighbours; of a batch of one it is this, unless more
    blocks fit than there are tokens left between them: of those it has copies in place of the last ones.)"""
    length = len(sample)
    count = min(N, max(1, (length - 1) // K))
    available = length - count * K
    if available < 1:  # no whole block after the first token: none will be kept
        gaps = torch.zeros(1, dtype=torch.int64)
    elif available >= count:
        gaps = torch.randperm(available, generator=g)[:count].sort().values
    else:  # some blocks touch: every arrangement is as likely as another
        gaps = torch.randperm(available + count - 1, generator=g)[:count].sort().values - torch.arange(count)
    starts = gaps + K * torch.arange(count) + 1
    anchors_N = torch.cat([starts, starts[-1:].expand(N - count)])
    return _published(sample, anchors_N, torch.arange(N) < count, K)


def _published(sample: Sample, anchors_N, kept_N, K: int):
    length = len(sample)
    return anchors_N.clamp(max=max(length - 1, 0)), kept_N & (length > K)


def prefixes(N: int, K: int, g: torch.Generator) -> torch.Tensor:
    """[N] int64, from min(2, K - 1) to K - 1."""
    shortest = min(2, K - 1)
    odds = PREFIX_BASE ** torch.arange(shortest, K, dtype=torch.float32)
    return shortest + torch.multinomial(odds, N, replacement=True, generator=g)
