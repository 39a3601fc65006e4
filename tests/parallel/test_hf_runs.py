"""Runs that start from a Hugging Face folder: how they go on, new tokens, and the routers' biases."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from megatron_dllm.noise import hashed_seed
from tests.checkpoints import saved_tensors
from tests.hf_models import VOCABULARY
from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, close
from tests.parallel.pool import CaseFailed

EMBEDDING = "embedding.word_embeddings.weight"
NEW = VOCABULARY  # the id of a token that the folder does not have
ONE_MORE = ["--vocab-size", VOCABULARY + 1, "--dllm-mask-token-id", NEW]
BALANCED = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1".split()


def weights(run, iteration: int, part: str) -> dict[str, torch.Tensor]:
    """The model's weights of a checkpoint whose names contain `part`."""
    wanted = lambda name: part in name and "optimizer" not in name
    return saved_tensors(run / f"iter_{iteration:07d}", wanted)


def biases_of(path: str) -> dict[str, torch.Tensor]:
    """The folder's, under the names of a checkpoint."""
    saved = load_file(f"{path}/model.safetensors")
    return {
        key.replace("model.", "decoder.", 1).replace("gate", "router"): value
        for key, value in saved.items()
        if "expert_bias" in key
    }


def test_the_same_command_resumes(pool, hf_command, tmp_path):
    argv = [*hf_command("llada2"), "--init-from-hf", "--train-iters", 4, "--save-interval", 2]
    argv += ["--save", tmp_path / "run", "--load", tmp_path / "run"]
    straight = pool.run(argv)[0]
    assert "note:" not in straight["output"] and len(straight["losses"]) == 4
    shutil.rmtree(tmp_path / "run" / "iter_0000004")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = pool.run(argv)[0]
    assert "iter_0000002; --init-from-hf is for the first start." in resumed["output"]
    assert resumed["losses"] == straight["losses"][2:] and resumed["indices"] == straight["indices"][2:]


def test_converted_weights_that_were_trained_on(pool, converter, hf_command, hf_folder, tmp_path):
    """In one folder with what became of them: the run goes on, and nobody takes one for the other."""
    run = tmp_path / "run"
    converter.run("import", "--hf-model", hf_folder("dream")[0], "--save", run)
    argv = [*hf_command("dream"), "--save", run, "--save-interval", 2]
    direct = pool.run([*argv, "--load", run / "release"])[0]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
    with pytest.raises(CaseFailed, match="has been trained further in .*run: for a new start from it"):
        pool.run([*argv, "--load", run / "release"])
    resumed = pool.run([*argv, "--load", run, "--train-iters", 4, "--override-opt-param-scheduler"])[0]
    assert len(resumed["losses"]) == 2 and resumed["indices"][0] != direct["indices"][0]


@pytest.mark.parametrize("name", ("dream", "qwen3 tied"))
def test_rows_for_new_tokens_are_drawn_alike(pool, hf_command, hf_folder, tmp_path, name):
    argv = [*hf_command(name), "--init-from-hf", *ONE_MORE, "--lr", 0, "--train-iters", 1, "--save-interval", 1]
    results, saved = {}, {}
    for layout in ("one micro-batch", "TP2 SP", "PP2"):
        processes, flags = LAYOUTS[layout]
        flags = flags.replace("--micro-batch-size 8", "")
        results[layout] = pool.run([*argv, *flags.split(), "--save", tmp_path / layout], processes)[-1]
        saved[layout] = weights(tmp_path / layout, 1, "weight")
    heads = {EMBEDDING: 1.0} | ({"output_layer.weight": 1.0} if name == "dream" else {})
    for layout, state in saved.items():
        assert close(results[layout]["losses"], results["PP2"]["losses"])
        assert close(results[layout]["grad_norms"], results["PP2"]["grad_norms"])
        assert heads.keys() == {key for key in state if key in (EMBEDDING, "output_layer.weight")}
        for key in heads:
            draw = torch.Generator().manual_seed(hashed_seed(hashed_seed(1234, "weights", key), NEW))
            assert torch.equal(state[key][NEW], torch.empty(40).normal_(0, 0.02, generator=draw))
            assert not state[key][NEW + 1 :].any()
    theirs = hf_folder(name)[1].get_input_embeddings().weight
    assert torch.equal(saved["TP2 SP"][EMBEDDING][:VOCABULARY], theirs)


def test_new_tokens_are_exported(pool, converter, hf_command, hf_folder, tmp_path):
    argv = [*hf_command("dream"), "--init-from-hf", *ONE_MORE, "--save", tmp_path / "run", "--save-interval", 2]
    processes, flags = LAYOUTS["TP2 SP"]
    pool.run([*argv, *flags.split()], processes)
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY + 1 and config["mask_token_id"] == NEW
    trained, exported = weights(tmp_path / "run", 2, "weight"), load_file(tmp_path / "out" / "model.safetensors")
    for ours, theirs in ((EMBEDDING, "model.embed_tokens.weight"), ("output_layer.weight", "lm_head.weight")):
        assert torch.equal(exported[theirs], trained[ours][: VOCABULARY + 1])


def test_a_vocabulary_below_the_folders_is_refused(pool, hf_command):
    with pytest.raises(CaseFailed, match="the embedding only 90 rows") as failure:
        pool.run([*hf_command("dream"), "--init-from-hf", "--vocab-size", VOCABULARY - 1])
    assert failure.value.error.startswith("ValueError")


@pytest.mark.parametrize("name", ("qwen3_moe", "llada2"))
def test_padding_is_not_balanced(pool, hf_command, name):
    """Batches padded to 32 tokens have the balancing loss of batches padded to their longest row."""
    argv = [*hf_command(name), "--init-from-hf"]
    plain, short, long = (
        pool.run([*argv, *flags])[0] for flags in ((), BALANCED, (*BALANCED, "--pad-seq-len-divisible", 32))
    )
    assert short["reports"][0]["processed tokens"] < long["reports"][0]["processed tokens"]
    assert close(short["losses"], long["losses"]) and close(short["grad_norms"], long["grad_norms"])
    assert abs(short["grad_norms"][0] - plain["grad_norms"][0]) > 1e-3


def trained_biases(pool, argv, run, processes=1):
    """The routers' biases after two steps."""
    pool.run([*argv, "--init-from-hf", "--save", run, "--save-interval", 2], processes)
    return weights(run, 2, "expert_bias")


@pytest.mark.parametrize("flags", ("", "--bf16", "--bf16 --use-distributed-optimizer"))
def test_biases_of_a_released_model_stay_as_they_are(pool, hf_command, hf_folder, tmp_path, flags):
    expected = biases_of(hf_folder("llada2")[0])
    got = trained_biases(pool, [*hf_command("llada2"), *flags.split()], tmp_path)
    assert got.keys() == expected.keys() and len(got) == 3
    for name, bias in got.items():
        assert bias.dtype == torch.float32 and torch.equal(bias, expected[name])
        assert not torch.equal(bias, bias.bfloat16().float())


LEARNING = ["--moe-router-bias-update-rate", 0.01]
BATCHES = {
    "more padding": (1, "--pad-seq-len-divisible 32"),
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    **{name: MIXTURE_OF_EXPERTS[name] for name in ("DP2 EP2", "TP2 SP EP2 ETP1", "PP2", "CP2")},
}


@pytest.fixture(scope="module")
def learned_alone(pool, hf_command, tmp_path_factory):
    return trained_biases(pool, [*hf_command("llada2"), *LEARNING], tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", BATCHES)
def test_biases_learn_from_all_tokens_and_no_padding(pool, hf_command, hf_folder, learned_alone, tmp_path, name):
    processes, flags = BATCHES[name]
    got = trained_biases(pool, [*hf_command("llada2"), *LEARNING, *flags.split()], tmp_path, processes)
    for key, start in biases_of(hf_folder("llada2")[0]).items():
        assert torch.equal(got[key], learned_alone[key])
        steps = (got[key] - start) / 0.01
        assert steps.abs().max() > 0.9 and torch.allclose(steps, steps.round(), atol=1e-4)
