"""The command line of tools/plan.py: a training command without a run.

Every flag of pretrain_dllm.py is a flag here, and means the same. What a run needs and a plan does not (data, tokenizer,
learning rate) may be left out; the printed command then has $DATA and $TOKENIZER in its place.
"""

import argparse
import copy
import json
import os
import sys

from megatron_dllm.arguments import parse_command_line
from megatron_dllm.data.tokenizer import ByteLevel, Tokenizer, build_tokenizer
from megatron_dllm.planning import report
from megatron_dllm.planning.hardware import GPUS, Gpu
from megatron_dllm.planning.search import Plan, Search, default_batch

OWN = "gpus gpu gpus_per_node best json markdown document_length answer_share".split()
_WITHOUT_VALUE = {"json", "markdown"}
_DATA = {"data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "sft_data_path"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --dllm-mode MODE --model-preset NAME --gpus N [--gpu h100] [flags of pretrain_dllm.py]"
    group = parser.add_argument_group("plan")
    group.add_argument("--gpus", type=int, default=None, metavar="N", help="How many GPUs there are.")
    group.add_argument("--gpu", choices=sorted(GPUS), default="h100", help="Of which kind; default h100.")
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="That NVLink connects; default 8.")
    group.add_argument("--best", type=int, default=5, metavar="N", help="How many layouts to show; default 5.")
    group.add_argument("--json", action="store_true", help="Print JSON: bytes, seconds, FLOPs.")
    group.add_argument("--markdown", action="store_true", help="Print the table of layouts alone, as Markdown.")
    group.add_argument(
        "--document-length", type=int, default=None, metavar="TOKENS", help="Of packed text; default: one a sample."
    )
    group.add_argument(
        "--answer-share", type=float, default=1.0, metavar="SHARE", help="Of a text that is supervised; default all."
    )


def plan_command(argv: list[str]) -> str:
    """What to print. Raises ValueError (one sentence)."""
    words = own_words(argv)
    given_names = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    filled = [*words, *_defaults(given_names)]
    sys.argv = [sys.argv[0], *argv, *_stand_ins(given_names), *filled[len(words) :]]
    os.environ.setdefault("RANK", "0")
    args, given = parse_command_line(add_flags)
    _check(args)
    given -= set(OWN)
    args.world_size = args.gpus
    if args.global_batch_size is None:
        if args.seq_length is None:
            raise ValueError("--seq-length is missing: how many tokens a sample has.")
        args.global_batch_size = default_batch(args.seq_length, args.gpus)
        filled += ["--global-batch-size", str(args.global_batch_size)]
    tokenizer, shell = _tokenizer(args, given_names)
    args.micro_batch_size = args.micro_batch_size or 1
    search = Search(
        args,
        given,
        tokenizer,
        GPUS[args.gpu],
        node=args.gpus_per_node,
        document=args.document_length,
        answer=args.answer_share,
    )
    plans = search.plans()
    fitting = [plan for plan in plans if search.fits(plan)]
    if not fitting:
        raise ValueError(_nothing_fits(plans, args, GPUS[args.gpu]))
    shown = []
    for plan in fitting:
        if search.confirmed(plan):
            shown.append(plan)
        if len(shown) == args.best:
            break
    if not shown:
        raise ValueError(f"Megatron refuses every layout that fits; for instance: {next(reversed(search.refusals))}")
    line = lambda plan: report.command(plan, [*filled, *shell], args.gpus, args.gpus_per_node)
    if args.json:
        return json.dumps([report.as_json(plan, GPUS[args.gpu], line(plan)) for plan in shown], indent=1)
    rows = [report.row(plan) for plan in shown]
    if args.markdown:
        return report.table(report.HEADER, rows, markdown=True)
    return _text(shown, rows, len(plans), len(fitting), line(shown[0]), bool(shell), args)


def _text(shown: list[Plan], rows: list[list[str]], tried: int, fitting: int, line: str, open_: bool, args) -> str:
    best, gpu = shown[0], GPUS[args.gpu]
    names = [word for word in ("$DATA", "$TOKENIZER") if f'"{word}"' in line]
    paragraphs = [
        report.describe_work(best),
        f"{tried:,} layouts of {args.gpus} {gpu.name} tried, {fitting:,} of them fit. The fastest, for "
        f"{args.global_batch_size} samples a step, by a roofline (docs/scaling.md says how far to trust it):",
        report.table(report.HEADER, rows),
        f"Memory of {best.name}, micro-batch {best.layout.micro_batch}, recompute {best.recompute}:",
        report.describe_memory(best, gpu),
        f"Its step: {report.describe_time(best)}.",
        "The command" + (f" (say what {' and '.join(names)} are):" if open_ and names else ":"),
        line,
    ]
    return "\n\n".join(paragraphs)


def _nothing_fits(plans: list[Plan], args, gpu: Gpu) -> str:
    closest = min(plans, key=lambda plan: plan.memory.total)
    missing = (closest.memory.total - gpu.memory) / report.GIB
    return (
        f"none of {len(plans):,} layouts fits {args.gpus} {gpu.name}: the closest, {closest.name} with --micro-batch-size "
        f"{closest.layout.micro_batch} and recompute {closest.recompute}, needs {closest.memory.total / report.GIB:.1f} "
        f"GiB a GPU, {missing:.1f} GiB too many; take more GPUs, larger ones, or a shorter --seq-length."
    )


def _check(args) -> None:
    if args.gpus is None:
        raise ValueError("--gpus is missing: how many there are to plan for.")
    for name in ("gpus", "gpus_per_node", "best"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is too small: it must be at least 1.")
    if args.gpus > args.gpus_per_node and args.gpus % args.gpus_per_node:
        raise ValueError(
            f"--gpus {args.gpus} are no whole nodes of {args.gpus_per_node}: give a multiple, or --gpus-per-node."
        )
    if args.document_length is not None and args.document_length < 1:
        raise ValueError(f"--document-length {args.document_length} is too small: it must be at least 1.")
    if not 0 < args.answer_share <= 1:
        raise ValueError(f"--answer-share {args.answer_share} is no share: give a number above 0 and at most 1.")


def own_words(argv: list[str]) -> list[str]:
    """The words of `argv` that are flags of pretrain_dllm.py."""
    words, skip = [], False
    for word in argv:
        name = word.split("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in OWN:
            skip = name not in _WITHOUT_VALUE and "=" not in word
        elif skip:
            skip = False
        else:
            words.append(word)
    return words


def _defaults(names: set[str]) -> list[str]:
    """What the printed command has beside the user's flags: the usual way to train on GPUs."""
    words = []
    if not names & {"bf16", "fp16", "fp32"}:
        words.append("--bf16")
    if not names & {"use_distributed_optimizer"}:
        words.append("--use-distributed-optimizer")
    words += [f"--{name}" for name in ("overlap-grad-reduce", "overlap-param-gather") if name.replace("-", "_") not in names]
    if not names & {"lr"}:
        words += ["--lr", "1e-4"]
    if not names & {"train_iters", "train_samples"}:
        words += ["--train-iters", "1000"]
    return words


def _stand_ins(names: set[str]) -> list[str]:
    """For the parser and the checks only."""
    return [] if names & _DATA else ["--data-path", "DATA"]


def _tokenizer(args, names: set[str]) -> tuple[Tokenizer, list[str]]:
    """The command's tokenizer, and flags with $NAMES for what it does not say."""
    shell = [] if names & _DATA else ["--data-path", "$DATA"]
    if args.tokenizer_type is not None or args.tokenizer_model is not None:
        return build_tokenizer(args), shell
    if args.vocab_size is None:
        raise ValueError("how large is the vocabulary? Give --vocab-size, a tokenizer, or a model that has one.")
    shell += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "$TOKENIZER"]
    stand_in = ByteLevel()
    if args.vocab_size < stand_in.vocab_size:
        stand_in.vocab_size = args.vocab_size
    return copy.copy(stand_in), shell
