"""Checkpoints of a process that may be killed at any moment, written while training waits or in the background.

A checkpoint is complete when its index (.metadata) is there, which is written last, and a run goes on from the one that
the tracker file names. What is added to Megatron's saving:

- the tracker is replaced as a whole; Megatron empties it first, and a kill before it is filled would end the run;
- a folder that an interrupted save has left is cleared before it is written again. Stale files would survive in it, and
  over a complete checkpoint (after --ckpt-step went back) an old index would vouch for new, half-written files;
- processes that write, or collect what was written, die with their rank. An orphan would go on writing files that the
  resumed run writes again, and would keep the sockets open by which the other ranks notice that theirs has died;
- without --async-save results are collected in the process itself, instead of in a server process of its own.

`Completed` knows when a checkpoint is complete: with --async-save that is some steps after it was asked for.
"""

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from typing import TextIO

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.training import checkpointing, get_args

from megatron_dllm.checkpoint import TRACKER, check_hashes, is_complete
from megatron_dllm.resilience import retention

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Completed:
    """Listeners that are told (run folder, iteration) on rank 0 whenever a checkpoint of this run is complete."""

    def __init__(self):
        self.listeners: list[Callable[[str, int], None]] = []

    def tell(self, tracker: str) -> None:
        with open(tracker) as file:
            text = file.read().strip()
        run = os.path.dirname(tracker)
        if text.isdigit() and os.path.realpath(run) == os.path.realpath(get_args().save):
            for listener in self.listeners:
                listener(run, int(text))


completed = Completed()


@functools.cache
def install() -> None:
    """Once per process."""
    checkpointing.maybe_msc = _WholeTracker(checkpointing.maybe_msc)
    filesystem_async.get_write_results_queue = _results_queue
    serialization.verify_integrity_manifest = check_hashes
    temporal, persistent = async_utils.TemporalAsyncCaller, async_utils.PersistentAsyncCaller
    temporal.schedule_async_call = _with_mortal_writer(temporal.schedule_async_call)
    persistent.async_loop = staticmethod(_mortal_loop)
    atexit.register(_kill_writer)


class _WholeTracker:
    """Megatron's file functions (`maybe_msc`), except that the tracker file is never seen empty."""

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name: str):
        return getattr(self._original, name)

    def open(self, path, mode: str = "r", *args, **kwargs):
        if mode == "w" and os.path.basename(path) == TRACKER:
            return _tracker(path)
        return self._original.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _tracker(path: str) -> Iterator[TextIO]:
    with open(f"{path}.partial", "w") as file:  # one name: rank 0 alone writes, and overwrites what a kill has left
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.partial", path)
    completed.tell(path)


def clear_the_way(run: str, iteration: int) -> None:
    """Rank 0, before it saves: whatever has the name of the new checkpoint goes, and the tracker names another one."""
    folder = os.path.join(run, f"iter_{iteration:07d}")
    if not os.path.isdir(folder) or os.path.islink(folder):
        return
    tracker = os.path.join(run, TRACKER)
    if os.path.isfile(tracker):
        with open(tracker) as file:
            named = file.read().strip()
        if named == str(iteration):
            earlier = [step for step in retention.checkpoints(run) if step < iteration and is_complete(run, step)]
            if earlier:
                with open(f"{tracker}.partial", "w") as file:
                    file.write(str(max(earlier)))
                os.replace(f"{tracker}.partial", tracker)
            else:
                os.remove(tracker)
    shutil.rmtree(retention.rename_away(folder), ignore_errors=True)


def _die_with_parent() -> None:
    """This process, a fork of a rank, gets SIGKILL when that ends, however it may (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not multiprocessing.parent_process().is_alive():  # it has ended before
        os._exit(1)


def _write_mortally(write: Callable, *args, **kwargs) -> None:
    _die_with_parent()
    write(*args, **kwargs)


def _with_mortal_writer(schedule: Callable) -> Callable:
    @functools.wraps(schedule)
    def schedule_mortal(self, request):
        if request.async_fn is not None:
            request = request._replace(async_fn=functools.partial(_write_mortally, request.async_fn))
        return schedule(self, request)

    return schedule_mortal


_loop = async_utils.PersistentAsyncCaller.async_loop


def _mortal_loop(*args, **kwargs) -> None:
    """The writer process that GPUs need. It comes from a fork server, which SLURM's signal to every process of a job
    ends, while training waits for this one to save: so it watches for the end of its rank."""

    def end_with_rank():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_rank, daemon=True).start()
    _loop(*args, **kwargs)


def _kill_writer() -> None:
    """At exit, where multiprocessing would end it by SIGTERM and wait: after an error nobody has closed it."""
    process = async_utils.PersistentAsyncCaller._persistent_process
    if process is not None and process.is_alive():
        process.kill()


def _results_queue(mp_mode: str = "spawn"):
    """Instead of Megatron's `get_write_results_queue`: where writers leave what they have written."""
    if not get_args().async_save:
        return queue.Queue()
    if filesystem_async._results_queue is None:
        # a process without a GPU may fork, which takes no time; Megatron's default, spawn, imports everything again
        mode = mp_mode if torch.cuda.is_available() else "fork"
        manager = SyncManager(ctx=torch.multiprocessing.get_context(mode))
        manager.start(_of_manager)
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue


def _of_manager() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM signals every process of a job: training still has to save
    _die_with_parent()
