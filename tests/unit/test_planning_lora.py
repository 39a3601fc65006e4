"""What a plan counts of adapters (docs/lora.md), by formulas written out here. tests/parallel/test_planning.py has the
comparison with runs."""

import json
import re
import shlex
import sys

import pytest

from megatron_dllm.arguments import read_command_line
from megatron_dllm.planning.command import plan_command
from tests.hf_models import make

LLADA = "--dllm-mode mdlm --model-preset llada-8b --seq-length 4096 --global-batch-size 64"
ONE = f"{LLADA} --gpus 1 --micro-batch-size 1 --lora-rank 16"
D, F, LAYERS, VOCABULARY = 4096, 12288, 32, 126464  # of llada-8b, whose every head has a key of its own
TWO = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 1"


@pytest.fixture
def plan(monkeypatch):
    """plan(flags): what the tool prints."""

    def run(flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan.py"])
        return plan_command(shlex.split(flags))

    return run


@pytest.fixture
def entry(plan):
    """entry(flags): the best layout, in numbers."""
    return lambda flags: json.loads(plan(f"{flags} --json --best 1"))[0]


def adapter(parts: int, inputs: int, outputs: int, r: int = 16) -> dict[str, int]:
    """Numbers of a layer's A and B."""
    return dict(A=parts * r * inputs, B=outputs * r)


def test_every_parameter_of_every_adapter(entry):
    found, plain = entry(ONE), entry(f"{ONE} --lora-targets q_proj,v_proj")
    qkv, proj, fc1, fc2 = adapter(3, D, 3 * D), adapter(1, D, D), adapter(2, D, 2 * F), adapter(1, F, D)
    trained = LAYERS * sum(sum(each.values()) for each in (qkv, proj, fc1, fc2))
    base = 2 * VOCABULARY * D + D + LAYERS * (4 * D * D + 3 * D * F + 2 * D)
    assert found["trained_parameters"] == trained == 41943040
    assert found["parameters"] == base + trained
    memory = found["memory_bytes"][0]
    assert memory["weights"] == 2 * (base + trained) and memory["gradients"] == 4 * trained
    assert memory["optimizer"] == 12 * trained
    # rows of k stay zero, but are there
    assert plain["trained_parameters"] == LAYERS * (2 * 16 * D + 3 * D * 16)


def test_what_ranks_hold(entry):
    """Tensor parallelism cuts one of A and B; the distributed optimizer cuts its state for both."""
    found = entry(f"{LLADA} --lora-rank 16 --gpus 8 {TWO}")
    column = [adapter(3, D, 3 * D), adapter(2, D, 2 * F)]
    row = [adapter(1, D, D), adapter(1, F, D)]
    on_rank = LAYERS * (sum(a["A"] + a["B"] / 2 for a in column) + sum(a["A"] / 2 + a["B"] for a in row))
    memory = found["memory_bytes"][0]
    assert memory["gradients"] == 4 * on_rank and memory["optimizer"] == 12 * on_rank / 4


def test_experts_are_shared_out(entry):
    """Of LLaDA-MoE, 64 experts of 1024 in 16 layers 2048 wide: expert parallelism divides all that they have,
    expert-tensor parallelism what is cut."""
    flags = "--dllm-mode mdlm --model-preset llada-moe-7b --seq-length 4096 --gpus 8 --global-batch-size 64 "
    flags += f"--lora-rank 8 --lora-targets down_proj {TWO} --sequence-parallel --expert-model-parallel-size 2"
    A, B = 8 * 1024, 8 * 2048
    for shards in (1, 2):
        found = entry(f"{flags} --expert-tensor-parallel-size {shards}")
        assert found["trained_parameters"] == 16 * 64 * (A + B)
        on_rank = 16 * 64 / 2 * (A / shards + B)
        memory = found["memory_bytes"][0]
        assert memory["gradients"] == 4 * on_rank and memory["optimizer"] == 12 * on_rank / (8 / (2 * shards))


def test_frozen_weights_are_multiplied_twice(entry):
    """4 for each frozen weight and 6 for each of an adapter, and 12·layers·width·pairs a token of attention."""
    found = entry(ONE)
    table = VOCABULARY * D
    frozen = LAYERS * (4 * D * D + 3 * D * F)
    expected = 4 * frozen + 6 * found["trained_parameters"] + 4 * table * 2046 / 4096 + 12 * LAYERS * D * 4096
    assert sum(found["flops_per_data_token"].values()) == pytest.approx(expected, rel=1e-4)
    assert found["flops_per_data_token"]["adapters"] == 6 * found["trained_parameters"]


def test_a_step_takes_less(entry):
    """Products two thirds of the time, and of gradients nearly nothing is sent; sums with adapters' outputs cost more
    than their products."""
    flags = f"{LLADA} --gpus 16 {TWO}"
    full, found = (entry(f"{flags} {more}")["step_parts_seconds"] for more in ("", "--lora-rank 16"))
    assert found["products"] == pytest.approx(full["products"] * 2 / 3)
    assert found["data parallel"] < full["data parallel"] / 50 and found["optimizer"] < full["optimizer"] / 50
    assert 0.05 < found["adapters"] / found["products"] < 0.5 and "adapters" not in full
    assert found["attention"] == full["attention"] and found["memory"] == full["memory"]


def test_the_command_has_the_flags_and_passes_the_checks(plan, monkeypatch, tmp_path):
    text = plan(f"{LLADA} --gpus 8 --lora-rank 16 --lora-alpha 32 --lora-targets q_proj,v_proj down_proj")
    assert re.match(r"8\.0\d\d G parameters, [\d.]+ M of them trained, in adapters\n", text)
    tokenizer, _ = make("qwen3", tmp_path)
    line = text[text.index("pretrain_dllm.py") :].replace("\\\n", " ")
    words = shlex.split(line.replace('"$DATA"', "x").replace('"$TOKENIZER"', tokenizer))
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("WORLD_SIZE", "8")
    args, _ = read_command_line()
    assert (args.lora_rank, args.lora_alpha, args.lora_targets) == (16, 32.0, ["q_proj", "v_proj", "down_proj"])


def test_checks_say_nothing_by_the_way(plan, capsys):
    """That weights are drawn at random is no matter of a plan, and would be said of every layout."""
    plan(f"{ONE} --json")
    assert capsys.readouterr() == ("", "")


def test_layouts_that_adapters_cannot_have_are_not_shown(plan):
    """Dropout on experts that are cut over ranks."""
    flags = "--dllm-mode mdlm --model-preset llada-moe-7b --seq-length 4096 --gpus 8 --micro-batch-size 1 --best 50 "
    flags += "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --global-batch-size 64 --lora-rank 8 "
    cut = lambda more: [
        "--expert-tensor-parallel-size" not in one["flags"] for one in json.loads(plan(f"{flags} --json {more}"))
    ]
    assert any(cut("")) and not all(cut(""))
    without = cut("--lora-dropout 0.1")
    assert without and not any(without)


REFUSED = {
    f"{LLADA} --gpus 8 --lora-rank 16 --use-transformer-engine-op-fuser": "leaves no layers to adapt",
    f"{LLADA} --gpus 8 --lora-rank 16 --lora-targets head": "--lora-targets head is no layer of this model",
    f"{LLADA} --gpus 8 --lora-alpha 16": "--lora-alpha has no effect without --lora-rank",
    f"{LLADA} --gpus 8 --lora-rank 5000": "--lora-rank 5000 is more than --hidden-size 4096",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_run_refuses_is_refused(plan, flags):
    with pytest.raises(ValueError, match=REFUSED[flags]) as error:
        plan(flags)
    assert "\n" not in str(error.value)
