"""DFlash drafts as a family: what config.json leaves open, and programs that need a whole model."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import transformers

from megatron_dllm.arguments import parse_arguments
from megatron_dllm.conversion import importing
from megatron_dllm.generation import GenerationConfig, check_sampler
from megatron_dllm.generation.load import plan
from megatron_dllm.models import get_family
from megatron_dllm.models.dflash_draft import spread
from tests.drafts import CONFIG, make
from tests.parallel.cases import TINY

FAMILY = get_family("dflash_draft")


def test_published_spread_of_target_layers():
    cases = json.loads((Path(__file__).parents[1] / "golden" / "22_target_layers.json").read_text())["cases"]
    assert [spread(case["num_target"], case["num_draft"]) for case in cases] == [case["ids"] for case in cases]


def test_layers_that_are_not_named_are_spread():
    config = CONFIG | dict(num_target_layers=36, num_hidden_layers=5, layer_types=None)
    assert FAMILY.read(config | dict(dflash_config=dict(mask_token_id=2)))["dflash_target_layers"] == [1, 9, 17, 25, 33]


def test_keys_lie_in_dflash_config_or_beside_it():
    beside = CONFIG | CONFIG["dflash_config"]
    del beside["dflash_config"]
    within = CONFIG | dict(dflash_config=CONFIG["dflash_config"] | dict(block_size=4, output_multiplier=1.0))
    within["block_size"] = 9  # as published, dflash_config goes first
    assert FAMILY.read(beside) == FAMILY.read(within) == FAMILY.read(CONFIG)


def test_what_is_written_is_the_same_to_transformers():
    written = FAMILY.write(Namespace(**FAMILY.read(CONFIG)))
    theirs, ours = (transformers.Qwen3Config(**config) for config in (CONFIG, written))
    assert theirs.rope_parameters["rope_theta"] == ours.rope_parameters["rope_theta"] == written["rope_theta"] == 5000
    assert theirs.layer_types == ours.layer_types and ours.head_dim == 16
    scaled = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    arguments = FAMILY.read(CONFIG | dict(rope_scaling=scaled))
    assert FAMILY.read(FAMILY.write(Namespace(**arguments))) == arguments


def test_without_a_tokenizer(tmp_path):
    """It is the target's: ids are enough, and the mask token may be any but the target's EOS."""
    args = importing.plan(make(tmp_path, tokenizer=False)).args
    assert (args.tokenizer_type, args.null_tokenizer_eod_id, args.dllm_mask_token_id) == ("NullTokenizer", 1, 2)
    for mask, sentence in ((1, "is also the eos token"), (91, "mask token id 91 is outside")):
        path = make(
            tmp_path / str(mask), tokenizer=False, dflash_config=CONFIG["dflash_config"] | dict(mask_token_id=mask)
        )
        with pytest.raises(ValueError, match=sentence):
            importing.plan(path)


def test_half_a_model_is_neither_trained_nor_decoded_alone(tmp_path, monkeypatch):
    argv = [*TINY[:2], *TINY[6:], "--sft-data-path", "none", "--hf-model", make(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *argv])
    with pytest.raises(ValueError, match="is a draft, which is trained beside the model whose hidden states it reads"):
        parse_arguments()
    with pytest.raises(ValueError, match="leave out --dllm-mode"):
        importing.plan(argv[-1], mode="mdlm")
    with pytest.raises(ValueError, match="leave out --pipeline-model-parallel-size"):
        plan(hf_model=argv[-1], pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="the model is a draft, which guesses from the hidden states of its target"):
        check_sampler(Namespace(dllm_mode="mdlm", dflash_target_layers=[1]), GenerationConfig(), None)
