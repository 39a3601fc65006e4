"""Runs that train a draft: resumed in other layouts, exported, and beside a target that is a run itself."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dllm.checkpoint import RELEASE, draft_defaults
from tests.hf_models import VOCABULARY
from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS
from tests.parallel.hf import TRAIN, write_words
from tests.parallel.pool import CaseFailed
from tests.parallel.test_dflash import DRAFT, HEADS


@pytest.fixture(scope="module")
def argv(hf_folder, tmp_path_factory):
    data = write_words(tmp_path_factory.mktemp("data"))
    return [*TRAIN, "--dflash-target", hf_folder("qwen3 tied")[0], *DRAFT.split(), "--sft-data-path", data]


@pytest.fixture(scope="module")
def trained(pool, argv, tmp_path_factory):
    """(folder, what was observed) of three steps under TP2, with prefixes to be drawn again."""
    folder = tmp_path_factory.mktemp("run") / "run"
    processes, flags = LAYOUTS["TP2"]
    flags = [*flags.split(), *"--train-iters 3 --dflash-loss variable-prefix --save-interval 1".split()]
    results = pool.run([*argv, *flags, "--save", folder, "--save-hf-interval", 3], processes)
    return folder, results[-1]


@pytest.mark.parametrize("layout", ("1", "DP2"))
def test_another_layout_goes_on_with_the_same_blocks(pool, argv, trained, layout):
    folder, straight = trained
    processes, flags = LAYOUTS.get(layout, (1, ""))
    flags = [*flags.split(), *"--train-iters 3 --dflash-loss variable-prefix".split()]
    results = pool.run([*argv, *flags, "--load", folder, "--ckpt-step", 1], processes)
    assert results[-1]["losses"] == pytest.approx(straight["losses"][1:], rel=1e-5)
    assert results[-1]["grad_norms"] == pytest.approx(straight["grad_norms"][1:], rel=1e-5)
    blocks = {index: digest for result in results for index, digest in result["noise"].items()}
    assert len(blocks) >= 8 and blocks.items() <= straight["noise"].items()


def test_what_a_draft_was_trained_for_must_be_the_same(pool, argv, trained, hf_folder, tmp_path):
    """Or else it is a new start from its weights. The target is known by what is in its folder, not by its path."""
    go_on = [*argv, *"--dflash-loss variable-prefix --train-iters 3 --load".split(), trained[0], "--ckpt-step", 1]
    target = Path(shutil.copytree(hf_folder("qwen3 tied")[0], tmp_path / "moved"))
    assert pool.run([*go_on, "--dflash-target", target])[-1]["losses"] == pytest.approx(
        trained[1]["losses"][1:], rel=1e-5
    )
    weights = load_file(target / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    cases = {
        f"--dflash-target {target}": "beside another target than --dflash-target",
        "--dllm-block-size 8": "--dllm-block-size 4, this run has 8: use the same",
        "--dflash-causal-block": "--dflash-causal-block False, this run has True: use the same",
        "--dflash-window 6": "--dflash-window None, this run has 6: use the same",
    }
    for flags, sentence in cases.items():
        with pytest.raises(CaseFailed, match=sentence):
            pool.run([*go_on, *flags.split()])
        pool.run([*go_on, *flags.split(), "--finetune", "--train-iters", 1])


def test_block_size_and_mask_token_come_with_the_checkpoint(pool, argv, trained, converter, tmp_path):
    """As they do with a folder."""
    place = argv.index("--dllm-block-size")
    bare = [*argv[:place], *argv[place + 2 :]]
    flags = "--dflash-loss variable-prefix --train-iters 3 --ckpt-step 1 --load".split()
    assert pool.run([*bare, *flags, trained[0]])[-1]["losses"] == pytest.approx(trained[1]["losses"][1:], rel=1e-5)
    converter.run("export", "--load", trained[0], "--save", tmp_path / "out")
    converter.run("import", "--hf-model", tmp_path / "out", "--save", tmp_path / "run")
    starts = ["--hf-model", tmp_path / "out", "--init-from-hf"], ["--load", tmp_path / "run"]
    first, second = (pool.run([*bare, *start])[-1]["losses"] for start in starts)
    assert first == second
    folder = tmp_path / "run" / RELEASE
    assert draft_defaults(str(tmp_path / "run"), None) == draft_defaults(str(folder), None) == {
        "dllm_block_size": 4, "dllm_mask_token_id": 2
    }  # fmt: skip
    assert draft_defaults(str(tmp_path / "nothing"), None) == draft_defaults(str(tmp_path), 7) == {}


def test_a_trained_draft_is_exported(pool, argv, trained, converter, tmp_path):
    """As a folder of the published layout, which is imported again bit by bit; and while it is trained. The folder and
    the checkpoint that is made of it are trained further alike."""
    run, _ = trained
    out, again = tmp_path / "out", tmp_path / "again"
    converter.run("export", "--load", run, "--save", out)
    assert "tokens: equal." in converter.run("check", "--hf-model", out, "--load", run)
    converter.run("import", "--hf-model", out, "--save", tmp_path / "imported")
    converter.run("export", "--load", tmp_path / "imported", "--save", again)
    weights = [load_file(folder / "model.safetensors") for folder in (out, again, run / "hf_0000003")]
    names = "input_layernorm post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj".split()
    names += [f"self_attn.{x}" for x in "q_proj k_proj v_proj o_proj q_norm k_norm".split()]
    expected = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in names}
    assert set(weights[0]) == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for others in weights[1:]:
        assert others.keys() == weights[0].keys()
        assert all(torch.equal(others[name], tensor) for name, tensor in weights[0].items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (out, again, run / "hf_0000003")]
    assert configs[0] == configs[1] == configs[2]
    assert {key: configs[0][key] for key in ("architectures", "block_size", "num_target_layers", "vocab_size")} == dict(
        architectures=["DFlashDraftModel"], block_size=4, num_target_layers=4, vocab_size=VOCABULARY
    )
    assert configs[0]["dflash_config"] == dict(mask_token_id=2, target_layer_ids=[1, 1])
    assert configs[0]["mask_token_id"] == 2 and configs[0]["rope_theta"] == 5000
    assert (out / "tokenizer.json").exists()  # the target's
    starts = ["--init-from-hf"], ["--load", tmp_path / "imported"]
    first, second = (pool.run([*argv, "--hf-model", out, *flags])[-1]["losses"] for flags in starts)
    assert first == second


def test_what_a_folder_cannot_say_is_not_exported(pool, argv, trained, converter, tmp_path):
    """The run's own folder says it; one that was exported without is another network, with the same weights."""
    run, out = tmp_path / "run", tmp_path / "out"
    flags = "--dflash-causal-block --dflash-window 6"
    pool.run([*argv, *flags.split(), "--train-iters", 1, "--save", run, "--save-interval", 1])
    said = converter.run("export", "--load", run, "--save", out, code=2)
    assert f"cannot say {flags}" in said and "decode with the run's folder" in said and not out.exists()
    converter.run("export", "--load", trained[0], "--save", out)
    said = converter.run("check", "--hf-model", out, "--load", run, code=2)
    assert f"was trained with {flags}" in said and "is another network" in said
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | dict(block_size=8)))
    said = converter.run("check", "--hf-model", out, "--load", trained[0], code=2)
    assert "has --dllm-block-size 8" in said and "4: they are not of one model" in said


def test_ranks_that_share_experts_of_the_target(pool, argv, converter, hf_folder, tmp_path):
    """What they save is a draft like any other: another layout goes on with it, it is exported, and decodes."""
    command = [*argv, "--dflash-target", hf_folder("llada2")[0], *HEADS.split(), "--train-iters", 3]
    processes, flags = MIXTURE_OF_EXPERTS["DP2 EP2"]
    run, out = tmp_path / "run", tmp_path / "out"
    straight = pool.run([*command, *flags.split(), "--save", run, "--save-interval", 1], processes)[-1]
    results = pool.run([*command, "--load", run, "--ckpt-step", 1], 1)
    assert results[-1]["losses"] == pytest.approx(straight["losses"][1:], rel=1e-5)
    converter.run("export", "--load", run, "--save", out)
    assert "tokens: equal." in converter.run("check", "--hf-model", out, "--load", run)
    configs = [dict(max_new_tokens=9), dict(max_new_tokens=9, mode="ar")]
    case = dict(function="tests.parallel.sampling:write", plan=dict(path=str(run)), configs=configs)
    drafted, alone = pool.run([], 1, **case, prompts=[[10, 20, 30]])[0]["ids"]
    assert drafted == alone


def test_prompts_fill_the_positions_of_the_target(pool, argv):
    """One position is left for them, of the 33 that there are."""
    flags = "--max-position-embeddings 33 --dflash-eval-interval 1 --dflash-eval-tokens 32 --dflash-eval-prompts 3"
    (result,) = pool.run([*argv, *flags.split()], 1)
    assert result["output"].count("tokens per pass of the target at iteration") == 2


def test_a_target_may_be_a_run(pool, argv, trained, converter, hf_folder, tmp_path):
    """One imported from that folder gives the same losses; a draft's is refused."""
    converter.run("import", "--hf-model", hf_folder("qwen3 tied")[0], "--save", tmp_path / "target")
    flags = [*LAYOUTS["TP2"][1].split(), "--dflash-loss", "variable-prefix", "--train-iters", 3]
    result = pool.run([*argv, *flags, "--dflash-target", tmp_path / "target"], 2)[-1]
    assert result["losses"] == trained[1]["losses"]
    with pytest.raises(CaseFailed, match="holds a draft itself: name the model that it drafts for"):
        pool.run([*argv, "--dflash-target", trained[0]])


@pytest.mark.parametrize("layout", ("1", "DP2", "CP2 all_gather"))
def test_samples_that_count_are_told(pool, argv, layout):
    processes, flags = LAYOUTS.get(layout, (1, ""))
    told = lambda results: [r["output"].count("a global batch of training data has no token to score") for r in results]
    counted = lambda results: [report["samples that count"] for report in results[-1]["reports"]]
    results = pool.run([*argv, *flags.split()], processes)
    assert counted(results) == [2, 4] and not any(told(results))
    results = pool.run([*argv, "--dllm-block-size", 16, *flags.split()], processes)
    assert counted(results) == [0, 0] and told(results) == [1, 0][:processes]
