"""A trained model for generation: from a checkpoint saved in any layout, or from a Hugging Face folder, on one process
or on tensor- and pipeline-parallel ranks.

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
from megatron_dllm.models import target as target_of_draft
from megatron_dllm.models.targets import offline
from megatron_dllm.models.weights import target_layers
from megatron_dllm.vocabulary import check_mask_token

# What described the training run's layout, data and bookkeeping, and has no meaning for one that only reads weights.
_NEUTRAL = dict(
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
    dllm_emulate_fp8=None,
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
    lora_anew=False,  # the checkpoint has its adapters, whatever it began from
    save_hf_interval=None,
    dflash_target=None,  # a draft is built alone
    dflash_features=None,  # of training samples
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
    """A model that has been looked at, not yet loaded. folder: of its checkpoint; None if its weights come from
    args.hf_model. args: what the model will be built from."""

    folder: str | None
    args: Namespace
    tokenizer: Tokenizer


@dataclass
class Loaded:
    """A model ready for `generate` (this rank's part of it), its tokenizer, and the arguments it was built from."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    args: Namespace


def load(path: str | None = None, **options) -> Loaded:
    """`build(plan(path, **options))`: the model in the checkpoint `path`. One model per process."""
    return build(plan(path, **options))


def plan(
    path: str | None = None,
    *,
    hf_model: str | None = None,
    target: str | None = None,
    with_target: bool = True,
    mode: str | None = None,
    step: int | None = None,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    tokenizer_model: str | None = None,
    chat_template: str | None = None,
    mask_token_id: int | None = None,
    bf16: bool = False,
    fp32: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """Everything that can be wrong, found before anything is built.

    path: a run's folder, or that of an iteration; step: which iteration of the run, default the latest.
    hf_model: instead, a Hugging Face folder of any family; mode: the --dllm-mode that it is decoded as, default the
    family's. target: of a draft, a Hugging Face folder or that of a run; default the one that it was trained with;
    with_target: False: a draft alone, which cannot decode.
    tokenizer_model, chat_template: where the files are now, if they have moved since training.
    trust_remote_code: the tokenizer may be Python code of its folder; what the checkpoint says about that is not heard.
    mask_token_id: only checked, or for an hf_model whose config.json does not say it.
    bf16, fp32: compute in it also if the model was trained in another precision.
    Raises ValueError (one sentence): no checkpoint or a damaged one, a layout that does not fit, a tokenizer
    that is missing or another one, another mask token.
    """
    if (path is None) == (hf_model is None):
        raise ValueError("the model comes from --load or from --hf-model: give one of them.")
    if bf16 and fp32:
        raise ValueError("--bf16 and --fp32 are two precisions: give one of them.")
    if path is None:
        args = _imported(hf_model, mode, step, mask_token_id, trust_remote_code)
        folder = None
    else:
        folder, args = _saved(path, mode, step, mask_token_id)
    if target_layers(args) is not None and pipeline_model_parallel_size > 1:
        raise ValueError("a draft is decoded on whole layers: leave out --pipeline-model-parallel-size.")
    own_target = _target_of(args, target, hf_model, path) if with_target else None
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
    if args.dllm_mask_token_id is not None:
        check_mask_token(args.dllm_mask_token_id, args.vocab_size, tokenizer)
    neutralise(args, tensor_model_parallel_size, pipeline_model_parallel_size)
    args.init_from_hf = folder is None
    if own_target is not None:
        args.dflash_target = own_target
        target_of_draft.check(args)
        target_of_draft.check_weights(args)
    if bf16 or fp32:
        args.bf16, args.fp16, args.params_dtype = bf16, False, torch.bfloat16 if bf16 else torch.float32
    if args.transformer_impl == "transformer_engine" and not torch.cuda.is_available():
        args.transformer_impl = "local"  # the same weights under the same names
        print("Transformer Engine needs a GPU: its layers run as Megatron's local ones here.", file=sys.stderr)
    return Plan(folder, args, tokenizer)


def _saved(path: str, mode: str | None, step: int | None, mask_token_id: int | None) -> tuple[str, Namespace]:
    folder = iteration_folder(path, step)
    if step is not None and folder == path:
        raise ValueError(f"--load {path} is one iteration already: leave out --ckpt-step, or give the run's folder.")
    if folder is None or not os.path.isdir(folder):
        missing = f"{TRACKER} is missing" if folder is None else f"there is no {os.path.basename(folder)}"
        there = sorted(name for name in os.listdir(path) if name.startswith("iter_")) if os.path.isdir(path) else []
        if there and folder is not None:
            raise ValueError(f"--load {path} has no {os.path.basename(folder)}: choose one of {', '.join(there)}.")
        raise ValueError(f"--load {path} holds no checkpoint ({missing}): give a run's folder or an iter_ folder.")
    args = saved_run(folder)
    if mode is not None:
        raise ValueError(f"{folder} says how it was trained ({args.dllm_mode}): leave out --dllm-mode.")
    saved_mask = args.dllm_mask_token_id
    if mask_token_id is not None and mask_token_id != saved_mask:
        raise ValueError(
            f"{folder} was trained with mask token {saved_mask}, not {mask_token_id}: leave out --dllm-mask-token-id."
        )
    return folder, args


def _imported(
    hf_model: str, mode: str | None, step: int | None, mask_token_id: int | None, trust_remote_code: bool
) -> Namespace:
    from megatron_dllm.conversion import importing
    from megatron_dllm.conversion.defaults import config_defaults
    from megatron_dllm.conversion.source import family_of
    from megatron_dllm.models.hf import read_config

    if step is not None:
        raise ValueError("--ckpt-step is an iteration of --load, and --hf-model has none: leave it out.")
    config = read_config(hf_model)
    family = family_of(config)
    if mode is None and family.mode is None and not family.draft:
        raise ValueError(
            f"{hf_model} holds a {family.name} model, which is autoregressive unless it was trained further: say what "
            "it was trained as by --dllm-mode (to continue a text token by token: --dllm-mode hybrid --mode ar)."
        )
    own_mask = config_defaults(config, family).get("dllm_mask_token_id")
    if None not in (mask_token_id, own_mask) and mask_token_id != own_mask:
        raise ValueError(
            f"{hf_model} was trained with mask token {own_mask}, not {mask_token_id}: leave out --dllm-mask-token-id."
        )
    planned = importing.plan(hf_model, mode=mode, mask_token_id=mask_token_id, trust_remote_code=trust_remote_code)
    return planned.args


def _target_of(args: Namespace, given: str | None, hf_model: str | None, load: str | None) -> str | None:
    """The target that a draft is decoded with; a draft without one is refused by the sampler, which it has none for."""
    if target_layers(args) is None:
        if args.dllm_mode == "dflash":
            raise ValueError("the model is no draft, which --dllm-mode dflash decodes with: choose another mode.")
        if given is not None:
            raise ValueError("--target is the model that a draft drafts for, and the model is no draft: leave it out.")
        return None
    path = given or getattr(args, "dflash_target", None)
    if path is not None:
        try:
            target_of_draft.check_decodable(path)
        except ValueError as error:  # names the flag of training
            raise ValueError(str(error).replace("--dflash-target", "--target")) from error
        draft = f"--load {load}" if hf_model is None else f"--hf-model {hf_model}"
        target_of_draft.check_pair(draft, args, f"--target {path}", target_of_draft.describe(path).args)
        trained_beside = getattr(args, "dflash_target_identity", None)
        if trained_beside not in (None, offline.target_identity(path)) and os.environ.get("RANK", "0") == "0":
            print(
                f"Note: --target {path} is not the folder that this draft was trained beside: of another model few "
                "guesses are accepted, though the text is the target's all the same.",
                file=sys.stderr,
            )
        args.dflash_target_backend = target_of_draft.MEGATRON  # whatever ran it in training
        args.dllm_mode = "dflash"  # what was imported from a folder has another one in its place
        defaults = target_of_draft.defaults(path)
        for name in ("tokenizer_type", "tokenizer_model"):
            if name in defaults:
                setattr(args, name, defaults[name])
    return path


def neutralise(args: Namespace, tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1) -> None:
    """Turn a training run's arguments into those of one that only reads weights on the launched processes."""
    _set_layout(args, tensor_model_parallel_size, pipeline_model_parallel_size)
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


def _set_layout(args: Namespace, tp: int, pp: int) -> None:
    """Adapt `args` to the launched processes: all of them are tensor- and pipeline-parallel ranks of one model."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if tp < 1 or pp < 1 or world != tp * pp:
        launch = f"torchrun --nproc-per-node {tp * pp}" if tp * pp > 1 else "plain python"
        layout = f"--tensor-model-parallel-size {tp}" + (f" --pipeline-model-parallel-size {pp}" if pp != 1 else "")
        advice = f"set it to {world}" if pp == 1 else f"choose sizes whose product is {world}"
        raise ValueError(
            f"{layout} needs {tp * pp} process(es), and there are {world}: start with {launch}, or {advice}."
        )
    if args.num_layers % pp:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp} does not divide the model's {args.num_layers} layers: choose another "
            "size."
        )
    heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if args.num_attention_heads % tp or (heads % tp and tp % heads) or args.ffn_hidden_size % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the model's {args.num_attention_heads} heads, {heads} "
            f"key/value heads and width {args.ffn_hidden_size}: choose another size."
        )
    args.tensor_model_parallel_size = args.expert_tensor_parallel_size = tp
    args.pipeline_model_parallel_size = pp
    args.tensor_parallel_num_weight_shards = args.expert_tensor_parallel_num_weight_shards = tp
    args.rank, args.world_size = int(os.environ.get("RANK", "0")), world
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if args.padded_vocab_size % tp:
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

        args.padded_vocab_size = vocab_size_with_padding(args.vocab_size, args, logging_enabled=False)


def build(plan: Plan, store: torch.distributed.Store | None = None) -> Loaded:
    """Start the processes' communication (they meet at `store`, or where torchrun says), build the model and read its
    weights. Once per process."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    from megatron_dllm import fixes
    from megatron_dllm.training import embedding_ranks, model_provider

    args = plan.args
    fixes.install()
    default_to_one_process()
    set_global_variables(args, build_tokenizer=False)
    no_gpu = not torch.cuda.is_available()
    initialize_megatron(allow_no_cuda=no_gpu, get_embedding_ranks=embedding_ranks, store=store)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = model_provider(first, last, draw_weights=plan.folder is None).cuda()
    wrapped = Float16Module(model.config, model) if args.bf16 or args.fp16 else model
    if plan.folder is not None:
        read_weights(model, plan.folder)
    return Loaded(wrapped.eval(), plan.tokenizer, args)


def read_weights(model: torch.nn.Module, folder: str) -> None:
    """Fill this rank's part of a model from the complete checkpoint `folder`, saved in any layout."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(folder)
    state = dict(model=model.sharded_state_dict(metadata=metadata))
    # what the model lacks (optimizer, random state) may stay in the file; what the file lacks is an error
    strict = dist_checkpointing.validation.StrictHandling.RAISE_UNEXPECTED
    model.load_state_dict(dist_checkpointing.load(state, folder, strict=strict)["model"])
