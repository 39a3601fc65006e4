"""Memory of every rank, by part.

weights      of this pipeline stage, in the run's precision; of a draft its frozen target too
gradients    Megatron's buffer, never sharded (its distributed optimizer reduces it in place)
optimizer    Adam's two moments, and below fp32 a copy of the weights in fp32; shared out among data- and
             context-parallel ranks by --use-distributed-optimizer (experts: among those with the same experts)
activations  what micro-batches in flight keep for backward (activations.py)
head         the gradients that the head takes along in the forward pass, and one chunk of logits
masks        of attention, and what it takes to make one
working      what backward needs beside: one layer again under recomputation, gradients of its widest activations,
             and of its largest weight
reserve      CUDA context, NCCL's buffers, fragmentation: an allowance, not computed
"""

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass

import torch

from megatron_dllm.models.flex import BLOCK, PAIRS_AT_ONCE
from megatron_dllm.models.scoring import HEAD_CHUNK_ROWS
from megatron_dllm.planning.activations import FLOAT, Kept, Micro
from megatron_dllm.planning.hardware import Gpu
from megatron_dllm.planning.layout import Layout, in_flight, stages
from megatron_dllm.planning.network import Count, Layer, Network, Parameters
from megatron_dllm.planning.rows import Rows

PARTS = "weights gradients optimizer activations head masks working reserve".split()
# Making a block mask evaluates the rule for a band of queries at a time. Bytes of a pair while that goes on: the peak
# of a process on a CPU, for two streams (tests/unit/test_planning.py).
_RULE_BYTES = 6
_CONTEXT = 2.0 * 2**30  # CUDA context and libraries
_COMMUNICATOR = 0.25 * 2**30  # NCCL, for each kind of group that is larger than 1
_FRAGMENTATION = 0.03


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part (PARTS)."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def stage_counts(network: Network, args: Namespace, layout: Layout) -> list[Parameters]:
    """Of each pipeline stage, before they are shared out within it."""
    counts = []
    for place, chunks in enumerate(stages(network, args, layout)):
        kinds = Counter(id(layer) for chunk in chunks for layer in chunk)
        layers = {id(layer): layer for chunk in chunks for layer in chunk}
        count = sum((layers[key].count.times(number) for key, number in kinds.items()), Parameters())
        if place == 0:
            count += network.first
        if place == layout.pipeline - 1:
            count += network.last
            if layout.pipeline > 1 or not network.tied:
                count += network.head
        counts.append(count)
    return counts


def on_rank(count: Count, layout: Layout) -> tuple[float, float]:
    """(dense, expert) numbers of parameters on one rank."""
    dense = count.split / layout.tensor + count.whole
    return dense, (count.expert / layout.expert_tensor + count.expert_whole) / layout.expert


def gradient_bytes(args: Namespace) -> int:
    """Of a parameter in the gradient buffer."""
    if args.accumulate_allreduce_grads_in_fp32:
        return FLOAT
    return _size(args.params_dtype)


def optimizer_bytes(args: Namespace) -> float:
    """Of a parameter in the optimizer, wherever that is; Megatron keeps fp32 weights only below fp32."""
    moments = [args.exp_avg_dtype, args.exp_avg_sq_dtype] if args.optimizer == "adam" else []
    if args.optimizer == "sgd" and args.sgd_momentum:
        moments = [torch.float32]
    main = 0 if args.params_dtype == torch.float32 else _size(args.main_params_dtype)
    bytes_ = main + sum(_size(dtype) for dtype in moments)
    return bytes_ * (1 - args.optimizer_offload_fraction) if args.optimizer_cpu_offload else bytes_


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def state_memory(count: Parameters, args: Namespace, layout: Layout) -> dict[str, float]:
    """weights, gradients and optimizer of a stage's parameters on one rank."""
    dense, expert = on_rank(count.trained, layout)
    shares = (layout.data * layout.context, layout.expert_data) if layout.distributed_optimizer else (1, 1)
    return {
        "weights": sum(on_rank(count.all, layout)) * layout.element,
        "gradients": (dense + expert) * gradient_bytes(args),
        "optimizer": (dense / shares[0] + expert / shares[1]) * optimizer_bytes(args),
    }


def rank_memory(network: Network, rows: Rows, args: Namespace, layout: Layout) -> list[Memory]:
    """Of a rank of each pipeline stage. rows: means of one sample."""
    counts = stage_counts(network, args, layout)
    kept = Kept(network, layout, Micro.of(rows, layout))
    return [
        _stage(network, rows, args, layout, kept, place, count, chunks)
        for place, (count, chunks) in enumerate(zip(counts, stages(network, args, layout), strict=True))
    ]


def _stage(network, rows, args, layout, kept: Kept, place: int, count: Parameters, chunks: list[list[Layer]]):
    first, last = place == 0, place == layout.pipeline - 1
    flying = in_flight(layout, place)
    each = sum(kept.chunk(chunk) for chunk in chunks) / layout.virtual
    parts = state_memory(count, args, layout)
    if network.target is not None:
        parts["weights"] += target_bytes(network, layout)
    parts["activations"] = flying * each + min(flying, layout.microbatches) * kept.ends(first, last)
    share = layout.micro_batch / layout.context
    scored = {name: number * share for name, number in rows.scored.items()}
    parts["head"] = kept.head(scored) + _chunk_of_logits(network, layout) if last else 0.0
    parts["masks"] = kept.masks(rows, layout.microbatches) + _making_a_mask(rows, layout, kept)
    parts["working"] = _working(network, layout, kept, chunks, count)
    parts["reserve"] = _reserve(layout, sum(parts.values())) if layout.on_gpu else 0.0
    return Memory({part: parts[part] for part in PARTS})


def target_bytes(network: Network, layout: Layout) -> float:
    """Of a draft's frozen target: all of it is loaded, also layers that are not run."""
    return sum(on_rank(network.target.count.all, layout)) * layout.element


def _chunk_of_logits(network: Network, layout: Layout) -> float:
    """The product, its fp32 copy that becomes the softmax, and that in the weights' precision; and the gradient of the
    weights, which is summed in fp32."""
    columns = network.vocabulary / layout.tensor
    buffers = HEAD_CHUNK_ROWS * columns * (FLOAT + (2 * layout.element if layout.element < FLOAT else 0))
    wide = layout.element < FLOAT and not network.frozen_head
    return buffers + (columns * network.width * FLOAT if wide else 0)


def _making_a_mask(rows: Rows, layout: Layout, kept: Kept) -> float:
    if not layout.on_gpu or not kept.kinds(rows):
        return 0.0
    queries = rows.queries / (layout.context if layout.gathers else 1)
    keys = layout.micro_batch * rows.processed
    return min(keys * queries, max(PAIRS_AT_ONCE, keys * BLOCK)) * _RULE_BYTES


def _working(network: Network, layout: Layout, kept: Kept, chunks: list[list[Layer]], count: Parameters) -> float:
    layers = [layer for chunk in chunks for layer in chunk]
    again = max((kept.layer(layer) for layer in layers), default=0.0) if layout.recompute == "full" else 0.0
    widest = largest = 0.0
    # gradients of the product and of the halves that went into it; or a product and an adapter's, before their sum
    gates = network.gates + 1 if network.adapters is None else 2 * network.gates
    for layer in layers:
        dense = kept.T * (layer.dense + layer.shared_expert) / layout.tensor
        sparse = kept.between * layer.active * layer.expert  # expert-tensor ranks gather what they share out
        widest = max(widest, max(dense, sparse) * gates + 2 * kept.T * network.width)
        if network.adapters is None:  # theirs are small
            largest = max(largest, network.width * network.gates * layer.dense / layout.tensor)
        if layout.recompute == "selective" and layout.modules & {"mlp", "moe"}:
            again = max(again, kept.mlp(layer.dense, kept.T, layout.tensor))
    if count.trained.split and network.target is None and network.adapters is None:
        largest = max(largest, network.vocabulary / layout.tensor * network.width)  # of the embedding
    return again + (widest + largest) * layout.element + kept.gathered()


def _reserve(layout: Layout, used: float) -> float:
    groups = sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.data))
    return _CONTEXT + groups * _COMMUNICATOR + _FRAGMENTATION * used


def worst(memories: list[Memory]) -> tuple[int, Memory]:
    """The pipeline stage that needs most, and its memory."""
    place = max(range(len(memories)), key=lambda i: memories[i].total)
    return place, memories[place]


def fits(memories: list[Memory], gpu: Gpu) -> bool:
    return worst(memories)[1].total <= gpu.memory
