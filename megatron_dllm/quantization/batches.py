"""What a model is calibrated and measured on: samples of given data, corrupted as in training.

The noise is that of validation (noise.ValidationDraws): levels follow a golden-ratio sequence, so that those of any n
samples in a row are nearly even over [0, 1), and every choice of format, and every run of this program, sees the same
tokens. The order of the samples is a function of the seed.
"""

import copy
import os
from argparse import Namespace
from itertools import batched, groupby

from megatron.core.datasets.utils import Split

from megatron_dllm.data.datasets import Samples, build_datasets
from megatron_dllm.data.stream import Collate, CorruptedSamples
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.parallel import RankBatch

_CHAT = (".jsonl", ".json", ".parquet")
_LONGEST = 2048  # of samples, where neither a flag nor a run says more


def data_arguments(args: Namespace, paths: list[str], seq_length: int | None, seed: int) -> Namespace:
    """The arguments of a training run on this data, all of it. paths: chat files (by their ending), or prefixes of
    .bin/.idx. seq_length: S; default: that of the run, and of a folder what it can, at most 2048. Raises ValueError."""
    args = copy.copy(args)
    chat = [path for path in paths if path.endswith(_CHAT)]
    if chat and len(chat) < len(paths):
        raise ValueError(f"--calib-data mixes chat ({chat[0]}) and packed text: give one kind.")
    for name in ("train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path"):
        setattr(args, name, None)
    args.sft_valid_data_path = None
    args.sft_data_path, args.data_path = (paths, None) if chat else (None, [_prefix(path) for path in paths])
    args.split = None if chat else "1,0,0"
    args.seed = seed
    longest = args.max_position_embeddings
    if seq_length is not None and seq_length > longest:
        raise ValueError(f"--seq-length {seq_length} is longer than the {longest} positions of the model: shorten it.")
    if seq_length is None:
        seq_length = min(args.dllm_sequence_length, _LONGEST) if args.init_from_hf else args.dllm_sequence_length
    args.dllm_sequence_length = seq_length
    args.dllm_variable_lengths, args.dllm_length_multiple = True, 1
    args.dllm_verify_peers = 0
    return args


def _prefix(path: str) -> str:
    """A corpus is named by its prefix; one of its two files will do."""
    stem, ending = os.path.splitext(path)
    return stem if ending in (".bin", ".idx") else path


def open_samples(args: Namespace, tokenizer: Tokenizer, needed: int) -> Samples:
    """The data of `data_arguments`. Raises ValueError if it is not in order, or an epoch holds fewer than `needed`."""
    samples = build_datasets(args, tokenizer).train
    if len(samples) < needed:
        raise ValueError(
            f"--calib-data holds {len(samples)} samples of --seq-length {args.dllm_sequence_length}, and {needed} are "
            "asked for: give more data, or smaller --calib-samples and --eval-samples."
        )
    return samples


def corrupted_batches(samples: Samples, indices: range, batch_size: int, args: Namespace) -> list[RankBatch]:
    """The samples of these global indices, corrupted, and laid out by the mode: at most `batch_size` of one length
    together. So no batch has rows of padding, which would take part in scales of activations (but where a mode or a
    corpus shorter than one sample makes some)."""
    args = copy.copy(args)
    args.eval_iters, args.eval_global_batch_size = indices.stop, 1  # an evaluation of so many samples
    corrupted = CorruptedSamples(samples, args, Split.valid)
    rows = sorted((corrupted[index] for index in indices), key=lambda row: (len(row.sample), row.sample.index))
    collate = Collate(args, cp_size=1, cp_rank=0)
    same_length = groupby(rows, key=lambda row: len(row.sample))
    return [collate(list(batch)) for _, group in same_length for batch in batched(group, batch_size)]
