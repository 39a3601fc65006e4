"""Targets that transformers computes: the same losses and gradients as ours where both can, in every layout; hybrid
Mamba models, which only it can; what cannot be right is refused."""

import pytest
import transformers
from safetensors.torch import load_file, save_file

from tests.hf_models import SHAPE, write_tokenizer
from tests.parallel.families import LAYOUTS, Family, close
from tests.parallel.hf import TRAIN, write_words
from tests.parallel.pool import CaseFailed
from tests.parallel.test_dflash import DRAFT, write_text

TRANSFORMERS = "--dflash-target-backend transformers"
HYBRID = f"--qk-layernorm {TRANSFORMERS} --dflash-target-layers 0 2 3"


@pytest.fixture(scope="module")
def command(hf_folder, tmp_path_factory):
    """command(target, kind of data, *flags): of a run."""
    folder = tmp_path_factory.mktemp("data")
    data = dict(
        chat=["--sft-data-path", write_words(folder)], text=["--data-path", write_text(folder), "--split", "100,0,0"]
    )

    def get(target, kind, *flags):
        path = hf_folder(target)[0]
        return [*TRAIN, "--dflash-target", path, *f"{DRAFT} {' '.join(flags)}".split(), *data[kind]]

    return get


@pytest.fixture(scope="module")
def started(pool, command, tmp_path_factory):
    made = {}

    def get(*key):
        if key not in made:
            made[key] = Family(pool, tmp_path_factory.mktemp("reference"), command(*key))
        return made[key]

    return get


@pytest.mark.parametrize(
    ("target", "kind", "options", "layouts"),
    [
        ("qwen3 tied", "chat", "", ("TP2", "TP2 SP", "DP2")),
        ("qwen3", "text", "--dflash-kl-weight 0.5 --dflash-target-layers 1 2", ("CP2 all_gather",)),
    ],
)
def test_both_backends_are_one(started, command, target, kind, options, layouts):
    ours = started(target, kind, options)
    (single,) = ours.run(1, TRANSFORMERS, reference=ours.path)
    assert close(single["losses"], ours.reference["losses"]) and single["grad_error"] < 1e-5
    for layout in layouts:
        processes, flags = LAYOUTS[layout]
        ours.check(processes, f"{flags} {TRANSFORMERS}")


@pytest.mark.parametrize("layout", ("TP2 SP", "CP2 all_gather"))
def test_hybrid_mamba(started, layout):
    family = started("nemotron_h", "chat", HYBRID)
    assert close(family.reference["losses"][0], family.reference["naive_loss"], 1e-6)
    assert family.reference["grad_error"] < 2e-6 and family.reference["grad_norms"][0] > 0.1
    family.check(*LAYOUTS[layout])


def refused(pool, argv) -> str:
    with pytest.raises(CaseFailed) as found:
        pool.run(argv, 1)
    assert found.value.error.startswith(("ValueError: ", "UnusableTarget: "))
    return found.value.error


def test_packed_text_has_no_state_to_cut(pool, command):
    assert "linear_attention layers, whose state would run on" in refused(pool, command("nemotron_h", "text", HYBRID))
    pool.run(command("nemotron_h", "text", HYBRID, "--dllm-cross-document-attention"), 1)


def test_families_that_are_not_ours(pool, command):
    assert "use --dflash-target-backend transformers" in refused(pool, command("nemotron_h", "chat"))


@pytest.mark.parametrize(("broken", "message"), [(False, "has a bias"), (True, "has no weights for model.layers.2")])
def test_weights_that_cannot_be_used(pool, command, tmp_path, broken, message):
    path = str(tmp_path / "target")
    config = transformers.PhiConfig(**SHAPE | dict(hidden_size=64))  # its head has a bias
    transformers.PhiForCausalLM(config).save_pretrained(path)
    write_tokenizer(path, config.vocab_size)
    if broken:
        file = f"{path}/model.safetensors"
        tensors = {key: x for key, x in load_file(file).items() if key != "model.layers.2.mlp.fc1.weight"}
        save_file(tensors, file, metadata={"format": "pt"})
    argv = [*command("qwen3", "chat", TRANSFORMERS), "--dflash-target", path, "--dflash-target-layers", "1"]
    assert message in refused(pool, argv)
