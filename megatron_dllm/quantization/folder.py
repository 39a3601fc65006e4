"""Quantizing a transformers model with ModelOpt, and the folder that holds the result."""

import copy
import json
import os
import shutil
import warnings
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from safetensors import safe_open

from megatron_dllm.conversion.exporting import copy_tokenizer
from megatron_dllm.modes import get_mode
from megatron_dllm.parallel import RankBatch
from megatron_dllm.quantization import FORMATS
from megatron_dllm.quantization.quality import hidden_states, rule_of

_STORED = {"F8_E4M3", "I8", "U8"}  # how quantized matrices lie in safetensors; INT4 and NVFP4 two to a byte


def quantize(model: torch.nn.Module, qformat: str, batches: Iterable[RankBatch], args: Namespace) -> None:
    """Quantize in place: from now on the model computes with rounded values, as what is exported will.

    batches: read once or, by AWQ, several times. args: whose mode says who sees whom.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    rule, batches = rule_of(args), list(batches)

    def calibrate(model: torch.nn.Module) -> None:
        for batch in batches:
            hidden_states(model, batch.to(model.device), rule)

    with torch.no_grad():
        mtq.quantize(model, copy.deepcopy(getattr(mtq, FORMATS[qformat].config)), calibrate)
        # The export gives matrices that share an input (query, key and value; gate and up) one scale. Done now, and
        # again by the export without an effect, it is in the measured quality: with AWQ it changes it.
        requantize_resmooth_fused_llm_layers(model)


def export(model: torch.nn.Module, source: str, folder: str, args: Namespace) -> None:
    """Write a quantized model into the empty `folder`, with the tokenizer and generation_config.json of `source`."""
    from modelopt.torch.export import export_hf_checkpoint

    if args.dllm_mask_token_id is not None:
        model.config.mask_token_id = args.dllm_mask_token_id
    if get_mode(args.dllm_mode).FULL_WITHIN_DOCUMENT:
        model.config.is_causal = False
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        export_hf_checkpoint(model, export_dir=folder)
    for warning in caught:
        if "skipped" in str(warning.message):  # names of tensors that would not be those of the family
            raise ValueError(f"ModelOpt could not export this model ({warning.message}).")
    copy_tokenizer(source, folder)
    if os.path.isfile(path := os.path.join(source, "generation_config.json")):
        shutil.copy(path, os.path.join(folder, "generation_config.json"))


@dataclass
class Written:
    """What is in a folder: names of its quantized matrices, and of those that are not; bytes of all weights."""

    quantized: list[str]
    kept: list[str]
    bytes: int


def look(folder: str) -> Written:
    """Read the headers of a quantized folder. Raises ValueError if nothing in it is quantized."""
    written = Written([], [], 0)
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        written.bytes += os.path.getsize(os.path.join(folder, name))
        with safe_open(os.path.join(folder, name), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                view = file.get_slice(key)
                if key.endswith("weight") and len(view.get_shape()) > 1:
                    (written.quantized if view.get_dtype() in _STORED else written.kept).append(key)
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        says = json.load(file).get("quantization_config")
    if not written.quantized or not says:
        raise ValueError("ModelOpt has quantized nothing of this model: its layers are not ones that it knows.")
    return written
