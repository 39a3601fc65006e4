"""A Megatron checkpoint, saved in any layout, becomes a Hugging Face folder, streamed."""

import json
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dllm.checkpoint import RELEASE, TRACKER, iteration_folder
from megatron_dllm.conversion.adapters import adapter
from megatron_dllm.conversion.defaults import has_tokenizer
from megatron_dllm.data.tokenizer import SENTENCEPIECE, build_tokenizer
from megatron_dllm.generation.load import neutralise, saved_run
from megatron_dllm.models import FAMILIES, get_family, recognise
from megatron_dllm.models.dflash_draft import rule_flags
from megatron_dllm.models.family import Family
from megatron_dllm.models.hf import Folder, FolderWriter, check_new_folder, read_config
from megatron_dllm.models.weights import Mapping, target_layers
from megatron_dllm.modes import MODES

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt chat_template.jinja chat_template.json vocab.txt spiece.model"
).split()

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Export:
    """A checkpoint that has been looked at. config, generation: what will be config.json, generation_config.json."""

    folder: str
    args: Namespace
    family: Family
    mapping: Mapping
    config: dict
    generation: dict
    reference: str | None
    carried: Folder | None = None  # its weights of parts that are not trained go along
    merge: bool = True  # adapters into the weights; else they are left out


def plan(
    path: str, step: int | None = None, reference: str | None = None, family: str = "auto", merge: bool = True
) -> Export:
    """Everything that can be wrong with an export, found before anything is written. Raises ValueError (one sentence).

    path: a run's folder, or that of an iteration. reference: a Hugging Face folder whose configuration, tokenizer and
    code go with the weights; default: the one that the run began from, if it is still there. family: the name of the
    form to write, "auto" (the reference's, else the run's own, else the first that can express the model) or
    "transformers" (one that transformers has a class for). merge: of a run with adapters, W + (alpha / r) B A, else W.
    """
    folder = iteration_folder(path, step)
    if folder is None or not os.path.isdir(folder):
        missing = f"{TRACKER} is missing" if folder is None else f"there is no {os.path.basename(folder)}"
        raise ValueError(f"--load {path} holds no checkpoint ({missing}): give a run's folder or an iteration's.")
    args = saved_run(folder)
    _check_rule(args)
    own = getattr(args, "hf_model", None)
    if reference is None:
        reference = own if own and os.path.isdir(own) else None
    their_config = None if reference is None else read_config(reference)
    their_family = _family_of(args, reference)
    chosen = _choose(args, family, their_family)
    try:
        config = chosen.write(args)
    except ValueError as error:
        if family != "auto" or their_config is None:
            raise
        raise ValueError(f"the reference {reference} does not fit this checkpoint: {error}") from error
    if chosen.carried and own and their_family is not chosen:
        raise ValueError(
            f"the run began from {own}, whose other parts, {chosen.carried[0]}..., are not in its checkpoint: give "
            f"that folder, or another of the {chosen.name} family, as --hf-model."
        )
    keys = carried = None
    if their_family is chosen:
        config = _like(their_config, config, chosen)
        theirs = Folder(reference)
        keys = theirs.shapes  # of two layouts of experts, the reference's
        carried = theirs if chosen.carried else None
    elif their_config is not None:
        config |= {key: their_config[key] for key in (*_IDS, "initializer_range") if key in their_config}
    elif not chosen.draft:  # whose tokenizer is its target's
        config |= _ids_of_tokenizer(args)
    config |= _identity(args) | _direction(args, folder, chosen)
    generation = {key: config[key] for key in _IDS if key in config} | _generation_config(reference)
    if "mask_token_id" in config:
        generation["mask_token_id"] = config["mask_token_id"]
    return Export(folder, args, chosen, chosen.mapping(args, keys), config, generation, reference, carried, merge)


def _ids_of_tokenizer(args: Namespace) -> dict:
    """Special tokens of the run's own tokenizer, if it is still where it was."""
    try:
        tokenizer = build_tokenizer(args)
    except ValueError:
        return {}
    ids = dict(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)
    return {key: value for key, value in ids.items() if value is not None}


def _check_rule(args: Namespace) -> None:
    """ValueError for a draft whose blocks see less than a folder would say: it would be read as another network."""
    if target_layers(args) is not None and (flags := rule_flags(args)):
        raise ValueError(
            f"a draft's folder cannot say {flags}, and would be decoded as another network than was trained: decode "
            "with the run's folder (tools/generate.py --load), or train without, to export or use --save-hf-interval."
        )


def check_expressible(args: Namespace) -> None:
    """ValueError unless a run of these arguments can be exported as --save-hf-interval does it."""
    _check_rule(args)
    _choose(args, "auto", _family_of(args, args.hf_model)).write(args)


def _family_of(args: Namespace, reference: str | None) -> Family | None:
    """What a reference is: of the run's own folder the run knows (--dllm-family), of another its config.json says."""
    if reference is None:
        return None
    own = getattr(args, "hf_model", None)
    if own is not None and os.path.realpath(reference) == os.path.realpath(own):
        return get_family(args.dllm_family)
    return recognise(read_config(reference))


def _generation_config(reference: str | None) -> dict:
    path = os.path.join(reference or "", "generation_config.json")
    if reference is None or not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): correct or remove it.") from error


def _choose(args: Namespace, name: str, reference: Family | None) -> Family:
    own = getattr(args, "dllm_family", None)
    if name == "auto" and (reference is not None or own is not None):
        return reference or get_family(own)
    if name == "transformers" and own is not None:
        family = get_family(get_family(own).stock or own)
        if family.has_own_code:
            raise ValueError(f"transformers has no class for {own} models: leave out --export-as.")
        return family
    if name not in ("auto", "transformers"):
        return get_family(name)
    reasons = []
    for family in FAMILIES.values():
        if family.has_own_code:
            continue
        try:
            family.write(args)
            return family
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"no family of transformers is like this model: {' '.join(reasons)}")


def _like(reference: dict, config: dict, family: Family) -> dict:
    """The reference's configuration, in its own notation, with what has changed since (a larger vocabulary)."""
    theirs, ours = family.read(reference), family.read(reference | config)
    if theirs == ours:
        return dict(reference)
    if {k: v for k, v in theirs.items() if k != "vocab_size"} == {k: v for k, v in ours.items() if k != "vocab_size"}:
        sizes = lambda described: {key: described[key] for key in ("vocab_size", "embedding_size") if key in described}
        if (text := family.text_config) is not None:
            return reference | {text: reference[text] | sizes(config[text])}
        return reference | sizes(config)
    changed = next(name for name in ours if theirs.get(name) != ours[name])
    raise ValueError(
        f"the reference's config.json means --{changed.replace('_', '-')} {theirs[changed]}, the checkpoint has "
        f"{ours[changed]}: give the reference that it was made from, or none."
    )


def _identity(args: Namespace) -> dict:
    """What a diffusion model's folder must say: its mask token (one source for training and sampling) and precision."""
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    mask = getattr(args, "dllm_mask_token_id", None)
    return dict(dtype=dtype) | ({} if mask is None else dict(mask_token_id=mask))


def _direction(args: Namespace, folder: str, family: Family) -> dict:
    """transformers' decoders are causal, unless their configuration says that training was not (transformers >= 5).
    Not said of converted weights, which nobody has trained here, nor of modes whose rule no flag can express."""
    full = MODES[args.dllm_mode].FULL_WITHIN_DOCUMENT
    trained = os.path.basename(folder) != RELEASE
    return dict(is_causal=False) if full and trained and not family.has_own_code else {}


def run(
    planned: Export,
    save: str,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
    progress: Callable = lambda items: items,
) -> dict:
    """Write the folder `save`. dtype: of all weights but the experts' selection bias; default: as they are saved.

    Returns {"tensors": ..., "bytes": ..., "files": ...}. Nothing is left behind if it fails.
    """
    reader = open_checkpoint(planned)
    mapping = planned.mapping
    stored = lambda name: reader.dtype(name) if dtype is None or name.endswith("expert_bias") else dtype
    tensors = {key: (shape, stored(mapping.places[key][0][0])) for key, shape in mapping.hf.items()}
    carried, own = planned.carried, planned.family.carried
    along = [] if carried is None else [key for key in carried.shapes if key.startswith(own)]
    tensors |= {key: (carried.shapes[key], carried.dtypes[key]) for key in along}
    writer = FolderWriter(save, tensors, max_shard_bytes)
    check_new_folder(save, writer.total_bytes)
    writer.start()
    try:
        for name, (shape, pieces) in progress(mapping.megatron.items()):
            weight = reader.read(name, shape[0])
            if planned.merge and (found := adapter(reader, planned.args, name, shape)) is not None:
                weight = weight.float() + found.delta()
            weight = weight.to(stored(name))
            row = 0
            for piece in pieces:
                rows = weight[row : row + piece.stop - piece.start]
                writer.write(piece.key, piece.start, rows, piece.index)
                row += len(rows)
        for key in along:
            writer.write(key, 0, carried.read(key, 0, carried.shapes[key][0]))
        writer.close()
        _write_surroundings(planned, writer.part, dtype)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return dict(tensors=len(tensors), bytes=writer.total_bytes, files=len(writer.shards))


def open_checkpoint(planned: Export):
    """The planned checkpoint's weights, a torch_dist.Reader. Once per process."""
    from megatron_dllm.conversion import torch_dist
    from megatron_dllm.conversion.skeleton import skeleton

    neutralise(planned.args)
    planned.args.transformer_impl = "local"  # the same weights under the same names
    pieces, _ = torch_dist.pieces(skeleton(planned.args), _content_metadata(planned.folder))
    return torch_dist.Reader(planned.folder, pieces)


def _content_metadata(folder: str) -> dict:
    """How the checkpoint was arranged, for Megatron to find its weights again."""
    from megatron.core import dist_checkpointing

    return dict(dist_checkpointing.load_content_metadata(folder) or {})


def _write_surroundings(planned: Export, folder: str, dtype: torch.dtype | None) -> None:
    """config.json, generation_config.json, tokenizer and modelling code."""
    config = dict(planned.config)
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if "torch_dtype" in config:  # the older name, in the reference's notation
        config["torch_dtype"] = config.pop("dtype")
    _write_json(os.path.join(folder, "config.json"), config)
    reference = planned.reference
    if reference is not None:
        copy_tokenizer(reference, folder)
        code = planned.config.get("auto_map") is not None
        for name in sorted(os.listdir(reference)):
            if code and name.endswith(".py") and os.path.isfile(os.path.join(reference, name)):
                shutil.copy(os.path.join(reference, name), os.path.join(folder, name))
    if not has_tokenizer(folder):
        _write_tokenizer(planned.args, folder)
    _write_json(os.path.join(folder, "generation_config.json"), planned.generation)


def copy_tokenizer(source: str, folder: str) -> None:
    """The tokenizer's files of one Hugging Face folder into another."""
    for name in _TOKENIZER_FILES:
        if os.path.isfile(os.path.join(source, name)):
            shutil.copy(os.path.join(source, name), os.path.join(folder, name))


def _write_tokenizer(args: Namespace, folder: str) -> None:
    """The run's own, if transformers has a form for it."""
    path = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer" and path and os.path.isdir(path):
        copy_tokenizer(path, folder)
    elif args.tokenizer_type in SENTENCEPIECE and path and os.path.isfile(path):
        _write_sentencepiece(path, args.dllm_mask_token_id, folder)


def _write_sentencepiece(path: str, mask: int | None, folder: str) -> None:
    """As tokenizer.json: the same pieces under the same ids. (Among segmentations that are equally likely it may take
    another.) The file comes along too, under a name that no class of transformers takes for its own kind."""
    from transformers import PreTrainedTokenizerFast

    model = build_tokenizer(Namespace(tokenizer_type=SENTENCEPIECE[0], tokenizer_model=path))
    ids = dict(pad_token=model.pad_id, eos_token=model.eos_id, bos_token=model.bos_id, mask_token=mask)
    with tempfile.TemporaryDirectory() as part:
        shutil.copy(path, os.path.join(part, "tokenizer.model"))
        _write_json(os.path.join(part, "tokenizer_config.json"), dict(tokenizer_class="PreTrainedTokenizerFast"))
        try:
            converted = PreTrainedTokenizerFast.from_pretrained(part)
        except Exception:  # whatever transformers lacks for this kind
            converted = None
    shutil.copy(path, os.path.join(folder, "sentencepiece.model"))
    if converted is not None and len(converted) == model.vocab_size:
        converted.add_special_tokens(
            {name: converted.convert_ids_to_tokens(i) for name, i in ids.items() if i is not None}
        )
        converted.save_pretrained(folder)


def _write_json(path: str, content: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
