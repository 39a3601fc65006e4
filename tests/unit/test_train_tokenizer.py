"""Training a tokenizer: what is wrong with the input is one sentence, and nothing is left behind."""

import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import train_tokenizer

GOOD = '{"text": "fine and well"}\n'


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(path, flags) -> the sentence; checks that it is one and that no file or folder was made."""

    def run(path, *flags, vocab_size=20):
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        argv = ["--input", path, "--vocab-size", vocab_size, "--output-prefix", tmp_path / "new/deep/tok", *flags]
        assert train_tokenizer.main([str(word) for word in argv]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and sorted(tmp_path.rglob("*")) == before
        sentence = captured.err.removesuffix("\n")
        assert sentence.startswith("error: ") and sentence.endswith(".") and "\n" not in sentence
        assert "SentencePiece" not in sentence and len(sentence) < 300
        return sentence

    return run


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD * 99 + '{"text": \n', "a.jsonl:100: not valid JSON (Expecting value)"),
        (GOOD + '{"text": ' + "[" * 100_000, "a.jsonl:2: not valid JSON"),
        (GOOD + '{"text": ' + "1" * 5000 + "}", "a.jsonl:2: not valid JSON"),
        (GOOD + "\n[1]\n", "a.jsonl:3: a JSON object is needed"),
        (GOOD + '{"body": "x"}\n', "a.jsonl:2: key 'text' must hold a string, there is nothing"),
        (GOOD + '{"text": "\\ud800"}\n', "a.jsonl:2: holds half a character"),
        (GOOD.encode() + b"\xff\xfe", "a.jsonl is not UTF-8"),
        ('{"text": ""}\n{"text": "\\n\\t"}\n', "The input holds no text"),
        ("\n\n", "The input holds no text"),
        ("", "a.jsonl is empty"),
    ],
)
def test_broken_input(refused, tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(path)


def test_other_files(refused, tmp_path):
    assert "no.jsonl does not exist" in refused(tmp_path / "no.jsonl")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["fine", None]}), path)
    assert "a.parquet: row 2: key 'text' must hold a string" in refused(path)
    parquet.write_table(pyarrow.table({"body": ["fine"]}), path)
    assert "no 'text'" in refused(path)


def test_flags(refused, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 50)
    assert "--vocab-size is 0; give at least 7" in refused(path, vocab_size=0)
    assert "--max-lines is 0; give at least 1" in refused(path, "--max-lines", 0)
    assert "Cannot make the folder" in refused(path, "--output-prefix", path / "tok")
    small, large = refused(path, vocab_size=7), refused(path, vocab_size=5000)
    assert "--vocab-size 7 is too small for the characters of this input; give at least " in small
    assert "--vocab-size 5000 is too large for this input; give at most " in large
    least, most = (int(sentence.split(" at ")[1].split()[1].strip(".,")) for sentence in (small, large))
    for size in (least, most):  # the numbers named are the limits
        argv = ["--input", path, "--vocab-size", size, "--output-prefix", tmp_path / str(size)]
        assert train_tokenizer.main([str(word) for word in argv]) == 0
    assert f"give at least {least}." in refused(path, vocab_size=least - 1)
    assert f"give at most {most}," in refused(path, vocab_size=most + 1)


def test_a_failure_leaves_the_old_model_alone(tmp_path, capsys):
    path, model = tmp_path / "a.jsonl", tmp_path / "tok.model"
    path.write_text(GOOD * 50 + "{")
    model.write_bytes(b"old")
    assert train_tokenizer.main(["--input", str(path), "--vocab-size", "20", "--output-prefix", str(tmp_path / "tok")])
    assert model.read_bytes() == b"old" and sorted(tmp_path.iterdir()) == [path, model]
