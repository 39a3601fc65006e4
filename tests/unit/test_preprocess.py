"""From files to `.bin/.idx` and back: every document, in order, or one clear error and nothing written."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from megatron_dllm.data.order import permutation
from megatron_dllm.data.text import PackedText, open_corpus
from megatron_dllm.data.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples")]

import preprocess_data  # noqa: E402
import python_docs_corpus  # noqa: E402

BYTES = build_tokenizer(Namespace(tokenizer_type="ByteLevelTokenizer"))


def preprocess(inputs, output, *more, tokenizer="ByteLevelTokenizer"):
    inputs = [str(path) for path in inputs]
    argv = ["--input", *inputs, "--output-prefix", str(output), "--tokenizer-type", tokenizer, *more]
    return preprocess_data.main(argv)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(prefix):
    corpus = open_corpus(str(prefix))
    return [corpus[d].tolist() for d in range(len(corpus))]


def texts(prefix):
    return [BYTES.decode(ids) for ids in documents(prefix)]


def test_round_trip_through_packed_text(tmp_path, capsys):
    """Real text, through the files, gives back every document exactly once an epoch."""
    count = 1 + python_docs_corpus.write(tmp_path / "docs.jsonl")
    originals = [json.loads(line)["text"] for line in (tmp_path / "docs.jsonl").open(encoding="utf-8")]
    tokens = sum(len(text.encode()) + 1 for text in originals)
    originals.append("x" * (127 - tokens % 128))  # with its eod the last sequence is full, nothing is dropped
    write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in originals])
    tokens += len(originals[-1]) + 1

    assert preprocess([tmp_path / "docs.jsonl"], tmp_path / "new" / "docs", "--append-eod") == 0
    out = capsys.readouterr().out
    prefix = tmp_path / "new" / "docs_text_document"
    assert f"{count} documents, {tokens} tokens" in out and str(prefix) in out
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        f"{prefix.name}.bin",
        f"{prefix.name}.idx",
    ]
    assert open_corpus(str(prefix)).index.dtype == np.uint16
    assert texts(prefix) == originals
    assert all(ids[-1] == BYTES.eos_id for ids in documents(prefix))

    text = PackedText(str(prefix), seq_length=128, seed=0)
    for epoch in range(2):
        stream = [None] * len(text)
        for i, place in enumerate(permutation(0, epoch, len(text), "sequences")):  # undo the shuffle
            stream[place] = text.sample(epoch * len(text) + i).tokens_S
        found = BYTES.decode(torch.cat(stream), show_special=True).split("<eos>")[:-1]
        assert found != originals and sorted(found) == sorted(originals)


def test_workers_keep_the_order(tmp_path):
    records = [{"text": f"{i} " * (i % 7)} for i in range(500)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    assert preprocess([path], tmp_path / "one") == 0
    assert preprocess([path], tmp_path / "two", "--workers", "2") == 0
    one, two = (tmp_path / f"{name}_text_document" for name in ("one", "two"))
    assert documents(one) == documents(two)
    assert texts(one) == [record["text"] for record in records if record["text"]]
    for suffix in (".bin", ".idx"):
        assert Path(f"{one}{suffix}").read_bytes() == Path(f"{two}{suffix}").read_bytes()


def test_several_files_and_keys(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": "1", "title": "x"}, {"text": "2", "title": ""}])
    table = pyarrow.table({"title": ["z"], "text": ["3"], "other": [4]})
    parquet.write_table(table, tmp_path / "b.parquet")
    assert preprocess([a, tmp_path / "b.parquet"], tmp_path / "out", "--json-keys", "text", "title") == 0
    assert texts(tmp_path / "out_text_document") == ["1", "2", "3"]
    assert texts(tmp_path / "out_title_document") == ["x", "z"]


def test_plain_text(tmp_path):
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("a\nb\n\n\nc\n", newline="")
    two.write_text("\n  \nd\r\n\r\ne", newline="")
    assert preprocess([one, two], tmp_path / "file") == 0
    assert texts(tmp_path / "file_text_document") == ["a\nb\n\n\nc\n", "\n  \nd\r\n\r\ne"]
    assert preprocess([one, two], tmp_path / "block", "--txt-documents", "block") == 0
    assert texts(tmp_path / "block_text_document") == ["a\nb", "c", "d", "e"]


def test_line_separators_inside_json_do_not_end_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\n\n{"text": "d"}\r\n', encoding="utf-8", newline="")
    assert preprocess([path], tmp_path / "out") == 0
    assert texts(tmp_path / "out_text_document") == ["a\u2028b\x85c", "d"]


def test_large_vocabulary_and_null_tokenizer(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "1 70000 3"}])
    flags = ["--vocab-size", "80000", "--append-eod"]
    assert preprocess([path], tmp_path / "out", *flags, tokenizer="NullTokenizer") == 0
    assert documents(tmp_path / "out_text_document") == [[1, 70000, 3, 79999]]
    assert open_corpus(str(tmp_path / "out_text_document")).index.dtype == np.int32


GOOD = '{"text": "fine"}\n'


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", GOOD * 99 + '{"text": \n', "a.jsonl:100: not valid JSON"),
        ("a.jsonl", GOOD + "\n[1]\n", "a.jsonl:3: a JSON object is needed"),
        ("a.jsonl", GOOD + '{"body": "x"}\n', "a.jsonl:2: key 'text' must hold a string, there is nothing"),
        ("a.jsonl", GOOD + '{"text": 5}\n', "a.jsonl:2: key 'text' must hold a string, there is int"),
        ("a.jsonl", GOOD + '{"text": "\\ud800"}\n', "a.jsonl:2: cannot be tokenized"),
        ("a.jsonl", GOOD + '{"text": ' + "[" * 100_000, "a.jsonl:2: not valid JSON"),
        ("a.jsonl", GOOD + '{"text": ' + "1" * 5000 + "}", "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl is not UTF-8"),
        ("a.jsonl", '{"text": ""}\n', "holds no text"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.csv", "x", "kind of"),
        ("a.parquet", "no parquet", "a.parquet is not a parquet file"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, capsys, name, content, message, workers):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert preprocess([path], tmp_path / "new" / "out", "--workers", workers) == 1
    errors = [line for line in capsys.readouterr().err.split("\n") if line and "documents" not in line]
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]
    assert [found.name for found in tmp_path.iterdir()] == [name]


def test_parquet_that_is_damaged_inside(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"{i} " * 20 for i in range(500)]}), path, use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[100:400] = b"\xff" * 300
    path.write_bytes(damaged)
    assert preprocess([path], tmp_path / "new" / "out") == 1
    error = capsys.readouterr().err
    assert "a.parquet is damaged behind row 0" in error and "Traceback" not in error
    assert [found.name for found in tmp_path.iterdir()] == ["a.parquet"]


def test_a_failure_leaves_the_old_corpus_alone(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "old"}])
    assert preprocess([good], tmp_path / "out") == 0
    (tmp_path / "bad.jsonl").write_text(GOOD + "{")
    assert preprocess([good, tmp_path / "bad.jsonl"], tmp_path / "out") == 1
    assert texts(tmp_path / "out_text_document") == ["old"]
    newer = write_jsonl(tmp_path / "newer.jsonl", [{"text": "newer"}])
    assert preprocess([newer], tmp_path / "out") == 0
    assert texts(tmp_path / "out_text_document") == ["newer"]


def test_other_errors(tmp_path, capsys):
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "x"}])
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("x")
    cases = [
        ([tmp_path / "no.jsonl"], [], "no.jsonl does not exist"),
        ([tmp_path / "b.parquet"], [], "no 'text'"),
        ([tmp_path / "c.txt"], ["--json-keys", "a", "b"], "single --json-keys"),
        ([good], ["--workers", "0"], "--workers is 0"),
        ([good], ["--json-keys", "text", "text"], "names a key twice"),
        ([good], ["--output-prefix", str(good / "out")], "Cannot make the folder"),
    ]
    for inputs, flags, message in cases:
        assert preprocess(inputs, tmp_path / "out", *flags) == 1
        assert message in capsys.readouterr().err
    assert preprocess([good], tmp_path / "out", tokenizer="SentencePieceTokenizer") == 1
    assert "--tokenizer-model" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_the_command_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text(GOOD + "oops\n")
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", "bad.jsonl"]
    command += ["--output-prefix", "out", "--tokenizer-type", "ByteLevelTokenizer", "--workers", "2"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert "error: bad.jsonl:2: not valid JSON" in run.stderr and "Traceback" not in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
