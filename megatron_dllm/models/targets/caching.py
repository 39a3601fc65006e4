"""Runs a target over the samples of a training run and writes its features (tools/cache_features.py).

In the micro-batches of the run itself: those of the first epoch are then read back bit for bit. Data-parallel ranks
share them; what a target is split over works on each together.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split

from megatron_dllm.data.datasets import Datasets
from megatron_dllm.data.stream import Collate, CorruptedSamples
from megatron_dllm.models import target as targets
from megatron_dllm.models.targets import offline
from megatron_dllm.models.targets.store import FORMAT, Writer, key
from megatron_dllm.modes.base import NUM_ATTRIBUTES


@dataclass(frozen=True)
class Unit:
    """A micro-batch: samples first..stop of a split."""

    samples: CorruptedSamples
    first: int
    stop: int

    def read(self) -> list:
        return [self.samples[index] for index in range(self.first, self.stop)]


def check(args: Namespace) -> None:
    """ValueError (one sentence) for a command whose features are not written."""
    if args.dllm_mode != "dflash":
        raise ValueError(f"--dllm-mode {args.dllm_mode} reads no features of a target: use --dllm-mode dflash.")
    if args.dflash_kl_weight:
        raise ValueError(
            "a run with --dflash-kl-weight needs what the target predicts, which is not stored: leave it out."
        )
    if args.context_parallel_size > 1:
        raise ValueError(
            "a context-parallel rank computes a part of each sample: leave out --context-parallel-size here; what is "
            "written is read in every layout."
        )


def units(args: Namespace, datasets: Datasets, count: int) -> list[Unit]:
    """`count` training samples, and all that is ever evaluated on."""
    found = []

    def add(samples, split: Split, total: int, size: int) -> None:
        if samples is not None and total:
            samples = CorruptedSamples(samples, args, split)
            found.extend(Unit(samples, first, first + size) for first in range(0, total, size))

    add(datasets.train, Split.train, count, args.micro_batch_size)
    for split, samples in ((Split.valid, datasets.valid), (Split.test, datasets.test)):
        add(samples, split, args.eval_iters * args.eval_global_batch_size, args.eval_micro_batch_size)
    return found


def write(args: Namespace, datasets: Datasets, path: str, count: int | None = None, say=print) -> None:
    """`count`: of training samples, default an epoch. Collective over all processes.

    Raises ValueError (one sentence) if the folder is in the way or the disk too small, before the target is loaded.
    """
    count = count or len(datasets.train)
    count = -(-count // args.micro_batch_size) * args.micro_batch_size
    work = units(args, datasets, count)
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    mine = range(rank * len(work) // size, (rank + 1) * len(work) // size)
    first = torch.distributed.get_rank() == 0
    told = say if first else (lambda text: None)
    told(f"reading {len(work)} micro-batches to see how long their samples are")
    known = {u: [key(s.tokens_S, s.position_S, s.document_S) for s in _samples(work[u])] for u in mine}
    keys, lengths, owner = _unique(_gather(known))
    writer = Writer(path, _header(args, datasets, count), keys, lengths, len(work), _tables(args))
    if _together(writer.is_finished, first):
        return told(f"{path} is complete: train with --dflash-features {path}")
    told(
        f"{path}: {len(keys)} samples, {int(lengths.sum())} tokens x {writer.header['width']} features in "
        f"{writer.header['identity']['precision']}: {_size(writer.total_bytes)} of {_size(writer.free_bytes())} free"
    )
    _together(writer.prepare, first)
    done = writer.open()
    if done:
        told(f"{len(done)} of {len(work)} micro-batches are there already")
    try:
        target = targets.build(args)
    except targets.UnusableTarget:
        if not done:  # what was only reserved is of no use
            writer.abandon()
        raise
    collate = Collate(args, 1, 0)
    for u, unit in _in_step([u for u in mine if u not in done], work, first):
        features = _run(target, collate, unit)
        if u is not None and mpu.get_tensor_model_parallel_rank() == 0:
            own = [(k, features[:n, b]) for b, (k, n) in enumerate(known[u]) if owner[k] == (u, b)]
            writer.write(u, [(k, rows.cpu()) for k, rows in own])
    writer.close()
    torch.distributed.barrier()
    tables = target.tables()
    _together(lambda: writer.finish(*(None if table is None else table.cpu() for table in tables)), first)
    told(f"{path} is ready: train with --dflash-features {path}")


def _samples(unit: Unit) -> Iterator:
    return (corrupted.sample for corrupted in unit.read())


def _gather(known: dict) -> dict[int, list[tuple[int, int]]]:
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, known)
    return {u: found for some in everyone for u, found in some.items()}


def _unique(known: dict[int, list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, dict]:
    """(keys, lengths, where each is computed) in the order in which samples come; those that come again are left out.

    Raises ValueError for two samples of one hash.
    """
    owner, lengths = {}, {}
    for u in sorted(known):
        for b, (k, n) in enumerate(known[u]):
            if lengths.setdefault(k, n) != n:
                raise ValueError("two samples have the same 64-bit hash: leave one of them out.")
            owner.setdefault(k, (u, b))
    return np.array(list(lengths), dtype=np.uint64), np.array(list(lengths.values()), dtype=np.int64), owner


def _header(args: Namespace, datasets: Datasets, count: int) -> dict:
    data = "data_path train_data_path valid_data_path test_data_path sft_data_path sft_valid_data_path split".split()
    return dict(
        format=FORMAT,
        identity=offline.identity(args),
        width=len(args.dflash_target_layers) * args.hidden_size,
        hidden_size=args.hidden_size,
        vocab_size=args.vocab_size,
        samples=count,
        every_epoch=args.sft_data_path is not None and count >= len(datasets.train),  # packed text is packed anew
        target=args.dflash_target,
        tokenizer=args.tokenizer_model,
        data={name: getattr(args, name) for name in data if getattr(args, name) is not None},
    )


def _tables(args: Namespace) -> int:
    """1 if embedding and head are one, as far as a look at the configuration says."""
    described = targets.describe(args.dflash_target, args.dflash_target_backend, args.trust_remote_code)
    tied = not getattr(described.args, "untie_embeddings_and_output_weights", True)
    return 1 if tied else 2


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def _in_step(mine: list[int], work: list[Unit], shows: bool) -> Iterator[tuple[int | None, Unit]]:
    """The micro-batches of this rank; then, with None, any one, until the last rank is done: experts are shared."""
    from tqdm import tqdm

    most = torch.tensor([len(mine)], device=torch.cuda.current_device())
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    for j in tqdm(range(int(most)), unit=" micro-batches", file=sys.stderr, disable=None if shows else True):
        u = mine[j] if j < len(mine) else None
        yield u, work[u if u is not None else 0]


def _run(target: targets.Target, collate: Collate, unit: Unit) -> torch.Tensor:
    """[S, B, F]"""
    batch = collate.layout(unit.read())
    S = batch.tokens_BQ.shape[1] - batch.drafted
    device = torch.cuda.current_device()
    attributes_BSA = batch.attributes_BQA[:, :S, :NUM_ATTRIBUTES].contiguous()
    inputs = (batch.tokens_BQ[:, :S].contiguous(), batch.position_ids_BQ[:, :S].contiguous(), attributes_BSA)
    return target.features(*(x.to(device) for x in inputs))


def _together(action, first: bool):
    """The first process does it; all return what it returns, or raise what it raises."""
    found = [None, None]
    if first:
        try:
            found[0] = action()
        except Exception as caught:
            found[1] = caught
    torch.distributed.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]
