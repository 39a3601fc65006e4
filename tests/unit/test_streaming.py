"""The text while it is denoised, and the page that plays it: of every decoding loop, on a toy network."""

import io
import json
import os
import re
import sys
from argparse import Namespace

import pytest
import torch

from megatron_dllm.generation import GenerationConfig, streaming
from megatron_dllm.generation.llada import LLaDARow
from megatron_dllm.generation.prompts import build_canvases
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.generation.trace import Recorder, render
from megatron_dllm.modes import mdlm
from tests.unit.generate_tool import BYTES, RUN, Letters, tool

__all__ = ["tool"]  # a fixture

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
    "canvases": (dict(dllm_mode="block_diffusion"), ["--steps-per-block", 5]),
}


def loop(name):
    args, words = LOOPS[name]
    gap = "[MASK:3]" if "--infill" in words else ""
    prompts = ["--prompt", f"Why {gap}is", "--prompt", f"What{gap}"]
    network = lambda: Letters(restless=name in ("editing", "correcting"), eos_at=21 if name == "EOS" else None)
    return ["--load", "run", "--max-new-tokens", 30, *words, *prompts], args, network


@pytest.mark.parametrize("name", LOOPS)
def test_a_stream_ends_as_the_text(tool, name):
    words, args, network = loop(name)
    code, out, _ = tool(*words, "--batch-size", 1, network=network(), **args)
    streamed = tool(*words, "--stream", network=network(), **args)
    assert code == 0 and len(out) > 16
    assert streamed == (0, out, "")


def test_objects_go_to_a_file_beside_a_stream(tool, tmp_path):
    words, args, _ = loop("blocks")
    plain = tool(*words, "--batch-size", 1, **args)[1]
    assert tool(*words, "--stream", "--output", tmp_path / "out.jsonl", **args) == (0, plain, "")
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert "\n\n".join(texts) + "\n" == plain


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
        assert trace.replay(0) == trace.tokens and trace.mask_id in trace.tokens
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
