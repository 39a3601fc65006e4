"""python tests/te/describe.py {describe,compute} FLAGS...: what the model of a training command is made of, or what it
computes, as JSON.

With --transformer-impl transformer_engine it pretends that there is a GPU, as far as building needs one: parameters
lie on the CPU, and Transformer Engine's kernels cannot run. So `describe` is about classes, names and shapes, and
`compute`, with PyTorch's product and norm in their place, about what is put together with what.
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


def kernels_of_pytorch() -> None:
    importlib.import_module("megatron_dllm")  # before megatron
    import torch._dynamo
    import transformer_engine.pytorch as te
    from megatron.core.transformer.moe import moe_utils
    from torch.nn.functional import linear, rms_norm

    from megatron_dllm import cpu

    torch._dynamo.config.disable = True  # Megatron's small fusions would be compiled for the pretended GPU
    def product(self, x, **kwargs):
        return linear(x, self.weight, self.bias if self.apply_bias else None)

    def normed_product(self, x, **kwargs):
        return product(self, rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))

    te.Linear.forward, te.LayerNormLinear.forward = product, normed_product
    te.RMSNorm.forward = lambda self, x: rms_norm(x, self.weight.shape, self.weight, self.eps)
    moe_utils.te_general_gemm = None  # of routers: Megatron's own then
    cpu._streams_and_events()
    cpu._tensor_devices()


def build(*flags: str, draw_weights: bool):
    """(arguments, model)"""
    importlib.import_module("megatron_dllm")  # before megatron
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.training import global_vars

    from megatron_dllm import fixes
    from megatron_dllm.arguments import read_command_line
    from megatron_dllm.training import model_provider

    fixes.install()
    CudaRNGStatesTracker.fork = lambda self, *args: contextlib.nullcontext()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    sys.argv = ["pretrain_dllm.py", *flags]
    with contextlib.redirect_stdout(sys.stderr):
        args, _ = read_command_line()
        args.init_from_hf = False
        global_vars.set_args(args)
        return args, model_provider(draw_weights=draw_weights)


def describe(*flags: str) -> dict:
    """classes: of modules by name; weights: by the key that checkpoints store them under, their global shape, and where
    the parts lie if there are several; trained: names; recipe: class of Transformer Engine's, in FP8."""
    args, model = build(*flags, draw_weights=False)
    state = model.sharded_state_dict(metadata=dict(singleton_local_shards=False))
    weights = {}
    for entry in tensors(state):
        if "_extra_state" not in entry.key:
            weights.setdefault(entry.key, [entry.global_shape]).append(entry.global_offset)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    recipe = None
    if args.fp8 is not None:
        from megatron.core import parallel_state
        from megatron.core.fp8_utils import get_fp8_recipe

        parallel_state.get_amax_reduction_group = lambda **kwargs: None
        recipe = type(get_fp8_recipe(model.config)).__name__
    weights = {key: sorted(parts) for key, parts in weights.items()}
    trained = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return dict(classes=classes, weights=weights, trained=trained, recipe=recipe)


def compute(*flags: str) -> dict:
    """logits of 16 tokens, and gradients of what is trained, by name, of their sum times fixed numbers. What is zero or
    one at first (norms, biases, adapters' B) becomes something."""
    args, model = build(*flags, draw_weights=True)
    from megatron_dllm.modes.base import ANCHOR, CLEAN, POSITION, STREAM

    generator = torch.Generator().manual_seed(7)
    draw = lambda shape: torch.randn(shape, generator=generator)
    for name, parameter in sorted(model.named_parameters(), key=lambda named: unfused(named[0])):
        if "norm" in name or name.endswith(("bias", "lora_B")):
            parameter.data.add_(0.1 * draw(parameter.shape))
    tokens = torch.randint(args.vocab_size, (1, 16), generator=generator)
    attributes = torch.zeros(1, 16, ANCHOR + 1, dtype=torch.int32)
    attributes[0, :, POSITION] = attributes[0, :, ANCHOR] = torch.arange(16)
    attributes[0, :, STREAM] = CLEAN
    logits = model.train()(tokens, torch.arange(16)[None], attributes)
    (logits * draw(logits.shape)).sum().backward()
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None)
    gradients = {unfused(name): parameter.grad.flatten().tolist() for name, parameter in trained}
    return dict(logits=logits.flatten().tolist(), gradients=gradients)


def unfused(name: str) -> str:
    """Name of a parameter where norms are modules of their own."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


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
        if sys.argv[1] == "compute":
            kernels_of_pytorch()
    print(json.dumps(dict(describe=describe, compute=compute)[sys.argv[1]](*sys.argv[2:])))
