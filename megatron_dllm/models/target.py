"""The frozen target of a draft: hidden states of some of its layers, its embeddings and its head.

It is one of our own models (any family), tensor-parallel like the draft, causal within each document. It gets no
gradient, is no part of the draft's checkpoint, and of its hidden states only the chosen ones are kept.
"""

import copy
import os
from argparse import Namespace
from dataclasses import dataclass

import torch
from megatron.training.arguments import core_transformer_config_from_args

from megatron_dllm.models.dlm import DiffusionLM
from megatron_dllm.models.family import PLAIN
from megatron_dllm.models.weights import target_layers
from megatron_dllm.modes.base import DOCUMENT, POSITION

# What the target has of its own; everything else about how it is computed is the run's.
_SHAPE = (*PLAIN, "vocab_size", "max_position_embeddings", "moe_router_dtype")


@dataclass
class Described:
    """A target that has been looked at. args: its architecture; folder: of Hugging Face, else None; checkpoint:
    an iteration's folder of a run, else None."""

    args: Namespace
    folder: str | None = None
    checkpoint: str | None = None


def describe(path: str) -> Described:
    """Raises ValueError (one sentence) if `path` is neither a Hugging Face folder nor that of a run."""
    from megatron_dllm.checkpoint import iteration_folder
    from megatron_dllm.conversion.source import family_of
    from megatron_dllm.generation.load import saved_run
    from megatron_dllm.models.hf import read_config

    path = os.path.abspath(path)
    if os.path.isfile(os.path.join(path, "config.json")):
        family = family_of(read_config(path))
        if family.draft:
            raise ValueError(f"--dflash-target {path} is a draft itself: name the model that it drafts for.")
        args = Namespace(**family.read(read_config(path)) | dict(dllm_family=family.name))
        return Described(args, folder=path)
    checkpoint = iteration_folder(path, None)
    if checkpoint is None or not os.path.isdir(checkpoint):
        raise ValueError(f"--dflash-target {path} holds no model: give a Hugging Face folder, or the folder of a run.")
    args = saved_run(checkpoint)
    if target_layers(args) is not None:
        raise ValueError(f"--dflash-target {path} holds a draft itself: name the model that it drafts for.")
    return Described(args, checkpoint=checkpoint)


def defaults(path: str) -> dict:
    """What a target says about the run that trains a draft for it: the draft's layers look like the target's."""
    from megatron_dllm.conversion.defaults import has_tokenizer

    described = describe(path)
    args = described.args
    names = "hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon rotary_base"
    found = {name: getattr(args, name) for name in [*names.split(), "vocab_size", "max_position_embeddings"]}
    found |= dict(group_query_attention=True, qk_layernorm=True, dllm_family="dflash_draft")
    if described.folder is not None and has_tokenizer(described.folder):
        found |= dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=described.folder)
    elif described.checkpoint is not None:
        found |= {name: getattr(args, name) for name in ("tokenizer_type", "tokenizer_model", "chat_template")}
    if getattr(args, "dllm_mask_token_id", None) is not None:
        found["dllm_mask_token_id"] = args.dllm_mask_token_id
    return found


def check(args: Namespace) -> None:
    """Fill in which of its layers are read; ValueError (one sentence) if a draft of this shape does not fit it."""
    from megatron_dllm.models.dflash_draft import spread

    target = describe(args.dflash_target).args
    args.dflash_target = os.path.abspath(args.dflash_target)
    known = getattr(args, "dflash_num_target_layers", None)  # what the folder of a draft says
    if known not in (None, target.num_layers):
        raise ValueError(
            f"--hf-model {args.hf_model} was made for a target of {known} layers, and --dflash-target has "
            f"{target.num_layers}: name the model that it drafts for."
        )
    args.dflash_num_target_layers = target.num_layers
    if args.dflash_target_layers is None:
        args.dflash_target_layers = spread(target.num_layers, args.num_layers)
    wrong = [layer for layer in args.dflash_target_layers if not 0 <= layer < target.num_layers]
    if wrong:
        raise ValueError(
            f"--dflash-target-layers {wrong[0]} does not exist: the target has {target.num_layers} layers, from 0 on."
        )
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


def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A token and those before it in its document."""
    return (query[..., DOCUMENT] == key[..., DOCUMENT]) & (key[..., POSITION] <= query[..., POSITION])


def build(args: Namespace, pg_collection=None) -> "Target":
    """The target of a run, frozen, on this rank. Raises ValueError for a checkpoint that cannot be read."""
    from megatron.core import dist_checkpointing
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    from megatron_dllm.conversion.source import Source, load_into
    from megatron_dllm.models import get_family

    described = describe(args.dflash_target)
    own = copy.copy(args)
    for name in _SHAPE:
        if hasattr(described.args, name):
            setattr(own, name, getattr(described.args, name))
    # sequence parallelism shares out activations that are kept for backward: here none are
    own.sequence_parallel, own.recompute_granularity, own.recompute_method = False, None, None
    own.dflash_target_layers = None
    own.padded_vocab_size = vocab_size_with_padding(own.vocab_size, own, logging_enabled=False)
    config = core_transformer_config_from_args(own)
    config.perform_initialization = False
    model = DiffusionLM(
        config,
        rule=causal,
        vocab_size=own.padded_vocab_size,
        true_vocab_size=own.vocab_size,
        max_sequence_length=own.max_position_embeddings,
        share_embeddings_and_output_weights=not own.untie_embeddings_and_output_weights,
        rotary_base=own.rotary_base,
        rotary_percent=own.rotary_percent,
        rope_scaling=own.dllm_rope_scaling,
        attention_backend=args.dllm_attention_backend,
        pg_collection=pg_collection,
    )
    if described.folder is not None:
        load_into(model, Source(described.folder, get_family(described.args.dllm_family), own), args.seed)
    else:
        metadata = dist_checkpointing.load_content_metadata(described.checkpoint)
        state = dict(model=model.sharded_state_dict(metadata=metadata))
        strict = dist_checkpointing.validation.StrictHandling.RAISE_UNEXPECTED
        model.load_state_dict(dist_checkpointing.load(state, described.checkpoint, strict=strict)["model"])
    return Target(model.to(config.params_dtype).cuda(), args.dflash_target_layers)


class Target:
    """layers: whose outputs `features` returns, counted from 0, in this order."""

    def __init__(self, model: DiffusionLM, layers: list[int]):
        self.model, self._layers = model.eval().requires_grad_(False), layers
        self._outputs: dict[int, torch.Tensor] = {}
        for place in set(layers):
            last = place == len(model.decoder.layers) - 1
            # after the last one comes the final norm, as in transformers' hidden_states, which drafts are trained on
            module = model.decoder.final_layernorm if last else model.decoder.layers[place]
            module.register_forward_hook(self._note(place))

    def _note(self, place: int):
        def hook(module, arguments, output):
            self._outputs[place] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def features(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, attributes_BSA: torch.Tensor
    ) -> torch.Tensor:
        """[S, B, F] hidden states of the layers side by side, of this rank's part of the sequence (attributes: of all
        of it, like a DiffusionLM's)."""
        self.model(tokens_BS, position_ids_BS, attributes_BSA, rows_N=tokens_BS.new_zeros(0))
        return self.taken()

    def taken(self) -> torch.Tensor:
        """[S, B, F] of the pass that has just been made; once."""
        features_SBF = torch.cat([self._outputs[place] for place in self._layers], dim=-1)
        self._outputs.clear()
        return features_SBF

    @torch.no_grad()
    def embed(self, tokens_BQ: torch.Tensor) -> torch.Tensor:
        """[Q, B, D]"""
        return self.model.embedding(input_ids=tokens_BQ, position_ids=None)
