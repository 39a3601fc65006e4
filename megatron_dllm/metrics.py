"""What a diffusion researcher looks at: the loss by noise level, and memory."""

import torch

BINS = 10


class LossByLevel:
    """Mean nll of scored tokens in ten bins of the noise level t, accumulated between two log lines."""

    def __init__(self):
        self._totals: torch.Tensor | None = None  # [2, BINS]: Σ nll, count

    def reset(self) -> None:
        self._totals = None

    def add(self, nll_N: torch.Tensor, levels_N: torch.Tensor) -> None:
        """Add scored rows: nll in nats (not weighted), levels in [0, 1]. Stays on the device."""
        if self._totals is None:
            self._totals = torch.zeros(2, BINS, dtype=torch.float64, device=nll_N.device)
        bins = (levels_N * BINS).long().clamp_(0, BINS - 1)
        nll = nll_N.double()
        self._totals.index_add_(1, bins, torch.stack([nll, torch.ones_like(nll)]))

    def reduce(self, group) -> dict[str, float]:
        """Means over `group` and reset; a bin without tokens is left out. Collective."""
        device = torch.cuda.current_device()
        totals = torch.zeros(2, BINS, dtype=torch.float64, device=device) if self._totals is None else self._totals
        torch.distributed.all_reduce(totals, group=group)
        self._totals = None
        sums, counts = totals.tolist()
        return {
            f"loss by noise level/t {i / BINS:.1f}-{(i + 1) / BINS:.1f}": total / count
            for i, (total, count) in enumerate(zip(sums, counts, strict=True))
            if count
        }


def memory_gib() -> float:
    """Peak memory of this process's device in GiB: allocated on a GPU, resident on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30
