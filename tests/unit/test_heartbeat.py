"""Signs of life, and the report on who is slow."""

import json
import math
import re
import time

import pytest

from megatron_dllm.resilience.heartbeat import Heartbeat
from megatron_dllm.resilience.stragglers import lines


def facts(path):
    return json.loads(path.read_text())


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_file_tells_how_far_the_run_is(tmp_path):
    path = tmp_path / "alive.json"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    heartbeat = Heartbeat(3, str(path), 0.02, None, str(tmp_path))
    heartbeat.start()
    until(path.exists)
    assert facts(path)["state"] == "starting" and facts(path)["iteration"] == 0
    for iteration in (8, 9):
        heartbeat.step(iteration, 109, 8 * iteration, 2.5, 1234.56)
        time.sleep(0.05)
    until(lambda: facts(path)["iteration"] == 9)
    told = facts(path)
    assert told["consumed_samples"] == 72 and told["loss"] == 2.5 and told["tokens_per_second"] == 1234.6
    assert 100 * 0.05 <= told["seconds_left"] < 100 * 5 and told["last_checkpoint"] == 7 and told["rank"] == 3
    before = told["seconds_since_progress"]
    until(lambda: facts(path)["seconds_since_progress"] > before)  # it is written while nothing goes on
    heartbeat.step(10, 109, 80, math.nan, 1.0)
    heartbeat.stop()
    assert facts(path)["state"] == "finished" and facts(path)["loss"] is None
    assert [p.name for p in tmp_path.glob("alive*")] == ["alive.json"]


@pytest.mark.parametrize(
    ("error", "state"),
    (
        (SystemExit(0), "finished"),
        (SystemExit(2), "failed: SystemExit: 2"),
        (ValueError("no"), "failed: ValueError: no"),
    ),
)
def test_the_end_is_told(tmp_path, error, state):
    heartbeat = Heartbeat(0, str(tmp_path / "alive.json"), 60, None, None)
    heartbeat.start()
    heartbeat.stop(error)
    assert facts(tmp_path / "alive.json")["state"] == state


def test_a_hang_shows_the_stacks_once(capfd, monkeypatch):
    def hanging_function():
        time.sleep(3)

    with open(capfd.readouterr() and 2, "w", closefd=False) as stderr:
        monkeypatch.setattr("sys.__stderr__", stderr)
        heartbeat = Heartbeat(1, None, 60, 0.2, None)
        heartbeat.start()
        heartbeat.step(5, 10, 40, 1.0, 1.0)
        hanging_function()
        heartbeat.alive()
        heartbeat.stop()
    shown = capfd.readouterr().err
    assert len(re.findall(r"rank 1 on \S+: no progress for \d+ s \(training, after iteration 5\)", shown)) == 1
    assert "in hanging_function" in shown


HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("times", "stages", "slowest", "ratio", "warned"),
    (
        ([10, 11, 12, 30], [0, 0, 0, 0], "rank 3 (b): 30.0 ms", "2.73 times the median", True),
        ([10, 11, 12, 13], [0, 0, 0, 0], "rank 3 (b): 13.0 ms", "1.18 times the median", False),
        # the last stage has the head: its ranks are compared with each other
        ([10, 16, 30, 31], [0, 0, 1, 1], "rank 1 (a): 16.0 ms", "1.60 times its stage's median", True),
        ([10, 10, 10, 30], [0, 1, 2, 3], "rank 3 (b): 30.0 ms", "3.00 times the median", True),
        ([0, 0, 0, 0], [0, 0, 0, 0], "0.0 ms", "0.00 times the median", False),
    ),
)
def test_who_is_slow(times, stages, slowest, ratio, warned):
    report, *warning = lines([float(t) for t in times], stages, HOSTS, 1.5)
    assert slowest in report.split("slowest")[1] and ratio in report and bool(warning) == warned
    if warned:
        assert f"wait for {slowest.split(' (')[0]} on {slowest.split('(')[1][0]}, which takes {ratio}" in warning[0]
