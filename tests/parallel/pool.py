"""A pool of real processes (gloo) that runs many layouts of the training program without restarting."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_SECONDS = 300  # imports, on a busy machine
CASE_SECONDS = 260  # more than a worker gives itself
MOST_THREADS = 300


class CaseFailed(AssertionError):
    """A case raised; `error` is the exception of the first rank that has one."""

    def __init__(self, message: str, error: str):
        super().__init__(message)
        self.error = error


class Pool:
    """`run` executes one case on the first `processes` workers and returns what the ranks observed."""

    def __init__(self, size: int = 4):
        self.size, self.workers, self.number = size, [], 0
        self.folder = tempfile.TemporaryDirectory(prefix="dllm_pool_")

    def _start(self) -> None:
        folder = Path(self.folder.name)
        for old in (folder / "port", *folder.glob("ready.*")):
            old.unlink(missing_ok=True)
        for rank in range(self.size):
            environment = os.environ | dict(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self.size),
                LOCAL_WORLD_SIZE=str(self.size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT="0",  # every case gets its rendezvous from the pool's store
                POOL_FOLDER=str(folder),
                OMP_NUM_THREADS="1",
                TOKENIZERS_PARALLELISM="false",
                PYTHONWARNINGS="ignore",
            )
            with open(Path(self.folder.name) / f"worker{rank}.log", "w") as log:
                self.workers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.parallel.worker"],
                        cwd=ROOT,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                    )
                )

        self._wait([folder / f"ready.{rank}" for rank in range(self.size)], START_SECONDS)

    def _wait(self, paths: list[Path], seconds: float) -> None:
        """Until all answers are there. A rank that failed leaves the others in a collective: give them a moment,
        then end the pool; a worker that died, or takes too long, ends it too."""
        deadline = time.monotonic() + seconds
        while not all(path.exists() for path in paths):
            if any(path.exists() and '"error"' in path.read_text() for path in paths):
                deadline = min(deadline, time.monotonic() + 5)
            if any(worker.poll() is not None for worker in self.workers):
                deadline = 0
            if time.monotonic() > deadline:
                self.stop()
                break
            time.sleep(0.01)

    def run(self, argv: list, processes: int = 1, **options) -> list[dict]:
        """One result per rank. Raises CaseFailed if any rank raised. `options`: see worker.py."""
        if any(len(os.listdir(f"/proc/{worker.pid}/task")) > MOST_THREADS for worker in self.workers):
            self.stop()  # process groups that something still holds: a fresh pool costs less than their threads
        if not self.workers:
            self._start()
        self.number += 1
        answer = str(Path(self.folder.name) / f"answer{self.number}")
        case = dict(argv=[str(a) for a in argv], processes=processes, answer=answer, number=self.number, **options)
        for worker in self.workers:
            worker.stdin.write(json.dumps(case, default=str) + "\n")
            worker.stdin.flush()
        paths = [Path(f"{answer}.{rank}") for rank in range(processes)]
        self._wait(paths, CASE_SECONDS)
        results = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        for rank, result in enumerate(results):
            if result is not None and "error" in result:
                raise CaseFailed(f"rank {rank}: {result['traceback']}\n{result['output'][-2000:]}", result["error"])
        if None in results:
            logs = "\n".join(p.read_text()[-3000:] for p in sorted(Path(self.folder.name).glob("worker*.log")))
            raise CaseFailed(f"a worker died or hung:\n{logs}", "worker died")
        return results

    def stop(self) -> None:
        """End the workers and what they have spawned (checkpoint writers), hanging or not."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        self.workers = []
