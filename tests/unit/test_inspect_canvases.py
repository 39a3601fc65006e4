"""tools/inspect_batch.py --dllm-mode block_diffusion: canvases, what is scored and whom they see, as in training."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tools")]

import inspect_batch  # noqa: E402

from megatron_dllm.inspection import page, table, text  # noqa: E402
from megatron_dllm.inspection.command import read_data_flags  # noqa: E402
from megatron_dllm.inspection.samples import Inspector  # noqa: E402
from megatron_dllm.modes import block_diffusion as mode  # noqa: E402
from megatron_dllm.noise import Draws  # noqa: E402
from tests.parallel.cases import TINY, write_chat, write_text  # noqa: E402
from tests.unit.test_inspect_batch import page_pictures, page_tables, text_picture, tool  # noqa: E402, F401
from tests.unit.test_inspect_batch import shown_token as shown_byte  # noqa: E402

COMMAND = "--dllm-mode block_diffusion --dllm-block-size 5 --block-diffusion-canvases".split()


@pytest.fixture
def inspector(monkeypatch, tmp_path):
    """inspector(kind of data or a chat file, words of the command line) -> Inspector."""

    def make(kind, words):
        data = ["--data-path", write_text(tmp_path)] if kind == "text" else ["--sft-data-path", kind]
        if kind == "chat":
            data[1] = write_chat(tmp_path)
        monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *TINY[2:], *COMMAND, *words.split(), *data])
        args, tokenizer = read_data_flags(inspect_batch.add_flags)
        return Inspector(args, tokenizer, args.validation)

    return make


@pytest.fixture(params=["chat all", "chat 2", "text 3", "chat all --no-block-diffusion-eos-fill", "text 7 --seed 5"])
def inspect(request, inspector):
    return inspector(*request.param.split(maxsplit=1))


def laid_out(inspect, index: int):
    """(sample with its canvases, what training makes of its micro-batch, its row there)."""
    args, first = inspect.args, index // 2 * 2
    rows = [mode.corrupt(inspect.samples.samples.sample(i), Draws(args.seed, i), args) for i in (first, first + 1)]
    length = max(len(row.sample) for row in rows)
    return rows[index - first], mode.layout(rows, length, args), index - first


def canvases(c, S: int, eos: int) -> list[dict]:
    """Each canvas of a sample by hand: number, place, rows, and of its tokens clean ids, what is seen, noise."""
    S_, found = len(c.sample), []
    clean_E = [*c.sample.tokens_S.tolist(), *[eos] * len(c.fill_x_t_F)]
    sees_E, noised_E = [*c.x_t_S.tolist(), *c.fill_x_t_F.tolist()], [*c.noised_S.tolist(), *c.fill_noised_F.tolist()]
    for n, places_K in enumerate(c.places_NK.tolist()):
        places = [p for p in places_K if p >= 0]
        rows = range(S + 5 * n, S + 5 * n + len(places))
        of = lambda values_E, places=places: [values_E[p] for p in places]
        number = int(c.block_S[places[0]])
        found.append(dict(number=number, place=places[0], rows=rows, clean=of(clean_E), sees=of(sees_E)))
        found[-1] |= dict(noised=of(noised_E), text=[p if p < S_ else None for p in places])
    return found


@pytest.mark.parametrize("index", [0, 3, 9])
def test_facts_are_those_of_training(inspect, index):
    seen, (c, batch, b) = inspect(index), laid_out(inspect, index)
    S = batch.tokens_BQ.shape[1] - batch.drafted
    assert len(seen) == S and seen.drafted == batch.drafted and seen.streams == ["x_0"]
    assert torch.equal(seen.tokens_Q, batch.tokens_BQ[b]) and torch.equal(seen.attributes_QA, batch.attributes_BQA[b])
    expected = canvases(c, S, inspect.args.dllm_eos_token_id)
    assert [(x.number, x.place, x.rows) for x in seen.blocks] == [
        (e["number"], e["place"], e["rows"]) for e in expected
    ]
    for e in expected:
        rows = list(e["rows"])
        assert seen.tokens_Q[rows].tolist() == e["sees"] and seen.terms["dllm"].targets_Q[rows].tolist() == e["clean"]
        assert seen.changed_Q[rows].tolist() == e["noised"]  # also where noise drew the same token
        assert seen.terms["dllm"].weights_Q[rows].tolist() == [1.0] * len(rows)
    assert not seen.changed_Q[:S].any()
    assert 0 in seen.terms["dllm"].shifts and seen.terms["encoder ar"].shifts == (1,)
    for name, term in seen.terms.items():
        assert term.batch_count == batch.terms[name].count and torch.equal(
            term.weights_Q, batch.terms[name].weights_BQ[b]
        )


def test_another_target_is_told(inspect, monkeypatch):
    """Only EOS may stand where the text has none."""
    honest = mode.layout

    def shifted(samples, length, args):
        batch = honest(samples, length, args)
        batch.terms["dllm"].targets_BQ[:, length] = ord("@")  # where no text has one
        return batch

    monkeypatch.setattr(mode, "layout", shifted)
    assert inspect(3).terms["dllm"].shifts == ()


def test_tables_and_text_hold_the_facts(inspect):
    token, filled = shown_byte, 0
    for index in (0, 1, 3, 9):
        seen, (c, _, _) = inspect(index), laid_out(inspect, index)
        S, begins = len(seen), {}
        expected = canvases(c, S, inspect.args.dllm_eos_token_id)
        for e in expected:
            begins[e["place"]] = str(e["number"])
        of_text, *of_blocks = page_tables(page.render(inspect, [seen], range(S)))
        found = {int(row["", "place"]): row["", "begins"] for row in of_text if ("", "begins") in row}
        assert found == begins and bool(of_blocks) == bool(expected)
        rows = iter(of_blocks[0] if of_blocks else [])
        lines = text.render(inspect, seen, range(S), text.plain).replace("⏎\n    ", "⏎").splitlines()
        for e in expected:
            shown = ""
            for k, (clean, sees, noised, place) in enumerate(
                zip(e["clean"], e["sees"], e["noised"], e["text"], strict=True)
            ):
                row = next(rows)
                assert (row["", "block"], row["", "in it"]) == (str(e["number"]), str(k))
                assert row["", "pos"] == str(seen.position_ids_Q[e["rows"][k]].item())
                if place is None:
                    filled += 1
                    assert row["", "place"] == "-" and clean == inspect.args.dllm_eos_token_id
                else:
                    assert row["", "place"] == str(place)
                assert row["blocks", "sees"] == token(sees) and row["blocks", "dllm"] == token(clean)
                assert row["blocks", "weight"] == "1"
                shown += f"⟦{token(clean)}→{token(sees)}⟧" if noised else token(clean)
            at = lines.index(
                f"  block {e['number']}, {len(e['rows'])} tokens from place {e['place']}".replace("1 tokens", "1 token")
            )
            assert lines[at + 1].strip() == shown
        assert next(rows, None) is None
    assert inspect.args.block_diffusion_eos_fill or not filled


def test_fill_has_no_place_in_the_text(inspector, tmp_path):
    """Where a turn ends, whatever comes after it."""
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "A"), ("assistant", "Good, good.")]
    chat = tmp_path / "turns.jsonl"
    chat.write_text(json.dumps(dict(messages=[dict(role=role, content=said) for role, said in turns])) + "\n")
    inspect = inspector(str(chat), "all")
    seen, eos = inspect(0), inspect.args.dllm_eos_token_id
    ends = [i for i, id in enumerate(seen.data_S.tolist()) if id == eos]
    columns, borders = table.block_table(inspect, seen, seen.blocks)
    cells = {column.name: column.cells for column in columns}
    expected = []
    for begin, end in zip([seen.blocks[0].place, seen.blocks[2].place], ends, strict=True):
        length = end + 1 - begin
        expected += [*map(str, range(begin, end + 1)), *["-"] * (-length % 5)]
        assert length % 5
    assert cells["place"] == expected and expected.count("-") == 3 + 3 == cells["dllm"].count("<eos>") - 2
    assert borders == ["block", "", "", "", ""] * len(seen.blocks)
    assert seen.terms["dllm"].shifts == (0,)


def test_pictures_are_the_rule(inspect):
    for index, places in ((3, range(4, 24)), (3, range(30, 64)), (9, range(0, 50))):
        seen = inspect(index)
        places = seen.clip(places.start, places.stop)
        e = canvases(laid_out(inspect, index)[0], len(seen), inspect.args.dllm_eos_token_id)
        of_blocks = [(x["number"], k, x["rows"][k]) for x in e if x["place"] in places for k in range(len(x["rows"]))]
        rows = [*places, *(row for _, _, row in of_blocks)]
        queries_M, keys_P, allowed_MP, sees_M = seen.picture(places)
        assert queries_M.tolist() == keys_P.tolist() == rows
        a = seen.attributes_QA
        expected = [[mode.visible(a[q], a[k]).item() for k in rows] for q in rows]
        assert allowed_MP.tolist() == expected
        assert sees_M.tolist() == [sum(mode.visible(a[q], key).item() for key in a) for q in rows]
        lines = text.render(inspect, seen, places, text.plain).splitlines()
        assert text_picture(lines) == ["".join("█" if cell else "·" for cell in row) for row in expected]
        (queries,) = page_pictures(page.render(inspect, [seen], places))
        assert len(queries) == len(rows)
        titles = [f"x_0 {i} " for i in places] + [f"block {n} +{k} " for n, k, _ in of_blocks]
        assert all(query[0].startswith(title) for query, title in zip(queries, titles, strict=True))


def test_the_canvases_in_words(inspect):
    seen, (c, _, _) = inspect(3), laid_out(inspect, 3)
    said = dict(table.summary(inspect, seen))
    assert said["input"] == f"x_0 | blocks, {len(seen)} places; padded as in the micro-batch of samples 2 to 3"
    turns = int(c.block_S.max())
    assert f", {turns} block{'s' * (turns != 1)} of up to " in said["sample"]
    e = canvases(c, len(seen), inspect.args.dllm_eos_token_id)
    clean = sorted({x["noised"].count(False) for x in e})
    of = f"{clean[0]} to {clean[-1]} tokens" if len(clean) > 1 else f"{clean[0]} token{'s' * (clean[0] != 1)}"
    places = f"they begin at places {' '.join(str(x['place']) for x in e)}"
    if len(e) == 1:
        places = places.replace("they begin at places", "it begins at place")
    assert said["blocks"] == (
        f"{len(e)} block{'s' * (len(e) != 1)} of up to 5 tokens, laid out in {seen.drafted} places; of each {of} not "
        f"noised, level {float(c.level):.4g}; {places}"
    )
    scored = sum(len(x["rows"]) for x in e)
    assert said["term dllm"].startswith(f"scores {scored} rows of blocks for the token in its place; weight 1, sum ")
    assert re.match(r"scores \d+ rows of x_0 for the next token; weight 1, ", said["term encoder ar"])
    content = page.render(inspect, [seen], range(8))
    assert all(f"<dt>{label}</dt><dd>{words}</dd>" in content for label, words in said.items())


GEMMA = {
    "small preset": ("--model-preset tiny-diffusion-gemma", 32),
    "preset": ("--model-preset diffusion-gemma-26b-a4b", 1024),
    "flags": (
        "--dllm-architecture diffusion_gemma --num-layers 18 --dllm-full-attention-layers 5 11 17 --dllm-window 7 "
        "--dllm-full-kv-channels 512 --qk-layernorm --tie-embeddings-and-output-weights --num-experts 128",
        7,
    ),
}


@pytest.mark.parametrize("shape", GEMMA)
def test_a_model_with_sliding_layers(tool, tmp_path, shape):  # noqa: F811
    """Their windows are not in the picture, which is said; whether a canvas knows a first prediction is shown."""
    flags, window = GEMMA[shape]
    command = ["--dllm-mode", "block_diffusion", "--sft-data-path", write_chat(tmp_path), "--seq-length", "64"]
    command += "--tokenizer-type ByteLevelTokenizer --samples 8 --dllm-block-size 5".split() + flags.split()
    note = f"sliding layers see a window of {window} tokens."
    code, out, error = tool(command)
    assert (code, error) == (0, "") and out.count(note) == 1
    assert out.count(", knowing a first prediction") and out.count(", not knowing a first prediction")
    file = tmp_path / "page.html"
    assert tool([*command, "--html", file])[0] == 0 and file.read_text().count(note) == 1
    always = tool([*command, "--block-diffusion-self-conditioning", "1"])[1]
    assert ", knowing a first prediction" in always and "not knowing a first prediction" not in always
