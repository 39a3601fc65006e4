"""A pool of real processes (gloo) that runs many layouts of the training program without restarting."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 150


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
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(self.size):
            environment = os.environ | dict(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self.size),
                LOCAL_WORLD_SIZE=str(self.size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
                TOKENIZERS_PARALLELISM="false",
                PYTHONWARNINGS="ignore",
            )
            log = open(Path(self.folder.name) / f"worker{rank}.log", "w")
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.parallel.worker"],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
        for worker in self.workers:
            self._expect(worker, "ready")

    def _expect(self, worker, word: str) -> None:
        """Wait for a line; a worker that died or hangs ends the pool."""
        timer = threading.Timer(SECONDS, self.stop)
        timer.start()
        try:
            line = worker.stdout.readline().strip()
        finally:
            timer.cancel()
        if line != word:
            logs = "\n".join(p.read_text()[-3000:] for p in sorted(Path(self.folder.name).glob("worker*.log")))
            self.stop()
            raise CaseFailed(f"a worker said {line!r} instead of {word!r}:\n{logs}", "worker died")

    def run(self, argv: list, processes: int = 1, **options) -> list[dict]:
        """One result per rank. Raises CaseFailed if any rank raised. `options`: see worker.py."""
        if not self.workers:
            self._start()
        self.number += 1
        answer = str(Path(self.folder.name) / f"answer{self.number}")
        case = dict(
            argv=[str(a) for a in argv], processes=processes, answer=answer, number=self.number, **options
        )
        for worker in self.workers:
            worker.stdin.write(json.dumps(case, default=str) + "\n")
            worker.stdin.flush()
        for worker in self.workers[:processes]:
            self._expect(worker, "done")
        results = [json.loads(Path(f"{answer}.{rank}").read_text()) for rank in range(processes)]
        for rank, result in enumerate(results):
            if "error" in result:
                raise CaseFailed(f"rank {rank}: {result['traceback']}\n{result['output'][-2000:]}", result["error"])
        return results

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.workers = []
