"""--save-retain N, --save-retain-interval M: old checkpoints go once a newer one is complete (rank 0).

A folder gets another name in one step and is deleted under that, so that no checkpoint ever loads in half; what a kill
leaves of it is deleted the next time. The one that the tracker names, and all that are newer, stay.
"""

import os
import re
import shutil
import threading

from megatron_dllm.checkpoint import is_complete

_NAME = re.compile(r"iter_(\d{7,})")
_DELETED = "deleted_"
# What a torch_dist checkpoint consists of. A folder with anything else in it is not a half-written one of ours.
_OURS = re.compile(r"\.metadata(\.tmp)?|metadata\.json|integrity\.json|common\.pt|.*\.distcp")


def checkpoints(run: str) -> list[int]:
    """Iterations with a folder in `run`, complete or not, in order; links are left alone."""
    found = []
    for entry in os.scandir(run):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False):
            found.append(int(match[1]))
    return sorted(found)


def rename_away(folder: str) -> str:
    """`folder` under a name that no checkpoint has."""
    run, name = os.path.split(folder)
    number, other = 1, os.path.join(run, f"{_DELETED}{name}")
    while os.path.lexists(other):  # of a kill; a network file system may refuse to delete what somebody reads
        number, other = number + 1, os.path.join(run, f"{_DELETED}{name}.{number}")
    os.rename(folder, other)
    return other


class Retention:
    """Deletes in a thread of its own: on a network file system it may take longer than a step."""

    def __init__(self):
        self._thread: threading.Thread | None = None

    def prune(self, run: str, iteration: int, newest: int, every: int | None = None, busy: int | None = None) -> None:
        """`iteration` has just been completed: of the checkpoints up to it, its predecessors go, and what interrupted
        saves have left. newest: how many complete ones stay; every: multiples of it stay as well; busy: one that is
        being read."""
        older = [step for step in checkpoints(run) if step < iteration]
        complete = [step for step in older if is_complete(run, step)]
        kept = complete[-(newest - 1) :] if newest > 1 else []
        away = [step for step in complete if step not in kept and step != busy and (every is None or step % every != 0)]
        # saves finish in order, so nothing is being written to an older folder any more
        away += [step for step in older if step not in complete and _half_written(run, step)]
        for step in away:
            rename_away(os.path.join(run, f"iter_{step:07d}"))
        folders = [
            entry.path
            for entry in os.scandir(run)
            if entry.name.startswith(_DELETED) and _NAME.match(entry.name.removeprefix(_DELETED))
        ]
        if folders:
            self.wait()
            self._thread = threading.Thread(target=_delete, args=(folders,))
            self._thread.start()
        if away:
            print(f"deleted checkpoints of iterations {', '.join(map(str, sorted(away)))} in {run}", flush=True)

    def wait(self) -> None:
        """Until all is deleted."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _half_written(run: str, step: int) -> bool:
    with os.scandir(os.path.join(run, f"iter_{step:07d}")) as entries:
        return all(entry.is_file(follow_symlinks=False) and _OURS.fullmatch(entry.name) for entry in entries)


def _delete(folders: list[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # the next time tries again
