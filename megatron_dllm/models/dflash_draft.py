"""DFlash drafts (arXiv:2602.06036): a few Qwen3 layers that guess a block of tokens from a target's hidden states.

Half a model: embedding, head and tokenizer are its target's. A folder holds fc (the chosen hidden states, side by side,
to the draft's width), hidden_norm, layers and norm, without a prefix. Its config.json is Qwen3's, with `block_size`,
`num_target_layers` and `dflash_config`. The network is in draft.py.

Equal to DFlashDraftModel of the package `dflash` 0.1.0. DFlash 2 (convolutions between the layers, a selector of
candidates) has other keys, and is refused by their names.
"""

from dataclasses import dataclass

from megatron_dllm.models.entries import AllFull, Entry, Heads, Only, Rope, positive
from megatron_dllm.models.family import Family
from megatron_dllm.models.llama import LAYERS, head_norms, layer_weights
from megatron_dllm.models.weights import target_layers

# What is done to the target's embeddings and logits, and its value where nothing is.
_PLAIN = dict(output_multiplier=1.0, input_embedding_scale=1.0, final_logit_softcapping=None)


def spread(total: int, count: int) -> list[int]:
    """The `count` of a target's `total` layers that a draft reads unless its config.json names others: from the second
    to the third from last, evenly. Of small targets some come twice. Layers count from 0, and are read at their end."""
    if count == 1:
        return [total // 2]
    return [round(1 + i * (total - 4) / (count - 1)) for i in range(count)]


def rule_flags(args) -> str:
    """The flags by which the run of a draft changed what its blocks see; none: "". No config.json of a published draft
    says any of it in a way that their programs read alike."""
    causal = ["--dflash-causal-block"] if getattr(args, "dflash_causal_block", False) else []
    window = getattr(args, "dflash_window", None)
    return " ".join(causal + ([] if window is None else [f"--dflash-window {window}"]))


@dataclass
class _Draft(Entry):
    """What a draft has beside its layers. Most keys lie in `dflash_config`, or else beside it."""

    inner = ("target_layer_ids", "mask_token_id", "block_size", *_PLAIN)

    def __post_init__(self):
        # mask_token_id beside dflash_config is every family's
        self.keys = ("dflash_config", "num_target_layers", *(key for key in self.inner if key != "mask_token_id"))
        self.arguments = ("dflash_target_layers", "dflash_num_target_layers", "dllm_block_size", "dllm_mask_token_id")

    def read(self, config):
        own = config.get("dflash_config") or {}
        for key, value in own.items():
            if key not in self.inner and value:
                raise ValueError(f"config.json has {key} = {value!r} in dflash_config, which is not implemented.")
        values = {key: own.get(key, config.get(key)) for key in self.inner}
        for key, plain in _PLAIN.items():
            if values[key] not in (plain, None):
                raise ValueError(f"config.json has {key} = {values[key]!r}, and only {plain!r} is implemented.")
        mask, block = values["mask_token_id"], positive(values, "block_size")
        if isinstance(mask, bool) or not isinstance(mask, int) or mask < 0:
            raise ValueError(f"config.json has mask_token_id = {mask!r} in dflash_config: it must be a token's id.")
        if block < 2:
            raise ValueError(f"config.json has block_size = {block}: a block is a known token and at least one guess.")
        total, layers = positive(config, "num_target_layers"), values["target_layer_ids"]
        if layers is None:
            layers = spread(total, positive(config, "num_hidden_layers"))
        wrong = [x for x in layers if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < total]
        if wrong or not layers:
            raise ValueError(f"config.json has target_layer_ids = {layers}: name layers of the target's {total}.")
        return dict(
            dflash_target_layers=list(layers),
            dflash_num_target_layers=total,
            dllm_block_size=block,
            dllm_mask_token_id=mask,
        )

    def write(self, args):
        layers = target_layers(args)
        if layers is None:
            raise ValueError("this is a whole model, with an embedding and a head")
        return dict(
            block_size=args.dllm_block_size,
            num_target_layers=args.dflash_num_target_layers,
            dflash_config=dict(mask_token_id=args.dllm_mask_token_id, target_layer_ids=list(layers)),
        )


@dataclass
class _SpelledOut(Rope):
    """In both of transformers' notations, with what could be left out: drafts are served by programs of either time,
    and one that takes, say, the rotated part from somewhere else accepts next to nothing, without an error."""

    def write(self, args):
        parameters = super().write(args)["rope_parameters"]
        both = dict(rope_theta=parameters["rope_theta"], rope_scaling=args.dllm_rope_scaling)
        return both | dict(rope_parameters=parameters | dict(partial_rotary_factor=1.0))


@dataclass
class _FullLayers(AllFull):
    """The layers' types, spelled out."""

    def write(self, args):
        return dict(layer_types=["full_attention"] * args.num_layers)


DFLASH_DRAFT = Family(
    name="dflash_draft",
    types=("qwen3",),
    architecture="DFlashDraftModel",
    also_architectures=("DFlash2DraftModel",),
    transformers_config="Qwen3Config",
    entries=(
        *LAYERS,
        Heads(),
        _SpelledOut(),
        _FullLayers(),
        _Draft(),
        Only("use_sliding_window", False),
        Only("attention_bias", False),
        Only("is_causal", False, also=(None,), written=False),
        Only("tie_word_embeddings", False, also=(True, None)),  # there is nothing to tie
    ),
    weights=({name: name for name in ("fc.weight", "hidden_norm.weight")} | layer_weights("") | head_norms(""),),
    arguments=dict(qk_layernorm=True),
    harmless=("sliding_window", "max_window_layers"),
    draft=True,
)
