"""The training modes. Adding one takes its file and one line here."""

from types import ModuleType

from megatron_dllm.modes import bd3lm, block_diffusion, dflash, hybrid, idlm, mdlm, scdd

MODES: dict[str, ModuleType] = {
    "mdlm": mdlm,
    "bd3lm": bd3lm,
    "hybrid": hybrid,
    "idlm": idlm,
    "scdd": scdd,
    "dflash": dflash,
    "block_diffusion": block_diffusion,
}


def get_mode(name: str) -> ModuleType:
    """The mode module called `name`; ValueError naming the known ones otherwise."""
    if name not in MODES:
        raise ValueError(f"unknown --dllm-mode {name!r}: choose one of {', '.join(sorted(MODES))}.")
    return MODES[name]
