"""tools/evaluate.py as a user runs it, with lm-eval and local tasks, on one process and several. Needs the extra
[eval]: bash tests/run.sh -m eval."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dllm.data.tokenizer import ByteLevel
from tests.parallel.test_generate import TRAIN

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests/evaluation/tasks"
TEXTS = [json.loads(line)["text"] for line in (TASKS / "texts.jsonl").read_text().splitlines()]

pytestmark = pytest.mark.eval
pytest.importorskip("lm_eval")

from megatron_dllm.evaluation.lm import chat_text, cut, encode_chat  # noqa: E402  (imports lm-eval)


@pytest.fixture(scope="module")
def checkpoints(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "chat.jsonl"
    with open(data, "w") as file:
        for i in range(12):
            messages = [dict(role="user", content="Why?"), dict(role="assistant", content="So it is. " * (1 + i % 3))]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    for mode in ("mdlm", "hybrid", "block_diffusion"):
        flags = ["--dllm-mode", mode, *([] if mode == "mdlm" else ["--dllm-block-size", "4"])]
        pool.run([*TRAIN, "--sft-data-path", data, "--save", folder / mode, *flags], 2)
    return folder


def evaluate(tmp_path, *argv, processes=1):
    """(results, what is printed)"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started, output = [], tmp_path / f"out{processes}.json"
    argv = ["--include-path", TASKS, "--output-path", output, "--log-samples", *argv]
    for rank in range(processes):
        environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HOME=str(tmp_path / "hf"))
        if processes > 1:
            environment |= dict(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            environment |= dict(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        command = [sys.executable, str(ROOT / "tools/evaluate.py"), *map(str, argv)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * processes, outputs
    assert all(out == "" for out, _ in outputs[1:])
    return json.loads(output.read_text()), outputs[0]


def answers(results: dict) -> dict:
    """Everything that the model said, by task."""
    return {
        name: [(sample["resps"], sample["filtered_resps"]) for sample in samples]
        for name, samples in results["samples"].items()
    }


@pytest.mark.parametrize("mode", ["mdlm", "hybrid"])
def test_one_process_two_copies_and_two_halves_answer_alike(checkpoints, tmp_path, mode):
    argv = ["--load", checkpoints / mode, "--tasks", "local_*", "--num_draws=20", "--batch-size", 3, "--seed", 5]
    argv.append("--check-greedy")
    one, (table, log) = evaluate(tmp_path, *argv)
    assert "local_mc" in table and "s each" in log and list(one["results"]) == ["local_gen", "local_mc", "local_text"]
    two, _ = evaluate(tmp_path, *argv, processes=2)
    assert answers(two) == answers(one) and two["results"] == one["results"]

    assert one["config"]["checkpoint"] == str(checkpoints / mode / "iter_0000003")
    assert one["config"]["dllm_mode"] == mode and one["config"]["num_draws"] == 20
    said = answers(one)
    assert all(nats < 0 for ((nats, _),) in said["local_mc"][0][0])
    first, _, third = (responses[0][0] for responses, _ in said["local_gen"])
    assert first != third  # one question, drawn twice
    assert all("\n" not in text and len(text.encode()) <= 6 * 4 for text in (first, third))
    nats = sum(responses[0][0] for responses, _ in said["local_text"])
    expected = -nats / sum(len(text.encode()) for text in TEXTS) / 0.6931471805599453
    assert one["results"]["local_text"]["bits_per_byte,none"] == pytest.approx(expected)

    halves, _ = evaluate(
        tmp_path, *argv[:2], "--tasks", "local_mc", *argv[4:], "--tensor-model-parallel-size", 2, processes=2
    )
    flat = lambda results: [score for responses, _ in answers(results)["local_mc"] for (score,) in responses]
    for ours, theirs in zip(flat(halves), flat(one), strict=True):
        assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-4) and ours[1] == theirs[1]


def test_canvases_are_written_and_have_no_likelihood(checkpoints, tmp_path, monkeypatch, capsys):
    """Whatever temperature a task samples at: the sampler has its own."""
    argv = ["--load", checkpoints / "block_diffusion", "--tasks", "local_gen", "--seed", 5]
    one, _ = evaluate(tmp_path, *argv)
    two, _ = evaluate(tmp_path, *argv, processes=2)
    first, _, third = (responses[0][0] for responses, _ in answers(one)["local_gen"])
    assert answers(two) == answers(one) and first != third
    refusals = {"--tasks local_mc": "has no bound likelihood", "--tasks local_gen --temperature 1": "leave out --temp"}
    for more, words in refusals.items():
        test_what_it_refuses(words, [*argv[:2], *more.split()], checkpoints, monkeypatch, capsys)


def test_stop_strings_and_chats():
    assert cut("one two", ["two", "wo", ""]) == "one " and cut("one", []) == "one"
    why, so = dict(role="user", content="Why?"), dict(role="assistant", content="So.")
    text = "User:\nWhy?\n\nAssistant:\nSo.<eos>User:\nWhy?\n\nAssistant:\n"
    assert chat_text([why, so, why], ByteLevel()) == text
    assert encode_chat(text, ByteLevel()).count(257) == 1
    with pytest.raises(ValueError, match="reads the chat template's text otherwise"):
        chat_text([why], Shouting())


class Shouting(ByteLevel):
    def decode(self, *args, **options):
        return super().decode(*args, **options).upper()


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("--num-draws is 0", ["--num-draws", 0]),
        ("--limit is 0", ["--limit", 0]),
        ("is no folder", ["--include-path", "/nowhere"]),
        ("--log-samples writes into --output-path", ["--log-samples"]),
        ("can be written to", ["--output-path", "/nowhere/out.json"]),
        ("--tasks arithmetic is unknown (there are local_gen, local_mc, local_text)", ["--tasks", "arithmetic"]),
        ("--tasks names no task", ["--tasks", ","]),
        ("has no exact likelihood", ["--likelihood", "exact"]),
        ("answers of 64 tokens leave no place", ["--tasks", "local_gen"]),
        ("does not divide the 1 process(es)", ["--tensor-model-parallel-size", 2]),
        ("holds no checkpoint", ["--load", "/nowhere"]),
        ("--threshold is 2.0", ["--threshold", 2]),
    ],
)
def test_what_it_refuses(words, argv, checkpoints, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("evaluate_tool", ROOT / "tools/evaluate.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    if words.startswith("answers of"):
        monkeypatch.setattr("megatron_dllm.evaluation.lm.answer_tokens", lambda asked, most: 64)
    given = ["--load", checkpoints / "mdlm", "--tasks", "local_mc", "--include-path", TASKS, *argv]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, given)])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit:
        tool.main()
    captured = capsys.readouterr()
    sentence = captured.err.removesuffix("\n").splitlines()[-1]
    assert exit.value.code == 2 and captured.out == ""
    assert sentence.startswith("evaluate.py: error: ") and sentence.endswith(".") and words in sentence, captured.err
