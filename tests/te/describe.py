"""python tests/te/describe.py FLAGS...: what the model of a training command is made of, as JSON.

With --transformer-impl transformer_engine it pretends that there is a GPU, as far as building needs one: parameters lie
on the CPU, and nothing can be computed. So this is about classes, names and shapes.
"""

import contextlib
import importlib
import json
import os
import sys
import types

import torch


def pretend_gpu() -> None:
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    cuda.Stream = types.SimpleNamespace
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.get_device_capability = lambda *args, **kwargs: (10, 0)
    cuda.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(major=10, minor=0, name="pretended")
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


def describe(*flags: str) -> dict:
    """classes: of modules by name; weights: by the key that checkpoints store them under, their global shape, and where
    the parts lie if there are several; recipe: class of Transformer Engine's, in FP8."""
    importlib.import_module("megatron_dllm")  # before megatron
    import torch.distributed as dist
    from megatron.core import mpu, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.training import global_vars

    from megatron_dllm.arguments import read_command_line
    from megatron_dllm.training import model_provider

    CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    sys.argv = ["pretrain_dllm.py", *flags]
    with contextlib.redirect_stdout(sys.stderr):
        args, _ = read_command_line()
        args.init_from_hf = False
        global_vars.set_args(args)
        model = model_provider(draw_weights=False)
    state = model.sharded_state_dict(metadata=dict(singleton_local_shards=False))
    weights = {}
    for entry in tensors(state):
        if "_extra_state" not in entry.key:
            weights.setdefault(entry.key, [entry.global_shape]).append(entry.global_offset)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    recipe = None
    if args.fp8 is not None:
        from megatron.core.fp8_utils import get_fp8_recipe

        parallel_state.get_amax_reduction_group = lambda **kwargs: None
        recipe = type(get_fp8_recipe(model.config)).__name__
    return dict(classes=classes, weights={key: sorted(parts) for key, parts in weights.items()}, recipe=recipe)


def tensors(state):
    """Everything in a sharded state that has a key."""
    from megatron.core.dist_checkpointing.mapping import apply_factories

    apply_factories(state)
    stack = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
        elif hasattr(value, "key") and hasattr(value, "global_shape"):
            yield value


if __name__ == "__main__":
    if "transformer_engine" in sys.argv:
        pretend_gpu()
    print(json.dumps(describe(*sys.argv[1:])))
