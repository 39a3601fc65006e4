"""Features that were written before equal those that the target computes, bit for bit; others are refused."""

import json
import os
import re

import pytest

from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, close
from tests.parallel.pool import CaseFailed
from tests.parallel.test_dflash import HEADS
from tests.parallel.test_dflash_targets import HYBRID, TRANSFORMERS, command, refused  # noqa: F401 (a fixture)

EXACT = ("losses", "grad_norms", "reports", "evaluations")


@pytest.fixture(scope="module")
def cache(pool, command, tmp_path_factory):  # noqa: F811
    """cache(processes, *key of a command): (its folder, what the tool said)."""
    made = {}

    def get(processes, *key):
        if (processes, *key) not in made:
            folder = str(tmp_path_factory.mktemp("features") / "here")
            flags = [*command(*key), "--dflash-features", folder]
            answers = pool.run([], processes, function="tests.parallel.caching:write", flags=flags)
            made[(processes, *key)] = folder, answers[0]["output"]
        return made[(processes, *key)]

    return get


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        (("nemotron_h", "chat", HYBRID), None),
        (("qwen3", "text", TRANSFORMERS, "--bf16"), None),
        (("qwen3 tied", "chat"), "DP2"),
    ],
)
def test_bit_for_bit(pool, command, cache, key, layout):  # noqa: F811
    processes, flags = LAYOUTS[layout] if layout else (1, "")
    argv = [*command(*key), *flags.split()]
    online = pool.run(argv, processes)
    offline = pool.run([*argv, "--dflash-features", cache(processes, *key)[0]], processes)
    for one, other in zip(online, offline, strict=True):
        for name in EXACT:
            assert _without_time(one[name]) == _without_time(other[name])


def _without_time(values):
    plain = lambda report: {k: v for k, v in report.items() if "/s" not in k and "GiB" not in k}
    return [plain(x) if isinstance(x, dict) else x for x in values]


def test_other_epochs_and_layouts(pool, command, cache):  # noqa: F811
    folder, said = cache(1, "qwen3 tied", "chat")
    assert re.search(r"here: 12 samples, \d+ tokens x 80 features in float32: 0.09 MB of [\d.]+ [GM]B free", said)
    argv = [*command("qwen3 tied", "chat"), "--train-iters", "5"]  # the data are 3 steps long
    (online,) = pool.run(argv, 1)
    for layout in ("TP2 SP", "CP2 all_gather"):
        processes, flags = LAYOUTS[layout]
        offline = pool.run([*argv, *flags.split(), "--dflash-features", folder], processes)[-1]
        assert close(offline["losses"], online["losses"]) and close(offline["grad_norms"], online["grad_norms"])


def test_experts_that_ranks_share(pool, command, cache):  # noqa: F811
    key = ("llada2", "chat", HEADS)
    processes, flags = MIXTURE_OF_EXPERTS["DP2 EP2"]
    folder, _ = cache(processes, *key, flags)
    (online,), (offline,) = (pool.run([*command(*key), *more], 1) for more in ([], ["--dflash-features", folder]))
    assert close(offline["losses"], online["losses"]) and close(offline["grad_norms"], online["grad_norms"])


def test_other_data(pool, command, cache, tmp_path):  # noqa: F811
    words = tmp_path / "other.jsonl"
    turns = [dict(role="user", content="w5"), dict(role="assistant", content=" ".join(["w9"] * 20))]
    words.write_text(json.dumps(dict(messages=turns)) + "\n")
    features = ["--dflash-features", cache(1, "qwen3 tied", "chat")[0], "--sft-data-path", str(words)]
    assert "has no features of a sample" in refused(pool, [*command("qwen3 tied", "chat"), *features])


def test_packed_text_is_other_text_in_every_epoch(pool, command, cache):  # noqa: F811
    folder, _ = cache(1, "qwen3", "text", TRANSFORMERS, "--bf16")
    argv = [*command("qwen3", "text", TRANSFORMERS, "--bf16"), "--dflash-features", folder, "--train-iters", "50"]
    assert re.search(r"is of \d+ samples, and this run reads 200: .* --num-samples 200", refused(pool, argv))


def test_what_the_target_predicts_is_not_stored(pool, command, tmp_path):  # noqa: F811
    flags = [*command("qwen3 tied", "chat"), "--dflash-kl-weight", "1", "--dflash-features", str(tmp_path / "here")]
    with pytest.raises(CaseFailed, match="ValueError: .*which is not stored: leave it out"):
        pool.run([], 1, function="tests.parallel.caching:write", flags=flags)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_is_whole(pool, command, cache, processes):  # noqa: F811
    folder = cache(1, "qwen3 tied", "chat")[0]
    flags = [*command("qwen3 tied", "chat"), "--dflash-features", folder]
    case = dict(function="tests.parallel.caching:write")
    again = pool.run([], processes, **case, flags=flags)
    assert [one["ran"] for one in again] == [0] * processes and f"{folder} is complete" in again[0]["output"]
    with pytest.raises(CaseFailed, match=r"ValueError: .* with other flags or data \(seed\): give the same"):
        pool.run([], processes, **case, flags=[*flags, "--seed", "5"])


def test_a_target_that_cannot_be_used_leaves_nothing(pool, command, tmp_path):  # noqa: F811
    flags = [*command("qwen3 tied", "chat"), "--dflash-features", str(tmp_path / "here")]
    with pytest.raises(CaseFailed, match="it cannot be used"):
        pool.run([], 1, function="tests.parallel.caching:write", flags=flags, unusable=True)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_goes_on(pool, command, cache, tmp_path):  # noqa: F811
    key = ("qwen3 tied", "chat")
    path = str(tmp_path / "here")
    flags = [*command(*key), "--dflash-features", path]
    case = dict(function="tests.parallel.caching:write", flags=flags)
    assert pool.run([], 1, **case, stop_after=4)[0]["ran"] == 4
    assert "is unfinished: run tools/cache_features.py" in refused(pool, flags)
    (again,) = pool.run([], 1, **case)
    assert 0 < again["ran"] < 6 and "of 6 micro-batches are there already" in again["output"]
    whole = cache(1, *key)[0]
    for name in os.listdir(whole):
        with open(os.path.join(whole, name), "rb") as one, open(os.path.join(path, name), "rb") as other:
            assert one.read() == other.read(), name
    assert sorted(os.listdir(whole)) == sorted(os.listdir(path)) and not os.path.exists(path + ".part")
