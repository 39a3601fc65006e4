"""Self-conditioning in training: where a sample's coin says so, a canvas is told what a pass without a graph has made
of it (models/gemma.py).

The two passes are two ordinary runs of Megatron's pipeline schedule, so that every layout and schedule serves: first,
forward only, the micro-batches of the step in which some coin is on; what comes out on the last stage, the last hidden
states of canvas rows, goes to the first stage; then the step as it would be without. (A schedule inside of a schedule
would deadlock, or mix up stages' tensors.)

A first pass is cheaper than the second: it needs the samples whose coin is on, their canvases, the text before these,
and no head. That is `first` of a RankBatch (parallel.first_pass_input).

Coins are a function of (seed, sample index), so model-parallel peers agree on the micro-batches. Data-parallel ranks
hold other samples; where a pass is collective among them too (experts are exchanged, parameters are gathered as they
are needed), they agree by one small reduction a step.
"""

import functools

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_dllm.parallel import RankBatch


def with_first_pass(get_schedule):
    """Wraps `get_forward_backward_func`, which Megatron's loop looks up for every training run and evaluation."""

    @functools.wraps(get_schedule)
    def get(*args, **kwargs):
        return functools.partial(_run, get_schedule(*args, **kwargs))

    return get


def _run(schedule, *, data_iterator, num_microbatches: int, forward_only: bool = False, **options):
    if forward_only or not _conditions():  # an evaluation is one pass, as published
        return schedule(
            data_iterator=data_iterator, num_microbatches=num_microbatches, forward_only=forward_only, **options
        )
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]  # of virtual stages
    chunks = [[next(iterator) for _ in range(num_microbatches)] for iterator in iterators]
    wanted = _wanted(chunks[0], interleaved=len(chunks) > 1)
    model = options["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    gather = config.param_sync_func
    if wanted:
        _first_pass(schedule, chunks, wanted, options)
        config.param_sync_func = None  # which has gathered them
    streams = [iter(chunk) for chunk in chunks]
    try:
        return schedule(
            data_iterator=streams if isinstance(data_iterator, list) else streams[0],
            num_microbatches=num_microbatches,
            forward_only=False,
            **options,
        )
    finally:
        config.param_sync_func = gather


def _conditions() -> bool:
    return bool(getattr(get_args(), "block_diffusion_self_conditioning", None))


def _wanted(batches: list[RankBatch], interleaved: bool) -> list[int]:
    """Which micro-batches of the step need a first pass."""
    on = torch.tensor([bool(batch.self_conditioned_B.any()) for batch in batches])
    args = get_args()
    shared_scales = args.fp8 is not None and args.fp8_recipe == "delayed"  # reduced after every pass
    if args.expert_model_parallel_size > 1 or args.overlap_param_gather or shared_scales:
        flags = on.int().to(torch.cuda.current_device())
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=mpu.get_data_parallel_group(with_context_parallel=True))
        on = flags.bool().cpu()
    if interleaved and on.any():  # that schedule wants as many micro-batches as the step has
        on = torch.ones_like(on)
    return on.nonzero()[:, 0].tolist()


@torch.no_grad()
def _first_pass(schedule, chunks: list[list[RankBatch]], wanted: list[int], options: dict) -> None:
    """Fills in `soft` of the wanted micro-batches on the first stage."""
    picked = [[chunk[i] for i in wanted] for chunk in chunks]
    streams = [iter(chunk) for chunk in picked]
    states = schedule(
        **options | dict(forward_step_func=_forward_step, collect_non_loss_data=True),
        data_iterator=streams if len(streams) > 1 else streams[0],
        num_microbatches=len(wanted),
        forward_only=True,
    )
    first, last = mpu.is_pipeline_first_stage(ignore_virtual=True), mpu.is_pipeline_last_stage(ignore_virtual=True)
    group = mpu.get_pipeline_model_parallel_group()
    for place, batch in enumerate(picked[0]):
        if last and not first:
            dist.send(states[place], mpu.get_pipeline_model_parallel_first_rank(), group=group)
        elif first and not last:
            shape = (batch.canvas_rows, len((batch.first or batch).tokens_BQ), get_args().hidden_size)
            received = torch.empty(shape, dtype=get_args().params_dtype, device=torch.cuda.current_device())
            dist.recv(received, mpu.get_pipeline_model_parallel_last_rank(), group=group)
            batch.soft = _known(received, batch)
        elif first:
            batch.soft = _known(states[place], batch)


def _known(states_CbD: torch.Tensor, batch: RankBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(states of the samples whose coin is on, which these are), of a pass that saw these samples or all of them."""
    rows = batch.self_conditioned_B.nonzero()[:, 0]
    if not len(rows):  # the pass was for others' sake
        return None
    rows = rows.to(states_CbD.device)  # the batch may not be there yet
    return (states_CbD if states_CbD.shape[1] == len(rows) else states_CbD[:, rows]), rows


@torch.no_grad()
def first_pass_of_one_process(model, batch: RankBatch):
    """`soft` for `model(...)` of one micro-batch without a schedule: for tools. None if no coin is on."""
    if not batch.self_conditioned_B.any():
        return None
    first = batch.first
    inputs = first.tokens_BQ, first.position_ids_BQ, first.attributes_BQA
    return _known(model(*inputs, canvas_rows=first.canvas_rows), batch)


def _forward_step(iterator, model):
    """One micro-batch through this stage, for the hidden states of its canvas rows."""
    batch: RankBatch = next(iterator)
    batch = (batch.first or batch).to(torch.cuda.current_device())
    output = model(batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA, canvas_rows=batch.canvas_rows)
    dtype = get_args().params_dtype
    return output, lambda output, non_loss_data: output.to(dtype).contiguous()
