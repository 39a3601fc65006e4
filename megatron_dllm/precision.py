"""FP8: what a recipe asks of sizes and of the machine, found before anything starts.

Products in FP8 are Transformer Engine's, of the linear layers inside the transformer block and of nothing else: the
embedding, norms, attention, routers, head and cross entropy stay in the precision of the model. What is ours is that
the sizes fit (docs/fp8.md), and an emulation that trains without Transformer Engine (models/fp8_emulation.py).
"""

from argparse import Namespace

import torch

# Rows that a product in FP8 needs by recipe: tensor cores want multiples of 16, MXFP8 shares a scale among 32 of them
# (the gradient of a weight is a product along tokens), block scaling among 128.
FP8_ROWS = dict(delayed=16, tensorwise=16, mxfp8=32, blockwise=128)
EMULATED = ("tensorwise", "blockwise", "mxfp8")  # delayed scaling has a memory of earlier steps

# Flags that only mean something with --fp8-format, and of these the ones that an emulation knows.
_BF16_LAYERS = {"first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}
_OF_FP8 = _BF16_LAYERS | set(
    "fp8_recipe fp8_param_gather fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
    "moe_router_padding_for_quantization moe_router_padding_for_fp8 reuse_grad_buf_for_mxfp8_param_ag".split()
)
# GPUs by compute capability: the first that has the recipe's products, and its name.
_FIRST_GPU = dict(
    delayed=((8, 9), "Ada or Hopper"),
    tensorwise=((8, 9), "Ada or Hopper"),
    blockwise=((9, 0), "Hopper"),
    mxfp8=((10, 0), "Blackwell"),
)


def fp8_recipe(args: Namespace) -> str | None:
    """The recipe of a run in FP8, real or emulated, whose sizes must fit it; None of another."""
    emulated = getattr(args, "dllm_emulate_fp8", None)
    return emulated or (args.fp8_recipe if getattr(args, "fp8", None) else None)


def check_precision(args: Namespace, given: set[str]) -> None:
    """ValueError (one sentence). `given`: the flags on the command line."""
    if args.fp4 is not None:
        raise ValueError("--fp4-format is not supported: use --fp8-format.")
    emulated = args.dllm_emulate_fp8
    if emulated is not None and (args.fp8 is not None or args.transformer_impl != "local"):
        raise ValueError(
            "--dllm-emulate-fp8 is for layers without Transformer Engine: leave out --fp8-format, and use "
            "--transformer-impl local."
        )
    if args.fp8 is not None:
        _check_transformer_engine(args)
    elif "fp8" not in given:  # else a tool that reads a training command has dropped it
        for dest in sorted(_OF_FP8 - (_BF16_LAYERS if emulated is not None else set())):
            if dest in given:
                raise ValueError(f"--{dest.replace('_', '-')} has no effect without --fp8-format: give it too.")


def check_transformer_engine(args: Namespace) -> None:
    """ValueError (one sentence) where a run cannot have the layers that it asks for."""
    if args.transformer_impl != "transformer_engine":
        return
    if not torch.cuda.is_available():
        raise ValueError("--transformer-impl transformer_engine needs a GPU: use --transformer-impl local.")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise ValueError(
            "--transformer-impl transformer_engine needs the package transformer-engine: install megatron-dllm[te], or "
            "use --transformer-impl local."
        )
    if args.fp8 is None:
        return
    least, name = _FIRST_GPU[args.fp8_recipe]
    if torch.cuda.get_device_capability() < least:
        raise ValueError(
            f"--fp8-recipe {args.fp8_recipe} needs a GPU of the generation {name} or later, and this is a "
            f"{torch.cuda.get_device_name()}: use another recipe, or leave out --fp8-format."
        )


def _check_transformer_engine(args: Namespace) -> None:
    recipe = args.fp8_recipe
    if args.transformer_impl != "transformer_engine":
        raise ValueError(
            "--fp8-format is Transformer Engine's: use --transformer-impl transformer_engine, or without a GPU "
            "--dllm-emulate-fp8."
        )
    if recipe not in FP8_ROWS:
        raise ValueError(f"--fp8-recipe {recipe} is not supported: use one of {', '.join(FP8_ROWS)}.")
    if not args.bf16:
        raise ValueError("--fp8-format is for models in bf16: add --bf16.")
    if args.fp8_output_proj:
        raise ValueError("--fp8-output-proj cannot be used: the head stays in bf16.")
    if args.fp8_param_gather and not args.use_distributed_optimizer:
        raise ValueError("--fp8-param-gather needs --use-distributed-optimizer: add it.")
    if args.first_last_layers_bf16 and recipe == "delayed":
        raise ValueError(
            "--first-last-layers-bf16 cannot be had with --fp8-recipe delayed, whose scales are shared by all layers: "
            "use another recipe."
        )
    if recipe == "blockwise" and args.moe_grouped_gemm and not args.moe_router_padding_for_quantization:
        raise ValueError(
            "--fp8-recipe blockwise with --moe-grouped-gemm needs --moe-router-padding-for-quantization, which fills "
            "each expert's tokens up to the 128 that share a scale: add it."
        )
    if args.moe_router_padding_for_fp8:
        raise ValueError("--moe-router-padding-for-fp8 has a new name: use --moe-router-padding-for-quantization.")


def widths(args: Namespace) -> dict[str, int]:
    """What products inside a layer have for inner and outer sizes on one rank, beside rows: by how to say it."""
    from megatron_dllm.models.weights import is_gemma

    tp, ep_tp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    channels = args.kv_channels or args.hidden_size // heads
    found = {"--hidden-size": args.hidden_size}
    attentions = {"--kv-channels": (channels, groups)}
    if is_gemma(args):
        attentions["--dllm-full-kv-channels"] = args.dllm_full_kv_channels, args.dllm_full_query_groups
    for flag, (width, shared) in attentions.items():
        found[f"{flag} x heads / TP"] = heads * width // tp
        found[f"{flag} x (heads + 2 x query groups) / TP"] = (heads + 2 * shared) * width // tp
    inner = args.ffn_hidden_size
    if inner is None:  # as Megatron takes it
        inner = int(8 * args.hidden_size / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
    if args.num_experts is None or is_gemma(args) or isinstance(args.moe_layer_freq, list):
        found["--ffn-hidden-size / TP"] = inner // tp
    if args.num_experts is not None:
        found["--moe-ffn-hidden-size / expert TP"] = (args.moe_ffn_hidden_size or inner) // ep_tp
    if args.moe_shared_expert_intermediate_size is not None:
        found["--moe-shared-expert-intermediate-size / TP"] = args.moe_shared_expert_intermediate_size // tp
    return found


def check_widths(args: Namespace) -> None:
    """ValueError (one sentence) for sizes that the recipe cannot multiply. (Lengths are padded, see pad_multiple.)"""
    recipe = fp8_recipe(args)
    if recipe is None:
        return
    multiple = FP8_ROWS[recipe]
    for name, width in widths(args).items():
        if width % multiple:
            raise ValueError(
                f"FP8 with the recipe {recipe} multiplies in groups of {multiple}, and {name} is {width}: change the "
                "sizes or the layout, or take another recipe."
            )
