"""A model family: how its config.json and Megatron's arguments say the same, and where its weights lie.

Each family is one file of declarations beside this one. A configuration is a list of entries that are used in both
directions; what no entry explains is an error, because a value that is not implemented would silently give another
network.
"""

import copy
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_dllm.models.entries import Entry, flag, positive
from megatron_dllm.models.weights import Mapping, Table, expert_layers, target_layers

# The arguments that decide what the network computes, and their value in the plainest model.
PLAIN = dict(
    num_layers=None,
    hidden_size=None,
    ffn_hidden_size=None,
    num_attention_heads=None,
    num_query_groups=None,
    kv_channels=None,
    layernorm_epsilon=None,
    untie_embeddings_and_output_weights=True,
    normalization="RMSNorm",
    swiglu=True,
    squared_relu=False,
    quick_geglu=False,
    glu_linear_offset=0.0,
    activation_func_clamp_value=None,
    attention_output_gate=False,
    apply_residual_connection_post_layernorm=False,
    no_rope_freq=None,
    add_bias_linear=False,
    add_qkv_bias=False,
    qk_layernorm=False,
    rotary_base=10000,
    rotary_percent=1.0,
    dllm_rope_scaling=None,
    num_experts=None,
    moe_layer_freq=1,
    moe_ffn_hidden_size=None,
    moe_router_topk=2,
    moe_router_score_function="softmax",
    moe_router_pre_softmax=False,
    moe_router_enable_expert_bias=False,
    moe_router_num_groups=None,
    moe_router_group_topk=None,
    moe_router_topk_scaling_factor=None,
    moe_shared_expert_intermediate_size=None,
    moe_shared_expert_gate=False,
    moe_latent_size=None,
    moe_apply_probs_on_input=False,
    dflash_target_layers=None,
    dllm_architecture=None,
    dllm_window=None,
    dllm_full_attention_layers=None,
    dllm_full_kv_channels=None,
    dllm_full_query_groups=None,
    dllm_full_rotary_base=None,
    dllm_full_rotary_percent=None,
    dllm_logit_softcap=None,
)
# Keys of config.json that do not change what a trained network computes.
_HARMLESS = set(
    "_name_or_path architectures attn_implementation auto_map bos_token_id chunk_size_feed_forward dtype "
    "eos_token_id id2label initializer_range is_encoder_decoder label2id mask_token_id model_type output_attentions "
    "output_hidden_states pad_token_id problem_type pretraining_tp return_dict tokenizer_class torch_dtype "
    "transformers_version transformers.js_config unsloth_version unsloth_fixed use_cache vocab_size "
    "is_llama_config _model_name_or_path unk_token_id".split()
) | {"attention_dropout", "embedding_dropout", "output_dropout", "residual_dropout"}  # of training, set by flags here


@dataclass(frozen=True)
class Family:
    """entries, arguments: its configuration (`arguments`: fixed ones, beside those of PLAIN).
    weights: tables; folders may use any of them, the first is written.
    types: values of model_type; architecture: written, `also_architectures` are read too.
    transformers_config: name of the transformers class that fills in what a config.json leaves out.
    stock: family whose transformers class computes the same (for export --export-as transformers).
    mode, mask_token_id: what it is usually trained as; None for autoregressive families.
    suggested: further arguments a user would want, not part of the architecture.
    draft: half a model; embedding, head and tokenizer are those of its target.
    text_config: key of config.json under which the text model's lies, of a model that has other parts too; entries
    are of that one, `outer` of the whole. carried: beginnings of keys of the parts that are neither trained nor
    converted: export takes their weights from the reference, byte by byte.
    """

    name: str
    types: tuple[str, ...]
    architecture: str
    entries: tuple[Entry, ...]
    weights: tuple[Table, ...]
    arguments: dict = field(default_factory=dict)
    also_architectures: tuple[str, ...] = ()
    transformers_config: str | None = None
    stock: str | None = None
    mode: str | None = None
    mask_token_id: int | None = None
    suggested: dict = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    draft: bool = False
    text_config: str | None = None
    outer: tuple[Entry, ...] = ()
    carried: tuple[str, ...] = ()

    @property
    def has_own_code(self) -> bool:
        """Whether transformers needs files of the model's own folder to load it."""
        return self.transformers_config is None or self.draft

    def read(self, config: dict) -> dict:
        """Architecture arguments of a config.json. Raises ValueError (one sentence) for what is not implemented."""
        if config.get("quantization_config"):
            raise ValueError(
                "config.json says that the weights are quantized (quantization_config), and only unquantized ones are "
                "read: give the folder that they were made from."
            )
        arguments = PLAIN | self.arguments | dict(group_query_attention=True)
        if self.text_config is not None:
            outside = {key: value for key, value in config.items() if key != self.text_config}
            arguments |= self._explain(outside, self.outer, outside)
            config = config.get(self.text_config)
            if not isinstance(config, dict):
                raise ValueError(f"config.json lacks {self.text_config}, the text part of a {self.name} model.")
        filled = config
        if self.transformers_config is not None:
            filled = _with_defaults(self.transformers_config, config)
        arguments["vocab_size"] = positive(filled, "vocab_size")
        return arguments | self._explain(config, self.entries, filled)

    def _explain(self, config: dict, entries: tuple[Entry, ...], filled: dict) -> dict:
        """Arguments. Raises ValueError for a key that none of the entries knows."""
        explained = {key for entry in entries for key in entry.keys}
        for key, value in config.items():
            if key not in explained and key not in _HARMLESS and key not in self.harmless and value:
                raise ValueError(
                    f"config.json has {key} = {value!r}, which this family ({self.name}) does not implement: if it "
                    "does not change the network, remove the line."
                )
        arguments = {}
        for entry in entries:
            try:
                arguments |= entry.read(filled)
            except (TypeError, AttributeError) as error:  # a list for a number and the like
                have = ", ".join(f"{key} = {filled[key]!r}" for key in entry.keys if key in filled)
                raise ValueError(f"config.json has {have}, which is of a wrong type ({error}).") from error
        return arguments

    def write(self, args: Namespace) -> dict:
        """config.json (architecture only) of `args`. Raises ValueError if this family cannot express them."""
        fixed = PLAIN | self.arguments
        chosen = {argument for entry in (*self.entries, *self.outer) for argument in entry.arguments}
        if "num_experts" in chosen and args.num_experts is None:
            raise ValueError(f"{self.name} models have experts, this one has none.")
        if not self.draft and target_layers(args) is not None:
            raise ValueError(f"{self.name} models are whole ones, this is a draft, without an embedding and a head.")
        if args.num_experts is not None and args.moe_ffn_hidden_size is None:
            args = Namespace(**vars(args) | dict(moe_ffn_hidden_size=args.ffn_hidden_size))  # as Megatron takes it
        for name in chosen:
            fixed.pop(name, None)
        for name, wanted in fixed.items():
            if name.startswith("moe_") and args.num_experts is None:
                continue
            have = getattr(args, name, wanted)
            if name == "moe_layer_freq" and args.num_experts is not None:
                have, wanted = expert_layers(args), [True] * args.num_layers
            if have != wanted and not (have is None and wanted is False):
                raise ValueError(f"{self.name} models have {flag(name)} {wanted}, not {have}.")
        config = {"architectures": [self.architecture], "model_type": self.types[0]}
        text = config if self.text_config is None else config.setdefault(self.text_config, {})
        text["vocab_size"] = args.vocab_size
        try:
            for entry in self.entries:
                text |= entry.write(args)
            for entry in self.outer:
                config |= entry.write(args)
        except ValueError as error:
            raise ValueError(f"{self.name} models cannot be like this: {error}.") from error
        return config

    def mapping(self, args: Namespace, keys: Iterable[str] | None = None) -> Mapping:
        """Where the weights lie; of several tables, the one that fits the `keys` of a folder best."""
        mappings = [Mapping(table, args) for table in self.weights]
        if keys is None or len(mappings) == 1:
            return mappings[0]
        keys = set(keys)
        return min(mappings, key=lambda mapping: len(keys ^ set(mapping.hf)))


def _with_defaults(class_name: str, config: dict) -> dict:
    import transformers

    try:
        return getattr(transformers, class_name)(**copy.deepcopy(config)).to_dict()  # it writes into what it is given
    except Exception as error:  # strict dataclasses raise their own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"transformers does not accept config.json: {reason}") from error
