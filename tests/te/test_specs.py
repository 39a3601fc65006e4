"""With Transformer Engine every family has its layers, stores the same weights under the same names, and in FP8 rounds
the products of the block and nothing else. Builds models, computes nothing: no GPU is needed (bash tests/te/run.sh)."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dllm.precision import FP8_ROWS
from tests.hf_models import make

pytestmark = pytest.mark.te
ROOT = Path(__file__).parents[2]

RUN = (
    "--vocab-size 512 --tokenizer-type NullTokenizer --seq-length 256 --micro-batch-size 1 --lr 1e-3 --train-iters 1 "
    "--data-path none --use-cpu-initialization --bf16 --no-gradient-accumulation-fusion"
)
SMALL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 64 --dllm-mode mdlm --dllm-mask-token-id 3"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 128"
SAME_HEADS = SMALL.replace("--num-query-groups 2", "--num-query-groups 4")
FAMILIES = {
    "smollm2-135m": SMALL,
    "dream-7b": SMALL,
    "qwen3-0.6b": SMALL,
    "qwen3-30b-a3b": f"{SMALL} {EXPERTS} --moe-router-topk 2",
    "nemotron-labs-diffusion-3b": SMALL,
    "llada-8b": SAME_HEADS,
    "llada-moe-7b": f"{SAME_HEADS} {EXPERTS} --moe-router-topk 2",
    "llada2-mini": f"{SMALL} {EXPERTS} --moe-layer-freq [0]+[1]*1 --moe-shared-expert-intermediate-size 128 "
    "--moe-router-topk 2 --moe-router-num-groups 2 --moe-router-group-topk 1",
    "tiny-diffusion-gemma": "--dllm-mode block_diffusion --dllm-block-size 64 --hidden-size 128 --ffn-hidden-size 256 "
    "--moe-ffn-hidden-size 128 --kv-channels 128 --dllm-full-kv-channels 128",
}
RECIPES = dict(
    delayed="TEDelayedScaling",
    tensorwise="Float8CurrentScaling",
    mxfp8="MXFP8BlockScaling",
    blockwise="Float8BlockScaling",
)


@functools.cache
def described(flags: str, what: str = "describe") -> dict:
    done = subprocess.run(  # of a file: `-m tests...` would hide Transformer Engine first
        [sys.executable, "tests/te/describe.py", what, *flags.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compare(flags: str):
    local, fused = (
        described(f"{flags} --transformer-impl local"),
        described(f"{flags} --transformer-impl transformer_engine"),
    )
    assert fused["weights"] == local["weights"]
    linear = {name: kind for name, kind in fused["classes"].items() if "Linear" in kind}
    inside = {kind.removeprefix("Adapted") for name, kind in linear.items() if name.startswith("decoder.layers")}
    assert inside and all(kind.startswith("TE") for kind in inside)
    assert all(kind == "RuleAttention" for name, kind in fused["classes"].items() if name.endswith("core_attention"))
    assert not [kind for kind in fused["classes"].values() if kind == "TEDotProductAttention"]
    for name in ("embedding.word_embeddings", "output_layer"):
        assert not fused["classes"].get(name, "").startswith("TE")
    assert not [kind for name, kind in fused["classes"].items() if name.endswith("router") and kind.startswith("TE")]
    return fused["classes"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_under_the_same_names(family):
    classes = compare(f"--model-preset {family} {FAMILIES[family]} {RUN}")
    fused = "TELayerNormColumnParallelLinear" in classes.values()
    assert fused == (family != "tiny-diffusion-gemma")


def test_grouped_experts():
    classes = compare(f"--model-preset qwen3-30b-a3b {FAMILIES['qwen3-30b-a3b']} --moe-grouped-gemm {RUN}")
    assert "TEGroupedMLP" in classes.values()


@pytest.mark.parametrize("family", ["dream-7b", "llada2-mini", "tiny-diffusion-gemma"])
def test_adapters(family):
    """In its layers as in local ones; their norms are modules then."""
    flags = f"--model-preset {family} {FAMILIES[family]} {RUN} --lora-rank 4"
    classes = compare(flags)
    assert "AdaptedTEColumnParallelLinear" in classes.values() and "AdaptedTERowParallelLinear" in classes.values()
    assert "TELayerNormColumnParallelLinear" not in classes.values()
    fused, local = (described(f"{flags} --transformer-impl {i}")["trained"] for i in ("transformer_engine", "local"))
    assert fused == local and all(name.endswith(("lora_A", "lora_B")) for name in fused)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, "") for family in FAMILIES if family not in ("smollm2-135m", "llada-8b")),  # dream without biases
        ("qwen3-0.6b", "--lora-rank 4"),
        ("llada2-mini", "--lora-rank 4"),
        ("llada2-mini", "--lora-rank 4 --lora-targets v_proj,up_proj"),
    ],
)
def test_layers_are_put_together_as_local_ones(family, lora):
    """Logits and gradients, with PyTorch's product and norm in place of its own, which want a GPU."""
    flags = f"--model-preset {family} {FAMILIES[family]} {RUN.replace('--bf16', '')} {lora}"
    local, fused = (
        described(f"{flags} --transformer-impl {impl}", "compute") for impl in ("local", "transformer_engine")
    )
    close(fused["logits"], local["logits"])
    assert fused["gradients"].keys() == local["gradients"].keys()
    assert sum(any(gradient) for gradient in local["gradients"].values()) > 4  # an expert may be given no token
    for name, gradient in local["gradients"].items():
        close(fused["gradients"][name], gradient)


def close(a: list[float], b: list[float]) -> None:
    a, b = torch.tensor(a), torch.tensor(b)
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_a_draft_whose_context_is_not_normed(tmp_path):
    target, _ = make("llama", tmp_path / "target")
    flags = f"--dllm-mode dflash --dflash-target {target} --num-layers 2 --dllm-block-size 16 {RUN}"
    classes = compare(
        flags.replace("--vocab-size 512 --tokenizer-type NullTokenizer --seq-length 256", "--seq-length 64")
    )
    layer = "decoder.layers.0."
    assert classes[f"{layer}self_attention.linear_qkv"] == "TEColumnParallelLinear"
    assert classes[f"{layer}input_layernorm"] == "RMSNorm"
    assert classes[f"{layer}mlp.linear_fc1"] == "TELayerNormColumnParallelLinear"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["smollm2-135m", "qwen3-30b-a3b", "tiny-diffusion-gemma"])
def test_recipes_change_no_name(family, recipe):
    flags = f"--model-preset {family} {FAMILIES[family]} {RUN} --transformer-impl transformer_engine"
    in_fp8 = described(f"{flags} --fp8-format hybrid --fp8-recipe {recipe}")
    assert in_fp8["recipe"] == RECIPES[recipe]
    assert in_fp8["weights"] == described(flags)["weights"]


def test_rows_that_its_quantizers_take():
    """FP8_ROWS is what Transformer Engine itself asks for."""
    code = """
import torch
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.constants import TE_DType
import transformer_engine.pytorch.quantization as quantization
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
e4m3 = TE_DType[torch.float8_e4m3fn]
block = Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True)
mx = MXFP8Quantizer(e4m3)
takes = lambda quantizer: [rows for rows in range(8, 257, 8) if quantizer.is_quantizable(torch.empty(rows, 256))]
align = quantization.get_align_size_for_quantization
recipes = DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling()
print(takes(block), takes(mx), *map(align, recipes), sep=";")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    block, mx, delayed, current, mxfp8 = map(json.loads, done.stdout.splitlines()[-1].split(";"))
    assert block == list(range(FP8_ROWS["blockwise"], 257, FP8_ROWS["blockwise"]))
    assert mx == list(range(FP8_ROWS["mxfp8"], 257, FP8_ROWS["mxfp8"]))
    assert (delayed, current, mxfp8) == tuple(FP8_ROWS[name] for name in ("delayed", "tensorwise", "mxfp8"))
