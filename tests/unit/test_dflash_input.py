"""What can be wrong with a command that trains a draft is one sentence and exit code 2, before anything is built."""

import json
import os
import re
import shutil
import sys

import megatron.training.training as training
import pytest
from safetensors.torch import load_file, save_file

import pretrain_dllm
from megatron_dllm.generation import load
from megatron_dllm.models import target
from tests.drafts import make as make_draft
from tests.hf_models import make
from tests.parallel.hf import TRAIN, write_words

DFLASH = "--dllm-mode dflash --num-layers 2 --dllm-block-size 4 --dflash-num-anchors 8 --cp-comm-type all_gather"
TARGET = "--dflash-target {target}"
EXPERTS = "--dflash-target {experts} --expert-model-parallel-size"

# flags -> (processes, what the sentence must say)
CASES = {
    "": (1, "--dllm-mode dflash trains beside a frozen model: name it by --dflash-target DIR"),
    "--dflash-target {folder}/nothing": (1, "nothing holds no model: give a Hugging Face folder"),
    "--dflash-target {draft}": (1, "is a draft itself: name the model that it drafts for"),
    f"{TARGET} --dllm-block-size 1": (1, "--dllm-block-size 1: a block is a known token and at least one guess"),
    f"{TARGET} --dllm-block-size 0": (1, "--dllm-block-size 0 cannot be"),
    f"{TARGET} --dllm-block-size 32": (1, "--seq-length 32 holds no two blocks of --dllm-block-size 32"),
    f"{TARGET} --dllm-block-size 17": (1, "--seq-length 32 holds no two blocks of --dllm-block-size 17"),
    f"{TARGET} --dflash-num-anchors 0": (1, "--dflash-num-anchors is 0: give at least 1"),
    f"{TARGET} --dflash-window 0": (1, "--dflash-window is 0: give at least 1"),
    f"{TARGET} --dflash-eval-interval 0": (1, "--dflash-eval-interval is 0: give at least 1"),
    f"{TARGET} --dflash-eval-prompts 4": (1, "--dflash-eval-prompts is of the decoding that --dflash-eval-interval"),
    f"{TARGET} --dflash-eval-tokens 64": (1, "--dflash-eval-tokens is of the decoding that --dflash-eval-interval"),
    f"{TARGET} --dflash-eval-tokens 1": (1, "--dflash-eval-tokens is 1: give at least 2"),
    f"{TARGET} --dflash-eval-interval 5 --dflash-eval-tokens 128": (1, "room for a prompt in the 128 positions"),
    f"{TARGET} --dflash-eval-interval 5 --max-position-embeddings 48": (1, "64 leaves no room for a prompt in the 48"),
    f"{TARGET} --dflash-eval-interval 5 --context-parallel-size 2": (2, "leave it out under context parallelism"),
    f"{TARGET} --dflash-loss-decay 0": (1, "--dflash-loss-decay 0.0 is out of range: give a number above 0"),
    f"{TARGET} --dflash-loss-decay nan": (1, "--dflash-loss-decay nan is out of range"),
    f"{TARGET} --dflash-loss dpace --dflash-loss-decay 7": (
        1,
        "--dflash-loss-decay has no effect on --dflash-loss dpace",
    ),
    f"{TARGET} --dflash-loss dpace --dllm-compat automodel": (1, "has no --dflash-loss dpace: leave out one of them"),
    f"{TARGET} --dflash-loss dpace --dflash-dpace-alpha 0": (1, "--dflash-dpace-alpha 0.0 is no share"),
    f"{TARGET} --dflash-loss dpace --dflash-dpace-alpha nan": (1, "--dflash-dpace-alpha nan is no share"),
    f"{TARGET} --dflash-dpace-alpha 0.5": (1, "--dflash-dpace-alpha needs --dflash-loss dpace: add it"),
    f"{TARGET} --dflash-kl-weight 1.5": (1, "--dflash-kl-weight 1.5 is no share: give a number from 0 to 1"),
    f"{TARGET} --dflash-kl-weight nan": (1, "--dflash-kl-weight nan is no share"),
    f"{TARGET} --dflash-kl-temperature 2": (1, "--dflash-kl-temperature needs --dflash-kl-weight above 0: add it"),
    f"{TARGET} --dflash-kl-weight 1 --dflash-kl-temperature inf": (1, "inf divides logits: give a number above 0"),
    f"{TARGET} --dflash-kl-weight 1 --dflash-kl-temperature 0": (1, "0.0 divides logits: give a number above 0"),
    f"{TARGET} --dflash-kl-weight 0.5 --dflash-features {{folder}}": (1, "does not hold what the target predicts"),
    f"{TARGET} --dflash-num-anchors 6 --context-parallel-size 2": (2, "give a multiple of 4"),
    f"{TARGET} --dllm-block-size 3 --dflash-num-anchors 7 --tensor-model-parallel-size 2 --sequence-parallel": (
        2,
        "--dflash-num-anchors 7 cannot be shared out among context- and sequence-parallel ranks: give a multiple of 2",
    ),
    f"{TARGET} --pipeline-model-parallel-size 2": (2, "use --pipeline-model-parallel-size 1"),
    f"{TARGET} --context-parallel-size 2 --cp-comm-type a2a": (2, "use --cp-comm-type all_gather"),
    f"{TARGET} --transformer-impl transformer_engine": (1, "needs a GPU: use --transformer-impl local"),
    f"{TARGET} --dllm-emulate-fp8 mxfp8": (1, "multiplies in groups of 32, and --hidden-size is 40"),
    f"{TARGET} --dflash-target-layers 0 4": (1, "--dflash-target-layers 4 does not exist: the target has 4 layers"),
    f"{TARGET} --dflash-target-layers -1": (1, "--dflash-target-layers -1 does not exist"),
    f"{TARGET} --hidden-size 48": (1, "--hidden-size 48 is not that of the target (40)"),
    f"{TARGET} --num-attention-heads 5": (1, "--num-attention-heads 5 cannot share --num-query-groups 2"),
    f"{TARGET} --num-query-groups 3": (1, "--num-attention-heads 4 cannot share --num-query-groups 3"),
    f"{TARGET} --kv-channels 7": (1, "a head of 7 channels cannot be rotated"),
    f"{TARGET} --vocab-size 96": (1, "the draft's vocabulary of 96 is not that of the target (91)"),
    f"{TARGET} --dllm-mask-token-id 91": (1, "mask token id 91 is outside the vocabulary of 91"),
    f"{TARGET} --dllm-mask-token-id 1": (1, "mask token id 1 is also the eos token"),
    f"{TARGET} --hf-model {{draft}} --num-layers 3": (1, "made for a target of 6 layers, and --dflash-target"),
    f"{TARGET} --dllm-eps 0.1": (1, "--dllm-eps has no effect on --dllm-mode dflash"),
    f"{TARGET} --dflash-anchor-sampling random": (1, "invalid choice"),
    f"{TARGET} --num-experts 4": (1, "a draft's layers are dense"),
    f"{TARGET} --expert-model-parallel-size 2": (2, "shares out the experts of the target, but"),
    f"{EXPERTS} 3 --global-batch-size 12": (3, "the target's 8 experts are not divisible by EP 3"),
    f"{EXPERTS} 2": (1, "1 process(es) cannot be laid out as expert TP 1 x EP 2 x PP 1 = 2"),
    f"{EXPERTS} 2 --tensor-model-parallel-size 2": (2, "2 process(es) cannot be laid out as expert TP 2 x EP 2"),
    f"{EXPERTS} 2 --moe-token-dispatcher-type allgather": (2, "use --moe-token-dispatcher-type alltoall"),
    f"{EXPERTS} 2 --dflash-target-backend transformers": (2, "has all of it on every rank: leave out one of them"),
    f"{EXPERTS} 2 --dflash-features {{folder}}": (2, "which does not run beside --dflash-features: leave it out"),
    f"{EXPERTS} 2 --dflash-eval-interval 5": (2, "leave it out under expert parallelism"),
}


SAVE_HF = f"{TARGET} --save {{folder}}/run --save-interval 2 --save-hf-interval 2"
CASES |= {
    f"{SAVE_HF} {flags}": (1, f"a draft's folder cannot say {flags}, and would be decoded as another network")
    for flags in ("--dflash-causal-block", "--dflash-window 6", "--dflash-causal-block --dflash-window 6")
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("input")
    target, _ = make("qwen3", folder)
    experts, _ = make("qwen3_moe", folder)
    return dict(folder=folder, target=target, experts=experts, draft=make_draft(folder), data=write_words(folder))


def refused(argv: list[str], processes: int, monkeypatch, capsys, pretrain=None) -> str:
    """What the program says before it ends with code 2. pretrain: instead of training; default: it must not begin."""

    def built(*_, **__):
        raise AssertionError("something was built")

    monkeypatch.setattr(target, "build", built)
    monkeypatch.setattr(pretrain_dllm, "pretrain", pretrain or built)
    monkeypatch.setattr(sys, "argv", ["pretrain_dllm.py", *argv])
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", "0")
    before = dict(os.environ)
    try:
        with pytest.raises(SystemExit) as end:
            pretrain_dllm.main()
    finally:
        training.destroy_global_state()
        os.environ.clear()
        os.environ.update(before)
    assert end.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pretrain_dllm.py: error: ")]
    assert len(said) == 1 and len(said[0]) < 500
    return said[0]


@pytest.mark.parametrize("flags", CASES)
def test_one_sentence(places, monkeypatch, capsys, flags):
    processes, sentence = CASES[flags]
    argv = [*TRAIN, *DFLASH.split(), "--sft-data-path", places["data"], *flags.format(**places).split()]
    assert sentence in refused(argv, processes, monkeypatch, capsys)


def test_a_target_without_a_draft(places, monkeypatch, capsys):
    argv = [*TRAIN, "--sft-data-path", places["data"], "--dflash-target", places["target"]]
    said = refused(argv, 1, monkeypatch, capsys)
    assert "--dflash-target belongs to --dllm-mode dflash, not mdlm" in said


def test_a_target_that_is_damaged(places, monkeypatch, capsys, tmp_path):
    argv = [*TRAIN, *DFLASH.split(), "--sft-data-path", places["data"], "--dflash-target", str(tmp_path)]
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refused(argv, 1, monkeypatch, capsys)
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=["MambaForCausalLM"], model_type="mamba")))
    assert "mamba" in refused(argv, 1, monkeypatch, capsys).lower()
    (tmp_path / "config.json").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert "holds no model" in refused(argv, 1, monkeypatch, capsys)
    (tmp_path / "iter_0000005").mkdir()
    assert "not a complete checkpoint" in refused(argv, 1, monkeypatch, capsys)


def _cut(path):
    os.truncate(path / "model.safetensors", 1000)


def _drop_a_tensor(path):
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})


WEIGHTS = {
    ("megatron", _cut): "model.safetensors is damaged",
    ("transformers", _cut): "model.safetensors is damaged",
    ("megatron", lambda path: (path / "model.safetensors").unlink()): "holds no weights",
    ("transformers", lambda path: (path / "model.safetensors").unlink()): "holds no weights",
    ("megatron", _drop_a_tensor): "lacks model.layers.2.mlp.up_proj.weight (1 missing)",
}


@pytest.mark.parametrize(("backend", "damage"), WEIGHTS)
def test_weights_that_are_damaged(places, monkeypatch, capsys, tmp_path, backend, damage):
    path = tmp_path / "target"
    shutil.copytree(places["target"], path)
    argv = [*TRAIN, *DFLASH.split(), "--sft-data-path", places["data"], "--dflash-target", str(path)]
    damage(path)
    assert WEIGHTS[backend, damage] in refused([*argv, "--dflash-target-backend", backend], 1, monkeypatch, capsys)
    if backend == "megatron":
        draft = make_draft(tmp_path, num_target_layers=4)
        with pytest.raises(ValueError, match=re.escape(WEIGHTS[backend, damage])):
            load.plan(hf_model=draft, target=str(path))


def test_what_only_a_built_target_tells_is_a_sentence_too(places, monkeypatch, capsys):
    def unusable(*_, **__):
        raise target.UnusableTarget("it has a bias: use another.")

    argv = [*TRAIN, *DFLASH.split(), "--sft-data-path", places["data"], "--dflash-target", places["target"]]
    assert "it has a bias: use another." in refused(argv, 1, monkeypatch, capsys, pretrain=unusable)


def test_a_folder_says_its_mask_token_itself(places, tmp_path):
    draft = make_draft(tmp_path, num_target_layers=4)
    with pytest.raises(ValueError, match="was trained with mask token 2, not 3: leave out --dllm-mask-token-id"):
        load.plan(hf_model=draft, target=places["target"], mask_token_id=3)
    with pytest.raises(ValueError, match="was trained with mask token 2, not 3: leave out --dllm-mask-token-id"):
        load.plan(hf_model=make("dream", tmp_path)[0], mask_token_id=3)
    training.destroy_global_state()
    assert load.plan(hf_model=draft, target=places["target"], mask_token_id=2).args.dllm_mask_token_id == 2


def test_a_draft_and_the_target_of_another(places, tmp_path):
    """Generation's own flags are named, whichever of the sizes differs."""
    for changes, sentence in (
        (dict(num_target_layers=6), "a target of 6 layers, and --target .*qwen3 has 4: name the model that it drafts"),
        (dict(num_target_layers=4, vocab_size=80), "a target of 80 tokens, and --target .*qwen3 has 91: name the"),
    ):
        draft = make_draft(tmp_path / sentence[12:14], tokenizer=False, **changes)
        with pytest.raises(ValueError, match=f"--hf-model {draft} was made for {sentence}"):
            load.plan(hf_model=draft, target=places["target"])
    other = make("qwen3", tmp_path, shape=dict(hidden_size=48))[0]
    draft = make_draft(tmp_path, num_target_layers=4)
    with pytest.raises(ValueError, match=f"--hf-model {draft} was made for a target of 40 hidden channels, and --t"):
        load.plan(hf_model=draft, target=other)
    training.destroy_global_state()


def test_a_target_without_a_tokenizer(places, monkeypatch, capsys, tmp_path):
    path = tmp_path / "target"
    shutil.copytree(places["target"], path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    argv = [*TRAIN, *DFLASH.split(), "--sft-data-path", places["data"], "--dflash-target", str(path)]
    assert f"--dflash-target {path} holds no tokenizer: give --tokenizer-type" in refused(argv, 1, monkeypatch, capsys)
