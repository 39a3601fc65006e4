"""Quantizes a trained diffusion language model with NVIDIA ModelOpt, calibrated on noised samples as in training.

    python tools/quantize.py --load checkpoints/run --qformat fp8 --calib-data chat.jsonl --save quantized
    python tools/quantize.py --hf-model DIR --dllm-mode mdlm --qformat int4_awq --calib-data data/text_document \\
        --save quantized

Writes a Hugging Face folder with scales and quantization_config, and prints the loss by noise level, before and after,
on samples that calibration has not seen. Embedding, head, norms and routers keep their precision. Runs on one process,
on a GPU if there is one, else on the CPU. Needs the extra: pip install -e '.[quantize]'. See docs/quantization.md.
"""

import argparse
import os
import shutil
import sys
import time

import megatron_dllm  # noqa: F401  (installs the CPU backend where there is no GPU; before any megatron)
from megatron_dllm.arguments import fail
from megatron_dllm.conversion.defaults import has_tokenizer
from megatron_dllm.launch import quiet, with_hyphens
from megatron_dllm.models.hf import begin_part, check_new_folder, finish_part
from megatron_dllm.modes import MODES
from megatron_dllm.quantization import FORMATS, check_machine, check_shape

_DTYPES = ("float32", "bfloat16", "float16")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("model").add_argument
    add("--load", metavar="RUN", help="a run's folder, or an iteration's")
    add("--ckpt-step", type=int, metavar="N", help="iteration of --load; default: the latest")
    add("--hf-model", metavar="DIR", help="instead, a Hugging Face folder of any family")
    add("--dllm-mode", choices=MODES, metavar="MODE", help="what the folder was trained as; default: as its family is")
    add("--dllm-block-size", type=int, metavar="N", help="of a folder trained in blocks; default: the mode's")
    add("--dllm-mask-token-id", type=int, metavar="ID", help="default: what the run or the folder says")
    add("--tokenizer-model", metavar="PATH", help="where the tokenizer is now, if not where it was at training")
    add("--chat-template", metavar="FILE", help="where the chat template is now, or another one")
    add("--trust-remote-code", action="store_true", help="run the Python code of a tokenizer that comes with some")
    add("--dtype", choices=_DTYPES, help="precision of what is not quantized; default: that of the weights")
    add = parser.add_argument_group("quantization").add_argument
    add("--qformat", required=True, choices=FORMATS,
        help="; ".join(f"{name}: {form.what}" for name, form in FORMATS.items()))  # fmt: skip
    add("--save", required=True, metavar="DIR", help="new folder")
    add = parser.add_argument_group("data").add_argument
    add("--calib-data", required=True, nargs="+", metavar="PATH", help="chat (.jsonl, .json, .parquet), or prefixes of "
        ".bin and .idx as tools/preprocess_data.py writes them")  # fmt: skip
    add("--calib-samples", type=int, default=128, metavar="N", help="that set the scales (%(default)s)")
    add("--eval-samples", type=int, default=64, metavar="N", help="others, on which the loss is measured before and "
        "after (%(default)s); 0: none")  # fmt: skip
    add("--seq-length", type=int, metavar="S", help="tokens of a sample at most; default: the run's, of a folder what "
        "it can, but 2048 at most")  # fmt: skip
    add("--batch-size", type=int, default=4, metavar="N", help="samples of one length at a time (%(default)s)")
    add("--seed", type=int, default=1234, help="of the order of the samples (%(default)s)")
    return parser.parse_args([with_hyphens(word) for word in argv])


def check_options(options: argparse.Namespace) -> None:
    """ValueError for values that mean nothing."""
    least = dict(calib_samples=1, eval_samples=0, seq_length=1, batch_size=1, seed=0)
    for name, value in ((name, getattr(options, name)) for name in least):
        if value is not None and value < least[name]:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give at least {least[name]}.")
    if options.dllm_mode == "dflash":
        raise ValueError("--dllm-mode dflash is of drafts, and only whole models are quantized: give one and its mode.")
    check_new_folder(options.save)


def prepare(options: argparse.Namespace):
    """(source, its arguments with the data's, batches of calibration, and of evaluation). Raises ValueError for all
    that can be wrong."""
    from megatron_dllm.quantization.batches import corrupted_batches, data_arguments, open_samples
    from megatron_dllm.quantization.source import plan

    check_options(options)
    check_machine(options.qformat)
    source = plan(
        options.load,
        options.hf_model,
        step=options.ckpt_step,
        mode=options.dllm_mode,
        block_size=options.dllm_block_size,
        mask_token_id=options.dllm_mask_token_id,
        tokenizer_model=options.tokenizer_model,
        chat_template=options.chat_template,
        trust_remote_code=options.trust_remote_code,
    )
    check_shape(options.qformat, source.args)
    args = data_arguments(source.args, options.calib_data, options.seq_length, options.seed)
    needed = options.calib_samples + options.eval_samples
    samples = open_samples(args, source.tokenizer, needed)
    split = (range(options.calib_samples), range(options.calib_samples, needed))
    calibration, evaluation = (corrupted_batches(samples, indices, options.batch_size, args) for indices in split)
    if evaluation and not any(len(term.rows_N) for batch in evaluation for term in batch.terms.values()):
        raise ValueError(
            f"nothing of the {options.eval_samples} samples that the loss would be measured on is noised: give more "
            "--eval-samples, or longer ones."
        )
    return source, args, calibration, evaluation


def run(options: argparse.Namespace, source, args, calibration: list, evaluation: list) -> None:
    """Quantize, measure and write. If it fails nothing is left, and of a process that is killed a .part folder."""
    import torch

    from megatron_dllm.quantization import folder
    from megatron_dllm.quantization.quality import measure
    from megatron_dllm.quantization.source import build, stock_folder

    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    part = begin_part(os.path.normpath(options.save))
    try:
        with quiet():
            stock = stock_folder(source, os.path.join(part, "work"))
            dtype = None if options.dtype is None else getattr(torch, options.dtype)
            model = build(source, stock, dtype, device)
        size = sum(weight.numel() for weight in model.parameters())
        tokens = sum(int(batch.tokens["data"]) for batch in calibration)
        print(
            f"{source.name}: {size / 1e6:.1f} M weights ({str(model.dtype).removeprefix('torch.')}) in transformers' "
            f"{type(model).__name__}, trained as {args.dllm_mode}.\n"
            f"Calibration of {options.qformat} on {options.calib_samples} samples, {tokens} tokens, on the "
            f"{device.type.replace('cuda', 'gpu').upper()}.",
            flush=True,
        )
        with quiet():
            before = measure(model, evaluation, args)
            folder.quantize(model, options.qformat, calibration, args)
            after = measure(model, evaluation, args)
        check_loss(before.loss, after.loss, source.name)
        with quiet():
            folder.export(model, stock, part, args)
        written = folder.look(part)
        shutil.rmtree(os.path.join(part, "work"), ignore_errors=True)
        finish_part(os.path.normpath(options.save))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if evaluation:
        samples = "another sample" if options.eval_samples == 1 else f"{options.eval_samples} other samples"
        print(f"\nLoss on {samples}, nats per token:\n{table(before, after)}\n")
    report(written, options.save, time.perf_counter() - began)
    if not has_tokenizer(options.save):
        print(f"It holds no tokenizer: transformers has no form for this one ({args.tokenizer_type}).")


def check_loss(before: float, after: float, name: str) -> None:
    import math

    for when, loss in (("before", before), ("after", after)):
        if not math.isfinite(loss):
            raise ValueError(f"the loss of {name} {when} quantization is {loss}: look at its weights, or at the data.")


def table(before, after) -> str:
    """Lines: the loss by noise level, each term, and the weighted sum of these."""
    rows = [
        (f"t {level}", tokens, old, new)
        for (level, tokens, old), (_, _, new) in zip(before.by_level(), after.by_level(), strict=True)
    ]
    if len(before.terms) > 1:
        rows += [(f"{name} term", "", value, after.terms[name]) for name, value in before.terms.items()]
    rows += [("loss", "", before.loss, after.loss)]
    lines = [f"{'noise level':16}{'tokens':>9}{'before':>11}{'after':>11}{'after/before':>14}"]
    for name, tokens, old, new in rows:
        ratio = f"{new / old:14.4f}" if old else ""
        lines.append(f"{name:16}{tokens:>9}{old:11.5f}{new:11.5f}{ratio}")
    return "\n".join(lines)


def report(written, save: str, seconds: float) -> None:
    kept = sorted({name.split(".")[-2] for name in written.kept})
    total = len(written.quantized) + len(written.kept)
    print(
        f"{save}: {len(written.quantized)} of {total} weight matrices quantized, as they were: {', '.join(kept)}; "
        f"{written.bytes / 1e9:.3f} GB, {seconds:.0f} s."
    )


def main() -> None:
    options = parse_args(sys.argv[1:])
    try:
        with quiet():
            prepared = prepare(options)
        run(options, *prepared)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
