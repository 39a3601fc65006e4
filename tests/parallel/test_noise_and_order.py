"""What a sample experiences is a function of (seed, sample index): same noise, order and curve everywhere."""

import pytest

from tests.parallel.cases import TINY, write_chat, write_text

# 8 ways to train on a global batch of 8: (processes, micro-batch, flags)
SPLITS = {
    "1 x 8": (1, 8, ""),
    "1 x 1, accumulate 8": (1, 1, ""),
    "DP2 x 4": (2, 4, ""),
    "DP2 x 1, accumulate 4": (2, 1, ""),
    "DP4 x 2": (4, 2, ""),
    "TP2 x 2": (2, 2, "--tensor-model-parallel-size 2"),
    "PP2 VPP2 x 1": (2, 1, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "DP2 CP2 x 2": (4, 2, "--context-parallel-size 2"),
}
STEPS = 3


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise")
    return [*TINY, "--data-path", write_text(folder), "--split", "100,0,0"]


def experienced(pool, argv, processes, micro_batch, flags, **options):
    """(sample index -> hash of its noise, per step the set of sample indices) over all ranks."""
    # the last --micro-batch-size wins
    results = pool.run([*argv, "--micro-batch-size", micro_batch, *flags.split()], processes, **options)
    noise, steps = {}, [set() for _ in results[0]["indices"]]
    for result in results:
        for index, digest in result["noise"].items():
            assert noise.setdefault(index, digest) == digest, f"peers disagree on sample {index}"
        for step, batches in enumerate(result["indices"]):
            for batch in batches:
                steps[step] |= set(batch)
    return noise, steps, results


@pytest.fixture(scope="module")
def reference(pool, argv):
    return experienced(pool, argv, *SPLITS["1 x 8"])


@pytest.mark.parametrize("name", SPLITS)
def test_split(pool, argv, reference, name):
    noise, steps, results = experienced(pool, argv, *SPLITS[name])
    assert noise == reference[0] and len(noise) == 8 * STEPS
    assert steps == reference[1] == [set(range(8 * k, 8 * k + 8)) for k in range(STEPS)]
    assert results[-1]["losses"] == pytest.approx(reference[2][0]["losses"], rel=1e-5)


def test_another_seed_is_other_noise_order_and_weights(pool, argv, reference):
    noise, _, results = experienced(pool, [*argv, "--seed", "4321"], *SPLITS["1 x 8"])
    assert not set(noise.values()) & set(reference[0].values())
    assert abs(results[0]["losses"][0] - reference[2][0]["losses"][0]) > 1e-3


def test_dropout_does_not_touch_the_noise(pool, argv, reference):
    flags = "--attention-dropout 0.1 --hidden-dropout 0.1"
    noise, _, results = experienced(pool, argv, 1, 8, flags)
    assert noise == reference[0]
    assert results[0]["losses"] != reference[2][0]["losses"]


def test_drawing_more_random_numbers_does_not_touch_the_noise(pool, argv, reference):
    noise, _, results = experienced(pool, argv, *SPLITS["1 x 8"], draw_extra=True)
    assert noise == reference[0] and results[0]["losses"] == reference[2][0]["losses"]


def test_loader_workers_do_not_touch_the_noise(pool, argv, reference):
    _, steps, results = experienced(pool, argv, 1, 8, "--num-workers 2")
    assert steps == reference[1] and results[0]["losses"] == reference[2][0]["losses"]


def test_another_epoch_is_another_order_and_other_noise(pool, argv):
    """More steps than one epoch has sequences: the same text comes again, under other noise."""
    argv = [*argv, "--train-iters", "14"]
    noise, steps, _ = experienced(pool, argv, *SPLITS["1 x 8"])
    assert len(noise) == 14 * 8 and len(set(noise.values())) == 14 * 8


def test_peers_that_differ_are_stopped(pool, argv):
    from tests.parallel.pool import CaseFailed

    with pytest.raises(CaseFailed) as failure:
        pool.run([*argv, "--tensor-model-parallel-size", "2"], 2, disturb_rank=1)
    assert "peers of one data-parallel rank hold different batches" in failure.value.error


def test_validation_reads_the_same_samples_under_the_same_noise(pool, tmp_path):
    """Three evaluations of a model that does not move (lr 0) give one number, whatever the run's seed."""
    data = ["--data-path", write_text(tmp_path), "--split", "60,40,0"]
    flags = "--lr 0 --min-lr 0 --weight-decay 0 --eval-interval 1 --eval-iters 2 --init-method-std 0.1".split()
    run = lambda *more: pool.run([*TINY, *data, *flags, *more])[0]["evaluations"]
    evaluations = run()
    assert len(evaluations) >= 3
    assert len({e["loss"] for e in evaluations}) == 1
    # another batch size reads the same 16 samples in another cut
    again = run("--eval-global-batch-size", "16", "--eval-iters", "1", "--eval-micro-batch-size", "4")
    assert again[0]["loss"] == pytest.approx(evaluations[0]["loss"], rel=1e-6)


def test_nothing_to_score_is_loss_zero_and_zero_gradients(pool, tmp_path):
    import json

    path = tmp_path / "unsupervised.jsonl"
    messages = [dict(role="user", content="much too long " * 20), dict(role="assistant", content="cut off")]
    path.write_text(json.dumps(dict(messages=messages)) + "\n")
    argv = [*TINY, "--sft-data-path", path, "--weight-decay", "0"]
    for processes, flags in ((1, ""), (2, ""), (2, "--tensor-model-parallel-size 2"), (2, "--context-parallel-size 2")):
        for result in pool.run([*argv, *flags.split()], processes):
            assert result["grad_norms"] == [0.0] * 3
        assert result["losses"] == [0.0] * 3


def test_chat_order_is_a_function_of_seed_and_epoch(pool, tmp_path):
    """A run that asks for more iterations begins with the same samples."""
    argv = [*TINY, "--sft-data-path", write_chat(tmp_path)]
    short, _, _ = experienced(pool, argv, *SPLITS["1 x 8"])
    long, _, _ = experienced(pool, [*argv, "--train-iters", "7"], *SPLITS["DP2 x 4"])
    assert short.items() <= long.items()
