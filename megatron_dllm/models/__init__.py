"""Model families by name. A new one is a file of declarations beside this one and a line here."""

from megatron_dllm.models.dflash_draft import DFLASH_DRAFT
from megatron_dllm.models.diffusion_gemma import DIFFUSION_GEMMA
from megatron_dllm.models.family import Family
from megatron_dllm.models.llada import LLADA
from megatron_dllm.models.llada2 import GLM4_MOE, LLADA2
from megatron_dllm.models.llada_moe import LLADA_MOE
from megatron_dllm.models.llama import LLAMA
from megatron_dllm.models.nemotron import MINISTRAL3, NEMOTRON
from megatron_dllm.models.qwen2 import DREAM, FAST_DLLM_V2, QWEN2
from megatron_dllm.models.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "dream": DREAM,
    "fast_dllm_v2": FAST_DLLM_V2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "llada": LLADA,
    "llada_moe": LLADA_MOE,
    "llada2": LLADA2,
    "glm4_moe": GLM4_MOE,
    "nemotron": NEMOTRON,
    "ministral3": MINISTRAL3,
    "dflash_draft": DFLASH_DRAFT,
    "diffusion_gemma": DIFFUSION_GEMMA,
}


def get_family(name: str) -> Family:
    """ValueError naming the known ones otherwise."""
    if name not in FAMILIES:
        raise ValueError(f"unknown model family {name!r}: choose one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def recognise(config: dict) -> Family:
    """The family of a config.json, by its architecture and else by its type; ValueError if there is none."""
    architectures = config.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    architectures = [name for name in architectures if isinstance(name, str)]
    for family in FAMILIES.values():
        if {family.architecture, *family.also_architectures} & set(architectures):
            return family
    kind = config.get("model_type")
    for family in FAMILIES.values():
        if kind in family.types:
            return family
    raise ValueError(
        f"config.json describes a {kind!r} model ({', '.join(architectures) or 'no architecture'}), which is none of "
        f"{', '.join(FAMILIES)}."
    )
