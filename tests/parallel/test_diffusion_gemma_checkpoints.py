"""DiffusionGemma's weights: folder to checkpoint and back, read into and saved from every layout, and resumed in
others, expert-parallel ones too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import gemma
from tests.parallel.cases import TINY
from tests.parallel.families import close, slow
from tests.parallel.hf import TRAIN, write_words
from tests.parallel.test_block_diffusion import write_conversations

_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "1": (1, ""),
    "TP2 SP EP2": (2, f"{_TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    "CP2 EP2": (2, "--context-parallel-size 2 --cp-comm-type all_gather --expert-model-parallel-size 2"),
    "PP2 VPP": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "TP4 SP EP2 ETP2": (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 2",
    ),
}
OBJECTIVE = "--dllm-mode block_diffusion --lr 1e-5 --min-lr 1e-6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return gemma.make_folder(str(tmp_path_factory.mktemp("gemma") / "hf"))


@pytest.fixture(scope="module")
def imported(converter, folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("imported") / "run"
    said = converter.run("import", "--hf-model", folder, "--save", run)
    assert "is ready for --dllm-mode block_diffusion." in said
    return run


@pytest.fixture(scope="module")
def argv(folder, tmp_path_factory):
    words = write_words(tmp_path_factory.mktemp("words"))
    return [*TRAIN, *OBJECTIVE.split(), "--hf-model", folder, "--sft-data-path", words]


def tensors(path) -> dict[str, torch.Tensor]:
    return load_file(Path(path, "model.safetensors"))


def same(ours: dict, original: dict) -> bool:
    assert ours.keys() == original.keys()
    return all(ours[key].dtype == original[key].dtype and torch.equal(ours[key], original[key]) for key in original)


def test_what_was_imported_is_exported_bit_by_bit_with_its_vision_tower(converter, folder, imported, tmp_path):
    converter.run("export", "--load", imported, "--save", tmp_path / "out")
    assert same(tensors(tmp_path / "out"), tensors(folder))
    config, original = (json.loads(Path(where, "config.json").read_text()) for where in (tmp_path / "out", folder))
    assert config == original | dict(dtype="float32")
    assert any(key.startswith("model.encoder.vision_tower.") for key in tensors(folder))


def test_a_vision_tower_is_not_lost_in_silence(converter, folder, tmp_path):
    """The folder that a run began from has moved: its tower is in no checkpoint."""
    moved = shutil.copytree(folder, tmp_path / "moved")
    converter.run("import", "--hf-model", moved, "--save", tmp_path / "run")
    shutil.rmtree(moved)
    said = converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out", code=2)
    assert "are not in its checkpoint: give that folder" in said and not (tmp_path / "out").exists()
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out", "--hf-model", folder)
    assert same(tensors(tmp_path / "out"), tensors(folder))


def test_what_is_not_trained_keeps_its_precision(converter, folder, imported, tmp_path):
    converter.run("export", "--load", imported, "--save", tmp_path / "out", "--dtype", "bfloat16")
    ours, original = tensors(tmp_path / "out"), tensors(folder)
    for key in original:
        carried = key.startswith(("model.encoder.vision_tower.", "model.encoder.embed_vision."))
        assert torch.equal(ours[key], original[key] if carried else original[key].bfloat16()), key


def test_check_compares_encoder_and_canvas_and_notices_another_weight(converter, folder, imported, tmp_path):
    text = " ".join(f"w{i}" for i in range(4, 34))
    said = converter.run("check", "--hf-model", folder, "--load", imported, "--text", text)
    assert "encoder" in said and "canvas" in said and f"{30 + gemma.K} tokens: equal." in said
    for key in ("model.decoder.layers.1.layer_scalar", "model.encoder.language_model.layers.1.layer_scalar"):
        changed = Path(shutil.copytree(folder, tmp_path / key))
        weights = tensors(changed)
        weights[key] += 0.1
        save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
        said = converter.run("check", "--hf-model", changed, "--load", imported, "--text", text, code=2)
        assert "does not hold the weights of" in said


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "1"])
def test_every_layout_reads_its_part_and_gives_it_back(pool, converter, argv, folder, tmp_path, name):
    """A step that changes nothing: what is saved is what was read."""
    processes, flags = LAYOUTS[name]
    still = ["--train-iters", 1, "--lr", 0, "--min-lr", 0, "--save", tmp_path / "run", "--save-interval", 1]
    pool.run([*argv, *still, "--init-from-hf", "--weight-decay", 0, *flags.split()], processes)
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out")
    assert same(tensors(tmp_path / "out"), tensors(folder))


def test_an_imported_checkpoint_trains_like_the_folder(pool, argv, imported):
    one = pool.run([*argv, "--init-from-hf"], 1)[-1]
    for name in ("1", "TP2 SP EP2"):
        processes, flags = LAYOUTS[name]
        result = pool.run([*argv, "--load", imported, *flags.split()], processes)[-1]
        assert close(result["losses"], one["losses"])


def test_a_model_of_our_own_becomes_a_folder_of_transformers(pool, converter, tmp_path):
    """From random weights; its logits are the checkpoint's. transformers has no DiffusionGemma without a vision tower,
    and draws one."""
    data = ["--sft-data-path", write_conversations(tmp_path), "--save", tmp_path / "run", "--save-interval", 3]
    pool.run([*TINY, *OBJECTIVE.split(), "--model-preset", "tiny-diffusion-gemma", *data], 1)
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out")
    load = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained
    _, info = load(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and all("vision" in key for key in info["missing_keys"])
    converter.run("check", "--hf-model", tmp_path / "out", "--load", tmp_path / "run", "--text", "Positions restart.")


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory):
    """straight(layout, *flags) -> (folder, result): six steps, saved after the third; half are self-conditioned."""
    data = ["--sft-data-path", write_conversations(tmp_path_factory.mktemp("data")), "--seq-length", 96]
    shape = "--model-preset tiny-diffusion-gemma --dllm-window 12 --dllm-block-size 8 --train-iters 6"
    argv, made = [*TINY, *OBJECTIVE.split(), *shape.split(), *data], {}

    def get(name, *more):
        if (name, *more) not in made:
            run = tmp_path_factory.mktemp("straight") / "run"
            processes, flags = LAYOUTS[name]
            save = ["--save", run, "--save-interval", 3]
            made[name, *more] = run, pool.run([*argv, *flags.split(), *more, *save], processes)[-1]
        return made[name, *more]

    get.argv = argv
    return get


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("TP2 SP EP2", "1", ""),
        ("TP2 SP EP2", "CP2 EP2", _OVERLAP),
        ("TP2 SP EP2", "PP2 VPP", ""),
        ("TP2 SP EP2", "PP2 VPP", _OVERLAP),
        ("1", "CP2 EP2", _OVERLAP),
        ("1", "PP2 VPP", _OVERLAP),
        slow("TP2 SP EP2", "1", _OVERLAP),
        slow("TP2 SP EP2", "CP2 EP2", ""),
        *(slow("1", after, "") for after in ("1", "CP2 EP2", "PP2 VPP")),
        slow("1", "1", _OVERLAP),
    ],
)
def test_another_layout_continues_the_curve(pool, straight, before, after, kind):
    """Weights, buffers and moments; experts have an optimizer of their own with expert parallelism."""
    more = kind.split()
    run, result = straight(before, *more)
    processes, flags = LAYOUTS[after]
    load = ["--load", run, "--ckpt-step", 3]
    continued = pool.run([*straight.argv, *flags.split(), *more, *load], processes)[-1]
    assert close(continued["losses"], result["losses"][3:])
    assert close(continued["grad_norms"], result["grad_norms"][3:])
