"""The CPU backend is complete, installed first, absent where there is a GPU; and repairs of Megatron do repair."""

import datetime
import inspect
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import mappings

from megatron_dllm import cpu, fixes
from tests.one_process import one_process, packed, randomize, small_config, small_model

ROOT = Path(__file__).parents[2]


def python(code: str, *paths: Path) -> subprocess.CompletedProcess:
    """A fresh interpreter that finds `paths` before everything else."""
    path = ":".join(map(str, [*paths, ROOT]))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_gpu_packages_that_cannot_be_imported_are_never_imported(tmp_path):
    """Transformer Engine installed on a machine without a GPU: it may fail on import, or later in a kernel."""
    for package in ("transformer_engine", "apex"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise SystemError('{package} was imported')\n")
    out = python(
        """
        import megatron_dllm, torch
        from megatron_dllm.models.dlm import block_spec
        from megatron_dllm.models.norms import RMSNorm
        from megatron_dllm.modes import mdlm
        from tests.one_process import small_config
        import megatron.core.parallel_state as parallel_state
        parallel_state.get_pipeline_model_parallel_rank = lambda: 0
        parallel_state.get_pipeline_model_parallel_world_size = lambda: 1
        spec = block_spec(small_config(), mdlm.visible, "auto", None)
        assert len(spec.layer_specs) == 2 and spec.layer_norm is RMSNorm
        assert not torch.cuda.is_available()
        from megatron.core.optimizer import distrib_optimizer
        assert not distrib_optimizer.HAVE_APEX_OR_TE
        print("done")
        """,
        tmp_path,
    )
    assert out.stdout.strip().endswith("done"), out.stderr[-2000:]
    assert "was imported" not in out.stderr


def test_megatron_before_megatron_dllm_is_refused():
    """An empty module stands for megatron.core: what counts is that it is there, and the real one takes seconds."""
    out = python(
        """
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        import megatron_dllm
        """
    )
    assert out.returncode != 0
    assert out.stderr.strip().endswith(
        "RuntimeError: Import megatron_dllm before megatron: its CPU backend must be installed first."
    )


def test_with_a_gpu_nothing_of_the_backend_is_imported():
    out = python(
        """
        import sys, torch
        original = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} | {"zeros": torch.zeros}
        torch.cuda.is_available = original["is_available"] = lambda: True
        import megatron_dllm
        assert "megatron_dllm.cpu" not in sys.modules and not any(m.startswith("megatron.") for m in sys.modules)
        assert all(getattr(torch.cuda, name, torch.zeros) is value for name, value in original.items())
        from megatron_dllm import cpu
        try:
            cpu.install()
        except RuntimeError as error:
            print(error)
        """
    )
    assert out.stdout == "megatron_dllm.cpu is for machines without a GPU.\n", out.stderr[-2000:]


# --- what is replaced has its CPU meaning -----------------------------------------------------------------------------


def test_torch_still_knows_that_there_is_no_gpu():
    assert not torch.cuda.is_available()
    cpu.install()  # a second call does nothing
    assert torch.cuda.current_device() == torch.device("cpu") and torch.cuda.device_count() > 0


@pytest.mark.parametrize("name", ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)])
def test_tensors_for_a_gpu_land_on_the_cpu(name):
    x = torch.arange(4.0)
    made = [
        torch.zeros(3, device=name),
        torch.empty_like(x, device=name),
        torch.tensor([1], device=name),
        x.new_ones(2, device=name),
        x.to(device=name),
        x.cuda(),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.empty(2, pin_memory=True, device="cpu"),
    ]
    if not isinstance(name, int):
        made.append(x.to(name))
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert x.to(torch.int64).dtype == torch.int64 and x.to(x.new_zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_the_gpu_random_state_is_the_cpu_one():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    a = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), a)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), a)
    assert torch.cuda.default_generators[0] is torch.default_generator


def test_the_optimizer_recognises_parameters_by_type():
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_streams_events_and_memory():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
    end.record()
    assert 0 <= start.elapsed_time(end) < 1e4 and end.query()
    # the kernel counts the current size at once and the peak in batches
    assert 0 < torch.cuda.memory_allocated() < 1.1 * torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total


def on_ranks(function, ranks: int) -> list:
    """function(group, rank) on threads that are the ranks of one gloo group; its results in their order."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=20)

    def run(rank):
        return function(dist.ProcessGroupGloo(store, rank, ranks, timeout), rank)

    with one_process(), ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width", ((), (3,)))
@pytest.mark.parametrize("sizes", ([5, 2], [0, 4], [3, 3], [2, 0, 7]), ids=str)
def test_rows_of_uneven_sizes_are_gathered_and_scattered(sizes, width, dtype):
    """Both directions of both collectives of the experts' dispatcher; small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(0)
    numbers = lambda rows: torch.randint(-8, 9, (rows, *width), generator=generator).to(dtype)
    parts = [numbers(size) for size in sizes]  # of each rank: its own rows
    wholes = [numbers(sum(sizes)) for _ in sizes]  # of each rank: something for everyone's rows

    def gather(group, rank):
        own = parts[rank].clone().requires_grad_()
        out = mappings.gather_from_sequence_parallel_region(own, group=group, output_split_sizes=sizes)
        out.backward(wholes[rank])
        return out.detach(), own.grad

    def scatter(group, rank):
        everyones = wholes[rank].clone().requires_grad_()
        out = mappings.reduce_scatter_to_sequence_parallel_region(everyones, group=group, input_split_sizes=sizes)
        out.backward(parts[rank])
        return out.detach(), everyones.grad

    joined, summed = torch.cat(parts), sum(wholes).split(sizes)
    for rank, (out, gradient) in enumerate(on_ranks(gather, len(sizes))):
        assert torch.equal(out, joined) and torch.equal(gradient, summed[rank])
    for rank, (out, gradient) in enumerate(on_ranks(scatter, len(sizes))):
        assert torch.equal(out, summed[rank]) and torch.equal(gradient, joined)


def test_gloo_still_gathers_equal_sizes_only():
    """The day it does not, `cpu.py` can shrink."""

    def gather(group, rank):
        group.allgather([[torch.empty(1), torch.empty(2)]], [torch.ones(1 + rank)]).wait()

    with pytest.raises(RuntimeError, match="invalid tensor size"):
        on_ranks(gather, 2)


# --- repairs ---------------------------------------------------------------------------------------------------------

PATCHED = ("state_dict", "_set_main_param_and_optimizer_states", "load_state_dict")


@pytest.fixture
def optimizer(monkeypatch):
    """A distributed optimizer over a small model, and the repairs for the duration of the test."""
    for name in PATCHED:  # restored afterwards
        monkeypatch.setattr(DistributedOptimizer, name, getattr(DistributedOptimizer, name))
    with one_process():
        yield make_optimizer


def make_optimizer():
    model = small_model(small_config(num_layers=1))
    randomize(model)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model, disable_bucketing=True
    )
    config = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0)
    chained = get_megatron_optimizer(config, [ddp])
    (inner,) = chained.chained_optimizers if hasattr(chained, "chained_optimizers") else (chained,)
    return SimpleNamespace(ddp=ddp, optimizer=inner)


def train(run, steps: int) -> None:
    documents_BQ, positions_BQ = packed([[8]], 8)
    for _ in range(steps):
        run.ddp.zero_grad_buffer()
        run.optimizer.zero_grad()
        run.ddp(torch.arange(8)[None], positions_BQ, None)[..., :61].square().mean().backward()
        run.ddp.finish_grad_sync()
        run.optimizer.step()


def steps_of(run) -> list[torch.Tensor]:
    return [state["step"] for state in run.optimizer.optimizer.state.values()]


def install_repair():
    fixes._torch_adam_in_distributed_optimizer()


def test_a_fresh_optimizer_can_describe_itself(optimizer):
    """(a): loading asks a fresh optimizer for its state dict, which asserts that a step exists."""
    install_repair()
    run = optimizer()
    state = run.optimizer.state_dict()
    assert all(group["step"] == 0 for group in state["optimizer"]["param_groups"])
    assert len(steps_of(run)) == len(list(run.ddp.parameters()))


def test_sharded_states_need_no_step(optimizer):
    """(b): the checkpoint's sharded states hold the parameter and both moments, the step is common to all."""
    install_repair()
    run = optimizer()
    train(run, 1)
    for parameter in run.ddp.parameters():
        tensors = run.optimizer._get_main_param_and_optimizer_states(parameter)
        changed = {key: value.detach() + 1 for key, value in tensors.items() if key != "step"}
        assert set(changed) == {"param", "exp_avg", "exp_avg_sq"}
        with torch.no_grad():
            run.optimizer._set_main_param_and_optimizer_states(parameter, changed)
        after = run.optimizer._get_main_param_and_optimizer_states(parameter)
        assert all(torch.equal(after[key], value) for key, value in changed.items())
        assert after["step"] == 1


def test_every_parameter_counts_its_own_steps_after_loading(optimizer):
    """(c): one shared tensor would be advanced once per parameter in every step."""
    install_repair()
    first = optimizer()
    train(first, 3)
    saved = first.optimizer.state_dict()
    second = optimizer()
    second.optimizer.load_state_dict(saved)
    steps = steps_of(second)
    assert len({step.data_ptr() for step in steps}) == len(steps) > 3
    assert {step.item() for step in steps} == {3.0}
    train(second, 1)
    assert {step.item() for step in steps_of(second)} == {4.0}


def test_the_repair_is_still_needed(optimizer, monkeypatch):
    """Without it the defect shows; the day it does not, `fixes.py` can shrink."""
    for name in ("state_dict", "_set_main_param_and_optimizer_states", "load_state_dict"):  # other tests may install it
        monkeypatch.setattr(DistributedOptimizer, name, inspect.unwrap(getattr(DistributedOptimizer, name)))
    with pytest.raises(AssertionError):
        optimizer().optimizer.state_dict()
    first, second = optimizer(), None
    train(first, 3)
    saved = first.optimizer.state_dict()
    second = optimizer()
    train(second, 1)
    second.optimizer.load_state_dict(saved)
    assert len({step.data_ptr() for step in steps_of(second)}) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_swiglu_is_that_of_autograd(dtype):
    y = torch.randn(7, 24, dtype=dtype, requires_grad=True)
    g = torch.randn(7, 12, dtype=dtype)
    gate, up = y.chunk(2, -1)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, y, g)
    (mine,) = torch.autograd.grad(fused_bias_swiglu.bias_swiglu_impl(y, None), y, g)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def test_swiglu_weighted_in_fp32_under_bf16():
    y = torch.randn(7, 24, dtype=torch.bfloat16, requires_grad=True)
    weights_N1 = torch.rand(7, 1, requires_grad=True)
    gate, up = y.chunk(2, -1)
    exact = (torch.nn.functional.silu(gate.double()) * up.double() * weights_N1.double()).sum()
    out = fused_bias_swiglu.weighted_bias_swiglu_impl(y, None, weights_N1)
    assert out.dtype == torch.bfloat16
    for mine, expected in zip(
        torch.autograd.grad(out.sum(), (y, weights_N1)), torch.autograd.grad(exact, (y, weights_N1)), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)
