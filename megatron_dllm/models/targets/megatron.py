"""A target of one of our own families: tensor- and expert-parallel like the draft, causal within each document."""

import copy
from argparse import Namespace

import torch
from megatron.training.arguments import core_transformer_config_from_args

from megatron_dllm.models.dlm import DiffusionLM
from megatron_dllm.models.family import PLAIN
from megatron_dllm.models.targets.base import Target, all_rows
from megatron_dllm.modes.base import DOCUMENT, POSITION

# What the target has of its own; everything else about how it is computed is the run's.
_SHAPE = (*PLAIN, "vocab_size", "max_position_embeddings", "moe_router_dtype")


def causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A token and those before it in its document."""
    return (query[..., DOCUMENT] == key[..., DOCUMENT]) & (key[..., POSITION] <= query[..., POSITION])


def source(args: Namespace, described):
    """The weights of a Hugging Face folder, of which only headers are read. Raises ValueError (one sentence) for what
    is missing, damaged or of another shape."""
    from megatron_dllm.conversion.source import Source
    from megatron_dllm.models import get_family

    return Source(described.folder, get_family(described.args.dllm_family), _own(args, described))


def _own(args: Namespace, described) -> Namespace:
    own = copy.copy(args)
    for name in _SHAPE:
        if hasattr(described.args, name):
            setattr(own, name, getattr(described.args, name))
    own.fp8, own.fp8_param_gather = None, False  # a draft is decoded beside what is not rounded
    return own


def build(args: Namespace, described, pg_collection=None) -> "MegatronTarget":
    """On this rank. Raises ValueError for a checkpoint that cannot be read."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    from megatron_dllm.conversion.source import load_into
    from megatron_dllm.generation.load import read_weights

    own = _own(args, described)
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
        load_into(model, source(args, described), args.seed)
    else:
        read_weights(model, described.checkpoint)
    return MegatronTarget(model.to(config.params_dtype).cuda(), args.dflash_target_layers)


def _first_layers(model: DiffusionLM, count: int) -> DiffusionLM:
    """The model's embedding and its first layers, the very same modules: as a pipeline stage that another follows."""
    front, decoder = (copy.copy(module) for module in (model, model.decoder))
    for module in (front, decoder):
        module._modules = dict(module._modules)  # else the copy's are the original's
    decoder.layers, decoder.final_layernorm = decoder.layers[:count], None
    front.decoder, front.post_process = decoder, False
    return front


class MegatronTarget(Target):
    """layers: whose outputs `features` returns, counted from 0, in this order."""

    def __init__(self, model: DiffusionLM, layers: list[int]):
        self.model, self._layers = model.eval().requires_grad_(False), layers
        self._outputs: dict[int, torch.Tensor] = {}
        self._end = len(model.decoder.layers) - 1
        for place in {*layers, self._end}:
            # after the last one comes the final norm, as in transformers' hidden_states, which drafts are trained on
            module = model.decoder.final_layernorm if place == self._end else model.decoder.layers[place]
            module.register_forward_hook(self._note(place))
        self._front = None if self._end in layers else _first_layers(model, max(layers) + 1)

    def _note(self, place: int):
        def hook(module, arguments, output):
            self._outputs[place] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def features(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, attributes_BSA: torch.Tensor, last: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if last or self._front is None:
            self.model(tokens_BS, position_ids_BS, attributes_BSA, rows_N=tokens_BS.new_zeros(0))
        else:
            self._front(tokens_BS, position_ids_BS, attributes_BSA)
        last_SBD = self._outputs.get(self._end)
        return (self.taken(), last_SBD) if last else self.taken()

    def taken(self) -> torch.Tensor:
        """[S, B, F] of the pass that has just been made; once."""
        features_SBF = torch.cat([self._outputs[place] for place in self._layers], dim=-1)
        self._outputs.clear()
        return features_SBF

    def tables(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        model = self.model
        whole = lambda weight: all_rows(weight.detach(), model.true_vocab_size, model.pg_collection.tp)
        tied = model.share_embeddings_and_output_weights
        return whole(model.embedding.word_embeddings.weight), None if tied else whole(model.output_layer.weight)
