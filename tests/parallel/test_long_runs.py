"""Retention, reports and signs of life of real runs."""

import json
import re

import pytest
from megatron.training.checkpointing import get_checkpoint_tracker_filename

from megatron_dllm.checkpoint import is_complete
from tests.parallel.cases import TINY, write_chat
from tests.parallel.pool import CaseFailed
from tests.parallel.test_resume import LAYOUTS


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    return [*TINY, "--sft-data-path", write_chat(tmp_path_factory.mktemp("data"))]


def steps(folder):
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


@pytest.mark.parametrize(
    ("flags", "left"),
    (
        ("--save-retain 2 --async-save", [5, 6]),
        ("--save-retain-interval 2 --save-retain 2", [2, 4, 5, 6]),
    ),
)
def test_old_checkpoints_go(pool, argv, tmp_path, flags, left):
    argv = [*argv, "--save", tmp_path, "--save-interval", 1, "--train-iters", 6]
    result = pool.run([*argv, *flags.split()], 2)[0]
    assert steps(tmp_path) == left and all(is_complete(str(tmp_path), step) for step in left)
    assert "deleted checkpoints of iterations 1 in" in result["output"]
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("iter_")} == {
        get_checkpoint_tracker_filename("").strip("/")
    }


def test_a_run_that_went_back_writes_over_what_it_has_left(pool, argv, tmp_path):
    argv = [*argv, "--save", tmp_path, "--save-interval", 2, "--train-iters", 4]
    straight = pool.run(argv)[0]
    (tmp_path / "iter_0000004/__7_0.distcp").touch()
    result = pool.run([*argv, "--load", tmp_path, "--ckpt-step", 2])[0]
    assert result["losses"] == straight["losses"][2:]
    assert not (tmp_path / "iter_0000004/__7_0.distcp").exists() and is_complete(str(tmp_path), 4)


def test_what_was_loaded_is_not_written_once_more(pool, argv, tmp_path):
    argv = [*argv, "--save", tmp_path, "--save-interval", 2]  # three steps: the last save is out of the row
    pool.run(argv)
    before = (tmp_path / "iter_0000003/.metadata").stat().st_mtime_ns
    again = pool.run([*argv, "--load", tmp_path])[0]
    assert not again["losses"] and "note: iteration 3 is saved in" in again["output"]
    assert (tmp_path / "iter_0000003/.metadata").stat().st_mtime_ns == before
    pool.run([*argv, "--load", tmp_path, "--save", tmp_path / "other"])
    assert steps(tmp_path / "other") == [3]


def test_hashes_find_what_lengths_do_not(pool, argv, tmp_path):
    argv = [*argv, "--save", tmp_path, "--load", tmp_path, "--save-interval", 3, "--verify-integrity"]
    pool.run(argv)
    pool.run(argv)
    shard = max((tmp_path / "iter_0000003").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CaseFailed) as failure:
        pool.run(argv)
    assert f"DamagedCheckpoint: {shard.name} in {tmp_path}/iter_0000003 is not what was saved" in failure.value.error
    with pytest.raises(CaseFailed) as failure:
        pool.run([*argv, "--load", uninformed(pool, argv, tmp_path / "without")])
    assert "saved without hashes, which --verify-integrity compares" in failure.value.error


def uninformed(pool, argv, folder):
    argv = [word for word in argv if word != "--verify-integrity"]
    pool.run([*argv, "--save", folder, "--load", folder])
    return folder


@pytest.mark.parametrize("name", ("TP2 SP", "PP2 VPP2"))
def test_the_slow_rank_is_named_and_not_the_one_that_waits_for_it(pool, argv, name):
    processes, layout = LAYOUTS[name]
    for slow in (0, 1):  # by a clock that other work on this machine does not disturb
        argv_ = [*argv, *layout.split(), "--dllm-straggler-report", "1.6", "--train-iters", 4, "--log-interval", 2]
        output = "".join(result["output"] for result in pool.run(argv_, processes, slow_rank=slow))
        reports = re.findall(r"own time a step \| fastest rank (\d).*slowest rank (\d) \(\S+\): (\S+) ms", output)
        assert [(fast, late) for fast, late, _ in reports] == [(str(1 - slow), str(slow))] * 2
        assert output.count(f"Warning: the others wait for rank {slow} on") == 2


def test_a_run_keeps_its_heartbeat(pool, argv, tmp_path):
    path = tmp_path / "alive.json"
    flags = ["--heartbeat-file", path, "--save", tmp_path / "run", "--save-interval", 2, "--hang-dump-seconds", 60]
    results = pool.run([*argv, *flags], 2)
    told = json.loads(path.read_text())
    assert told["state"] == "finished" and told["iteration"] == told["train_iters"] == told["last_checkpoint"] == 3
    assert told["consumed_samples"] == 24 and told["loss"] == results[-1]["losses"][-1]
    assert told["tokens_per_second"] > 0 and told["seconds_left"] == 0
    with pytest.raises(CaseFailed):
        pool.run([*argv, *flags[:2]], 2, poison_sample=3)
    assert json.loads(path.read_text())["state"].startswith("failed: BadStep: iteration 1")
