"""tools/inspect_batch.py --dllm-mode dflash: blocks, what is scored of them and whom they see, as in training."""

import os
import re
import sys

import pytest
import torch

from megatron_dllm.display import visible_text
from megatron_dllm.inspection import page, table, text
from megatron_dllm.inspection.command import read_data_flags
from megatron_dllm.inspection.samples import Inspector
from megatron_dllm.models import dflash as model
from megatron_dllm.modes import dflash
from megatron_dllm.noise import Draws
from tests.drafts import make as make_draft
from tests.hf_models import make
from tests.parallel.hf import write_words
from tests.parallel.test_dflash import write_text
from tests.unit.test_inspect_batch import inspect_batch, page_pictures, page_tables, text_picture, tool  # noqa: F401

BASE = "--dllm-mode dflash --dllm-block-size 4 --dflash-num-anchors 6 --seq-length 32 --micro-batch-size 2".split()
VARIANTS = {
    "": "",
    "overlap": "--dflash-anchor-sampling overlap",
    "nonoverlap, automodel": "--dflash-anchor-sampling nonoverlap --dllm-compat automodel",
    "prefix": "--dflash-loss variable-prefix",
    "rule": "--dflash-window 3 --dflash-causal-block",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of a target without weights, and of a draft; data."""
    folder = tmp_path_factory.mktemp("inspected")
    target, _ = make("qwen3", folder)
    for name in os.listdir(target):
        if name.endswith(".safetensors"):
            os.remove(os.path.join(target, name))
    draft = make_draft(folder, num_target_layers=4)
    text_data = ["--data-path", write_text(folder), "--split", "70,30,0"]
    return dict(target=target, draft=draft, chat=["--sft-data-path", write_words(folder)], text=text_data)


@pytest.fixture
def inspector(places, monkeypatch):
    def make(kind, *words):
        command = [*BASE, "--dflash-target", places["target"], *places[kind], *words]
        monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *map(str, command)])
        args, tokenizer = read_data_flags(inspect_batch.add_flags)
        return Inspector(args, tokenizer, args.validation)

    return make


def laid_out(inspect, index: int):
    """(sample with its anchors, what training makes of its micro-batch, its row there)."""
    args, source, first = inspect.args, inspect.samples.samples, index // 2 * 2
    rows = [dflash.corrupt(source.sample(i), Draws(args.seed, i), args) for i in (first, first + 1)]
    length = max(len(row.sample) for row in rows) if args.sft_data_path else 32
    return rows[index - first], dflash.layout(rows, length, args), index - first


CASES = [(variant, kind) for variant in VARIANTS for kind in ("chat", "text")]


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_what_is_shown_is_what_trains(inspector, variant, kind):
    inspect = inspector(kind, *VARIANTS[variant].split())
    rule = model.rule(inspect.args.dflash_causal_block, inspect.args.dflash_window)
    scored = 0
    for index in (0, 5, 8, 11):
        seen, (c, batch, b) = inspect(index), laid_out(inspect, index)
        S = batch.tokens_BQ.shape[1] - batch.drafted
        assert len(seen) == S and seen.streams == ["context"] and seen.drafted == batch.drafted
        numbers = c.kept_N.nonzero()[:, 0].tolist()
        assert [block.rows for block in seen.blocks] == [range(S + 4 * n, S + 4 * n + 4) for n in numbers]
        assert [(block.number, block.place) for block in seen.blocks] == [(n, int(c.anchors_N[n])) for n in numbers]
        assert torch.equal(seen.tokens_Q, batch.tokens_BQ[b])
        assert torch.equal(seen.attributes_QA, batch.attributes_BQA[b])
        term = seen.terms["dllm"]
        assert torch.equal(term.weights_Q, batch.terms["dllm"].weights_BQ[b])
        # a table of the context, one of the blocks, each of them against the text by hand
        content = page.render(inspect, [seen], range(S))
        context, *blocks = page_tables(content)
        begins = {anchor: [] for anchor in c.anchors_N[c.kept_N].tolist()}
        for n, anchor in enumerate(c.anchors_N[c.kept_N].tolist()):
            begins[anchor].append(n)
        found = {int(row["", "place"]): row["", "begins"] for row in context if ("", "begins") in row}
        assert found == {place: ", ".join(map(str, numbers)) for place, numbers in begins.items()}
        rows = blocks[0] if blocks else []
        assert len(rows) == 4 * int(c.kept_N.sum())
        lines = dict.fromkeys(numbers, "")
        for row in rows:
            n, k, place = (int(row["", name]) for name in ("block", "in it", "place"))
            prefix = int(c.prefix_N[n])
            assert place == int(c.anchors_N[n]) + k
            inside = place < len(c.sample) and c.sample.document_S[place] == c.sample.document_S[place - k]
            word = visible_text(inspect.token(c.sample.tokens_S[place].item())[0]) if inside else None
            assert row["blocks", "sees"] == (word if inside and k < prefix else "<mask>")
            scores = inside and k >= prefix and c.sample.loss_mask_S[place]
            lines[n] += f"⟦{word}⟧" if scores else row["blocks", "sees"]
            if scores:
                weight = torch.exp(torch.tensor(-(k - prefix) / inspect.args.dflash_loss_decay))
                assert row["blocks", "dllm"] == word and row["blocks", "weight"] == f"{weight:.4g}"
                scored += 1
            else:
                assert ("blocks", "dllm") not in row
        # the blocks as text, then the picture, a line for each token of a block
        plain = text.render(inspect, seen, range(S), text.plain).replace("⏎\n    ", "⏎").splitlines()
        for n, line in lines.items():
            at = plain.index(f"  block {n}, 4 tokens from place {int(c.anchors_N[n])}")
            assert plain[at + 1].strip() == line.replace("⟧⟦", "")
        shown = seen.clip(3, 20)
        kept = [row for block in seen.blocks_at(shown) for row in block.rows]
        assert kept == [q for q in range(S, len(seen.tokens_Q)) if (q - S) // 4 in numbers_in(c, shown)]
        keys, a = [*shown, *kept], seen.attributes_QA
        expected = [[rule(a[q], a[key]).item() for key in keys] for q in kept]
        plain = text.render(inspect, seen, shown, text.plain).splitlines()
        if not kept:
            assert f"no block begins at {table.interval(shown)}" in plain
            continue
        assert text_picture(plain) == ["".join("█" if cell else "·" for cell in row) for row in expected]
        (queries,) = page_pictures(page.render(inspect, [seen], shown))
        for (title, runs), q, row in zip(queries, kept, expected, strict=True):
            assert [any(x <= cell < y for x, y in runs) for cell in range(len(keys))] == row
            sees = sum(rule(a[q], key).item() for key in a)
            assert title.startswith(f"block {(q - S) // 4} +{(q - S) % 4} ") and title.endswith(f" sees {sees} keys")
    assert scored > 10


def numbers_in(c, places: range) -> set[int]:
    """Blocks that count and begin at these places."""
    return {n for n, anchor in enumerate(c.anchors_N.tolist()) if c.kept_N[n] and anchor in places}


def test_summary_in_words(inspector):
    inspect = inspector("chat")
    said = dict(table.summary(inspect, seen := inspect(8)))
    c = seen.corrupted
    begins = " ".join(map(str, c.anchors_N[c.kept_N].tolist()))
    assert said["sample"].startswith(f"{len(c.sample)} tokens, 1 document")
    assert said["input"] == f"context | blocks, {len(seen)} places; padded as in the micro-batch of samples 8 to 9"
    assert said["blocks"] == (
        f"{int(c.kept_N.sum())} blocks of up to 4 tokens, laid out in 24 places; of each 1 token not noised; "
        f"they begin at places {begins}"
    )
    assert re.match(
        r"scores \d+ rows of blocks for the token in its place; weights [\d.]+ to 1, sum", said["term dllm"]
    )
    assert (
        "of each 2 to 3 tokens not noised"
        in dict(table.summary(*two(inspector("chat", *VARIANTS["prefix"].split()))))["blocks"]
    )


def two(inspect):
    return inspect, inspect(8)


def test_a_sample_without_blocks_that_count(inspector):
    inspect = inspector("chat", "--dllm-block-size", "16")
    seen = inspect(0)
    said = dict(table.summary(inspect, seen))
    assert said["blocks"] == "none of this sample, laid out in 16 places"
    assert said["term dllm"].startswith("scores nothing here")
    assert "no block begins at" in text.render(inspect, seen, range(32), text.plain)
    assert len(page_tables(page.render(inspect, [seen], range(32)))) == 1


def test_a_whole_training_command(tool, places, tmp_path):  # noqa: F811
    """Layout, stored features and a draft to go on from do not matter, and nothing of the target's weights is read."""
    layout = (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --num-layers 2 --lr 1e-3"
    )
    command = [*BASE, "--dflash-target", places["target"], *places["chat"], *layout.split(), "--train-iters", "3"]
    command += ["--dflash-features", tmp_path / "nothing", "--dflash-eval-interval", "2", "--samples", "2"]
    code, out, error = tool(command)
    assert (code, error) == (0, "") and out.count(" laid out in ") == 2 and "blocks that begin at" in out
    again, other, _ = tool([*command, "--hf-model", places["draft"]])
    assert again == 0 and other == out
    file = tmp_path / "page.html"
    assert tool([*command, "--html", file])[0] == 0 and "blocks that begin at" in file.read_text()
    code, out, error = tool([*BASE, *places["chat"]])
    assert code == 2 and out == "" and "name it by --dflash-target DIR" in error
