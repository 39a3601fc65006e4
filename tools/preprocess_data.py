"""Tokenizes text into Megatron's memory-mapped format.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; as in Megatron, `_{key}_document` is added to the prefix, and
`--data-path` is given the prefix with it. Input is JSONL or parquet (`--json-keys` names the fields, a corpus
each) or plain text (.txt; a document a file, or with `--txt-documents block` a document between blank lines).
The order of the documents is kept. Nothing appears under the final names unless all of the input is good.
"""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import batched

import numpy as np
from tqdm import tqdm

from megatron_dllm.data.documents import Record, check_inputs, output_folder, parse, read_documents
from megatron_dllm.data.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

_BATCH = 32  # documents that travel to a worker at once

# In a worker process, set once when it starts.
_worker_args: argparse.Namespace
_worker_tokenizer: Tokenizer


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".jsonl, .txt or .parquet")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX_{key}_document.bin and .idx")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="fields or columns to tokenize")
    parser.add_argument("--txt-documents", choices=["file", "block"], default="file")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the eos token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    group.add_argument("--tokenizer-model", help="SentencePiece .model file or Hugging Face folder")
    group.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    group.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args(argv)


def start_worker(args: argparse.Namespace) -> None:
    global _worker_args, _worker_tokenizer
    _worker_args, _worker_tokenizer = args, build_tokenizer(args)


def tokenize(documents: Iterable[tuple[str, Record]]) -> list[list[np.ndarray]]:
    """int32 ids of every key of every document."""
    keys, eod = _worker_args.json_keys, [_worker_tokenizer.eos_id] if _worker_args.append_eod else []
    done = []
    for origin, record in documents:
        ids = []
        for text in parse(origin, record, keys):
            try:
                own = _worker_tokenizer.encode(text)
            except (ValueError, UnicodeEncodeError) as error:  # half a surrogate pair cannot be UTF-8
                raise ValueError(f"{origin}: cannot be tokenized ({error}).") from error
            ids.append(np.array(own + eod if own else own, dtype=np.int32))
        done.append(ids)
    return done


def tokenized(args: argparse.Namespace, documents: Iterator[tuple[str, Record]]) -> Iterator[list[np.ndarray]]:
    """Ids of all documents in order; reads only a little ahead of what has been written."""
    if args.workers == 1:
        start_worker(args)
        for document in documents:
            yield from tokenize([document])
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    with ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=(args,)) as pool:
        pending = deque()
        try:
            for batch in batched(documents, _BATCH):
                pending.append(pool.submit(tokenize, batch))
                if len(pending) > 4 * args.workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError("A worker died, often for want of memory; try fewer --workers.") from error
        finally:
            pool.shutdown(cancel_futures=True)


def write(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[int, int]:
    """Writes a corpus for every key; (documents, tokens). Leaves nothing behind if anything fails."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    finals = [f"{args.output_prefix}_{key}_document" for key in args.json_keys]
    partials = [f"{final}.partial-{os.getpid()}" for final in finals]
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builders = []
    try:
        for partial in partials:
            builders.append(IndexedDatasetBuilder(f"{partial}.bin", dtype=dtype))
        documents = tokens = 0
        source = read_documents(args.input, args.json_keys, args.txt_documents)
        for ids in tqdm(tokenized(args, source), unit=" documents", disable=None):
            documents += 1
            for builder, own in zip(builders, ids, strict=True):
                if own.size:  # an empty document would only be stepped over
                    builder.add_document(own, [own.size])
                tokens += own.size
        for final, builder in zip(finals, builders, strict=True):
            if not builder.sequence_lengths:
                raise ValueError(f"The input holds no text for {final}; check --input and --json-keys.")
        for partial, builder in zip(partials, builders, strict=True):
            builder.finalize(f"{partial}.idx")
        for partial, final in zip(partials, finals, strict=True):
            # An index vouches for its .bin: the old one goes first, the new one comes last.
            if os.path.exists(f"{final}.idx"):
                os.remove(f"{final}.idx")
            os.replace(f"{partial}.bin", f"{final}.bin")
            os.replace(f"{partial}.idx", f"{final}.idx")
        return documents, tokens
    finally:
        for builder in builders:
            builder.data_file.close()
        for partial in partials:
            for path in (f"{partial}.bin", f"{partial}.idx"):
                if os.path.exists(path):
                    os.remove(path)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    try:
        if args.workers < 1:
            raise ValueError(f"--workers is {args.workers}; at least one process is needed.")
        if len(set(args.json_keys)) < len(args.json_keys):
            raise ValueError(f"--json-keys {' '.join(args.json_keys)} names a key twice: give each once.")
        check_inputs(args.input)
        tokenizer = build_tokenizer(args)
        if args.append_eod and tokenizer.eos_id is None:
            raise ValueError("--append-eod needs a tokenizer with an eos token; this one has none.")
        with output_folder(args.output_prefix):
            documents, tokens = write(args, tokenizer)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - start
    for key in args.json_keys:
        print(f"{args.output_prefix}_{key}_document")
    print(f"{documents} documents, {tokens} tokens, {seconds:.1f} seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
