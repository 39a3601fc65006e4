"""--exit-signal-handler for jobs whose every process gets the signal, at any moment: what SLURM does.

Megatron's handler notes the signal; once per step all ranks agree, save and leave. It leaves two things open. A signal
before the handler is there ends the process. And one ends the processes that help with saving: these are started anew,
without the handler, and without them the save waits for ever. So the signal is blocked, in this process from its first
lines (in pretrain_dllm.py, before the imports) and thereby in all that it starts. The kernel keeps it, and it is let
through where Megatron asks for it.
"""

import atexit
import functools
import multiprocessing
import signal
from multiprocessing import resource_tracker

from megatron.training.dist_signal_handler import DistributedSignalHandler


def hold(number: signal.Signals) -> None:
    """Block the signal for good, in what this process starts from now on too."""
    # It unblocks SIGTERM when it is started, which it would be by the first save. It ignores signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


@functools.cache
def install() -> None:
    """Once per process."""
    received = DistributedSignalHandler.signals_received

    @functools.wraps(received)
    def let_through(self) -> list[int]:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.sig})  # runs Megatron's handler if one is waiting
        signal.pthread_sigmask(signal.SIG_BLOCK, {self.sig})
        return received(self)

    DistributedSignalHandler.signals_received = let_through
    atexit.register(_end_children)


def _end_children() -> None:
    """At exit Python terminates daemons (after a failure there may be some) and waits: SIGTERM would not reach them."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
