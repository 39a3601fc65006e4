"""A draft on one rank of a layout: what the test pool runs (see worker.py). Returns how far it is from one process."""

import os

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dllm.models import init as weights
from tests.drafts import Batch
from tests.parity.loading import build, command


def gradients(case: dict, store) -> dict:
    """argv: folder and flags; tp, cp: sizes; save: where the single process leaves its results, or reference: where
    they are; checkpoint: load the weights from there."""
    path, *flags = case["argv"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mpu.initialize_model_parallel(case.get("tp", 1), context_parallel_size=case.get("cp", 1))
    model_parallel_cuda_manual_seed(1)
    model = build(path, *flags).train()
    if "checkpoint" in case:
        with command("--dllm-mode", "mdlm", "--hf-model", *case["argv"]):
            load(model, case["checkpoint"])
    batch, cp = Batch(), mpu.get_context_parallel_rank()
    hidden = forward(model, batch, cp)
    share = batch.direction_BQD.transpose(0, 1).chunk(case.get("cp", 1))[cp]
    if model.config.sequence_parallel:
        share = share.chunk(case["tp"])[mpu.get_tensor_model_parallel_rank()]
    (hidden * share).sum().backward()
    found = {name: reduced(model, name, parameter) for name, parameter in model.named_parameters()}
    if "save" in case:
        torch.save((hidden.detach(), found), case["save"])
        return {}
    expected, theirs = torch.load(case["reference"])
    expected = expected.chunk(case.get("cp", 1))[cp]
    if model.config.sequence_parallel:
        expected = expected.chunk(case["tp"])[mpu.get_tensor_model_parallel_rank()]
    error = lambda a, b: ((a - b).abs().max() / b.abs().max()).item()
    held = {name: weights.cut(model, name, parameter, theirs[name]) for name, parameter in model.named_parameters()}
    worst = {name: error(gradient, held[name]) for name, gradient in found.items()}
    return dict(hidden=error(hidden, expected), gradients=worst)


def forward(model, batch: Batch, cp: int) -> torch.Tensor:
    """Under context parallelism each rank has a part of the context and a part of the blocks."""
    ranks = model.config.context_parallel_size
    S = batch.features_BSF.shape[1]
    parts = lambda x: zip(x[:, :S].chunk(ranks, 1), x[:, S:].chunk(ranks, 1), strict=True)
    split = lambda x: [torch.cat(pair, 1) for pair in parts(x)]
    return model(
        batch.features_BSF.transpose(0, 1).chunk(ranks)[cp],
        batch.embeddings_BQD.transpose(0, 1).chunk(ranks)[cp],
        split(batch.position_ids_BT)[cp],
        torch.cat(split(batch.attributes_BTA), 1),
    )


def reduced(model, name: str, parameter) -> torch.Tensor:
    """The gradient as Megatron finalizes it: summed over context parallelism, and over tensor parallelism where ranks
    have seen other tokens (norms under sequence parallelism) or heads (their norms)."""
    gradient = parameter.grad.clone()
    dist.all_reduce(gradient, group=mpu.get_context_parallel_group())
    by_token = model.config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    if by_token or "q_layernorm" in name or "k_layernorm" in name:
        dist.all_reduce(gradient, group=mpu.get_tensor_model_parallel_group())
    return gradient


def load(model, folder: str) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    metadata = dist_checkpointing.load_content_metadata(folder)
    state = dist_checkpointing.load(dict(model=model.sharded_state_dict(metadata=metadata)), folder)
    model.load_state_dict(state["model"])
