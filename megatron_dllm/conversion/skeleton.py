"""A whole model without memory, in this one process: what Megatron says about where its weights are stored."""

from argparse import Namespace

import torch


def skeleton(args: Namespace) -> torch.nn.Module:
    """The model of `args` (a run's, neutralised) on the meta device. Once per process."""
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    from megatron_dllm import fixes
    from megatron_dllm.launch import default_to_one_process
    from megatron_dllm.training import embedding_ranks, model_provider

    fixes.install()
    default_to_one_process()
    set_global_variables(args, build_tokenizer=False)
    initialize_megatron(allow_no_cuda=not torch.cuda.is_available(), get_embedding_ranks=embedding_ranks)
    with torch.device("meta"):
        return model_provider(draw_weights=False)


def content_metadata() -> dict:
    """How this version of Megatron arranges a checkpoint that it writes."""
    from megatron.training import get_args
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    return _build_sharded_state_dict_metadata(get_args())
