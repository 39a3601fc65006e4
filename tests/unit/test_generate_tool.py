"""tools/generate.py around the samplers: flags, presets, prompts from files, answers to files, and what it refuses."""

import json
import re
from argparse import Namespace

import pytest

from megatron_dllm import generation
from megatron_dllm.generation import GenerationConfig
from megatron_dllm.generation.config import flag
from megatron_dllm.generation.options import decoding_config
from megatron_dllm.generation.presets import PRESETS, apply_preset
from megatron_dllm.generation.samplers import SAMPLERS, check_sampler, sampler_name
from tests.unit.generate_tool import BYTES, RUN, TOOL, Letters, tool

__all__ = ["tool"]  # a fixture


# --- flags and presets --------------------------------------------------------------------------------------------


def parsed(tool, *words):
    return decoding_config(vars(tool.module.parse_args(words)))


def test_every_option_has_a_flag_in_both_spellings(tool):
    values = dict(
        max_new_tokens=7, sampler="llada2", mode="ar", steps=5, gen_block_length=3, temperature=0.5, top_k=4, top_p=0.9,
        remasking="random", algorithm="origin", algorithm_temperature=0.1, cache="none", cfg_scale=1.0,
        stop_at_eos=True, gap_length=3, seed=3, batch_size=2, editing_threshold=0.5, max_post_steps=3,
        t_min=0.2, t_max=0.9, entropy_bound=0.3, stability_threshold=2, confidence_threshold=0.1,
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
    modes = dict(llada="mdlm", dream="mdlm", llada2="bd3lm", nemotron="hybrid", idlm="idlm")
    mode = (modes | dict(diffusion_gemma="block_diffusion"))[config.sampler]
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
    "--load run": "give --prompt, --messages-file or --prompts-file",
    "--load run --prompts-file missing.jsonl": "--prompts-file missing.jsonl cannot be read",
    "--load run --prompts-file {file} --prompt a": "leave out --prompt and --messages-file",
    "--load run --prompts-file {file} --stream": "--stream shows text where --json and --prompts-file write objects",
    "--load run --prompt a --stream --json": "give --output",
    "--load run --prompt a --stream --batch-size 2": "leave out --batch-size",
    "--load run --prompt a --output missing/x": "--output missing/x is not a file in a folder",
    "--load run --prompt a --trace {folder}": "is not a file in a folder",
    "--load run --prompt a --output=": "--output '' is not a file in a folder",
    "--load run --prompt a --trace /proc/trace.html": "--trace /proc/trace.html is not a file in a folder",
    "--load run --prompt a --compare-plain": "--compare-plain compares a draft and its target with the target alone",
    "--load run --prompt a --gap-length 3": "--gap-length is the length of a [MASK] of --infill",
    "--load run --prompts-file {file} --output {file}": "must be different files",
    "--load run --prompt a --preset gpt": "--preset gpt is unknown: choose one of llada, llada2, ",
    "--load run --prompt a --preset dream --sampler llada": "--preset dream is not for --sampler llada",
    "--load run --prompt a --preset nemotron --mode ar": "--preset nemotron is not for --mode ar",
    "--load run --prompt a --preset llada2": "--sampler llada2 does not fit a model trained with --dllm-mode mdlm",
    "--load run --prompt a --steps few": "argument --steps: invalid int value: 'few': see --help",
    "--load run --prompt a --stepps 3": "unrecognized arguments: --stepps 3",
    "--load run --prompt a --remasking all": "choose one of low_confidence, random",
    "--load run --prompt a --infill": "prompt 1 has no gap to fill",
    "--load run --prompt a --entropy-bound 1": "--entropy-bound means nothing to --sampler llada, which decodes",
    "--load run --prompt a --t-min -1": "--t-min is -1.0: give a finite number that is not negative",
    "--load run --prompt a --t-min 0.9": "--t-min 0.9 is the last temperature of a canvas and --t-max 0.8 its first",
    "--load run --prompt a --t-min 0 --t-max 0": "give one above 0 that is not below the last",
    "--load run --prompt a --confidence-threshold nan": "--confidence-threshold is nan: give a finite number",
    "--load run --prompt a --stability-threshold -1": "--stability-threshold is -1: give a number of steps, or 0",
    "--load run --prompt a --sampler diffusion_gemma": "does not fit a model trained with --dllm-mode mdlm",
}
BAD_FOR_CANVASES = {
    "--sampler llada": "--sampler llada does not fit a model trained with --dllm-mode block_diffusion: choose diff",
    "--temperature 0.5": "draws at temperatures from --t-max down to --t-min: leave out --temperature",
    "--temperature 0.5 --top-k 3": "leave out --temperature",
    "--gen-block-length 8": "--gen-block-length means nothing to --sampler diffusion_gemma",
    "--threshold 0.5": "--threshold means nothing to --sampler diffusion_gemma",
    "--cache dual": "--cache dual is an approximation for models that attend in both directions",
    "--infill": "sees no text after what it writes",
    "--mode ar": "--mode means nothing to --sampler diffusion_gemma",
    "--max-new-tokens 4096": "prompt 1 with 4096 new tokens is 4097 tokens long, but the model has 4096 positions",
}


@pytest.mark.parametrize("flags", BAD_FOR_CANVASES)
def test_what_canvases_cannot_do_is_one_sentence(tool, flags):
    refused(tool, BAD_FOR_CANVASES[flags], *f"--load run --prompt a {flags}".split(), dllm_mode="block_diffusion")


def test_models_without_a_mask_token_have_no_forbidden_id(tool, tmp_path):
    """Neither the tokenizer's mask nor what a canvas holds where nothing is written is one."""
    file = write_lines(tmp_path / "in.jsonl", dict(tokens=[258, 1]))
    run = dict(dllm_mode="block_diffusion", dllm_mask_token_id=None)
    assert tool(*SHORT, "--prompts-file", file, **run)[0] == 0
    file = write_lines(tmp_path / "in.jsonl", dict(tokens=[1, -1]))
    refused(tool, "line 1 holds the id -1, but the tokenizer has 259", *SHORT, "--prompts-file", file, **run)


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_sentence_before_there_is_a_model(tool, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    file = write_lines(tmp_path / "in.jsonl", dict(prompt="a"))
    refused(tool, BAD[flags], *flags.format(file=file, folder=tmp_path).split())


# --- what the documentation says ----------------------------------------------------------------------------------

DOCUMENT = (TOOL.parents[1] / "docs/generation.md").read_text()


def test_the_documented_presets_are_those():
    rows = [
        f"| `{name}` | `{' '.join(map(flag_of, preset.options, preset.options.values()))}` | {preset.source} |"
        for name, preset in PRESETS.items()
    ]
    assert "\n".join(rows) in DOCUMENT


def flag_of(name, value):
    return flag(name) if value is True else f"{flag(name)} {value}"


def test_the_documented_options_are_read_by_those_samplers():
    table = re.findall(r"^\| (`--[^|]+) \|[^|]*\| ([^|]+) \|[^|]*\|$", DOCUMENT, re.M)
    read_by = {name: readers for names, readers in table for name in re.findall("--[a-z-]+", names)}
    assert set(read_by) == {flag(field) for field in GenerationConfig.__dataclass_fields__}
    for name, readers in read_by.items():
        field = name[2:].replace("-", "_")
        reading = {sampler for sampler, one in SAMPLERS.items() if field in one.reads}
        if readers == "all":
            assert reading == set(SAMPLERS)
        elif readers.startswith("all but "):
            assert reading == set(SAMPLERS) - set(readers.removeprefix("all but ").split(" and "))
        elif field != "gap_length":  # which is infill's
            assert reading == set(readers.split(", ")) | ({"llada2"} if field == "gen_block_length" else set())
