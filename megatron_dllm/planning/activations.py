"""What one micro-batch leaves in memory for its backward pass, tensor by tensor.

The terms below are the tensors that Megatron's local layers and ours keep, found by watching every storage that is
alive after a forward pass (tests/parallel/planning.py does so in every mode and in several layouts, on the CPU). On a
GPU two things differ, by reading: norms below fp32 are one kernel that keeps its input and one number a row (the CPU
keeps two fp32 copies), and Flex attention keeps a block mask in place of a dense one. Layers of Transformer Engine keep
the same by reading (their fused norm and product keep both the norm's input and its output); they were not run.

T rows of a rank: of the whole (context-parallel) share where tensor parallelism splits heads or channels, and T / tp
between layers under sequence parallelism. e bytes of an element.
"""

from dataclasses import dataclass

from megatron_dllm.planning.layout import Layout
from megatron_dllm.planning.network import COLUMNS, Layer, Network
from megatron_dllm.planning.rows import RULE, TARGET, TILE, WINDOW, Rows

INDEX, FLOAT = 8, 4  # bytes of int64 and fp32
MASKS = 4  # micro-batches whose masks are kept (attention.py)


@dataclass(frozen=True)
class Micro:
    """A micro-batch on one rank. rows: processed, without a draft's context; context: the latter; sample: rows of one
    sample in the whole sequence, with its context; batch: samples."""

    rows: float
    context: float
    sample: float
    batch: int

    @classmethod
    def of(cls, rows: Rows, layout: Layout) -> "Micro":
        """rows: means of one sample."""
        share = layout.micro_batch / layout.context
        return cls(rows.queries * share, rows.context * share, rows.processed, layout.micro_batch)


class Kept:
    """Bytes that are kept for backward."""

    def __init__(self, network: Network, layout: Layout, micro: Micro):
        self.network, self.layout, self.micro = network, layout, micro
        self.e, self.T = layout.element, micro.rows
        self.between = micro.rows / layout.shards  # rows of a rank between layers
        self._layers: dict[int, float] = {}
        self.lossy_norm = layout.element < FLOAT and not layout.on_gpu

    # --- parts ---

    def norm(self, rows: float, width: float, output: bool = True, source: bool = True) -> float:
        """Of `rows` vectors: one number each, the output (if a product keeps it), and the input (if nothing else
        does). Below fp32 a CPU keeps the input in fp32 instead, and if weights are trained the normed input too."""
        kept = rows * FLOAT + (rows * width * self.e if output else 0)
        if self.lossy_norm:
            return kept + (1 if self.network.adapters else 2) * rows * width * FLOAT
        return kept + (rows * width * self.e if source else 0)

    def reads(self, kind: str) -> bool:
        """Whether Megatron's layer of this name keeps its input. A frozen one does not, but its adapter does, if it
        does not drop some of it out."""
        adapters = self.network.adapters
        return adapters is None or kind in adapters.thin and not adapters.dropout

    def adapter(self, kind: str, rows: float, thin_rows: float, width: float, outputs: float, layers: float = 1):
        """Bytes beside its input, `rows` vectors of `width`: what stands between A and B, B made wide (a copy for each
        of so many `layers`), and of dropout the input that is left and the mask."""
        thin = self.network.thin(kind)
        kept = thin_rows * thin * self.e
        if kind in COLUMNS:
            kept += layers * outputs * thin * self.e
        if thin and self.network.adapters.dropout:
            kept += rows * width * (self.e + (1 if self.layout.on_gpu else self.e))
        return kept

    def attention(self, layer: Layer) -> float:
        """From the layer's input to what goes into the residual sum."""
        net, lay, T, e = self.network, self.layout, self.T, self.e
        tp, cp, context = lay.tensor, lay.context, self.micro.context
        h, g, d = layer.heads / tp, max(1, layer.groups / tp), layer.size
        qkv = layer.qkv / tp if layer.groups >= tp else layer.qkv  # fewer groups than ranks: gathered
        keys = T + context  # rows that have keys
        kept = self.norm(self.between, net.width, output=self.reads("linear_qkv"))
        kept += self.adapter("linear_qkv", self.between, T, net.width, layer.qkv / tp)
        kept += self.adapter("linear_proj", T, self.between, h * d, net.width)
        split_keys = net.qk_norm and not self.lossy_norm  # the product is kept by the norm of the keys' part
        value_is_own = cp > 1 or context > 0 or layer.shared or net.gemma  # copied, so no part of the product
        if split_keys or not value_is_own:
            kept += T * qkv * e
            if context and layer.groups >= tp:  # by the rows of keys and values alone, of several groups a copy
                kept += (context + (net.width if layer.groups > tp else 0)) * (layer.qkv - layer.query) / tp * e
            else:
                kept += context * qkv * e
        if net.qk_norm:
            copied = layer.heads > layer.groups >= tp  # else a part of the product
            kept += self.norm(T * h, d, output=False, source=copied)
            kept += self.norm(keys * g, d, output=False, source=False)
        if net.gemma:
            kept += self.norm(keys * g, d, output=cp == 1, source=False)
        kept += 2 * (T + keys) * net.rotated_of(layer) * e  # cosine and sine, for queries and for keys
        gathered = keys * (cp if lay.gathers else 1)
        kept += (T * h + gathered * g) * d * e  # rotated queries and keys
        if value_is_own and not (net.gemma and cp == 1):
            kept += gathered * g * d * e
        kept += T * h * d * e + (0 if "core_attn" in lay.modules else T * h * FLOAT)  # output and log-sum-exp
        if cp > 1 and not lay.gathers:
            kept += T * h * d * e  # heads put together again
        return kept

    def mlp(self, width: float, rows: float, shards: int) -> float:
        """Between the two products, without the input."""
        gates = self.network.gates
        saved = gates + (2 if self.network.gemma else 0)  # gelu and the other half
        saved += self.reads("linear_fc2")  # the product's input
        return rows * saved * width / shards * self.e

    def mlp_adapters(self, width: float, rows: tuple[float, float], shards: int, layers: float = 1) -> float:
        """Of an MLP, or of so many experts. rows: that come in, and that go between the two products."""
        outer, inner = rows
        into = self.adapter("linear_fc1", outer, inner, self.network.width, self.network.gates * width / shards, layers)
        return into + self.adapter("linear_fc2", inner, outer, width / shards, self.network.width)

    def dense(self, width: float) -> float:
        """An MLP that is no expert's."""
        tp = self.layout.tensor
        return self.mlp(width, self.T, tp) + self.mlp_adapters(width, (self.between, self.T), tp)

    def self_conditioning(self, width: float) -> float:
        """Beside adapters what comes in has no gradient, and of the MLP what lies above the first of them is kept."""
        net, rows, D = self.network, self.between, self.network.width
        if net.adapters is None:
            return self.norm(rows, D) + self.dense(width) + self.norm(rows, D, output=False)
        kept = self.norm(rows, D, output=False)  # without an adapter here the sum is kept all the same, as in `ends`
        if net.thin("linear_fc1"):
            return kept + self.dense(width) + (rows * D * self.e if self.reads("linear_fc1") else 0)
        inputs = self.T * width / self.layout.tensor * self.e if self.reads("linear_fc2") else 0
        return kept + inputs + self.mlp_adapters(width, (rows, self.T), self.layout.tensor)

    def experts(self, layer: Layer) -> float:
        """Router, dispatch and the experts' own, where routing is even."""
        lay, net, E, k = self.layout, self.network, layer.experts, layer.active
        rows = self.between
        routing = rows * (k * (INDEX + FLOAT) + E * (FLOAT + 1))
        if "moe" in lay.modules:
            return rows * (E * (FLOAT + 1) + k * INDEX)
        routing += rows * (E + k) * INDEX
        routed = rows * k * lay.expert_tensor
        kept = routing + routed * ((net.width * self.e if self.reads("linear_fc1") else 0) + FLOAT)
        kept += self.mlp(layer.expert, routed, lay.expert_tensor)
        kept += self.mlp_adapters(layer.expert, (routed, routed), lay.expert_tensor, layers=E / lay.expert)
        if net.gemma:
            kept += routed * layer.expert / lay.expert_tensor * self.e  # times the expert's share
            kept += self.norm(rows, net.width, source=False)  # the router's own
        if layer.shared_expert and "shared_experts" not in lay.modules:
            kept += self.dense(layer.shared_expert)
        return kept

    def layer(self, layer: Layer) -> float:
        """All of one layer: its input too, but not its output."""
        if id(layer) not in self._layers:
            self._layers[id(layer)] = self._layer(layer)
        return self._layers[id(layer)]

    def _layer(self, layer: Layer) -> float:
        D, rows, lay = self.network.width, self.between, self.layout
        kept = self.attention(layer)
        if self.network.gemma:
            norm = lambda **options: self.norm(rows, D, **options)
            # after attention, dense and sparse MLP: the input is the product's; then of their sum; then two before
            kept += norm(output=False) * 4 + norm(output=self.reads("linear_fc1")) + norm(output=False, source=False)
            kept += self.dense(layer.dense) + self.experts(layer) + rows * self.e
            return kept
        again = lay.modules & {"mlp", "moe"}  # from their input
        kept += self.norm(rows, D, output=bool(again or layer.experts) or self.reads("linear_fc1"))
        if layer.dense and "mlp" not in lay.modules:
            kept += self.dense(layer.dense)
        if layer.experts:
            kept += self.experts(layer)
        return kept

    # --- wholes ---

    def chunk(self, layers: list[Layer]) -> float:
        """Of a pipeline chunk's layers, under recomputation too."""
        lay = self.layout
        if lay.recompute != "full":
            return sum(self.layer(layer) for layer in layers)
        inputs = self.between * self.network.width * self.e
        again = len(layers) if lay.recomputed is None else min(lay.recomputed, len(layers))
        kept = -(-again // lay.group) * inputs
        return kept + sum(self.layer(layer) for layer in layers[again:])

    def ends(self, first: bool, last: bool) -> float:
        """Beside layers: what comes before the first one, and the final norm."""
        net, D, e = self.network, self.network.width, self.e
        kept = 0.0
        if last:
            kept += self.norm(self.between, D, output=False)
        if first and self.layout.recompute == "full":
            kept += (self.T + self.micro.context) * net.angles * FLOAT
        if first and net.gemma:
            kept += self.self_conditioning(net.layers[0].dense)
        elif first and net.adapters is not None:
            kept += self.between * D * e  # embedded, of which layers read a copy that has a gradient (dlm.py)
        if first and net.features:
            context = self.micro.context
            kept += context * net.features * e + self.norm(context / self.layout.shards, D)
            kept += (context + self.T) * (1 - 1 / self.layout.shards) * D * e  # shards are views of the whole
        return kept

    def head(self, scored: dict[str, float]) -> float:
        """Gradients that the head takes in the forward pass. scored: rows of each term, of this rank."""
        net, table = self.network, self.network.vocabulary / self.layout.tensor * self.network.width
        kept = sum(scored.values()) * net.width * self.e
        if net.target is not None:
            return kept + sum(scored.values()) * INDEX
        return kept + (0 if net.frozen_head else table * self.e * len(scored))

    def masks(self, rows: Rows, microbatches: int) -> float:
        """Of the last micro-batches, made by the first layer. rows: means of one sample."""
        micro, total = self.micro, 0.0
        for kind in self.kinds(rows):
            text = micro.context * self.layout.context / micro.batch
            S = text if kind == TARGET else micro.sample
            Q = text if kind == TARGET else micro.sample - text
            share = self.layout.context if self.layout.gathers else 1
            if self.layout.on_gpu:
                total += micro.batch * Q / share * S / TILE**2 * 16  # which tiles, by row and by column
            else:
                total += micro.batch * Q / share * S * self.e
        return total * min(MASKS, microbatches)

    def gathered(self) -> float:
        """What sequence parallelism gathers before a product: into Megatron's one buffer, beside adapters anew."""
        lay = self.layout
        return self.T * self.network.width * self.e if lay.sequence_parallel and lay.tensor > 1 else 0.0

    def kinds(self, rows: Rows) -> list[str]:
        layers = self.network.layers
        kinds = {WINDOW if layer.window else RULE for layer in layers}
        if self.network.run:
            kinds.add(TARGET)
        whole = micro_is_unmasked(rows)
        return [] if whole else sorted(kinds)


def micro_is_unmasked(rows: Rows) -> bool:
    """Whether everything sees everything, for which there is no mask at all."""
    dense = rows.samples * (rows.processed / max(1.0, rows.samples)) ** 2
    return not rows.context and rows.pairs[RULE] >= dense * (1 - 1e-9)
