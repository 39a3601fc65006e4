"""The program as a user starts it: torchrun, a tiny preset, the byte tokenizer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.cases import write_chat
from tests.parallel.pool import ROOT

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]


def run(command, **environment):
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_short_command_just_runs(tmp_path):
    flags = (
        f"--dllm-mode mdlm --model-preset tiny --sft-data-path {write_chat(tmp_path)} --tokenizer-type "
        "ByteLevelTokenizer --seq-length 256 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 "
        "--log-interval 1 --tensor-model-parallel-size 2"
    )
    done = run([*TORCHRUN, "pretrain_dllm.py", *flags.split()])
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"iteration +(\d)/.*?\| loss: (\S+)", done.stdout)
    assert [i for i, _ in losses] == ["1", "2", "3"]
    assert all(0 < float(loss) < 20 for _, loss in losses)


def test_an_error_on_every_rank_is_printed_once(tmp_path):
    flags = "--dllm-mode mdlm --model-preset tiny --sft-data-path /no/such.jsonl --tokenizer-type ByteLevelTokenizer"
    more = "--seq-length 64 --micro-batch-size 2 --train-iters 1 --lr 1e-3"
    done = run([*TORCHRUN, "pretrain_dllm.py", *flags.split(), *more.split()])
    assert done.returncode != 0
    assert done.stderr.count("/no/such.jsonl") == 1 and "pretrain_dllm.py: error: " in done.stderr


def test_help_lists_our_groups_and_megatrons():
    done = run([sys.executable, "pretrain_dllm.py", "--help"])
    assert done.returncode == 0
    for flag in (
        "--dllm-mode",
        "--dllm-eps",
        "--dllm-loss-normalization",
        "--sft-data-path",
        "--tensor-model-parallel",
    ):
        assert flag in done.stdout
    assert "diffusion language model:" in done.stdout


@pytest.mark.parametrize("argv", ([], ["--dllm-mode", "mdlm", "--no-such-flag"]))
def test_argparse_errors_are_short(argv):
    done = run([sys.executable, "pretrain_dllm.py", *argv])
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.strip() and "CUDA" not in line]) <= 4
