"""Post-training quantization of trained models with NVIDIA ModelOpt (tools/quantize.py, docs/quantization.md).

The number formats, and what each asks for. Nothing here imports ModelOpt.
"""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_dllm.models.weights import expert_layers

_PACKAGES = ("modelopt", "requests")  # ModelOpt imports the second without asking for it


@dataclass(frozen=True)
class Format:
    """config: name of ModelOpt's configuration. block: values that share a scale along a matrix's input; a matrix holds
    whole ones. needs_gpu: ModelOpt computes it in CUDA kernels alone. experts: it can write mixtures of experts in it.
    what: in words."""

    config: str
    what: str
    block: int = 1
    needs_gpu: bool = False
    experts: bool = True


FORMATS = {
    "fp8": Format("FP8_DEFAULT_CFG", "weights and activations in FP8 (E4M3), one scale a tensor"),
    "int8": Format("INT8_DEFAULT_CFG", "weights in INT8, one scale a row; activations in INT8, one scale a tensor"),
    "int4_awq": Format("INT4_AWQ_CFG", "weights in INT4 by AWQ, one scale for 128 values", block=128, experts=False),
    "nvfp4": Format(
        "NVFP4_DEFAULT_CFG", "weights and activations in NVFP4, one scale for 16", block=16, needs_gpu=True
    ),
}


def check_machine(qformat: str) -> None:
    """ValueError if ModelOpt is missing, or the format needs a GPU and there is none."""
    if FORMATS[qformat].needs_gpu and not torch.cuda.is_available():
        can = ", ".join(name for name, form in FORMATS.items() if not form.needs_gpu)
        raise ValueError(
            f"--qformat {qformat} needs a GPU, as ModelOpt computes it in CUDA kernels, and there is none: use a "
            f"machine with one, or {can}."
        )
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{missing[0]} is not installed, which quantization needs: pip install -e '.[quantize]'.")


def check_shape(qformat: str, args: Namespace) -> None:
    """ValueError for experts that ModelOpt cannot write, and unless the inputs of all matrices are whole blocks."""
    block = FORMATS[qformat].block
    if args.num_experts is not None and not FORMATS[qformat].experts:
        can = ", ".join(name for name, form in FORMATS.items() if form.experts)
        raise ValueError(f"ModelOpt cannot write experts with --qformat {qformat}: choose one of {can}.")
    heads = args.num_attention_heads * (args.kv_channels or args.hidden_size // args.num_attention_heads)
    widths = {"--hidden-size": args.hidden_size, "the width of all heads": heads}
    if not all(expert_layers(args)):
        widths["--ffn-hidden-size"] = args.ffn_hidden_size
    if args.num_experts is not None:
        widths["--moe-ffn-hidden-size"] = args.moe_ffn_hidden_size
        widths["--moe-shared-expert-intermediate-size"] = args.moe_shared_expert_intermediate_size
    for name, width in widths.items():
        if width is not None and width % block:
            raise ValueError(
                f"--qformat {qformat} has one scale for {block} inputs of a matrix, and {name} is {width}, no multiple "
                "of that: choose another format."
            )
