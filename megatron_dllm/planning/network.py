"""The network that a command describes, as numbers: layers, and how many parameters each part has.

Nothing is built: shapes follow from the flags as they do in models/dlm.py, gemma_layers.py and draft.py, and
tests/parallel/test_planning.py compares the counts with the parameters of real models, rank by rank.

Shapes: D width, V rows of the vocabulary (padded), h query heads, g key/value heads, d head size, F width of an MLP,
E experts.
"""

import functools
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass

from megatron_dllm.models.lora import PARTS, rank_of
from megatron_dllm.models.weights import attention_shape, expert_layers, is_gemma, target_layers

COLUMNS = ("linear_qkv", "linear_fc1")  # column-parallel: W and B cut by rows; the others: W and A cut by columns


class UnknownNetwork(ValueError):
    """What a command trains with is no network of ours."""


@dataclass(frozen=True)
class Count:
    """Numbers of parameters. split: tensor parallelism shares them out; whole: every tensor-parallel rank has all;
    expert: expert and expert-tensor parallelism share them out; expert_whole: expert parallelism alone does."""

    split: int = 0
    whole: int = 0
    expert: int = 0
    expert_whole: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(*(a + b for a, b in zip(self.values, other.values, strict=True)))

    def times(self, number: int) -> "Count":
        return Count(*(value * number for value in self.values))

    @property
    def values(self) -> tuple[int, int, int, int]:
        return self.split, self.whole, self.expert, self.expert_whole

    @property
    def of_experts(self) -> int:
        return self.expert + self.expert_whole

    @property
    def total(self) -> int:
        return sum(self.values)


@dataclass(frozen=True)
class Parameters:
    """Of a part of the network: all that it holds, and those of them that are trained."""

    all: Count = Count()
    trained: Count = Count()

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.all + other.all, self.trained + other.trained)

    def times(self, number: int) -> "Parameters":
        return Parameters(self.all.times(number), self.trained.times(number))


@dataclass(frozen=True)
class Adapters:
    """Of models/lora.py. rank: r; thin: by Megatron's layer that has an adapter, how many numbers stand between A and B
    for a row, T·r; dropout: whether A reads a copy of its own."""

    rank: int
    thin: dict[str, int]
    dropout: bool = False

    @classmethod
    def of(cls, args: Namespace) -> "Adapters | None":
        """None: all weights are trained."""
        if (rank := rank_of(args)) is None:
            return None
        numbers = {kind: sum(part in args.lora_targets for part in parts) for kind, parts in PARTS.items()}
        return cls(rank, {kind: rank * T for kind, T in numbers.items() if T}, bool(args.lora_dropout))


@dataclass(frozen=True)
class Layer:
    """One transformer layer. shared: values are made of the keys' projection; dense, experts: either, or both at once
    (gemma); window: attends under the windowed rule."""

    heads: int
    groups: int
    size: int
    shared: bool
    dense: int
    experts: int
    active: int
    expert: int
    shared_expert: int
    window: bool
    count: Parameters

    @property
    def query(self) -> int:
        """Width of all queries, h·d."""
        return self.heads * self.size

    @property
    def key(self) -> int:
        """Width of all keys, g·d."""
        return self.groups * self.size

    @property
    def qkv(self) -> int:
        """Rows of linear_qkv."""
        return self.query + self.key * (1 if self.shared else 2)


@dataclass(frozen=True)
class Network:
    """layers; width D; vocabulary V; gates: matrices before an activation (2 with a gate); first, last: what the first
    and last pipeline stage hold beside layers, the last one without the head; head: its table; tied: it is the
    embedding's, of which the last stage, if it is not the first, has a copy. adapters: all else is frozen.

    rotated: how many channels of a head are rotated; qk_norm: queries and keys are normed; gemma: layers of
    gemma_layers.py; bias: linear layers have biases.

    Of a draft: features, the width of what it reads of its target, and target, whose embedding and head it uses; of
    that target: run, how many of its layers run, and bytes that it has whatever the layout.
    """

    layers: tuple[Layer, ...]
    width: int
    vocabulary: int
    gates: int
    first: Parameters
    last: Parameters
    head: Parameters
    tied: bool
    rotated: int
    qk_norm: bool
    gemma: bool = False
    bias: bool = False
    adapters: Adapters | None = None
    features: int = 0
    target: "Network | None" = None
    run: int = 0

    @classmethod
    def of(cls, args: Namespace) -> "Network":
        """Of checked arguments. Raises UnknownNetwork (one sentence) for a target that is not ours."""
        draft = target_layers(args) is not None
        network = _network(args, draft)
        if not draft:
            return network
        target, run = _target(args)
        features = len(args.dflash_target_layers) * args.hidden_size
        D = args.hidden_size
        first = _plain(args, Count(split=features * D, whole=D))
        return _replaced(network, first=first, features=features, target=target, run=run)

    @functools.cached_property
    def kinds(self) -> dict[Layer, int]:
        """How many layers there are of each kind."""
        return dict(Counter(self.layers))

    def rotated_of(self, layer: Layer) -> int:
        """Channels of a head that have an angle."""
        return layer.size if self.gemma else self.rotated

    @property
    def angles(self) -> int:
        """Of a position, over all kinds of layers."""
        return sum({self.rotated_of(layer) for layer in self.layers})

    @property
    def frozen_head(self) -> bool:
        """Whether the head is not trained: a target's, or any under adapters."""
        return self.target is not None or self.adapters is not None

    def thin(self, kind: str) -> int:
        """Width between A and B of Megatron's layer of this name; 0 without an adapter."""
        return 0 if self.adapters is None else self.adapters.thin.get(kind, 0)

    @property
    def count(self) -> Parameters:
        """Of the whole model, what is tied counted once."""
        ends = self.first + self.last + (Parameters() if self.tied else self.head)
        return sum((layer.count for layer in self.layers), ends)

    @property
    def active(self) -> int:
        """Parameters that one token meets: of the experts only the chosen ones, and no embedding."""
        idle = sum(
            layer.count.all.of_experts * (layer.experts - layer.active) // max(1, layer.experts)
            for layer in self.layers
        )
        return self.count.all.total - idle - (0 if self.tied or self.target else self.vocabulary * self.width)


def _replaced(network: Network, **changes) -> Network:
    return Network(**{name: getattr(network, name) for name in Network.__dataclass_fields__} | changes)


def _network(args: Namespace, draft: bool) -> Network:
    D, V, gemma = args.hidden_size, args.padded_vocab_size, is_gemma(args)
    gates = 2 if args.swiglu else 1
    norm = D * (2 if args.normalization == "LayerNorm" else 1)
    tied = not args.untie_embeddings_and_output_weights
    first = head = _plain(args, Count(split=V * D))
    if gemma:  # self-conditioning
        first = first + _mlp(args, args.ffn_hidden_size, gates, bias=False) + _plain(args, Count(whole=D))
    if draft:
        first, head, tied = Parameters(), Parameters(), False
    return Network(
        layers=_layers(args, D, gates, norm),
        width=D,
        vocabulary=V,
        gates=gates,
        first=first,
        last=_plain(args, Count(whole=norm)),
        head=head,
        tied=tied,
        rotated=int(args.kv_channels * args.rotary_percent),
        qk_norm=bool(args.qk_layernorm),
        gemma=gemma,
        bias=bool(args.add_bias_linear),
        adapters=Adapters.of(args),
    )


def _layers(args: Namespace, D: int, gates: int, norm: int) -> tuple[Layer, ...]:
    """Layers of a kind are one object."""
    kinds: dict[Layer, Layer] = {}
    layers = (_layer(args, number, D, gates, norm) for number in range(args.num_layers))
    return tuple(kinds.setdefault(layer, layer) for layer in layers)


def _layer(args: Namespace, number: int, D: int, gates: int, norm: int) -> Layer:
    gemma = is_gemma(args)
    h = args.num_attention_heads
    g, d, shared = attention_shape(args, number)
    qkv = h * d + g * d * (1 if shared else 2)
    bias = bool(args.add_bias_linear)
    count = _linear(args, "linear_qkv", D, qkv, bias or bool(args.add_qkv_bias))
    count += _linear(args, "linear_proj", h * d, D, bias)
    count += _plain(args, Count(whole=(7 if gemma else 2) * norm + (2 * d if args.qk_layernorm else 0)))
    sparse = gemma or expert_layers(args)[number]
    dense = args.ffn_hidden_size if gemma or not sparse else 0
    if dense:
        count += _mlp(args, dense, gates, bias)
    E = active = width = shared_width = 0
    if sparse:
        E, active = args.num_experts, args.moe_router_topk
        width = args.moe_ffn_hidden_size or args.ffn_hidden_size
        shared_width = 0 if gemma else args.moe_shared_expert_intermediate_size or 0
        count += _mlp(args, width, gates, bias, experts=E)
        router = Count(whole=E * D + (E if bias else 0) + (D + E if gemma else 0))
        count += Parameters(router) if gemma and not args.dllm_train_router else _plain(args, router)
        if shared_width:
            count += _mlp(args, shared_width, gates, bias)
            count += _plain(args, Count(whole=D if args.moe_shared_expert_gate else 0))
    window = gemma and number not in args.dllm_full_attention_layers
    return Layer(h, g, d, shared, dense, E, active, width, shared_width, window, count)


def _plain(args: Namespace, count: Count) -> Parameters:
    """What has no adapter."""
    return Parameters(count, count if rank_of(args) is None else Count())


def _mlp(args: Namespace, width: int, gates: int, bias: bool, experts: int = 0) -> Parameters:
    into = _linear(args, "linear_fc1", args.hidden_size, gates * width, bias, experts)
    return into + _linear(args, "linear_fc2", width, args.hidden_size, bias, experts)


def _linear(args: Namespace, kind: str, inputs: int, outputs: int, bias: bool, experts: int = 0) -> Parameters:
    """Megatron's layer of this name, W [outputs, inputs], and its adapter. experts: of so many; 0: it is not theirs."""
    columns, adapters = kind in COLUMNS, Adapters.of(args)
    if experts:
        number = lambda cut, whole: Count(expert=experts * cut, expert_whole=experts * whole)
    else:
        number = Count
    biases = outputs if bias else 0
    base = number(inputs * outputs + biases, 0) if columns else number(inputs * outputs, biases)
    if adapters is None:
        return Parameters(base, base)
    A, B = adapters.thin.get(kind, 0) * inputs, adapters.rank * outputs if kind in adapters.thin else 0
    adapter = number(B, A) if columns else number(A, B)
    return Parameters(base + adapter, adapter)


def _target(args: Namespace) -> tuple[Network, int]:
    """A draft's target, and how many of its layers run (0: its hidden states are read from a folder)."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    from megatron_dllm.models.target import MEGATRON, backend_of, describe
    from megatron_dllm.models.targets.megatron import _own

    backend = backend_of(args)
    if backend != MEGATRON:
        raise UnknownNetwork(
            f"--dflash-target-backend {backend}: what transformers needs for a model cannot be planned, only targets "
            "of our own families (leave the flag out)."
        )
    described = describe(args.dflash_target, backend, args.trust_remote_code)
    own = _own(args, described)
    own.dflash_target_layers = None
    own.padded_vocab_size = vocab_size_with_padding(own.vocab_size, own, logging_enabled=False)
    target = _network(own, draft=False)
    if args.dflash_features is not None:
        return _replaced(target, layers=()), 0
    distils = bool(getattr(args, "dflash_kl_weight", 0))
    layers = len(target.layers)
    return target, layers if distils else max(args.dflash_target_layers) + 1
