"""How the batch scripts get on with other jobs and other ways to submit, with programs that only stand in for ours."""

import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
SECONDS = 60


def until(condition, report) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, report()
        time.sleep(0.2)


def wrapper(path: Path, script: str, **settings) -> Path:
    """A user's own batch script, which sets variables and goes on with a script of ours."""
    settings |= dict(REPOSITORY=ROOT, HEAD_NODE="127.0.0.1")
    lines = [f'export {name}="{value}"' for name, value in settings.items()]
    path.write_text("\n".join(["#!/bin/bash", *lines, f'source "$REPOSITORY/examples/slurm/{script}.sbatch"', ""]))
    return path


@pytest.mark.parametrize("export", ("NONE", "HOME"))
@pytest.mark.parametrize("script", ("pretrain", "convert", "generate"))
def test_a_job_without_the_environment_of_its_user_finds_its_programs(cluster, tmp_path, script, export):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$PYTHONPATH" "$@" >"$RECORD"\n')
    python.chmod(0o755)
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    files = dict(PROMPTS=tmp_path / "prompts.jsonl", OUTPUT=tmp_path / "answers", SAVE=tmp_path / "run")
    places = dict(VENV=tmp_path, LOGS=tmp_path / "logs", RECORD=tmp_path / "record")
    own = wrapper(tmp_path / "own.sbatch", script, **files, **places)
    more = ("--array=0",) if script == "generate" else ()
    job = cluster.submit(f"--export={export}", "--ntasks-per-node=1", f"--output={tmp_path}/job.log", *more, own)
    until(lambda: not cluster.run("squeue", "-h", "-j", job, check=False).stdout, lambda: cluster.run("squeue").stdout)
    report = "\n".join(path.read_text() for path in [tmp_path / "job.log", *tmp_path.glob("logs/*")])
    assert (tmp_path / "record").exists(), report
    path, *call = (tmp_path / "record").read_text().splitlines()
    program = dict(pretrain="pretrain_dllm", convert="tools/convert_checkpoint", generate="tools/generate")[script]
    assert path.split(":")[0] == str(ROOT) and call[0] == f"{program}.py"


_TRAINER = """
import os, signal, sys, time
from pathlib import Path
save = Path(os.environ["SAVE"])
tracker, trains = save / "latest_checkpointed_iteration.txt", save / "trains"
before = int(tracker.read_text()) if tracker.exists() else 0
def leave(*_):
    time.sleep(3)
    tracker.write_text(str(before + 1))
    trains.unlink()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
with open(trains, "x") as file:  # fails if somebody trains here
    file.write(os.environ["SLURM_JOB_ID"])
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def training(cluster, tmp_path):
    """training(*options, SAVE=...) submits pretraining that takes some time to save; gives the number of the job."""
    (tmp_path / "trainer.py").write_text(_TRAINER)
    (tmp_path / "launch.sh").write_text(f'exec $LAUNCH "{tmp_path}/trainer.py"\n')
    jobs = []

    def submit(*options, **settings) -> int:
        settings |= dict(VENV=sys.prefix, PRETRAIN=tmp_path / "launch.sh", LOGS=f"{tmp_path}/logs-$SLURM_JOB_ID")
        own = wrapper(tmp_path / f"own{len(jobs)}.sbatch", "pretrain", **settings)
        jobs.append(cluster.submit("--open-mode=append", f"--output={tmp_path}/%j.log", *options, own))
        return jobs[-1]

    yield submit
    cluster.run("scancel", *jobs, check=False)


def test_a_task_of_an_array_goes_back_alone_and_keeps_its_folder(cluster, training, tmp_path):
    array = training("--array=0-2", SAVE=f"{tmp_path}/run$SLURM_ARRAY_TASK_ID")
    tasks = [f"{array}_{task}" for task in range(3)]
    trains = [tmp_path / f"run{task}" / "trains" for task in range(3)]
    logs = lambda: "\n".join(path.read_text() for path in [*tmp_path.glob("*.log"), *tmp_path.glob("logs*/*")])
    states = lambda: [(cluster.job(task)["JobState"], cluster.job(task)["Restarts"]) for task in tasks]
    until(lambda: all(path.exists() for path in trains), logs)
    whole = next(i for i, path in enumerate(trains) if path.read_text() == str(array))  # it has the array's number
    others = [i for i in range(3) if i != whole]

    cluster.run("scancel", "--batch", "--signal=USR1", tasks[whole])
    until(lambda: states()[whole] == ("PENDING", "1"), logs)
    assert [states()[i] for i in others] == [("RUNNING", "0")] * 2, logs()
    cluster.start_now(tasks[whole])
    until(trains[whole].exists, logs)  # the folder is its own still

    # one more job for the folder of another task
    busy = others[0]
    second = training(SAVE=tmp_path / f"run{busy}")
    until(lambda: cluster.job(second)["JobState"] == "FAILED", logs)
    assert f"trains into {tmp_path}/run{busy}" in (tmp_path / f"{second}.log").read_text()
    # it is free when that task has ended, and only then
    cluster.run("scancel", tasks[busy])
    third = training(SAVE=tmp_path / f"run{busy}")
    until(lambda: trains[busy].exists() and trains[busy].read_text() == str(third), logs)
    assert states()[busy][0] == "CANCELLED"
    assert [states()[i] for i in (whole, others[1])] == [("RUNNING", "1"), ("RUNNING", "0")]


def test_of_two_jobs_started_at_once_one_gets_the_folder(cluster, training, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm_job").write_text("4000000\n")  # left by a job that SLURM has forgotten
    jobs = [training("--hold", SAVE=tmp_path / "run") for _ in range(2)]
    cluster.run("scontrol", "release", *map(str, jobs))
    states = lambda: sorted(cluster.job(job)["JobState"] for job in jobs)
    until(lambda: states() == ["FAILED", "RUNNING"] and (tmp_path / "run" / "trains").exists(), states)
