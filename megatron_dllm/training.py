"""The training loop's own part: model and data for `megatron.training.pretrain`, the loss, the logs.

Everything else (schedules, DDP, optimizer, checkpoints, logging) is Megatron's.
"""

import functools
import time

import torch
from megatron.core import mpu
from megatron.core.datasets.utils import Split
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
from megatron.training import training as megatron_training
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.utils import is_last_rank, print_rank_last

from megatron_dllm import exit_signal, fixes
from megatron_dllm.conversion.source import Source, load_into
from megatron_dllm.data.datasets import Datasets
from megatron_dllm.data.stream import StepStream, build_stream
from megatron_dllm.metrics import LossCurves, memory_gib, throughput
from megatron_dllm.models import dflash, get_family, target
from megatron_dllm.models.dlm import DiffusionLM
from megatron_dllm.models.draft import DraftModel
from megatron_dllm.models.fp8_emulation import emulate_fp8
from megatron_dllm.models.gemma import DiffusionGemma
from megatron_dllm.models.gemma_layers import Shape
from megatron_dllm.models.init import draw_adapters, initialize
from megatron_dllm.models.lora import add_adapters, rank_of
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.models.weights import is_gemma, target_layers
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import LossTerm
from megatron_dllm.parallel import RankBatch
from megatron_dllm.resilience import saving, stragglers
from megatron_dllm.resilience.bad_steps import BadStep, Guard
from megatron_dllm.resilience.run import LongRun
from megatron_dllm.self_conditioning import with_first_pass

loss_curves = LossCurves()
long_run = LongRun()
guard = Guard(loss_curves)
term_weights: dict[str, float] = {}  # of the last micro-batch's loss terms


def model_provider(
    pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None, draw_weights=True
):
    """One pipeline stage (or virtual chunk) of the model, or a draft, with layout-independent initial weights (without
    `draw_weights`: memory that a checkpoint is about to fill)."""
    args = get_args()
    targets = target_layers(args)
    config = core_transformer_config_from_args(args) if targets is None else target.draft_config(args)
    config.variable_seq_lengths = args.dllm_variable_lengths
    config.perform_initialization = False  # `initialize` draws every parameter
    common = dict(
        rotary_base=args.rotary_base,
        rope_scaling=args.dllm_rope_scaling,
        attention_backend=args.dllm_attention_backend,
        pg_collection=pg_collection,
    )
    if args.dllm_mode == "dflash" and args.dflash_target is not None:
        width, see = len(targets) * config.hidden_size, get_mode(args.dllm_mode).rule(args)
        model = dflash.DraftOfTarget(config, target.build(args, pg_collection), width, rule=see, **common)
    elif targets is not None:
        model = DraftModel(config, len(targets) * config.hidden_size, **common)
    else:
        common |= dict(
            rule=get_mode(args.dllm_mode).visible,
            vocab_size=args.padded_vocab_size,
            true_vocab_size=args.vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            rotary_percent=args.rotary_percent,
            vp_stage=vp_stage,
        )
        if is_gemma(args):
            model = DiffusionGemma(config, shape=Shape.of(args), train_router=args.dllm_train_router, **common)
        else:
            tied = not args.untie_embeddings_and_output_weights
            common |= dict(share_embeddings_and_output_weights=tied, separate_norms=rank_of(args) is not None)
            model = DiffusionLM(config, **common)
    if getattr(args, "dllm_emulate_fp8", None) is not None:  # checkpoints of before it know nothing of it
        emulate_fp8(model, args.dllm_emulate_fp8)
    if rank_of(args) is not None:
        add_adapters(model, args)
        model.adapters_anew = getattr(args, "lora_anew", False)
    if draw_weights and args.init_from_hf:
        load_into(model, Source(args.hf_model, get_family(args.dllm_family), args), args.seed)
    elif draw_weights:
        initialize(model, args.seed)
    if draw_weights and rank_of(args) is not None:
        draw_adapters(model, args.seed)
    return model


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold the word embedding: the first, and the last when the head is tied to it."""
    tied = not get_args().untie_embeddings_and_output_weights
    return [pipeline_ranks[0], pipeline_ranks[-1]] if tied and len(pipeline_ranks) > 1 else [pipeline_ranks[0]]


def data_provider(datasets: Datasets, shared_counts: dict[Split, dict]):
    """What `pretrain` calls for its three iterators, once per virtual pipeline chunk. shared_counts: by split, what a
    step holds over all ranks (StepStream)."""

    def provide(num_samples, vp_stage=None):
        args = get_args()
        evaluates = args.eval_iters > 0
        streams = [
            build_stream(datasets.train, Split.train, args, args.consumed_train_samples, shared_counts[Split.train])
        ]
        for split, samples in ((Split.valid, datasets.valid), (Split.test, datasets.test)):
            # from 0, also after a resume: every evaluation reads the same samples
            streams.append(build_stream(samples if evaluates else None, split, args, 0, shared_counts[split]))
        return tuple(streams)

    provide.is_distributed = True  # every tensor-, context- and pipeline-parallel peer reads the data itself
    return provide


def forward_step(iterator, model):
    """One micro-batch through this stage. Returns its output and the function that makes the loss of it."""
    args = get_args()
    mode = get_mode(args.dllm_mode)
    long_run.alive()
    batch: RankBatch = next(iterator).to(torch.cuda.current_device())

    def score(view: ScoreView) -> list[LossTerm]:
        terms = mode.loss(view, args)
        if training and args.dllm_guard:
            guard.note(batch.index, sum(term.weight * term.sum.detach() for term in terms), view)
        for name, nll in view.nll.items() if training else ():
            loss_curves.add(nll, batch.terms[name].levels_N, batch.terms[name].offsets_N)
        if (measure := getattr(mode, "measure", None)) is not None:
            measures.update(measure(view, args))
        return terms

    training = unwrap_model(model).training
    measures: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    options = {} if batch.soft is None else dict(soft=batch.soft)
    inputs = batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA
    output = model(*inputs, loss=score, terms=batch.terms, **options)
    return output, functools.partial(loss_function, batch, training, measures)


def loss_function(batch: RankBatch, training: bool, measures: dict, terms: list[LossTerm]):
    """(loss for the schedule, what to report: each term by name, unweighted, and their weighted sum; and what the mode
    measures, as quotients of sums).

    The step's loss is Σ_terms weight · (Σ over the global batch of S) / N. The schedule divides what it gets
    by the number of micro-batches M, and DDP averages gradients over data-parallel ranks: both are undone
    here, which leaves exactly the global quotient. (Context-parallel ranks: the schedule multiplies by their
    number, DDP divides by it again.)
    """
    args = get_args()
    cp, dp, M = args.context_parallel_size, args.data_parallel_size, batch.microbatches
    share = 1.0 / (M * dp * cp)  # a report [value, share] is summed over micro-batches, DP and CP, then divided
    total, report = 0.0, {}
    for term in terms:
        value = term.sum.detach()
        term_weights[term.name] = term.weight
        denominator = batch.denominators[term.counted]
        total = total + term.weight * term.sum / denominator
        if training:
            report[f"{term.name} loss"] = torch.stack([value / denominator, value.new_tensor(share)])
        else:  # one quotient over all evaluated tokens, rather than the mean of the evaluation steps' quotients
            report[f"{term.name} loss"] = torch.stack([value, value.new_tensor(batch.counts[term.counted] / cp)])
    if not (training and args.dllm_guard):
        _check(total.detach())
    if training:
        report = {"loss": torch.stack([total.detach(), total.new_tensor(share)]), **report}
        for name, count in batch.tokens.items():
            label = f"{name} tokens" if name in ("supervised", "noised", "data", "processed") else name
            report[label] = total.detach().new_tensor([count / cp, share])
    nothing = torch.finfo(torch.float32).tiny  # so that 0 of 0 is 0
    report |= {name: torch.stack([value, count + nothing]) for name, (value, count) in measures.items()}
    return total * (dp * M), report


def _check(loss: torch.Tensor) -> None:
    """Megatron's checks, which live in its own GPT loss function: of evaluations, and of steps that are not ours to
    judge (resilience.bad_steps)."""
    args, rerun = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad or args.dllm_guard:
        rerun.validate_result(
            loss, rejection_func=torch.isnan, message="found NaN in the local loss", tolerance=0.0, fatal=True
        )
        rerun.validate_result(
            loss, rejection_func=torch.isinf, message="found Inf in the local loss", tolerance=0.0, fatal=True
        )


# --- hooks around Megatron's step and log ---------------------------------------------------------------------


class _Hooks:
    """Wraps `train_step` and `training_log`, which Megatron looks up as module globals."""

    def __init__(self):
        self.train_step = megatron_training.train_step
        self.training_log = megatron_training.training_log
        self.megatron_evaluate = megatron_training.evaluate
        self.save = functools.partial(long_run.save, megatron_training.save_checkpoint)
        self.seconds = 0.0
        self.steps_verified = 0
        self.model = self.datasets = None
        self.counts: dict[Split, dict] = {split: {} for split in Split}

    def step(self, forward_step_func, data_iterator, *args, iteration: int, **kwargs):
        if self.steps_verified < get_args().dllm_verify_peers:
            first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
            stream = first.iterable
            if isinstance(stream, StepStream):
                stream.verify_peers()
            self.steps_verified += 1
        self.model, optimizer, *_ = args
        if get_args().dllm_guard:
            guard.begin(iteration + 1, self.model, optimizer)
        long_run.step_begins()
        start = time.perf_counter()
        try:
            result = self.train_step(forward_step_func, data_iterator, *args, iteration=iteration, **kwargs)
        except BadStep:  # on every rank; what is still being saved is of good steps
            maybe_finalize_async_save(blocking=True)
            raise
        self.seconds = time.perf_counter() - start  # the optimizer step has synchronised the device
        if not guard.skipped:
            _learn_from_step(result[0])
        long_run.step_ended(iteration + 1, result[0], self.seconds)
        return result

    def evaluate(self, *args, **kwargs):
        """Adds the weighted sum of the terms, each of which is a quotient over all evaluated tokens."""
        long_run.alive("evaluating")
        result = self.megatron_evaluate(*args, **kwargs)
        if result[0]:
            values = {name: result[0][f"{name} loss"] for name in term_weights}
            total = sum(weight * values[name] for name, weight in term_weights.items())
            result = ({"loss": total, **result[0]}, *result[1:])
        return result

    def log(self, loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
        if loss_dict:  # ranks of the last pipeline stage
            for name in ("data", "processed"):
                # counts stay fp32 tensors: the running sums are Megatron's
                loss_dict[f"{name} tokens/s"] = loss_dict[f"{name} tokens"] / self.seconds
            for name, value in get_args().dllm_state.items():  # what the next step will use
                loss_dict[f"next {name}"] = loss_dict["loss"].new_tensor(value)
            for name, value in throughput(self.flops(), self.seconds, get_args()).items():
                loss_dict[name] = loss_dict["loss"].new_tensor(value)
            loss_dict["memory (GiB)"] = loss_dict["loss"].new_tensor(memory_gib())
        result = self.training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        if iteration % get_args().log_interval == 0:
            self._log_curves(iteration)
            long_run.report_stragglers()
        every = get_args().dflash_eval_interval
        if every and iteration % every == 0:
            self._log_acceptance(iteration)
        return result

    def flops(self, *args, **kwargs) -> float:
        """Model FLOPs of the last step, on every rank; in place of Megatron's count, which is of a causal model with
        one stream and a head on every row."""
        return self.counts[Split.train].get("flops", 0.0)

    def _log_acceptance(self, iteration: int) -> None:
        from megatron_dllm.generation.acceptance import tokens_per_pass

        held_out = self.datasets.valid is not None
        value = tokens_per_pass(self.model[0], self.datasets.valid if held_out else self.datasets.train, get_args())
        of = "held-out prompts" if held_out else "prompts of the training data, as there are no held-out ones"
        print_rank_last(f" tokens per pass of the target at iteration {iteration}: {value:.3f} ({of})")
        _write_scalar("tokens per pass of the target", value, iteration)

    def _log_curves(self, iteration: int) -> None:
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return
        for curve in (loss_curves.by_level, loss_curves.by_place):
            means = curve.reduce(mpu.get_data_parallel_group(with_context_parallel=True))
            if means:
                bins = (f"{name.rpartition(' ')[2]}: {value:.4f}" for name, value in means.items())
                print_rank_last(f" {curve.title} | " + " | ".join(bins))
            for name, value in means.items():
                _write_scalar(name, value, iteration)


def _write_scalar(name: str, value: float, iteration: int) -> None:
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        writer.add_scalar(name, value, iteration)
    if wandb and is_last_rank():
        wandb.log({name: value}, iteration)


def _learn_from_step(report: dict) -> None:
    """Tell the mode the step's losses, if it wants to know. They exist on the last pipeline stage: collective."""
    args = get_args()
    after_step = getattr(get_mode(args.dllm_mode), "after_step", None)
    if after_step is None:
        return
    names = get_mode(args.dllm_mode).TERMS
    losses = torch.zeros(len(names), device=torch.cuda.current_device())
    if report:
        losses += torch.stack([report[f"{name} loss"].float() for name in names])
    torch.distributed.all_reduce(losses, group=mpu.get_pipeline_model_parallel_group())
    after_step(dict(zip(names, losses.tolist(), strict=True)), args)


@functools.cache
def install() -> _Hooks:
    """Repairs of Megatron and our hooks; once per process."""
    fixes.install()
    saving.install()
    stragglers.install()
    exit_signal.install()
    if not torch.cuda.is_available():
        from megatron_dllm import cpu

        cpu.patch_training()
    hooks = _Hooks()
    megatron_training.train_step = hooks.step
    megatron_training.training_log = hooks.log
    megatron_training.evaluate = hooks.evaluate
    megatron_training.save_checkpoint = hooks.save
    megatron_training.dummy_train_step = long_run.leave_out_step
    megatron_training.num_floating_point_operations = hooks.flops
    megatron_training.get_forward_backward_func = with_first_pass(megatron_training.get_forward_backward_func)
    return hooks


def pretrain(args, datasets: Datasets, store=None) -> None:
    """Train as `args` say (from `parse_arguments`). `store`: rendezvous for tests that reuse processes."""
    hooks = install()
    hooks.steps_verified, hooks.model, hooks.datasets = 0, None, datasets
    hooks.counts = {split: {} for split in Split}
    loss_curves.reset()
    term_weights.clear()
    if args.exit_signal_handler:
        exit_signal.hold(args.exit_signal)
    if datasets.valid is None and datasets.test is None:
        args.eval_iters = 0  # nothing to evaluate on: Megatron would ask for samples all the same
    long_run.start(args)
    try:
        _pretrain(args, datasets, hooks.counts, store)
        long_run.stop()
    except BaseException as error:  # a SystemExit may be the regular end
        long_run.stop(error)
        raise
    finally:
        guard.reset()  # it holds the optimizer
        long_run.exporter.wait()


def _pretrain(args, datasets: Datasets, counts: dict[Split, dict], store) -> None:
    megatron_training.pretrain(
        pretrain_cfg_container_from_args(args, None),
        data_provider(datasets, counts),
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model_provider,
        get_embedding_ranks=embedding_ranks,
        store=store,
    )
