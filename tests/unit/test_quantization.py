"""Quantization as far as it goes without ModelOpt: what is measured, on what, and what is refused."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_dllm import quantization
from megatron_dllm.quantization import check_shape
from megatron_dllm.quantization.batches import corrupted_batches
from megatron_dllm.quantization.quality import LEVELS, measure
from megatron_dllm.quantization.source import build, plan
from tests.gemma import make_folder
from tests.hf_models import make
from tests.quantize.cases import CALIBRATED, MEASURED, SEQ, arguments, own_logits, own_loss, own_rows, write_words

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("quantize_tool", ROOT / "tools/quantize.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

MODES = {
    "mdlm": dict(),
    "bd3lm": dict(block_size=5),
    "hybrid": dict(block_size=5),
    "idlm": dict(block_size=5),
    "scdd": dict(),
    "block_diffusion": dict(block_size=8),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    where = tmp_path_factory.mktemp("made")
    return Namespace(path=make("qwen3", where)[0], text=write_words(where), where=where)


def model_of(path: str, mode: str) -> torch.nn.Module:
    return build(plan(None, path, mode=mode), path, None, torch.device("cpu"))


@pytest.mark.parametrize("mode", MODES)
def test_the_measured_loss_is_that_of_training(made, mode):
    """transformers' model under a mask, row by row, against Megatron's under the rule and a loss token by token."""
    mask = {} if mode == "block_diffusion" else dict(mask_token_id=2)
    args, samples = arguments(made.path, [made.text], mode, **MODES[mode], **mask)
    indices = range(CALIBRATED, CALIBRATED + MEASURED)
    quality = measure(model_of(made.path, mode), corrupted_batches(samples, indices, 3, args), args)
    rows = own_rows(samples, args, indices)
    assert quality.loss == pytest.approx(own_loss(made.path, rows, args), rel=2e-5)
    assert bool(quality.by_level()) == (mode != "idlm")  # which has one level


def test_the_loss_by_noise_level(made):
    args, samples = arguments(made.path, [made.text], "mdlm", mask_token_id=2)
    indices = range(MEASURED)
    quality = measure(model_of(made.path, "mdlm"), corrupted_batches(samples, indices, 4, args), args)
    rows = own_rows(samples, args, indices)
    found = {}
    for logits_SV, row in zip(own_logits(made.path, rows, args), rows, strict=True):
        nll_S = F.cross_entropy(logits_SV[: len(row.sample)], row.sample.tokens_S, reduction="none")
        found.setdefault(int(row.level_S[0] * LEVELS), []).extend(nll_S[row.noised_S].tolist())
    assert len(found) == LEVELS and len({int(row.level_S[0] * MEASURED) for row in rows}) >= MEASURED - 2  # stratified
    for level, (name, tokens, loss) in enumerate(quality.by_level()):
        assert name == f"{level / 5:.1f}-{(level + 1) / 5:.1f}" and tokens == len(found[level])
        assert loss == pytest.approx(sum(found[level]) / tokens, rel=2e-5)


def test_batches_of_one_length(made):
    """Chat data of many lengths: no padding, every sample once, the same again."""
    path = made.where / "chat.jsonl"
    turn = lambda words: [dict(role="user", content="w4 w5"), dict(role="assistant", content=" ".join(words))]
    texts = [[f"w{6 + i + j}" for j in range(1 + i % 3)] for i in range(CALIBRATED + MEASURED)]
    path.write_text("\n".join(json.dumps(dict(messages=turn(words))) for words in texts))
    template = made.where / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} <eos> {% endfor %}")
    args, samples = arguments(made.path, [str(path)], "mdlm", mask_token_id=2, chat_template=str(template))
    batches = corrupted_batches(samples, range(4, 15), 2, args)
    assert sorted(index for batch in batches for index in batch.index) == list(range(4, 15))
    assert len({batch.tokens_BQ.shape for batch in batches}) > 2
    for batch in batches:
        assert batch.tokens_BQ.shape[0] <= 2 and batch.tokens["data"] == batch.tokens_BQ.numel()
    again = corrupted_batches(samples, range(4, 15), 2, args)
    assert all(torch.equal(a.tokens_BQ, b.tokens_BQ) for a, b in zip(batches, again, strict=True))


def test_shapes_that_do_not_fit():
    shape = dict(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, kv_channels=32)
    shape |= dict(num_experts=None, moe_layer_freq=1, moe_ffn_hidden_size=None)
    shape |= dict(moe_shared_expert_intermediate_size=None)
    check_shape("int4_awq", Namespace(**shape))
    for name, value, words in (
        ("hidden_size", 192, "--hidden-size is 192"),
        ("ffn_hidden_size", 500, "--ffn-hidden-size is 500"),
        ("kv_channels", 48, "the width of all heads is 192"),
        ("num_experts", 4, "cannot write experts with --qformat int4_awq: choose one of fp8, int8, nvfp4"),
    ):
        with pytest.raises(ValueError, match=words):
            check_shape("int4_awq", Namespace(**shape | {name: value}))
    experts = shape | dict(num_experts=4, moe_ffn_hidden_size=24)
    check_shape("int8", Namespace(**experts))
    with pytest.raises(ValueError, match="--moe-ffn-hidden-size is 24"):
        check_shape("nvfp4", Namespace(**experts))


def refused(made, argv: list, monkeypatch, capsys) -> str:
    """The one sentence with which the tool ends. Nothing is written."""
    save = made.where / "refused"
    given = ["--save", save, "--qformat", "int8", "--calib-data", made.text, *argv]
    monkeypatch.setattr(sys, "argv", ["quantize.py", *map(str, given)])
    with pytest.raises(SystemExit) as exit:
        tool.main()
    captured = capsys.readouterr()
    sentence = captured.err.removesuffix("\n").splitlines()[-1]
    assert exit.value.code == 2 and captured.out == "" and not save.exists() and not Path(f"{save}.part").exists()
    assert sentence.startswith("quantize.py: error: ") and sentence.endswith(".")
    return sentence


REFUSED = {
    "--calib-samples 0": "--calib-samples is 0: give at least 1",
    "--eval-samples -1": "--eval-samples is -1",
    "--qformat nvfp4": "needs a GPU, as ModelOpt computes it in CUDA kernels, and there is none",
    "--hf-model /nowhere": "/nowhere is not a folder",
    "--load /nowhere": "--load /nowhere holds no checkpoint",
    "": "the model comes from --load or from --hf-model",
    "--hf-model HF": "says nothing about how it was trained: say it by --dllm-mode",
    "--hf-model HF --dllm-mode mdlm --dllm-mask-token-id 7": "holds the mask token 7, which clean text must not",
    "--hf-model HF --dllm-mode dflash": "only whole models are quantized",
    "--hf-model MDLM --seq-length 1 --calib-samples 1 --eval-samples 1": "nothing of the 1 samples that the loss",
    "--hf-model MDLM --calib-data /nowhere": "/nowhere.bin does not exist",
    "--hf-model MDLM --calib-data /nowhere.jsonl": "/nowhere.jsonl",
    "--hf-model MDLM --calib-data a.jsonl b": "mixes chat (a.jsonl) and packed text",
    "--hf-model MDLM --calib-samples 4000": "holds 27 samples of --seq-length 48, and 4064 are asked for",
    "--hf-model MDLM --seq-length 4096": "longer than the 128 positions of the model",
    "--hf-model MDLM --dllm-block-size 4": "--dllm-mode mdlm has no blocks: leave out",
    "--hf-model MDLM --qformat int4_awq": "one scale for 128 inputs of a matrix, and --hidden-size is 40",
    "--hf-model DRAFT": "is a draft, which transformers has no class for",
    "--hf-model FOREIGN": "describes a 'gpt5' model (GPT5), which is none of",
    "--hf-model QUANTIZED --dllm-mode mdlm": "says that the weights are quantized",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_what_it_refuses(made, argv, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "_PACKAGES", ())  # whether ModelOpt is here or not
    if not (broken := made.where / "broken").exists():
        broken.mkdir()
        for name, change in dict(
            draft=dict(architectures=["DFlashDraftModel"]),
            foreign=dict(architectures=["GPT5"], model_type="gpt5"),
            quantized=dict(quantization_config=dict(quant_method="modelopt")),
        ).items():
            (broken / name).mkdir()
            config = json.loads(Path(made.path, "config.json").read_text())
            (broken / name / "config.json").write_text(json.dumps(config | change))
    words = f"--seq-length {SEQ} {argv}".replace("MDLM", f"{made.path} --dllm-mode mdlm --dllm-mask-token-id 2")
    for name in ("DRAFT", "FOREIGN", "QUANTIZED"):
        words = words.replace(name, str(broken / name.lower()))
    assert REFUSED[argv] in refused(made, words.replace("HF", made.path).split(), monkeypatch, capsys)


def test_diffusion_gemma(tmp_path):
    path = make_folder(str(tmp_path / "gemma"))
    with pytest.raises(ValueError, match="is a DiffusionGemma, whose canvases .* cannot be quantized here"):
        plan(None, path)


def test_a_folder_in_the_way(made, monkeypatch, capsys):
    save = made.where / "there"
    save.mkdir()
    (save / "notes").write_text("mine")
    argv = ["--hf-model", made.path, "--dllm-mode", "mdlm", "--save", save]
    assert "exists and is not an empty folder" in refused(made, argv, monkeypatch, capsys)
    assert (save / "notes").read_text() == "mine"


# As `python tools/quantize.py`, on a machine without ModelOpt.
_WITHOUT = """
import importlib.machinery, runpy, sys
find = importlib.machinery.PathFinder.find_spec
class Without:
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] == "modelopt" else find(name, path, target)
sys.meta_path = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_modelopt(made):
    save = made.where / "missing"
    argv = f"--hf-model {made.path} --dllm-mode mdlm --qformat fp8 --calib-data {made.text} --save {save}"
    command = [sys.executable, "-c", _WITHOUT, "tools/quantize.py", *argv.split()]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == "" and not save.exists()
    assert "modelopt is not installed, which quantization needs: pip install -e '.[quantize]'." in done.stderr


def test_a_loss_that_is_no_number():
    tool.check_loss(3.0, 4.0, "run")
    with pytest.raises(ValueError, match="the loss of run after quantization is nan"):
        tool.check_loss(3.0, float("nan"), "run")
