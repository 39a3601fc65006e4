"""Starts runs of the training program that a test may kill: ranks are forked from a process that has imported all.

`Launcher` is what tests use; the rest runs in the process it starts, which takes a job per line on stdin (JSON) and
answers with its processes' ids, and later with how they ended.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.parallel.pool import ROOT


class Launcher:
    """Runs one job after the other: `start`, perhaps `kill`, `wait`."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.launcher"],
            cwd=ROOT,
            env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", TOKENIZERS_PARALLELISM="false"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = []

    def start(self, argv: list, processes: int, logs: Path) -> list[int]:
        """Ids of the processes, each the leader of a session of its own. They write to logs/<rank>."""
        logs.mkdir(parents=True, exist_ok=True)
        self._ask(dict(argv=[str(word) for word in argv], processes=processes, logs=str(logs)))
        self.pids = self._answer()
        return self.pids

    def kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, seconds: float) -> list[int]:
        """How the ranks ended (exit codes, or minus the signal), after `seconds` at most: then the rest is killed."""
        self._ask(dict(wait=seconds))
        return self._answer()

    def stop(self) -> None:
        for rank in range(len(self.pids)):
            self.kill(rank)
        self.process.kill()
        self.process.wait()

    def _ask(self, job: dict) -> None:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def _answer(self):
        return json.loads(self.process.stdout.readline())


def sessions() -> set[int]:
    """Ids of all sessions that have a process which is not a zombie."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                found.add(int(session))
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork_rank(job: dict, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        log = os.open(os.path.join(job["logs"], str(rank)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        n = str(job["processes"])
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=n, LOCAL_WORLD_SIZE=n)
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.argv = ["pretrain_dllm.py", *job["argv"]]
        sys.modules["pretrain_dllm"].main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], seconds: float) -> list[int]:
    deadline, codes = time.monotonic() + seconds, {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline += 0.2
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def dawdle(function):
    """Slower, so that kills hit it."""

    def slower(*args, **kwargs):
        time.sleep(0.03)
        result = function(*args, **kwargs)
        time.sleep(0.03)
        return result

    return slower


def main() -> None:
    import torch
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    import pretrain_dllm  # noqa: F401
    from megatron_dllm.resilience import saving

    torch.set_num_threads(1)
    saving.shutil.rmtree = dawdle(saving.shutil.rmtree)
    FileSystemWriterAsync.write_preloaded_data = staticmethod(dawdle(FileSystemWriterAsync.write_preloaded_data))
    pids: list[int] = []
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            print(json.dumps(wait(pids, job["wait"])), flush=True)
        else:
            port = free_port()
            pids = [fork_rank(job, rank, port) for rank in range(job["processes"])]
            print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
