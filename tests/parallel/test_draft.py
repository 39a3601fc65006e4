"""A DFlash draft in several processes, and from a folder to a checkpoint and back."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dllm.checkpoint import RELEASE, check_before_loading
from tests.drafts import CONFIG, make, tensors

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2 = "--tensor-model-parallel-size 2"
LAYOUTS = {
    "TP2": (dict(tp=2), TP2),
    "TP2 SP": (dict(tp=2), f"{TP2} --sequence-parallel"),
    # two key/value heads for four ranks
    "TP4 SP recompute": (dict(tp=4), f"--tensor-model-parallel-size 4 --sequence-parallel {RECOMPUTE}"),
    "CP2": (dict(cp=2), "--context-parallel-size 2 --cp-comm-type all_gather"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("draft"), tokenizer=False)


@pytest.fixture(scope="module")
def argv(folder):
    """--init-from-hf of the folder, whose tokenizer is its target's."""
    return [folder, "--tokenizer-type", "NullTokenizer"]


@pytest.fixture(scope="module")
def run(converter, folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("imported") / "run"
    said = converter.run("import", "--hf-model", folder, "--save", run)
    assert "a dflash_draft model, 36 tensors -> 30 weights" in said and "trained further beside its target" in said
    return run


@pytest.fixture(scope="module")
def reference(pool, argv, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "one_process.pt"
    pool.run(argv, function="tests.parallel.draft:gradients", save=path)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(pool, argv, run, reference, layout):
    sizes, flags = LAYOUTS[layout]
    options = dict(sizes, reference=reference, function="tests.parallel.draft:gradients")
    if layout == "TP2":  # from the imported checkpoint
        options["checkpoint"] = run / RELEASE
    for result in pool.run([*argv, *flags.split()], max(sizes.values()), **options):
        assert result["hidden"] < 1e-5
        assert {name: error for name, error in result["gradients"].items() if not error < 1e-5} == {}


def test_what_was_imported_is_exported_bit_by_bit(converter, folder, run, tmp_path):
    said = converter.run("export", "--load", run, "--save", tmp_path / "out")
    assert "is a dflash_draft folder" in said and "Its embedding and its head are its target's." in said
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == tensors().keys() and all(torch.equal(back[key], value) for key, value in tensors().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIG | dict(mask_token_id=2)


def test_without_its_folder_everything_is_spelled_out(converter, tmp_path):
    weights = tensors(torch.bfloat16)
    folder = make(tmp_path, weights, tokenizer=False, dtype="bfloat16")
    converter.run("import", "--hf-model", folder, "--save", tmp_path / "run")
    shutil.rmtree(folder)
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(back[key], value) for key, value in weights.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=1.0)
    assert config["rope_parameters"] == rope
    left_out = set("auto_map attention_dropout eos_token_id initializer_range max_window_layers use_cache".split())
    written = {key: value for key, value in CONFIG.items() if key not in left_out | {"sliding_window"}}
    assert config == written | dict(dtype="bfloat16", mask_token_id=2, rope_parameters=rope)


def test_check(converter, folder, run, hf_folder, tmp_path):
    assert "tokens: equal." in converter.run("check", "--hf-model", folder, "--load", run)
    path = Path(shutil.copytree(folder, tmp_path / "changed"))
    weights = load_file(path / "model.safetensors")
    weights["fc.weight"][0, 0] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    said = converter.run("check", "--hf-model", path, "--load", run, code=2)
    assert "the hidden states differ by" in said and "does not hold the weights of" in said
    said = converter.run("check", "--hf-model", hf_folder("qwen3")[0], "--load", run, code=2)
    assert "is a whole model and" in said and "a draft: they are not of one model" in said
    path = make(tmp_path, tokenizer=False, rms_norm_eps=1e-5)
    said = converter.run("check", "--hf-model", path, "--load", run, code=2)
    assert "has --layernorm-epsilon 1e-05," in said and "1e-06: they are not of one model" in said


def test_a_whole_model_does_not_start_from_a_draft(run):
    with pytest.raises(ValueError, match="release holds a draft, without an embedding and a head"):
        check_before_loading(Namespace(load=str(run), ckpt_step=None))


def test_what_no_one_else_can_be(converter, run, hf_folder, tmp_path):
    for form, sentence in (("transformers", "has no class for dflash_draft"), ("qwen3", "this is a draft, without")):
        said = converter.run("export", "--load", run, "--save", tmp_path / "out", "--export-as", form, code=2)
        assert sentence in said
    converter.run("import", "--hf-model", hf_folder("qwen3")[0], "--save", tmp_path / "run")
    said = converter.run(
        "export", "--load", tmp_path / "run", "--save", tmp_path / "out", "--export-as", "dflash_draft", code=2
    )
    assert "this is a whole model, with an embedding and a head" in said
