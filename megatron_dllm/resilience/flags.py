"""The flags of long runs, and what can be wrong with them (see validation.py)."""

import argparse

import torch
from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support

from megatron_dllm.display import check_writable

_STRAGGLER = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("long runs").add_argument
    add("--save-retain", type=int, default=None, metavar="N", help="Keep the newest N checkpoints, delete older ones.")
    add(
        "--dllm-skip-bad-steps",
        type=int,
        default=0,
        metavar="N",
        help="Leave out at most N steps, over the whole run, whose loss or gradient norm is not finite; default: stop "
        "at the first one.",
    )
    add(
        "--dllm-straggler-report",
        type=float,
        nargs="?",
        const=_STRAGGLER,
        default=None,
        metavar="RATIO",
        help="With every log line, say which rank is slowest by itself; warn if it takes more than RATIO (default "
        f"{_STRAGGLER}) times the median.",
    )
    add("--heartbeat-file", default=None, metavar="FILE", help="Keep a small JSON file that tells how far the run is.")
    add(
        "--heartbeat-interval", type=float, default=30.0, metavar="SECONDS", help="How often it is written; default 30."
    )
    add(
        "--hang-dump-seconds",
        type=float,
        default=None,
        metavar="SECONDS",
        help="Show the stacks of every rank that has made no progress for so long (longer than a save takes).",
    )


def check(args, given: set[str]) -> None:
    """Before Megatron's own checks, some of which it is told what to find. ValueError (one sentence)."""
    for name in ("save_retain", "save_retain_interval"):
        value = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        if value is not None and args.save is None:
            raise ValueError(f"{flag} keeps checkpoints of this run: give --save.")
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value} is too small: it must be at least 1.")
    every = args.save_retain_interval
    if every is not None and every % args.save_interval:
        raise ValueError(
            f"--save-retain-interval {every} keeps checkpoints of its multiples, and --save-interval "
            f"{args.save_interval} makes few of those: give a multiple of that."
        )
    if args.verify_integrity and args.save is None and args.load is None:
        raise ValueError("--verify-integrity is about checkpoints: give --save or --load.")
    if args.dllm_skip_bad_steps < 0:
        raise ValueError(f"--dllm-skip-bad-steps {args.dllm_skip_bad_steps} is too small: it must be at least 0.")
    if args.iterations_to_skip and min(args.iterations_to_skip) < 1:
        raise ValueError("--iterations-to-skip counts iterations from 1.")
    if args.dllm_straggler_report is not None and not args.dllm_straggler_report >= 1:
        raise ValueError(f"--dllm-straggler-report {args.dllm_straggler_report} is out of range: give 1 or more.")
    for name in ("heartbeat_interval", "hang_dump_seconds"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} is out of range: give more than 0.")
    if "heartbeat_interval" in given and args.heartbeat_file is None:
        raise ValueError("--heartbeat-interval says how often --heartbeat-file is written: give that too.")
    if args.heartbeat_file is not None:
        check_writable("--heartbeat-file", args.heartbeat_file)
    _check_guard(args, given)
    if args.async_save:
        _check_async(args, given)


def _check_guard(args, given: set[str]) -> None:
    """`dllm_guard`: non-finite steps are our affair, not that of Megatron's checks."""
    scaler = args.fp16 and not args.loss_scale  # a non-finite gradient is how it finds its scale
    args.dllm_guard = args.check_for_nan_in_loss_and_grad and "rerun_mode" not in given and not scaler
    if args.dllm_skip_bad_steps and not args.dllm_guard:
        other = "--rerun-mode" if "rerun_mode" in given else "--no-check-for-nan-in-loss-and-grad"
        other = "fp16 and its loss scaling, which skips by itself" if scaler else other
        raise ValueError(f"--dllm-skip-bad-steps has no effect with {other}: remove one.")
    if args.dllm_guard:
        args.check_for_nan_in_loss_and_grad = False
    args.dllm_bad_steps = []  # iterations that were skipped; a checkpoint's go on


def _check_async(args, given: set[str]) -> None:
    if args.save is None:
        raise ValueError("--async-save needs --save.")
    gpu = torch.cuda.is_available()
    if "async_strategy" not in given:
        args.async_strategy = "nvrx" if gpu and has_nvrx_async_support() else "mcore"
    elif args.async_strategy == "nvrx" and not (gpu and has_nvrx_async_support()):
        raise ValueError("--async-strategy nvrx needs a GPU and nvidia-resiliency-ext 0.6 or later: use mcore.")
    args.use_persistent_ckpt_worker = True  # or Megatron saves as if --async-save had not been given


def settle(args) -> None:
    """After Megatron's checks."""
    args.dllm_retain_every, args.save_retain_interval = args.save_retain_interval, None  # resilience.retention does it
    if args.async_save and not torch.cuda.is_available():
        # A forked writer has memory as it was at that moment. The persistent one would share the weights' memory, and
        # write what training has made of them meanwhile: copying to the CPU, which protects a GPU's, is no copy there.
        args.use_persistent_ckpt_worker = False
