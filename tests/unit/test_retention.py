"""--save-retain: what goes, what stays, and what a kill in the middle leaves."""

import shutil
from types import SimpleNamespace

import pytest

from megatron_dllm.resilience import retention, saving
from megatron_dllm.resilience.retention import Retention


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder with complete checkpoints (of which a file says so), and a half-written one."""
    complete = lambda folder, step: (tmp_path / f"iter_{step:07d}/metadata.json").exists()
    monkeypatch.setattr(retention, "is_complete", complete)
    monkeypatch.setattr(saving, "is_complete", complete)
    for step in (2, 4, 6, 8, 10):
        folder = tmp_path / f"iter_{step:07d}"
        folder.mkdir()
        (folder / "__0_0.distcp").touch()
        if step != 4:
            (folder / "metadata.json").touch()
    return tmp_path


def names(run):
    return sorted(path.name for path in run.iterdir())


def kept(run):
    return [int(name.removeprefix("iter_")) for name in names(run) if name.startswith("iter_")]


def prune(run, *args, **options):
    retention = Retention()
    retention.prune(str(run), *args, **options)
    retention.wait()


@pytest.mark.parametrize(
    ("iteration", "options", "left"),
    (
        (10, dict(newest=1), [10]),
        (10, dict(newest=2), [8, 10]),
        (10, dict(newest=4), [2, 6, 8, 10]),
        (10, dict(newest=9), [2, 6, 8, 10]),
        (8, dict(newest=2), [6, 8, 10]),  # a run that went back: a newer one is not its affair
        (10, dict(newest=1, every=6), [6, 10]),
        (10, dict(newest=1, busy=2), [2, 10]),
    ),
)
def test_what_stays(run, iteration, options, left):
    prune(run, iteration, **options)
    assert names(run) == [f"iter_{step:07d}" for step in left]


def test_other_things_stay(run):
    for name in ("hf_0000002", "iter_0000003_copy", "iter_2", "deleted_scenes", "release"):
        (run / name).mkdir()
    (run / "iter_0000001").mkdir()
    (run / "iter_0000001/mp_rank_00").mkdir()  # an older format
    (run / "iter_0000004/notes.txt").touch()
    (run / "elsewhere").mkdir()
    (run / "iter_0000005").symlink_to(run / "elsewhere")
    before = set(names(run))
    prune(run, 10, newest=1)
    assert before - set(names(run)) == {f"iter_{step:07d}" for step in (2, 6, 8)}


def test_nothing_loads_in_half_when_deleting_is_interrupted(run, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retention, "_delete", killed)
        patched.setattr(retention.threading, "excepthook", lambda _: None)
        prune(run, 10, newest=2)
    assert kept(run) == [8, 10] and {f"deleted_iter_{step:07d}" for step in (2, 4, 6)} < set(names(run))
    (run / "iter_0000002").mkdir()
    (run / "iter_0000002/metadata.json").touch()  # and one of that name once more
    prune(run, 10, newest=2)
    assert names(run) == ["iter_0000008", "iter_0000010"]


def test_a_folder_is_cleared_before_it_is_written_again(run):
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.write_text("10")
    saving.clear_the_way(str(run), 4)
    assert kept(run) == [2, 6, 8, 10] and tracker.read_text() == "10"
    saving.clear_the_way(str(run), 10)  # which the run has gone back from
    assert kept(run) == [2, 6, 8] and tracker.read_text() == "8"
    for step in (2, 6):
        shutil.rmtree(run / f"iter_{step:07d}")
    saving.clear_the_way(str(run), 8)
    assert names(run) == []
    saving.clear_the_way(str(run), 8)


def test_the_tracker_is_never_empty(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(saving.completed, "listeners", [lambda run, iteration: told.append((run, iteration))])
    monkeypatch.setattr(saving, "get_args", lambda: SimpleNamespace(save=str(tmp_path)))
    files = saving._WholeTracker(saving.checkpointing.maybe_msc)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("2")
    with files.open(str(tracker), "w") as file:
        file.write("4")
        assert tracker.read_text() == "2" and not told
    assert tracker.read_text() == "4" and told == [(str(tmp_path), 4)] and names(tmp_path) == [tracker.name]
    with files.open(str(tracker)) as file:
        assert file.read() == "4"
    with files.open(str(tmp_path / "other"), "w") as file:
        file.write("as it is")
    assert (tmp_path / "other").read_text() == "as it is" and len(told) == 1
