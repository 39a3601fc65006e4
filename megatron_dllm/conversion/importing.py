"""A Hugging Face folder becomes a Megatron checkpoint, streamed: memory holds one tensor at a time."""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass

import torch

from megatron_dllm.checkpoint import RELEASE, TRACKER
from megatron_dllm.conversion.defaults import folder_defaults, has_tokenizer
from megatron_dllm.conversion.source import Source, family_of
from megatron_dllm.data.tokenizer import NULL
from megatron_dllm.models.family import Family
from megatron_dllm.models.hf import begin_part, check_new_folder, finish_part, read_config
from megatron_dllm.models.rope import last_position

_PRECISIONS = {torch.float32: [], torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}


@dataclass
class Import:
    """A folder that has been looked at. args: what the checkpoint will say about itself."""

    source: Source
    family: Family
    args: Namespace


def plan(
    path: str,
    family: str = "auto",
    mode: str | None = None,
    mask_token_id: int | None = None,
    trust_remote_code: bool = False,
    tokenizer_type: str | None = None,
    tokenizer_model: str | None = None,
) -> Import:
    """Everything that can be wrong with a folder, found before anything is written. Raises ValueError (one sentence).

    mode, mask_token_id: for which objective, default the family's usual one (of a draft none is given).
    trust_remote_code: the tokenizer may be Python code in the folder. tokenizer_type, tokenizer_model: for a folder
    without a tokenizer (Megatron's flags); a draft needs none.
    """
    from megatron_dllm.arguments import read_command_line

    config = read_config(path)
    chosen = family_of(config, family)
    if chosen.draft and mode is not None:
        raise ValueError(f"{path} is a draft, which is always used with its target: leave out --dllm-mode.")
    mode = mode or chosen.mode or "mdlm"
    defaults = folder_defaults(path, chosen)
    source = Source(path, chosen, Namespace(**defaults))
    longest = defaults["max_position_embeddings"]
    length = min(longest, last_position(defaults["dllm_rope_scaling"]) or longest)
    argv = ["--dllm-mode", mode, "--hf-model", path, "--dllm-family", chosen.name, "--seq-length", str(length)]
    argv += "--micro-batch-size 1 --lr 0 --train-iters 1 --sft-data-path none".split()
    argv += _PRECISIONS[source.dtype(next(iter(source.mapping.megatron)))]  # the embedding, or what a draft has for it
    if chosen.draft and not has_tokenizer(path) and tokenizer_type is None:
        tokenizer_type = NULL  # its ids are its target's
        if isinstance(config.get("eos_token_id"), int):
            argv += ["--null-tokenizer-eod-id", str(config["eos_token_id"])]
    given = {
        "--dllm-mask-token-id": mask_token_id,
        "--tokenizer-type": tokenizer_type,
        "--tokenizer-model": tokenizer_model,
    }
    argv += [str(word) for flag, value in given.items() if value is not None for word in (flag, value)]
    if trust_remote_code:
        argv += ["--trust-remote-code"]
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        args, tokenizer = read_command_line()
    finally:
        sys.argv = before
    args.sft_data_path = [] if tokenizer.chat_template else None  # how it wants to be asked
    args.no_save_optim, args.no_save_rng = True, True
    return Import(source, chosen, args)


def run(planned: Import, save: str, progress: Callable = lambda items: items) -> dict:
    """Write the new folder `save`, a run's: `save`/release and the tracker file that names it. progress: wraps the list
    of weights (tqdm).

    Returns {"tensors": ..., "bytes": ...}. The folder appears under a temporary name; nothing is left if it fails.
    """
    from megatron_dllm.conversion import torch_dist
    from megatron_dllm.conversion.skeleton import content_metadata, skeleton

    source, args = planned.source, planned.args
    check_new_folder(save, source.nbytes)
    model = skeleton(args)
    metadata = content_metadata()
    pieces, objects = torch_dist.pieces(model, metadata)
    written = dict(tensors=0, bytes=0)
    ticks = iter(progress(pieces))

    def read(piece: torch_dist.Piece) -> torch.Tensor:
        next(ticks)
        rows = source.read(piece.name, piece.start, piece.start + piece.rows)
        written["tensors"] += 1
        written["bytes"] += rows.nbytes
        return rows

    metadata.pop("dp_cp_group")
    common = dict(args=args, checkpoint_version=3.0, iteration=0, content_metadata=metadata)
    save = os.path.normpath(save)
    part = begin_part(save)
    try:
        os.mkdir(os.path.join(part, RELEASE))
        with redirect_stdout(sys.stderr):
            torch_dist.write(os.path.join(part, RELEASE), pieces, objects, source.dtype, read, common)
        list(ticks)  # lets a progress bar end
        with open(os.path.join(part, TRACKER), "w") as file:
            file.write(RELEASE)
        finish_part(save)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return written
