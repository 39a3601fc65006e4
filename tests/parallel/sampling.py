"""A case of the pool that writes text instead of training."""

from megatron_dllm.generation import GenerationConfig, generate
from megatron_dllm.generation.load import build, plan


def write(case: dict, store) -> dict:
    """What each of the case's configurations makes of its prompts, for a Hugging Face folder in this layout."""
    loaded = build(plan(**case["plan"]), store)
    configs = [GenerationConfig(**options) for options in case["configs"]]
    answers = [generate(loaded.model, loaded.tokenizer, case["prompts"], config) for config in configs]
    return {name: [[getattr(c, name) for c in some] for some in answers] for name in ("ids", "forwards")}
