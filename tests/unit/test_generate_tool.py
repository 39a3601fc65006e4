"""tools/generate.py around the samplers: flags, presets, files of prompts, streaming and traces, on a toy network.

Only the checkpoint, the network and the process group are stand-ins; all else runs as for a user.
"""

import importlib.util
import io
import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_dllm import generation
from megatron_dllm.data.tokenizer import ByteLevel
from megatron_dllm.generation import GenerationConfig, load, streaming
from megatron_dllm.generation.llada import LLaDARow
from megatron_dllm.generation.options import decoding_config
from megatron_dllm.generation.presets import PRESETS, apply_preset
from megatron_dllm.generation.prompts import build_canvases
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.generation.samplers import check_sampler, sampler_name
from megatron_dllm.generation.trace import Recorder, render
from megatron_dllm.modes import mdlm

TOOL = Path(__file__).parents[2] / "tools/generate.py"
BYTES = ByteLevel()
RUN = dict(
    dllm_mode="mdlm",
    dllm_mask_token_id=BYTES.mask_id,
    dllm_block_size=4,
    dllm_block_origin="sequence",
    ar_loss_weight=1.0,
    max_position_embeddings=4096,
    vocab_size=BYTES.vocab_size,
    context_parallel_size=1,
    sequence_parallel=False,
    virtual_pipeline_model_parallel_size=None,
    sft_data_path=None,
    scdd_peak_time=0.5,
    scdd_gamma_shape=1.0,
    scdd_max_ratio=0.2,
)


class Letters:
    """A letter for each place, more or less sure; a euro sign is three tokens. Changes its mind if it is `restless`."""

    def __init__(self, restless=False, eos_at=None):
        self.calls, self.restless, self.eos_at = 0, restless, eos_at

    def __call__(self, passes, cache):
        self.calls += 1
        return [self.logits(one.positions[one.wanted]) for one in passes]

    def logits(self, places):
        text = "€uro ".encode() * 1000
        ids = torch.tensor([text[(place + (self.calls // 3 if self.restless else 0)) % len(text)] for place in places])
        ids[places == self.eos_at] = BYTES.eos_id
        logits = torch.zeros(len(places), BYTES.vocab_size)
        logits[torch.arange(len(places)), ids] = 6 + 3 * torch.sin(places * 1.7 + self.calls)
        return logits


@pytest.fixture
def tool(monkeypatch, capsys):
    """Runs the tool: (exit code, stdout, stderr). Flags may be words of a text; `args`: of the run that trained it."""
    spec = importlib.util.spec_from_file_location("generate_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*argv, network=None, terminal=False, **args):
        args = Namespace(**RUN | args)
        network = network or Letters()
        run.planned, run.built = [], []
        plan = lambda path, **options: run.planned.append((path, options)) or Namespace(args=args, tokenizer=BYTES)
        build = lambda planned: run.built.append(planned) or Namespace(model=torch.nn.Identity())
        monkeypatch.setattr(load, "plan", plan)
        monkeypatch.setattr(load, "build", build)
        monkeypatch.setattr(generation, "get_args", lambda: args)
        monkeypatch.setattr(generation, "Network", lambda *unused: network)
        monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, argv)])
        code = 0
        try:
            module.main()
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    run.module = module
    return run


# --- flags and presets --------------------------------------------------------------------------------------------


def parsed(tool, *words):
    return decoding_config(vars(tool.module.parse_args(words)))


def test_every_option_has_a_flag_in_both_spellings(tool):
    values = dict(
        max_new_tokens=7, sampler="llada2", mode="ar", steps=5, gen_block_length=3, temperature=0.5, top_k=4, top_p=0.9,
        remasking="random", algorithm="origin", algorithm_temperature=0.1, cache="none", cfg_scale=1.0,
        stop_at_eos=True, gap_length=3, seed=3, batch_size=2, editing_threshold=0.5, max_post_steps=3,
    )  # fmt: skip
    others = dict(steps_per_block=2, threshold=0.3), dict(factor=0.5, infill=True)
    for chosen in (values, *others):
        for spelling in (lambda name: name, lambda name: name.replace("_", "-")):
            words = [
                f"--{spelling(name)}" if value is True else f"--{spelling(name)}={value}"
                for name, value in chosen.items()
            ]
            assert parsed(tool, *words) == GenerationConfig(**chosen)
    known = set(values).union(*others)
    assert known == set(GenerationConfig.__dataclass_fields__)


def test_words_of_a_prompt_stay_as_they_are(tool):
    words = ["--prompt", "--a_b c", "--prompt=--d_e", "--max_new_tokens", "3"]
    options = tool.module.parse_args(words)
    assert options.prompt == ["--a_b c", "--d_e"] and options.max_new_tokens == 3


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_configuration_of_its_sampler(name):
    config = decoding_config(dict(preset=name))
    mode = dict(llada="mdlm", dream="mdlm", llada2="bd3lm", nemotron="hybrid", idlm="idlm")[config.sampler]
    args = Namespace(**RUN | dict(dllm_mode=mode))
    check_sampler(args, config, BYTES)
    assert sampler_name(args, config) == PRESETS[name].options["sampler"] and PRESETS[name].source


def test_what_is_given_overrides_the_preset(tool):
    llada2 = parsed(tool, "--preset", "llada2", "--max-new-tokens", "8", "--no-stop-at-eos", "--threshold", "none")
    assert (llada2.max_new_tokens, llada2.steps_per_block, llada2.threshold) == (8, 32, None)
    assert not llada2.stop_at_eos
    # even a value that is the default
    assert parsed(tool, "--preset", "dream", "--algorithm", "entropy", "--temperature", "0").top_p is None
    # what excludes an option of the preset takes its place
    assert parsed(tool, "--preset", "llada", "--steps-per-block", "4").steps is None
    assert parsed(tool, "--preset", "fast_dllm", "--factor", "1").threshold is None
    assert parsed(tool, "--preset", "fast_dllm", "--remasking", "random").threshold is None
    assert apply_preset(None, dict(steps=3)) == dict(steps=3)


def test_only_what_is_given_reaches_the_plan(tool):
    assert tool("--load", "run", "--prompt", "a", "--max-new-tokens", 2)[0] == 0
    assert tool.planned == [("run", {})]
    words = "--hf-model folder --dllm-mode hybrid --pipeline-model-parallel-size 2 --bf16".split()
    assert tool(*words, "--prompt", "a", "--max-new-tokens", 2)[0] == 0
    options = dict(hf_model="folder", mode="hybrid", pipeline_model_parallel_size=2, bf16=True)
    assert tool.planned == [(None, options)]


# --- prompts from a file, answers to a file -----------------------------------------------------------------------

SHORT = ["--load", "run", "--max-new-tokens", 5]


def write_lines(path, *records):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records))
    return path


def test_answers_keep_order_and_fields(tool, tmp_path):
    messages = [dict(role="system", content="Brief."), dict(role="user", content="Ü")]
    records = [
        dict(id=7, prompt="Why?", nested=dict(a=[1])),
        "",
        dict(messages=messages, id="x"),
        dict(tokens=[1, 2, 3]),
        dict(prompt="Why?"),
    ]
    file = write_lines(tmp_path / "in.jsonl", *records)
    code, out, err = tool(*SHORT, "--prompts-file", file, "--batch-size", 2)
    answers = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(answers)) == (0, "", 4) and "Ü" in out
    for record, answer in zip([r for r in records if r], answers, strict=True):
        assert list(answer) == [*record, "text", "ids", "steps", "forwards", "tokens_per_second"]
        assert {key: answer[key] for key in record} == record
        assert len(answer["ids"]) == 5 and answer["steps"] == answer["forwards"] == 5

    written = tmp_path / "out.jsonl"
    assert tool(*SHORT, "--prompts-file", file, "--output", written) == (0, "", "")
    same = lambda answers: [{**answer, "tokens_per_second": 0} for answer in answers]
    assert same(map(json.loads, written.read_text().splitlines())) == same(answers)


def test_a_text_is_a_user_s_where_the_model_answers_in_chat(tool, tmp_path, monkeypatch):
    seen = []
    prepare = generation.prepare
    monkeypatch.setattr(generation, "prepare", lambda prompts, *rest: seen.append(prompts) or prepare(prompts, *rest))
    file = write_lines(tmp_path / "in.jsonl", dict(prompt="Hi"), dict(tokens=[1]))
    chat = dict(sft_data_path=["chat.jsonl"])
    for words in ([], ["--raw"]):
        tool(*SHORT, "--prompts-file", file, *words, **chat)
        assert seen[-2] == [[dict(role="user", content="Hi")] if not words else "Hi", [1]]
    tool(*SHORT[2:], "--hf-model", "folder", "--prompt", "Hi", **chat)  # whose tokenizer has no chat template
    assert seen[-2] == ["Hi"]


def test_a_failure_leaves_nothing_half_written(tool, tmp_path):
    class Breaks(Letters):
        def logits(self, places):
            if self.calls > 7:
                raise MemoryError
            return super().logits(places)

    output, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    output.write_text("old")
    words = [*SHORT, "--prompt", "a", "--prompt", "b", "--batch-size", 1, "--output", output, "--trace", page]
    with pytest.raises(MemoryError):
        tool(*words, network=Breaks())
    assert output.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert tool(*words)[0] == 0
    assert len(output.read_text().splitlines()) == 2 and page.read_text().startswith("<!DOCTYPE html>")


LINES = {
    "{": "line 2: it is not valid JSON",
    "[]": 'line 2 must be an object with one of "prompt", "messages" and "tokens"',
    '{"text": "a"}': "line 2 must be an object with one of",
    '{"prompt": "a", "tokens": [1]}': "line 2 must be an object with one of",
    '{"prompt": ["a"]}': 'line 2: "prompt" must be a string',
    '{"prompt": "\\ud800"}': "line 2 holds '\\ud800', half of a character",
    '{"messages": []}': "line 2: A conversation must be a non-empty list",
    '{"tokens": [1, true]}': 'line 2: "tokens" must be a list of token ids',
    '{"tokens": [1, -1]}': "line 2 holds the id -1, but the tokenizer has 259",
    '{"tokens": [259]}': "line 2 holds the id 259",
    '{"tokens": [258]}': "line 2 contains the mask token 258",
    '{"prompt": "a", "steps": 1}': 'line 2 has a field "steps", which the answer will have too',
    '{"prompt": "' + "a" * 4092 + '"}': "line 2 with 5 new tokens is 4097 tokens long",
    '{"messages": [{"role": "critic", "content": "a"}]}': "line 2: Message 0 has the role 'critic'",
}


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_is_named(tool, tmp_path, line):
    file = write_lines(tmp_path / "in.jsonl", "", line, dict(prompt="good"))
    refused(tool, LINES[line], *SHORT, "--prompts-file", file, "--output", tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def refused(tool, words, *argv, **args):
    code, out, err = tool(*argv, **args)
    assert (code, out, tool.built) == (2, "", [])
    sentence = err.removesuffix("\n")
    assert sentence.startswith("generate.py: error: ") and sentence.endswith(".") and "\n" not in sentence
    assert words in sentence


BAD = {
    "--prompt a": "give one of them",
    "--load run --hf-model folder --prompt a": "give one of them",
    "--hf-model folder --ckpt-step 3 --prompt a": "--ckpt-step chooses an iteration of --load",
    "--load run --dllm-mode mdlm --prompt a": "leave out --dllm-mode",
    "--load run": "give --prompt, --messages-file or --prompts-file",
    "--load run --prompts-file missing.jsonl": "--prompts-file missing.jsonl cannot be read",
    "--load run --prompts-file {file} --prompt a": "leave out --prompt and --messages-file",
    "--load run --prompts-file {file} --stream": "--stream shows text where --json and --prompts-file write objects",
    "--load run --prompt a --stream --json": "give --output",
    "--load run --prompt a --stream --batch-size 2": "leave out --batch-size",
    "--load run --prompt a --output missing/x": "--output missing/x is not a file in a folder",
    "--load run --prompt a --trace {folder}": "is not a file in a folder",
    "--load run --prompts-file {file} --output {file}": "must be different files",
    "--load run --prompt a --preset gpt": "--preset gpt is unknown: choose one of llada, llada2, ",
    "--load run --prompt a --preset dream --sampler llada": "--preset dream is not for --sampler llada",
    "--load run --prompt a --preset nemotron --mode ar": "--preset nemotron is not for --mode ar",
    "--load run --prompt a --preset llada2": "--sampler llada2 does not fit a model trained with --dllm-mode mdlm",
    "--load run --prompt a --steps few": "argument --steps: invalid int value: 'few': see --help",
    "--load run --prompt a --stepps 3": "unrecognized arguments: --stepps 3",
    "--load run --prompt a --remasking all": "choose one of low_confidence, random",
    "--load run --prompt a --infill": "prompt 1 has no gap to fill",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_sentence_before_there_is_a_model(tool, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    file = write_lines(tmp_path / "in.jsonl", dict(prompt="a"))
    refused(tool, BAD[flags], *flags.format(file=file, folder=tmp_path).split())


# --- streaming ----------------------------------------------------------------------------------------------------

LOOPS = {
    "blocks": (dict(), ["--gen-block-length", 8, "--steps", 20]),
    "anywhere": (dict(), ["--gen-block-length", 64, "--threshold", 0.99]),
    "EOS": (dict(), ["--stop-at-eos", "--gen-block-length", 8]),
    "gaps": (dict(), ["--infill"]),
    "blocks of bd3lm": (dict(dllm_mode="bd3lm"), ["--steps-per-block", 2]),
    "editing": (dict(dllm_mode="bd3lm"), ["--preset", "llada2.1_speed", "--no-stop-at-eos"]),
    "correcting": (dict(dllm_mode="scdd"), ["--steps", 9]),
    "causal": (dict(dllm_mode="hybrid"), []),
    "ar": (dict(dllm_mode="hybrid"), ["--mode", "ar"]),
    "speculative": (dict(dllm_mode="hybrid"), ["--mode", "speculative"]),
    "strides": (dict(dllm_mode="idlm"), []),
}


def loop(name):
    args, words = LOOPS[name]
    gap = "[MASK:3]" if "--infill" in words else ""
    prompts = ["--prompt", f"Why {gap}is", "--prompt", f"What{gap}"]
    network = lambda: Letters(restless=name in ("editing", "correcting"), eos_at=21 if name == "EOS" else None)
    return [*SHORT[:2], "--max-new-tokens", 30, *words, *prompts], args, network


@pytest.mark.parametrize("name", LOOPS)
def test_a_stream_ends_as_the_text(tool, name):
    words, args, network = loop(name)
    code, out, _ = tool(*words, "--batch-size", 1, network=network(), **args)
    streamed = tool(*words, "--stream", network=network(), **args)
    assert code == 0 and len(out) > 16
    assert streamed == (0, out, "")


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_written_that_is_taken_back(name, tool, monkeypatch):
    said = []
    monkeypatch.setattr(streaming, "say", lambda text, out: said.append(text))
    words, args, network = loop(name)
    tool(*words, "--stream", network=network(), **args)
    answers = tool(*words, "--batch-size", 1, network=network(), **args)[1]
    assert "\n".join("".join(said).splitlines()) == "\n".join(line for line in answers.splitlines() if line)
    if name not in ("anywhere", "correcting"):  # of which nothing is settled for long
        assert len(said) > 4


def test_a_text_that_began_otherwise_is_written_anew(capsys):
    class Row:
        tokens, start, settled = torch.tensor([97, 98]), 0, 2
        config = GenerationConfig()

    display = streaming.Appended(BYTES, sys.stdout)
    display.observe([Row])
    display.finish("another")
    assert capsys.readouterr().out == "ab\nanother\n"


def screen(output, columns, height):
    """What a terminal shows in the end, as lines; the drawings before are checked to fit it."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\033\[\d*[AJ])", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r" or not part:
            continue
        elif part.endswith("A"):
            assert int(part[2:-1]) < height
            row -= int(part[2:-1])
        elif part.endswith("J"):
            lines[row:] = [""]
        else:
            lines[row] += part
    return "\n".join(lines)


@pytest.mark.parametrize("columns, height", [(7, 4), (80, 24)])
@pytest.mark.parametrize("name", ["blocks", "gaps", "editing", "correcting"])
def test_a_terminal_is_drawn_over(tool, monkeypatch, name, columns, height):
    monkeypatch.setattr(streaming.shutil, "get_terminal_size", lambda: os.terminal_size((columns, height)))
    monkeypatch.setattr(streaming.Redrawn.__init__, "__defaults__", (0.0,))  # every step
    words, args, network = loop(name)
    plain = tool(*words, "--batch-size", 1, network=network(), **args)[1]
    _, out, _ = tool(*words, "--stream", network=network(), terminal=True, **args)
    assert "░" in out and "\033" not in plain
    assert screen(out, columns, height) == plain
    assert out.count("\033[J") > 5


def test_frames_keep_to_their_columns_and_hold_no_commands():
    assert streaming.printable("a\tb\033[2Jc\nd\udcff") == "a    b�[2Jc\nd�"
    assert streaming.wrapped("abcd\n░e日本", 3) == (["abc", "d", "░e", "日", "本"], 2)
    assert streaming.wrapped("ab", 3) == (["ab"], 0)


def test_a_terminal_without_the_sign_has_another():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert streaming.Redrawn(BYTES, out)._mask == "_"


# --- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOPS)
def test_a_trace_replays_to_the_answer(tool, tmp_path, name, monkeypatch):
    recorded = []
    monkeypatch.setattr("megatron_dllm.generation.trace.render", lambda traces, *_: recorded.append(traces) or "")
    words, args, network = loop(name)
    _, out, _ = tool(*words, "--json", "--trace", tmp_path / "page.html", network=network(), **args)
    answers, (traces,) = [json.loads(line) for line in out.splitlines()], recorded
    for answer, trace in zip(answers, traces, strict=True):
        assert trace.replay()[trace.start :] == answer["ids"]
        assert trace.replay(0) == trace.tokens and BYTES.mask_id in trace.tokens
        assert (trace.steps, trace.forwards) == (answer["steps"], answer["forwards"])
        assert all(1 <= commit.step <= trace.steps for commit in trace.commits)
        assert all(0 <= p <= 1 for commit in trace.commits for p in commit.trust or [])
        written = [place for commit in trace.commits for place in commit.places]
        edits = name in ("editing", "correcting", "EOS")  # what was written behind an EOS is written over
        assert edits or len(set(written)) == len(written)
    if name in ("editing", "correcting"):
        assert len(set(written)) < len(written)


def page_of(prompts, **options):
    config = GenerationConfig(**options)
    decoding = Decoding(config, mdlm.reverse, BYTES.mask_id, BYTES.eos_id, BYTES.vocab_size, Namespace(**RUN))
    rows = [LLaDARow(canvas, decoding) for canvas in build_canvases(prompts, BYTES, config, BYTES.mask_id, 4096)]
    recorder = Recorder()
    run(rows, Letters(), recorder.observe)
    return render(recorder.traces(), BYTES, config)


def test_a_page_holds_texts_as_data_and_needs_nothing_from_elsewhere():
    hostile = "</script><b id=x>\"'&amp;<!--\u2028"
    page = page_of([hostile, "é\n\t"], max_new_tokens=3, threshold=0.5)
    assert page.count("<script") == page.count("</script>") == 2 and "<b id" not in page and "<!--" not in page
    assert "default-src 'none'" in page and not re.search(r"(src|href)=|url\(|@import|https?:", page)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    first, second = data["traces"]
    assert first["label"].startswith("</script><b id=x>") and second["label"] == "é⏎⇥"
    assert data["pieces"]["258"] == ["░", True] and data["pieces"]["10"] == ["⏎\n", False]
    assert data["pieces"]["195"] == ["\\xc3", False]
    tokens = list(first["tokens"])
    for _step, place, id, trust in first["events"]:
        tokens[place] = id
        assert 0 <= trust <= 1
    assert BYTES.mask_id not in tokens and len(tokens) == len(hostile.encode()) + 3
    assert "--max-new-tokens 3, --threshold 0.5" in page
