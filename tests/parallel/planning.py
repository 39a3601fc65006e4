"""A training step that is watched: what is really allocated and multiplied, beside what the planner says of it.

Run by the pool's workers (`function="tests.parallel.planning:observe"`).
"""

import functools
import sys

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training import training as megatron_training
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, sdpa_backward_flop_count, sdpa_flop_count

from megatron_dllm.arguments import parse_arguments
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.data.stream import Collate
from megatron_dllm.planning import memory
from megatron_dllm.planning.activations import Kept, Micro
from megatron_dllm.planning.flops import Executed, training_flops
from megatron_dllm.planning.layout import Layout, in_flight, stages
from megatron_dllm.planning.network import Network
from megatron_dllm.planning.rows import Rows, count_rows
from megatron_dllm.training import install, pretrain

EXACT = 2**40  # pairs: all of them


class Alive(TorchDispatchMode):
    """Storages that were made while this was active and are still alive."""

    def __init__(self, before: list[torch.Tensor]):
        super().__init__()
        self._before = [(t.untyped_storage(), None) for t in before]  # also keeps their addresses from being reused
        self._known = {storage._cdata: None for storage, _ in self._before}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                seen = self._known.get(storage._cdata, ())
                if seen == () or (seen is not None and seen[0].expired()):
                    self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        return sum(entry[1] for entry in self._known.values() if entry is not None and not entry[0].expired())


class Watch:
    """Wraps what Megatron's loop calls; `found` is what a rank reports."""

    def __init__(self):
        self.rows: list[Rows] = []
        self.found = dict(kept=[], flying=0, most_flying=0)

    def setup(self, original, *args, **kwargs):
        models, optimizer, scheduler = original(*args, **kwargs)
        self.models, self.optimizer = models, optimizer
        for chunk in models:
            self.watch_forward(unwrap_model(chunk))
        return models, optimizer, scheduler

    def watch_forward(self, model):
        forward = model.forward

        def watched(*inputs, **options):
            if not torch.is_grad_enabled():  # a first pass
                return forward(*inputs, **options)
            held = [*model.parameters(), *model.buffers(), *(x for x in inputs if torch.is_tensor(x))]
            held += [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]
            received = model.decoder.input_tensor
            held += [received] if torch.is_tensor(received) else []
            if (target := getattr(model, "target", None)) is not None:
                held += [*target.model.parameters(), *target.model.buffers()]
            for term in (options.get("terms") or {}).values():
                held += [value for value in vars(term).values() if torch.is_tensor(value)]
            held += [x for x in tree_leaves(options.get("soft")) if torch.is_tensor(x)]
            alive = Alive(held)
            with alive:
                result = forward(*inputs, **options)
            kept = alive.bytes()
            if torch.is_tensor(received) and not model.pre_process:
                kept += received.nbytes
            if torch.is_tensor(result):  # to be sent, and then dropped
                kept -= result.nbytes
            self.found["kept"].append(kept)
            self.found["flying"] += 1
            self.found["most_flying"] = max(self.found["most_flying"], self.found["flying"])
            return result

        model.forward = watched

    def backward(self, original, *args, **kwargs):
        self.found["flying"] -= 1
        return original(*args, **kwargs)

    def layout(self, original, collate, samples):
        batch = original(collate, samples)
        self.rows.append(count_rows(batch, get_args(), EXACT))
        return batch

    def step(self, original, *args, **kwargs):
        counter = FlopCounterMode(display=False, custom_mapping=MORE)
        with counter:
            result = original(*args, **kwargs)
        self.found["flops"] = counter.get_total_flops()
        return result


def _forward(query, key, value, *_, **__):
    return sdpa_flop_count(query, _heads(key, query), _heads(value, query))


def _backward(gradient, query, key, value, *_, **__):
    return sdpa_backward_flop_count(gradient, query, _heads(key, query), _heads(value, query))


def _heads(shape, like):
    """Key/value heads are shared: as many products as query heads."""
    return (shape[0], like[1], *shape[2:])


_sdpa = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_sdpa_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# what torch's counter does not know: SDPA's kernel of a CPU, and sums of products in place
MORE = {
    _sdpa: lambda *a, out_shape=None, **k: _forward(*a),
    _sdpa_backward: lambda *a, out_shape=None, **k: _backward(*a),
    torch.ops.aten.addmm_: lambda *a, out_shape=None, **k: addmm_flop(*a),
}


def observe(case: dict, store) -> dict:
    """One step of the command; what was found, and `planned`."""
    sys.argv = ["pretrain_dllm.py", *case["argv"]]
    args, tokenizer = parse_arguments()
    datasets = build_datasets(args, tokenizer)
    watch = Watch()
    import megatron.core.pipeline_parallel.schedules as schedules

    places = [
        (megatron_training, "setup_model_and_optimizer", watch.setup),
        (megatron_training, "train_step", watch.step),
        (schedules, "backward_step", watch.backward),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in places]
    lay_out = Collate.layout
    for module, name, replacement in places:
        setattr(module, name, functools.partial(replacement, getattr(module, name)))
    Collate.layout = lambda collate, samples: watch.layout(lay_out, collate, samples)
    try:
        pretrain(args, datasets, store=store)
        logged = install().counts[Split.train]["flops"]
        return watch.found | states(watch) | dict(logged=logged, planned=planned(args, watch.rows))
    finally:
        Collate.layout = lay_out
        for module, name, original in originals:
            setattr(module, name, original)


def states(watch: Watch) -> dict:
    """Parameters and their gradients on this rank, and what the optimizer holds for them."""
    models = [unwrap_model(chunk) for chunk in watch.models]
    parameters = [p for model in models for p in model.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    optimizers = getattr(watch.optimizer, "chained_optimizers", [watch.optimizer])
    held = {}
    for optimizer in optimizers:
        own = {p.untyped_storage()._cdata for p in parameters}
        for tensor in tree_leaves([optimizer.optimizer.param_groups, list(optimizer.optimizer.state.values())]):
            if torch.is_tensor(tensor) and tensor.numel() > 1 and tensor.untyped_storage()._cdata not in own:
                held[id(tensor)] = tensor.numel() * tensor.element_size()
    return dict(
        parameters=sum(p.numel() for p in parameters),
        gradients=sum(p.main_grad.numel() * p.main_grad.element_size() for p in trained),
        optimizer=sum(held.values()),
        stage=mpu.get_pipeline_model_parallel_rank(),
        rank=dist.get_rank(),
    )


def planned(args, all_rows: list[Rows]) -> dict:
    """The same of the planner, for the rows of this rank's micro-batches."""
    network, layout = Network.of(args), Layout.of(args, on_gpu=False)
    stage = mpu.get_pipeline_model_parallel_rank()
    count = memory.stage_counts(network, args, layout)[stage]
    chunks = stages(network, args, layout)[stage]
    first, last = stage == 0, stage == layout.pipeline - 1
    kept = []  # by micro-batch, all chunks together
    for rows in all_rows[: layout.microbatches]:
        rows = rows.scaled(1 / rows.samples)
        micro = Kept(network, layout, Micro.of(rows, layout))
        share = layout.micro_batch / layout.context
        bytes_ = sum(micro.chunk(chunk) for chunk in chunks) + micro.ends(first, last)
        bytes_ += layout.virtual * micro.masks(rows, 1)  # each chunk reads the data itself
        bytes_ += micro.head({name: n * share for name, n in rows.scored.items()}) if last else 0.0
        buffer = not kept and network.adapters is None  # is made once, and stays
        kept.append(bytes_ + (micro.gathered() if buffer else 0.0))
    state = memory.state_memory(count, args, layout)
    executed = Executed(dense=True, unused=True)
    rows = sum(all_rows[1 : layout.microbatches], all_rows[0])
    flops = training_flops(network, rows, args, executed)
    return dict(
        kept=kept,
        most_flying=in_flight(layout, stage),
        parameters=sum(memory.on_rank(count.all, layout)),
        gradients=state["gradients"],
        optimizer=state["optimizer"],
        flops=flops,
        model_flops=sum(training_flops(network, rows, args).values()),
        microbatches=layout.microbatches,
        model_parallel=layout.tensor * layout.pipeline * layout.context,
    )
