"""Checks on a checkpoint before anything is built for it: complete, and of this model, mode and vocabulary."""

import os
import pickle
from argparse import Namespace

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
]
TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(load: str, step: int | None = None) -> str | None:
    """Folder of the checkpoint that `--load` (a run's folder, or an iteration's) names; None if it has none yet."""
    if os.path.basename(os.path.normpath(load)).startswith("iter_") and os.path.isdir(load):
        return load
    tracker = os.path.join(load, TRACKER)
    if step is None:
        if not os.path.isfile(tracker):
            return None
        with open(tracker) as file:
            text = file.read().strip()
        if not text.isdigit():
            raise ValueError(
                f"{tracker} should hold an iteration number but holds {text!r}: write the last good one into it."
            )
        step = int(text)
    return os.path.join(load, f"iter_{step:07d}")


def check_complete(folder: str) -> None:
    """ValueError if a torch_dist checkpoint is missing files or has truncated ones."""
    for name in (".metadata", "metadata.json"):  # the first is written after all shards
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"{folder} is not a complete checkpoint ({name} is missing): {_advice(folder)}")
    metadata_file = os.path.join(folder, ".metadata")
    try:
        with open(metadata_file, "rb") as file:
            metadata = pickle.load(file)
    except Exception as error:
        raise ValueError(f"{metadata_file} is damaged ({error}): {_advice(folder)}") from error
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = os.path.join(folder, name)
        size = os.path.getsize(path) if os.path.isfile(path) else -1
        if size < end:
            state = "missing" if size < 0 else f"truncated ({size} of {end} bytes)"
            raise ValueError(f"{path} is {state}: {_advice(folder)}")


def _advice(folder: str) -> str:
    run = os.path.dirname(os.path.normpath(folder))
    others = sorted(
        int(name.removeprefix("iter_"))
        for name in (os.listdir(run) if os.path.isdir(run) else ())
        if name.startswith("iter_") and name.removeprefix("iter_").isdigit() and name != os.path.basename(folder)
    )
    if not others:
        return "there is no other checkpoint beside it."
    return f"load an earlier one with --ckpt-step {others[-1]}."


def saved_arguments(folder: str) -> Namespace:
    """The arguments of the run that wrote the checkpoint."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    state = load_common_state_dict(folder)
    if "args" not in state:
        raise ValueError(f"{folder} holds no arguments: it was not written by this program.")
    return state["args"]


def check_before_loading(args) -> None:
    """ValueError if `--load` names a checkpoint that is damaged or of another model, mode or vocabulary."""
    if args.load is None:
        return
    folder = iteration_folder(args.load, args.ckpt_step)
    if folder is None:
        if args.load != args.save:  # the usual way to start: --load and --save name the same, still empty folder
            raise ValueError(f"--load {args.load} holds no checkpoint ({TRACKER} is missing): check the path.")
        return
    check_complete(folder)
    saved = saved_arguments(folder)
    fine_tunes = args.finetune  # weights only: another objective may continue them
    names = [*_SHAPE, "vocab_size"] + ([] if fine_tunes else ["dllm_mode", "dllm_mask_token_id"])
    for name in names:
        theirs, ours = _value(saved, name), _value(args, name)
        if theirs != ours:
            flag = "--" + name.replace("_", "-")
            hint = " (or --finetune, to start a new objective from its weights)" if name.startswith("dllm") else ""
            raise ValueError(f"{folder} was trained with {flag} {theirs}, this run has {ours}: use the same{hint}.")


def _value(args: Namespace, name: str):
    if name == "num_query_groups" and not args.group_query_attention:
        return args.num_attention_heads  # Megatron writes that into its arguments, but only while it trains
    return getattr(args, name, None)
