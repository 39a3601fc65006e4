"""Entries of a family's configuration: each says the same in a config.json and in Megatron's arguments, both ways.

Values are checked when they are read, since a wrong one would otherwise surface as an error far from its cause, or not
at all.
"""

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_dllm.models.rope import SCALINGS, check_scaling
from megatron_dllm.models.weights import expert_layers


class Entry:
    """keys: of config.json that it explains; arguments: that it sets."""

    keys: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def read(self, config: dict) -> dict:
        """Arguments. Raises ValueError for a value that is not implemented."""
        raise NotImplementedError

    def write(self, args: Namespace) -> dict:
        """Keys. Raises ValueError for arguments that the family cannot express."""
        raise NotImplementedError


@dataclass
class Same(Entry):
    """A positive number that both sides have; `alias`: another name of the key, which is read too; `absent`: what is
    written where the argument is None."""

    key: str
    argument: str
    default: Any = ...
    alias: str | None = None
    whole: bool = True
    absent: Any = None

    def __post_init__(self):
        self.keys, self.arguments = (self.key, *([self.alias] if self.alias else [])), (self.argument,)

    def read(self, config):
        for key in self.keys:
            if config.get(key) is not None:
                return {self.argument: positive(config, key, self.whole)}
        if self.default is ...:
            raise ValueError(f"config.json lacks {self.key}.")
        return {self.argument: self.default}

    def write(self, args):
        value = getattr(args, self.argument)
        value = self.absent if value is None else value
        if value is None:
            raise ValueError(f"{flag(self.argument)} is not given")
        return {self.key: value}


@dataclass
class Only(Entry):
    """A key with one implemented value, and others that mean the same; `written=False` leaves it out of new files."""

    key: str
    value: Any
    also: tuple = ()
    default: Any = ...  # what a missing key means, if not `value`
    written: bool = True

    def __post_init__(self):
        self.keys = (self.key,)

    def read(self, config):
        value = config.get(self.key, self.value if self.default is ... else self.default)
        if value != self.value and value not in self.also:
            raise ValueError(f"config.json has {self.key} = {value!r}, and only {self.value!r} is implemented.")
        return {}

    def write(self, args):
        return {self.key: self.value} if self.written else {}


@dataclass
class Choice(Entry):
    """A key whose values stand for several arguments' values."""

    key: str
    values: dict[Any, dict]
    default: Any

    def __post_init__(self):
        self.keys, self.arguments = (self.key,), tuple(next(iter(self.values.values())))

    def read(self, config):
        value = config.get(self.key)
        value = self.default if value is None else value
        if value not in self.values:
            known = " or ".join(repr(x) for x in self.values)
            raise ValueError(f"config.json has {self.key} = {value!r}, and only {known} is implemented.")
        return self.values[value]

    def write(self, args):
        for value, arguments in self.values.items():
            if all(getattr(args, name) == wanted for name, wanted in arguments.items()):
                return {self.key: value}
        have = ", ".join(f"{flag(name)} {getattr(args, name)}" for name in self.arguments)
        raise ValueError(f"{self.key} cannot say {have}")


@dataclass
class Untied(Entry):
    """Whether the head has weights of its own."""

    key: str = "tie_word_embeddings"

    def __post_init__(self):
        self.keys, self.arguments = (self.key,), ("untie_embeddings_and_output_weights",)

    def read(self, config):
        return dict(untie_embeddings_and_output_weights=not config.get(self.key, False))

    def write(self, args):
        return {self.key: not args.untie_embeddings_and_output_weights}


@dataclass
class Heads(Entry):
    """Query heads, key/value heads (missing or 0: as many) and their size (missing: hidden / heads)."""

    heads: str = "num_attention_heads"
    groups: str = "num_key_value_heads"
    size: str | None = "head_dim"

    def __post_init__(self):
        self.keys = (self.heads, self.groups) + ((self.size,) if self.size else ())
        self.arguments = ("num_attention_heads", "num_query_groups", "kv_channels")

    def read(self, config):
        heads = positive(config, self.heads)
        groups = positive(config, self.groups) if config.get(self.groups) else heads
        if heads % groups:
            raise ValueError(f"config.json has {self.heads} = {heads}, which {self.groups} = {groups} does not divide.")
        if self.size and config.get(self.size):
            size = positive(config, self.size)
        else:
            width = positive(config, "d_model" if "d_model" in config else "hidden_size")
            size = width // heads
            if size * heads != width and not self.size:
                raise ValueError(f"config.json has a width of {width}, which {self.heads} = {heads} does not divide.")
        return dict(num_attention_heads=heads, num_query_groups=groups, kv_channels=size)

    def write(self, args):
        config = {self.heads: args.num_attention_heads, self.groups: groups_of(args)}
        if self.size:
            config[self.size] = args.kv_channels
        elif args.kv_channels * args.num_attention_heads != args.hidden_size:
            raise ValueError(f"--kv-channels {args.kv_channels} x heads is not --hidden-size {args.hidden_size}")
        return config


@dataclass
class Rope(Entry):
    """Rotary base, the rotated part of a head and scaling, in either of transformers' notations.

    dllm_rope_scaling is `rope_parameters` without base and partial factor, None if there is no scaling.
    """

    partial: float = 1.0  # what a missing key means; 1: the family's code rotates whole heads, whatever the key says
    old_notation: bool = False  # write rope_theta and rope_scaling, for modelling code of its time
    scalings: tuple[str, ...] = SCALINGS

    def __post_init__(self):
        self.keys = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
        self.arguments = ("rotary_base", "rotary_percent", "dllm_rope_scaling")

    def read(self, config):
        given = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        if nested := [key for key, value in given.items() if isinstance(value, dict)]:
            raise ValueError(f"config.json rotates layers of kinds ({nested[0]}) differently: only one is implemented.")
        for key in ("rope_theta", "partial_rotary_factor"):
            if given.get(key) is None:
                given[key] = config.get(key)
        if given["partial_rotary_factor"] is None:
            given["partial_rotary_factor"] = self.partial
        theta = positive(given, "rope_theta", whole=False)
        partial = positive(given, "partial_rotary_factor", whole=False)
        if partial > 1 or (partial != 1 and self.partial == 1):
            raise ValueError(f"config.json has partial_rotary_factor = {partial}, which is not implemented.")
        scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "partial_rotary_factor")}
        old_name = scaling.pop("type", None)
        kind = scaling["rope_type"] = scaling.get("rope_type") or old_name or "default"
        if kind not in ("default", *self.scalings):
            raise ValueError(
                f"config.json asks for rotary embeddings of the type {kind!r}, and only "
                f"{', '.join(('default', *self.scalings))} are implemented."
            )
        if kind != "default":
            check_scaling(scaling, "config.json")
        scaling = None if kind == "default" else dict(sorted(scaling.items()))
        return dict(rotary_base=plain_number(theta), rotary_percent=float(partial), dllm_rope_scaling=scaling)

    def write(self, args):
        scaling, base, percent = args.dllm_rope_scaling, float(args.rotary_base), args.rotary_percent
        if scaling is not None and scaling["rope_type"] not in self.scalings:
            raise ValueError(f"--dllm-rope-scaling of the type {scaling['rope_type']} is unknown to their code")
        if percent != 1.0 and self.partial == 1.0:
            raise ValueError(f"--rotary-percent {percent} is unknown to their code")
        if self.old_notation:
            config = dict(rope_theta=base, rope_scaling=scaling)
            return config | (dict(partial_rotary_factor=percent) if self.partial != 1.0 else {})
        parameters = dict(scaling or dict(rope_type="default"), rope_theta=base)
        if self.partial != 1.0:
            parameters["partial_rotary_factor"] = percent
        return dict(rope_parameters=parameters)


@dataclass
class AllFull(Entry):
    """Sliding-window attention is not implemented: every layer's type is full attention."""

    def __post_init__(self):
        self.keys = ("layer_types",)

    def read(self, config):
        kinds = set(config.get("layer_types") or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"config.json has layer_types {sorted(kinds)}, and only full_attention is implemented.")
        return {}

    def write(self, args):
        return {}


@dataclass
class DenseFirst(Entry):
    """The first layers without experts."""

    key: str = "first_k_dense_replace"

    def __post_init__(self):
        self.keys, self.arguments = (self.key,), ("moe_layer_freq",)

    def read(self, config):
        layers = positive(config, "num_hidden_layers")
        dense = positive(config, self.key) if config.get(self.key) else 0
        if dense >= layers:
            raise ValueError(f"config.json has {self.key} = {dense} of {layers} layers: none with experts is left.")
        return dict(moe_layer_freq=[0] * dense + [1] * (layers - dense))

    def write(self, args):
        sparse = expert_layers(args)
        dense = sparse.index(True) if True in sparse else len(sparse)
        if dense == len(sparse) or not all(sparse[dense:]):
            raise ValueError("layers without experts must come first, and others follow")
        return {self.key: dense}


def groups_of(args: Namespace) -> int:
    """Key/value heads."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def positive(config: dict, key: str, whole: bool = True) -> float | int:
    """A number of config.json. Raises ValueError if it is missing, no number, zero or less."""
    value = config.get(key)
    if value is None:
        raise ValueError(f"config.json lacks {key}.")
    numbers = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers) or not 0 < value < math.inf:
        raise ValueError(f"config.json has {key} = {value!r}: it must be a positive {'whole ' if whole else ''}number.")
    return value


def plain_number(value: float) -> float | int:
    """10000 for 10000.0: Megatron's rotary base is an integer."""
    return int(value) if value == int(value) else value


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
