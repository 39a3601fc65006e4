"""Presets say what the models' own folders say, have the models' known sizes, and make legal commands."""

import json
import math
import sys
from argparse import Namespace

import pytest

from megatron_dllm.arguments import read_command_line
from megatron_dllm.conversion.defaults import folder_defaults
from megatron_dllm.models import get_family
from megatron_dllm.models.weights import expert_layers, megatron_shapes
from megatron_dllm.modes import MODES
from megatron_dllm.presets import PRESETS, Released, get_preset

RELEASED = [name for name, preset in PRESETS.items() if isinstance(preset, Released)]
# Parameters: as counted from the released files, or (one or two digits) as the model's name or report rounds them.
EXACT = {
    "llada-8b": 8_015_581_184,
    "dream-7b": 7_615_616_512,
    "fast-dllm-v2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
}
ABOUT = {  # in all, and those that work on one token
    "llada-moe-7b": (7e9, 1.4e9 + 157184 * 2048),  # counted without the embedding, the others with it
    "llada2-mini": (16e9, 1.4e9),
    "llada2-flash": (100e9, 6.1e9),
    "nemotron-labs-diffusion-8b": (8e9, None),
    "nemotron-labs-diffusion-14b": (14e9, None),
    "diffusion-gemma-26b-a4b": (26e9, 3.07e9 + 262144 * 2816),  # counted with the vision tower; without the embedding
}
TENSORS = {"nemotron-labs-diffusion-3b": 237, "nemotron-labs-diffusion-14b": 363, "llada-8b": 291}


@pytest.mark.parametrize("name", RELEASED)
def test_the_models_own_folder_says_the_same(tmp_path, name):
    """config.json as transformers would write it, or, for code of a model's own, as we do."""
    family = get_family(PRESETS[name].family)
    written = family.write(Namespace(**get_preset(name)))
    if family.transformers_config is not None:
        import transformers

        whole = family.transformers_config if family.text_config is None else "DiffusionGemmaConfig"
        getattr(transformers, whole)(**written).save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text(json.dumps(written))
    assert folder_defaults(str(tmp_path)) == get_preset(name)


def parameters(args) -> tuple[int, int]:
    """All, and those that work on one token: of experts the chosen ones."""
    total = working = 0
    for name, shape in megatron_shapes(args).items():
        size = math.prod(shape)
        total += size
        if "local_experts" in name:
            size = size * args.moe_router_topk / args.num_experts
        working += size
    return total, working


@pytest.mark.parametrize("name", RELEASED)
def test_parameters(name):
    args = Namespace(**get_preset(name))
    total, working = parameters(args)
    if name in EXACT:
        assert total == EXACT[name]
    if name in ABOUT:
        wanted, wanted_working = ABOUT[name]
        assert total == pytest.approx(wanted, rel=0.07)
        assert wanted_working is None or working == pytest.approx(wanted_working, rel=0.03)
    if name in TENSORS:
        assert len(get_family(args.dllm_family).mapping(args).hf) == TENSORS[name]
    assert name in {*EXACT, *ABOUT, *TENSORS}


def test_names_say_the_size():
    for name in RELEASED:
        size = name.removesuffix("-a3b").removesuffix("-a4b").rpartition("-")[2]
        if size[-1] in "bm":
            wanted = float(size[:-1]) * (1e9 if size[-1] == "b" else 1e6)
            rounding = 0.5 if size == "3b" else 0.09  # Nemotron's 3B has a head of its own: 3.8
            assert parameters(Namespace(**get_preset(name)))[0] == pytest.approx(wanted, rel=rounding)


def command(monkeypatch, *argv):
    base = (
        "--seq-length 64 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --data-path data/corpus_text_document "
        "--tokenizer-type NullTokenizer"
    )
    monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *base.split(), *argv])
    return read_command_line()[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_command_with_it_passes_the_checks(tmp_path, monkeypatch, name):
    preset = get_preset(name)
    family = get_family(preset["dllm_family"]) if "dllm_family" in preset else None
    mode = family.mode if family and family.mode else "mdlm"
    mode = "block_diffusion" if preset.get("dllm_architecture") else mode
    more = ["--dllm-mode", mode]
    if mode == "block_diffusion":
        more += ["--no-block-diffusion-eos-fill"]  # the tokenizer of this test has no EOS
    if family is None:
        more += ["--vocab-size", "259"]
    if MODES[mode].NEEDS_MASK_TOKEN and (family is None or family.mask_token_id is None):
        more += ["--dllm-mask-token-id", "5"]
    args = command(monkeypatch, "--model-preset", name, *more)
    if family is None:
        return
    assert args.dllm_mask_token_id == (family.mask_token_id or 5 if MODES[mode].NEEDS_MASK_TOKEN else None)
    assert args.dllm_family == family.name and sum(expert_layers(args)) in (0, args.num_layers, args.num_layers - 1)
    assert all(getattr(args, key) == value for key, value in family.suggested.items())
    config = family.write(args) | dict(mask_token_id=args.dllm_mask_token_id)  # as in an exported folder
    (tmp_path / "config.json").write_text(json.dumps(config))
    same = vars(command(monkeypatch, "--hf-model", str(tmp_path), *more))
    differing = {key for key, value in vars(args).items() if same[key] != value}
    assert differing == {"model_preset", "hf_model"}


def test_every_value_can_be_given(monkeypatch):
    args = command(monkeypatch, *"--dllm-mode mdlm --model-preset llada-8b --num-layers 2 --rotary-base 7".split())
    assert (args.num_layers, args.rotary_base, args.hidden_size) == (2, 7, 4096)


def test_the_mask_token_is_the_vocabularys(monkeypatch):
    flags = "--dllm-mode mdlm --model-preset llada-8b --vocab-size 1000".split()
    with pytest.raises(ValueError, match="no mask token: give --dllm-mask-token-id"):
        command(monkeypatch, *flags)
    assert command(monkeypatch, *flags, "--dllm-mask-token-id", "9").dllm_mask_token_id == 9


def test_fewer_layers_of_a_model_with_dense_first_layers(monkeypatch):
    flags = "--dllm-mode bd3lm --model-preset llada2-mini --num-layers 3".split()
    with pytest.raises(ValueError, match=r"--moe-layer-freq is for 20 layers.*\[0\]\+\[1\]\*2"):
        command(monkeypatch, *flags)
    assert expert_layers(command(monkeypatch, *flags, "--moe-layer-freq", "[0]+[1]*2")) == [False, True, True]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="llada-8b.*tiny"):
        get_preset("no-such")
