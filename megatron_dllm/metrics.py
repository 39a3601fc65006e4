"""What a diffusion researcher looks at: the loss by noise level and by place in a block, throughput and memory."""

import torch

from megatron_dllm.planning.hardware import TERA, recognise

LEVELS = 10  # bins of the noise level t in [0, 1]
PLACES = 32  # bins of the place in a block; of a longer block the last bin takes the rest


class LossByBin:
    """Mean nll of scored tokens by bin, accumulated between two log lines. Sums stay on the device."""

    def __init__(self, title: str, labels: list[str]):
        self.title, self.labels = title, labels
        self._totals: torch.Tensor | None = None  # [2, bins]: Σ nll, count
        self._kept: torch.Tensor | None = None

    def reset(self) -> None:
        self._totals = None

    def keep(self) -> None:
        """For `restore`: what was added since then shall not count."""
        self._kept = None if self._totals is None else self._totals.clone()

    def restore(self) -> None:
        self._totals = self._kept

    def add(self, nll_N: torch.Tensor, bins_N: torch.Tensor) -> None:
        """Add scored rows: nll in nats (not weighted), and the bin of each; a bin too high is the last one."""
        if self._totals is None:
            self._totals = torch.zeros(2, len(self.labels), dtype=torch.float64, device=nll_N.device)
        nll = nll_N.double()
        bins = bins_N.long().clamp(0, len(self.labels) - 1)
        self._totals.index_add_(1, bins, torch.stack([nll, torch.ones_like(nll)]))

    def reduce(self, group) -> dict[str, float]:
        """Means over `group` and reset; a bin without tokens is left out. Collective."""
        device = torch.cuda.current_device()
        empty = torch.zeros(2, len(self.labels), dtype=torch.float64, device=device)
        totals = empty if self._totals is None else self._totals
        torch.distributed.all_reduce(totals, group=group)
        self._totals = None
        sums, counts = totals.tolist()
        return {
            f"{self.title}/{label}": total / count
            for label, total, count in zip(self.labels, sums, counts, strict=True)
            if count
        }


class LossCurves:
    """The loss by noise level and by place in the block, of the terms that have them."""

    def __init__(self):
        levels = [f"t {i / LEVELS:.1f}-{(i + 1) / LEVELS:.1f}" for i in range(LEVELS)]
        self.by_level = LossByBin("loss by noise level", levels)
        self.by_place = LossByBin("loss by place in the block", [f"place {i:02d}" for i in range(PLACES)])

    def reset(self) -> None:
        self.by_level.reset()
        self.by_place.reset()

    def keep(self) -> None:
        self.by_level.keep()
        self.by_place.keep()

    def restore(self) -> None:
        self.by_level.restore()
        self.by_place.restore()

    def add(self, nll_N: torch.Tensor, levels_N: torch.Tensor | None, offsets_N: torch.Tensor | None) -> None:
        """Scored rows of one term: nll in nats (not weighted), levels in [0, 1], offsets from 0."""
        if levels_N is not None:
            self.by_level.add(nll_N, levels_N * LEVELS)
        if offsets_N is not None:
            self.by_place.add(nll_N, offsets_N)


def throughput(flops: float, seconds: float, args) -> dict[str, float]:
    """Of a step of so many model FLOPs (planning/flops.py) over all ranks: TFLOP/s of a rank, and where its peak is
    known the share of that in per cent. Nothing if FLOPs are not counted."""
    if not flops:
        return {}
    reached = flops / seconds / args.world_size / TERA
    peak = peak_tflops(args)
    return {"TFLOP/s per rank": reached} | ({} if peak is None else {"MFU (%)": 100 * reached / peak})


def peak_tflops(args) -> float | None:
    """--peak-tflops, or that of this process's GPU; None if it is not known."""
    if args.peak_tflops is not None or not torch.cuda.is_available():
        return args.peak_tflops
    gpu = recognise(torch.cuda.get_device_name())
    return None if gpu is None else gpu.peak(bool(args.fp8)) / TERA


def memory_gib() -> float:
    """Peak memory of this process's device in GiB: allocated on a GPU, resident on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30
