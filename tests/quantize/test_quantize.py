"""tools/quantize.py as a user runs it, with ModelOpt, on a CPU.

Needs the extra [quantize]: bash tests/run.sh -m quantize.

Every run is a process of its own: a quantization that fails leaves ModelOpt's layers behind.
"""

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dllm.data.stream import Collate
from megatron_dllm.generation.load import load
from megatron_dllm.models.hf import read_config
from megatron_dllm.quantization.batches import corrupted_batches, data_arguments, open_samples
from megatron_dllm.quantization.quality import measure
from megatron_dllm.quantization.source import build, plan
from tests.one_process import once
from tests.parallel.cases import TINY, write_chat
from tests.parallel.naive import naive_logits, naive_loss
from tests.quantize.cases import (
    CALIBRATED,
    MEASURED,
    SEQ,
    arguments,
    folder,
    own_loss,
    own_rows,
    write_words,
)

ROOT = Path(__file__).parents[2]
HELD_OUT = range(CALIBRATED, CALIBRATED + MEASURED)
MDLM = "--dllm-mode mdlm --dllm-mask-token-id 2"

pytestmark = pytest.mark.quantize
pytest.importorskip("modelopt")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    where = tmp_path_factory.mktemp("made")
    return Namespace(where=where, text=write_words(where), path=folder("qwen3", where))


def quantized(made, name: str, *words: str) -> tuple[Namespace, str]:
    """(the folder's path, tensors, config.json; what is printed)"""
    save = made.where / name.replace(" ", "_")
    argv = f"--save {save} --calib-data {made.text} --seq-length {SEQ} --calib-samples {CALIBRATED} "
    argv += f"--eval-samples {MEASURED} --batch-size 3 " + " ".join(words)
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    command = [sys.executable, "tools/quantize.py", *argv.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not Path(f"{save}.part").exists() and not (save / "work").exists()
    tensors = load_file(save / "model.safetensors")
    return Namespace(path=str(save), tensors=tensors, config=read_config(str(save))), done.stdout


def printed(out: str, row: str = "loss") -> tuple[float, float]:
    """(before, after) of a row of the table."""
    found = re.search(rf"^{re.escape(row)} +(?:\d+ +)?([\d.]+) +([\d.]+)", out, re.MULTILINE)
    return float(found[1]), float(found[2])


def dequantized(tensors: dict, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """([out, in] values of a quantized matrix, the step between neighbours at each), from what lies in the folder."""
    weight, scale = tensors[f"{key}.weight"], tensors[f"{key}.weight_scale"].float()
    if weight.dtype == torch.float8_e4m3fn:
        # 3 bits of mantissa: 2^-3 of the power of two below; subnormal below 2^-6
        exponent = weight.float().abs().clamp(min=2.0**-6).log2().floor()
        return weight.float() * scale, 2.0 ** (exponent - 3) * scale
    if weight.dtype == torch.int8:
        return weight.float() * scale[:, None], scale[:, None].expand(weight.shape)
    pairs = torch.stack([weight & 15, weight >> 4], dim=1).flatten(0, 1).to(torch.int8)  # rows 2i and 2i + 1 in a byte
    values = torch.where(pairs > 7, pairs - 16, pairs).float()
    step = scale.repeat_interleave(values.shape[1] // scale.shape[1], dim=1)
    return values * step, step


def matrices(tensors: dict) -> list[str]:
    return [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]


def factor(tensors: dict, original: dict, key: str) -> torch.Tensor:
    """[in] by what AWQ has multiplied the inputs of a matrix before it was rounded: the norm before it, or a scale of
    its own, makes up for it."""
    layer, norms = key.rsplit(".", 2)[0], {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    if key.endswith(("o_proj", "down_proj")):
        own = tensors.get(f"{key}.pre_quant_scale")
        return torch.ones(()) if own is None else 1 / own.float()
    norm = f"{layer}.{norms[key.rsplit('.', 2)[1]]}.weight"
    return original[norm] / tensors[norm]


FORMATS = {
    "fp8": ("FP8", torch.float8_e4m3fn, 0.05),
    "int8": ("W8A8_SQ_PER_CHANNEL", torch.int8, 0.02),
    "int4_awq": ("W4A16_AWQ", torch.uint8, 0.1),
}


@pytest.mark.parametrize("qformat", FORMATS)
def test_formats(made, qformat):
    algorithm, dtype, worse = FORMATS[qformat]
    result, out = quantized(made, qformat, "--hf-model", made.path, MDLM, "--qformat", qformat)
    tensors, original = result.tensors, load_file(Path(made.path, "model.safetensors"))

    # what is in the folder
    said = result.config["quantization_config"]
    assert said["quant_algo"] == algorithm and said["quant_method"] == "modelopt" and "lm_head" in said["ignore"]
    assert result.config["mask_token_id"] == 2 and result.config["is_causal"] is False
    assert result.config["architectures"] == ["Qwen3ForCausalLM"]
    assert {"tokenizer.json", "generation_config.json", "hf_quant_config.json"} <= set(os.listdir(result.path))
    rounded = matrices(tensors)
    assert len(rounded) == 2 * 7 and all(tensors[f"{key}.weight"].dtype == dtype for key in rounded)
    assert all((f"{key}.input_scale" in tensors) == (qformat != "int4_awq") for key in rounded)
    kept = [key for key in original if key.removesuffix(".weight") not in rounded and "layernorm" not in key]
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(kept)
    assert all(torch.equal(tensors[key], original[key]) for key in kept)

    # every weight within half a step of what it was
    equal_weights = dict(tensors)
    for key in rounded:
        values, step = dequantized(tensors, key)
        scaled = original[f"{key}.weight"] * factor(tensors, original, key)
        assert ((values - scaled).abs() <= step * (0.5 + 1e-3)).all(), key
        assert len(values.unique()) > 8
        equal_weights[f"{key}.weight"] = values * tensors.get(f"{key}.pre_quant_scale", torch.ones(())).float()
    if qformat == "int4_awq":
        assert any("pre_quant_scale" in key for key in tensors)

    # the losses that are printed: our own of the same batches, and about that of the folder's weights
    args, samples = arguments(made.path, [made.text], "mdlm", mask_token_id=2)
    before, after = printed(out)
    assert before == pytest.approx(own_loss(made.path, own_rows(samples, args, HELD_OUT), args), rel=2e-5, abs=1e-5)
    assert before != after and after == pytest.approx(before, rel=worse)
    plain = build(plan(None, made.path, mode="mdlm", mask_token_id=2), made.path, None, torch.device("cpu"))
    plain.load_state_dict({key: equal_weights[key] for key in original})
    of_folder = measure(plain, corrupted_batches(samples, HELD_OUT, 3, args), args).loss
    # activations are not rounded here, and INT4's are not there
    assert after == pytest.approx(of_folder, rel=2e-5 if qformat == "int4_awq" else worse)
    assert len(re.findall(r"^t 0\.\d-[01]\.\d +\d+ +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)) == 5
    assert "14 of 16 weight matrices quantized, as they were: embed_tokens, lm_head" in out


def test_the_same_again_and_calibration_that_matters(made):
    """Scales of activations are the largest values of the calibration, whose samples follow from the seed."""
    source = ("--hf-model", made.path, MDLM, "--qformat fp8")
    first, out = quantized(made, "first", *source)
    again, out_again = quantized(made, "again", *source)
    other, _ = quantized(made, "other", *source, "--seed 7 --calib-samples 2 --eval-samples 0")
    assert set(first.tensors) == set(again.tensors) and printed(out) == printed(out_again)
    assert all(a.equal(again.tensors[key]) for key, a in first.tensors.items())
    scales = [key for key in first.tensors if key.endswith("input_scale")]
    assert any(not first.tensors[key].equal(other.tensors[key]) for key in scales)

    args, samples = arguments(made.path, [made.text], "mdlm", mask_token_id=2)
    model = build(plan(None, made.path, mode="mdlm", mask_token_id=2), made.path, None, torch.device("cpu"))
    largest = []
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, inputs, output: largest.append(output.abs().max()))
    measure(model, corrupted_batches(samples, range(CALIBRATED), 3, args), args)
    scale = first.tensors["model.layers.1.self_attn.q_proj.input_scale"]
    assert scale * 448 == pytest.approx(float(max(largest)), rel=1e-5)  # E4M3's largest value


def test_experts(made):
    path = folder("qwen3_moe", made.where, moe_intermediate_size=48)
    words = ["--hf-model", path, "--dllm-mode hybrid --dllm-block-size 4 --dllm-mask-token-id 2 --qformat int8"]
    result, out = quantized(made, "experts", *words)
    original = load_file(Path(path, "model.safetensors"))
    names = [key.removesuffix(".weight") for key in original if ".experts." in key]
    assert len(names) == 2 * 8 * 3 and set(names) < set(matrices(result.tensors))
    for name in names:
        values, step = dequantized(result.tensors, name)
        assert ((values - original[f"{name}.weight"]).abs() <= step * (0.5 + 1e-3)).all()
    assert result.tensors["model.layers.1.mlp.gate.weight"].equal(original["model.layers.1.mlp.gate.weight"])
    assert "is_causal" not in result.config
    args, samples = arguments(path, [made.text], "hybrid", block_size=4, mask_token_id=2)
    before, after = printed(out)
    assert before == pytest.approx(own_loss(path, own_rows(samples, args, HELD_OUT), args), rel=2e-5)
    assert after == pytest.approx(before, rel=0.03)
    weighted = printed(out, "dllm term")[0] + printed(out, "ar term")[0]
    assert weighted == pytest.approx(before, abs=2e-5)


def test_a_family_with_code_of_its_own(made):
    """LLaDA's folder becomes one of a Llama, here in bf16."""
    path = folder("llada", made.where)
    result, out = quantized(made, "as llama", "--hf-model", path, "--qformat fp8 --dtype bfloat16")
    assert result.config["architectures"] == ["LlamaForCausalLM"] and result.config["mask_token_id"] == 2
    assert result.config["is_causal"] is False and result.config["eos_token_id"] == 1
    assert result.tensors["model.norm.weight"].dtype == torch.bfloat16
    theirs = load_file(Path(path, "model.safetensors"))
    values, step = dequantized(result.tensors, "model.layers.1.mlp.down_proj")
    wanted = theirs["model.transformer.blocks.1.ff_out.weight"].bfloat16().float()
    in_bf16 = wanted.abs() * 2.0**-8  # ModelOpt divides by the scale in this precision
    assert ((values - wanted).abs() <= step / 2 + in_bf16).all()
    args, samples = arguments(path, [made.text], "mdlm")
    before, _ = printed(out)
    assert before == pytest.approx(own_loss(path, own_rows(samples, args, HELD_OUT), args), rel=0.02)


def test_a_run(made, pool):
    """A checkpoint of two pipeline stages, trained in blocks on chat data, is calibrated on such data."""
    chat, run = write_chat(made.where), made.where / "run"
    flags = "--dllm-mode bd3lm --dllm-block-size 8 --pipeline-model-parallel-size 2 --save-interval 3"
    pool.run([*TINY, "--sft-data-path", chat, "--save", run, *flags.split()], 2)
    words = f"--load {run} --calib-data {chat} --qformat int8 --calib-samples 20 --eval-samples 20 --seq-length 64"
    result, out = quantized(made, "of a run", words)
    assert result.config["mask_token_id"] == 258 and "is_causal" not in result.config
    with once(), torch.no_grad():
        loaded = load(str(run))
        args = data_arguments(loaded.args, [chat], None, seed=1234)
        assert args.dllm_sequence_length == 64
        rows = own_rows(open_samples(args, loaded.tokenizer, 40), args, range(20, 40))
        expected = naive_loss(naive_logits(loaded.model, Collate(args, 1, 0)(rows), args), rows, args)
    before, after = printed(out)
    assert before == pytest.approx(float(expected), rel=2e-5) and after == pytest.approx(before, rel=0.02)
