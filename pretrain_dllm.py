"""Train a diffusion language model: torchrun [...] pretrain_dllm.py --dllm-mode mdlm [Megatron flags]."""

import argparse
import signal


def hold_exit_signal() -> None:
    """With --exit-signal-handler, from the first moment on: see megatron_dllm/exit_signal.py."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--exit-signal", default="SIGTERM")
    given, _ = parser.parse_known_args()
    if given.exit_signal_handler and given.exit_signal in signal.Signals.__members__:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.Signals[given.exit_signal]})


hold_exit_signal()  # the imports may take minutes

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail, parse_arguments
from megatron_dllm.checkpoint import DamagedCheckpoint, check_before_loading
from megatron_dllm.conversion.exporting import check_expressible
from megatron_dllm.conversion.source import check_source
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.launch import default_to_one_process
from megatron_dllm.models.target import UnusableTarget, check_weights
from megatron_dllm.resilience.bad_steps import BadStep
from megatron_dllm.training import pretrain


def main() -> None:
    default_to_one_process()
    try:
        args, tokenizer = parse_arguments()
        check_before_loading(args)
        if args.init_from_hf:
            check_source(args)
        check_weights(args)
        if args.save_hf_interval:
            check_expressible(args)
        datasets = build_datasets(args, tokenizer)
    except (ValueError, OSError) as error:
        fail(error)
    try:
        pretrain(args, datasets)
    except (UnusableTarget, BadStep, DamagedCheckpoint) as error:
        fail(error)


if __name__ == "__main__":  # checkpoint writers are spawned and import this file again
    main()
