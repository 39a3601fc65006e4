"""On one GPU: python -m pytest tests/gpu. Skipped where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hf_models import make
from tests.parallel.cases import TINY, write_chat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ROOT = Path(__file__).parents[2]
MODES = {
    "mdlm": "--dllm-mode mdlm",
    "bd3lm": "--dllm-mode bd3lm --dllm-block-size 16",
    "hybrid": "--dllm-mode hybrid --dllm-block-size 16",
    "idlm": "--dllm-mode idlm --dllm-block-size 16",
    "scdd": "--dllm-mode scdd",
    "block_diffusion": "--dllm-mode block_diffusion --dllm-block-size 16",
    "diffusion_gemma": "--dllm-mode block_diffusion --dllm-block-size 16 --model-preset tiny-diffusion-gemma",
}
RECIPES = dict(delayed=(8, 9), tensorwise=(8, 9), blockwise=(9, 0), mxfp8=(10, 0))


def losses(*flags: str) -> list[float]:
    """Of a training run of a few steps; it must end well."""
    port = str(20000 + os.getpid() % 10000)
    environment = os.environ | dict(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    done = subprocess.run(
        [sys.executable, "pretrain_dllm.py", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(number) for number in re.findall(r"\bloss: ([0-9.]+E[+-][0-9]+)", done.stdout)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ["--sft-data-path", write_chat(tmp_path_factory.mktemp("data"))]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    target, _ = make("llama", tmp_path_factory.mktemp("target"))
    return ["--dllm-mode", "dflash", "--dflash-target", target, *"--num-layers 2 --dllm-block-size 8".split()]


@pytest.mark.parametrize("mode", MODES)
def test_flex_equals_dense_attention(chat, mode):
    command = [*TINY, *chat, *MODES[mode].split(), "--dllm-attention-backend"]
    flex, dense = losses(*command, "flex"), losses(*command, "sdpa")
    assert len(flex) >= 3 and flex == pytest.approx(dense, rel=1e-3)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_step_in_bf16_is_near_one_in_fp32(chat, impl):
    if impl == "transformer_engine":
        pytest.importorskip("transformer_engine.pytorch")
    command = [*TINY, *chat, "--dllm-mode", "bd3lm", "--dllm-block-size", "16"]
    assert losses(*command, "--bf16", "--transformer-impl", impl) == pytest.approx(losses(*command), rel=2e-2)


def test_adapters_beside_transformer_engines_products(chat):
    pytest.importorskip("transformer_engine.pytorch")
    command = [*TINY, *chat, "--bf16", "--lora-rank", "4", "--lr", "3e-2", "--transformer-impl"]
    assert losses(*command, "transformer_engine") == pytest.approx(losses(*command, "local"), rel=2e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_in_fp8_is_near_its_emulation(chat, recipe):
    pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability() < RECIPES[recipe]:
        pytest.skip(f"this GPU has no {recipe}")
    command = [*TINY, *chat, "--bf16", "--seq-length", "128"]
    command += "--hidden-size 256 --ffn-hidden-size 512 --kv-channels 32".split()  # multiples of 128
    real = losses(*command, *f"--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe {recipe}".split())
    emulated = losses(*command, "--dllm-emulate-fp8", "tensorwise" if recipe == "delayed" else recipe)
    assert real == pytest.approx(emulated, rel=3e-2)


def test_a_draft(tmp_path_factory, draft):
    from tests.parallel.hf import TRAIN, write_words

    command = [*TRAIN, *draft, "--sft-data-path", write_words(tmp_path_factory.mktemp("words"))]
    flex, dense = (losses(*command, "--dllm-attention-backend", kind) for kind in ("flex", "sdpa"))
    assert len(flex) >= 2 and flex == pytest.approx(dense, rel=1e-3)
