"""A checkpoint agrees with the run that wrote it, whatever Megatron has written into the arguments meanwhile."""

from argparse import Namespace

import pytest

from megatron_dllm import checkpoint


def arguments(**changes) -> Namespace:
    usual = dict(
        load="runs/a", save="runs/a", ckpt_step=None, finetune=False, num_attention_heads=6, vocab_size=8,
        num_query_groups=1, group_query_attention=False, init_from_hf=False, verify_integrity=False,
    )  # fmt: skip
    optimizer = dict(
        no_load_optim=False, use_distributed_optimizer=False, override_opt_param_scheduler=True, bf16=False, fp16=False,
        optimizer="adam", use_precision_aware_optimizer=False, dist_ckpt_optim_fully_reshardable=True,
    )  # fmt: skip
    run = dict(rank=0, dllm_mode="bd3lm", dllm_block_size=4, init_from_hf=False)
    return Namespace(**run | optimizer | usual | changes)


@pytest.fixture
def load(monkeypatch):
    def run(saved: Namespace, args: Namespace) -> None:
        monkeypatch.setattr(checkpoint, "iteration_folder", lambda *_: "runs/a/iter_0000001")
        monkeypatch.setattr(checkpoint, "check_complete", lambda _: None)
        monkeypatch.setattr(checkpoint, "saved_arguments", lambda _: saved)
        checkpoint.check_before_loading(args)

    return run


def test_attention_without_query_groups_resumes(load):
    """Megatron sets num_query_groups to the number of heads while it trains; before, it is 1."""
    load(arguments(num_query_groups=6), arguments())


def test_query_groups_must_agree(load):
    grouped = arguments(group_query_attention=True, num_query_groups=3)
    load(grouped, grouped)
    for other in (arguments(), arguments(group_query_attention=True, num_query_groups=2)):
        with pytest.raises(ValueError, match="--num-query-groups 3"):
            load(grouped, other)


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    (
        ({}, dict(bf16=True), "trained in fp32"),
        ({}, dict(fp16=True, use_distributed_optimizer=True), "trained in fp32"),
        (dict(optimizer="muon"), dict(optimizer="muon", use_distributed_optimizer=True), "only the state of adam"),
        ({}, dict(use_distributed_optimizer=True, use_precision_aware_optimizer=True), "only the state of adam"),
        (dict(use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=False), {}, "fully reshardable"),
    ),
)
def test_optimizer_state_that_cannot_go_on_is_refused(load, saved, own, message):
    with pytest.raises(ValueError, match=message) as failure:
        load(arguments(**saved), arguments(**own))
    assert "--no-load-optim" in str(failure.value)
    load(arguments(**saved), arguments(**own, no_load_optim=True))
    load(arguments(**saved), arguments(**own, finetune=True))


@pytest.mark.parametrize("precision", ("bf16", "fp16", "finetune"))
def test_optimizer_state_converts(load, precision):
    for distributed in (False, True):
        saved = arguments(**{precision: True}, use_distributed_optimizer=not distributed)
        load(saved, arguments(**{precision: True}, use_distributed_optimizer=distributed))
    load(arguments(use_distributed_optimizer=True), arguments(**{precision: True}))


def test_what_a_resume_changes_is_said(load, capsys):
    load(arguments(), arguments(dllm_block_size=16))
    assert "--dllm-block-size 4, this run goes on with 16" in capsys.readouterr().out
    load(arguments(), arguments())
    load(arguments(), arguments(dllm_block_size=16, rank=1))
    assert not capsys.readouterr().out


def draft(**changes) -> Namespace:
    own = dict(dllm_mode="dflash", dflash_target_layers=[1], dflash_num_target_layers=4, dflash_target="runs/target")
    return arguments(**own | dict(dflash_target_identity="a", dflash_window=None, dflash_causal_block=False) | changes)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    (
        (dict(dllm_block_size=16), "--dllm-block-size 4, this run has 16"),
        (dict(dflash_causal_block=True), "--dflash-causal-block False, this run has True"),
        (dict(dflash_window=6), "--dflash-window None, this run has 6"),
        (dict(dflash_num_target_layers=6), "a target of 4 layers, and --dflash-target runs/target has 6"),
        (dict(dflash_target_identity="b"), "beside another target than --dflash-target runs/target"),
    ),
)
def test_a_draft_goes_on_as_it_was(load, capsys, changed, sentence):
    """Other modes may change their block size, as above."""
    load(draft(), draft())
    with pytest.raises(ValueError, match=sentence) as failure:
        load(draft(), draft(**changed))
    assert "use the same (or --finetune" in str(failure.value)
    load(draft(), draft(**changed, finetune=True))


def test_drafts_of_before_know_less(load):
    saved = draft(dflash_target_identity=None)
    del saved.dflash_causal_block, saved.dflash_num_target_layers
    load(saved, draft())


def test_a_converted_draft_has_a_target_and_no_objective(load, monkeypatch):
    converted = draft(dllm_mode="mdlm", dflash_target_identity=None)
    with pytest.raises(ValueError, match="a target of 4 layers"):
        load(converted, draft(dflash_num_target_layers=6))
    monkeypatch.setattr(checkpoint.os.path, "basename", lambda _: checkpoint.RELEASE)
    load(converted, draft(dflash_window=6))
