"""--save-hf-interval: Hugging Face folders of a running training."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dllm.conversion.background import Exporter
from tests.parallel.families import LAYOUTS
from tests.parallel.pool import CaseFailed


@pytest.mark.parametrize("saves", ([], ["--async-save"]), ids=" ".join)
def test_folders_appear_beside_the_checkpoints(pool, converter, hf_command, tmp_path, saves):
    """And hold what an export of the checkpoint writes, which is complete some steps later with --async-save."""
    processes, flags = LAYOUTS["PP2"]
    run = tmp_path / "run"
    flags = [*flags.split(), "--init-from-hf", "--save", run, "--save-interval", 1, "--save-hf-interval", 2, *saves]
    first, _ = pool.run([*hf_command("qwen3 tied"), *flags], processes, slow_write=0.3 if saves else 0)
    assert f"wrote {run}/hf_0000002" in first["output"] and not (run / "hf_0000001").exists()
    converter.run("export", "--load", run, "--save", tmp_path / "out")
    names = lambda folder: {path.name for path in folder.iterdir()}
    assert names(run / "hf_0000002") == names(tmp_path / "out")
    here, there = (load_file(folder / "model.safetensors") for folder in (run / "hf_0000002", tmp_path / "out"))
    assert here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here)
    assert json.loads((run / "hf_0000002" / "config.json").read_text())["mask_token_id"] == 2


@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("mode", ("mdlm", "bd3lm"))
def test_transformers_attends_as_the_model_was_trained(pool, converter, hf_command, tmp_path, mode, attention):
    """In both directions after mdlm, without a mask being given; a block-wise rule is left to the sampler."""
    argv = [*hf_command("qwen3 tied"), "--dllm-mode", mode, "--init-from-hf", "--save", tmp_path / "run"]
    pool.run([*argv, "--save-interval", 2])
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation=attention).eval()
    tokens_BQ = torch.tensor([[10, 20, 30, 40, 50], [10, 20, 30, 40, 51]])
    first_BV = model(input_ids=tokens_BQ).logits[:, 0]
    everything = torch.zeros(2, 1, 5, 5)
    if mode == "mdlm":
        assert (first_BV[0] - first_BV[1]).abs().max() > 1e-2
        assert torch.allclose(first_BV, model(input_ids=tokens_BQ, attention_mask=everything).logits[:, 0], atol=1e-5)
    else:
        assert torch.allclose(first_BV[0], first_BV[1], atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--save-interval", 2, "--save-hf-interval", 3], "a multiple of --save-interval"),
        (["--save-interval", 2, "--save-hf-interval", 0], "a multiple of --save-interval"),
    ],
)
def test_intervals_that_cannot_be_kept(pool, hf_command, tmp_path, flags, why):
    with pytest.raises(CaseFailed, match=why) as failure:
        pool.run([*hf_command("qwen3 tied"), "--save", tmp_path / "run", *flags])
    assert failure.value.error.startswith("ValueError") and not (tmp_path / "run").exists()


def test_a_failed_export_is_told(tmp_path):
    exporter = Exporter()
    exporter.start(str(tmp_path), 5)
    with pytest.raises(RuntimeError, match=r"hf_0000005 could not be written: .*holds no checkpoint"):
        exporter.wait()
    exporter.wait()  # it is told once
    assert not list(tmp_path.iterdir())
