"""How long a step takes: a roofline, for comparing layouts rather than for promises.

    products       FLOPs / (peak · MATMUL), or bytes of weights and rows / (bandwidth · MEMORY) where that is longer
    adapters       of LoRA: thin products are bound by what they read and write, and what they give is added to what
                   the layers give: inputs and outputs about three times, forward and backward each
    attention      FLOPs of the tiles that are touched / (peak · ATTENTION); backward 2.5 times (scores again)
    the rest       norms, activations, rotations: what is kept for backward is written once and read about once forward,
                   and twice as much backward
    tensor         two all-gathers and two reduce-scatters a layer forward, and as many backward with two gathers again
    context        keys and values gathered (or heads exchanged) forward, and their gradients backward
    expert         dispatch and combine, forward and backward
    pipeline       every micro-batch's states to the next stage and gradients back; bubble (p - 1) / v micro-batches of
                   the slowest stage
    data           reduce-scatter of gradients, gather of weights: what does not hide behind the last (first)
                   micro-batch if --overlap-grad-reduce (--overlap-param-gather), else all of it
    optimizer      its bytes, read and written once

Nothing but data-parallel communication overlaps with anything (Transformer Engine's user buffers, for one, would).
MATMUL, ATTENTION and the other shares are what well-tuned kernels are reported to reach; none was measured here. A
prediction is as good as they are.
"""

import dataclasses
from argparse import Namespace
from dataclasses import dataclass

from megatron_dllm.planning.activations import FLOAT, Kept, Micro
from megatron_dllm.planning.flops import FROZEN, TRAINED, layer_forward, pairs_of, target_forward, training_flops
from megatron_dllm.planning.hardware import Gpu
from megatron_dllm.planning.layout import Layout, stages
from megatron_dllm.planning.memory import gradient_bytes, on_rank, optimizer_bytes, stage_counts
from megatron_dllm.planning.network import Layer, Network
from megatron_dllm.planning.rows import RULE, WINDOW, Rows

MATMUL = 0.70  # of peak, large bf16 products
ATTENTION = 0.40  # of peak, fused attention with a block mask
MEMORY = 0.80  # of the memory's bandwidth
LINK = 0.75  # of a link's bandwidth, large messages
LEAST_OVERLAP = 0.05  # of data-parallel communication: the last bucket's never hides
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Prediction:
    """seconds of a step, by part (they add up to `step`); flops: model FLOPs of a step; mfu: share of the peak."""

    step: float
    parts: dict[str, float]
    flops: float
    mfu: float
    tokens_per_second: float

    def tflops(self, ranks: int) -> float:
        """TFLOP/s of a GPU."""
        return self.flops / self.step / ranks / 1e12


class Roofline:
    """Of one layout on one kind of GPU. rows: means of one sample; node: GPUs of a node; fp8: products run in FP8."""

    def __init__(self, network: Network, rows: Rows, args: Namespace, layout: Layout, gpu: Gpu, node: int = 8):
        self.network, self.rows, self.args, self.layout, self.gpu, self.node = network, rows, args, layout, gpu, node
        self.kept = Kept(network, layout, Micro.of(rows, layout))
        whole = dataclasses.replace(layout, recompute="", modules=frozenset())
        self.all = Kept(dataclasses.replace(network, adapters=None), whole, Micro.of(rows, layout))
        self.times = TRAINED if network.adapters is None else FROZEN  # that a product is made
        self.micro = rows.scaled(layout.micro_batch / layout.context)
        self.peak = gpu.peak(bool(getattr(args, "fp8", None)))

    def predict(self) -> Prediction:
        """Of one optimizer step."""
        lay, samples = self.layout, self.args.global_batch_size
        self.flops = training_flops(self.network, self.rows, self.args)  # of a sample
        times = [self._stage(place, chunks) for place, chunks in enumerate(stages(self.network, self.args, lay))]
        slowest = max(times, key=lambda parts: sum(parts.values()))
        one = sum(slowest.values())
        parts = {name: lay.microbatches * seconds for name, seconds in slowest.items()}
        parts["bubble"] = (lay.pipeline - 1) / lay.virtual * one
        parts["data parallel"], parts["optimizer"] = self._data_parallel(one), self._optimizer()
        step = sum(parts.values())
        flops = sum(self.flops.values()) * samples
        return Prediction(
            step=step,
            parts={name: seconds for name, seconds in parts.items() if seconds},
            flops=flops,
            mfu=flops / (step * lay.ranks * self.peak),
            tokens_per_second=self.rows.data * samples / step,
        )

    # --- one micro-batch on one stage ---

    def _stage(self, place: int, chunks: list[list[Layer]]) -> dict[str, float]:
        lay, total = self.layout, {}
        kinds: dict[Layer, int] = {}
        for chunk in chunks:
            for layer in chunk:
                kinds[layer] = kinds.get(layer, 0) + 1
        for layer, count in kinds.items():
            for name, seconds in self._layer(layer).items():
                total[name] = total.get(name, 0.0) + count * seconds
        first, last = place == 0, place == lay.pipeline - 1
        share = lay.micro_batch / lay.context
        flops = {name: value * share for name, value in self.flops.items()}
        ends = 0.0
        if last:
            ends += flops["head"] / lay.tensor
        if first:
            ends += flops.get("self-conditioning", 0.0) / lay.tensor + flops.get("target's features", 0.0) / lay.tensor
            ends += target_forward(self.network, self.micro) / lay.tensor if self.network.target else 0.0
        total["products"] = total.get("products", 0.0) + ends / (self.peak * MATMUL)
        if self.rows.first is not None:  # a forward pass of so many of the rows
            share = self.rows.first.processed / self.rows.processed
            total["first pass"] = share * sum(total.values()) / self.times
        if lay.pipeline > 1:
            states = self.kept.between * self.network.width * lay.element
            crosses = lay.tensor * lay.context * lay.data >= self.node
            total["pipeline"] = 2 * lay.virtual * states / self._link(crosses)
        return total

    def _layer(self, layer: Layer) -> dict[str, float]:
        """Forward, backward, and forward again where that is recomputed."""
        lay, net = self.layout, self.network
        work = layer_forward(net, layer, self.micro, pairs_of(layer, self.micro))
        tokens = self.micro.tiled[WINDOW if layer.window else RULE]
        attention = 4.0 * layer.query * tokens / lay.tensor / (self.gpu.bf16 * ATTENTION)
        dense = self._products((work["qkv and output"]) / lay.tensor, layer.count.all.split - self._mlp_weights(layer))
        mlp = self._products(work["mlp"] / lay.tensor, self._mlp_weights(layer))
        experts = self._products((work.get("experts", 0.0) + work.get("router", 0.0)) / lay.shards, 0)
        if layer.experts:
            local = on_rank(layer.count.all, lay)[1] * lay.element
            experts = max(experts, local / (self.gpu.bandwidth * MEMORY))
        tensor, expert = self._tensor(layer), self._expert(layer)
        context = self._context(layer)
        again = self._again()
        kept = self.all.layer(layer) / (self.gpu.bandwidth * MEMORY)
        times = {name: self.times + number for name, number in again.items()}
        gathers_again = lay.sequence_parallel and self.network.adapters is None  # for gradients of weights
        return {
            "products": times["dense"] * dense + times["mlp"] * mlp + times["experts"] * experts,
            "adapters": self._adapters(layer, work.get("adapters", 0.0), again["dense"]),
            "attention": (1 + _ATTENTION_BACKWARD + again["attention"]) * attention,
            "memory": (2 + 4 + 2 * again["dense"]) * kept,
            "tensor parallel": (2 + again["dense"] + (0.5 if gathers_again else 0)) * tensor,
            "context parallel": (2 + again["attention"]) * context,
            "expert parallel": (2 + again["experts"]) * expert,
        }

    def _adapters(self, layer: Layer, flops: float, again: int) -> float:
        """Forward and backward. flops: forward, of all tensor-parallel ranks."""
        lay, net, kept = self.layout, self.network, self.kept
        outer, inner = kept.between * net.width, kept.T / lay.tensor  # numbers of whole vectors; rows, for widths
        routed, mlps = kept.between * layer.active, bool(layer.dense) + bool(layer.shared_expert)
        mlp = lambda gates: (
            mlps * outer
            + inner * gates * (layer.dense + layer.shared_expert)
            + routed * (lay.expert_tensor * net.width + gates * layer.expert)
        )
        numbers = {  # that go in and come out
            "linear_qkv": outer + inner * layer.qkv,
            "linear_proj": inner * layer.query + outer,
            "linear_fc1": mlp(net.gates),
            "linear_fc2": mlp(1),
        }
        moved = 3 * lay.element * sum(number for kind, number in numbers.items() if net.thin(kind))
        products = (TRAINED + again) * flops / lay.shards / (self.peak * MATMUL)
        return max(products, (2 + again) * moved / (self.gpu.bandwidth * MEMORY))

    def _again(self) -> dict[str, int]:
        lay = self.layout
        if lay.recompute == "full":
            return dict(dense=1, mlp=1, experts=1, attention=1)
        has = lambda module: int(module in lay.modules)
        return dict(dense=0, mlp=has("mlp"), experts=has("moe"), attention=has("core_attn"))

    def _mlp_weights(self, layer: Layer) -> int:
        return (self.network.gates + 1) * self.network.width * (layer.dense + layer.shared_expert)

    def _products(self, flops: float, weights: float) -> float:
        bytes_ = weights / self.layout.tensor * self.layout.element
        return max(flops / (self.peak * MATMUL), bytes_ / (self.gpu.bandwidth * MEMORY))

    # --- communication ---

    def _link(self, crosses: bool) -> float:
        return (self.gpu.network if crosses else self.gpu.nvlink) * LINK

    def _tensor(self, layer: Layer) -> float:
        """Forward."""
        lay = self.layout
        if lay.tensor == 1:
            return 0.0
        block = self.kept.T * self.network.width * lay.element * (lay.tensor - 1) / lay.tensor
        blocks = 2 * (1 + bool(layer.dense or layer.shared_expert))
        if layer.experts and lay.expert_tensor > 1:
            blocks += 2 * layer.active * lay.expert_tensor / lay.tensor
        return blocks * block / self._link(lay.tensor > self.node)

    def _context(self, layer: Layer) -> float:
        lay = self.layout
        if lay.context == 1:
            return 0.0
        h, g = layer.query / lay.tensor, max(layer.size, layer.key / lay.tensor)
        rows = self.kept.T * lay.element
        moved = rows * 2 * g * (lay.context - 1) if lay.gathers else rows * 2 * (h + g) * (1 - 1 / lay.context)
        return moved / self._link(lay.tensor * lay.context > self.node)

    def _expert(self, layer: Layer) -> float:
        lay = self.layout
        if not layer.experts or lay.expert == 1:
            return 0.0
        moved = 2 * self.kept.between * layer.active * self.network.width * lay.element * (1 - 1 / lay.expert)
        return moved / self._link(lay.expert * lay.expert_tensor > self.node)

    def _data_parallel(self, micro_batch: float) -> float:
        lay, args = self.layout, self.args
        seconds = {"gradients": 0.0, "weights": 0.0}
        count = max(stage_counts(self.network, args, lay), key=lambda count: sum(on_rank(count.trained, lay)))
        dense, expert = on_rank(count.trained, lay)
        groups = (
            (dense, lay.data * lay.context, lay.tensor),
            (expert, lay.expert_data, lay.expert * lay.expert_tensor),
        )
        for number, ranks, stride in groups:
            if ranks == 1 or not number:
                continue
            speed = self._link(ranks * stride > self.node) / (1 - 1 / ranks)
            seconds["gradients"] += number * gradient_bytes(args) / speed
            seconds["weights"] += number * lay.element / speed
        if not lay.distributed_optimizer:  # an all-reduce is as much as both
            seconds = {"gradients": 2 * seconds["gradients"], "weights": 0.0}
        hidden = {"gradients": 2 / 3 * micro_batch, "weights": micro_batch / 3}
        asked = {"gradients": args.overlap_grad_reduce, "weights": args.overlap_param_gather}
        return sum(
            max(LEAST_OVERLAP * time, time - (hidden[name] if asked[name] else 0.0)) for name, time in seconds.items()
        )

    def _optimizer(self) -> float:
        lay, args = self.layout, self.args
        count = max(stage_counts(self.network, args, lay), key=lambda count: sum(on_rank(count.trained, lay)))
        shares = (lay.data * lay.context, lay.expert_data) if lay.distributed_optimizer else (1, 1)
        numbers = sum(number / share for number, share in zip(on_rank(count.trained, lay), shares, strict=True))
        moved = 2 * optimizer_bytes(args) + gradient_bytes(args) + lay.element
        return numbers * max(moved, FLOAT) / (self.gpu.bandwidth * MEMORY)
