"""A preempted run saves, whenever the signal comes: SLURM sends it to every process of the job, those that load data
and those that help with saving too."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.cases import TINY, write_text

ROOT = Path(__file__).parents[2]
SECONDS = 300


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid for child in children for pid in (int(child), *descendants(int(child)))]


def held(pid: int, *kinds: str) -> set[int]:
    """Signals that a process blocks ("Blk"), ignores ("Ign")."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(re.search(rf"Sig{kind}:\s*(\w+)", status)[1], 16) for kind in kinds]
    return {number for number in range(1, 32) for mask in masks if mask >> (number - 1) & 1}


class Run:
    """Ranks as tasks of SLURM: processes of their own, which found SIGTERM ignored when they began."""

    def __init__(self, folder: Path, ranks: int, *flags: str, program: str = "pretrain_dllm.py"):
        self.save, self.path = folder / "run", folder / "log"
        command = [sys.executable, *program.split(), *TINY, "--data-path", write_text(folder), "--split", "70,30,0"]
        command += ["--exit-signal-handler", "--save", str(self.save), "--train-iters", "100000", *flags]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with open(self.path, "w") as output:
            self.ranks = [
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ
                    | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
                    | {name: str(value) for name, value in dict(place, RANK=rank, LOCAL_RANK=rank).items()},
                    stdout=output,
                    stderr=output,
                    preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
                )
                for rank in range(ranks)
            ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.wait()

    def processes(self) -> list[int]:
        return [pid for rank in self.ranks if rank.poll() is None for pid in (rank.pid, *descendants(rank.pid))]

    def log(self) -> str:
        return self.path.read_text()

    def wait_until(self, condition: Callable[[], bool], every: float = 0.1) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline and None in [rank.poll() for rank in self.ranks], self.log()[-3000:]
            time.sleep(every)

    def saved(self) -> int:
        tracker = self.save / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def signal_all(self) -> int:
        """Returns to how many processes SIGTERM was sent."""
        processes = self.processes()
        for pid in processes:
            os.kill(pid, signal.SIGTERM)
        return len(processes)

    def end(self) -> None:
        """All ranks end well and have saved their last iteration, once."""
        deadline = time.monotonic() + SECONDS
        try:
            codes = [rank.wait(max(deadline - time.monotonic(), 0.1)) for rank in self.ranks]
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running: {self.log()[-3000:]}")
        assert codes == [0] * len(codes), self.log()[-3000:]
        assert "exiting program after receiving SIGTERM" in self.log()
        assert self.saved() == int(re.findall(r"iteration +(\d+)/ +100000 ", self.log())[-1])


def test_all_processes_of_a_run_that_has_saved_before_get_the_signal(tmp_path):
    """From the first save on there is one more: it collects what the writers of checkpoints report."""
    flags = "--tensor-model-parallel-size 2 --num-workers 2 --save-interval 2".split()
    with Run(tmp_path, 2, *flags) as run:
        run.wait_until(lambda: run.saved() >= 2)
        for pid in run.processes():  # blocked also in a rank that has a handler: it would interrupt what is at work
            assert signal.SIGTERM in held(pid, "Blk", "Ign"), Path(f"/proc/{pid}/cmdline").read_text()
        assert run.signal_all() >= 2 + 4 + 2  # ranks, their loader workers, and these collectors
        run.end()


def test_a_signal_during_the_start_is_kept(tmp_path):
    with Run(tmp_path, 1, "--save-interval", "100000") as run:
        run.wait_until(lambda: signal.SIGTERM in held(run.ranks[0].pid, "Blk"), every=0.01)
        run.signal_all()
        assert "megatron" not in run.log().lower()  # still importing
        run.end()
        assert run.saved() == 1


def test_a_signal_during_a_save_lets_it_end(tmp_path):
    with Run(tmp_path, 1, "--save-interval", "3", program="-m tests.parallel.slow_disk") as run:
        run.wait_until(lambda: (run.save / "iter_0000003").exists(), every=0.01)
        assert run.saved() == 0
        # once more and again, while processes come and go
        while run.saved() == 0:
            run.wait_until(lambda: True)
            run.signal_all()
            time.sleep(0.1)
        run.end()


@pytest.mark.slow
def test_a_signal_during_validation_waits_for_its_end(tmp_path):
    with Run(tmp_path, 1, *"--save-interval 100000 --eval-interval 3 --eval-iters 60".split()) as run:
        run.wait_until(lambda: "RerunMode.DISABLED" in run.log(), every=0.01)
        run.signal_all()
        run.end()
        assert run.saved() == 3 and "validation loss at iteration 3" in run.log()


@pytest.mark.slow
def test_a_run_that_is_killed_during_a_save_goes_on_from_the_one_before(tmp_path):
    """And saves over what the killed one has left."""
    flags = ["--save-interval", "3", "--load", str(tmp_path / "run")]
    with Run(tmp_path, 1, *flags) as run:
        run.wait_until(lambda: run.saved() == 3 and (run.save / "iter_0000006").exists(), every=0.001)
    assert run.saved() == 3
    with Run(tmp_path, 1, *flags) as run:
        run.wait_until(lambda: run.saved() >= 6)
        run.signal_all()
        run.end()
        assert re.search(r"iteration +(\d+)/", run.log())[1] == "4"
