"""Floating-point operations of training, for any mode.

What is counted: matrix products, 2·m·n·k each. A product of a trained layer is counted three times (forward, gradient
of the input, gradient of the weight), of a frozen one as often as it is done: beside adapters twice, in the first layer
too, where nobody needs the gradient of the input, but the run takes it (dlm.py). An adapter's product with B is counted
as with B [out, r], which is what is trained. Attention is counted by the pairs of a query and a key that the mode's
rule makes visible: 4·h·d a pair forward (scores, then values), twice that backward. The head is counted for the rows
that some loss term scores. Not counted: recomputation, what a kernel computes and throws away (invisible pairs), norms,
activations, rotations, the optimizer.

These are the *model FLOPs* of MFU (PaLM, arXiv:2204.02311, appendix B). tests/parallel/test_planning.py compares them
with torch's counter, which also sees what is thrown away: `Executed`.
"""

from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass

from megatron_dllm.modes.base import ModelInput
from megatron_dllm.planning.network import Layer, Network, UnknownNetwork
from megatron_dllm.planning.rows import RULE, TARGET, WINDOW, Rows, count_rows

TRAINED, FROZEN = 3, 2
_LOGGED_PAIRS = 2**17  # of each micro-batch that is trained on; 16 queries of a sequence of 8192


@dataclass(frozen=True)
class Executed:
    """What is done although it is no part of the model. dense: attention multiplies all pairs, as under a dense mask;
    unused: gradients that nobody needs (of a draft's features, of a frozen router), and the zeros in wide(B) of an
    adapter on a fused layer."""

    dense: bool = False
    unused: bool = False


MODEL = Executed()


def layer_forward(network: Network, layer: Layer, rows: Rows, pairs: float, what: Executed = MODEL) -> dict[str, float]:
    """By part, of one layer's forward pass."""
    D, gates = network.width, network.gates
    context = rows.context * (layer.qkv - layer.query)  # of which a draft makes keys and values only
    parts = {
        "qkv and output": 2.0 * D * (rows.queries * (layer.qkv + layer.query) + context),
        "attention": 4.0 * layer.query * pairs,
        "mlp": 2.0 * rows.queries * D * (gates + 1) * (layer.dense + layer.shared_expert),
    }
    if layer.experts:
        parts["experts"] = 2.0 * rows.queries * D * (gates + 1) * layer.expert * layer.active
        parts["router"] = 2.0 * rows.queries * D * layer.experts
    if network.adapters is not None:
        attention = adapter_forward(network, "linear_qkv", D, layer.qkv, what)
        attention += adapter_forward(network, "linear_proj", layer.query, D, what)
        widths = (layer.dense, layer.shared_expert, *[layer.expert] * layer.active)
        mlps = sum(sum(mlp_adapters(network, width, what)) for width in widths if width)
        parts["adapters"] = rows.queries * (attention + mlps)
    return parts


def adapter_forward(network: Network, kind: str, inputs: int, outputs: int, what: Executed = MODEL) -> float:
    """Of one row, beside Megatron's layer of this name, W [outputs, inputs]; 0 where it has none."""
    if not (thin := network.thin(kind)):
        return 0.0
    return 2.0 * (inputs * thin + outputs * (thin if what.unused else min(thin, network.adapters.rank)))


def mlp_adapters(network: Network, width: int, what: Executed = MODEL) -> tuple[float, float]:
    """Of one row, of both layers of an MLP."""
    D = network.width
    into = adapter_forward(network, "linear_fc1", D, network.gates * width, what)
    return into, adapter_forward(network, "linear_fc2", width, D, what)


def pairs_of(layer: Layer, rows: Rows, dense: bool = False) -> float:
    """Pairs that a layer attends to."""
    if dense:
        return rows.queries * rows.processed / max(1.0, rows.samples)
    return rows.pairs[WINDOW if layer.window else RULE]


def training_flops(network: Network, rows: Rows, args: Namespace, what: Executed = MODEL) -> dict[str, float]:
    """By part, of these rows' forward and backward passes."""
    parts: dict[str, float] = defaultdict(float)
    products = TRAINED if network.adapters is None else FROZEN
    for layer, count in network.kinds.items():
        frozen_router = layer.count.trained != layer.count.all and not what.unused
        times = dict(attention=TRAINED, adapters=TRAINED, router=FROZEN if frozen_router else TRAINED)
        for name, value in layer_forward(network, layer, rows, pairs_of(layer, rows, what.dense), what).items():
            parts[name] += count * value * times.get(name, products)
    if network.gemma:
        parts["self-conditioning"] += _self_conditioning(network, rows, what)
    parts["head"] += head_flops(network, rows, args)
    if network.target is not None:
        products = TRAINED if what.unused else FROZEN  # features need no gradient
        parts["target's features"] += products * 2.0 * rows.context * network.features * network.width
        parts["target"] += target_forward(network, rows, what)
    if rows.first is not None:
        parts["first pass"] += first_pass(network, rows, what)
    return dict(parts)


def head_flops(network: Network, rows: Rows, args: Namespace) -> float:
    """Products of scored rows with the head: logits, and both gradients taken along. Under a frozen head no
    weight's; in a draft that distils the teacher's logits too, and the text's nll only forward if it has no share."""
    each = 2.0 * network.width * network.vocabulary * sum(rows.scored.values())
    if network.target is None:
        return (FROZEN if network.frozen_head else TRAINED) * each
    share = getattr(args, "dflash_kl_weight", 0) or 0
    products = 2 if share < 1 else 1
    return each * (products + (3 if share else 0))


def _self_conditioning(network: Network, rows: Rows, what: Executed = MODEL) -> float:
    """Forward and backward, of an MLP on every row. Beside adapters what comes in has no gradient: frozen products are
    made twice only above the first adapter, whose A is multiplied twice."""
    if network.adapters is None:
        return TRAINED * _self_conditioning_forward(network, rows)
    D, F = network.width, network.layers[0].dense
    thin = network.thin("linear_fc1")
    lowest = 2.0 * (D * thin or F * network.thin("linear_fc2"))
    adapters = TRAINED * sum(mlp_adapters(network, F, what)) - lowest
    return rows.processed * (2.0 * D * F * (network.gates + (FROZEN if thin else 1)) + adapters)


def _self_conditioning_forward(network: Network, rows: Rows, what: Executed = MODEL) -> float:
    D, F = network.width, network.layers[0].dense
    return rows.processed * (2.0 * D * F * (network.gates + 1) + sum(mlp_adapters(network, F, what)))


def target_forward(network: Network, rows: Rows, what: Executed = MODEL) -> float:
    """Of a draft's target: its layers on the text, without a gradient."""
    text = Rows(samples=rows.samples, processed=rows.context)
    pairs = rows.context**2 / max(1.0, rows.samples) if what.dense else rows.pairs.get(TARGET, 0.0)
    layers = network.target.layers[: network.run]
    return sum(sum(layer_forward(network.target, layer, text, pairs).values()) for layer in layers)


def first_pass(network: Network, rows: Rows, what: Executed = MODEL) -> float:
    """Of self-conditioning: a pass without a graph, and the soft embeddings made of it: logits and their product with
    the table forward, and if that is trained logits again and its gradient backward."""
    first = rows.first
    forward = sum(
        count * sum(layer_forward(network, layer, first, pairs_of(layer, first, what.dense), what).values())
        for layer, count in network.kinds.items()
    )
    canvases = first.samples * rows.canvas
    products = 2 if network.frozen_head else 4
    soft = products * 2.0 * canvases * network.width * network.vocabulary
    return forward + _self_conditioning_forward(network, first, what) + soft


class FlopCounter:
    """Model FLOPs of micro-batches of a run, for its log: real rows, real documents; pairs by a sample of queries."""

    def __init__(self, args: Namespace):
        self.args, self.network = args, Network.of(args)

    def __call__(self, batch: ModelInput) -> float:
        rows = count_rows(batch, self.args, _LOGGED_PAIRS)
        return sum(training_flops(self.network, rows, self.args).values())


def flop_counter(args: Namespace) -> FlopCounter | None:
    """None for a run whose network cannot be described: a draft's target that transformers runs."""
    try:
        return FlopCounter(args)
    except UnknownNetwork:
        return None
