"""Trains a SentencePiece tokenizer (unigram) that gives text back exactly as it was.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix data/tokenizer

writes data/tokenizer.model with <pad> 0, </s> 1, <unk> 2, <mask> 3 and no bos. Text is not normalised, no
space is added in front, runs of white space may be pieces, and new lines and tabs are pieces of their own.
Vocabularies of 512 and more spell unknown characters as bytes; smaller ones cover every character of the
input instead, and characters that it does not hold become <unk>.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from itertools import chain

from megatron_dllm.data.documents import check_inputs, output_folder, parse, read_documents

_SMALLEST = 7  # four special tokens, new line, tab, and something to spell text with
_SMALLEST_WITH_BYTES = 512  # 256 bytes leave room for as many other pieces


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, .txt or .parquet")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.model")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="fields or columns to learn from")
    parser.add_argument("--max-lines", type=int, default=5_000_000, help="learn from so many random lines")
    return parser.parse_args(argv)


def lines(args: argparse.Namespace) -> Iterator[str]:
    """Non-empty stretches of text without new lines and tabs, which are pieces already.

    SentencePiece would skip whatever holds a tab. Raises ValueError for a malformed document, naming it.
    """
    for origin, record in read_documents(args.input, args.json_keys):
        for text in parse(origin, record, args.json_keys):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{origin}: holds half a character ({error.reason}); remove it.") from error
            yield from filter(None, text.replace("\t", "\n").split("\n"))


def train(args: argparse.Namespace) -> str:
    """Trains and writes the model; its path. Leaves nothing behind if anything fails.

    Raises ValueError for malformed documents, input without text, and a vocabulary that does not fit the text.
    """
    import sentencepiece

    failures: list[Exception] = []

    def guarded(texts: Iterator[str]) -> Iterator[str]:
        try:
            yield from texts
        except Exception as error:  # SentencePiece makes a page of it
            failures.append(error)
            raise

    texts = lines(args)
    first = next(texts, None)
    if first is None:
        raise ValueError("The input holds no text; check --input and --json-keys.")
    path = f"{args.output_prefix}.model"
    bytes_as_pieces = args.vocab_size >= _SMALLEST_WITH_BYTES
    sentencepiece.set_random_generator_seed(0)  # which lines are sampled
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=guarded(chain([first], texts)),
                model_writer=file,
                model_type="unigram",
                vocab_size=args.vocab_size,
                pad_id=0,
                eos_id=1,
                unk_id=2,
                bos_id=-1,
                control_symbols=["<mask>"],  # control: no input text can spell it
                user_defined_symbols=["\n", "\t"],
                byte_fallback=bytes_as_pieces,
                character_coverage=0.9995 if bytes_as_pieces else 1.0,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                max_sentence_length=1 << 20,
                input_sentence_size=args.max_lines,
                shuffle_input_sentence=True,
                minloglevel=2,
            )
        os.replace(partial, path)
    except RuntimeError as error:
        raise failures[0] if failures else ValueError(_what_is_wrong(error, args.vocab_size)) from error
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return path


def _what_is_wrong(error: RuntimeError, vocab_size: int) -> str:
    """One sentence for SentencePiece's "INTERNAL: path(line) [condition] What is wrong. What to do."."""
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        return f"--vocab-size {vocab_size} is too small for the characters of this input; give at least {needed[1]}."
    if most := re.search(r"too high .* <= (\d+)", str(error)):
        fits = int(most[1])
        if fits < _SMALLEST_WITH_BYTES <= vocab_size:  # so small a one would be trained without them
            fits -= 256
        return f"--vocab-size {vocab_size} is too large for this input; give at most {fits}, or more text."
    reason = " ".join(str(error).split("] ")[-1].split()).rstrip(".") or "no reason given"
    return f"SentencePiece cannot train {vocab_size} pieces on this input ({reason}); change --vocab-size or the input."


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.vocab_size < _SMALLEST:
            raise ValueError(f"--vocab-size is {args.vocab_size}; give at least {_SMALLEST}.")
        if args.max_lines < 1:
            raise ValueError(f"--max-lines is {args.max_lines}; give at least 1.")
        check_inputs(args.input)
        with output_folder(args.output_prefix):
            print(train(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
