"""The batch scripts of examples/slurm on real SLURM daemons: bash tests/slurm/run.sh"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.cases import TINY, write_text
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
SECONDS = 120  # for a start, on a busy machine
_UNFINISHED = "100000"


@pytest.mark.parametrize("name", ("pretrain", "convert", "generate"))
def test_a_shipped_script_fits_on_eight_nodes_of_eight_gpus(cluster, name):
    cluster.run("sbatch", "--test-only", ROOT / f"examples/slurm/{name}.sbatch")


@pytest.mark.parametrize("more", ("--nodes=9", "--ntasks-per-node=9", "--gpus-per-node=9"))
def test_nothing_larger_fits(cluster, more):
    refused = cluster.run("sbatch", "--test-only", more, ROOT / "examples/slurm/pretrain.sbatch", check=False)
    assert "node configuration is not available" in refused.stderr


class Training:
    """A job of examples/slurm/pretrain.sbatch: two nodes, one rank each, which share every layer."""

    def __init__(self, cluster: Cluster, folder: Path, text: str, iterations: str):
        self.cluster, self.folder, self.logs, self.save = cluster, folder, folder / "logs", folder / "run"
        launcher = folder / "tiny.sh"  # as those in examples/, on the CPU
        constant = "--lr-decay-style constant --tensor-model-parallel-size 2 --num-workers 1"
        launcher.write_text(
            f"export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1\nexec $LAUNCH pretrain_dllm.py {' '.join(TINY)} "
            f"{constant} --data-path {text} --split 100,0,0 --train-iters $TRAIN_ITERS "
            '--save "$SAVE" --load "$SAVE" --save-interval 25 "$@"\n'
        )
        self.number = cluster.submit(
            *("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=64", "--partition=small"),
            f"--output={folder}/job.log",
            ROOT / "examples/slurm/pretrain.sbatch",
            REPOSITORY=str(ROOT),
            VENV=sys.prefix,
            LOGS=str(self.logs),
            HEAD_NODE="127.0.0.1",  # the names of these nodes do not resolve
            PRETRAIN=str(launcher),
            SAVE=str(self.save),
            TRAIN_ITERS=iterations,
        )

    def losses(self) -> list[tuple[str, str, str]]:
        """(iteration, samples consumed, loss) as they came, in all starts. The last rank logs."""
        path = self.logs / "rank-0001.log"
        pattern = r"iteration +(\d+)/.*?consumed samples: +(\d+) .*?\| loss: (\S+)"
        return re.findall(pattern, path.read_text()) if path.exists() else []

    def saved(self) -> int:
        tracker = self.save / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{self.cluster.job(self.number)}\n{self.report()}"
            time.sleep(0.2)

    def until_it_trains(self) -> None:
        """And has logged a few iterations more."""
        known = len(self.losses())
        self.until(lambda: len(self.losses()) >= known + 4)

    def until_it_is_put_back(self, restarts: int) -> None:
        """The counter goes up when the job is in the queue once more; it must have saved all it did."""
        done = lambda job: job["JobState"] == "PENDING" and job["Restarts"] == str(restarts)
        self.until(lambda: done(self.cluster.job(self.number)))
        assert self.saved() == int(self.losses()[-1][0]), self.report()

    def log_of_last_start(self) -> str:
        return (self.folder / "job.log").read_text().rpartition(", start ")[2]

    def report(self) -> str:
        paths = [self.folder / "job.log", *sorted(self.logs.glob("*"))]
        return "\n".join(f"{path}:\n{path.read_text()[-2500:]}" for path in paths if path.exists())


@pytest.fixture(scope="module")
def interrupted(cluster, tmp_path_factory):
    """A job that is stopped in four ways, and in the end for good."""
    folder = tmp_path_factory.mktemp("interrupted")
    job = Training(cluster, folder, write_text(folder), _UNFINISHED)
    job.until_it_trains()
    cluster.run("scontrol", "requeue", job.number)
    job.until_it_is_put_back(1)

    cluster.start_now(job.number)
    job.until_it_trains()
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "true")
    job.until_it_is_put_back(2)
    job.until(lambda: cluster.job(urgent)["JobState"] == "COMPLETED")

    cluster.start_now(job.number)
    job.until_it_trains()
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1@300 does near the time limit
    job.until_it_is_put_back(3)

    cluster.start_now(job.number)
    job.until_it_trains()
    cluster.run("scancel", job.number)
    job.until(lambda: "step ended" in job.log_of_last_start())
    job.until(lambda: cluster.job(job.number)["JobState"] != "COMPLETING")
    time.sleep(2)  # would it come back?
    return job


def test_a_cancelled_job_saves_and_stays_away(cluster, interrupted):
    state = cluster.job(interrupted.number)
    assert state["JobState"] == "CANCELLED" and state["Restarts"] == "3", f"{state}\n{interrupted.report()}"
    assert interrupted.saved() == int(interrupted.losses()[-1][0])


def test_an_interrupted_job_trains_as_one_that_was_left_alone(cluster, interrupted, tmp_path):
    losses = interrupted.losses()
    assert [int(iteration) for iteration, _, _ in losses] == list(range(1, len(losses) + 1))
    assert [int(samples) for _, samples, _ in losses] == [8 * i for i in range(1, len(losses) + 1)]
    straight = Training(cluster, tmp_path, write_text(tmp_path), str(len(losses)))
    straight.until(lambda: cluster.job(straight.number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.job(straight.number)["JobState"] == "COMPLETED", straight.report()
    assert straight.losses() == losses


def test_a_checkpoint_is_converted_and_answers_prompts(cluster, interrupted, tmp_path):
    """Both scripts at once; the prompts in two shares, each on two ranks."""
    common = dict(REPOSITORY=str(ROOT), VENV=sys.prefix, OMP_NUM_THREADS="1")
    hf, answers, prompts = tmp_path / "hf", tmp_path / "answers", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(dict(prompt=f"Question {i}", number=i)) + "\n" for i in range(5)))
    jobs = [
        cluster.submit(
            *("--cpus-per-task=32", f"--output={tmp_path}/convert.log", ROOT / "examples/slurm/convert.sbatch"),
            *("export", "--load", interrupted.save, "--save", hf),
            **common | dict(LOGS=str(tmp_path / "convert")),
        )
    ]
    generate = (
        *("--ntasks-per-node=2", "--gpus-per-node=0", "--array=3-4", f"--output={tmp_path}/generate-%a.log"),
        ROOT / "examples/slurm/generate.sbatch",
        *("--load", interrupted.save, "--raw", "--max-new-tokens", 8, "--steps", 2),
    )
    files = dict(PROMPTS=str(prompts), OUTPUT=str(answers), HEAD_NODE="127.0.0.1", LOGS=str(tmp_path / "generate"))
    jobs.append(cluster.submit(*generate, **common | files))
    deadline = time.monotonic() + SECONDS
    while cluster.run("squeue", "-h", "-r", "-j", ",".join(map(str, jobs)), check=False).stdout:
        assert time.monotonic() < deadline, cluster.run("squeue").stdout
        time.sleep(0.2)
    log = "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(tmp_path.rglob("*.log")))
    assert (hf / "model.safetensors").exists() and "is a qwen3 folder" in log
    shares = sorted(answers.iterdir())
    assert [path.name for path in shares] == ["00001.jsonl", "00002.jsonl", "shares"], log
    lines = [json.loads(line) for path in shares[:2] for line in path.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(5)) and all("text" in line for line in lines)
    # what is done is not begun again
    again = cluster.submit(*generate, **common | files)
    while cluster.run("squeue", "-h", "-j", again, check=False).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (tmp_path / "generate-3.log").read_text().rstrip().endswith("00001.jsonl is there.")
