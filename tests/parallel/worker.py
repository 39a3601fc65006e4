"""One process of the test pool: runs training cases, one after the other, each in its own process group.

Reads a case (JSON) per line from stdin, writes its result (JSON) to the file the case names. Start-up
(imports) takes seconds, a case about one; so many layouts share the processes. Started by `pool.py`.
"""

import contextlib
import datetime
import faulthandler
import functools
import gc
import hashlib
import importlib
import io
import json
import os
import random
import sys
import time
import traceback
import types
from pathlib import Path

import megatron.training.training as training
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.utils import unwrap_model
from megatron.training import async_utils, get_args
from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_dllm import training as dllm_training
from megatron_dllm.arguments import parse_arguments
from megatron_dllm.checkpoint import check_before_loading
from megatron_dllm.conversion.source import check_source
from megatron_dllm.data.datasets import build_datasets
from megatron_dllm.data.stream import Collate, CorruptedSamples, Split
from megatron_dllm.models import init as weights
from megatron_dllm.models.lora import rank_of
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import CONTEXT, DOCUMENT, NUM_ATTRIBUTES, STREAM
from megatron_dllm.parallel import rank_positions
from megatron_dllm.training import install, pretrain
from tests.parallel import lora
from tests.parallel.naive import naive_logits, naive_loss
from tests.parallel.quiet_clock import QuietClock

SECONDS_PER_CASE = 240  # only a case that hangs takes them


class Observation:
    """What a case reports: losses, gradient norms, evaluations, and gradients against the reference."""

    def __init__(self, case: dict):
        self.case = case
        self.clock = QuietClock()
        self.places: dict[int, tuple] = {}
        self.result = dict(losses=[], grad_norms=[], rates=[], reports=[], evaluations=[], indices=[], noise={}, nll={})

    @contextlib.contextmanager
    def watching(self):
        names = "train_step evaluate finalize_model_grads setup_model_and_optimizer".split()
        write = FileSystemWriterAsync.write_preloaded_data
        originals = {name: getattr(training, name) for name in names}
        collate = Collate.__call__
        head, draw_adapters = ScoreView._head, dllm_training.draw_adapters
        if self.case.get("stir_adapters"):
            dllm_training.draw_adapters = lambda model, seed: (draw_adapters(model, seed), lora.stir(model, seed))
        Collate.__call__ = lambda this, samples: self.note_noise(samples) or self.note_rows(collate(this, samples))
        ScoreView._head = lambda view, term, **options: self.note_nll(view, term, head(view, term, **options))
        FileSystemWriterAsync.write_preloaded_data = staticmethod(functools.partial(self.write, write))
        for name in names:
            setattr(training, name, functools.partial(getattr(self, name), originals[name]))
        try:
            yield
        finally:
            Collate.__call__ = collate
            ScoreView._head, dllm_training.draw_adapters = head, draw_adapters
            FileSystemWriterAsync.write_preloaded_data = staticmethod(write)
            for name, original in originals.items():
                setattr(training, name, original)

    def note_noise(self, samples) -> None:
        """Hash of what happens to each sample; optionally the disturbances that must not matter, or must be found."""
        if self.case.get("draw_extra"):
            torch.rand(1000), np.random.rand(1000), random.random()
        if self.case.get("disturb_rank") == dist.get_rank():
            samples[0].x_t_S[3] += 1
        if (place := self.case.get("change_clean_token")) is not None:
            for c in samples:
                if c.noised_S[place]:  # then x_t does not show it
                    c.sample.tokens_S[place] = (c.sample.tokens_S[place] + 1) % 64
        if self.case.get("change_last_document"):
            for c in samples:
                last = c.sample.document_S == c.sample.document_S.max()
                for tokens in (c.sample.tokens_S, c.x_t_S):
                    tokens[last] = (tokens[last] + 1) % 64
        for c in samples:
            parts = [c.sample.tokens_S, c.x_t_S, c.noised_S, c.weight_S]
            parts += [getattr(c, name) for name in ("anchors_N", "kept_N", "prefix_N") if hasattr(c, name)]
            digest = hashlib.blake2b(b"".join(part.numpy().tobytes() for part in parts), digest_size=8).hexdigest()
            self.result["noise"].setdefault(str(c.sample.index), digest)

    def note_rows(self, batch):
        """Which (sample, place in the model input) each scored row is; optionally, other padding, or a bad sample."""
        if self.case.get("poison_sample") in batch.index:
            for term in batch.terms.values():
                of_sample_N = term.rows_N % len(batch.index) == batch.index.index(self.case["poison_sample"])
                term.weights_N = term.weights_N.masked_fill(of_sample_N, float("nan"))
        if self.case.get("change_padding") and batch.attributes_BQA is not None:
            n = batch.tokens_BQ.shape[1]
            start = n * mpu.get_context_parallel_rank()
            padding = batch.attributes_BQA[:, start : start + n, DOCUMENT] < 0
            batch.tokens_BQ[padding] = 65
            self.result["padding"] = self.result.get("padding", 0) + int(padding.sum())
        if self.case.get("record_nll"):
            args = get_args()
            streams = get_mode(args.dllm_mode).streams(args)
            length = batch.tokens_BQ.shape[1] * args.context_parallel_size // streams
            own = rank_positions(length, streams, args.context_parallel_size, mpu.get_context_parallel_rank())
            B = len(batch.index)
            for term in batch.terms.values():
                places = [f"{batch.index[row % B]}:{own[row // B]}" for row in term.rows_N.tolist()]
                self.places[id(term)] = (term, places)
        return batch

    def note_nll(self, view, term: str, scored):
        """The nll of every row that the first step scores."""
        if self.case.get("record_nll") and not self.result["losses"]:
            _, places = self.places[id(view._terms[term])]
            self.result["nll"].setdefault(term, {}).update(zip(places, scored[1].tolist(), strict=True))
        return scored

    def train_step(self, original, forward_step, iterator, *args, **kwargs):
        stream = (iterator[0] if isinstance(iterator, list) else iterator).iterable
        if not stream.queue:
            stream.read_step()
        self.result["indices"].append([batch.index for batch in stream.queue])
        _model, optimizer, *_ = args
        self.result["rates"].append(optimizer.param_groups[0]["lr"])
        if self.case.get("slow_rank") == dist.get_rank():
            forward_step = self.clock.slowly(forward_step, seconds=0.1)
        out = original(forward_step, iterator, *args, **kwargs)
        if out[0]:
            self.result["losses"].append(out[0]["loss"].item())
            self.result["reports"].append({k: v.item() for k, v in out[0].items()})
        self.result["grad_norms"].append(None if out[5] is None else float(out[5]))  # None: a step that was left out
        if rank_of(get_args()) is not None:
            self.result["optimizer_elements"] = lora.optimizer_elements(optimizer)
        return out

    def evaluate(self, original, *args, **kwargs):
        out = original(*args, **kwargs)
        if out[0]:
            self.result["evaluations"].append({k: v.item() for k, v in out[0].items()})
        return out

    def setup_model_and_optimizer(self, original, *args, **kwargs):
        out = original(*args, **kwargs)
        if (target := getattr(unwrap_model(out[0][0]), "target", None)) is not None:
            held = target.model.named_parameters()
            self.result["target_experts"] = sum(x.numel() for name, x in held if ".experts." in name)
        if self.case.get("save_reference"):
            torch.save(naive_gradients(unwrap_model(out[0][0]), self.case["datasets"]), self.case["save_reference"])
        return out

    def write(self, original, *args, **kwargs):
        time.sleep(self.case.get("slow_write", 0))
        if self.case.get("fail_to_write") == dist.get_rank():
            raise OSError("no space left on the device")
        return original(*args, **kwargs)

    def finalize_model_grads(self, original, models, *args, **kwargs):
        original(models, *args, **kwargs)
        iteration, rank = self.case.get("poison_gradient", (None, None))
        if len(self.result["grad_norms"]) + 1 == iteration and dist.get_rank() == rank:
            for buffer in models[0].buffers:
                buffer.grad_data[:] = float("inf")
        if self.case.get("note_whole_adapters"):
            named = [pair for each in models for pair in unwrap_model(each).named_parameters() if "lora_" in pair[0]]
            cut = lambda parameter: getattr(parameter, "tensor_model_parallel", False)
            self.result["whole_adapters"] = {name: p.main_grad.sum().item() for name, p in named if not cut(p)}
        path = self.case.get("reference")
        if path is None or "grad_error" in self.result:
            return
        reference = torch.load(path)
        self.result["naive_loss"] = reference["loss"]
        worst, where = 0.0, ""
        for wrapped in models:
            model = unwrap_model(wrapped)
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                full = reference["gradients"][weights.global_name(model, name)]
                expected = weights.cut(model, name, parameter, full)
                gradient = parameter.main_grad.float()
                error = (gradient - expected).abs().max().item()
                largest = full.abs().max().item()
                error = error / largest if largest else error
                if not error <= worst:  # also a NaN
                    worst, where = (error if error == error else float("inf")), name
        self.result["worst_gradient"] = where
        worst = torch.tensor([worst])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        self.result["grad_error"] = worst.item()


def naive_gradients(model, datasets) -> dict:
    """Loss and gradients of the first global batch the plain way: one forward over the whole batch, full
    logits, F.cross_entropy, autograd. No schedule, no DDP, no row selection, no fused head."""
    args = get_args()
    samples = CorruptedSamples(datasets.train, args, Split.train)
    rows = [samples[i] for i in range(args.global_batch_size)]
    batch = Collate(args, 1, 0)(rows)
    teacher = teacher_logits(model, batch) if getattr(args, "dflash_kl_weight", 0) else None
    loss_of = lambda: naive_loss(naive_logits(model, batch, args), rows, args, teacher)
    if rank_of(args) is not None:
        loss, gradients = lora.adapter_gradients(model, loss_of)
        return dict(loss=loss.item(), gradients=gradients)
    loss = loss_of()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    names = [weights.global_name(model, name) for name in parameters]
    true_rows = lambda name, g: g[: args.vocab_size] if name in weights.VOCABULARY else g
    return dict(
        loss=loss.item(), gradients={n: true_rows(n, g.detach()) for n, g in zip(names, gradients, strict=True)}
    )


@torch.no_grad()
def teacher_logits(model, batch) -> torch.Tensor:
    """[B, S, V] of a draft's target, which is a model of ours, for the whole text."""
    S = int((batch.attributes_BQA[0, :, STREAM] == CONTEXT).sum())
    text = batch.tokens_BQ[:, :S], batch.position_ids_BQ[:, :S], batch.attributes_BQA[:, :S, :NUM_ATTRIBUTES]
    return model.target.model(*text)[..., : get_args().vocab_size]


def run(case: dict, store) -> dict:
    if "function" in case:  # something else than training
        module, name = case["function"].split(":")
        return getattr(importlib.import_module(module), name)(case, store)
    sys.argv = ["pretrain_dllm.py", *case["argv"]]
    args, tokenizer = parse_arguments()
    check_before_loading(args)
    if args.init_from_hf:
        check_source(args)
    case["datasets"] = build_datasets(args, tokenizer)
    observation = Observation(case)
    quiet = observation.clock.installed() if "slow_rank" in case else contextlib.nullcontext()
    with observation.watching(), quiet:
        pretrain(args, case["datasets"], store=store)
    return observation.result


def clean_up() -> None:
    training.destroy_global_state()
    async_utils._async_calls_queue = None  # what a failed case had not finished
    destroy_moe_metrics_tracker()  # it remembers process groups
    if dist.is_initialized():
        mpu.destroy_model_parallel()  # it remembers its groups, whose threads poll
        dist.destroy_process_group()
    for thing in gc.get_objects():  # what keeps models by hooks of the autograd graph, which the collector does not see
        if issubclass(type(thing), MoETokenDispatcher):  # remembers a tensor
            vars(thing).update({name: None for name, value in vars(thing).items() if torch.is_tensor(value)})
        elif issubclass(type(thing), DistributedDataParallel) and thing.ddp_config.use_distributed_optimizer:
            for cell in (r for r in gc.get_referrers(thing) if isinstance(r, types.CellType)):
                del cell.cell_contents
    gc.collect()  # models are cyclic: they keep their process groups, and those their threads
    training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))


def _cached_by_class(docstrings):
    """The method's result by its argument, whichever factory asks."""
    known = {}

    def cached(factory, source_class):
        if source_class not in known:
            known[source_class] = docstrings(factory, source_class)
        return known[source_class]

    return cached


def shared_store(rank: int, world: int, folder: Path) -> dist.TCPStore:
    """Rank 0 lets the system choose the port, so that two pools on one machine never meet."""
    timeout = datetime.timedelta(seconds=SECONDS_PER_CASE)
    place = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, timeout, wait_for_workers=False)
        (folder / "port.tmp").write_text(str(store.port))
        os.replace(folder / "port.tmp", place)
    else:
        while not place.exists():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), world, False, timeout)
    (folder / f"ready.{rank}").touch()
    return store


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    install()
    # A case parses Megatron's arguments anew and collects garbage several times: neither needs to start from nothing.
    ArgumentGroupFactory._get_field_docstrings = _cached_by_class(ArgumentGroupFactory._get_field_docstrings)
    gc.collect()
    gc.freeze()
    store = shared_store(rank, world, Path(os.environ["POOL_FOLDER"]))
    for line in sys.stdin:
        case = json.loads(line)
        n = case["processes"]
        if rank >= n:
            continue
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(n)
        faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True, file=sys.__stderr__)
        output, answer = io.StringIO(), {}
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                answer = run(case, dist.PrefixStore(f"case{case['number']}", store))
        except BaseException as error:
            answer = dict(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        answer["output"] = output.getvalue()
        try:
            clean_up()
        except Exception as error:  # reported like any other failure, unless the case itself had failed
            answer.setdefault("error", f"while cleaning up: {error}")
            answer.setdefault("traceback", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        with open(f"{case['answer']}.{rank}.tmp", "w") as file:
            json.dump(answer, file)
        os.replace(f"{case['answer']}.{rank}.tmp", f"{case['answer']}.{rank}")


if __name__ == "__main__":
    main()
