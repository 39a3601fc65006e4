"""tools/inspect_batch.py and blocks that stand beside the text: they are shown as a sample of their own."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tools")]

import inspect_batch  # noqa: E402

from megatron_dllm.inspection import page, text  # noqa: E402
from megatron_dllm.inspection.command import read_data_flags  # noqa: E402
from megatron_dllm.inspection.samples import Inspector  # noqa: E402
from megatron_dllm.modes import block_diffusion as mode  # noqa: E402
from megatron_dllm.noise import Draws  # noqa: E402
from tests.parallel.cases import TINY, write_chat, write_text  # noqa: E402
from tests.unit.test_inspect_batch import page_pictures, text_picture  # noqa: E402

COMMAND = "--dllm-mode block_diffusion --dllm-block-size 5 --block-diffusion-canvases".split()


@pytest.fixture(params=["chat all", "chat 2", "text 3"])
def inspect(request, monkeypatch, tmp_path):
    kind, canvases = request.param.split()
    data = ["--sft-data-path", write_chat(tmp_path)] if kind == "chat" else ["--data-path", write_text(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *TINY[2:], *COMMAND, canvases, *data])
    args, tokenizer = read_data_flags(inspect_batch.add_flags)
    return Inspector(args, tokenizer, args.validation)


@pytest.mark.parametrize("index", [0, 3])
def test_facts_are_those_of_training(inspect, index):
    args, seen, first = inspect.args, inspect(index), index // 2 * 2
    rows = [mode.corrupt(inspect.samples.samples.sample(i), Draws(args.seed, i), args) for i in (first, first + 1)]
    length = max(len(row.sample) for row in rows)
    batch, b = mode.layout(rows, length, args), index - first
    c, D = rows[b], batch.drafted
    assert len(seen) == length and len(seen.beside) == D
    assert torch.equal(seen.tokens_Q, batch.tokens_BQ[b]) and torch.equal(seen.attributes_QA, batch.attributes_BQA[b])
    assert torch.equal(seen.beside.tokens_Q, batch.tokens_BQ[b, length:])
    real = c.places_NK.flatten() >= 0
    clean_E = torch.cat([c.sample.tokens_S, torch.full((len(c.fill_x_t_F),), args.dllm_eos_token_id)])
    noised_E = torch.cat([c.noised_S, c.fill_noised_F])
    places = c.places_NK.flatten()[real]
    shown = torch.arange(D)[: len(real)][real]
    assert torch.equal(seen.beside.data_S[shown], clean_E[places])
    assert torch.equal(seen.beside.changed_Q[shown], noised_E[places])  # also where noise drew the same token
    assert not seen.changed_Q[:length].any()
    assert seen.terms["dllm"].shifts == (0,) and seen.terms["encoder ar"].shifts == (1,)
    assert list(seen.beside.terms) == ["dllm"]
    assert seen.terms["dllm"].batch_count == batch.terms["dllm"].count


def test_pictures_are_the_rule(inspect):
    seen = inspect(3)
    places = seen.clip(4, 24)
    rows_N, allowed_NN, sees_N = seen.picture(places)
    beside = seen.beside.clip(0, len(places))
    assert rows_N.tolist() == [*places, *(len(seen) + d for d in beside)]
    a = seen.attributes_QA
    expected = [[mode.visible(a[q], a[k]).item() for k in rows_N] for q in rows_N]
    assert allowed_NN.tolist() == expected
    assert sees_N.tolist() == [sum(mode.visible(a[q], key).item() for key in a) for q in rows_N]
    lines = text.render(inspect, seen, places, text.plain).splitlines()
    assert text_picture(lines) == ["".join("█" if cell else "·" for cell in row) for row in expected]
    (queries,) = page_pictures(page.render(inspect, [seen], places))
    assert len(queries) == len(rows_N)
    titles = [f"x_0 {i} " for i in places] + [f"x_t {d} " for d in beside]
    assert all(query[0].startswith(title) for query, title in zip(queries, titles, strict=True))


def test_the_canvases_in_words(inspect):
    seen = inspect(0)
    lines = text.render(inspect, seen, range(8), text.plain).splitlines()
    blocks = inspect(0).corrupted.places_NK.shape[0]
    (said,) = [line for line in lines if line.startswith("input")]
    assert f"then x_t of block{'s' * (blocks != 1)} " in said and f"{len(seen.beside)} places" in said
    assert "x_0 as text" in lines and "x_t as text" in lines
    (scores,) = [line for line in lines if line.startswith("term dllm")]
    assert "rows of x_t for the token in its place; weight 1" in scores
