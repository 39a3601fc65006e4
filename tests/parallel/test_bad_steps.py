"""A step that is not finite: named by its samples, and left out alike in every layout, or the end of the run."""

import re

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from tests.checkpoints import saved_tensors
from tests.parallel.cases import TINY, write_chat
from tests.parallel.families import slow
from tests.parallel.pool import CaseFailed
from tests.parallel.test_resume import LAYOUTS

_BIASED = " --moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-load-balancing-type none"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PLACES = {
    "1": (1, ""),
    "DP2": (2, ""),
    "TP2 SP": LAYOUTS["TP2 SP"],
    "PP2 VPP2": LAYOUTS["PP2 VPP2"],
    "CP2": LAYOUTS["CP2"],
    "DP2 distributed optimizer": (2, _OVERLAP),
    "experts EP2": (2, LAYOUTS["experts EP2"][1] + _BIASED),
}
POISONED = 19  # in the third step, which trains on samples 16 to 23; its micro-batch is (18, 19)


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    data = write_chat(tmp_path_factory.mktemp("data"))
    return [*TINY, "--sft-data-path", data, "--train-iters", "5", "--save-interval", "5"]


def run(pool, argv, name, *flags, **options):
    processes, layout = PLACES[name]
    return pool.run([*argv, *layout.split(), *flags], processes, **options)


@pytest.mark.parametrize("name", [slow(name) if name in ("1", "DP2", "CP2") else name for name in PLACES])
def test_a_skipped_step_is_one_that_was_never_made(pool, argv, tmp_path, name):
    """The same bits as a run that is told beforehand to leave it out, and all ranks agree."""
    told = run(pool, argv, name, "--save", tmp_path / "told", "--iterations-to-skip", 3)
    flags = "--save", tmp_path / "bad", "--dllm-skip-bad-steps", 1
    results = run(pool, argv, name, *flags, poison_sample=POISONED)
    named = "Warning: iteration 3, trained on samples 16 to 23: the loss is not finite in sample 19 and the gradient"
    assert results[0]["output"].count(named) == 1 and "its update is skipped, 1 of at most 1." in results[0]["output"]
    for result, other in zip(results, told, strict=True):
        assert result["grad_norms"] == [*other["grad_norms"][:2], None, *other["grad_norms"][2:]]
        assert result["indices"][3:] == other["indices"][2:]
        assert result["rates"] == [*other["rates"][:2], other["rates"][2], *other["rates"][2:]]
    losses = results[-1]["losses"]
    assert losses[:2] + losses[3:] == told[-1]["losses"] and losses[2] != losses[2]
    expected, got = saved_tensors(tmp_path / "told/iter_0000005"), saved_tensors(tmp_path / "bad/iter_0000005")
    assert expected.keys() == got.keys()
    assert not [key for key in got if not torch.equal(expected[key], got[key])]
    assert any("expert_bias" in key for key in got) == (name == "experts EP2")
    one, other = (load_common_state_dict(tmp_path / kind / "iter_0000005")["args"] for kind in ("told", "bad"))
    assert one.consumed_train_samples == other.consumed_train_samples == 40
    assert (one.dllm_bad_steps, other.dllm_bad_steps) == ([], [3])


def test_a_mode_learns_nothing_from_it(pool, argv):
    """Whose losses were good; only a gradient was not."""
    flags = "--dllm-mode", "idlm", "--idlm-auto-balance"
    results = run(pool, argv, "DP2", *flags, "--dllm-skip-bad-steps", 1, poison_gradient=(3, 1))[-1]["losses"]
    told = run(pool, argv, "DP2", *flags, "--iterations-to-skip", 3)[-1]["losses"]
    assert results[:2] + results[3:] == told and results[2] == results[2]


def test_the_loss_by_level_does_not_see_it(pool, argv):
    results = run(pool, argv, "1", "--dllm-skip-bad-steps", 1, "--log-interval", 5, poison_sample=POISONED)
    told = run(pool, argv, "1", "--iterations-to-skip", 3, "--log-interval", 5)
    shown = [re.findall(r"loss by noise level \|.*", result[0]["output"]) for result in (results, told)]
    assert shown[0] == shown[1] and shown[0]


@pytest.mark.parametrize("name", ("PP2 VPP2", "DP2 distributed optimizer"))
def test_it_stops_the_run_and_saves_nothing(pool, argv, tmp_path, name):
    flags = ["--save", tmp_path, "--save-interval", 2, "--async-save"]
    with pytest.raises(CaseFailed) as failure:
        run(pool, argv, name, *flags, poison_sample=POISONED)
    error = failure.value.error
    assert error.startswith("BadStep: iteration 3, trained on samples 16 to 23: the loss is not finite in sample 19 ")
    assert "stopped before its update" in error and "--iterations-to-skip 3" in error and "\n" not in error
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"  # which was being written
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]


@pytest.mark.parametrize("name", ("TP2 SP", "DP2 distributed optimizer"))
def test_a_gradient_alone(pool, argv, name):
    """On one rank only, with every loss finite."""
    with pytest.raises(CaseFailed) as failure:
        run(pool, argv, name, poison_gradient=(2, 1))
    assert "iteration 2, trained on samples 8 to 15: every loss is finite and the gradient norm is inf" in (
        failure.value.error
    )
    results = run(pool, argv, name, "--dllm-skip-bad-steps", 3, poison_gradient=(2, 1))
    assert all(result["grad_norms"][1] is None and None not in result["grad_norms"][2:] for result in results)


def test_skipped_steps_are_counted_over_resumes(pool, argv, tmp_path):
    argv = [*argv, "--save", tmp_path, "--load", tmp_path, "--dllm-skip-bad-steps", 1, "--override-opt-param-scheduler"]
    run(pool, argv, "1", "--train-iters", 3, poison_sample=POISONED)
    with pytest.raises(CaseFailed) as failure:
        run(pool, argv, "TP2 SP", poison_sample=33)
    assert "iteration 5, trained on samples 32 to 39: the loss is not finite in sample 33" in failure.value.error
    assert "after 1 skipped step (3); stopped" in failure.value.error


def test_a_diverged_model_names_a_few_samples(pool, argv):
    """A weight blow-up rather than a bad sample: the step after an infinite learning rate."""
    with pytest.raises(CaseFailed) as failure:
        run(pool, argv, "1", "--lr", "1e30", "--min-lr", "1e30", "--clip-grad", 0)
    assert re.search(r"the loss is not finite in samples (\d+, ){7}\d+|the gradient norm is", failure.value.error)


def test_megatrons_own_checks_on_request(pool, argv):
    with pytest.raises(CaseFailed, match="found NaN in the local loss"):
        run(pool, argv, "1", "--rerun-mode", "disabled", poison_sample=POISONED)
