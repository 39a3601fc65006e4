"""--async-save: what is written in the background is what was to be saved, however training has gone on."""

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from tests.checkpoints import saved_tensors
from tests.parallel.cases import TINY, write_chat
from tests.parallel.pool import CaseFailed
from tests.parallel.test_resume import LAYOUTS

WRITES_FOR = 0.4  # seconds: several steps


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    return [*TINY, "--sft-data-path", write_chat(tmp_path_factory.mktemp("data")), "--train-iters", "4"]


def save(pool, argv, name, folder, *flags, **options):
    processes, layout = LAYOUTS[name]
    argv = [*argv, *layout.split(), "--save", folder, "--save-interval", "2", *flags]
    return pool.run(argv, processes, **options)


@pytest.mark.parametrize(
    ("name", "flags"),
    (
        ("TP2 SP", "--dllm-mode idlm --idlm-auto-balance"),
        ("PP2 VPP2", ""),
        ("DP2 distributed optimizer", ""),
        ("experts EP2", "--bf16"),
    ),
)
def test_the_same_bits_as_a_save_that_training_waits_for(pool, argv, tmp_path, name, flags):
    argv = [*argv, *flags.split()]
    expected = save(pool, argv, name, tmp_path / "sync")
    results = save(pool, argv, name, tmp_path / "async", "--async-save", slow_write=WRITES_FOR)
    assert results[-1]["losses"] == expected[-1]["losses"]
    scheduled = results[0]["output"].index("scheduled an async checkpoint save at iteration       2")
    assert scheduled < results[0]["output"].index("successfully saved checkpoint from iteration       2")
    for folder in ("iter_0000002", "iter_0000004"):
        saved, written = (saved_tensors(tmp_path / kind / folder) for kind in ("sync", "async"))
        assert saved.keys() == written.keys() and any("exp_avg_sq" in key for key in saved)
        assert not [key for key in saved if not torch.equal(saved[key], written[key])]
        common = [load_common_state_dict(tmp_path / kind / folder) for kind in ("sync", "async")]
        assert common[0]["opt_param_scheduler"] == common[1]["opt_param_scheduler"]
        assert common[0]["iteration"] == common[1]["iteration"] == int(folder[-1])
        one, other = (state["args"] for state in common)
        assert one.consumed_train_samples == other.consumed_train_samples == 8 * int(folder[-1])
        assert one.dllm_state == other.dllm_state and (bool(one.dllm_state) == ("idlm" in flags))


@pytest.mark.parametrize(("before", "after"), (("TP2 SP", "TP2 SP"), ("DP2 distributed optimizer", "1")))
def test_it_resumes(pool, argv, tmp_path, before, after):
    straight = save(pool, argv, before, tmp_path, "--async-save")[-1]
    processes, layout = LAYOUTS[after]
    result = pool.run([*argv, *layout.split(), "--load", tmp_path, "--ckpt-step", 2, "--async-save", "--save",
                       tmp_path / "on", "--save-interval", 1], processes)[-1]  # fmt: skip
    expected = straight["losses"][2:]
    assert result["losses"] == (expected if before == after else pytest.approx(expected, rel=1e-5))
    assert (tmp_path / "on/latest_checkpointed_iteration.txt").read_text() == "4"


def test_a_writer_that_fails_stops_the_run_and_the_last_checkpoint_stays(pool, argv, tmp_path):
    save(pool, argv, "DP2", tmp_path, "--train-iters", "2", "--async-save")
    with pytest.raises(CaseFailed) as failure:
        more = ("--async-save", "--load", tmp_path, "--override-opt-param-scheduler")
        save(pool, argv, "DP2", tmp_path, *more, fail_to_write=1)
    assert "no space" in str(failure.value)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not (tmp_path / "iter_0000004/.metadata").exists()
