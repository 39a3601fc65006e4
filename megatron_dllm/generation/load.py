"""A trained model for generation: from a checkpoint saved in any layout, on one process or tensor-parallel ranks.

Architecture, tokenizer, mode and mask token are the checkpoint's own: there is one source for them.
"""

import os
import sys
from argparse import Namespace
from dataclasses import dataclass

import torch

from megatron_dllm.checkpoint import TRACKER, check_complete, iteration_folder, saved_arguments
from megatron_dllm.data.tokenizer import Tokenizer, build_tokenizer
from megatron_dllm.launch import default_to_one_process
from megatron_dllm.validation import check_mask_token

# What described the training run's layout, data and bookkeeping, and has no meaning for one that only reads weights.
_NEUTRAL = dict(
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    num_layers_per_virtual_pipeline_stage=None,
    num_virtual_stages_per_pipeline_rank=None,
    decoder_first_pipeline_num_layers=None,
    decoder_last_pipeline_num_layers=None,
    pipeline_model_parallel_layout=None,
    context_parallel_size=1,
    hierarchical_context_parallel_sizes=None,
    expert_model_parallel_size=1,
    sequence_parallel=False,
    data_parallel_size=1,
    gtp_weight_remat_size=1,
    expert_gtp_weight_remat_size=1,
    num_distributed_optimizer_instances=1,
    micro_batch_size=1,
    global_batch_size=1,
    step_batch_size_schedule=None,
    recompute_granularity=None,
    recompute_method=None,
    recompute_num_layers=None,
    distribute_saved_activations=False,
    tp_comm_overlap=False,
    delay_wgrad_compute=False,
    overlap_moe_expert_parallel_comm=False,
    cuda_graph_impl="none",
    fp8=None,  # weights are stored in the model's own precision
    fp4=None,
    load=None,
    save=None,
    tensorboard_dir=None,
    wandb_project="",
    enable_one_logger=False,
    adlr_autoresume=False,
    exit_signal_handler=False,
    exit_signal_handler_for_training=False,
    async_save=False,
    init_from_hf=False,
    save_hf_interval=None,
    use_persistent_ckpt_worker=False,
)

# Names that megatron_dllm.arguments sets for training on a CPU, and their values on either device.
_CPU = dict(
    distributed_backend="gloo",
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    bias_swiglu_fusion=False,
    bias_gelu_fusion=False,
    bias_dropout_fusion=False,
    persist_layer_norm=False,
)
_GPU = dict(distributed_backend="nccl", use_cpu_initialization=True, gradient_accumulation_fusion=False)


@dataclass
class Plan:
    """A checkpoint that has been looked at, not yet loaded. args: what the model will be built from."""

    folder: str
    args: Namespace
    tokenizer: Tokenizer


@dataclass
class Loaded:
    """A model ready for `generate`, its tokenizer, and the arguments it was built from."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    args: Namespace


def load(path: str, **options) -> Loaded:
    """`build(plan(path, **options))`: the model in the checkpoint `path`. One model per process."""
    return build(plan(path, **options))


def plan(
    path: str,
    *,
    step: int | None = None,
    tensor_model_parallel_size: int = 1,
    tokenizer_model: str | None = None,
    chat_template: str | None = None,
    mask_token_id: int | None = None,
    bf16: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """Everything that can be wrong, found before anything is built.

    path: a run's folder, or that of an iteration; step: which iteration of the run, default the latest.
    tokenizer_model, chat_template: where the files are now, if they have moved since training.
    trust_remote_code: the tokenizer may be Python code of its folder; what the checkpoint says about that is not heard.
    mask_token_id: only checked; bf16: compute in bf16 also if the model was trained in another precision.
    Raises ValueError (one sentence): no checkpoint or a damaged one, a layout that does not fit, a tokenizer
    that is missing or another one, another mask token.
    """
    folder = iteration_folder(path, step)
    if folder is None or not os.path.isdir(folder):
        missing = f"{TRACKER} is missing" if folder is None else f"there is no {os.path.basename(folder)}"
        raise ValueError(f"--load {path} holds no checkpoint ({missing}): give a run's folder or an iter_ folder.")
    args = saved_run(folder)
    saved_mask = args.dllm_mask_token_id
    if mask_token_id is not None and mask_token_id != saved_mask:
        raise ValueError(
            f"{folder} was trained with mask token {saved_mask}, not {mask_token_id}: leave out --dllm-mask-token-id."
        )
    args.trust_remote_code = trust_remote_code
    for name, value in dict(tokenizer_model=tokenizer_model, chat_template=chat_template).items():
        if value is not None:
            setattr(args, name, value)
    tokenizer = build_tokenizer(args)
    if tokenizer.vocab_size > args.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model knows {args.vocab_size}: give the one it "
            "was trained with by --tokenizer-model."
        )
    if saved_mask is not None:
        check_mask_token(saved_mask, args.vocab_size, tokenizer)
    neutralise(args, tensor_model_parallel_size)
    if bf16:
        args.bf16, args.fp16, args.params_dtype = True, False, torch.bfloat16
    if args.transformer_impl == "transformer_engine" and not torch.cuda.is_available():
        args.transformer_impl = "local"  # the same weights under the same names
        print("Transformer Engine needs a GPU: its layers run as Megatron's local ones here.", file=sys.stderr)
    return Plan(folder, args, tokenizer)


def neutralise(args: Namespace, tensor_model_parallel_size: int = 1) -> None:
    """Turn a training run's arguments into those of one that only reads weights on the launched processes."""
    _set_layout(args, tensor_model_parallel_size)
    vars(args).update(_NEUTRAL | (_GPU if torch.cuda.is_available() else _CPU))


def saved_run(folder: str) -> Namespace:
    """Arguments of the complete checkpoint `folder`, written by this program. ValueError if it is none."""
    check_complete(folder)
    try:
        args = saved_arguments(folder)
    except ValueError:
        raise
    except Exception as error:  # unpickling a damaged file raises anything
        raise ValueError(f"{folder} is damaged ({type(error).__name__}): load another checkpoint.") from error
    if not hasattr(args, "dllm_mode"):
        raise ValueError(f"{folder} was not written by pretrain_dllm.py: its arguments name no --dllm-mode.")
    return args


def _set_layout(args: Namespace, tp: int) -> None:
    """Adapt `args` to the launched processes: all of them are tensor-parallel ranks of one model."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if tp < 1 or world != tp:
        launch = f"torchrun --nproc-per-node {tp}" if tp > 1 else "plain python"
        raise ValueError(
            f"--tensor-model-parallel-size {tp} needs {tp} process(es), and there are {world}: start with {launch}, or "
            f"set it to {world}."
        )
    heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if args.num_attention_heads % tp or (heads % tp and tp % heads) or args.ffn_hidden_size % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the model's {args.num_attention_heads} heads, {heads} "
            f"key/value heads and width {args.ffn_hidden_size}: choose another size."
        )
    args.tensor_model_parallel_size = args.expert_tensor_parallel_size = tp
    args.tensor_parallel_num_weight_shards = args.expert_tensor_parallel_num_weight_shards = tp
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), world
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if args.padded_vocab_size % tp:
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)


def build(plan: Plan) -> Loaded:
    """Start the processes' communication, build the model and read its weights. Once per process."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.module import Float16Module
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    from megatron_dllm import fixes
    from megatron_dllm.training import embedding_ranks, model_provider

    args = plan.args
    fixes.install()
    default_to_one_process()
    set_global_variables(args, build_tokenizer=False)
    initialize_megatron(allow_no_cuda=not torch.cuda.is_available(), get_embedding_ranks=embedding_ranks)
    model = model_provider(draw_weights=False).cuda()
    wrapped = Float16Module(model.config, model) if args.bf16 or args.fp16 else model
    metadata = dist_checkpointing.load_content_metadata(plan.folder)
    # what the model lacks (optimizer, random state) may stay in the file; what the file lacks is an error
    strict = dist_checkpointing.validation.StrictHandling.RAISE_UNEXPECTED
    state = dist_checkpointing.load(dict(model=model.sharded_state_dict(metadata=metadata)), plan.folder, strict=strict)
    model.load_state_dict(state["model"])
    return Loaded(wrapped.eval(), plan.tokenizer, args)
