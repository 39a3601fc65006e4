"""Trains a SentencePiece tokenizer (unigram) that gives text back exactly as it was.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix data/tokenizer

writes data/tokenizer.model with <pad> 0, </s> 1, <unk> 2, <mask> 3 and no bos. Text is not normalised, no
space is added in front, runs of white space may be pieces, and new lines and tabs are pieces of their own.
Vocabularies of 512 and more spell unknown characters as bytes; smaller ones cover every character of the
input instead, and characters that it does not hold become <unk>.
"""

import argparse
import os
import sys
from collections.abc import Iterator

from megatron_dllm.data.documents import check_inputs, parse, read_documents

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

    SentencePiece would skip whatever holds a tab.
    """
    for origin, record in read_documents(args.input, args.json_keys):
        for text in parse(origin, record, args.json_keys):
            yield from filter(None, text.replace("\t", "\n").split("\n"))


def train(args: argparse.Namespace) -> str:
    """Trains and writes the model; its path. Raises ValueError if the vocabulary does not fit the text."""
    import sentencepiece

    os.makedirs(os.path.dirname(args.output_prefix) or ".", exist_ok=True)
    path = f"{args.output_prefix}.model"
    bytes_as_pieces = args.vocab_size >= _SMALLEST_WITH_BYTES
    sentencepiece.set_random_generator_seed(0)  # which lines are sampled
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines(args),
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
    except RuntimeError as error:  # "INTERNAL: path(line) [condition] What is wrong. What to do."
        reason = str(error).split("] ")[-1].strip().rstrip(".")
        raise ValueError(
            f"SentencePiece cannot train {args.vocab_size} pieces on this input ({reason}); "
            "change --vocab-size or the input."
        ) from error
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return path


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        check_inputs(args.input)
        print(train(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
