"""Which model is quantized: a run, or a Hugging Face folder of any family, brought into a form that transformers has a
class for, as that is what ModelOpt quantizes."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_dllm.conversion import exporting, importing
from megatron_dllm.conversion.source import family_of
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.generation import load as generation_load
from megatron_dllm.models import get_family
from megatron_dllm.models.family import Family
from megatron_dllm.models.hf import read_config
from megatron_dllm.models.weights import is_gemma, target_layers
from megatron_dllm.modes import common


@dataclass
class Source:
    """A model that has been looked at. name: what the user called it. args: what it was trained as. family: the one of
    transformers that it is written as. load, step: of a run; else hf_model."""

    name: str
    args: Namespace
    tokenizer: Tokenizer
    family: Family
    load: str | None
    step: int | None
    hf_model: str | None


def plan(
    load: str | None,
    hf_model: str | None,
    step: int | None = None,
    mode: str | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    tokenizer_model: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """Everything that can be wrong with the model, found before anything is written. Raises ValueError (one sentence).

    mode, block_size: of a folder, what it was trained as, where its family does not say it. The others are those of
    `generation.load.plan`.
    """
    if hf_model is not None and load is None:
        _check_folder(hf_model, mode)
    elif block_size is not None:
        raise ValueError("--dllm-block-size is for --hf-model, a run knows its own: leave it out.")
    planned = generation_load.plan(
        load,
        hf_model=hf_model,
        with_target=False,
        mode=mode,
        step=step,
        tokenizer_model=tokenizer_model,
        chat_template=chat_template,
        mask_token_id=mask_token_id,
        trust_remote_code=trust_remote_code,
    )
    args, name = planned.args, load or hf_model
    if target_layers(args) is not None:
        raise _draft(name)
    if is_gemma(args):
        raise ValueError(
            f"{name} is a DiffusionGemma, whose canvases transformers' class runs by masks of its own, not by ours: it "
            "cannot be quantized here."
        )
    if block_size is not None:
        if not hasattr(args, "dllm_block_size") or args.dllm_block_size is None:
            raise ValueError(f"--dllm-mode {args.dllm_mode} has no blocks: leave out --dllm-block-size.")
        args.dllm_block_size = block_size
        common.validate_blocks(args, default=block_size)
    if load is not None:
        family = exporting.plan(load, step, family="transformers").family
    else:
        family = get_family(args.dllm_family)
        family = get_family(family.stock) if family.has_own_code and family.stock else family
    if family.has_own_code:
        raise ValueError(f"transformers has no class for {family.name} models: {name} cannot be quantized.")
    return Source(name, args, planned.tokenizer, family, load, step, hf_model)


def _check_folder(path: str, mode: str | None) -> None:
    family = family_of(read_config(path))
    if family.draft:
        raise _draft(path)
    if mode is None and family.mode is None:
        raise ValueError(
            f"{path} holds a {family.name} model, which says nothing about how it was trained: say it by --dllm-mode."
        )


def _draft(name: str) -> ValueError:
    return ValueError(f"{name} is a draft, which transformers has no class for: only whole models are quantized.")


def stock_folder(source: Source, work: str) -> str:
    """A folder with the model in the form of `source.family`: its own if it is of that form, else one that is written
    into the folder `work`. Conversions are processes of their own, on the CPU. Raises ValueError if one fails."""
    folder, run = os.path.join(work, "stock"), os.path.join(work, "run")
    if source.load is not None:
        _convert("export", load=source.load, step=source.step, save=folder)
        return folder
    if get_family(source.args.dllm_family) is source.family:
        return source.hf_model
    mode, mask, trust = (getattr(source.args, x) for x in ("dllm_mode", "dllm_mask_token_id", "trust_remote_code"))
    _convert("import", hf_model=source.hf_model, mode=mode, mask_token_id=mask, trust_remote_code=trust, save=run)
    _convert("export", load=run, step=None, save=folder)
    shutil.rmtree(run)
    return folder


def _convert(verb: str, **options) -> None:
    command = [sys.executable, "-m", __name__, verb, json.dumps(options)]
    environment = os.environ | dict(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"the {verb} that comes before quantization has failed ({reason}).")


def convert(verb: str, options: dict) -> None:
    """The conversion itself, once in a process."""
    save = options.pop("save")
    if verb == "import":
        importing.run(importing.plan(options.pop("hf_model"), **options), save)
    else:
        exporting.run(exporting.plan(options["load"], options["step"], family="transformers"), save)


def build(source: Source, folder: str, dtype: torch.dtype | None, device: torch.device) -> torch.nn.Module:
    """transformers' model of a stock folder, in the precision of its weights unless a dtype is given."""
    import transformers

    family = source.family
    settings = {key: value for key, value in read_config(folder).items() if key not in ("auto_map", "model_type")}
    settings |= dict(architectures=[family.architecture], attn_implementation="sdpa")
    config = getattr(transformers, family.transformers_config)(**settings)
    load = getattr(transformers, family.architecture).from_pretrained
    model = load(folder, config=config, dtype=dtype or "auto", local_files_only=True)
    return model.to(device).eval()


if __name__ == "__main__":
    convert(sys.argv[1], json.loads(sys.argv[2]))
