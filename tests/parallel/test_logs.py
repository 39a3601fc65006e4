"""What a run shows: console lines, TensorBoard, the loss by noise level."""

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.parallel.cases import TINY, write_chat, write_text

LAYOUTS = {
    "1": (1, ""),
    "DP2": (2, ""),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2"),
}


@pytest.fixture(scope="module")
def logged(pool, tmp_path_factory):
    """logged(layout) -> (results, TensorBoard scalars by name, console lines)."""
    data, made = write_chat(tmp_path_factory.mktemp("data")), {}

    def get(name):
        if name not in made:
            processes, flags = LAYOUTS[name]
            folder = tmp_path_factory.mktemp("board")
            board = f"--tensorboard-dir {folder} --tensorboard-log-interval 1".split()
            results = pool.run([*TINY, "--sft-data-path", data, *board, *flags.split()], processes)
            events = EventAccumulator(str(folder))
            events.Reload()
            scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
            lines = [line for r in results for line in r["output"].splitlines() if re.search(r"iteration +\d+/", line)]
            made[name] = (results, scalars, lines)
        return made[name]

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_line_shows_the_iterations_own_loss(logged, name):
    results, scalars, lines = logged(name)
    shown = [float(re.search(r"\| loss: (\S+)", line).group(1)) for line in lines]
    assert shown == pytest.approx(results[-1]["losses"], rel=1e-6) and len(shown) == 3
    assert [scalars["loss"][i] for i in (1, 2, 3)] == pytest.approx(results[-1]["losses"], rel=1e-6)
    norms = [float(re.search(r"grad norm: (\S+)", line).group(1)) for line in lines]
    assert norms == pytest.approx(results[-1]["grad_norms"], abs=6e-4)
    for label in (
        "dllm loss",
        "learning rate",
        "data tokens/s",
        "processed tokens/s",
        "TFLOP/s per rank",
        "memory (GiB)",
    ):
        assert all(f"| {label}: " in line for line in lines)


@pytest.mark.parametrize("name", LAYOUTS)
def test_counters_and_loss_by_level_do_not_depend_on_the_layout(logged, name):
    results, scalars, _ = logged(name)
    reference, expected, _ = logged("1")
    for counter in ("supervised tokens", "noised tokens", "data tokens"):
        assert scalars[counter] == pytest.approx(expected[counter])
        assert min(scalars[counter].values()) > 0
    levels = [tag for tag in expected if tag.startswith("loss by noise level")]
    assert len(levels) > 3 and all(re.search(r"t 0\.\d-[01]\.\d$", tag) for tag in levels)
    for tag in levels:
        assert scalars[tag] == pytest.approx(expected[tag], rel=1e-4)
    assert results[-1]["reports"][0].keys() == reference[-1]["reports"][0].keys()


def test_loss_by_level_adds_up_to_the_plain_mean(logged):
    """A step's mean nll of noised tokens lies between the smallest and the largest bin, and none is zero."""
    _, scalars, _ = logged("1")
    bins = [values[1] for tag, values in scalars.items() if tag.startswith("loss by noise level") and 1 in values]
    assert all(4 < value < 8 for value in bins)  # ln 259 = 5.56 before any training


@pytest.mark.parametrize("name", ("DP2", "PP2", "CP2"))
def test_throughput_is_of_our_count(pool, tmp_path, name):
    """TFLOP/s, the MFU and Megatron's own line are one count: by the step's seconds, the peak, the interval's."""
    processes, flags = LAYOUTS[name]
    argv = [*TINY, "--sft-data-path", write_chat(tmp_path), "--log-throughput", "--peak-tflops", 0.5, *flags.split()]
    output = "".join(result["output"] for result in pool.run(argv, processes))
    lines = [line for line in output.splitlines() if re.search(r"iteration +\d+/", line)]
    number = lambda label, line: float(re.search(rf"{re.escape(label)}: (\S+)", line).group(1))
    for line in lines:
        reached = number("TFLOP/s per rank", line)
        assert number("MFU (%)", line) == pytest.approx(100 * reached / 0.5, rel=1e-5)
        tokens, per_second = number("processed tokens", line), number("processed tokens/s", line)
        flops = reached * 1e12 * processes * tokens / per_second
        # a token of these models: 6 for each parameter that multiplies, and some attention and head
        assert 1 < flops / (tokens * 6 * 4 * 196_608) < 1.25
        assert number("throughput per GPU (TFLOP/s/GPU)", line) <= reached + 0.05


def test_evaluations_stay_out_of_the_loss_by_level(pool, tmp_path):
    argv = [*TINY, "--data-path", write_text(tmp_path), "--split", "60,40,0"]
    shown = lambda *more: re.findall(r"loss by noise level \|.*", pool.run([*argv, *more])[0]["output"])
    levels = shown()
    assert len(levels) == 3 and shown("--eval-interval", 1) == levels


def test_long_intervals_average_the_loss(pool, tmp_path):
    argv = [*TINY, "--sft-data-path", write_chat(tmp_path), "--train-iters", 4, "--log-interval", 2]
    result = pool.run(argv)[0]
    lines = [line for line in result["output"].splitlines() if re.search(r"iteration +\d+/", line)]
    shown = [float(re.search(r"\| loss: (\S+)", line).group(1)) for line in lines]
    a, b, c, d = result["losses"]
    # the first iteration is shown by itself, before the interval it belongs to has ended
    assert shown == pytest.approx([a, (a + b) / 2, (c + d) / 2], rel=1e-6)


def test_validation_is_logged_as_one_quotient_over_all_its_tokens(pool, tmp_path):
    data = ["--data-path", write_text(tmp_path), "--split", "60,40,0", "--tensorboard-dir", tmp_path / "board"]
    argv = [*TINY, *data, "--eval-interval", 2, "--eval-iters", 2]
    one = pool.run(argv)[0]["evaluations"]
    two = pool.run([*argv, "--tensor-model-parallel-size", 2], 2)[-1]["evaluations"]
    assert [e["loss"] for e in two] == pytest.approx([e["loss"] for e in one], rel=1e-5)
    # the same 16 samples in one evaluation step: the quotient does not change
    whole = pool.run([*argv, "--eval-iters", 1, "--eval-global-batch-size", 16])[0]["evaluations"]
    assert whole[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert "loss validation" in events.Tags()["scalars"]
