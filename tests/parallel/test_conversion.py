"""Hugging Face folder -> checkpoint -> any layout -> checkpoint -> Hugging Face folder, each step against another."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.hf_models import MODELS, VOCABULARY, make
from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, close
from tests.parallel.hf import theirs

LOADED = [
    *(("qwen3 tied", layout, LAYOUTS[layout]) for layout in ("TP2 SP", "PP2 VPP2")),
    *(("llada2", layout, MIXTURE_OF_EXPERTS[layout]) for layout in ("DP2 EP2", "PP2")),
]
OWN_CODE = ("llada", "llada2", "llada2 merged", "llada_moe", "dream", "nemotron")


@pytest.fixture(scope="module")
def imported(converter, hf_folder, tmp_path_factory):
    """imported(name) -> a run's folder with the weights of that model."""
    made = {}

    def get(name):
        if name not in made:
            run = tmp_path_factory.mktemp("imported") / "run"
            converter.run("import", "--hf-model", hf_folder(name)[0], "--save", run)
            made[name] = run
        return made[name]

    return get


def tensors(folder) -> dict[str, torch.Tensor]:
    return {key: value for path in Path(folder).glob("*.safetensors") for key, value in load_file(path).items()}


def same(ours: dict, original: dict) -> bool:
    assert ours.keys() == original.keys()
    return all(ours[key].dtype == original[key].dtype and torch.equal(ours[key], original[key]) for key in original)


def logits(model) -> torch.Tensor:
    tokens = torch.arange(4, 44).view(2, 20)
    return model(input_ids=tokens, attention_mask=torch.zeros(2, 1, 20, 20), use_cache=False).logits.detach()


def reloaded(folder):
    """As a stranger would load it: no code of ours, none of the folder's."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.parametrize("name", MODELS)
def test_what_was_imported_is_exported_bit_by_bit(converter, hf_folder, imported, tmp_path, name):
    path, _ = hf_folder(name)
    converter.run("export", "--load", imported(name), "--save", tmp_path / "out")
    assert same(tensors(tmp_path / "out"), tensors(path))
    config, original = (json.loads(Path(folder, "config.json").read_text()) for folder in (tmp_path / "out", path))
    assert config == original | dict(dtype="float32", mask_token_id=2)


@pytest.mark.parametrize("name", ("llama tied", "dream", "nemotron", "llada2 merged"))
def test_check_compares_logits(converter, hf_folder, imported, name):
    text = " ".join(f"w{i}" for i in range(4, 34))
    said = converter.run("check", "--hf-model", hf_folder(name)[0], "--load", imported(name), "--text", text)
    assert "30 tokens: equal." in said


def test_check_notices_another_weight(converter, hf_folder, imported, tmp_path):
    path = Path(shutil.copytree(hf_folder("qwen3")[0], tmp_path / "changed"))
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    said = converter.run("check", "--hf-model", path, "--load", imported("qwen3"), "--text", "w4 w5 w6", code=2)
    assert "does not hold the weights of" in said


@pytest.mark.parametrize("name", ("llama", "llada2"))
def test_bf16_and_several_files(converter, tmp_path, name):
    shards = dict(shards="40KB") if name == "llama" else {}
    path, _ = make(name, tmp_path, dtype=torch.bfloat16, **shards)
    converter.run("import", "--hf-model", path, "--save", tmp_path / "run")
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out", "--max-shard-size", "50KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert same(tensors(tmp_path / "out"), tensors(path))
    if name == "llama":
        assert torch.equal(logits(reloaded(tmp_path / "out")), logits(reloaded(path)))


@pytest.mark.parametrize("name", OWN_CODE)
def test_a_family_with_code_of_its_own_becomes_one_of_transformers(converter, hf_folder, imported, tmp_path, name):
    converter.run("export", "--load", imported(name), "--save", tmp_path / "out", "--export-as", "transformers")
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text()
    expected = logits(hf_folder(name)[1])
    assert (logits(reloaded(tmp_path / "out")) - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize(("name", "layout", "how"), LOADED, ids=lambda x: x if isinstance(x, str) else "")
def test_an_imported_checkpoint_starts_every_layout(pool, started, hf_command, imported, name, layout, how):
    processes, flags = how
    results = pool.run([*hf_command(name), "--load", imported(name), *flags.split()], processes)
    assert close(results[-1]["losses"], started(name).reference["losses"])
    assert close(results[-1]["grad_norms"], started(name).reference["grad_norms"])
    assert "holds converted weights: training starts from them at iteration 0." in results[0]["output"]


@pytest.mark.parametrize(
    ("name", "layout"),
    (
        ("qwen3 tied", LAYOUTS["TP2 SP PP2"]),
        ("dream", LAYOUTS["TP4"]),
        ("qwen3_moe", MIXTURE_OF_EXPERTS["DP2 EP2"]),
        ("llada2", MIXTURE_OF_EXPERTS["TP2 SP EP2 ETP1"]),
    ),
)
def test_what_was_trained_is_exported(pool, converter, hf_command, tmp_path, name, layout):
    """Two steps, export, transformers: its nll on the third step's samples are those of the run that continues."""
    argv = [*hf_command(name), "--train-iters", 3, "--save", tmp_path / "run", "--save-interval", 2]
    processes, flags = layout
    pool.run([*argv, *flags.split(), "--init-from-hf", "--make-vocab-size-divisible-by", 128], processes)
    export = ["export", "--load", tmp_path / "run", "--ckpt-step", 2, "--save", tmp_path / "out"]
    converter.run(*export, "--export-as", "transformers")
    continued = pool.run([*argv, "--load", tmp_path / "run", "--ckpt-step", 2], record_nll=True)[0]
    model = reloaded(tmp_path / "out")
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == VOCABULARY
    indices = continued["indices"][0][0] + continued["indices"][0][1]
    loss, nll = theirs(model, argv, indices)
    assert indices == [8, 9, 10, 11] and close(continued["losses"], [loss])
    assert continued["nll"]["dllm"] == pytest.approx(nll, rel=1e-5, abs=1e-5)
