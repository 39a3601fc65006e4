"""Writes the hidden states of a draft's target once, so that training need not run the target in every epoch.

    python tools/cache_features.py --dflash-features DIR [flags of the training run]
    torchrun --nproc-per-node 8 tools/cache_features.py --dflash-features DIR [flags of the training run]
    torchrun ... pretrain_dllm.py --dflash-features DIR [flags of the training run]

The flags say which target, which of its layers, which data, tokenizer, --seq-length and precision; with any other of
these the folder is refused. Chat data is written once for all epochs; packed text is packed anew in every epoch: give
--num-samples as many as the run reads. Evaluated samples are written too. The space that is needed is printed, checked
and reserved before the target is loaded. A run that was interrupted goes on where it was when it is started again.

--tensor-model-parallel-size (and expert parallelism) split the target, other processes share the samples. Training may
have another layout and batch; features are then those of the target but for the rounding of other matrix products.
"""

import argparse
import contextlib
import os
import sys

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail, read_command_line
from megatron_dllm.launch import default_to_one_process, quiet


def read_flags() -> tuple:
    """(args, tokenizer, folder, number of samples or None). Raises ValueError (one sentence)."""
    given = {}

    def extend(parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s --dflash-features DIR [flags of pretrain_dllm.py]"
        parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
        parser.add_argument("--num-samples", type=int, metavar="N", help="Training samples; default: an epoch.")

    def adapt(args) -> None:
        given.update(path=args.dflash_features, count=args.num_samples)
        args.dflash_features = None  # it shall be written, and is not there to be checked
        if args.lr is None:
            args.lr = 1.0  # nothing is trained
        if args.train_iters is None and args.train_samples is None:
            args.train_iters = 1

    args, tokenizer = read_command_line(extend, adapt)
    if given["path"] is None:
        raise ValueError("--dflash-features is missing: the folder to be written.")
    if given["count"] is not None and given["count"] < 1:
        raise ValueError(f"--num-samples {given['count']} is too small: it must be at least 1.")
    return args, tokenizer, os.path.abspath(given["path"]), given["count"]


def run(store=None) -> None:
    """Everything, in the processes that are started. store: rendezvous, for tests."""
    import torch
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    from megatron_dllm import fixes
    from megatron_dllm.data.datasets import build_datasets
    from megatron_dllm.models import target
    from megatron_dllm.models.targets import caching
    from megatron_dllm.training import embedding_ranks

    shows_help = {"-h", "--help"} & set(sys.argv)
    with contextlib.nullcontext() if shows_help else quiet():
        args, tokenizer, path, count = read_flags()
        caching.check(args)
        target.check_weights(args)
        datasets = build_datasets(args, tokenizer)
        fixes.install()
        set_global_variables(args, build_tokenizer=False)
        initialize_megatron(
            allow_no_cuda=not torch.cuda.is_available(), get_embedding_ranks=embedding_ranks, store=store
        )
    caching.write(args, datasets, path, count, say=lambda text: print(text, flush=True))


def main() -> None:
    default_to_one_process()
    try:
        run()
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
