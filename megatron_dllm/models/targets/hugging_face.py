"""A target that transformers computes (--dflash-target-backend transformers): any local AutoModelForCausalLM folder.

So that drafts can be trained for families that are not ours, hybrid Mamba models among them. Every rank holds all of
it; under context parallelism every rank also runs the whole sequence and keeps its part. Its layers are hooked, so of
the hidden states only the chosen ones are kept; after the last layer comes the final norm, as in transformers'
`hidden_states`.

What is taken from its class is tried out rather than believed, on a few tokens, when it is built (`_try`): that hooks
see what `output_hidden_states` returns, that logits are hidden states times head, that packed documents do not see each
other.
"""

import inspect
from argparse import Namespace

import torch
from megatron.training.arguments import core_transformer_config_from_args

from megatron_dllm.models.targets.base import Ends, Target, Whole, all_rows

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_STATELESS = _ATTENTION | {"mlp", "moe", "dense", "sparse"}  # kinds of layers that remember nothing but keys and values


def read_config(path: str, trust_remote_code: bool = False):
    """The configuration of a folder's text model. Raises ValueError (one sentence)."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds
        raise ValueError(f"transformers cannot read {path}: {_first_line(error)}") from error
    return config.get_text_config()


def describe(path: str, trust_remote_code: bool = False) -> Namespace:
    """Its shape under Megatron's names; what a configuration does not say (heads of a model without attention) is
    missing. Raises ValueError (one sentence)."""
    config = read_config(path, trust_remote_code)
    get = lambda *names: next((v for name in names if isinstance(v := getattr(config, name, None), int | float)), None)
    heads, width = get("num_attention_heads"), get("hidden_size")
    rope = getattr(config, "rope_parameters", None) or {}
    found = dict(
        num_layers=get("num_hidden_layers"),
        hidden_size=width,
        vocab_size=get("vocab_size"),
        max_position_embeddings=get("max_position_embeddings"),
        ffn_hidden_size=get("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=get("num_key_value_heads") or heads,
        kv_channels=get("head_dim") or (width // heads if heads and width else None),
        layernorm_epsilon=get("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
        rotary_base=rope.get("rope_theta") or get("rope_theta"),
        dllm_mask_token_id=get("mask_token_id"),
    )
    for name in ("num_layers", "hidden_size", "vocab_size"):
        if not isinstance(found[name], int):
            raise ValueError(f"config.json of {path} does not say its {name}: a draft cannot be trained for it.")
    return Namespace(**{name: value for name, value in found.items() if value is not None})


def check(path: str, args: Namespace) -> None:
    """ValueError (one sentence) for data that this target cannot be given, before anything is loaded."""
    config = read_config(path, args.trust_remote_code)
    if not packs(args):
        return
    if (why := recurrent(config)) is not None:
        raise ValueError(
            f"--dflash-target {path} has {why}, whose state would run on from one packed document into the next: use "
            "--sft-data-path, or --dllm-cross-document-attention if documents shall follow each other."
        )
    window = _window(config)
    if window is not None and args.dllm_sequence_length > window:
        raise ValueError(
            f"--dflash-target {path} has layers that see {window} tokens, and transformers cannot keep packed "
            f"documents apart in them: use --seq-length {window} or less, --sft-data-path, or "
            "--dllm-cross-document-attention."
        )


def packs(args: Namespace) -> bool:
    """Whether sequences hold several documents that do not see each other."""
    return args.sft_data_path is None and not args.dllm_cross_document_attention


def recurrent(config) -> str | None:
    """What of a model is not attention: its state cannot be cut between tokens."""
    from transformers import AutoModelForCausalLM

    kinds = set(getattr(config, "layer_types", None) or ()) - _STATELESS
    if kinds:
        return f"{sorted(kinds)[0]} layers"
    own = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return "recurrent layers" if getattr(own, "_is_stateful", False) else None


def _window(config) -> int | None:
    """How far its shortest-sighted layers see; None if all see everything."""
    kinds = getattr(config, "layer_types", None)
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    if kinds is not None:
        sizes = {kind: name for kind, name in sizes.items() if kind in kinds}
    elif getattr(config, "use_sliding_window", True) is False:
        return None
    found = [getattr(config, name, None) for name in sizes.values()]
    return min((size for size in found if size is not None), default=None)


def build(args: Namespace, path: str, pg_collection=None) -> "TransformersTarget":
    """The whole model on this rank. Raises ValueError (one sentence) for weights that are missing or cannot be used."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config = core_transformer_config_from_args(args)
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=config.params_dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=args.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:
        raise ValueError(f"transformers cannot load {path}: {_first_line(error)}") from error
    finally:
        if bar:
            logging.enable_progress_bar()
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            key = sorted(str(key) for key in info[kind])[0]
            raise ValueError(f"{path} has no weights for {key} of its model ({kind.split('_')[0]}): download it again.")
    model = model.eval().requires_grad_(False).cuda()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise ValueError(f"transformers finds no embedding or no head in {path}: a draft cannot be trained for it.")
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            f"the head of {path} has a bias, which the draft's cross entropy does not add: drafts cannot be trained "
            "for it."
        )
    target = TransformersTarget(model, args.dflash_target_layers, packs(args))
    _try(target, model, path)
    table = embedding.weight
    if type(embedding) is not torch.nn.Embedding:  # one that scales what it looks up
        with torch.no_grad():
            table = embedding(torch.arange(len(table), device=table.device))
    tied = head.weight is table
    table, head = (weight.to(config.params_dtype) for weight in (table, head.weight))
    target.model = Ends(config, table, None if tied else head, args.padded_vocab_size, args.vocab_size, pg_collection)
    return target


class _Enough(Exception):
    """Leaves a pass after the last layer that is read: of a class that is not ours, its loop cannot be cut short."""


class TransformersTarget(Target):
    """model: of a transformers class for causal language models, of which only what makes hidden states is kept (its
    ends become `self.model`); layers: as in a MegatronTarget.

    packed: whether a sequence may hold several documents, which are then kept apart by a mask and positions that begin
    anew; otherwise the class is left to be causal by itself, and padding, which comes last, is seen by nothing.
    """

    decodes = False

    def __init__(self, model: torch.nn.Module, layers: list[int], packed: bool):
        self._body, self._chosen, self._packed = _body(model), layers, packed
        self._outputs: dict[int, torch.Tensor] = {}
        stack = _layers(self._body)
        for place in set(layers) - {len(stack) - 1}:
            stack[place].register_forward_hook(self._note(place))
        self._last = len(stack) - 1
        self._enough: int | None = None  # the layer that the pass being made ends with; None: all of them

    def _note(self, place: int):
        def hook(module, arguments, output):
            self._outputs[place] = output[0] if isinstance(output, tuple) else output
            if place == self._enough:
                raise _Enough

        return hook

    def features(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, attributes_BSA: torch.Tensor, last: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        whole = Whole(tokens_BS, attributes_BSA, self.model.pg_collection.cp)
        found = self.run(whole.tokens_BS, whole.position_ids_BS, whole.document_BS, last)
        return tuple(whole.own(x) for x in found) if last else whole.own(found)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        ends = self.model
        head_VD = None if ends.tied else all_rows(ends.head_VD, ends.true_vocab_size, ends.pg_collection.tp)
        return ends.table_VD, head_VD

    @torch.no_grad()
    def run(
        self, tokens_BS: torch.Tensor, position_ids_BS: torch.Tensor, document_BS: torch.Tensor, last: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`features` of whole sequences."""
        options = {}
        if self._packed:
            options = dict(attention_mask=_apart(document_BS, self._dtype), position_ids=position_ids_BS)
        self._enough = None if last else max(self._chosen)
        try:
            out = self._body(input_ids=tokens_BS, use_cache=False, return_dict=True, **options)
            self._outputs[self._last] = out.last_hidden_state
        except _Enough:
            pass
        finally:
            self._enough = None
        features_BSF = torch.cat([self._outputs[place] for place in self._chosen], dim=-1)
        features_SBF = features_BSF.transpose(0, 1).contiguous()
        last_BSD = self._outputs.get(self._last)
        self._outputs.clear()
        return (features_SBF, last_BSD.transpose(0, 1).contiguous()) if last else features_SBF

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._body.parameters()).dtype


def _apart(document_BS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, S, S] to be added to scores: a token sees itself and those before it in its document."""
    S = document_BS.shape[1]
    seen_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    seen_BSS &= torch.ones(S, S, dtype=torch.bool, device=document_BS.device).tril()
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen_BSS.shape, dtype=dtype, device=document_BS.device).masked_fill_(~seen_BSS, lowest)[:, None]


def _body(model: torch.nn.Module) -> torch.nn.Module:
    """What makes hidden states, without the head."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return model.base_model if body is None or body is model else body


def _layers(body: torch.nn.Module) -> torch.nn.ModuleList:
    """Its layers, one after the other."""
    count = body.config.get_text_config().num_hidden_layers
    found = [child for child in body.children() if isinstance(child, torch.nn.ModuleList) and len(child) == count]
    if len(found) != 1:
        raise ValueError(
            f"{type(body).__name__} has no list of its {count} layers to take outputs from: use another target."
        )
    return found[0]


@torch.no_grad()
def _try(target: TransformersTarget, model: torch.nn.Module, path: str) -> None:
    """ValueError (one sentence) unless the class does what is expected of it, on 8 tokens of its vocabulary."""
    device = model.device
    tokens_BS = (torch.arange(8, device=device)[None] * 7 + 3) % model.get_input_embeddings().weight.shape[0]
    positions_BS, documents_BS = torch.arange(8, device=device)[None], torch.zeros_like(tokens_BS)
    missing = {"attention_mask", "position_ids"} - set(inspect.signature(target._body.forward).parameters)
    if target._packed and missing:
        raise ValueError(
            f"{path} cannot be told {sorted(missing)[0]}, so its packed documents would see each other: use "
            "--sft-data-path, or --dllm-cross-document-attention."
        )
    out = model(input_ids=tokens_BS, use_cache=False, output_hidden_states=True, return_dict=True)
    theirs = torch.cat([out.hidden_states[layer + 1] for layer in target._chosen], -1)
    features = target.run(tokens_BS, positions_BS, documents_BS).transpose(0, 1)
    if not _close(features, theirs):
        raise ValueError(
            f"{path} returns other hidden states than its layers do, so they cannot be taken as they are made: use "
            "another target."
        )
    last = out.hidden_states[-1]
    product = torch.nn.functional.linear(last, model.get_output_embeddings().weight.to(last.dtype))
    if not _close(product, out.logits.to(last.dtype)):
        raise ValueError(
            f"the logits of {path} are not its hidden states times its head (scaled or capped?), which a draft's cross "
            "entropy is taken of: drafts cannot be trained for it."
        )
    if target._packed:
        documents_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]], device=device)
        positions_BS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=device)
        packed = target.run(tokens_BS, positions_BS, documents_BS)[3:]
        alone = target.run(tokens_BS[:, 3:], positions_BS[:, 3:], documents_BS[:, 3:])
        if not _close(packed, alone):
            raise ValueError(
                f"packed documents see each other in {path}: use --sft-data-path, or --dllm-cross-document-attention."
            )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the precision of rounding in other orders: what is wrong differs by as much as the values themselves."""
    tolerance = 1e-3 if a.dtype == torch.float32 else 0.05
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0] if lines else type(error).__name__}"
