"""Pre-training text: documents of a Megatron `.bin/.idx` corpus, packed into sequences of equal length.

In every epoch the documents are permuted, laid end to end, cut into sequences of S tokens, and the sequences
permuted too, so that neighbours in a batch do not come from one long document. The remainder that does not
fill a sequence is dropped (other tokens in each epoch).
"""

import argparse
import json
import logging
import os
import re
import struct

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, get_bin_path, get_idx_path
from megatron.core.datasets.utils import get_blend_from_list

from megatron_dllm.data.datasets import Samples
from megatron_dllm.data.order import Blend, Epochs
from megatron_dllm.data.sample import PADDING_DOCUMENT, Sample
from megatron_dllm.data.tokenizer import Tokenizer

DEFAULT_SPLIT = "969,30,1"  # Megatron's
_SCANNED_WHOLE = 1 << 26  # tokens; larger corpora have their ids checked in places
_CHUNK = 1 << 20

logger = logging.getLogger(__name__)


class PackedText:
    """Sequences of S = `seq_length` tokens from the documents `documents` of a corpus, epoch after epoch.

    Every token is supervised. `document_S` numbers the documents inside a sequence from 0, and positions
    restart with each (a document that is cut goes on at position 0 in another sequence). With
    `cross_document_attention` a sequence is one document, with positions 0..S-1. A corpus of fewer than S
    tokens gives one sequence, filled up with `pad_id` in document -1, unsupervised, at position 0.
    """

    def __init__(
        self,
        prefix: str,
        seq_length: int,
        seed: int,
        documents: range | None = None,
        cross_document_attention: bool = False,
        pad_id: int = 0,
    ):
        """`documents`: a contiguous range of document numbers, None for all.

        Raises ValueError if a file is missing or damaged, or if the documents hold no token.
        """
        if seq_length < 1:
            raise ValueError(f"The sequence length is {seq_length}; give --seq-length a positive number.")
        self.prefix, self.seq_length, self.seed = prefix, seq_length, seed
        self.cross_document_attention, self.pad_id = cross_document_attention, pad_id
        self._corpus = open_corpus(prefix)
        boundaries = _document_boundaries(self._corpus)
        self.documents = range(len(boundaries) - 1) if documents is None else documents
        first, last = self.documents.start, self.documents.stop
        if self.documents.step != 1 or not 0 <= first <= last < len(boundaries):
            raise ValueError(f"{prefix} has {len(boundaries) - 1} documents, of which {documents} is no range.")
        self._starts = boundaries[first:last]
        self._lengths = np.diff(boundaries[first : last + 1])
        self.tokens_per_epoch = int(self._lengths.sum())
        if self.tokens_per_epoch == 0:
            raise ValueError(
                f"{prefix} holds no tokens in documents {first} to {last}; preprocess a corpus with text, "
                "or change --split."
            )
        self._document_order = Epochs(seed, len(self.documents), "documents")
        self._sequence_order = Epochs(seed, max(1, self.tokens_per_epoch // seq_length), "sequences")
        self._ends: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return self._sequence_order.n

    def sample(self, index: int) -> Sample:
        """The sequence at global `index` >= 0, counted through all epochs."""
        epoch, sequence = self._sequence_order.locate(index)
        order, ends = self._document_order.order(epoch), self._document_ends(epoch)
        S = self.seq_length
        tokens_S = np.full(S, self.pad_id, dtype=np.int64)
        document_S = np.full(S, PADDING_DOCUMENT, dtype=np.int32)
        position_S = np.zeros(S, dtype=np.int64)

        begin = sequence * S  # in the epoch's stream of tokens
        stop = min(begin + S, self.tokens_per_epoch)
        at, number = begin, 0
        place = int(np.searchsorted(ends, begin, side="right"))  # also steps over empty documents
        while at < stop:
            end, document = int(ends[place]), order[place]
            length = min(end, stop) - at
            if length > 0:
                offset = int(self._lengths[document]) - (end - at)
                here = slice(at - begin, at - begin + length)
                tokens_S[here] = self._read(int(self._starts[document]) + offset, length)
                document_S[here] = 0 if self.cross_document_attention else number
                position_S[here] = np.arange(length) + (here.start if self.cross_document_attention else 0)
                at, number = at + length, number + 1
            place += 1
        return Sample(
            tokens_S=torch.from_numpy(tokens_S),
            loss_mask_S=torch.from_numpy(document_S != PADDING_DOCUMENT),
            document_S=torch.from_numpy(document_S),
            position_S=torch.from_numpy(position_S),
            index=index,
        )

    def _document_ends(self, epoch: int) -> np.ndarray:
        """Where the documents end in the epoch's stream, in its order."""
        if epoch not in self._ends:
            while len(self._ends) > 1:
                self._ends.pop(next(iter(self._ends)))
            ends = np.cumsum(self._lengths[self._document_order.order(epoch)], dtype=np.int64)
            fits = self.tokens_per_epoch <= np.iinfo(np.int32).max
            self._ends[epoch] = ends.astype(np.int32) if fits else ends
        return self._ends[epoch]

    def _read(self, start: int, count: int) -> np.ndarray:
        dtype = self._corpus.index.dtype
        return self._corpus.bin_reader.read(dtype, count, start * DType.size(dtype))

    def __reduce__(self):
        # Workers map the files again: a pickle of the arguments instead of arrays as long as the corpus.
        arguments = (self.prefix, self.seq_length, self.seed, self.documents)
        return PackedText, (*arguments, self.cross_document_attention, self.pad_id)


def open_corpus(prefix: str) -> IndexedDataset:
    """Memory-map `prefix`.bin and `prefix`.idx. Raises ValueError if either is missing, empty or damaged."""
    for path in (get_bin_path(prefix), get_idx_path(prefix)):
        if not os.path.isfile(path):
            raise ValueError(
                f"Data file {path} does not exist; give a prefix without .bin or .idx, "
                "as tools/preprocess_data.py printed it."
            )
        if os.path.getsize(path) == 0:
            raise ValueError(f"Data file {path} is empty; preprocess the corpus again.")
    try:
        corpus = IndexedDataset(prefix)
    except (AssertionError, ValueError, KeyError, struct.error) as error:
        raise ValueError(f"{get_idx_path(prefix)} is not a readable Megatron index ({error}).") from error
    expected = int(_token_offsets(corpus)[-1]) * DType.size(corpus.index.dtype)
    if os.path.getsize(get_bin_path(prefix)) != expected:
        raise ValueError(
            f"{get_bin_path(prefix)} is not the {expected} bytes that its .idx describes; preprocess the corpus again."
        )
    return corpus


def _token_offsets(corpus: IndexedDataset) -> np.ndarray:
    """int64 [sequences + 1]: where each stored sequence starts, in tokens, and where the last one ends."""
    index = corpus.index
    offsets = np.zeros(len(index) + 1, dtype=np.int64)
    offsets[:-1] = index.sequence_pointers // DType.size(index.dtype)
    if len(index):
        offsets[-1] = offsets[-2] + index.sequence_lengths[-1]
    return offsets


def _document_boundaries(corpus: IndexedDataset) -> np.ndarray:
    """int64 [documents + 1]: a document may be several stored sequences (sentences), always adjacent."""
    return _token_offsets(corpus)[corpus.document_indices]


def check_token_ids(prefix: str, vocab_size: int, mask_id: int | None = None) -> None:
    """Raises ValueError if the corpus holds an id outside 0..vocab_size-1, or the mask token.

    Reads all of a corpus below 64M tokens, and 64 evenly spread chunks of a larger one.
    """
    corpus = open_corpus(prefix)
    total = int(_token_offsets(corpus)[-1])
    chunks = range(0, total, _CHUNK)
    if total > _SCANNED_WHOLE:
        chunks = np.linspace(0, total - _CHUNK, 64, dtype=np.int64)
    dtype = corpus.index.dtype
    for start in chunks:
        ids = corpus.bin_reader.read(dtype, min(_CHUNK, total - int(start)), int(start) * DType.size(dtype))
        worst = int(ids.max()) if ids.min() >= 0 else int(ids.min())
        if not 0 <= worst < vocab_size:
            raise ValueError(
                f"{prefix} holds token id {worst}, but the tokenizer has {vocab_size} ids; "
                "use the tokenizer that the corpus was preprocessed with."
            )
        if mask_id is not None and (ids == mask_id).any():
            raise ValueError(
                f"{prefix} holds the mask token {mask_id}, which clean text must not contain; choose another with "
                "--dllm-mask-token-id, or preprocess text without it."
            )


def build_text(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Samples | None, Samples | None, Samples | None]:
    """Training, validation and test text from Megatron's data flags; None for a split that is not there.

    Reads data_path with split, or {train,valid,test}_data_path, or the two *_data_args_path files; seed;
    dllm_sequence_length (or seq_length where flags have not been validated: afterwards that is the model's
    length, several streams long); dllm_cross_document_attention and dllm_mask_token_id. Validation and test
    data use seed 0, so that different runs are compared on the same samples.
    Raises ValueError for missing or empty data, token ids outside the vocabulary, mask tokens in clean text,
    and contradicting flags.
    """
    blends, shares = _blends(args)
    pad_id = next(i for i in (tokenizer.pad_id, tokenizer.eos_id, 0) if i is not None)  # seen by nobody
    for prefix in sorted({prefix for blend in blends if blend for prefix in blend[0]}):
        check_token_ids(prefix, tokenizer.vocab_size, getattr(args, "dllm_mask_token_id", None))
    seq_length = getattr(args, "dllm_sequence_length", None) or args.seq_length

    def build(name: str, blend, share: tuple[float, float] | None) -> Samples | None:
        if blend is None or share is None:
            return None
        prefixes, weights = blend
        parts, kept = [], []
        for k, prefix in enumerate(prefixes):
            documents = _documents_of_share(prefix, share)
            if name != "training" and _is_empty(prefix, documents):
                logger.warning("%s has no documents for the %s split and is left out of it", prefix, name)
                continue
            parts.append(
                PackedText(
                    prefix,
                    seq_length,
                    args.seed if name == "training" else 0,
                    documents,
                    getattr(args, "dllm_cross_document_attention", False),
                    pad_id,
                )
            )
            kept.append(k)
        if len(parts) < 2:
            return parts[0] if parts else None
        return Blend(parts, weights and [weights[k] for k in kept])

    names = ("training", "validation", "test")
    train, valid, test = map(build, names, blends, shares)
    return train, valid, test


def _blends(args: argparse.Namespace) -> tuple[list, list]:
    """Per split: (prefixes, weights or None) or None, and the share of documents it takes."""
    whole, per_split = (
        getattr(args, "data_path", None),
        [getattr(args, f"{name}_data_path", None) for name in ("train", "valid", "test")],
    )
    sources = {"--data-path": whole, "--train/valid/test-data-path": any(per_split)}
    whole_file = getattr(args, "data_args_path", None)
    per_split_file = getattr(args, "per_split_data_args_path", None)
    sources |= {"--data-args-path": whole_file, "--per-split-data-args-path": per_split_file}
    given = [flag for flag, value in sources.items() if value]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ValueError(f"Give the text with exactly one of {', '.join(sources)}; there is {found}.")
    if whole_file:
        whole = _read_file(whole_file).split()
    if per_split_file:
        try:
            table = json.loads(_read_file(per_split_file))
        except json.JSONDecodeError as error:
            raise ValueError(f"{per_split_file} is not JSON ({error}).") from error
        per_split = [table.get(name) for name in ("train", "valid", "test")]
        per_split = [value.split() if isinstance(value, str) else value for value in per_split]
    if whole:
        return [_blend(whole)] * 3, _shares(getattr(args, "split", None) or DEFAULT_SPLIT)
    return [_blend(paths) if paths else None for paths in per_split], [(0.0, 1.0)] * 3


def _blend(paths: list[str]) -> tuple[list[str], list[float] | None]:
    try:
        return get_blend_from_list(paths)
    except AssertionError as error:
        raise ValueError(f"Data paths {paths} have a weight for some only; give one to each or none.") from error


def _shares(split: str) -> list[tuple[float, float] | None]:
    shares = [float(share) for share in re.findall(r"[.0-9]+", split)]  # as Megatron reads them
    if len(shares) > 3 or not sum(shares) > 0:
        raise ValueError(f"--split {split} is not up to three shares such as {DEFAULT_SPLIT}; correct it.")
    return convert_split_vector_to_split_matrix(parse_and_normalize_split(split))


def _read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"Cannot read {path} ({error.strerror}); correct the path.") from error


def _documents_of_share(prefix: str, share: tuple[float, float]) -> range:
    """Contiguous documents, rounded as Megatron rounds them."""
    count = len(open_corpus(prefix).document_indices) - 1
    return range(*(int(round(edge * float(count))) for edge in share))


def _is_empty(prefix: str, documents: range) -> bool:
    boundaries = _document_boundaries(open_corpus(prefix))
    return boundaries[documents.start] == boundaries[documents.stop]
