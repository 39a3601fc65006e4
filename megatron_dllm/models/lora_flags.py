"""The flags of LoRA (lora.py), and what can be wrong with them."""

import argparse
import os
import sys

from megatron_dllm.models.lora import ALL, available, rank_of, read_targets

_FLAGS = ("lora_alpha", "lora_dropout", "lora_targets")


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRA: train adapters beside frozen weights (docs/lora.md)")
    group.add_argument("--lora-rank", type=int, default=None, metavar="R", help="Default: no adapters, train all.")
    group.add_argument(
        "--lora-alpha",
        type=float,
        default=None,
        metavar="ALPHA",
        help="An adapter's output is multiplied by ALPHA / R; default: R.",
    )
    group.add_argument("--lora-dropout", type=float, default=0.0, metavar="P", help="Of an adapter's input.")
    group.add_argument(
        "--lora-targets",
        nargs="+",
        default=[ALL],
        metavar="NAME",
        help="Layers with adapters, in PEFT's words (q_proj,v_proj) or Megatron's (linear_qkv); default: "
        f"{ALL}, which is all of attention and of the MLPs, each expert's too, but no router.",
    )


def check_lora(args, given: set[str]) -> None:
    """ValueError (one sentence); `lora_targets` become PEFT's words. `given`: the flags on the command line."""
    flag = lambda dest: "--" + dest.replace("_", "-")
    if args.lora_rank is None:
        if without := sorted(given.intersection(_FLAGS)):
            raise ValueError(f"{flag(without[0])} has no effect without --lora-rank: give both.")
        return
    args.lora_alpha = float(args.lora_rank) if args.lora_alpha is None else args.lora_alpha
    if args.lora_rank < 1:
        raise ValueError(f"--lora-rank {args.lora_rank} is too small: it must be at least 1.")
    if not args.lora_alpha > 0:
        raise ValueError(f"--lora-alpha {args.lora_alpha} must be greater than 0.")
    if not 0 <= args.lora_dropout < 1:
        raise ValueError(f"--lora-dropout {args.lora_dropout} must be at least 0 and less than 1.")
    if args.dllm_mode == "dflash":
        raise ValueError("--lora-rank is for whole models, a draft is small enough to be trained itself: remove it.")
    if args.lora_rank > args.hidden_size:
        raise ValueError(f"--lora-rank {args.lora_rank} is more than --hidden-size {args.hidden_size}: give less.")
    if args.fp8_param_gather:
        raise ValueError("--fp8-param-gather is for weights that are trained, and --lora-rank freezes them: remove it.")
    if args.use_transformer_engine_op_fuser:
        raise ValueError("--use-transformer-engine-op-fuser leaves no layers to adapt by --lora-rank: remove it.")
    if args.dllm_train_router:
        raise ValueError("--dllm-train-router trains a part of the weights that --lora-rank freezes: remove one.")
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate:
        raise ValueError(
            "--moe-router-bias-update-rate changes a part of the weights that --lora-rank freezes: set it to 0."
        )
    if not args.init_from_hf and args.load is None and os.environ.get("RANK", "0") == "0":
        print(
            "Note: the weights that --lora-rank freezes are drawn at random here; to adapt a trained model give "
            "--init-from-hf, or --load (with --finetune, if it was trained without adapters).",
            file=sys.stderr,
        )
    args.lora_targets = read_targets(args.lora_targets, args)
    tp = args.tensor_model_parallel_size
    of_experts = args.num_experts is not None and set(args.lora_targets) & {"gate_proj", "up_proj", "down_proj"}
    if of_experts and args.moe_grouped_gemm and args.transformer_impl == "transformer_engine":
        raise ValueError(
            "--moe-grouped-gemm makes all experts one layer, which has no adapters: remove it, or leave MLPs out of "
            "--lora-targets."
        )
    if args.lora_dropout and of_experts and (args.expert_tensor_parallel_size or tp) > 1:
        raise ValueError(
            "--lora-dropout on experts that are cut over ranks would drop other inputs on each: use "
            "--expert-tensor-parallel-size 1, or --lora-dropout 0."
        )


def described(args) -> str:
    """The flags that a run's adapters were made with; "" if it has none."""
    if rank_of(args) is None:
        return ""
    every = [part for parts in available(args).values() for part in parts]
    targets = ALL if args.lora_targets == every else ",".join(args.lora_targets)
    return f"--lora-rank {args.lora_rank} --lora-alpha {args.lora_alpha:g} --lora-targets {targets}"


def check_adapters(args, saved, folder: str) -> None:
    """ValueError (one sentence) unless the adapters of a checkpoint are this run's. Sets `lora_anew` if it has none and
    this run puts some on its weights."""
    theirs, ours = described(saved), described(args)
    args.lora_anew = False
    if theirs == ours:
        return
    if not theirs:
        if not args.finetune:
            raise ValueError(
                f"{folder} was trained without adapters: give --finetune to begin --lora-rank {args.lora_rank} on its "
                "weights, or remove the flag."
            )
        args.lora_anew = True
        return
    if not ours:
        raise ValueError(
            f"{folder} holds adapters beside its weights: give {theirs} to train them on, or export the run, which "
            "merges them, and start from that folder."
        )
    raise ValueError(f"{folder} holds adapters of {theirs}, and this run has {ours}: use the same.")
