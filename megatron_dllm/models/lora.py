"""LoRA (arXiv:2106.09685): a frozen linear layer W and a trained product of two thin matrices beside it,

    y = W x + (alpha / r) · B A dropout(x),   A [r, in] drawn, B [out, r] zero at first.

Targets are PEFT's: q_proj, k_proj and v_proj have an A each although Megatron computes them in one product, and so have
gate_proj and up_proj. So a target of ours is a target of PEFT's, alone or with others, and what is trained is what PEFT
would train. Of a fused layer with the parts t = 0..T-1

    A [T r, in]    one part's rows below the other's
    B [out, r]     its rows are those of W, in W's order and cut over tensor-parallel ranks as W's are
    ΔW = (alpha / r) · wide(B) A,   wide(B) [out, T r]: a row of part t has its r numbers in t's columns, else zeros

`wide` costs T times the (small) product with B, and spares a permutation of activations. Rows of parts that are no
target stay zero.

A and B are parameters of Megatron's layer itself, `...linear_qkv.lora_A` and `.lora_B`: hooks on the layer (the
distributed optimizer's overlapped parameter gather) see them.

Tensor parallelism. Column-parallel layers have B's rows cut and A whole, row-parallel ones A's columns cut and B whole;
what crosses ranks is r wide. Under sequence parallelism the whole matrix meets a shard of the sequence, and Megatron
adds up its gradient (`sequence_parallel`). Experts' tokens are exchanged by the dispatcher, outside of the layers:
there the whole matrix has a partial gradient on each expert-tensor-parallel rank, which is summed as it is made.

Dropout belongs to the layer's input, one mask for all parts, drawn as Megatron draws its own: from the state that
tensor-parallel ranks share where they hold the same input, else from the rank's own. So it depends on the layout.
"""

import functools
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_dllm.models.init import global_name, held, is_expert
from megatron_dllm.models.weights import ADAPTER, attention_shape

ALL = "all-linear"
A, B = (end.removeprefix(".") for end in ADAPTER)
# Megatron's layers and the parts of each, in PEFT's words
PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def available(args: Namespace) -> dict[str, tuple[str, ...]]:
    """PARTS of the layers that the model of `args` has."""
    return PARTS if args.swiglu else PARTS | dict(linear_fc1=("up_proj",))


def read_targets(words: list[str], args: Namespace) -> list[str]:
    """Targets in PEFT's words, each once, in the order of PARTS. Megatron's names mean all of a layer's parts.
    Raises ValueError (one sentence) for a name that is none."""
    layers = available(args)
    projections = [part for parts in layers.values() for part in parts]
    chosen = set()
    for word in (name for given in words for name in given.split(",") if name):
        if word not in (ALL, *layers, *projections):
            raise ValueError(
                f"--lora-targets {word} is no layer of this model: choose from {', '.join(projections)}, Megatron's "
                f"{', '.join(layers)}, or {ALL}."
            )
        chosen.update(projections if word == ALL else layers.get(word, (word,)))
    if not chosen:
        raise ValueError(f"--lora-targets names no layer: choose from {', '.join(projections)}, or {ALL}.")
    return [name for name in projections if name in chosen]


def rank_of(args: Namespace) -> int | None:
    """r of the adapters of a run, also of one that knows of none."""
    return getattr(args, "lora_rank", None)


def layer_of(weight: str) -> str | None:
    """Key of PARTS of the layer whose weight this is (a local name), None if it is none of them."""
    parts = weight.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", A, B) and parts[-2] in PARTS else None


def part_of_rows(weight: str, rows: int, args: Namespace) -> torch.Tensor:
    """[rows] int64, CPU: of each row of a whole weight (a local name), which of its layer's parts it belongs to."""
    kind, repeats = layer_of(weight), 1
    sizes = [rows // len(available(args)[kind])] * len(available(args)[kind])
    if kind == "linear_qkv":
        repeats, d, shared = attention_shape(args, int(weight.split("layers.")[1].split(".")[0]))
        sizes = [args.num_attention_heads // repeats * d, d] + ([] if shared else [d])
    parts = [part for part, size in enumerate(sizes) for _ in range(size)]
    return torch.tensor(parts, device="cpu").repeat(repeats)


def targets_of(weight: str, args: Namespace) -> list[int]:
    """Which parts of a weight's layer are targets, by number: the order in which A has them. Empty: no adapter."""
    kind = layer_of(weight)
    parts = () if kind is None or rank_of(args) is None else available(args)[kind]
    return [number for number, part in enumerate(parts) if part in args.lora_targets]


def choices(weight: str, rows: int, args: Namespace) -> torch.Tensor:
    """[rows, T] fp32, CPU: 1 where a row of a whole weight belongs to a target."""
    part = part_of_rows(weight, rows, args)
    return (part[:, None] == torch.tensor(targets_of(weight, args), device="cpu")).float()


def wide(B_Or: torch.Tensor, choices_OT: torch.Tensor) -> torch.Tensor:
    """[O, T r], see the head of this file."""
    return (choices_OT[:, :, None] * B_Or[:, None]).flatten(1)


@dataclass(frozen=True)
class Place:
    """Where an adapter is. columns: beside a column-parallel layer, else a row-parallel one; group: the ranks that the
    layer is cut over; expert: whose tokens the dispatcher exchanges; sequence_parallel: the layer exchanges them."""

    columns: bool
    group: torch.distributed.ProcessGroup
    expert: bool
    sequence_parallel: bool
    gated: bool
    scale: float
    dropout: float


class _Adapted:
    """What is added to a layer's class, Megatron's own or Transformer Engine's."""

    lora: Place

    def forward(self, input_, *args, **kwargs):
        output, bias = super().forward(input_, *args, **kwargs)
        delta = self._delta_of_columns if self.lora.columns else self._delta_of_rows
        return output + delta(self._dropped(input_)), bias

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        lora = self.lora
        if not lora.dropout or not self.training:
            return x
        if lora.columns and not lora.expert and not lora.sequence_parallel:
            return F.dropout(x, lora.dropout)  # which all tensor-parallel ranks have alike
        state = (get_expert_parallel_rng_tracker_name(),) if lora.expert else ()
        with get_cuda_rng_tracker().fork(*state):
            return F.dropout(x, lora.dropout)

    def _delta_of_columns(self, x: torch.Tensor) -> torch.Tensor:
        lora, whole_A = self.lora, self.lora_A
        if lora.expert:
            whole_A = copy_to_tensor_model_parallel_region(whole_A, group=lora.group)
        thin = F.linear(x, whole_A)
        if lora.sequence_parallel:
            thin = gather_from_sequence_parallel_region(thin, tensor_parallel_output_grad=True, group=lora.group)
        elif not lora.expert:
            thin = copy_to_tensor_model_parallel_region(thin, group=lora.group)
        return F.linear(thin * lora.scale, wide(self.lora_B, self.lora_choices))

    def _delta_of_rows(self, x: torch.Tensor) -> torch.Tensor:
        lora, whole_B = self.lora, self.lora_B
        thin = F.linear(x, self.lora_A)
        if lora.expert:  # the dispatcher adds up the ranks' outputs
            whole_B = copy_to_tensor_model_parallel_region(whole_B, group=lora.group)
        elif lora.sequence_parallel:
            thin = reduce_scatter_to_sequence_parallel_region(thin, group=lora.group)
        else:
            thin = reduce_from_tensor_model_parallel_region(thin, group=lora.group)
        return F.linear(thin * lora.scale, whole_B)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> ShardedStateDict:
        """The layer's own, with B cut like its rows, or A like its columns."""
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        lora, ranks = self.lora, metadata["dp_cp_group"]
        cut = {B: 0} if lora.columns else {A: 1}
        ours = make_sharded_tensors_for_checkpoint(
            {A: self.lora_A, B: self.lora_B}, prefix, cut, sharded_offsets, tp_group=lora.group, dp_cp_group=ranks
        )
        if lora.gated:
            alone = metadata.get("singleton_local_shards", False)
            ours[prefix + B] = apply_swiglu_sharded_factory(
                ours[prefix + B], sharded_offsets, alone, tp_group=lora.group, dp_group=ranks
            )
        return own | ours


def add_adapters(model: torch.nn.Module, args: Namespace) -> None:
    """Put adapters on the targets in this rank's part of a model, and freeze all the rest. They are not drawn yet.

    Raises TypeError for a target that norms its own input, or is several layers in one.
    """
    model.requires_grad_(False)
    model.adapted = True
    columns, rows = _parallel_layers()
    for name, layer in list(model.named_modules()):
        if not (parts := targets_of(name + ".weight", args)):
            continue
        if not isinstance(layer, columns + rows):
            raise TypeError(f"{name} is a {type(layer).__name__}, which can have no adapter.")
        _add(model, name, layer, isinstance(layer, columns), len(parts), args)


def _parallel_layers() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """(column-parallel, row-parallel) classes that can have an adapter."""
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        return (ColumnParallelLinear,), (RowParallelLinear,)
    return (ColumnParallelLinear, te.TEColumnParallelLinear), (RowParallelLinear, te.TERowParallelLinear)


def _add(model, name: str, layer, columns: bool, parts: int, args: Namespace) -> None:
    rank, base, expert = args.lora_rank, layer.weight, is_expert(name)
    rows, width = base.shape
    group = layer.tp_group if isinstance(layer, ColumnParallelLinear | RowParallelLinear) else layer._tp_group
    layer.lora = Place(
        columns=columns,
        group=group,
        expert=expert,
        sequence_parallel=layer.config.sequence_parallel and group.size() > 1 and not expert,
        gated=name.endswith("linear_fc1") and args.swiglu,
        scale=args.lora_alpha / rank,
        dropout=args.lora_dropout,
    )
    layer.lora_A = torch.nn.Parameter(base.new_empty(parts * rank, width))
    layer.lora_B = torch.nn.Parameter(base.new_empty(rows, rank))
    cut, whole = (layer.lora_B, layer.lora_A) if columns else (layer.lora_A, layer.lora_B)
    set_tensor_model_parallel_attributes(cut, True, 0 if columns else 1, getattr(base, "partition_stride", 1))
    whole.sequence_parallel = layer.lora.sequence_parallel
    cut.allreduce = whole.allreduce = base.allreduce
    if columns:
        full = global_name(model, name + ".weight")
        runs, _ = held(model, name + ".weight", base)
        chosen = choices(full, rows * group.size(), args)
        own = torch.cat([chosen[run.start : run.stop] for run in runs])
        layer.register_buffer("lora_choices", own.to(base), persistent=False)
    layer.__class__ = _adapted(type(layer))


@functools.cache
def _adapted(layer: type) -> type:
    return type(f"Adapted{layer.__name__}", (_Adapted, layer), {})


def leave_out(state: ShardedStateDict) -> None:
    """Take the adapters out of a model's state, in place: of a checkpoint that has none."""
    for key in [key for key in state if is_adapter(key)]:
        del state[key]


def is_adapter(name: str) -> bool:
    """Whether a parameter is an A or a B."""
    return name.endswith(ADAPTER)
