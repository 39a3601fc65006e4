"""From samples to the micro-batches of one rank, a whole optimizer step ahead.

A loss term is divided by its count over the global batch, so all micro-batches of a step, on all
data-parallel ranks, are counted before the first forward. They are small: read them, reduce the counts in
one collective, hand them out. With virtual pipeline stages one stream per model chunk reads the same samples;
the chunks of a rank share the reduced counts.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator

import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from megatron_dllm.data.collation import pad_sample
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import ModelInput
from megatron_dllm.noise import Draws, ValidationDraws
from megatron_dllm.parallel import RankBatch, digest, first_pass_input, shard
from megatron_dllm.planning.flops import flop_counter

_ENDLESS = 10**15  # the sample stream has no end: data sets repeat themselves by epochs


class CorruptedSamples(torch.utils.data.Dataset):
    """Global index -> corrupted sample. Runs in loader workers; pure, so any number of them agrees."""

    def __init__(self, samples, args, split: Split):
        self.samples, self.args, self.split = samples, args, split
        self.mode = args.dllm_mode
        # Every evaluation reads the same samples again, so that evaluations are comparable.
        self.period = _ENDLESS if split == Split.train else args.eval_iters * args.eval_global_batch_size

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int):
        index %= self.period
        sample = self.samples.sample(index)
        if self.args.dllm_padding == "supervise":
            sample = pad_sample(sample, self.args.dllm_sequence_length, self.args.dllm_pad_token_id, supervise=True)
        draws = Draws(self.args.seed, index) if self.split == Split.train else ValidationDraws(index)
        return get_mode(self.mode).corrupt(sample, draws, self.args)


class Collate:
    """Corrupted samples -> this rank's RankBatch. count_flops: of a micro-batch, for a run that logs them."""

    def __init__(self, args, cp_size: int, cp_rank: int, count_flops: Callable[[ModelInput], float] | None = None):
        self.args, self.cp_size, self.cp_rank, self.count_flops = args, cp_size, cp_rank, count_flops

    def layout(self, samples: list) -> ModelInput:
        """The micro-batch as the mode lays it out, before it is sliced."""
        args = self.args
        length = args.dllm_sequence_length
        if args.dllm_variable_lengths:
            longest = max(1, *(len(c.sample) for c in samples))
            length = -(-longest // args.dllm_length_multiple) * args.dllm_length_multiple
        return get_mode(args.dllm_mode).layout(samples, length, args)

    def __call__(self, samples: list) -> RankBatch:
        args, mode = self.args, get_mode(self.args.dllm_mode)
        batch = self.layout(samples)
        index = [c.sample.index for c in samples]
        rank_batch = shard(batch, index, self.cp_size, self.cp_rank, mode.FULL_WITHIN_DOCUMENT)
        if (needed := first_pass_input(batch, args)) is not None:
            rank_batch.first = shard(needed, index, self.cp_size, self.cp_rank, full_within_document=False)
        if self.count_flops is not None:
            rank_batch.flops = self.count_flops(batch)
        if args.dllm_verify_peers:
            rank_batch.digest = digest(batch, index)
        return rank_batch


class StepStream:
    """Iterator over RankBatch, which reads, counts and reduces one optimizer step at a time."""

    def __init__(self, loader: Iterator[RankBatch], split: Split, args, shared_counts: dict):
        self.loader, self.split, self.args = loader, split, args
        self.shared_counts = shared_counts
        self.step = 0
        self.told = False
        self.queue: deque[RankBatch] = deque()

    def __iter__(self) -> "StepStream":
        return self

    def __next__(self) -> RankBatch:
        if not self.queue:
            self.read_step()
        return self.queue.popleft()

    def microbatches(self) -> int:
        args = self.args
        if self.split == Split.train:
            return get_num_microbatches()
        return args.eval_global_batch_size // (args.eval_micro_batch_size * args.data_parallel_size)

    def read_step(self) -> None:
        """Fill the queue with the next step. Collective over the data-parallel group."""
        batches = [next(self.loader) for _ in range(self.microbatches())]
        key = (self.split, self.step)
        if self.shared_counts.get("key") != key:
            counts, flops = _reduce_counts(batches)
            self.shared_counts.update(key=key, counts=counts, flops=flops)
        if not any(self.shared_counts["counts"].values()):
            self._tell_of_nothing()
        for batch in batches:
            # max(·, 1): a step without anything to score has loss 0 and zero gradients, not 0/0
            batch.denominators = {name: max(n, 1.0) for name, n in self.shared_counts["counts"].items()}
            batch.microbatches = len(batches)
        self.step += 1
        self.queue.extend(batches)

    def _tell_of_nothing(self) -> None:
        """Once: every rank knows the global counts, the first one speaks."""
        if not self.told and torch.distributed.get_rank() == 0:
            data = "training" if self.split == Split.train else "held-out"
            why = getattr(get_mode(self.args.dllm_mode), "NOTHING_SCORED", "does the data supervise anything?")
            print(
                f"Warning: a global batch of {data} data has no token to score, its loss is 0: {why}",
                file=sys.stderr,
                flush=True,
            )
        self.told = True

    def verify_peers(self) -> None:
        """Stop the run if a tensor-, context- or pipeline-parallel peer is about to train on something else.

        Collective over the model-parallel and context-parallel groups, so it must not run inside a pipeline
        schedule (later stages would be waiting for activations): training calls it between steps.
        """
        if not self.queue:
            self.read_step()
        digests = torch.tensor([batch.digest for batch in self.queue], device=torch.cuda.current_device())
        for group in (mpu.get_model_parallel_group(), mpu.get_context_parallel_group()):
            low, high = digests.clone(), digests.clone()
            torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN, group=group)
            torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX, group=group)
            if not torch.equal(low, high):
                raise RuntimeError(
                    "peers of one data-parallel rank hold different batches (data files, tokenizer or package "
                    "versions differ between nodes?): stopped before training on them."
                )


def _reduce_counts(batches: list[RankBatch]) -> tuple[dict[str, float], float]:
    """Global count per term, and model FLOPs of the step. Over data-parallel ranks WITHOUT context-parallel ones, which
    hold the same samples."""
    names = sorted(batches[0].counts)
    totals = torch.tensor(
        [*(sum(batch.counts[name] for batch in batches) for name in names), sum(batch.flops for batch in batches)],
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(totals, group=mpu.get_data_parallel_group())
    *counts, flops = totals.tolist()
    return dict(zip(names, counts, strict=True)), flops


def build_stream(samples, split: Split, args, consumed: int, shared_counts: dict) -> StepStream | None:
    """Stream of one split for this rank, continuing after `consumed` samples; None without samples."""
    if samples is None:
        return None
    micro_batch = args.micro_batch_size if split == Split.train else args.eval_micro_batch_size
    sampler = MegatronPretrainingSampler(
        _ENDLESS, consumed, micro_batch, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    )
    count_flops = flop_counter(args) if split == Split.train else None
    collate = Collate(args, mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank(), count_flops)
    loader = torch.utils.data.DataLoader(
        CorruptedSamples(samples, args, split),
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )
    return StepStream(iter(loader), split, args, shared_counts)
