"""tools/inspect_batch.py: what it shows is what trains, in every mode, as text and as a page."""

import argparse
import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import megatron.training.training as training
import pytest
import torch
from megatron.core.datasets.utils import Split
from megatron.training.arguments import add_megatron_arguments

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools")]

import inspect_batch  # noqa: E402

from megatron_dllm.arguments import add_arguments, parse_arguments  # noqa: E402
from megatron_dllm.data.datasets import build_datasets  # noqa: E402
from megatron_dllm.data.stream import CorruptedSamples  # noqa: E402
from megatron_dllm.data.tokenizer import build_tokenizer  # noqa: E402
from megatron_dllm.inspection import page, table, text  # noqa: E402
from megatron_dllm.inspection.command import data_flags, read_data_flags  # noqa: E402
from megatron_dllm.inspection.samples import Inspector  # noqa: E402
from megatron_dllm.modes import MODES, get_mode, mdlm  # noqa: E402
from megatron_dllm.modes.base import BLOCK, DOCUMENT, POSITION, Corrupted, ModelInput, Term  # noqa: E402
from megatron_dllm.noise import Draws, ValidationDraws  # noqa: E402
from tests.parallel.cases import TINY, write_chat, write_text  # noqa: E402

WITHOUT_MODE = TINY[2:]
# every mode there is, with blocks of a size that divides nothing, and what else changes the layout
COMMANDS = {
    name: ["--dllm-mode", name] + ["--dllm-block-size", "5"] * ("dllm_block_size" in mode.USES)
    for name, mode in MODES.items()
    if name not in ("dflash", "block_diffusion")  # the latter: test_inspect_canvases.py
}
COMMANDS |= {
    "complementary": "--dllm-mode bd3lm --dllm-block-size 5 --bd3lm-complementary-masks".split(),
    "schedule": "--dllm-mode bd3lm --dllm-block-size-schedule 1:4 --dllm-block-size-schedule-iters 1".split(),
    "blockwise": "--dllm-mode hybrid --dllm-corruption blockwise --dllm-block-size 8".split(),
    "response": "--dllm-mode idlm --dllm-block-size 5 --dllm-block-origin response".split(),
}

# packed text has no responses to begin blocks at
CASES = [(name, kind) for name in COMMANDS for kind in ("chat", "text") if (name, kind) != ("response", "text")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return dict(
        chat=["--sft-data-path", write_chat(folder)], text=["--data-path", write_text(folder), "--split", "70,30,0"]
    )


@pytest.fixture
def inspector(monkeypatch):
    """inspector(words of the command line) -> Inspector."""

    def make(words, **options):
        monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *map(str, words)])
        args, tokenizer = read_data_flags(inspect_batch.add_flags)
        return Inspector(args, tokenizer, args.validation)

    return make


@pytest.fixture
def trained(monkeypatch):
    """trained(words, processes) -> (args, data sets) of a training run with this command line."""

    def make(words, processes=1):
        monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *map(str, words)])
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        try:
            args, tokenizer = parse_arguments()
        finally:
            training.destroy_global_state()
            monkeypatch.delenv("WORLD_SIZE")
        return args, build_datasets(args, tokenizer)

    return make


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(words) -> (exit code, stdout, stderr)."""

    def run(words):
        monkeypatch.setattr(sys, "argv", ["inspect_batch.py", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            inspect_batch.main()
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


# --- what is shown, against the training path taken by hand --------------------------------------------------------


def by_hand(args, datasets, index: int, size: int, validation: bool = False) -> tuple[Corrupted, ModelInput, int]:
    """(sample `index` with its noise, the layout of its micro-batch of `size`, its row there)."""
    mode, first = get_mode(args.dllm_mode), index // size * size
    source = datasets.valid if validation else datasets.train
    draws = ValidationDraws if validation else lambda i: Draws(args.seed, i)
    rows = [mode.corrupt(source.sample(i), draws(i), args) for i in range(first, first + size)]
    length = max(len(row.sample) for row in rows) if args.sft_data_path else 64
    return rows[index - first], mode.layout(rows, length, args), index - first


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_facts_are_those_of_training(inspector, trained, data, command, kind):
    words = [*WITHOUT_MODE, *COMMANDS[command], *data[kind]]
    inspect, (args, datasets) = inspector(words), trained(words)
    for index in (0, 3, 9, 18):
        seen = inspect(index)
        c, batch, b = by_hand(args, datasets, index, 2)
        S = batch.tokens_BQ.shape[1] // batch.streams
        assert list(seen.batch) == [index - b, index - b + 1] and len(seen) == S
        assert torch.equal(seen.tokens_Q, batch.tokens_BQ[b])
        assert torch.equal(seen.position_ids_Q, batch.position_ids_BQ[b])
        assert torch.equal(seen.attributes_QA, batch.attributes_BQA[b])
        assert seen.corrupted.level_S.tolist() == c.level_S.tolist()
        assert list(seen.terms) == list(batch.terms)
        for name, term in batch.terms.items():
            shown = seen.terms[name]
            assert shown.batch_count == term.count
            assert torch.equal(shown.targets_Q, term.targets_BQ[b]) and torch.equal(shown.weights_Q, term.weights_BQ[b])
            assert shown.count == get_mode(args.dllm_mode).layout([c], S, args).terms[name].count
        for stream, place in itertools.product(range(batch.streams), range(S)):
            inside = place < len(c.sample)
            before = c.sample.tokens_S[place].item() if inside else args.dllm_pad_token_id
            after = batch.tokens_BQ[b, stream * S + place].item()
            noised = after != before or bool(inside and stream == 0 and c.noised_S[place])
            assert seen.data_S[place].item() == before
            assert seen.changed_Q[stream * S + place].item() == noised


def scored_by_hand(args, c: Corrupted) -> dict:
    """{term: {(stream, place): (target, weight)}}, of the modes that this file knows."""
    s = c.sample
    ids, supervised, documents = s.tokens_S.tolist(), s.loss_mask_S.tolist(), s.document_S.tolist()
    masked = {i for i, id in enumerate(c.x_t_S.tolist()) if id == args.dllm_mask_token_id}
    level = c.level_S.tolist()
    noisy = {("x_t", i): (ids[i], 1 / level[i]) for i in masked}
    rest = [i for i in range(len(ids)) if supervised[i] and i not in masked]
    complement = {("complement", i): (ids[i], 1 / (1 - level[i])) for i in rest}
    after = [i for i in range(len(ids) - 1) if supervised[i + 1] and documents[i] == documents[i + 1]]
    following = lambda stream: {(stream, i): (ids[i + 1], 1.0) for i in after}
    return {
        "mdlm": lambda: {"dllm": noisy},
        "bd3lm": lambda: {"dllm": noisy | (complement if args.bd3lm_complementary_masks else {})},
        "hybrid": lambda: {"dllm": noisy, "ar": following("x_0")},
        "idlm": lambda: {"dllm": following("x_t"), "clean": following("x_0")},
    }[args.dllm_mode]()


@pytest.mark.parametrize(("command", "kind"), [case for case in CASES if COMMANDS[case[0]][1] != "scdd"])
def test_scored_rows_are_those_of_the_objective(inspector, data, command, kind):
    inspect = inspector([*COMMANDS[command], *data[kind], *WITHOUT_MODE])
    shifts = set()
    for index in range(4):
        seen = inspect(index)
        expected = scored_by_hand(inspect.args, seen.corrupted)
        assert set(seen.terms) == set(expected)
        for name, rows in expected.items():
            term = seen.terms[name]
            found = {
                (seen.streams[q // len(seen)], q % len(seen)): (term.targets_Q[q].item(), term.weights_Q[q].item())
                for q in term.weights_Q.nonzero()[:, 0].tolist()
            }
            assert found == {place: (target, pytest.approx(weight)) for place, (target, weight) in rows.items()}
            if len({target for target, _ in rows.values()}) > 2:
                shifts.add((name, term.shifts))
    same_place = {"mdlm": "dllm", "bd3lm": "dllm", "hybrid": "dllm"}.get(inspect.args.dllm_mode)
    assert shifts == {(name, (0,) if name == same_place else (1,)) for name in expected}


# --- the picture ---------------------------------------------------------------------------------------------------


def text_picture(lines: list[str]) -> list[str]:
    """The cells of the picture in a sample's text, a string a query."""
    start = next(i for i, line in enumerate(lines) if line.startswith("who sees whom"))
    rows = [re.sub("[║│┊]", "", line).rsplit(None, 1)[0] for line in lines[start + 3 :] if line and line[0] != " "]
    return [row.split()[-1] for row in rows]


def page_pictures(content: str) -> list[list[tuple[str, list[tuple[int, int]]]]]:
    """Of each picture on a page: (title, runs of seen keys) of its queries."""
    name = "{http://www.w3.org/2000/svg}"
    pictures = []
    for drawing in re.findall(r"<svg.*?</svg>", content, re.S):
        root = ElementTree.fromstring(drawing)
        queries = []
        for query in root.iter(f"{name}g"):
            runs = [(int(r.get("x")) - 150, int(r.get("width"))) for r in query.iter(f"{name}rect")]
            queries.append((query.find(f"{name}title").text, [(x // 9, (x + w) // 9) for x, w in runs]))
        pictures.append(queries)
    return pictures


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_pictures_are_the_rule_element_by_element(inspector, data, command, kind):
    inspect = inspector([*COMMANDS[command], *data[kind], *WITHOUT_MODE])
    visible = get_mode(inspect.args.dllm_mode).visible
    for index, places in ((2, range(24, 40)), (9, range(0, 8))):
        seen = inspect(index)
        places = seen.clip(places.start, places.stop)
        rows = [stream * len(seen) + place for stream in range(len(seen.streams)) for place in places]
        rows_N, keys_N, allowed_NN, sees_N = seen.picture(places)
        assert rows_N.tolist() == keys_N.tolist() == rows
        a = seen.attributes_QA
        expected = [[visible(a[q], a[k]).item() for k in rows] for q in rows]
        assert allowed_NN.tolist() == expected
        assert sees_N.tolist() == [sum(visible(a[q], key).item() for key in a) for q in rows]
        shown = text_picture(text.render(inspect, seen, places, text.plain).splitlines())
        assert shown == ["".join("█" if cell else "·" for cell in row) for row in expected]
        (queries,) = page_pictures(page.render(inspect, [seen], places))
        for (title, runs), q, row in zip(queries, rows, expected, strict=True):
            assert [cell for cell in range(len(rows)) if any(x <= cell < y for x, y in runs)] == [
                cell for cell, allowed in enumerate(row) if allowed
            ]
            assert title.startswith(f"{seen.streams[q // len(seen)]} {q % len(seen)} ")


# --- text and page -------------------------------------------------------------------------------------------------


def shown_token(id: int) -> str:
    """The byte tokenizer's tokens."""
    names = {256: "<pad>", 257: "<eos>", 258: "<mask>", 9: "⇥", 10: "⏎", 13: "\\r", 32: "·"}
    return names.get(id) or (chr(id) if 32 < id < 127 else f"\\x{id:02x}")


def cells_by_hand(seen, place: int) -> dict[tuple[str, str], str]:
    """{(stream, column): cell} of one place, empty cells left out."""
    c, S = seen.corrupted, len(seen)
    name = lambda id: shown_token(id.item())
    attributes = seen.attributes_QA[place].tolist()
    cells = {
        ("", "place"): str(place),
        ("", "doc"): str(attributes[DOCUMENT]) if attributes[DOCUMENT] >= 0 else "-",
        ("", "pos"): str(attributes[POSITION]),
        ("", "data"): name(seen.data_S[place]),
    }
    inside = place < len(c.sample)
    if c.block_S is not None:
        cells["", "block"] = str(attributes[BLOCK])
        cells["", "in it"] = str(c.offset_S[place].item()) if inside else ""
    cells["", "sup"] = "S" if inside and c.sample.loss_mask_S[place] else ""
    for k, stream in enumerate(seen.streams):
        q = k * S + place
        cells[stream, "sees"] = name(seen.tokens_Q[q])
        for term_name, term in seen.terms.items():
            if term.weights_Q[q]:
                cells[stream, term_name] = name(term.targets_Q[q])
                cells[stream, "weight"] = f"{term.weights_Q[q].item():.4g}"
    return {key: cell for key, cell in cells.items() if cell}


def page_tables(content: str) -> list[list[dict[tuple[str, str], str]]]:
    tables = []
    for source in re.findall(r"<table>.*?</table>", content, re.S):
        groups, names, *rows = ElementTree.fromstring(source)
        heads = [(g.text or "", int(g.get("colspan"))) for g in groups]
        keys = [(group, cell.text) for group, cell in zip((g for g, n in heads for _ in range(n)), names, strict=True)]
        tables.append([{k: cell.text for k, cell in zip(keys, row, strict=True) if cell.text} for row in rows])
    return tables


@pytest.mark.parametrize(("command", "kind"), CASES)
def test_tables_hold_the_facts(inspector, data, command, kind):
    inspect = inspector([*COMMANDS[command], *data[kind], *WITHOUT_MODE])
    found, places = [inspect(index) for index in (2, 3)], range(3, 60)
    content = page.render(inspect, found, places)
    for seen, rows in zip(found, page_tables(content), strict=True):
        shown = seen.clip(places.start, places.stop)
        expected = [cells_by_hand(seen, place) for place in shown]
        ignored = {(stream, "level") for stream in seen.streams} | {(stream, "input") for stream in seen.streams}
        assert [{k: v for k, v in row.items() if k not in ignored} for row in rows] == expected
        lines = text.render(inspect, seen, places, text.plain).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"places {shown.start} to"))
        body = [line for line in lines[start + 3 : lines.index("", start)] if line[0] not in "─┄"]
        for line, row in zip(body, rows, strict=True):
            by_group = [("".join(v for (g, _), v in row.items() if g == group)) for group in ("", *seen.streams)]
            assert line.replace(" ", "") == "│".join(by_group).rstrip(" ")
        for label, said in table.summary(inspect, seen):
            assert f"<dt>{label}</dt><dd>{said}</dd>" in content
            assert any(line.startswith(label) and line.endswith(said) for line in lines)


def test_summary_in_words(inspector, data):
    """Numbers that can be checked by eye: two chat samples of one micro-batch."""
    inspect = inspector([*"--dllm-mode hybrid --dllm-block-size 8".split(), *data["chat"], *WITHOUT_MODE])
    seen = inspect(2)
    c = seen.corrupted
    said = dict(table.summary(inspect, seen))
    assert table.title(inspect, seen) == "training sample 2"
    assert said["sample"] == "34 tokens, 1 document, 5 blocks of up to 8, 30 places of padding"
    assert said["input"] == "x_t | x_0, 64 places each; padded as in the micro-batch of samples 2 to 3"
    level, rows = c.level_S[0].item(), int(c.noised_S.sum())
    assert said["noise"] == f"{rows} of 5 supervised tokens, level {level:.4g}"
    assert said["term dllm"] == (
        f"scores {rows} rows of x_t for the token in its place; weight {1 / level:.4g}, sum {rows / level:.4g}; counts "
        f"{rows} (its micro-batch {seen.terms['dllm'].batch_count:.0f})"
    )
    assert said["term ar"].startswith("scores 5 rows of x_0 for the next token; weight 1, sum 5; counts 5 ")


def test_the_sample_as_text(inspector, data):
    inspect = inspector([*"--dllm-mode bd3lm --dllm-block-size 8".split(), *data["chat"], *WITHOUT_MODE])
    seen = inspect(2)
    shown = text.render(inspect, seen, range(8), text.plain)
    answer = ""
    for place in range(29, 34):
        token = shown_token(seen.data_S[place].item())
        answer += "│" * (place == 32) + (f"⟦{token}⟧" if seen.changed_Q[place] else token)
    assert "⟦" in answer and answer.replace("⟧⟦", "") in shown
    assert "document 0, not supervised, places 0 to 28\n    User:⏎\n    Wh│y?·Why?·│⏎\n" in shown
    assert "padding, places 34 to 63\n    <pad>×30\n" in shown
    assert shown.count("the data, unchanged") == 1  # x_0
    bold = text.render(inspect, seen, range(8), text.coloured)
    assert bold != shown and re.sub(r"\033\[[\d;]*m", "", bold) == shown


@pytest.mark.parametrize(
    ("flags", "sees"),
    [("--dllm-mask-token-id 5", "<mask:5>"), ("--vocab-size 300 --dllm-mask-token-id 299", "<mask:299>")],
)
def test_a_mask_token_without_a_name(inspector, data, flags, sees):
    inspect = inspector([*COMMANDS["mdlm"], *data["text"], *WITHOUT_MODE, *flags.split()])
    seen = inspect(2)
    (rows,) = page_tables(page.render(inspect, [seen], range(64)))
    noised = seen.corrupted.noised_S.tolist()
    assert any(noised) and noised == [row["x_t", "sees"] == sees for row in rows]


# --- a mode that nobody has heard of -------------------------------------------------------------------------------


@pytest.fixture
def random_tokens(monkeypatch):
    """A mode whose noise is other tokens, without a mask token; all supervised rows are scored."""
    mode = ModuleType("random_tokens")
    vars(mode).update({name: value for name, value in vars(mdlm).items() if not name.startswith("__")})
    mode.NEEDS_MASK_TOKEN = False

    def corrupt(sample, draws, args):
        masked = mdlm.corrupt(sample, draws, argparse.Namespace(**(vars(args) | dict(dllm_mask_token_id=-1))))
        x_t_S = torch.where(masked.noised_S, torch.full_like(sample.tokens_S, ord("e")), sample.tokens_S)
        return Corrupted(sample, x_t_S, masked.noised_S, sample.loss_mask_S.float(), masked.level_S)

    def layout(samples, length, args):
        batch = mdlm.layout(samples, length, args)
        term = batch.terms["dllm"]
        batch.terms["swap"] = Term(term.targets_BQ, term.weights_BQ, term.count, inputs_BQ=batch.tokens_BQ)
        del batch.terms["dllm"]
        return batch

    mode.corrupt, mode.layout, mode.add_args = corrupt, layout, lambda group: None
    monkeypatch.setitem(MODES, "random", mode)


def test_tokens_that_came_as_noise(random_tokens, inspector, data):
    inspect = inspector([*"--dllm-mode random --seed 3".split(), *data["text"], *WITHOUT_MODE])
    seen = inspect(1)
    noised = seen.corrupted.noised_S
    assert noised.any() and not noised.all()
    # a drawn token that was there already is noised all the same
    assert (noised & (seen.data_S == ord("e"))).any()
    assert torch.equal(seen.changed_Q, noised)
    (columns,) = page_tables(page.render(inspect, [seen], range(64)))
    for place, row in enumerate(columns):
        clean = shown_token(seen.data_S[place].item())
        gets = "e" if noised[place] else clean
        assert row["x_t", "sees"] == row["x_t", "input"] == gets and row["x_t", "swap"] == clean
    (segment, *_) = table.segments(inspect, seen, 0)
    for (before, mark), (gets, came) in itertools.pairwise(segment.spans):
        if mark == "noised":
            assert (gets, came) == ("e", "gets") and len(before) == 1 or before.startswith("<")
    first = noised.nonzero()[0, 0].item()
    assert f"⟦{shown_token(seen.data_S[first].item())}→e⟧" in text.render(inspect, seen, range(4), text.plain)


# --- the command line ----------------------------------------------------------------------------------------------


def test_a_training_command_of_a_cluster_is_understood(inspector, trained, data):
    """Layout, kernels, files and services of elsewhere do not matter, but lengths and batches are those of training."""
    command = [*COMMANDS["bd3lm"], *data["chat"], *WITHOUT_MODE]
    layout = (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    elsewhere = "--save /no/such --save-interval 1 --load /no/such --transformer-impl transformer_engine --bf16"
    inspect = inspector([*command, *layout.split(), *elsewhere.split(), "--dllm-attention-backend", "flex"])
    args, datasets = trained([*command, *layout.split()], processes=8)
    assert args.dllm_length_multiple == 4
    for index in range(4):
        _, batch, b = by_hand(args, datasets, index, 2)
        seen, S = inspect(index), batch.tokens_BQ.shape[1] // batch.streams
        assert len(seen) == -(-S // 4) * 4
        assert torch.equal(seen.tokens_Q[:S], batch.tokens_BQ[b, :S])
    without = list(WITHOUT_MODE)
    for flag in ("--model-preset", "--lr", "--train-iters", "--micro-batch-size", "--global-batch-size"):
        place = without.index(flag)
        del without[place : place + 2]
    # nothing but mode, data, tokenizer and length: each sample by itself, with the same noise
    alone = inspector([*COMMANDS["bd3lm"], *data["chat"], *without])(2)
    assert list(alone.batch) == [2] and len(alone) == len(alone.corrupted.sample)
    assert torch.equal(alone.corrupted.x_t_S, inspect(2).corrupted.x_t_S)


def test_a_step_is_that_of_all_processes(inspector, data, monkeypatch):
    command = [*COMMANDS["schedule"], *data["chat"], *WITHOUT_MODE]
    place = command.index("--global-batch-size")
    del command[place : place + 2]
    assert inspector(command).args.global_batch_size == 2
    monkeypatch.setenv("WORLD_SIZE", "8")
    inspect = inspector([*command, "--tensor-model-parallel-size", "2"])
    assert inspect.args.global_batch_size == 8
    assert inspect(7).corrupted.offset_S.max() == 0 and inspect(8).corrupted.offset_S.max() == 3


class Recorder(argparse.Namespace):
    """Arguments that remember what was asked of them."""

    asked: set[str] = set()

    def __getattribute__(self, name):
        if not name.startswith("__"):
            Recorder.asked.add(name)
        return super().__getattribute__(name)


def test_all_that_the_data_path_reads_is_kept(trained, data):
    """A flag that decides how a sample looks, but is not known to `data_flags`, would be ignored silently."""
    Recorder.asked = set()
    for name, kind in CASES:
        args, _ = trained([*WITHOUT_MODE, *COMMANDS[name], *data[kind]])
        recorder = Recorder(**vars(args))
        mode, tokenizer = get_mode(args.dllm_mode), build_tokenizer(recorder)
        samples = CorruptedSamples(build_datasets(recorder, tokenizer).train, recorder, Split.train)
        mode.layout([samples[0], samples[1]], 64, recorder)
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = {action.dest for action in parser._actions}
    assert {"seed", "sft_data_path", "dllm_eps", "split", "tokenizer_type"} <= Recorder.asked
    assert Recorder.asked & flags <= data_flags(parser)


def test_validation_begins_anew(tool, inspector, trained, data):
    command = [*COMMANDS["hybrid"], *data["text"], *WITHOUT_MODE, "--validation", "--eval-micro-batch-size", "4"]
    inspect = inspector(command)
    args, datasets = trained([w for w in command if w != "--validation"])
    for index in (1, 9):
        seen = inspect(index)
        c, batch, b = by_hand(args, datasets, index % 8, 4, validation=True)
        assert torch.equal(seen.tokens_Q, batch.tokens_BQ[b]) and seen.corrupted.sample.index == 1
        assert len(seen.batch) == 4 and index in seen.batch
    assert table.title(inspect, seen) == "validation sample 9 (which is sample 1 again)"


def test_padding_that_is_part_of_the_answer(inspector, data):
    command = [*COMMANDS["mdlm"], *data["chat"], *WITHOUT_MODE, "--dllm-padding", "supervise"]
    inspect = inspector(command)
    said = dict(table.summary(inspect, inspect(2)))
    assert said["sample"] == "64 tokens (34 of the data, then supervised padding), 1 document"


def test_a_cut_conversation_is_noted(tool, data):
    code, out, _ = tool([*COMMANDS["mdlm"], *data["chat"], *WITHOUT_MODE, "--samples", "4"])
    assert code == 0 and len(re.findall("^== ", out, re.M)) == 4
    (note,) = [line for line in out.splitlines() if line.startswith("note: ")]
    assert "chat.jsonl, line" in note and "is cut to --seq-length 64" in note


def test_what_data_holds_is_not_markup_and_not_an_escape(tool, tmp_path):
    chat = tmp_path / "chat.jsonl"
    chat.write_text(
        '{"messages": [{"role": "user", "content": "<script>alert(1)</script> & \\"\\u001b[31m日本\\u200b"},'
        ' {"role": "assistant", "content": "</svg></table><b> &amp;"}]}\n'
    )
    command = ["--dllm-mode", "bd3lm", "--sft-data-path", chat, *WITHOUT_MODE, "--seq-length", "128"]
    command += "--samples 1 --dllm-block-size 100 --micro-batch-size 1 --tokens 200".split()
    code, out, _ = tool(command)
    assert code == 0 and "\033" not in out and "\\x1b[31m" in out and "日本\\u200b" in out
    page_file = tmp_path / "page.html"
    assert tool([*command, "--html", page_file])[0] == 0
    content = page_file.read_text()
    assert "<script" not in content and "\033" not in content and "http" not in content.replace("http://www.w3.org", "")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;·&amp;·" in content.replace("</span>", "").replace(
        "<span>", ""
    ).replace('<i class="block"></i>', "")
    assert len(page_tables(content)) == len(page_pictures(content)) == 1


BAD = {
    "--samples 0": "--samples 0 is too small: it must be at least 1",
    "--first -1": "--first -1 is too small",
    "--tokens 0": "--tokens 0 is too small",
    "--first-token -5": "--first-token -5 is too small",
    "--validation": "there is no validation data",
    "--sft-data-path /no/such.jsonl": "/no/such.jsonl does not exist",
    "--dllm-mode nosuch": "unknown --dllm-mode 'nosuch'",
    "--dllm-mask-token-id 257": "is also the eos token",
    "--dllm-corruption blockwise": "--dllm-corruption belongs to --dllm-mode hybrid, not mdlm",
    "--context-parallel-size 4 --seq-length 60": "must be a multiple of 8",
    "--window-size 8,0": "--window-size cannot be used",
    "--micro-batch-size 0": "--micro-batch-size 0 is too small",
    "--html /no/such/page.html": "--html /no/such/page.html is not a file in a folder that can be written to",
    "--html /": "--html / is not a file",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_sentence(tool, data, tmp_path, flags):
    page_file = ["--html", tmp_path / "page.html"] if "--html" not in flags else []
    code, out, err = tool([*COMMANDS["mdlm"], *data["chat"], *WITHOUT_MODE, *page_file, *flags.split()])
    assert code == 2 and out == "" and list(tmp_path.iterdir()) == []
    (sentence,) = [line for line in err.splitlines() if line]
    assert sentence.startswith("inspect_batch.py: error: ") and BAD[flags] in sentence


def test_a_page_is_whole_or_not_there(tool, data, tmp_path, monkeypatch):
    page_file = tmp_path / "page.html"
    page_file.write_text("old")
    command = [*COMMANDS["mdlm"], *data["chat"], *WITHOUT_MODE, "--html", page_file]

    def broken(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        code, _, err = tool(command)
    assert code == 2 and "disk full" in err
    assert page_file.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    assert tool(command)[0] == 0
    assert page_file.read_text().startswith("<!DOCTYPE html>") and len(list(tmp_path.iterdir())) == 1


def test_colours_on_a_terminal_only(tool, data, monkeypatch):
    command = [*COMMANDS["mdlm"], *data["chat"], *WITHOUT_MODE, "--samples", "1"]
    plain = tool(command)[1]
    assert "\033" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[" in tool(command)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert tool(command)[1] == plain


def test_other_ranks_say_nothing(tool, data, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert tool([*COMMANDS["mdlm"], *data["chat"], *WITHOUT_MODE]) == (0, "", "")


def test_as_a_user_runs_it(data):
    """In ASCII, for a reader that stops after some lines, with nothing but what is needed."""
    words = f"--dllm-mode mdlm {' '.join(data['chat'])} --tokenizer-type ByteLevelTokenizer --seq-length 64".split()
    done = subprocess.run(
        ["bash", "-c", '"$0" tools/inspect_batch.py "$@" | head -n 4; exit "${PIPESTATUS[0]}"', sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout.isascii() and len(done.stdout.splitlines()) == 4
