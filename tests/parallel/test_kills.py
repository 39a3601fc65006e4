"""Any rank may be killed at any moment: the run goes on from its last checkpoint as if nothing had happened.

The long version (`-m slow`) took 15 minutes on 2 busy CPU cores. A failure names its seed: KILL_SEED=... repeats its
choices.
"""

import os
import random
import re
import time

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from megatron_dllm.checkpoint import check_complete, is_complete
from megatron_dllm.resilience.retention import checkpoints
from tests.checkpoints import saved_tensors
from tests.parallel.cases import TINY, write_chat
from tests.parallel.launcher import Launcher, sessions
from tests.parallel.test_resume import LAYOUTS

EVERY = 3  # steps between checkpoints
START_SECONDS = 300


@pytest.fixture(scope="module")
def launcher():
    launcher = Launcher()
    yield launcher
    launcher.stop()


def losses(log: str) -> dict[int, str]:
    return {int(i): loss for i, loss in re.findall(r"iteration +(\d+)/.*?\| loss: (\S+)", log)}


def read(logs) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(logs.glob("*")))


def wait_for(condition, launcher) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def tracked(run) -> int:
    tracker = run / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def check_folder(run) -> None:
    """Right after a kill: what the run would go on from is whole, and little else is there."""
    if tracked(run):
        check_complete(str(run / f"iter_{tracked(run):07d}"))
    complete = [step for step in checkpoints(str(run)) if is_complete(str(run), step)] if run.exists() else []
    assert len(complete) <= 3  # two that are kept, and one whose predecessor has not gone yet
    assert all(step <= tracked(run) + EVERY for step in complete)


def kill_again_and_again(launcher, tmp_path, name: str, kills: int, iterations: int) -> None:
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    processes, layout = LAYOUTS[name]
    data = write_chat(tmp_path)
    argv = [*TINY, *layout.split(), "--sft-data-path", data, "--train-iters", iterations, "--save-interval", EVERY]
    straight = tmp_path / "straight"
    launcher.start([*argv, "--save", straight], processes, tmp_path / "logs")
    assert launcher.wait(START_SECONDS + iterations) == [0] * processes, read(tmp_path / "logs")[-3000:]
    expected = losses(read(tmp_path / "logs"))
    assert len(expected) == iterations
    run = tmp_path / "run"
    argv += ["--save", run, "--load", run, "--save-retain", "2"]
    seen: dict[int, str] = {}
    for kill in range(kills + 1):
        logs, begin = tmp_path / f"logs{kill}", tracked(run)
        flags = ["--async-save"] if chance.random() < 0.6 else []
        pids = launcher.start([*argv, *flags], processes, logs)
        last = kill == kills
        if not last:
            if chance.random() < 0.15:  # while it starts
                time.sleep(chance.uniform(0, 2))
            else:
                goal = begin + chance.randint(1, 3 * EVERY)
                wait_for(lambda: max(losses(read(logs)), default=0) >= min(goal, iterations), launcher)  # noqa: B023
                time.sleep(chance.uniform(0, 0.2))
            launcher.kill(chance.randrange(processes))
        codes = launcher.wait(START_SECONDS + iterations if last else chance.choice((0, 10)))
        log = read(logs)
        deadline = time.monotonic() + 60
        while sessions() & set(pids):
            assert time.monotonic() < deadline, "something of a killed rank lives on"
            time.sleep(0.01)
        shown = losses(log)
        assert all(expected[i] == loss for i, loss in shown.items()), (seed, kill)
        seen |= shown
        announced = [int(i) for i in re.findall(r"successfully saved checkpoint from iteration +(\d+)", log)]
        assert tracked(run) >= max(announced, default=begin), (seed, kill)
        if not flags and shown:
            assert max(shown) - tracked(run) <= EVERY, (seed, kill)
        if shown:
            assert min(shown) == begin + 1, (seed, kill)
        if last:
            assert codes == [0] * processes, log[-3000:]
        check_folder(run)
    assert seen == expected
    left = checkpoints(str(run))
    assert left == sorted({iterations - (iterations % EVERY or EVERY), iterations})
    for step in left:
        state, same = (saved_tensors(folder / f"iter_{step:07d}") for folder in (run, straight))
        assert state.keys() == same.keys() and not [key for key in state if not torch.equal(state[key], same[key])]
        assert load_common_state_dict(run / f"iter_{step:07d}")["args"].consumed_train_samples == 8 * step
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith("iter_")) == [
        "latest_checkpointed_iteration.txt"
    ]


def test_a_few_kills(launcher, tmp_path):
    kill_again_and_again(launcher, tmp_path, "DP2 distributed optimizer", kills=2, iterations=12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills"), (("DP2 distributed optimizer", 50), ("PP2 VPP2", 15)))
def test_many_kills(launcher, tmp_path, name, kills):
    kill_again_and_again(launcher, tmp_path, name, kills, iterations=6 * kills)
