"""What can be wrong with the flags by which a run reads and writes Hugging Face folders (see validation.py)."""

import os

from megatron_dllm.conversion.defaults import has_tokenizer
from megatron_dllm.models import get_family
from megatron_dllm.models.family import PLAIN
from megatron_dllm.models.hf import read_config
from megatron_dllm.models.rope import last_position


def check_conversion(args, given: set[str]) -> None:
    """ValueError (one sentence); makes `hf_model` absolute. `given`: the flags on the command line."""
    last = last_position(args.dllm_rope_scaling)
    if last is not None and args.seq_length > last:
        raise ValueError(
            f"--seq-length {args.seq_length}: this model scales its queries from position {last} on "
            f"(llama_4_scaling_beta), which is not implemented; use at most {last}."
        )
    if "dllm_family" in given and args.hf_model is None:
        raise ValueError("--dllm-family says what --hf-model is: give that too, or neither.")
    if args.hf_model is not None:
        args.hf_model = os.path.abspath(args.hf_model)
        if not has_tokenizer(args.hf_model) and args.tokenizer_type is None:
            raise ValueError(f"{args.hf_model} holds no tokenizer: give --tokenizer-type and --tokenizer-model.")
    if getattr(args, "dflash_target", None) is not None and args.tokenizer_type is None:
        raise ValueError(
            f"--dflash-target {args.dflash_target} holds no tokenizer: give --tokenizer-type and --tokenizer-model."
        )
    if args.init_from_hf:
        if args.hf_model is None:
            raise ValueError("--init-from-hf reads the weights of --hf-model DIR: give it.")
        theirs = get_family(args.dllm_family).read(read_config(args.hf_model))
        for name in sorted(set(PLAIN) & given):
            if getattr(args, name) != theirs[name]:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} does not fit {args.hf_model}, whose weights "
                    f"--init-from-hf reads ({theirs[name]}): remove the flag."
                )
    if args.save_hf_interval is None:
        return
    if args.save is None or args.save_hf_interval < 1 or args.save_hf_interval % args.save_interval:
        raise ValueError(
            f"--save-hf-interval {args.save_hf_interval} converts checkpoints of this run: give --save and a multiple "
            "of --save-interval."
        )
