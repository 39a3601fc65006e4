"""What can be wrong with a command, found before any process group, data set or model exists.

Every check raises ValueError with one sentence that says what to do.
"""

import argparse
import functools
import math
from types import ModuleType

import torch

from megatron_dllm.display import can_hold_files
from megatron_dllm.modes import MODES
from megatron_dllm.parallel import pad_multiple
from megatron_dllm.precision import fp8_recipe

# Flags that mean something with one kind of data only.
_CHAT_ONLY = [
    "sft_valid_data_path",
    "sft_last_turn_only",
    "chat_template",
    "dllm_padding",
    "dllm_pad_block_size",
    "pad_seq_len_divisible",
]
_TEXT_ONLY = ["dllm_cross_document_attention", "train_data_path", "valid_data_path", "test_data_path"]

# Megatron flags that have no effect here, or not the one their name promises: refused rather than ignored.
_REFUSED = {
    "rampup_batch_size": "megatron-core 0.19.2 accepts and ignores it; use --step-batch-size-schedule.",
    "calculate_per_token_loss": "losses are already divided by global token counts, exactly.",
    "sft": "Megatron's causal fine-tuning; use --sft-data-path.",
    "mock_data": "use --data-path or --sft-data-path (examples/python_docs_corpus.py writes real text).",
    "reset_position_ids": "positions restart with every document by default (--dllm-cross-document-attention).",
    "reset_attention_mask": "documents never see each other by default (--dllm-cross-document-attention).",
    "eod_mask_loss": "the end-of-document token is a token like any other here.",
    "full_validation": "set --eval-iters; every evaluation then reads the same samples.",
    "multiple_validation_sets": "run one validation set at a time.",
    "mtp_num_layers": "multi-token prediction is autoregressive.",
    "decoder_seq_length": "the mode derives the model's length from --seq-length.",
    "init_model_with_meta_device": "initial weights are drawn in the model provider.",
    "dataloader_type": "the order of samples is a function of the seed and the epoch alone.",
    "attention_backend": "attention follows the mode's rule; see --dllm-attention-backend.",
    "spec": "the mode decides the layers' attention.",
    "layernorm_zero_centered_gamma": "our norms are not zero-centred.",
    "yaml_cfg": "give flags on the command line.",
    "pretrained_checkpoint": "use --load with --finetune, which are checked.",
    "use_checkpoint_args": "give the model's flags again; they are checked against the checkpoint.",
    "ckpt_format": "checkpoints are torch_dist, which loads in any layout.",
    "data_cache_path": "the order of samples is computed, not cached.",
    "fim_data": "fill-in-the-middle is what a diffusion model does anyway.",
    "dataloader_inter_document_masking": "documents never see each other by default.",
    "phase_transition_iterations": "the order of samples is a function of the seed and the epoch alone.",
    "perform_rl_step": "reinforcement learning has no diffusion mode.",
    "init_method_xavier_uniform": "initial weights are normal draws by (seed, name, row).",
    "data_parallel_random_init": "initial weights are the same on every rank.",
    "log_straggler": "it needs calls in the forward step and GPUs; use --dllm-straggler-report.",
    "use_mup": "its per-layer scales are not part of our initial weights.",
    "cross_entropy_loss_fusion": "the head has its own fused cross entropy, always on.",
    "defer_embedding_wgrad_compute": "the head takes its gradient in the forward pass.",
    "overlap_moe_expert_parallel_comm": "it needs a schedule plan that this model does not make.",
    "hybrid_layer_pattern": "only transformer layers are supported.",
    "heterogeneous_layers_config_path": "all layers share one shape.",
    "experimental_attention_variant": "attention follows the mode's rule.",
    "multi_latent_attention": "the rule-based attention works on plain key/value heads.",
    "qk_l2_norm": "use --qk-layernorm.",
    "window_size": "Megatron implements it in its own core attention, which is replaced here.",
    "softmax_type": "Megatron implements it in its own core attention, which is replaced here.",
    "qk_clip": "Megatron implements it in its own core attention, which is replaced here.",
    "log_max_attention_logit": "Megatron implements it in its own core attention, which is replaced here.",
    "rotary_interleaved": "rotary embeddings rotate halves, as all released diffusion models do.",
    "rotary_seq_len_interpolation_factor": "use --dllm-rope-scaling with rope_type linear.",
    "use_rope_scaling": "use --dllm-rope-scaling with rope_type llama3.",
    "rope_type": "use --dllm-rope-scaling.",
    "mrope_section": "positions have one dimension.",
}


# Sizes and intervals: at least 1 wherever they are given. Counts that may be 0.
_POSITIVE = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
    "kv_channels seq_length micro_batch_size global_batch_size eval_micro_batch_size eval_global_batch_size "
    "train_iters train_samples log_interval tensorboard_log_interval save_interval eval_interval "
    "make_vocab_size_divisible_by vocab_size num_experts pad_seq_len_divisible dllm_pad_block_size"
).split()
_NOT_NEGATIVE = "seed num_workers eval_iters lr min_lr dllm_verify_peers".split()


def _check_numbers(args) -> None:
    for names, least in ((_POSITIVE, 1), (_NOT_NEGATIVE, 0)):
        for dest in names:
            value = getattr(args, dest, None)
            if value is not None and value < least:
                raise ValueError(f"--{dest.replace('_', '-')} {value} is too small: it must be at least {least}.")


def check_flags(args, given: set[str]) -> None:
    """The flags by themselves; `given`: the ones on the command line."""
    flag = lambda dest: "--" + dest.replace("_", "-")
    _check_numbers(args)
    for dest, why in _REFUSED.items():
        if dest in given:
            raise ValueError(f"{flag(dest)} cannot be used: {why}")
    _check_mode_flags(args.dllm_mode, given)
    for dest, sentence in getattr(MODES[args.dllm_mode], "REQUIRED", {}).items():
        if getattr(args, dest) is None:
            raise ValueError(sentence)
    sources = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    text = any(getattr(args, source) is not None for source in sources)
    if text == (args.sft_data_path is not None):
        raise ValueError("give one kind of training data: --data-path (packed text) or --sft-data-path (chat).")
    for dest in _CHAT_ONLY if text else _TEXT_ONLY:
        if dest in given:
            raise ValueError(f"{flag(dest)} has no effect on {'packed text' if text else 'chat data'}: remove it.")
    if text and args.dllm_block_origin == "response":
        raise ValueError(
            "--dllm-block-origin response has no effect on packed text, where all is supervised: remove it."
        )
    if args.position_embedding_type != "rope":
        raise ValueError(f"--position-embedding-type {args.position_embedding_type} is not implemented: use rope.")
    if args.transformer_impl not in ("local", "transformer_engine"):
        raise ValueError(f"--transformer-impl {args.transformer_impl}: use local or transformer_engine.")
    if args.transformer_impl == "local" and "layernorm" in (args.recompute_modules or []):
        raise ValueError("--recompute-modules layernorm recomputes norms of Transformer Engine alone: leave it out.")
    if args.transformer_impl == "local" and args.normalization != "RMSNorm":
        raise ValueError(f"--normalization {args.normalization} needs --transformer-impl transformer_engine.")
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        raise ValueError(f"--peak-tflops {args.peak_tflops} is no speed: give a positive number.")
    for required in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "lr",
    ):
        if getattr(args, required) is None:
            hint = " (or a --model-preset)" if required in ("num_layers", "hidden_size", "num_attention_heads") else ""
            raise ValueError(f"{flag(required)} is missing{hint}.")
    if args.train_iters is None and args.train_samples is None:
        raise ValueError("--train-iters is missing.")
    if args.save is not None and args.save_interval is None:
        raise ValueError("--save needs --save-interval: after how many iterations to save.")
    if args.save is not None and not can_hold_files(args.save):
        raise ValueError(f"--save {args.save} is not a folder that can be written to: choose another.")
    if args.train_data_path is not None and "split" in given:
        raise ValueError("--split has no effect on --train-data-path: give --valid-data-path or remove it.")
    if args.dllm_attention_backend == "flex" and not torch.cuda.is_available():
        raise ValueError(
            "--dllm-attention-backend flex needs a GPU (on a CPU it has no backward): use tiled, sdpa or auto."
        )
    if args.dllm_attention_backend == "tiled" and torch.cuda.is_available():
        raise ValueError("--dllm-attention-backend tiled is for CPUs: use flex, sdpa or auto.")
    if args.dllm_attention_backend == "tiled" and args.attention_dropout:
        raise ValueError("--dllm-attention-backend tiled has no dropout: use --attention-dropout 0, or sdpa.")


def _check_mode_flags(mode: str, given: set[str]) -> None:
    """A flag that the mode would ignore is an error: private flags of others, and shared ones it does not use."""
    flag = lambda dest: "--" + dest.replace("_", "-")
    for name in MODES:
        for dest in sorted((_private_flags(name) - _private_flags(mode)) & given):
            raise ValueError(f"{flag(dest)} belongs to --dllm-mode {name}, not {mode}: remove it.")
    if "dllm_mask_token_id" in given and not MODES[mode].NEEDS_MASK_TOKEN:
        raise ValueError(f"--dllm-mask-token-id has no effect on --dllm-mode {mode}, which has no mask: remove it.")
    shared = set().union(*(module.USES for module in MODES.values()))
    for dest in sorted((shared - MODES[mode].USES) & given):
        users = ", ".join(name for name, module in MODES.items() if dest in module.USES)
        raise ValueError(f"{flag(dest)} has no effect on --dllm-mode {mode} (only on {users}): remove it.")


def mode_flags(mode: str) -> set[str]:
    """All flags that shape the objective of `mode`."""
    return set(_private_flags(mode)) | MODES[mode].USES


@functools.cache
def _private_flags(mode_name: str) -> frozenset[str]:
    parser = argparse.ArgumentParser(add_help=False)
    MODES[mode_name].add_args(parser.add_argument_group(mode_name))
    return frozenset(action.dest for action in parser._actions)


def check_layout(args, mode: ModuleType) -> None:
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    product, world = tp * pp * cp, args.world_size
    if world % product:
        raise ValueError(
            f"{world} process(es) cannot be laid out as TP {tp} x PP {pp} x CP {cp} = {product}: start a multiple "
            f"of {product} processes (torchrun --nproc-per-node) or change the sizes."
        )
    data_parallel = world // product
    per_step = args.micro_batch_size * data_parallel
    global_batch = args.global_batch_size or per_step
    if global_batch % per_step:
        raise ValueError(
            f"--global-batch-size {global_batch} is not a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"data-parallel size {data_parallel}."
        )
    if tp == 1 and args.sequence_parallel:
        raise ValueError("--sequence-parallel shards what tensor parallelism leaves whole: it needs TP > 1.")
    if args.max_position_embeddings is not None and args.seq_length > args.max_position_embeddings:
        raise ValueError(
            f"--seq-length {args.seq_length} is longer than --max-position-embeddings {args.max_position_embeddings}: "
            "shorten it, or raise the other if the model can be used further than it was trained."
        )
    multiple = pad_multiple(tp, cp, args.sequence_parallel, fp8_recipe(args))
    if args.pad_seq_len_divisible and args.pad_seq_len_divisible % multiple:
        raise ValueError(
            f"--pad-seq-len-divisible {args.pad_seq_len_divisible} must be a multiple of {multiple} in this layout."
        )
    multiple = max(multiple, args.pad_seq_len_divisible or 1)
    if args.seq_length % multiple:
        lower = args.seq_length // multiple * multiple
        raise ValueError(
            f"--seq-length {args.seq_length} cannot be split in this layout: it must be a multiple of {multiple}, "
            f"for instance {lower or multiple} or {(lower or multiple) + multiple}."
        )
    _check_heads(args, tp)
    uneven = (
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
        or args.pipeline_model_parallel_layout is not None
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
    )
    if args.num_layers % pp and not uneven:
        raise ValueError(
            f"--num-layers {args.num_layers} is not divisible by PP {pp}: change one, or use "
            "--decoder-first-pipeline-num-layers."
        )
    _check_experts(args, mode, tp, pp, world)
    _check_context_parallel(args, tp, cp)
    # Chat batches are padded to their longest row, so lengths change between micro-batches.
    args.dllm_variable_lengths = args.sft_data_path is not None and args.dllm_padding == "ignore"
    args.dllm_length_multiple = multiple
    args.dllm_sequence_length = args.seq_length


def _check_heads(args, tp: int) -> None:
    heads, groups, size = args.num_attention_heads, args.num_query_groups, args.kv_channels
    if heads % tp:
        raise ValueError(f"--num-attention-heads {heads} is not divisible by TP {tp}.")
    if args.group_query_attention and heads % groups:
        raise ValueError(
            f"--num-attention-heads {heads} cannot share --num-query-groups {groups}: give a multiple of it."
        )
    if args.group_query_attention and groups % tp and tp % groups:
        raise ValueError(f"--num-query-groups {groups} neither divides TP {tp} nor is divisible by it.")
    if size is None and args.hidden_size % heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}: say how wide a head "
            "is by --kv-channels."
        )
    size = args.hidden_size // heads if size is None else size
    if size % 2:
        raise ValueError(
            f"a head of {size} channels cannot be rotated, which is done in pairs: give an even --kv-channels."
        )


def set_model_length(args, mode: ModuleType) -> None:
    """`seq_length` becomes Q (`dllm_sequence_length` stays S): a pipeline's tensors are as long as the model's input.
    After `mode.validate`, which may find that lengths vary though those of the data do not."""
    expert_parallel = args.expert_model_parallel_size > 1
    if args.dllm_variable_lengths and expert_parallel and args.moe_token_dispatcher_type != "alltoall":
        raise ValueError(
            "batches of chat data, or of all canvases, differ in length between ranks, which the allgather dispatcher "
            "cannot exchange: use --moe-token-dispatcher-type alltoall."
        )
    length = getattr(mode, "model_length", None)
    args.seq_length = args.seq_length * mode.streams(args) if length is None else length(args)


def _check_experts(args, mode: ModuleType, tp: int, pp: int, world: int) -> None:
    ep = args.expert_model_parallel_size
    if args.num_experts is None:
        if ep > 1:
            experts = mode.experts(args) if hasattr(mode, "experts") else None
            if experts is None:
                raise ValueError("--expert-model-parallel-size needs a mixture of experts: give --num-experts.")
            _check_expert_layout(args, experts, f"the target's {experts} experts are", tp, pp, world)
        return
    if isinstance(args.moe_layer_freq, list) and len(args.moe_layer_freq) != args.num_layers:
        raise ValueError(
            f"--moe-layer-freq is for {len(args.moe_layer_freq)} layers, but --num-layers is {args.num_layers}: give "
            f"it for all of them, for instance [0]+[1]*{args.num_layers - 1}."
        )
    if tp > 1 and not args.sequence_parallel:
        raise ValueError(
            f"Megatron trains experts under TP {tp} with sequence parallelism only: add --sequence-parallel."
        )
    _check_expert_layout(args, args.num_experts, f"--num-experts {args.num_experts} is", tp, pp, world)


def _check_expert_layout(args, experts: int, subject: str, tp: int, pp: int, world: int) -> None:
    ep = args.expert_model_parallel_size
    if experts % ep:
        raise ValueError(f"{subject} not divisible by EP {ep}.")
    etp = args.expert_tensor_parallel_size or tp
    if world % (etp * ep * pp):
        raise ValueError(
            f"{world} process(es) cannot be laid out as expert TP {etp} x EP {ep} x PP {pp} = {etp * ep * pp}: start a "
            "multiple of that or change the sizes, or --expert-tensor-parallel-size (by default as TP)."
        )


def _check_context_parallel(args, tp: int, cp: int) -> None:
    args.cp_comm_type = ["all_gather" if kind == "allgather" else kind for kind in args.cp_comm_type]
    if cp == 1:
        return
    for kind in args.cp_comm_type:
        if kind not in ("a2a", "all_gather"):
            raise ValueError(f"--cp-comm-type {kind} cannot carry a diffusion mask: use a2a or all_gather.")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    per_rank = max(1, groups // tp)
    if "a2a" in args.cp_comm_type and per_rank % cp:
        raise ValueError(
            f"--cp-comm-type a2a exchanges heads: {groups} key/value heads over TP {tp} leave {per_rank} a rank, "
            f"which CP {cp} does not divide; use --cp-comm-type all_gather."
        )
