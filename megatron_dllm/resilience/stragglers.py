"""--dllm-straggler-report: which rank is slow, rather than which ones wait for it.

A rank's own time is that of its forward and backward passes, reading its data included, less what it waits for others
meanwhile. On a CPU that is known: waiting happens in `Work.wait`. On a GPU collectives are kernels like any other, so
there a rank that waits for a tensor- or context-parallel peer looks as slow as that peer, and the report names their
group; time between pipeline stages and data-parallel replicas is told apart there, too.

Stages of a pipeline do different work, so a rank is compared with those of its own stage, if there are any.
(Megatron's --log-straggler needs GPUs, a port, and calls in the forward step; it times forward passes alone.)
"""

import functools
import socket
import statistics
import time

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules


class StepClock:
    """This rank's own time, summed up until `report`."""

    def __init__(self):
        self.reset()

    def reset(self, threshold: float | None = None) -> None:
        """threshold: a slower rank, by this factor, is warned of; None: nothing is measured."""
        self.threshold = threshold
        self._events: list[tuple] = []
        self._waited = self._milliseconds = 0.0
        self._steps = 0
        self._hosts: list[str] | None = None

    def timed(self, function):
        """`function`, measured."""

        @functools.wraps(function)
        def measure(*args, **kwargs):
            if self.threshold is None:
                return function(*args, **kwargs)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            waited = self._waited
            start.record()
            try:
                return function(*args, **kwargs)
            finally:
                end.record()
                self._events.append((start, end, self._waited - waited))

        return measure

    def waiting(self, wait):
        """`Work.wait`, measured."""

        @functools.wraps(wait)
        def measure(*args, **kwargs):
            if self.threshold is None:
                return wait(*args, **kwargs)
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self._waited += time.perf_counter() - start

        return measure

    def step_begins(self) -> None:
        """Forgets evaluations."""
        self._events.clear()

    def step_ended(self) -> None:
        """The optimizer has synchronised the device, so all events have happened."""
        for start, end, waited in self._events:
            self._milliseconds += start.elapsed_time(end) - 1e3 * waited
        self._events.clear()
        self._steps += 1

    def report(self) -> list[str]:
        """Lines for the log, on every rank, and a new beginning. Collective."""
        mine = self._milliseconds / max(1, self._steps)
        place = [mine, float(mpu.get_pipeline_model_parallel_rank())]
        device = torch.cuda.current_device()
        gathered = [torch.zeros(2, dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor(place, dtype=torch.float64, device=device))
        if self._hosts is None:
            self._hosts = [""] * len(gathered)
            dist.all_gather_object(self._hosts, socket.gethostname())
        self._milliseconds, self._steps = 0.0, 0
        times, stages = zip(*(pair.tolist() for pair in gathered), strict=True)
        return lines(list(times), [int(stage) for stage in stages], self._hosts, self.threshold)


def lines(times_R: list[float], stages_R: list[int], hosts_R: list[str], threshold: float) -> list[str]:
    """The report on R ranks: milliseconds a step, pipeline stage and host of each."""
    ranks = range(len(times_R))
    alone = len(set(stages_R)) == len(stages_R)
    peers = [[times_R[r] for r in ranks if alone or stages_R[r] == stages_R[rank]] for rank in ranks]
    ratios = [times_R[r] / max(statistics.median_low(peers[r]), 1e-9) for r in ranks]
    slowest, fastest = max(ranks, key=ratios.__getitem__), min(ranks, key=ratios.__getitem__)
    name = lambda r: f"rank {r} ({hosts_R[r]}): {times_R[r]:.1f} ms"
    of = "the median" if alone or len(set(stages_R)) == 1 else "its stage's median"
    told = [
        f" own time a step | fastest {name(fastest)} | median {statistics.median_low(times_R):.1f} ms | "
        f"slowest {name(slowest)} | {ratios[slowest]:.2f} times {of}"
    ]
    if ratios[slowest] > threshold:
        told.append(
            f" Warning: the others wait for rank {slowest} on {hosts_R[slowest]}, which takes "
            f"{ratios[slowest]:.2f} times {of} (more than {threshold:g})."
        )
    return told


clock = StepClock()


@functools.cache
def install() -> None:
    """Once per process: nothing is measured before `clock.reset(threshold)`."""
    schedules.forward_step = clock.timed(schedules.forward_step)
    schedules.backward_step = clock.timed(schedules.backward_step)
    if not torch.cuda.is_available():
        work = torch._C._distributed_c10d.Work
        work.wait = clock.waiting(work.wait)
