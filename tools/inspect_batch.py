"""Shows training samples exactly as the network sees them, from the command line that would train on them.

    python tools/inspect_batch.py --samples 2 --dllm-mode bd3lm --sft-data-path chat.jsonl \\
        --tokenizer-type ByteLevelTokenizer --seq-length 128
    python tools/inspect_batch.py --html samples.html [all flags of a training run]

Of each sample: the noise and what it did, which rows a loss term scores with what weight, documents, blocks,
positions and padding, and the attention rule as a picture; blocks beside the text (drafts, canvases) too. All flags
of pretrain_dllm.py are accepted, and only those of the mode, the data and the tokenizer are needed: the others
(model, optimizer, checkpoints, ...) have no effect here. No model is built and no other process started. Of parallel
sizes only what they do to lengths is looked at. A sample is padded with its neighbours of the micro-batch: give
--micro-batch-size as in training. Without --global-batch-size, WORLD_SIZE processes are assumed, or one data-parallel
rank; it matters for a schedule of block sizes, and for where an evaluation begins anew.
"""

import argparse
import os
import sys

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.display import check_writable, say, whole_file
from megatron_dllm.inspection import page, text
from megatron_dllm.inspection.command import read_data_flags
from megatron_dllm.inspection.samples import Inspector


def add_flags(parser: argparse.ArgumentParser, group) -> None:
    parser.usage = "%(prog)s --dllm-mode MODE [what to show] [flags of pretrain_dllm.py]"
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = group.add_argument
    add("--samples", type=int, default=3, metavar="N", help="how many samples; default 3")
    add("--first", type=int, default=0, metavar="INDEX", help="global index of the first one; default 0")
    add("--validation", action="store_true", help="what is evaluated on, not what is trained on")
    add("--tokens", type=int, default=48, metavar="N", help="places in the table and the picture; default 48")
    add("--first-token", type=int, default=0, metavar="PLACE", help="the first of these places; default 0")
    add("--html", default=None, metavar="FILE", help="write a page instead of text")


def check(args) -> None:
    for name, least in dict(samples=1, first=0, tokens=1, first_token=0).items():
        if getattr(args, name) < least:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {getattr(args, name)} is too small: it must be at least {least}.")
    if args.html is not None:
        check_writable("--html", args.html)


def show(content: str) -> None:
    """On stdout, in ASCII where it holds no more."""
    try:
        text.LEGEND.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        content = content.translate(text.ASCII).encode("ascii", "backslashreplace").decode()
    say(content, sys.stdout)


def main() -> None:
    if os.environ.get("RANK", "0") != "0":  # started by torchrun, as training is: one process is enough
        return
    try:
        args, tokenizer = read_data_flags(add_flags)
        check(args)
        inspector = Inspector(args, tokenizer, args.validation)
        found = [inspector(index) for index in range(args.first, args.first + args.samples)]
        places = range(args.first_token, args.first_token + args.tokens)
        if args.html is not None:
            with whole_file(args.html) as file:
                file.write(page.render(inspector, found, places))
            print(f"{args.html}: {len(found)} sample(s)")
            return
    except (ValueError, OSError) as error:
        fail(error)
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    paint = text.coloured if colours else text.plain
    show(
        "\n".join(
            [
                text.LEGEND,
                *(f"note: {note}" for note in inspector.notes),
                "",
                *(text.render(inspector, seen, places, paint) for seen in found),
            ]
        )
    )


if __name__ == "__main__":
    main()
