"""tools/generate.py as a user runs it: checkpoints of any layout, one process or two, and what it refuses."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gemma
from tests.hf_models import write_tokenizer

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/generate.py"
MASK = 258
TRAIN = (
    "--dllm-mode mdlm --model-preset tiny --num-layers 2 --tokenizer-type ByteLevelTokenizer --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 3e-3 --eval-iters 0 --save-interval 3"
).split()


@pytest.fixture(scope="module")
def checkpoints(pool, tmp_path_factory):
    """The same training run saved by TP 2 with sequence parallelism and by PP 2; one in blocks, one of canvases."""
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "chat.jsonl"
    with open(data, "w") as file:
        for i in range(12):
            messages = [dict(role="user", content="Why?"), dict(role="assistant", content="So it is. " * (1 + i % 3))]
            file.write(json.dumps(dict(messages=messages)) + "\n")
    layouts = dict(tp="--tensor-model-parallel-size 2 --sequence-parallel", pp="--pipeline-model-parallel-size 2")
    layouts["hybrid"] = f"{layouts['pp']} --dllm-mode hybrid --dllm-block-size 4"
    layouts["canvases"] = (
        f"{layouts['pp']} --dllm-mode block_diffusion --model-preset tiny-diffusion-gemma --num-layers 4"
    )
    for name, flags in layouts.items():
        pool.run([*TRAIN, "--sft-data-path", data, "--save", folder / name, *flags.split()], 2)
    return folder


def run_tool(*argv, processes=1):
    """Its stdout. Several processes are started with the variables that torchrun sets."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started = []
    for rank in range(processes):
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        if processes > 1:
            environment |= dict(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            environment |= dict(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        command = [sys.executable, str(TOOL), *map(str, argv)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * processes, outputs
    assert all(out == "" for out, _ in outputs[1:])
    return outputs[0][0]


def test_layouts_processes_and_batches_give_the_same_text(checkpoints, tmp_path):
    options = "--max-new-tokens 9 --gen-block-length 4 --steps 6 --temperature 1 --json".split()
    prompts, written = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    records = [dict(prompt="Why?", id=1), dict(prompt="Why is it not otherwise?")]
    records.append(dict(messages=[dict(role="user", content="Short")]))
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    files = ["--prompts-file", prompts, "--output", written]
    assert run_tool("--load", checkpoints / "tp", *files, *options) == ""
    one = [json.loads(line) for line in written.read_text().splitlines()]
    assert [{key: answer[key] for key in record} for record, answer in zip(records, one, strict=True)] == records
    for completion in one:
        assert len(completion["ids"]) == 9
        assert MASK not in completion["ids"]
        assert completion["steps"] == completion["forwards"] == 5  # two each for the blocks of 4, one for the last
        assert completion["tokens_per_second"] > 0
    assert one[0]["ids"] != one[1]["ids"]
    two = run_tool(
        "--load", checkpoints / "pp/iter_0000003", "--prompt", "Why is it not otherwise?", "--prompt", "Short",
        "--tensor-model-parallel-size", 2, *options, "--batch-size", 1, "--trace", tmp_path / "page.html", processes=2,
    )  # fmt: skip
    strip = lambda completions: [(c["text"], c["ids"], c["steps"]) for c in completions]
    assert strip(map(json.loads, two.splitlines())) == strip(one[1:])
    page = (tmp_path / "page.html").read_text()
    traces = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["traces"]
    for answer, trace in zip(one[1:], traces, strict=True):
        tokens = trace["tokens"]
        for _step, place, id, _trust in trace["events"]:
            tokens[place] = id
        assert tokens[trace["start"] :] == answer["ids"]


def test_a_model_trained_in_blocks_writes_them_one_by_one(checkpoints):
    options = ["--load", checkpoints / "hybrid", "--max-new-tokens", 10, "--steps", 6, "--json"]
    prompts = ["--prompt", "Why?", "--prompt", "Why is it not otherwise?"]
    one = [json.loads(line) for line in run_tool(*options, *prompts).splitlines()]
    two = run_tool(*options, *prompts, "--tensor-model-parallel-size", 2, "--batch-size", 1, processes=2)
    assert [c["ids"] for c in one] == [json.loads(line)["ids"] for line in two.splitlines()]
    assert all(len(c["ids"]) == 10 and MASK not in c["ids"] and c["steps"] <= 8 for c in one)


def test_a_diffusion_gemma_of_a_run_writes_and_streams_canvases(checkpoints, tmp_path):
    """In bf16 on two stages, which also shows that what it is told of its last step has the right precision."""
    options = ["--load", checkpoints / "canvases", "--preset", "diffusion_gemma", "--max-new-tokens", 20]
    options += ["--steps-per-block", 4, "--no-stop-at-eos", "--prompt", "Why is it?"]
    (one,) = map(json.loads, run_tool(*options, "--json").splitlines())
    assert len(one["ids"]) == 20 and one["steps"] == one["forwards"] <= 2 * 4
    page, written = tmp_path / "page.html", tmp_path / "answers.jsonl"
    streamed = run_tool(
        *options, "--stream", "--trace", page, "--output", written, "--bf16",
        "--pipeline-model-parallel-size", 2, processes=2,
    )  # fmt: skip
    answer = json.loads(written.read_text())
    assert streamed == answer["text"] + "\n"
    (trace,) = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])["traces"]
    tokens = trace["tokens"]
    for _step, place, id, _trust in trace["events"]:
        tokens[place] = id
    assert tokens[trace["start"] :] == answer["ids"]


def test_a_diffusion_gemma_of_hugging_face_is_decoded_as_it_is(tmp_path):
    path = gemma.make_folder(str(tmp_path / "gemma"))
    write_tokenizer(path, gemma.VOCABULARY)
    options = ["--hf-model", path, "--max-new-tokens", 12, "--steps-per-block", 3, "--prompt", "w5 w6", "--json"]
    (answer,) = map(json.loads, run_tool(*options).splitlines())
    assert len(answer["ids"]) == 12 and answer["steps"] == 2 * 3


def test_infilling_in_bf16_streams_the_text_alone(checkpoints):
    out = run_tool(
        "--load", checkpoints / "pp", "--infill", "--prompt", "It is [MASK:3] so[MASK]", "--gap_length=2", "--bf16",
        "--prompt", "[MASK:1]!", "--stream",
    )  # fmt: skip
    first, second = out.removesuffix("\n").split("\n\n") if "\n\n" in out else ("", "")
    assert first.startswith("It is ") and " so" in first
    assert second.endswith("!")


# --- what it refuses, before anything is built ------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("generate_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def refuse(tool, monkeypatch, capsys):
    def run(words, *argv):
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, argv)])
        with pytest.raises(SystemExit) as exit:
            tool.main()
        captured = capsys.readouterr()
        assert exit.value.code == 2
        assert captured.out == ""
        sentence = captured.err.removesuffix("\n")
        assert sentence.startswith("generate.py: error: ") and sentence.endswith(".") and "\n" not in sentence
        assert words in sentence

    return run


def test_folders_without_a_checkpoint(refuse, checkpoints, tmp_path):
    refuse("holds no checkpoint", "--load", tmp_path / "missing", "--prompt", "a")
    refuse("holds no checkpoint", "--load", tmp_path, "--prompt", "a")
    refuse("choose one of iter_0000003", "--load", checkpoints / "tp", "--ckpt-step", 99, "--prompt", "a")


def test_damaged_checkpoints(refuse, checkpoints, tmp_path):
    truncated, unreadable = tmp_path / "truncated", tmp_path / "unreadable"
    for copy in (truncated, unreadable):
        shutil.copytree(checkpoints / "tp", copy)
    shard = max((truncated / "iter_0000003").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    refuse("is truncated", "--load", truncated, "--prompt", "a")
    (unreadable / "iter_0000003/.metadata").write_bytes(b"nonsense")
    refuse("is damaged", "--load", unreadable, "--prompt", "a")


def test_options_that_do_not_fit_the_model(refuse, checkpoints, monkeypatch):
    load = ["--load", checkpoints / "tp", "--prompt", "Why?"]
    refuse("trained with mask token 258, not 7", *load, "--dllm-mask-token-id", 7)
    refuse("torchrun --nproc-per-node 2", *load, "--tensor-model-parallel-size", 2)
    refuse(
        "torchrun --nproc-per-node 4", *load, *"--tensor-model-parallel-size 2 --pipeline_model_parallel_size 2".split()
    )
    refuse("leave out --dllm-mode", *load, "--dllm-mode", "mdlm")
    refuse("give one of them", *load, "--hf-model", checkpoints)
    refuse("give one of them", *load[2:])
    refuse("but the model has 64 positions", *load, "--max-new-tokens", 60)
    refuse("has no gap to fill", *load, "--infill")
    refuse("3000000000000000 tokens long", *load[:2], "--infill", "--prompt", "[MASK:3000000000000000]")
    refuse("--batch-size is 0", *load, "--batch-size", 0)
    refuse("give --prompt, --messages-file or --prompts-file", *load[:2])
    refuse("--sampler llada2 does not fit", *load, "--preset", "llada2")
    refuse("--steps is 0", *load, "--steps", 0)
    iteration = ["--load", checkpoints / "tp/iter_0000003", *load[2:]]
    refuse("is one iteration already", *iteration, "--ckpt-step", 3)
    refuse("is no draft: leave it out", *load, "--target", checkpoints / "pp")
    monkeypatch.setattr("megatron_dllm.generation.samplers.SAMPLERS", {})
    refuse("--dllm-mode mdlm cannot be decoded", *load)


def test_conversations_that_are_none(refuse, checkpoints, tmp_path):
    file = tmp_path / "conversations.jsonl"
    load = ["--load", checkpoints / "tp", "--messages-file", file]
    refuse("cannot be read", *load)
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"text": "Hi"}\n')
    refuse("line 2: ", *load)
    file.write_text("[" * 100_000)
    refuse("line 1: ", *load)
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' * 2 + '[{"role": "tool", "content": "Hi"}]\n')
    refuse("line 3: Message 0 has the role 'tool'", *load, "--max-new-tokens", 9)
    refuse("leave out --raw and --infill", *load, "--raw")
