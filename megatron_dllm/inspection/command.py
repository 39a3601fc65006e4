"""The command line of a training run, read without the run."""

import contextlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from megatron_dllm.arguments import read_command_line
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.launch import quiet
from megatron_dllm.models.dflash_draft import DFLASH_DRAFT
from megatron_dllm.parallel import pad_multiple
from megatron_dllm.precision import fp8_recipe
from megatron_dllm.presets import get_preset

_GROUPS = ("data and dataloader", "tokenizer", "validation", "diffusion language model", "diffusion data")
_SINGLE = {"seed", "micro_batch_size", "global_batch_size", "step_batch_size_schedule"}
_SINGLE |= {"dllm_architecture", "dllm_window"}  # what a mode can do there, and what of it is not shown
_LEFT_OUT = {"dllm_attention_backend"}  # may ask for a GPU


def data_flags(parser: ArgumentParser) -> set[str]:
    """The flags that may decide how a sample looks: of data, tokenizer, mode and noise, and the sizes of batches."""
    groups = [g for g in parser._action_groups if g.title in _GROUPS or (g.title or "").startswith("mode ")]
    return ({action.dest for group in groups for action in group._group_actions} | _SINGLE) - _LEFT_OUT


def read_data_flags(extend: Callable) -> tuple[Namespace, Tokenizer]:
    """(args, tokenizer) of `sys.argv`, for one process that never trains. Raises ValueError (one sentence).

    What does not decide how a sample looks is accepted and becomes a default: the model's shape, the optimizer, files
    that training writes, parallel sizes. Of the layout two things remain: the lengths that it can split, and the
    samples of a step. `extend(parser, group)` adds the tool's own flags; they stand first in --help.
    """
    kept, neutral = set(), {}

    def extend_parser(parser):
        own = parser.add_argument_group("what to show")
        parser._action_groups.insert(0, parser._action_groups.pop())
        extend(parser, own)
        drafts = parser.get_default("dllm_family") == DFLASH_DRAFT.name  # whose shape must be the target's
        shape = get_preset("tiny").items()
        parser.set_defaults(**{k: v for k, v in shape if not drafts or parser.get_default(k) is None})
        kept.update(data_flags(parser), (action.dest for action in own._group_actions))
        neutral.update(vars(parser.parse_args("--dllm-mode any --train-iters 1 --lr 1e-3".split())))

    def adapt(args):
        sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
        tp, pp, cp = (max(1, size) for size in sizes)
        if args.pad_seq_len_divisible is None:
            args.pad_seq_len_divisible = pad_multiple(tp, cp, args.sequence_parallel, fp8_recipe(args))
        if args.micro_batch_size is None:
            args.micro_batch_size = 1
        if args.global_batch_size is None:
            args.global_batch_size = args.micro_batch_size * max(1, args.world_size // (tp * pp * cp))
        vars(args).update({name: value for name, value in neutral.items() if name not in kept})
        if args.dllm_architecture is not None:  # layers of its own, as many as are named
            own = {k: v for k, v in get_preset("tiny-diffusion-gemma").items() if k not in kept}
            vars(args).update(own)
        args.dflash_features = None  # of the target, which is not asked for any
        args.rank, args.world_size = 0, 1

    shows_help = {"-h", "--help"} & set(sys.argv)
    with contextlib.nullcontext() if shows_help else quiet():
        return read_command_line(extend_parser, adapt)
