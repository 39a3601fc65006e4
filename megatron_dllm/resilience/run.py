"""What a run does beside training: signs of life, reports on its ranks, and what follows a complete checkpoint."""

import os

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import checkpointing, get_args
from megatron.training.utils import is_last_rank, print_rank_last

from megatron_dllm.conversion.background import Exporter
from megatron_dllm.resilience import saving, stragglers
from megatron_dllm.resilience.heartbeat import Heartbeat
from megatron_dllm.resilience.retention import Retention


class LongRun:
    """One process's part of it. `start` and `stop` enclose the run; the rest is called from the hooks of training."""

    def __init__(self):
        self.exporter, self.retention = Exporter(), Retention()
        self.heartbeat: Heartbeat | None = None
        self.steps = 0  # of this process
        saving.completed.listeners.append(self.checkpoint_completed)

    def start(self, args) -> None:
        self.steps = 0
        stragglers.clock.reset(args.dllm_straggler_report)
        path = args.heartbeat_file if args.rank == args.world_size - 1 else None  # it knows the loss
        if path or args.hang_dump_seconds:
            run = args.save or args.load
            self.heartbeat = Heartbeat(args.rank, path, args.heartbeat_interval, args.hang_dump_seconds, run)
            self.heartbeat.start()

    def stop(self, error: BaseException | None = None) -> None:
        stragglers.clock.reset()
        self.retention.wait()
        if self.heartbeat is not None:
            self.heartbeat.stop(error)
            self.heartbeat = None

    def alive(self, state: str | None = None) -> None:
        """Something goes on."""
        if self.heartbeat is not None:
            self.heartbeat.alive(state)

    def step_begins(self) -> None:
        """What was measured since the last step belongs to evaluations."""
        stragglers.clock.step_begins()

    def step_ended(self, iteration: int, report: dict[str, torch.Tensor], seconds: float) -> None:
        """report: losses and counts of the step, on the last pipeline stage."""
        self.steps += 1
        args = get_args()
        if args.dllm_straggler_report is not None:
            stragglers.clock.step_ended()
        if self.heartbeat is None:
            return
        if not report:
            self.heartbeat.alive("training")
            return
        consumed = args.consumed_train_samples + _samples_of_a_step(args)  # Megatron adds them after the step
        tokens = report["data tokens"].item() / seconds
        self.heartbeat.step(iteration, args.train_iters, consumed, report["loss"].item(), tokens)

    def report_stragglers(self) -> None:
        """With a log line. Collective."""
        if get_args().dllm_straggler_report is not None:
            for line in stragglers.clock.report():
                print_rank_last(line)

    def leave_out_step(self, data_iterator) -> None:
        """Instead of Megatron's `dummy_train_step` (--iterations-to-skip), which looks for GPT's fields in batches."""
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        rerun = get_rerun_state_machine()
        while rerun.should_run_forward_backward(data_iterator):
            for iterator in iterators:
                for _ in range(get_num_microbatches()):
                    next(iterator)
        if is_last_rank():
            args = get_args()
            first = args.consumed_train_samples
            last = first + _samples_of_a_step(args) - 1
            print(f" samples {first} to {last} are left out (--iterations-to-skip)", flush=True)

    def save(self, megatron_save, iteration: int, *args, **kwargs) -> None:
        """A checkpoint, unless it is the one that was loaded, which could get lost while it is written once more."""
        flags = get_args()
        self.alive("saving")
        same = flags.load is not None and os.path.realpath(flags.load) == os.path.realpath(flags.save)
        if same and self.steps == 0 and iteration == checkpointing.get_loaded_iteration() and not flags.finetune:
            if dist.get_rank() == 0:
                print(f"note: iteration {iteration} is saved in {flags.save} already.", flush=True)
            return
        if dist.get_rank() == 0 and not kwargs.get("non_persistent_ckpt"):
            saving.clear_the_way(flags.save, iteration)
        megatron_save(iteration, *args, **kwargs)
        self.alive("training")

    def checkpoint_completed(self, run: str, iteration: int) -> None:
        """On rank 0; with --async-save while training has gone on."""
        args = get_args()
        if args.save_retain or args.dllm_retain_every:
            newest, busy = args.save_retain or 1, self.exporter.reads
            self.retention.prune(run, iteration, newest, args.dllm_retain_every, busy)
        if args.save_hf_interval and iteration % args.save_hf_interval == 0:
            self.exporter.start(run, iteration)


def _samples_of_a_step(args) -> int:
    return get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
