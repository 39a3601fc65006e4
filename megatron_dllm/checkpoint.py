"""Checks on a checkpoint before anything is built for it: complete, and of this model, mode and vocabulary."""

import json
import os
import pickle
from argparse import Namespace

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME, verify_integrity_manifest
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megatron_dllm import fixes
from megatron_dllm.models.lora_flags import check_adapters
from megatron_dllm.models.weights import target_layers
from megatron_dllm.validation import mode_flags

# What must agree between a checkpoint and the run that continues it.
_SHAPE = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "untie_embeddings_and_output_weights",
    "qk_layernorm",
    "add_qkv_bias",
    "add_bias_linear",
    "swiglu",
    "normalization",
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percent",
    "dllm_rope_scaling",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",  # a list of ones is not 1: Megatron then stores each layer by itself
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_latent_size",
    "moe_router_enable_expert_bias",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "dflash_target_layers",
    "dllm_architecture",
    "dllm_window",
    "dllm_full_attention_layers",
    "dllm_full_kv_channels",
    "dllm_full_query_groups",
    "dllm_full_rotary_base",
    "dllm_full_rotary_percent",
    "dllm_logit_softcap",
]
# What Megatron's scheduler wants to find as it was, in words.
_SCHEDULE = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_decay_style": "--lr-decay-style",
    "lr_warmup_steps": "a warm-up (in samples) of",
    "lr_decay_steps": "a learning rate decay (--lr-decay-iters or --train-iters, in samples) of",
    "start_wd": "--weight-decay (at the start)",
    "end_wd": "--weight-decay (at the end)",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "a weight decay schedule (--train-iters, in samples) of",
}
# What a draft's weights are trained for: another value goes on from them as from those of another draft.
_DRAFT = ("dllm_block_size", "dflash_causal_block", "dflash_window")
_DECOUPLED = ("decoupled_lr", "decoupled_min_lr")
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # Megatron's name for weights that no iteration made: converted ones


def iteration_folder(load: str, step: int | None = None) -> str | None:
    """Folder of the checkpoint that `--load` (a run's folder, or an iteration's) names; None if it has none yet."""
    name = os.path.basename(os.path.normpath(load))
    if (name.startswith("iter_") or name == RELEASE) and os.path.isdir(load):
        return load
    tracker = os.path.join(load, TRACKER)
    if step is None:
        if not os.path.isfile(tracker):
            return None
        with open(tracker) as file:
            text = file.read().strip()
        if text == RELEASE:
            return os.path.join(load, RELEASE)
        if not text.isdigit():
            raise ValueError(
                f"{tracker} should hold an iteration number but holds {text!r}: write the last good one into it."
            )
        step = int(text)
    return os.path.join(load, f"iter_{step:07d}")


class DamagedCheckpoint(RuntimeError):
    """Contents that are not what was saved (--verify-integrity). Raised on every rank."""


class _MetadataOnly(pickle.Unpickler):
    """Reads the pickled index of a checkpoint, which torch would unpickle as it is: a stranger's cannot run code."""

    _NAMES = {
        "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex TensorProperties TensorStorageMetadata "
        "BytesStorageMetadata ChunkStorageMetadata StorageMeta _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
        "torch": "Size float64 float32 float16 bfloat16 uint8 int8 int16 int32 int64 bool float8_e4m3fn float8_e5m2",
        "torch.serialization": "_get_layout",
        "pathlib": "PosixPath PurePosixPath",
        "collections": "OrderedDict",
    }

    def find_class(self, module, name):
        if name not in self._NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def check_complete(folder: str) -> None:
    """ValueError if a torch_dist checkpoint is missing files or has truncated ones."""
    for name in (".metadata", "metadata.json"):  # the first is written after all shards
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"{folder} is not a complete checkpoint ({name} is missing): {_advice(folder)}")
    for name, read in (("metadata.json", json.load), (".metadata", lambda file: _MetadataOnly(file).load())):
        try:
            with open(os.path.join(folder, name), "rb") as file:
                metadata = read(file)
        except Exception as error:  # whatever a half-written file makes of a parser
            raise ValueError(f"{os.path.join(folder, name)} is damaged ({error}): {_advice(folder)}") from error
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = os.path.join(folder, name)
        size = os.path.getsize(path) if os.path.isfile(path) else -1
        if size < end:
            state = "missing" if size < 0 else f"truncated ({size} of {end} bytes)"
            raise ValueError(f"{path} is {state}: {_advice(folder)}")


def is_complete(run: str, iteration: int) -> bool:
    """Whether the run has a whole checkpoint of that iteration."""
    try:
        check_complete(os.path.join(run, f"iter_{iteration:07d}"))
    except ValueError:
        return False
    return True


def check_hashes(folder: str) -> None:
    """DamagedCheckpoint if a file is not as it was saved. Rank 0 reads all of them; collective."""
    try:
        verify_integrity_manifest(folder)
    except CheckpointingException as error:
        names = [line.split(":")[0].strip() for line in str(error).splitlines()[1:]]
        raise DamagedCheckpoint(
            f"{', '.join(names) or error} in {folder} is not what was saved: {_advice(folder)}"
        ) from error


def _advice(folder: str) -> str:
    run = os.path.dirname(os.path.normpath(folder))
    others = sorted(
        int(name.removeprefix("iter_"))
        for name in (os.listdir(run) if os.path.isdir(run) else ())
        if name.startswith("iter_") and name.removeprefix("iter_").isdigit() and name != os.path.basename(folder)
    )
    if not others:
        return "there is no other checkpoint beside it."
    number = os.path.basename(folder).removeprefix("iter_")
    earlier = [step for step in others if number.isdigit() and step < int(number)]
    return f"load another one with --ckpt-step {(earlier or others)[-1]}."


def _common_state(folder: str) -> dict:
    """What is the same on all ranks: arguments, iteration, schedules."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    fixes.objects_run_no_code()
    try:
        return load_common_state_dict(folder)
    except (Exception, CheckpointException) as error:  # a damaged file, or classes that torch does not trust
        raise ValueError(
            f"{folder} holds arguments that cannot be read ({type(error).__name__}): it is damaged or not trusted; "
            f"{_advice(folder)}"
        ) from error


def saved_arguments(folder: str) -> Namespace:
    """The arguments of the run that wrote the checkpoint."""
    state = _common_state(folder)
    if "args" not in state:
        raise ValueError(f"{folder} holds no arguments: it was not written by this program.")
    return state["args"]


def draft_defaults(load: str, step: int | None) -> dict:
    """What the draft in the checkpoint that `--load` names says about the run that goes on with it, as a draft's folder
    does; nothing if there is none yet, or it holds no draft."""
    folder = iteration_folder(load, step)
    if folder is None or not os.path.isdir(folder):
        return {}
    check_complete(folder)
    saved = saved_arguments(folder)
    if target_layers(saved) is None:
        return {}
    return {name: getattr(saved, name) for name in ("dllm_block_size", "dllm_mask_token_id")}


def check_before_loading(args) -> None:
    """ValueError if `--load` names a checkpoint that is damaged or of another model, mode or vocabulary."""
    if args.load is None:
        return
    folder = iteration_folder(args.load, args.ckpt_step)
    if folder is not None and os.path.realpath(folder) == os.path.realpath(args.load):
        # Megatron loads a run's folder and a step, and would start afresh from anything else
        args.load = os.path.dirname(os.path.abspath(folder))
        if (name := os.path.basename(os.path.normpath(folder))) != RELEASE:
            args.ckpt_step = int(name.removeprefix("iter_"))
        elif iteration_folder(args.load) != os.path.join(args.load, RELEASE):  # Megatron would load the latter
            raise ValueError(
                f"{folder} has been trained further in {args.load}: for a new start from it, import it into another "
                f"folder, or write {RELEASE} into a copy's {TRACKER}."
            )
    if folder is None:
        same = args.save is not None and os.path.realpath(args.load) == os.path.realpath(args.save)
        if not same:  # the usual way to start: --load and --save name the same, still empty folder
            raise ValueError(f"--load {args.load} holds no checkpoint ({TRACKER} is missing): check the path.")
        return
    check_complete(folder)
    if getattr(args, "verify_integrity", False) and not os.path.isfile(os.path.join(folder, INTEGRITY_FNAME)):
        raise ValueError(
            f"{folder} was saved without hashes, which --verify-integrity compares: leave the flag out this once."
        )
    saved = saved_arguments(folder)
    if target_layers(saved) is not None and target_layers(args) is None:
        raise ValueError(f"{folder} holds a draft, without an embedding and a head: load that of a whole model.")
    if target_layers(saved) is not None and not args.finetune:
        _check_draft(args, saved, folder)
    if args.init_from_hf:
        args.init_from_hf = False
        _note(args, f"continuing from {folder}; --init-from-hf is for the first start.")
    if os.path.basename(os.path.normpath(folder)) == RELEASE and not args.finetune:
        args.finetune = True
        _note(args, f"{folder} holds converted weights: training starts from them at iteration 0.")
    check_adapters(args, saved, folder)
    if not (args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", False)):
        _check_optimizer(args, saved, folder)
        _check_schedule(args, saved, folder)
    fine_tunes = args.finetune  # weights only: another objective may continue them
    names = [*_SHAPE, "vocab_size"] + ([] if fine_tunes else ["dllm_mode", "dllm_mask_token_id"])
    for name in names:
        theirs, ours = _value(saved, name), _value(args, name)
        if theirs != ours:
            flag = "--" + name.replace("_", "-")
            hint = " (or --finetune, to start a new objective from its weights)" if name.startswith("dllm") else ""
            raise ValueError(f"{folder} was trained with {flag} {theirs}, this run has {ours}: use the same{hint}.")
    _say_what_changes(args, saved, folder)
    if not fine_tunes:
        args.dllm_state = dict(getattr(saved, "dllm_state", {}))
        args.dllm_bad_steps = list(getattr(saved, "dllm_bad_steps", []))


def _check_draft(args, saved: Namespace, folder: str) -> None:
    """Its target, and if it was trained here its objective, are those that it has learned. (Checkpoints of earlier
    versions know less.)"""
    anew = "use the same (or --finetune, to start anew from the draft's weights)."
    known = lambda name: getattr(saved, name, None) is not None
    theirs, ours = (getattr(each, "dflash_num_target_layers", None) for each in (saved, args))
    if known("dflash_num_target_layers") and theirs != ours:
        raise ValueError(
            f"{folder} holds a draft for a target of {theirs} layers, and --dflash-target {args.dflash_target} has "
            f"{ours}: {anew}"
        )
    if known("dflash_target_identity") and saved.dflash_target_identity != args.dflash_target_identity:
        raise ValueError(
            f"{folder} was trained beside another target than --dflash-target {args.dflash_target}, whose weights or "
            f"config.json differ: {anew}"
        )
    if saved.dllm_mode != args.dllm_mode:  # converted, or refused in a moment
        return
    for name in _DRAFT:
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name):
            raise ValueError(
                f"{folder} was trained with --{name.replace('_', '-')} {getattr(saved, name)}, this run has "
                f"{getattr(args, name)}: {anew}"
            )


def _say_what_changes(args, saved: Namespace, folder: str) -> None:
    """A curriculum may change the objective's flags from run to run; it must not happen unseen."""
    if args.finetune:
        return
    changed = {
        name: (getattr(saved, name), getattr(args, name))
        for name in sorted(mode_flags(args.dllm_mode))
        if hasattr(saved, name) and hasattr(args, name) and getattr(saved, name) != getattr(args, name)
    }
    for name, (theirs, ours) in changed.items():
        _note(args, f"{folder} was trained with --{name.replace('_', '-')} {theirs}, this run goes on with {ours}.")


def _note(args, text: str) -> None:
    if args.rank == 0:
        print(f"note: {text}", flush=True)


def _check_optimizer(args, saved: Namespace, folder: str) -> None:
    """What `optimizer_forms` cannot turn into this run's state."""
    ways = "use the same or --no-load-optim to take the weights and start the optimizer afresh."
    if (args.bf16 or args.fp16) and not (saved.bf16 or saved.fp16 or saved.use_distributed_optimizer):
        flag = "--bf16" if args.bf16 else "--fp16"
        raise ValueError(
            f"{folder} was trained in fp32, without a copy of the weights that {flag} goes on with: {ways}"
        )
    theirs, ours = saved.use_distributed_optimizer, args.use_distributed_optimizer
    plain_adam = lambda a: a.optimizer == "adam" and not a.use_precision_aware_optimizer
    converts = plain_adam(saved) and plain_adam(args) and (ours or saved.dist_ckpt_optim_fully_reshardable)
    if theirs != ours and not converts:
        have = lambda uses: "with" if uses else "without"
        raise ValueError(
            f"{folder} was saved {have(theirs)} --use-distributed-optimizer, this run is {have(ours)} it, and only the "
            f"state of adam without --use-precision-aware-optimizer, saved fully reshardable, serves both: {ways}"
        )


def _check_schedule(args, saved: Namespace, folder: str) -> None:
    """Another learning rate or length of training: on purpose, or by mistake?"""
    if args.override_opt_param_scheduler:
        return
    pairs = {f"--{name.replace('_', '-')}": (getattr(saved, name), getattr(args, name)) for name in _DECOUPLED}
    if not args.use_checkpoint_opt_param_scheduler:
        theirs, ours = _common_state(folder)["opt_param_scheduler"], _schedule(args)
        pairs |= {words: (theirs[name], ours[name]) for name, words in _SCHEDULE.items()}
    for words, (their, our) in pairs.items():
        if their != our:
            raise ValueError(
                f"{folder} was trained with {words} {their}, this run has {our}: use the same, or "
                "--override-opt-param-scheduler to go on with this run's schedules."
            )


def _schedule(args) -> dict:
    """What Megatron's scheduler of this run will save."""
    from megatron.training.training import get_optimizer_param_scheduler

    before = dict(vars(args))
    try:
        return get_optimizer_param_scheduler(Namespace(param_groups=[])).state_dict()
    finally:  # it fills in numbers, from which it would compute others the second time
        vars(args).clear()
        vars(args).update(before)


def _value(args: Namespace, name: str):
    if name == "num_query_groups" and not args.group_query_attention:
        return args.num_attention_heads  # Megatron writes that into its arguments, but only while it trains
    return getattr(args, name, None)
