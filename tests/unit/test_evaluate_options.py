"""tools/evaluate.py before lm-eval is there, and copies of a model; tests/evaluation has the rest."""

import importlib.util
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_dllm.evaluation import replicas

TOOL = Path(__file__).parents[2] / "tools/evaluate.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("evaluate_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("pip install -e '.[eval]'", []),
        ("--num-draws is 0: give at least 1", ["--num_draws=0"]),
        ("--num-fewshot is -1: give at least 0", ["--num-fewshot", "-1"]),
        ("is no folder", ["--include-path", "/nowhere"]),
        ("can be written to", ["--output_path", "/"]),
        ("--log-samples writes into --output-path", ["--log_samples"]),
    ],
)
def test_what_it_refuses_first(tool, words, argv, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--load", "/nowhere", "--tasks", "any", *argv])
    with pytest.raises(SystemExit) as exit:
        tool.main()
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == ""
    sentence = captured.err.removesuffix("\n")
    assert sentence.startswith("evaluate.py: error: ") and sentence.endswith(".") and "\n" not in sentence
    assert words in sentence


def test_a_job_holds_as_many_copies_as_fit(monkeypatch):
    """Each of them is planned as if it were alone."""
    seen = []

    def plan(path, *, tensor_model_parallel_size, **options):
        seen.append((path, os.environ["WORLD_SIZE"], tensor_model_parallel_size, options))
        return Namespace(args=Namespace(micro_batch_size=1, world_size=2, data_parallel_size=1))

    monkeypatch.setattr(replicas.load, "plan", plan)
    monkeypatch.setenv("WORLD_SIZE", "6")
    args = replicas.plan("run", tensor_model_parallel_size=2, step=7).args
    assert seen == [("run", "2", 2, dict(step=7))] and os.environ["WORLD_SIZE"] == "6"
    assert (args.world_size, args.data_parallel_size, args.global_batch_size) == (6, 3, 3)
    with pytest.raises(ValueError, match="4 does not divide the 6 process"):
        replicas.plan("run", tensor_model_parallel_size=4)
    monkeypatch.delenv("WORLD_SIZE")
    assert replicas.plan("run").args.world_size == 1 and "WORLD_SIZE" not in os.environ
