"""A clock for tests of measured times, which no other work on the machine disturbs."""

import contextlib
import functools
import time
import types

import torch

from megatron_dllm import cpu
from megatron_dllm.resilience import stragglers


class QuietClock:
    """Counts the processor time of this thread, and what it sleeps or waits for other ranks, but not that it had to
    share its processor."""

    def __init__(self):
        self._idle, self._idle_since = 0.0, None

    def perf_counter(self) -> float:
        """Seconds."""
        now = 0.0 if self._idle_since is None else time.perf_counter() - self._idle_since
        return time.thread_time() + self._idle + now

    @contextlib.contextmanager
    def idling(self):
        self._idle_since = time.perf_counter()
        try:
            yield
        finally:
            self._idle, self._idle_since = self._idle + time.perf_counter() - self._idle_since, None

    @contextlib.contextmanager
    def installed(self):
        """In place of `time.perf_counter` where a rank's own time is measured."""
        work = torch._C._distributed_c10d.Work
        wait = work.wait
        work.wait = functools.wraps(wait)(lambda *args, **kwargs: self._wait(wait, *args, **kwargs))
        modules = (cpu, stragglers)
        for module in modules:
            module.time = types.SimpleNamespace(perf_counter=self.perf_counter)
        try:
            yield
        finally:
            work.wait = wait
            for module in modules:
                module.time = time

    def _wait(self, wait, *args, **kwargs):
        with self.idling():
            return wait(*args, **kwargs)

    def slowly(self, function, seconds: float):
        """`function` on a bad processor."""

        @functools.wraps(function)
        def slowed(*args, **kwargs):
            with self.idling():
                time.sleep(seconds)
            return function(*args, **kwargs)

        return slowed
