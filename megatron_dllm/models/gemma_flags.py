"""What can be wrong with flags that describe the network of gemma.py (see validation.py)."""

import math

from megatron_dllm.models.weights import is_gemma

_SHAPE = (
    "dllm_full_attention_layers dllm_window dllm_full_kv_channels dllm_full_query_groups dllm_full_rotary_base "
    "dllm_full_rotary_percent dllm_logit_softcap"
).split()
_MODE = "block_diffusion"
_RECOMPUTED = {"core_attn", "moe"}  # parts of a layer that can be recomputed alone


def check_gemma(args, given: set[str]) -> None:
    """ValueError (one sentence). `given`: the flags on the command line."""
    flag = lambda dest: "--" + dest.replace("_", "-")
    if not is_gemma(args):
        for dest in (*_SHAPE, "dllm_train_router"):
            if dest in given:
                raise ValueError(f"{flag(dest)} belongs to --dllm-architecture diffusion_gemma: remove it.")
        return
    if args.dllm_mode != _MODE:
        raise ValueError(f"a diffusion_gemma model has an encoder and canvases: use --dllm-mode {_MODE}.")
    for dest in (*_SHAPE, "num_experts"):
        if getattr(args, dest) is None:
            raise ValueError(
                f"--dllm-architecture diffusion_gemma needs {flag(dest)}: give it, or take all of the shape from "
                "--model-preset or --hf-model."
            )
    _check_numbers(args, flag)
    if not args.qk_layernorm or args.untie_embeddings_and_output_weights or not args.swiglu:
        raise ValueError(
            "the network of diffusion_gemma has --qk-layernorm, --tie-embeddings-and-output-weights and gated MLPs: "
            "take its shape from --model-preset or --hf-model."
        )
    if isinstance(args.moe_layer_freq, list) or args.moe_layer_freq != 1:
        raise ValueError("every layer of diffusion_gemma has experts: leave out --moe-layer-freq.")
    if args.moe_grouped_gemm:
        raise ValueError("--moe-grouped-gemm takes Transformer Engine's experts, not diffusion_gemma's: remove it.")
    if args.moe_aux_loss_coeff and any(_numbers(args.moe_aux_loss_coeff)):
        raise ValueError("experts of diffusion_gemma are not balanced by a loss: leave out --moe-aux-loss-coeff.")
    if args.hidden_dropout:
        raise ValueError("the layers of diffusion_gemma have no --hidden-dropout: give 0.")
    if args.moe_expert_capacity_factor is not None:
        raise ValueError("--moe-expert-capacity-factor drops tokens, and by other layouts others: remove it.")
    _check_recomputation(args)
    groups, tp, cp = args.dllm_full_query_groups, args.tensor_model_parallel_size, args.context_parallel_size
    if max(groups, tp) % min(groups, tp):
        raise ValueError(f"--dllm-full-query-groups {groups} and TP {tp}: one must be a multiple of the other.")
    if cp > 1 and "a2a" in args.cp_comm_type and max(1, groups // tp) % cp:
        raise ValueError(
            f"--cp-comm-type a2a exchanges heads: {groups} key/value heads of full layers over TP {tp} are not shared "
            f"out by CP {cp}; use --cp-comm-type all_gather."
        )


def _check_numbers(args, flag) -> None:
    wrong = [layer for layer in args.dllm_full_attention_layers if not 0 <= layer < args.num_layers]
    if wrong or len(set(args.dllm_full_attention_layers)) != len(args.dllm_full_attention_layers):
        raise ValueError(
            f"--dllm-full-attention-layers {' '.join(map(str, args.dllm_full_attention_layers))}: name each layer "
            f"once, from 0 to {args.num_layers - 1}."
        )
    for dest in _SHAPE[1:]:
        if not 0 < getattr(args, dest) < math.inf:
            raise ValueError(f"{flag(dest)} {getattr(args, dest)} is out of range: give a positive number.")
    if args.dllm_full_kv_channels % 2 or args.kv_channels % 2:
        raise ValueError("heads are rotated in halves: give even --kv-channels and --dllm-full-kv-channels.")
    if args.dllm_full_rotary_percent > 1:
        raise ValueError(f"--dllm-full-rotary-percent {args.dllm_full_rotary_percent}: give at most 1.")
    if args.num_attention_heads % args.dllm_full_query_groups:
        raise ValueError(
            f"--dllm-full-query-groups {args.dllm_full_query_groups} does not divide --num-attention-heads "
            f"{args.num_attention_heads}."
        )
    if args.rotary_percent != 1.0 or args.dllm_rope_scaling is not None:
        raise ValueError(
            "sliding layers of diffusion_gemma rotate whole heads, unscaled: leave out --rotary-percent and "
            "--dllm-rope-scaling."
        )


def _check_recomputation(args) -> None:
    if args.recompute_granularity != "selective":
        return
    parts = set(args.recompute_modules or ["core_attn"])
    if other := sorted(parts - _RECOMPUTED):
        raise ValueError(
            f"--recompute-modules {' '.join(other)} cannot be recomputed alone in diffusion_gemma: give "
            f"{' '.join(sorted(_RECOMPUTED))}, or --recompute-granularity full."
        )


def _numbers(value) -> list[float]:
    return list(value) if isinstance(value, list | tuple) else [value]
