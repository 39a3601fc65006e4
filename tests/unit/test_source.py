"""A folder is checked as a whole, by name, before any weight of it is read."""

import json
import shutil
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dllm.conversion.source import Source, check_source
from megatron_dllm.models import recognise
from megatron_dllm.models.hf import read_config
from tests.hf_models import make


def opened(path) -> Source:
    config = read_config(path)
    family = recognise(config)
    return Source(path, family, Namespace(**family.read(config)))


def edit(path, change):
    """Change the folder's tensors in place."""
    tensors = load_file(f"{path}/model.safetensors")
    change(tensors)
    save_file({key: x.contiguous().clone() for key, x in tensors.items()}, f"{path}/model.safetensors")


def refused(path) -> str:
    with pytest.raises(ValueError) as error:
        opened(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(name, to): a fresh copy of a family's folder."""
    made = {}

    def copy(name, to):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp("made"))[0]
        return shutil.copytree(made[name], to)

    return copy


UP, NORM = "model.layers.2.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda t: t.pop(UP), f"lacks {UP} (1 missing), which a qwen3 model has"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), "has model.extra (1 left over), which a qwen3 model does"),
        (lambda t: t.update({"renamed.weight": t.pop(NORM)}), f"lacks {NORM} (1 missing)"),
        (lambda t: t.update({UP: t[UP][1:]}), f"{UP} in "),
        (lambda t: t.update({UP: t[UP].t()}), "is [40, 48], but config.json makes it [48, 40]"),
        (lambda t: t.update({UP: t[UP][None]}), "is [1, 48, 40], but config.json makes it [48, 40]"),
        (lambda t: t.update({UP: t[UP].bfloat16()}), "decoder.layers.2.mlp.linear_fc1.weight in"),
    ),
)
def test_wrong_tensors(folders, tmp_path, change, sentence):
    path = folders("qwen3", tmp_path / "hf")
    opened(path)
    edit(path, change)
    assert sentence in refused(path)


def test_precisions_may_differ_between_tensors(folders, tmp_path):
    path = folders("qwen3", tmp_path / "hf")
    edit(path, lambda t: t.update({NORM: t[NORM].bfloat16()}))
    source = opened(path)
    assert source.dtype("decoder.final_layernorm.weight") == torch.bfloat16
    assert source.dtype("output_layer.weight") == torch.float32


def test_buffers_of_old_checkpoints(folders, tmp_path):
    path = folders("llama", tmp_path / "hf")
    edit(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    opened(path)


def test_tied_head_that_is_stored_all_the_same(folders, tmp_path):
    path = folders("llama tied", tmp_path / "hf")
    embedding = "model.embed_tokens.weight"
    edit(path, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert "output_layer.weight" not in opened(path).mapping.megatron
    edit(path, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    assert f"lm_head.weight differs from {embedding}" in refused(path)
    edit(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][1:]}))
    assert "has lm_head.weight (1 left over)" in refused(path)


def test_untied_folder_without_a_head(folders, tmp_path):
    path = folders("llama", tmp_path / "hf")
    edit(path, lambda t: t.pop("lm_head.weight"))
    assert "lacks lm_head.weight" in refused(path)


def test_configuration_of_another_size(folders, tmp_path):
    path = folders("llama", tmp_path / "hf")
    config = read_config(path)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=5)))
    assert "lacks model.layers.4." in refused(path)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=3)))
    assert "has model.layers.3." in refused(path)


def test_both_layouts_of_experts(folders, tmp_path):
    """The keys tell which: one by one, or merged."""
    one, merged = opened(folders("llada2", tmp_path / "a")), opened(folders("llada2 merged", tmp_path / "b"))
    name = "decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"
    assert "experts.5.gate_proj.weight" in one.mapping.megatron[name][1][0].key
    assert merged.mapping.megatron[name][1][0].index == 5
    for start, stop, columns in ((0, 48, slice(None)), (20, 30, slice(3, 9))):
        assert torch.equal(one.read(name, start, stop, columns), merged.read(name, start, stop, columns))


def test_reads_what_a_rank_holds(folders, tmp_path):
    """Any rows and columns; rows beyond the folder's vocabulary are zero."""
    path = folders("qwen3", tmp_path / "hf")
    source, tensors = opened(path), load_file(f"{path}/model.safetensors")
    layer = "model.layers.1."
    fc1 = torch.cat([tensors[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(source.read("decoder.layers.1.mlp.linear_fc1.weight", 40, 60), fc1[40:60])
    fc2 = tensors[f"{layer}mlp.down_proj.weight"]
    assert torch.equal(source.read("decoder.layers.1.mlp.linear_fc2.weight", 0, 40, slice(24, 48)), fc2[:, 24:])
    rows = source.read("embedding.word_embeddings.weight", 80, 96)
    assert torch.equal(rows[:11], tensors["model.embed_tokens.weight"][80:]) and not rows[11:].any()
    assert not source.read("embedding.word_embeddings.weight", 96, 100).any()


def test_fewer_rows_than_the_folder_has(folders, tmp_path):
    path = folders("llama", tmp_path / "hf")
    args = Namespace(**recognise(read_config(path)).read(read_config(path)), hf_model=path, dllm_family="llama")
    check_source(args)
    args.vocab_size = 90
    with pytest.raises(ValueError, match="--vocab-size 90 is smaller than the 91 rows"):
        check_source(args)
