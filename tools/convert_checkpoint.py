"""Converts between Hugging Face folders and Megatron checkpoints, tensor by tensor.

    python tools/convert_checkpoint.py import --hf-model DIR --save RUN
    python tools/convert_checkpoint.py export --load RUN --save DIR [--hf-model REFERENCE] [--export-as transformers]
    python tools/convert_checkpoint.py check --hf-model DIR --load RUN

An imported run loads in every layout: pretrain_dllm.py --load RUN --hf-model DIR. A checkpoint saved in any layout is
exported. Runs on the CPU of one process; docs/checkpoints.md lists the families.
"""

import argparse
import math
import os
import re
import sys
import time

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # weights go from file to file

import megatron_dllm  # noqa: F401  (installs the CPU backend; before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.launch import quiet
from megatron_dllm.models import FAMILIES
from megatron_dllm.models.hf import check_new_folder
from megatron_dllm.models.weights import is_gemma

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPES = ("float32", "bfloat16", "float16")


def shard_size(text: str) -> int:
    """Bytes of "5GB" and the like."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2] or "B"]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it like 5GB or 500MB.")
    return size


def tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance: give a number from 0 to 1.")
    return value


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{import,export,check}")
    command = lambda name, text: commands.add_parser(name, help=text, description=text, allow_abbrev=False).add_argument
    add = command("import", "Hugging Face folder -> Megatron checkpoint")
    add("--hf-model", required=True, metavar="DIR", help="folder with config.json and safetensors")
    add("--save", required=True, metavar="RUN", help="new folder for the checkpoint")
    add("--family", default="auto", choices=("auto", *FAMILIES), help="default: what config.json says")
    add("--dllm-mode", metavar="MODE", help="objective it was or will be trained with; default: the family's")
    add("--dllm-mask-token-id", type=int, metavar="ID", help="default: what the folder or the family says")
    add("--tokenizer-type", metavar="TYPE", help="for a folder without a tokenizer; default: the folder's own")
    add("--tokenizer-model", metavar="PATH", help="with --tokenizer-type")
    add("--trust-remote-code", action="store_true", help="run the folder's own Python code for its tokenizer")
    add = command("export", "Megatron checkpoint, saved in any layout -> Hugging Face folder")
    add("--load", required=True, metavar="RUN", help="a run's folder, or an iteration's")
    add("--ckpt-step", type=int, metavar="N", help="iteration; default: the latest")
    add("--save", required=True, metavar="DIR", help="new folder")
    add("--hf-model", metavar="REFERENCE", help="folder whose configuration, tokenizer and code go with the weights; "
        "default: the one the run began from")
    add("--export-as", default="auto", choices=("auto", "transformers", *FAMILIES), help="form to write; transformers: "
        "one that transformers has a class for, so that no code has to come with the folder")
    add("--lora", choices=("merge", "adapter", "base"), help="of a run with adapters: merge them into the weights "
        "(default), write them alone as PEFT does, beside the weights of --hf-model, or write the weights without them")
    add("--dtype", choices=_DTYPES, help="precision to write; default: as saved")
    add("--max-shard-size", type=shard_size, default="5GB", metavar="SIZE", help="default %(default)s")
    add = command("check", "Compare the logits (a draft's hidden states) of folder and checkpoint on a text, in fp32")
    add("--hf-model", required=True, metavar="DIR")
    add("--load", required=True, metavar="RUN")
    add("--ckpt-step", type=int, metavar="N")
    add("--trust-remote-code", action="store_true", help="run the folder's own Python code for its tokenizer")
    add("--text", default="The capital of France is Paris, and the sea is blue.", help="default: %(default)s")
    add("--tolerance", type=tolerance, default=1e-4, help="largest difference, of the largest logit (%(default)s)")
    return parser.parse_args(argv)


def show(items, unit: str):
    from tqdm import tqdm

    return tqdm(items, unit=f" {unit}", file=sys.stderr, disable=None, mininterval=0.5)


def import_folder(options: argparse.Namespace) -> None:
    from megatron_dllm.conversion import importing

    check_new_folder(options.save)
    with quiet():
        planned = importing.plan(
            options.hf_model,
            options.family,
            options.dllm_mode,
            options.dllm_mask_token_id,
            options.trust_remote_code,
            options.tokenizer_type,
            options.tokenizer_model,
        )
    start = time.perf_counter()
    with quiet():
        done = importing.run(planned, options.save, progress=lambda items: show(items, "weights"))
    args = planned.args
    mask = "" if args.dllm_mask_token_id is None else f" (mask token {args.dllm_mask_token_id})"
    ready = f"for --dllm-mode {args.dllm_mode}{mask}"
    ready += "" if is_gemma(args) else " or another"
    if planned.family.draft:
        ready = "to be checked, exported, and trained further beside its target"
    print(
        f"{options.hf_model}: a {planned.family.name} model, {len(planned.source.mapping.hf)} tensors -> "
        f"{done['tensors']} weights, {done['bytes'] / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s.\n"
        f"{options.save} is ready {ready}."
    )


def export_folder(options: argparse.Namespace) -> None:
    import torch

    from megatron_dllm.conversion import exporting
    from megatron_dllm.conversion.adapters import check_adapters_of, check_peft, write_peft
    from megatron_dllm.conversion.defaults import has_tokenizer, misread_tokenizer

    check_new_folder(options.save)
    with quiet():
        merge = options.lora in (None, "merge")
        planned = exporting.plan(options.load, options.ckpt_step, options.hf_model, options.export_as, merge)
        if options.lora is not None:
            check_adapters_of(planned)
        if options.lora == "adapter":
            check_peft(planned)
        start = time.perf_counter()
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        if options.lora == "adapter":
            done = write_peft(planned, exporting.open_checkpoint(planned), options.save, dtype)
    if options.lora == "adapter":
        print(
            f"{planned.folder}: {done['tensors']} tensors, {done['bytes'] / 1e9:.2f} GB, "
            f"{time.perf_counter() - start:.0f} s.\n{options.save} is an adapter of {planned.reference} for PEFT."
        )
        return
    with quiet():
        done = exporting.run(
            planned,
            options.save,
            options.max_shard_size,
            dtype,
            progress=lambda items: show(items, "weights"),
        )
    print(
        f"{planned.folder}: {done['tensors']} tensors, {done['bytes'] / 1e9:.2f} GB in {done['files']} file(s), "
        f"{time.perf_counter() - start:.0f} s.\n{options.save} is a {planned.family.name} folder."
    )
    if planned.family.draft:
        print("Its embedding and its head are its target's.")
        return
    if not has_tokenizer(options.save):
        print(f"It holds no tokenizer: transformers has no form for this run's ({planned.args.tokenizer_type}).")
    elif (kind := misread_tokenizer(options.save)) is not None:
        print(f"AutoTokenizer takes its tokenizer for a {kind}: load it with PreTrainedTokenizerFast.from_pretrained.")
    if planned.family.has_own_code and "auto_map" not in planned.config:
        print(
            f"It loads with this family's own modelling code only; --export-as transformers writes a "
            f"{planned.family.stock} folder instead.",
        )


def check(options: argparse.Namespace) -> None:
    from megatron_dllm.conversion import checking

    with quiet():
        result = checking.compare(
            options.hf_model, options.load, options.ckpt_step, options.text, options.trust_remote_code
        )
    for rule, difference in result.differences.items():
        print(f"{rule:12} attention: largest difference {difference:.2e} of {result.what} up to {result.largest:.1f}")
    worst = max(result.differences.values(), key=lambda x: math.inf if math.isnan(x) else x)
    if math.isnan(worst):
        raise ValueError(f"the {result.what} are not numbers: the weights of one side hold NaN or infinities.")
    if not worst <= options.tolerance * result.largest:  # not a number is not equal either
        raise ValueError(
            f"the {result.what} differ by {worst:.2e}, more than --tolerance {options.tolerance} allows: "
            f"{options.load} does not hold the weights of {options.hf_model}."
        )
    print(f"{result.tokens} tokens: equal.")


def main() -> None:
    options = parse_args(sys.argv[1:])
    commands = {"import": import_folder, "export": export_folder, "check": check}
    try:
        commands[options.command](options)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
