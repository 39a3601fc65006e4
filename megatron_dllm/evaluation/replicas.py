"""Copies of one model on the launched processes, and work shared out over them.

A job of W processes with tensor parallelism T holds W / T copies of the model: Megatron's data-parallel ranks. All
processes know all the work; a copy does its share, and in the end everyone has all results, in order.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import mpu

from megatron_dllm.generation import load


def plan(path: str, *, tensor_model_parallel_size: int = 1, **options) -> load.Plan:
    """`generation.load.plan` for a job of several copies of the model. Raises ValueError as it does, and where the
    processes cannot be divided by the tensor-parallel size."""
    world, tp = int(os.environ.get("WORLD_SIZE", "1")), tensor_model_parallel_size
    if tp < 1 or world % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the {world} process(es): start a multiple of it, as "
            f"torchrun --nproc-per-node {2 * max(tp, 1)} does."
        )
    with _world_of(tp):
        planned = load.plan(path, tensor_model_parallel_size=tp, **options)
    args = planned.args
    args.world_size, args.data_parallel_size = world, world // tp
    args.global_batch_size = args.micro_batch_size * args.data_parallel_size  # Megatron divides it at start-up
    return planned


@contextlib.contextmanager
def _world_of(processes: int) -> Iterator[None]:
    """`load.plan` takes every launched process for a part of one model: for its duration there are no others."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def share_out(items: Sequence, work: Callable[[list], list]) -> list:
    """[result of each item]. `work` turns a list of items into a list of results; this copy's list is every so manieth
    item. Collective over the copies."""
    copies, mine = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    done = work(list(items[mine::copies]))
    if copies == 1:
        return done
    everyone = [None] * copies
    torch.distributed.all_gather_object(everyone, done, group=mpu.get_data_parallel_group())
    results = [None] * len(items)
    for copy, part in enumerate(everyone):
        results[copy::copies] = part
    return results
