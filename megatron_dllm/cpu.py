"""CPU backend: "the current CUDA device is the CPU".

Megatron-Core 0.19.2 assumes CUDA at run time. Each name replaced below is one that Megatron evaluates and
that has either an exact CPU meaning (device, random state, memory) or none at all (streams, events).
`torch.cuda.is_available()` stays False, so torch's own code keeps taking its CPU paths. Collectives run on
gloo, so every parallel layout can be debugged on a laptop.

Installed by `megatron_dllm/__init__.py` only where there is no GPU; nothing here is imported on one.
"""

import collections
import contextlib
import functools
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable

import torch

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Make torch.cuda and megatron.core usable without a GPU. Call before the first `import megatron`."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("megatron_dllm.cpu is for machines without a GPU.")
    if "megatron.core" in sys.modules:
        raise RuntimeError("Import megatron_dllm before megatron: its CPU backend must be installed first.")
    _installed = True
    _hide_gpu_packages()
    _device_identity()
    _tensor_devices()
    _random_state()
    _streams_and_events()
    _memory_statistics()
    _import_megatron_without_compiling()
    _split_sizes_of_experts()
    _gather_of_uneven_sizes()
    _gradient_of_swiglu()


def patch_training() -> None:
    """Let `megatron.training.pretrain` start without CUDA. Called once megatron.training is imported."""
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)


def _hide_gpu_packages() -> None:
    """Transformer Engine and Apex import on a machine without a GPU but their kernels then fail."""
    for package in ("transformer_engine", "apex"):
        sys.modules[package] = None
    # megatron.core warns a dozen times that it will do without them
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|transformer-engine)")


def _constant(value=None) -> Callable:
    """A fresh function for every name: torch._dynamo refuses one object registered under two names."""
    return lambda *args, **kwargs: value


# --- device identity -------------------------------------------------------------------------------------


class _Properties:
    name, major, minor = "cpu", 8, 0
    multi_processor_count = os.cpu_count()
    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_identity() -> None:
    cuda = torch.cuda
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by validate_args for TP and CP
    cuda.current_device = lambda: CPU  # passed on as `device=`
    # > 0, else Megatron initialises neither the parallel state nor the random state
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.set_device = _constant()
    cuda.get_device_capability = _constant((8, 0))
    cuda.get_device_properties = lambda *args, **kwargs: _Properties()
    cuda.get_device_name = _constant("cpu")
    cuda.device = lambda *args, **kwargs: contextlib.nullcontext()


# --- tensors created on, or moved to, "cuda" ------------------------------------------------------------------


def _on_cpu(device):
    """CPU for any way of naming a CUDA device; everything else (None, cpu, meta) unchanged."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def _names_cuda(value) -> bool:
    return isinstance(value, str | torch.device) and _on_cpu(value) is CPU


_FACTORIES = [
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "eye",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
]
_METHOD_FACTORIES = ["new_tensor", "new_zeros", "new_ones", "new_empty", "new_full"]


def _tensor_devices() -> None:
    def factory(original):
        @functools.wraps(original)
        def create(*args, **kwargs):
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            kwargs.pop("pin_memory", None)  # pinning needs CUDA
            return original(*args, **kwargs)

        return create

    from torch.utils._device import _device_constructors

    _device_constructors()  # remembers the originals, by which `with torch.device(...)` goes
    for name in _FACTORIES:
        setattr(torch, name, factory(getattr(torch, name)))
    for name in _METHOD_FACTORIES:
        setattr(torch.Tensor, name, factory(getattr(torch.Tensor, name)))

    original_to = torch.Tensor.to
    original_to_empty = torch.nn.Module.to_empty
    original_type = torch.Tensor.type

    @functools.wraps(original_to)
    def to(self, *args, **kwargs):
        if args and _names_cuda(args[0]):
            args = (CPU, *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original_to(self, *args, **kwargs)

    def to_empty(self, *, device, recurse=True):
        return original_to_empty(self, device=_on_cpu(device), recurse=recurse)

    @functools.wraps(original_type)
    def tensor_type(self, dtype=None, *args, **kwargs):
        # The optimizer compares `param.type()` with 'torch.cuda.FloatTensor' and its siblings.
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        return original_type(self, dtype, *args, **kwargs)

    torch.Tensor.to = to
    torch.Tensor.type = tensor_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = _constant()
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.to_empty = to_empty


# --- random state ---------------------------------------------------------------------------------------------


class _Generators:
    """`torch.cuda.default_generators[any device]` is the CPU's default generator."""

    def __getitem__(self, index):
        return torch.default_generator

    def __len__(self):
        return 1


def _random_state() -> None:
    cuda = torch.cuda
    # Not torch.manual_seed: it calls torch.cuda.manual_seed_all and would recurse.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = _constant()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.default_generators = _Generators()
    cuda._lazy_call = lambda function, **kwargs: function()  # Megatron defers seeding with it
    cuda._lazy_init = _constant()


# --- streams, events, synchronisation, profiling: nothing to do on a CPU ------------------------------------------


class _Stream:
    cuda_stream, device, priority = 0, CPU, 0

    def __init__(self, *args, **kwargs): ...

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False

    def wait_stream(self, *args): ...

    def wait_event(self, *args): ...

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self): ...

    def query(self):
        return True

    @staticmethod
    def priority_range():
        return (0, -1)


class _Event:
    def __init__(self, *args, **kwargs):
        self.time = 0.0

    def record(self, *args):
        self.time = time.perf_counter()

    def wait(self, *args): ...

    def synchronize(self): ...

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.time - self.time) * 1e3


def _streams_and_events() -> None:
    cuda = torch.cuda
    cuda.Stream, cuda.ExternalStream, cuda.Event = _Stream, _Stream, _Event
    stream = _Stream()
    cuda.current_stream, cuda.default_stream, cuda.set_stream = (
        _constant(stream),
        _constant(stream),
        _constant(),
    )
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.synchronize, cuda.empty_cache, cuda.ipc_collect = _constant(), _constant(), _constant()
    cuda.is_current_stream_capturing = _constant(False)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _constant())
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()


# --- memory: the process's resident set -------------------------------------------------------------------------


def _resident_bytes(*args, **kwargs) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes(*args, **kwargs) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_statistics() -> None:
    cuda = torch.cuda
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        setattr(cuda, name, lambda *args, **kwargs: _resident_bytes())
    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: _peak_resident_bytes())
    cuda.reset_peak_memory_stats, cuda.reset_max_memory_allocated = _constant(), _constant()
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(
        int,
        {
            "reserved_bytes.all.current": _resident_bytes(),
            "allocated_bytes.all.current": _resident_bytes(),
            "allocated_bytes.all.peak": _peak_resident_bytes(),
        },
    )
    total = _Properties.total_memory
    cuda.mem_get_info = lambda *args, **kwargs: (total - _resident_bytes(), total)
    for name in ("utilization", "temperature", "power_draw", "clock_rate"):
        setattr(cuda, name, _constant(0))


# --- megatron.core ------------------------------------------------------------------------------------------------


def _import_megatron_without_compiling() -> None:
    """Megatron decorates small functions with torch.compile at import: minutes of C++ compilation on a CPU."""
    compile_ = torch.compile
    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda function: function)
    try:
        import megatron.core.jit  # noqa: F401  (its jit_fuser captures torch.compile here)
    finally:
        torch.compile = compile_


def _split_sizes_of_experts() -> None:
    """The all-to-all dispatcher turns its split sizes into lists only if they live on a CUDA device."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _gather_of_uneven_sizes() -> None:
    """gloo's all-gather takes equal sizes only; ranks that share experts (TP with EP) hold uneven numbers of tokens."""
    import megatron.core.tensor_parallel.mappings as mappings

    gather = mappings._gather_along_first_dim

    def gather_any_sizes(input_, group, output_split_sizes: list[int] | None = None, use_global_buffer=False):
        # every rank is given the sizes of all, so all of them take the same branch
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        # gloo's all-to-all takes any sizes; so does its reduce-scatter, which is the gather's backward
        ranks = group.size()
        to_each_rank = torch.cat([input_] * ranks)
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        torch.distributed.all_to_all_single(output, to_each_rank, output_split_sizes, [len(input_)] * ranks, group)
        return output

    mappings._gather_along_first_dim = gather_any_sizes


def _gradient_of_swiglu() -> None:
    """Compiled it is one pass over the activations, uncompiled a dozen; torch has SiLU's gradient as one kernel."""
    import megatron.core.fusions.fused_bias_swiglu as fused

    uncompiled = fused.swiglu_back

    def swiglu_back(g, y):
        if g.dtype != y.dtype:  # weights of experts in fp32
            return uncompiled(g, y)
        gate, up = y.chunk(2, -1)
        gradient = torch.empty_like(y)
        of_gate, of_up = gradient.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=of_gate)
        torch.mul(g, torch.nn.functional.silu(gate), out=of_up)
        return gradient

    fused.swiglu_back = swiglu_back
