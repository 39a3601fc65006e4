"""The frozen target of a draft: hidden states of some of its layers, its embeddings and its head.

It is a model of our own families, tensor-parallel like the draft (targets/megatron.py), or any model of transformers
(targets/hugging_face.py), or was run before (targets/offline.py); causal within each document. It gets no gradient, is
no part of the draft's checkpoint, and of its hidden states only the chosen ones are kept.
"""

import copy
import os
import sys
from argparse import Namespace
from dataclasses import dataclass

from megatron_dllm.models.targets.base import Target
from megatron_dllm.models.weights import target_layers

MEGATRON, TRANSFORMERS = BACKENDS = ("megatron", "transformers")  # --dflash-target-backend


@dataclass
class Described:
    """A target that has been looked at. args: its architecture; folder: of Hugging Face, else None; checkpoint:
    an iteration's folder of a run, else None."""

    args: Namespace
    folder: str | None = None
    checkpoint: str | None = None


def describe(path: str, backend: str = MEGATRON, trust_remote_code: bool = False) -> Described:
    """Raises ValueError (one sentence) if `path` is neither a Hugging Face folder nor that of a run, or not one that
    the backend can run. trust_remote_code: transformers may run code of the folder's own."""
    from megatron_dllm.checkpoint import iteration_folder
    from megatron_dllm.generation.load import saved_run
    from megatron_dllm.models.hf import read_config
    from megatron_dllm.models.targets import hugging_face

    path = os.path.abspath(path)
    if os.path.isfile(os.path.join(path, "config.json")):
        if _is_draft(read_config(path)):
            raise ValueError(f"--dflash-target {path} is a draft itself: name the model that it drafts for.")
        if backend == TRANSFORMERS:
            return Described(hugging_face.describe(path, trust_remote_code), folder=path)
        try:
            return Described(_of_our_families(path), folder=path)
        except ValueError as error:
            raise ValueError(
                f"--dflash-target {path} is no model of our families ({str(error).rstrip('.')}): use "
                "--dflash-target-backend transformers."
            ) from error
    checkpoint = iteration_folder(path, None)
    if checkpoint is None or not os.path.isdir(checkpoint):
        raise ValueError(f"--dflash-target {path} holds no model: give a Hugging Face folder, or the folder of a run.")
    if backend == TRANSFORMERS:
        raise ValueError(
            f"--dflash-target {path} is the folder of a run: leave out --dflash-target-backend transformers."
        )
    args = saved_run(checkpoint)
    if target_layers(args) is not None:
        raise ValueError(f"--dflash-target {path} holds a draft itself: name the model that it drafts for.")
    if getattr(args, "lora_rank", None) is not None:
        raise ValueError(
            f"--dflash-target {path} holds adapters beside its weights: export the run, which merges them, and name "
            "that folder."
        )
    return Described(args, checkpoint=checkpoint)


def _is_draft(config: dict) -> bool:
    from megatron_dllm.models import recognise

    try:
        return recognise(config).draft
    except ValueError:
        return False


def _of_our_families(path: str) -> Namespace:
    from megatron_dllm.conversion.source import family_of
    from megatron_dllm.models.hf import read_config

    family = family_of(read_config(path))
    return Namespace(**family.read(read_config(path)) | dict(dllm_family=family.name))


def backend_of(args: Namespace) -> str:
    """Drafts of before there was a choice have none."""
    return getattr(args, "dflash_target_backend", None) or MEGATRON


def check_decodable(path: str) -> None:
    """ValueError (one sentence) for a target that only transformers can run: what it remembers of a refused guess
    cannot be taken back (state of recurrent layers), or not by us."""
    try:
        describe(path)
    except ValueError as error:
        if "--dflash-target-backend transformers" not in str(error):
            raise
        reason = str(error).split(": use --dflash-target-backend")[0].removeprefix("--dflash-target ")
        raise ValueError(
            f"{reason}: a draft of it can be trained and exported here, but not decoded with, because what the target "
            "remembers of refused guesses must be taken back."
        ) from error


def defaults(path: str, backend: str = MEGATRON, trust_remote_code: bool = False) -> dict:
    """What a target says about the run that trains a draft for it: the draft's layers look like the target's."""
    from megatron_dllm.conversion.defaults import has_tokenizer

    described = describe(path, backend, trust_remote_code)
    args = described.args
    names = "hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon rotary_base"
    found = {
        name: getattr(args, name)
        for name in [*names.split(), "vocab_size", "max_position_embeddings"]
        if getattr(args, name, None) is not None  # a model of transformers may lack attention, for one
    }
    found |= dict(group_query_attention=True, qk_layernorm=True, dllm_family="dflash_draft")
    if described.folder is not None and has_tokenizer(described.folder):
        found |= dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=described.folder)
    elif described.checkpoint is not None:
        found |= {name: getattr(args, name) for name in ("tokenizer_type", "tokenizer_model", "chat_template")}
    if getattr(args, "dllm_mask_token_id", None) is not None:
        found["dllm_mask_token_id"] = args.dllm_mask_token_id
    return found


def check_pair(draft: str, args: Namespace, name: str, target: Namespace) -> None:
    """ValueError (one sentence) unless the draft that `args` describe was made for such a target; draft, name: the two,
    and the flags that say them."""
    known = getattr(args, "dflash_num_target_layers", None)
    sizes = dict(layers=(known, target.num_layers)) if known is not None else {}
    sizes["hidden channels"] = args.hidden_size, target.hidden_size
    sizes["tokens"] = args.vocab_size, target.vocab_size
    for what, (of_draft, of_target) in sizes.items():
        if None not in (of_draft, of_target) and of_draft != of_target:
            raise ValueError(
                f"{draft} was made for a target of {of_draft} {what}, and {name} has {of_target}: name the model that "
                "it drafts for."
            )


def check(args: Namespace) -> None:
    """Fill in which of its layers are read; ValueError (one sentence) if a draft of this shape does not fit it."""
    from megatron_dllm.models.dflash_draft import spread
    from megatron_dllm.models.targets import hugging_face, offline

    backend = backend_of(args)
    target = describe(args.dflash_target, backend, args.trust_remote_code).args
    args.dflash_target = os.path.abspath(args.dflash_target)
    if args.hf_model is not None:
        check_pair(f"--hf-model {args.hf_model}", args, f"--dflash-target {args.dflash_target}", target)
    args.dflash_num_target_layers = target.num_layers
    if getattr(target, "dllm_mode", None) in ("mdlm", "scdd") and os.environ.get("RANK", "0") == "0":
        print(
            f"Note: {args.dflash_target} was trained to attend in both directions ({target.dllm_mode}); a draft's "
            "target is read causally.",
            file=sys.stderr,
        )
    if args.dflash_target_layers is None:
        args.dflash_target_layers = spread(target.num_layers, args.num_layers)
    wrong = [layer for layer in args.dflash_target_layers if not 0 <= layer < target.num_layers]
    if wrong:
        raise ValueError(
            f"--dflash-target-layers {wrong[0]} does not exist: the target has {target.num_layers} layers, from 0 on."
        )
    if args.num_experts is not None:
        raise ValueError("a draft's layers are dense, whatever its target's are: leave out --num-experts.")
    if args.hidden_size != target.hidden_size:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not that of the target ({target.hidden_size}), whose head reads what "
            "the draft writes: leave it out."
        )
    if args.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft's vocabulary of {args.vocab_size} is not that of the target ({target.vocab_size}), whose "
            "embedding and head it uses: leave out --vocab-size, or take the target's tokenizer."
        )
    if backend == TRANSFORMERS:
        hugging_face.check(args.dflash_target, args)
    if args.dflash_features is not None:
        offline.check(args)


def check_weights(args: Namespace) -> None:
    """ValueError (one sentence) for a target whose files are damaged or incomplete, as their headers say: before there
    are data, processes or a model. (Of a run, `describe` has looked at them.)"""
    from megatron_dllm.models.hf import Folder
    from megatron_dllm.models.targets import megatron

    if args.dflash_target is None or args.dflash_features is not None:
        return
    backend = backend_of(args)
    described = describe(args.dflash_target, backend, args.trust_remote_code)
    if described.folder is None:
        return
    if backend == TRANSFORMERS:
        Folder(described.folder, readable=False)  # which keys its class has, only that class knows
    else:
        megatron.source(args, described)


def check_experts(args: Namespace) -> int:
    """How many experts a layer of the target has, for a run that shares them out among ranks; ValueError (one sentence)
    if they cannot be."""
    flag = f"--expert-model-parallel-size {args.expert_model_parallel_size} shares out the experts of the target, "
    if args.dflash_features is not None:
        raise ValueError(f"{flag}which does not run beside --dflash-features: leave it out.")
    if backend_of(args) == TRANSFORMERS:
        raise ValueError(
            f"{flag}and --dflash-target-backend transformers has all of it on every rank: leave out one of them."
        )
    experts = getattr(describe(args.dflash_target).args, "num_experts", None)
    if experts is None:
        raise ValueError(f"{flag}but {args.dflash_target} has none: leave it out.")
    if args.dflash_eval_interval is not None:
        raise ValueError(
            "--dflash-eval-interval decodes other prompts on every rank, in as many passes as they take, but passes "
            "through experts that ranks share are joint: leave it out under expert parallelism."
        )
    return experts


def draft_config(args: Namespace):
    """Megatron's configuration of the draft, which is dense: experts, and the ranks that share them, are the
    target's."""
    from megatron.training.arguments import core_transformer_config_from_args

    own = copy.copy(args)
    own.expert_model_parallel_size = 1
    return core_transformer_config_from_args(own)


class UnusableTarget(ValueError):
    """One sentence about a target, known only now that it is built."""


def build(args: Namespace, pg_collection=None) -> Target:
    """The target of a run, frozen, on this rank. Raises UnusableTarget for weights that cannot be read, or a class of
    transformers that does not do what a draft needs."""
    from megatron_dllm.models.targets import hugging_face, megatron, offline

    try:
        if args.dflash_features is not None:
            return offline.build(args, pg_collection)
        if backend_of(args) == TRANSFORMERS:
            return hugging_face.build(args, args.dflash_target, pg_collection)
        return megatron.build(args, describe(args.dflash_target), pg_collection)
    except ValueError as error:
        raise UnusableTarget(str(error)) from error
