"""What a preset, a folder, a draft's target or its checkpoint says about a run: defaults of its flags."""

import argparse

from megatron_dllm.checkpoint import draft_defaults
from megatron_dllm.conversion.defaults import folder_defaults
from megatron_dllm.models import get_family
from megatron_dllm.presets import get_preset


def chosen_defaults() -> dict:
    """Of `sys.argv`. Raises ValueError (one sentence)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--model-preset", "--hf-model", "--dllm-family", "--dflash-target", "--load"):
        parser.add_argument(flag)
    parser.add_argument("--dflash-target-backend", default="megatron")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--ckpt-step", type=int)
    chosen, _ = parser.parse_known_args()
    if chosen.model_preset is not None and chosen.hf_model is not None:
        raise ValueError("--model-preset and --hf-model both give the model's shape: give one of them.")
    defaults = {} if chosen.model_preset is None else dict(get_preset(chosen.model_preset))
    if chosen.dflash_target is not None:
        from megatron_dllm.models import target  # brings all of Megatron with it

        defaults |= target.defaults(chosen.dflash_target, chosen.dflash_target_backend, chosen.trust_remote_code)
    if chosen.hf_model is not None:
        family = None if chosen.dllm_family is None else get_family(chosen.dllm_family)
        defaults |= folder_defaults(chosen.hf_model, family)
    if chosen.dflash_target is not None and chosen.load is not None:  # goes before a folder where there is one
        defaults |= draft_defaults(chosen.load, chosen.ckpt_step)
    return defaults
