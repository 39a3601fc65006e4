"""Tokenizers: round trips, special ids, and the errors of `build_tokenizer`."""

import pickle
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dllm.data.tokenizer import SENTENCEPIECE, build_tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples")]

import python_docs_corpus  # noqa: E402
import train_tokenizer  # noqa: E402

TRICKY = [
    "hello world",
    "  two in front",
    "behind  \n",
    "a  b\n\n\tc\r\n",
    "日本 é 😀",
    "</s><mask>",
    " ",
    "\n",
    "",
]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    python_docs_corpus.write(folder / "docs.jsonl")
    arguments = ["--input", str(folder / "docs.jsonl"), "--vocab-size", "600"]
    assert train_tokenizer.main([*arguments, "--output-prefix", str(folder / "new" / "tok")]) == 0
    assert [path.name for path in (folder / "new").iterdir()] == ["tok.model"]
    return str(folder / "new" / "tok.model")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("hf") / "tok")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|mask|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world, hello worlds"] * 4, trainer)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|end|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template="{{ messages }}",
    )
    hf.add_tokens(["<added>"])
    hf.save_pretrained(folder)
    return folder


def build(kind, model=None, **more):
    return build_tokenizer(Namespace(tokenizer_type=kind, tokenizer_model=model, **more))


@given(st.text())
def test_bytes_lose_nothing(text):
    tokenizer = build("ByteLevelTokenizer")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_level_agrees_with_megatrons_class():
    from megatron.core.tokenizers.text.libraries import ByteLevelTokenizer

    ours = build("ByteLevelTokenizer")
    theirs = ByteLevelTokenizer(special_tokens=["<mask>", "<eos>", "<pad>"], vocab_size=256, _eos_id=257, _pad_id=256)
    assert ours.vocab_size == theirs.vocab_size == 259
    assert (ours.eos_id, ours.pad_id, ours.mask_id) == (
        theirs.eos_id,
        theirs.pad_id,
        theirs.token_to_id("<mask>"),
    )
    assert (ours.pad_id, ours.eos_id, ours.mask_id, ours.bos_id) == (256, 257, 258, None)
    assert ours.encode("é\n") == theirs.text_to_ids("é\n")


def test_byte_level_special_tokens():
    tokenizer = build("ByteLevelTokenizer")
    ids = [*b"ab", 258, 257, *b"c", 256]
    assert tokenizer.decode(ids) == "abc"
    assert tokenizer.decode(ids, show_special=True) == "ab<mask><eos>c<pad>"
    assert tokenizer.special_text(257) == "<eos>"
    assert tokenizer.decode([0xE6, 0x97]) == "\N{REPLACEMENT CHARACTER}"  # half a character is shown
    with pytest.raises(ValueError, match="not a special token"):
        tokenizer.special_text(65)
    with pytest.raises(ValueError, match="id 259"):
        tokenizer.decode([259])


@pytest.mark.parametrize("text", TRICKY)
def test_trained_sentencepiece_gives_text_back(sentencepiece_model, text):
    tokenizer = build("SentencePieceTokenizer", sentencepiece_model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_trained_sentencepiece_keeps_the_whole_corpus(sentencepiece_model):
    tokenizer = build("SentencePieceTokenizer", sentencepiece_model)
    for text in python_docs_corpus.topics.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {tokenizer.pad_id, tokenizer.eos_id, tokenizer.mask_id, 2}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_special_tokens(sentencepiece_model, kind, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ x }}")
    tokenizer = build(kind, sentencepiece_model, chat_template=str(tmp_path / "chat.jinja"))
    assert tokenizer.vocab_size == 600
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.mask_id, tokenizer.bos_id) == (0, 1, 3, None)
    assert tokenizer.chat_template == "{{ x }}" and tokenizer.hf is None
    ids = [*tokenizer.encode("a b"), 3, 1, *tokenizer.encode(" c")]
    assert tokenizer.decode(ids) == "a b c"
    assert tokenizer.decode(ids, show_special=True) == "a b<mask></s> c"
    assert tokenizer.special_text(1) == "</s>"


def test_sentencepiece_of_the_llama_kind(tmp_path):
    """A space is added in front, bos is there, pad is not, and the mask was a user-defined piece."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "some more words"] * 20),
        model_prefix=str(tmp_path / "tok"),
        vocab_size=40,
        user_defined_symbols=["[MASK]"],
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = build("Llama2Tokenizer", str(tmp_path / "tok.model"))
    assert tokenizer.pad_id is None and tokenizer.bos_id == 1
    assert tokenizer.special_text(tokenizer.mask_id) == "[MASK]"
    for text in ("hello world", " hello", "hello "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = [*tokenizer.encode("hello"), tokenizer.mask_id, *tokenizer.encode("world")]
    assert tokenizer.decode(ids, show_special=True) == "hello[MASK]world"
    assert "[MASK]" not in tokenizer.decode(ids)


def test_small_sentencepiece_covers_every_character_of_its_input(tmp_path):
    text = "a small corpus, with é and 日本\n" * 30
    (tmp_path / "c.txt").write_text(text)
    arguments = [
        "--input",
        str(tmp_path / "c.txt"),
        "--vocab-size",
        "26",
        "--output-prefix",
        str(tmp_path / "t"),
    ]
    assert train_tokenizer.main(arguments) == 0
    tokenizer = build("SentencePieceTokenizer", str(tmp_path / "t.model"))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_hugging_face(hf_folder):
    tokenizer = build("HuggingFaceTokenizer", hf_folder)
    assert tokenizer.vocab_size == len(tokenizer.hf) == max(tokenizer.hf.get_vocab().values()) + 1
    assert (tokenizer.eos_id, tokenizer.mask_id, tokenizer.pad_id, tokenizer.bos_id) == (0, 1, None, None)
    assert tokenizer.chat_template == "{{ messages }}"
    for text in TRICKY[:5] + TRICKY[6:]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("<|im_start|> hello<|end|>")
    assert ids[0] == 2 and ids[-1] == 0
    assert tokenizer.decode(ids) == " hello"
    assert tokenizer.decode(ids, show_special=True) == "<|im_start|> hello<|end|>"
    assert tokenizer.special_text(0) == "<|end|>"
    with pytest.raises(ValueError, match="outside|Cannot decode"):
        tokenizer.decode([tokenizer.vocab_size])


def test_hugging_face_template_of_the_user_wins(hf_folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ mine }}")
    tokenizer = build("HuggingFaceTokenizer", hf_folder, chat_template=str(tmp_path / "chat.jinja"))
    assert tokenizer.chat_template == tokenizer.hf.chat_template == "{{ mine }}"


@pytest.mark.parametrize("text", [*TRICKY, "a helloé 日 worlds"])
def test_pieces_are_what_each_token_adds(sentencepiece_model, hf_folder, text):
    for tokenizer in (
        build("ByteLevelTokenizer"),
        build("SentencePieceTokenizer", sentencepiece_model),
        build("HuggingFaceTokenizer", hf_folder),
    ):
        ids = tokenizer.encode(text)
        pieces = [tokenizer.piece(i) for i in ids]
        joined = "".join(pieces).encode("utf-8", "surrogateescape").decode("utf-8")
        assert joined.removeprefix(" " * (joined != text)) == tokenizer.decode(ids, show_special=True)
        assert len(ids) < 2 or "" not in pieces


def test_pieces_of_special_tokens(sentencepiece_model, hf_folder):
    tokenizer = build("SentencePieceTokenizer", sentencepiece_model)
    assert tokenizer.piece(tokenizer.mask_id) == "<mask>" and tokenizer.is_special(tokenizer.mask_id)
    tokenizer = build("HuggingFaceTokenizer", hf_folder)
    assert tokenizer.piece(0) == "<|end|>" and tokenizer.is_special(0) and not tokenizer.is_special(40)
    assert build("NullTokenizer", vocab_size=9).piece(7) == "7 "
    with pytest.raises(ValueError, match="Cannot decode id 259"):
        build("ByteLevelTokenizer").piece(259)


def test_null_tokenizer():
    tokenizer = build("NullTokenizer", vocab_size=100)
    assert tokenizer.vocab_size == 100
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (99, None, None)
    assert tokenizer.encode(" 1 2\n3 ") == [1, 2, 3]
    assert tokenizer.decode([1, 2, 99]) == "1 2"
    assert tokenizer.decode([1, 2, 99], show_special=True) == "1 2 99"
    other = build("NullTokenizer", vocab_size=100, null_tokenizer_eod_id=5, null_tokenizer_pad_id=6)
    assert (other.eos_id, other.pad_id) == (5, 6)
    with pytest.raises(ValueError, match="outside --vocab-size 100"):
        tokenizer.encode("100")
    with pytest.raises(ValueError, match="decimal ids"):
        tokenizer.encode("one")


def test_all_can_be_pickled(sentencepiece_model, hf_folder):
    for tokenizer in (
        build("SentencePieceTokenizer", sentencepiece_model),
        build("HuggingFaceTokenizer", hf_folder),
        build("ByteLevelTokenizer"),
        build("NullTokenizer", vocab_size=500),
    ):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode("12 34") == tokenizer.encode("12 34")
        assert copy.decode(copy.encode("12 34")) == "12 34"
        assert copy.eos_id == tokenizer.eos_id


def test_errors_are_one_sentence(tmp_path):
    (tmp_path / "not.model").write_text("hello")
    (tmp_path / "empty").mkdir()
    cases = [
        (dict(tokenizer_type="TikTokenizer"), "choose one of"),
        (dict(), "choose one of"),
        (dict(tokenizer_type="SentencePieceTokenizer"), "needs --tokenizer-model"),
        (dict(tokenizer_type="SentencePieceTokenizer", tokenizer_model="/no/such.model"), "/no/such.model"),
        (
            dict(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "not.model")),
            "not.model",
        ),
        (dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/no/folder"), "/no/folder"),
        (dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "empty")), "cannot load"),
        (dict(tokenizer_type="NullTokenizer"), "give --vocab-size"),
        (
            dict(tokenizer_type="ByteLevelTokenizer", chat_template="{{ no file }}"),
            "--chat-template takes the path",
        ),
        (dict(tokenizer_type="ByteLevelTokenizer", special_tokens=["<x>"]), "not supported"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            build_tokenizer(Namespace(**arguments))
        assert "\n" not in str(caught.value)
