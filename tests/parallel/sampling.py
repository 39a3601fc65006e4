"""A case of the pool that writes text instead of training."""

import contextlib

import torch

from megatron_dllm.generation import GenerationConfig, generate
from megatron_dllm.generation.load import build, plan
from tests import gemma


def write(case: dict, store) -> dict:
    """What each of the case's configurations makes of its prompts, for a Hugging Face folder in this layout. `double`:
    in float64, for networks in which rounding would decide."""
    double = case.get("double", False)
    with gemma.float64() if double else contextlib.nullcontext():
        planned = plan(**case["plan"])
        if double:
            planned.args.params_dtype, planned.args.moe_router_dtype = torch.float64, "fp64"
        loaded = build(planned, store)
        configs = [GenerationConfig(**options) for options in case["configs"]]
        answers = [generate(loaded.model, loaded.tokenizer, case["prompts"], config) for config in configs]
    return {name: [[getattr(c, name) for c in some] for some in answers] for name in ("ids", "forwards")}
