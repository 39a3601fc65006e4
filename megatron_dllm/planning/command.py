"""The command line of tools/plan.py: a training command without a run.

Every flag of pretrain_dllm.py is a flag here, and means the same. What a run needs and a plan does not (data,
tokenizer, learning rate) may be left out; the printed command then has $DATA and $TOKENIZER in its place.
"""

import argparse
import contextlib
import copy
import itertools
import json
import os
import re
import sys

from megatron_dllm.arguments import parse_command_line
from megatron_dllm.data.tokenizer import ByteLevel, Tokenizer, build_tokenizer
from megatron_dllm.launch import quiet
from megatron_dllm.planning import report
from megatron_dllm.planning.hardware import GPUS, Gpu
from megatron_dllm.planning.search import Plan, Search, default_batch

OWN = "gpus gpu gpus_per_node best json markdown document_length answer_share".split()
_DATA = {"data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "sft_data_path"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --dllm-mode MODE --model-preset NAME --gpus N [--gpu h100] [flags of pretrain_dllm.py]"
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--gpus", type=int, nargs="+", default=None, metavar="N", help="How many there are; several: a scaling table."
    )
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
    helps = {"-h", "--help"} & set(argv)  # which the parser prints
    with contextlib.nullcontext() if helps else quiet():
        return _answer(argv)


def _answer(argv: list[str]) -> str:
    words = own_words(argv)
    names = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    words += _defaults(names)
    sys.argv = [sys.argv[0], *argv, *words[len(own_words(argv)) :], *([] if names & _DATA else ["--data-path", "DATA"])]
    os.environ.setdefault("RANK", "0")
    args, given = parse_command_line(add_flags)
    given -= set(OWN)
    _check(args)
    if args.global_batch_size is None:
        args.global_batch_size = default_batch(args.seq_length, args.gpus)
        words += ["--global-batch-size", str(args.global_batch_size)]
    args.micro_batch_size = args.micro_batch_size or 1
    tokenizer, open_words = _tokenizer(args, names)
    asked = Asked(args, given, tokenizer, [*words, *open_words])
    if len(args.gpus) > 1:
        return scaling(asked)
    plans, tried, fitting = asked.best(args.gpus[0], args.best)
    gpu = GPUS[args.gpu]
    if args.json:
        return json.dumps([report.as_json(plan, gpu, asked.line(plan)) for plan in plans], indent=1)
    rows = [report.row(plan) for plan in plans]
    if args.markdown:
        return report.table(report.HEADER, rows, markdown=True)
    return _text(plans, rows, tried, fitting, asked, args)


class Asked:
    """A parsed command, whose layouts can be searched for several numbers of GPUs. words: of the command to print."""

    def __init__(self, args, given: set[str], tokenizer: Tokenizer, words: list[str]):
        self.args, self.given, self.tokenizer, self.words = args, given, tokenizer, words
        self._rows: dict = {}

    def best(self, gpus: int, count: int) -> tuple[list[Plan], int, int]:
        """(the fastest plans that fit and that Megatron accepts too, how many were tried, how many fit). Raises
        ValueError (one sentence)."""
        args, gpu = copy.copy(self.args), GPUS[self.args.gpu]
        args.world_size = gpus
        search = Search(
            args,
            self.given,
            self.tokenizer,
            gpu,
            node=args.gpus_per_node,
            document=args.document_length,
            answer=args.answer_share,
            rows=self._rows,
        )
        plans = search.plans()
        fitting = [plan for plan in plans if search.fits(plan)]
        if not fitting:
            raise ValueError(_nothing_fits(plans, gpus, gpu))
        shown = list(itertools.islice((plan for plan in fitting if search.confirmed(plan)), count))
        if not shown:
            raise ValueError(f"no layout that fits passes Megatron's checks; the last: {list(search.refusals)[-1]}")
        return shown, len(plans), len(fitting)

    def line(self, plan: Plan) -> str:
        return report.command(plan, self.words, plan.layout.ranks, self.args.gpus_per_node)


def scaling(asked: Asked) -> str:
    """The fastest layout for each number of GPUs, at the same global batch. Efficiency: tokens/s of a GPU against the
    smallest number that the model fits."""
    rows, data, first = [], [], None
    for gpus in sorted(asked.args.gpus):
        try:
            plan = asked.best(gpus, 1)[0][0]
        except ValueError as error:
            rows.append([str(gpus), f"nothing fits: {_missing(error)}", *[""] * (len(report.HEADER))])
            continue
        data.append(report.as_json(plan, GPUS[asked.args.gpu], asked.line(plan)) | dict(gpus=gpus))
        each = plan.prediction.tokens_per_second / gpus
        first = first or each
        rows.append([str(gpus), *report.row(plan), f"{each / first:.0%}"])
    if asked.args.json:
        return json.dumps(data, indent=1)
    return report.table(["GPUs", *report.HEADER, "efficiency"], rows, markdown=asked.args.markdown)


def _missing(error: ValueError) -> str:
    found = re.search(r"[\d.,]+ GiB too many", str(error))
    if found is None:
        raise error
    return found.group()


def _text(plans: list[Plan], rows: list[list[str]], tried: int, fitting: int, asked: Asked, args) -> str:
    best, gpu, line = plans[0], GPUS[args.gpu], asked.line(plans[0])
    unsaid = " and ".join(word for word in ("$DATA", "$TOKENIZER") if f'"{word}"' in line)
    paragraphs = [
        report.describe_work(best),
        f"{tried:,} layouts of {args.gpus[0]} {gpu.name} tried, {fitting:,} of them fit. The fastest, for "
        f"{args.global_batch_size} samples a step, by a roofline (docs/scaling.md says how far to trust it):",
        report.table(report.HEADER, rows),
        f"Memory of {best.name}, micro-batch {best.layout.micro_batch}, recompute {best.recompute}:",
        report.describe_memory(best, gpu),
        f"Its step: {report.describe_time(best)}.",
        f"The command ({unsaid} are yours to say):" if unsaid else "The command:",
        line,
    ]
    return "\n\n".join(paragraphs)


def _nothing_fits(plans: list[Plan], gpus: int, gpu: Gpu) -> str:
    closest = min(plans, key=lambda plan: plan.memory.total)
    missing = (closest.memory.total - gpu.memory) / report.GIB
    return (
        f"none of {len(plans):,} layouts fits {gpus} {gpu.name}: the closest, {closest.name} with --micro-batch-size "
        f"{closest.layout.micro_batch} and recompute {closest.recompute}, needs "
        f"{closest.memory.total / report.GIB:.1f} GiB a GPU, {missing:.1f} GiB too many; take more GPUs, larger ones, "
        "or a shorter --seq-length."
    )


def _check(args) -> None:
    if args.gpus is None:
        raise ValueError("--gpus is missing: how many there are to plan for.")
    if args.seq_length is None:
        raise ValueError("--seq-length is missing: how many tokens a sample has.")
    for name, value in [*(("gpus", n) for n in args.gpus), ("gpus-per-node", args.gpus_per_node), ("best", args.best)]:
        if value < 1:
            raise ValueError(f"--{name} {value} is too small: it must be at least 1.")
    for gpus in args.gpus:
        if gpus > args.gpus_per_node and gpus % args.gpus_per_node:
            raise ValueError(
                f"--gpus {gpus} are no whole nodes of {args.gpus_per_node}: give a multiple, or --gpus-per-node."
            )
    if args.dllm_emulate_fp8 is not None:
        raise ValueError("--dllm-emulate-fp8 is not counted by a plan: leave it out.")
    if args.json and args.markdown:
        raise ValueError("--json and --markdown are two forms of the same: give one.")
    if args.document_length is not None and args.document_length < 1:
        raise ValueError(f"--document-length {args.document_length} is too small: it must be at least 1.")
    if not 0 < args.answer_share <= 1:
        raise ValueError(f"--answer-share {args.answer_share} is no share: give a number above 0 and at most 1.")


def own_words(argv: list[str]) -> list[str]:
    """The words of `argv` that are flags of pretrain_dllm.py, and their values."""
    words, ours = [], False
    for word in argv:
        if word.startswith("--"):
            ours = word.split("=")[0].removeprefix("--").replace("-", "_") in OWN
        if not ours:
            words.append(word)
    return words


def _defaults(names: set[str]) -> list[str]:
    """What the printed command has beside the user's flags: the usual way to train on GPUs."""
    words = []
    if not names & {"bf16", "fp16", "fp32"}:
        words.append("--bf16")
    if not names & {"use_distributed_optimizer"}:
        words.append("--use-distributed-optimizer")
    words += [
        f"--{name}" for name in ("overlap-grad-reduce", "overlap-param-gather") if name.replace("-", "_") not in names
    ]
    if not names & {"lr"}:
        words += ["--lr", "1e-4"]
    if not names & {"train_iters", "train_samples"}:
        words += ["--train-iters", "1000"]
    return words


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
