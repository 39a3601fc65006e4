"""What the sides of benchmark.py have in common: the program's start, its batches, and what they hand each other."""

import importlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def start(flags: str):
    """(arguments, tokenizer, model) of a command of this program, on one process."""
    importlib.import_module("megatron_dllm")  # the CPU backend comes before megatron
    import torch
    from megatron.training.initialize import initialize_megatron

    from megatron_dllm.arguments import parse_arguments
    from megatron_dllm.launch import default_to_one_process
    from megatron_dllm.training import install, model_provider

    default_to_one_process()
    sys.argv = ["benchmark", *flags.split()]
    args, tokenizer = parse_arguments()
    install()
    initialize_megatron(allow_no_cuda=not torch.cuda.is_available())
    return args, tokenizer, model_provider()


class Batches:
    """Micro-batches of the program's own data path. rows, batches: as noised samples and as the model takes them."""

    def __init__(self, args, tokenizer, count: int):
        from megatron.core.datasets.utils import Split

        from megatron_dllm.data.datasets import build_datasets
        from megatron_dllm.data.stream import Collate, CorruptedSamples

        samples = CorruptedSamples(build_datasets(args, tokenizer).train, args, Split.train)
        collate = Collate(args, 1, 0)
        size = args.micro_batch_size
        self.rows, self.batches, seconds = [], [], []
        for first in range(0, count * size, size):
            start = time.perf_counter()
            self.rows.append([samples[first + i] for i in range(size)])
            self.batches.append(collate(self.rows[-1]))
            seconds.append(time.perf_counter() - start)
        scored = sum(len(term.rows_N) for batch in self.batches for term in batch.terms.values()) / count
        self.figures = dict(assembly=statistics.median(seconds), scored=scored)

    def __getitem__(self, step: int):
        return self.batches[step % len(self.batches)]

    def __iter__(self) -> Iterator[list]:
        return iter(self.rows)


def write_corpus(options, folder: Path) -> str:
    """Random ids in documents longer than a sequence: every batch is full, as in pre-training."""
    importlib.import_module("megatron_dllm")
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(folder / "corpus")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    ids = np.random.default_rng(0).integers(0, options.vocabulary - 2, 64 * options.seq_length)
    builder.add_document(ids, [len(ids)])
    builder.finalize(prefix + ".idx")
    return prefix


def data_flags(options, folder: Path) -> str:
    """Of a training step on that corpus."""
    return f"""--seq-length {options.seq_length} --micro-batch-size {options.batch} --train-iters 1 --lr 1e-3
        --data-path {write_corpus(options, folder)} --split 100,0,0 --tokenizer-type NullTokenizer
        --dllm-verify-peers 0 --make-vocab-size-divisible-by 1"""


def share(value, folder: Path) -> None:
    """For the other side, which may be waiting."""
    import torch

    torch.save(value, folder / "shared.tmp")
    os.replace(folder / "shared.tmp", folder / "shared")


def shared(folder: Path):
    """What the other side shares, once it does."""
    import torch

    while not (folder / "shared").exists():
        time.sleep(0.05)
    return torch.load(folder / "shared", weights_only=False)
