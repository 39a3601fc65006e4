"""Signs of life for those who watch a run from outside: a small file, and the stacks of a process that hangs.

A thread writes them, so that they come while the run hangs, too. (Megatron's fault tolerance wants a server of
nvidia-resiliency-ext; --distributed-timeout-minutes ends a run that hangs in a collective, without saying where.)
"""

import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time

from megatron_dllm.checkpoint import TRACKER
from megatron_dllm.display import whole_file


class Heartbeat(threading.Thread):
    """Of one rank. path: where to write every `interval` seconds, if anywhere; hang: after how many seconds without
    progress stacks are shown, if at all; run: folder of the run's checkpoints."""

    def __init__(self, rank: int, path: str | None, interval: float, hang: float | None, run: str | None):
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.path, self.interval, self.hang, self.run_folder = rank, path, interval, hang, run
        self._facts = dict(iteration=0)
        self._state = "starting"
        self._progress = self._first = time.monotonic()
        self._steps, self._told = 0, False
        self._over = threading.Event()

    def alive(self, state: str | None = None) -> None:
        """Something has gone on; a new state if it has changed."""
        self._progress, self._told = time.monotonic(), False
        if state is not None:
            self._state = state

    def step(
        self, iteration: int, train_iters: int, consumed_samples: int, loss: float, tokens_per_second: float
    ) -> None:
        """After every step. The time that is left is judged by all steps after the first, saves and evaluations
        included."""
        self.alive("training")
        if self._steps == 0:
            self._first = time.monotonic()
        seconds = (time.monotonic() - self._first) / self._steps if self._steps else None
        self._steps += 1
        self._facts = dict(
            iteration=iteration,
            train_iters=train_iters,
            consumed_samples=consumed_samples,
            loss=loss if math.isfinite(loss) else None,  # JSON has no NaN
            tokens_per_second=round(tokens_per_second, 1),
            seconds_left=None if seconds is None else round(seconds * (train_iters - iteration), 1),
        )

    def run(self) -> None:
        written = -math.inf
        tick = min(self.interval, (self.hang or math.inf) / 4, 1.0)
        while not self._over.wait(tick):
            if self.path and time.monotonic() - written >= self.interval:
                written = time.monotonic()
                self._write()
            silent = time.monotonic() - self._progress
            if self.hang and silent > self.hang and not self._told:
                self._told = True
                self._show_stacks(silent)

    def stop(self, error: BaseException | None = None) -> None:
        """The run has ended, by `error` or well."""
        self._over.set()
        self.join()
        ended = error is None or isinstance(error, SystemExit) and not error.code
        self._state = "finished" if ended else f"failed: {type(error).__name__}: {error}"
        if self.path:
            self._write()

    def _write(self) -> None:
        facts = dict(
            time=round(time.time(), 3),
            state=self._state,
            seconds_since_progress=round(time.monotonic() - self._progress, 1),
            **self._facts,
            last_checkpoint=self._last_checkpoint(),
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        try:
            with whole_file(self.path) as file:
                file.write(json.dumps(facts) + "\n")
        except OSError as error:  # a full disk is no reason to stop
            print(f"Warning: {self.path} could not be written ({error}).", file=sys.stderr, flush=True)

    def _last_checkpoint(self) -> int | None:
        try:
            with open(os.path.join(self.run_folder or "", TRACKER)) as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def _show_stacks(self, silent: float) -> None:
        out = sys.__stderr__
        out.write(
            f"rank {self.rank} on {socket.gethostname()}: no progress for {silent:.0f} s ({self._state}, after "
            f"iteration {self._facts['iteration']}); what its threads are doing:\n"
        )
        out.flush()
        faulthandler.dump_traceback(out, all_threads=True)
