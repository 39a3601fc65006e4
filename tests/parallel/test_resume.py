"""Save and resume: bit-exact in the same layout, exact to rounding in any other, and after a kill."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict

from tests.checkpoints import saved_tensors
from tests.parallel.cases import TINY, write_chat
from tests.parallel.pool import ROOT, CaseFailed

LAYOUTS = {
    "1": (1, ""),
    "DP2": (2, ""),
    "TP2 SP": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "CP2": (2, "--context-parallel-size 2"),
    "1 distributed optimizer": (1, "--use-distributed-optimizer"),
    "DP2 distributed optimizer": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "DP4 distributed optimizer": (4, "--use-distributed-optimizer"),
    "DP2 TP2 SP distributed optimizer": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    ),
}

_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
# a mixture of experts: one optimizer has all parameters, or (EP > 1, or an expert TP other than TP) experts their own
EXPERTS = {
    "experts 1": (1, ""),
    "experts DP2": (2, ""),
    "experts EP2": (2, "--expert-model-parallel-size 2"),
    "experts EP4": (4, "--expert-model-parallel-size 4"),
    "experts TP2 SP": (2, _TP2),
    "experts TP2 SP ETP1": (2, f"{_TP2} --expert-tensor-parallel-size 1"),
    "experts TP2 SP EP2 ETP2": (4, f"{_TP2} --expert-model-parallel-size 2"),
    "experts EP2 PP2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
LAYOUTS |= {name: (processes, f"--model-preset tiny-moe {flags}") for name, (processes, flags) in EXPERTS.items()}
LAYOUTS |= {
    f"{name} distributed optimizer": (LAYOUTS[name][0], f"{LAYOUTS[name][1]} --use-distributed-optimizer")
    for name in EXPERTS
}


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    return [*TINY, "--sft-data-path", write_chat(tmp_path_factory.mktemp("data")), "--train-iters", "6"]


@pytest.fixture(scope="module")
def uninterrupted(pool, argv, tmp_path_factory):
    """uninterrupted(layout, *flags): six steps, saved after the third and the sixth."""
    made = {}

    def get(name, *more):
        if (name, *more) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            processes, flags = LAYOUTS[name]
            results = pool.run([*argv, *flags.split(), *more, "--save", folder, "--save-interval", 3], processes)
            made[name, *more] = (folder, results[-1])
        return made[name, *more]

    return get


def resume(pool, argv, folder, name, *more, **options):
    processes, flags = LAYOUTS[name]
    return pool.run([*argv, *flags.split(), "--load", folder, "--ckpt-step", 3, *more], processes, **options)


@pytest.mark.parametrize("name", ("1", "TP2 SP", "PP2 VPP2", "DP2 distributed optimizer"))
def test_the_same_layout_resumes_bit_by_bit(pool, argv, uninterrupted, tmp_path, name):
    folder, straight = uninterrupted(name)
    results = resume(pool, argv, folder, name, "--save", tmp_path, "--save-interval", 6)
    assert results[-1]["losses"] == straight["losses"][3:]
    assert results[-1]["grad_norms"] == straight["grad_norms"][3:]
    assert results[-1]["indices"] == straight["indices"][3:]
    for key in ("supervised tokens", "noised tokens"):
        assert [r[key] for r in results[-1]["reports"]] == [r[key] for r in straight["reports"][3:]]
    expected, got = saved_tensors(folder / "iter_0000006"), saved_tensors(tmp_path / "iter_0000006")
    assert expected.keys() == got.keys()
    assert any("exp_avg_sq" in key for key in got) and any("word_embeddings" in key for key in got)
    different = [key for key in got if not torch.equal(expected[key], got[key])]
    assert not different
    common = [load_common_state_dict(f / "iter_0000006") for f in (folder, tmp_path)]
    assert common[0]["opt_param_scheduler"] == common[1]["opt_param_scheduler"]
    assert common[0]["args"].consumed_train_samples == common[1]["args"].consumed_train_samples == 48


@pytest.mark.parametrize("name", ("1", "DP2", "PP2 VPP2", "CP2"))
def test_another_layout_continues_the_curve(pool, argv, uninterrupted, name):
    folder, straight = uninterrupted("TP2 SP")
    result = resume(pool, argv, folder, name)[-1]
    assert result["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(straight["grad_norms"][3:], rel=1e-5)


@pytest.mark.parametrize("name", ("DP4 distributed optimizer", "DP2 TP2 SP distributed optimizer"))
def test_the_sharded_optimizer_state_reshards(pool, argv, uninterrupted, name):
    folder, straight = uninterrupted("DP2 distributed optimizer")
    result = resume(pool, argv, folder, name)[-1]
    assert result["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(straight["grad_norms"][3:], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    (
        ("experts 1", "experts EP2", ""),
        ("experts EP2", "experts 1", ""),
        ("experts EP2", "experts EP4", ""),
        ("experts EP2", "experts TP2 SP", ""),
        ("experts TP2 SP ETP1", "experts TP2 SP", ""),
        ("experts TP2 SP ETP1", "experts EP2 PP2", ""),
        ("experts 1", "experts EP2", " distributed optimizer"),
        ("experts EP2", "experts DP2", " distributed optimizer"),
        ("experts EP2", "experts TP2 SP EP2 ETP2", " distributed optimizer"),
    ),
)
def test_experts_resume_with_an_optimizer_of_their_own_and_without(pool, argv, uninterrupted, before, after, kind):
    folder, straight = uninterrupted(before + kind)
    result = resume(pool, argv, folder, after + kind)[-1]
    assert result["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(straight["grad_norms"][3:], rel=1e-5)


@pytest.mark.parametrize("flags", ("", "--bf16", "--use-distributed-optimizer"))
def test_a_first_stage_without_experts_resumes(pool, argv, tmp_path, flags):
    """Its optimizer of experts has no parameter and no step, and it is the one whose settings are saved."""
    processes, layout = LAYOUTS["experts EP2 PP2"]
    argv = [*argv, *layout.split(), "--moe-layer-freq", "([0]*2+[1]*2)", *flags.split()]
    straight = pool.run([*argv, "--save", tmp_path, "--save-interval", 3], processes)[-1]
    result = pool.run([*argv, "--load", tmp_path, "--ckpt-step", 3], processes)[-1]
    assert result["losses"] == straight["losses"][3:]


_D = " distributed optimizer"


@pytest.mark.parametrize(
    ("kinds", "flags"),
    ((("", "", ""), "--bf16"), ((_D, _D, _D), "--bf16"), ((_D, "", _D), "--bf16"), (("", _D, ""), "")),
)
def test_the_state_of_experts_is_the_same_bits_in_every_form(pool, argv, tmp_path, kinds, flags):
    """Saved after three steps; loaded in two other layouts in turn and saved again at once."""
    folders, argv = [], [*argv, "--train-iters", 3, "--save-interval", 1000, *flags.split()]
    for name, kind in zip(("DP2", "EP2", "1"), kinds, strict=True):
        processes, layout = LAYOUTS[f"experts {name}{kind}"]
        load = ["--load", folders[-1]] if folders else []
        folders.append(tmp_path / name)
        result = pool.run([*argv, *layout.split(), "--save", folders[-1], *load], processes)[-1]
        assert len(result["losses"]) == (0 if load else 3)
    saved = []
    for folder in folders:
        state = saved_tensors(folder / "iter_0000003")
        assert any(key.startswith("optimizer.state.exp_avg_sq.") and "experts" in key for key in state)
        for key in [key for key in state if key.startswith("optimizer.state.param.")]:
            fp32 = state.pop(key)  # fp32 runs have them with the distributed optimizer only: the weights once more
            if flags:
                state[key.replace("param", "fp32_param", 1)] = fp32
            else:
                assert torch.equal(fp32, state[key.removeprefix("optimizer.state.param.")])
        saved.append(state)
    for other in saved[1:]:
        assert other.keys() == saved[0].keys()
        assert not [key for key in other if not torch.equal(other[key], saved[0][key])]


@pytest.mark.parametrize(("before", "after"), ((2, 1), (2, 4), (1, 2)))
def test_noise_and_order_survive_another_data_parallel_size(pool, argv, tmp_path, before, after):
    """Saved at step 7, resumed on more or fewer ranks: steps 8 to 10 meet the samples and noise they would have."""
    argv = [*argv, "--train-iters", "10", "--save", tmp_path, "--save-interval", "7"]
    seen = lambda results: {k: v for r in results for k, v in r["noise"].items() if int(k) >= 7 * 8}
    straight = pool.run(argv, before)
    resumed = pool.run([*argv, "--load", tmp_path, "--ckpt-step", "7"], after)
    assert seen(resumed) == seen(straight) and len(seen(resumed)) == 3 * 8
    assert min(int(k) for r in resumed for k in r["noise"]) == 7 * 8
    assert resumed[-1]["losses"] == pytest.approx(straight[-1]["losses"][7:], rel=1e-5)


def test_the_folder_of_an_iteration_is_as_good_as_the_runs(pool, argv, uninterrupted):
    folder, straight = uninterrupted("1")
    result = pool.run([*argv, "--load", folder / "iter_0000003"])[0]
    assert result["losses"] == straight["losses"][3:]


@pytest.mark.parametrize(
    ("before", "after"),
    (
        ("1", "1 distributed optimizer"),
        ("TP2 SP", "DP2 distributed optimizer"),
        ("PP2 VPP2", "DP2 TP2 SP distributed optimizer"),
        ("DP2 distributed optimizer", "1"),
        ("DP2 TP2 SP distributed optimizer", "PP2 VPP2"),
        ("experts 1", "experts EP2 distributed optimizer"),
        ("experts EP2", "experts DP2 distributed optimizer"),
        ("experts EP2", "experts EP2 PP2 distributed optimizer"),
        ("experts EP2 distributed optimizer", "experts TP2 SP"),
        ("experts DP2 distributed optimizer", "experts EP2 PP2"),
    ),
)
def test_the_distributed_optimizer_comes_and_goes(pool, argv, uninterrupted, before, after):
    folder, straight = uninterrupted(before)
    result = resume(pool, argv, folder, after)[-1]
    assert result["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert result["grad_norms"] == pytest.approx(straight["grad_norms"][3:], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "tolerance"),
    (
        ("1", "1 distributed optimizer", 1e-5),
        ("DP2 distributed optimizer", "DP2", 1e-5),
        # bf16 rounds otherwise in another layout, and on some processors in products of another size
        ("experts EP2", "experts EP2 PP2 distributed optimizer", 5e-4),
        ("experts EP2 distributed optimizer", "experts EP2", 5e-4),
        ("TP2 SP", "DP2 distributed optimizer", 5e-4),
        ("experts EP2 distributed optimizer", "experts TP2 SP", 5e-4),
    ),
)
def test_the_distributed_optimizer_comes_and_goes_in_bf16(pool, argv, uninterrupted, before, after, tolerance):
    folder, straight = uninterrupted(before, "--bf16")
    result = resume(pool, argv, folder, after, "--bf16")[-1]
    assert result["losses"] == pytest.approx(straight["losses"][3:], rel=tolerance)
    assert result["grad_norms"] == pytest.approx(straight["grad_norms"][3:], rel=tolerance)


def test_a_state_without_fp32_weights_does_not_go_on_in_bf16(pool, argv, uninterrupted):
    folder, straight = uninterrupted("1")
    for name in ("1", "1 distributed optimizer"):
        with pytest.raises(CaseFailed) as failure:
            resume(pool, argv, folder, name, "--bf16")
        assert "trained in fp32" in failure.value.error
    result = resume(pool, argv, folder, "1", "--bf16", "--no-load-optim")[0]
    assert result["losses"][0] == pytest.approx(straight["losses"][3], rel=1e-3)


def test_another_global_batch_size_continues_behind_the_last_sample(pool, argv, uninterrupted):
    folder, _ = uninterrupted("1")
    flags = ("--global-batch-size", 4, "--override-opt-param-scheduler")
    result = resume(pool, argv, folder, "1", *flags)[0]
    assert result["indices"][0] == [[24, 25], [26, 27]]


@pytest.mark.parametrize("name", ("1", "DP2 distributed optimizer", "experts EP2", "experts EP2 distributed optimizer"))
def test_another_learning_rate_goes_on_with_the_state(pool, argv, uninterrupted, tmp_path, name):
    folder, straight = uninterrupted(name)
    flags = ("--lr", 2e-3, "--min-lr", 2e-4, "--override-opt-param-scheduler")
    resume(pool, argv, folder, name, *flags, "--train-iters", 3, "--save", tmp_path, "--save-interval", 1000)
    before, loaded = saved_tensors(folder / "iter_0000003"), saved_tensors(tmp_path / "iter_0000003")
    assert before.keys() == loaded.keys()
    assert not [key for key in loaded if not torch.equal(before[key], loaded[key])]
    result = resume(pool, argv, tmp_path, name, *flags)[-1]
    assert result["rates"] == pytest.approx([2e-4 + 9e-4 * (1 + math.cos(math.pi * k / 10)) for k in (3, 4, 5)])
    assert result["losses"][0] == straight["losses"][3]
    assert result["losses"][1:] != pytest.approx(straight["losses"][4:], rel=1e-5)
    back = resume(pool, argv, tmp_path, name, "--override-opt-param-scheduler")[-1]
    assert back["losses"] == straight["losses"][3:]


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        ("--lr 2e-3", "--lr 0.003, this run has 0.002"),
        ("--min-lr 2e-4", "--min-lr 0.0001, this run has 0.0002"),
        ("--lr-decay-style linear", "--lr-decay-style cosine, this run has linear"),
        ("--weight-decay 0", "--weight-decay (at the start) 0.1, this run has 0"),
        ("--train-iters 9", "(--train-iters, in samples) of 48, this run has 72"),
        ("--decoupled-lr 1e-2", "--decoupled-lr None, this run has 0.01"),
    ),
)
def test_another_schedule_is_refused_unless_it_is_on_purpose(pool, argv, uninterrupted, flags, message):
    folder, _ = uninterrupted("1")
    with pytest.raises(CaseFailed) as failure:
        resume(pool, argv, folder, "1", *flags.split())
    assert message in failure.value.error and "--override-opt-param-scheduler" in failure.value.error
    assert len(resume(pool, argv, folder, "1", *flags.split(), "--override-opt-param-scheduler")[0]["losses"]) >= 3


def test_the_checkpoints_schedule_can_be_kept(pool, argv, uninterrupted):
    folder, straight = uninterrupted("DP2")
    flags = ("--lr", 2e-3, "--min-lr", 2e-4, "--use-checkpoint-opt-param-scheduler")
    for name in ("DP2", "1"):
        result = resume(pool, argv, folder, name, *flags)[0]
        assert result["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
        assert result["rates"] == straight["rates"][3:]


def test_a_damaged_checkpoint_is_named_and_the_previous_one_loads(pool, argv, uninterrupted, tmp_path):
    folder, straight = uninterrupted("1")
    damaged = tmp_path / "run"
    shutil.copytree(folder, damaged)
    shard = max((damaged / "iter_0000006").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(CaseFailed) as failure:
        pool.run([*argv, "--load", damaged])
    assert "truncated" in failure.value.error and "--ckpt-step 3" in failure.value.error
    assert resume(pool, argv, damaged, "1")[0]["losses"] == straight["losses"][3:]


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        ("--num-layers 2", "--num-layers 4, this run has 2"),
        ("--dllm-mask-token-id 7", "--dllm-mask-token-id 258, this run has 7"),
        ("--vocab-size 300", "--vocab-size 259, this run has 300"),
        ("--rotary-base 500000", "--rotary-base 10000, this run has 500000"),
        ("--no-swiglu", "--swiglu True, this run has False"),
    ),
)
def test_a_checkpoint_of_something_else_is_refused(pool, argv, uninterrupted, flags, message):
    folder, _ = uninterrupted("1")
    with pytest.raises(CaseFailed) as failure:
        pool.run([*argv, "--load", folder, *flags.split()])
    assert message in failure.value.error


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        ("--moe-ffn-hidden-size 96", "--moe-ffn-hidden-size 192, this run has 96"),
        ("--moe-layer-freq 2", "--moe-layer-freq 1, this run has 2"),
        ("--moe-layer-freq ([1]*4)", "--moe-layer-freq 1, this run has [1, 1, 1, 1]"),
        ("--moe-shared-expert-intermediate-size 64", "--moe-shared-expert-intermediate-size None, this run has 64"),
        ("--moe-latent-size 64", "--moe-latent-size None, this run has 64"),
    ),
)
def test_a_checkpoint_of_other_experts_is_refused(pool, argv, uninterrupted, flags, message):
    folder, _ = uninterrupted("experts 1")
    with pytest.raises(CaseFailed) as failure:
        resume(pool, argv, folder, "experts 1", *flags.split())
    assert message in failure.value.error


def test_a_run_killed_during_a_save_resumes_from_the_last_complete_checkpoint(pool, argv, tmp_path):
    argv = [*map(str, argv), "--train-iters", "400", "--save", str(tmp_path), "--save-interval", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.slow_disk", *argv],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    tracker, second = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "iter_0000006"
    deadline = time.monotonic() + 300
    while not second.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.poll() is None, (tmp_path / "log").read_text()[-2000:]
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert second.exists()
    assert tracker.read_text() == "3"
    result = pool.run([*argv, "--load", tmp_path, "--train-iters", "6", "--override-opt-param-scheduler"])[0]
    assert result["indices"][0][0] == [24, 25] and len(result["losses"]) == 3
    assert tracker.read_text() == "6"
