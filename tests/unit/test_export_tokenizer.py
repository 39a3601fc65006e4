"""The tokenizer of an exported folder is the run's: it gives the ids that the model was trained on."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_dllm.conversion.defaults import misread_tokenizer
from megatron_dllm.conversion.exporting import _write_tokenizer
from megatron_dllm.data.tokenizer import HuggingFace, build_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = ["the quick brown fox", "  two  spaces ", "tab\tand\n\nlines\n", "fjords, quizzes; 42!"]
UNKNOWN = "\N{EURO SIGN} \N{GRINNING FACE}"  # spelled in bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = (ROOT / "docs/modes.md").read_text() + (ROOT / "docs/data.md").read_text()
    (folder / "text.txt").write_text(text.encode("ascii", "ignore").decode() * 3)
    tool = [sys.executable, "tools/train_tokenizer.py", "--vocab-size", "700", "--input", folder / "text.txt"]
    subprocess.run([*tool, "--output-prefix", folder / "tokenizer"], cwd=ROOT, check=True, capture_output=True)
    return str(folder / "tokenizer.model")


@pytest.mark.parametrize("kind", ("llama", "qwen2"))  # AutoTokenizer would read a qwen2 folder wrongly
def test_a_sentencepiece_model(model, tmp_path, kind):
    args = Namespace(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model, dllm_mask_token_id=3)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type=kind)))
    _write_tokenizer(args, str(tmp_path))
    ours, theirs = build_tokenizer(args), HuggingFace(str(tmp_path))
    assert misread_tokenizer(str(tmp_path)) in (None, "Qwen2Tokenizer" if kind == "qwen2" else None)
    assert theirs.vocab_size == ours.vocab_size
    assert (theirs.pad_id, theirs.eos_id, theirs.bos_id, theirs.mask_id) == (0, 1, None, 3)
    for text in [*TEXTS, UNKNOWN]:
        ids = theirs.encode(text)
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == text
    assert not (tmp_path / "tokenizer.model").exists()


def test_a_tokenizer_without_a_form_in_transformers_is_left_out(tmp_path):
    _write_tokenizer(Namespace(tokenizer_type="ByteLevelTokenizer", tokenizer_model=None), str(tmp_path))
    assert not list(tmp_path.iterdir())
