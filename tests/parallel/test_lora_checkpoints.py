"""Adapters in checkpoints and in folders: the weights beside them stay as they were, a run goes on in another layout,
and PEFT computes of what is exported what the run has trained."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dllm.models import target
from tests.checkpoints import saved_tensors
from tests.hf_models import make
from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, close, slow
from tests.parallel.hf import TRAIN
from tests.parallel.pool import CaseFailed
from tests.parallel.test_conversion import logits, tensors

TP2_EP2 = MIXTURE_OF_EXPERTS["TP2 SP EP2 ETP1"]
LORA = ("--lora-rank", "3", "--lora-alpha", "6", "--lr", "0.1")
# of the layouts some are of many ranks to a weight, some of one; of the targets some are parts of fused layers
RUNS = {
    "dream": (1, "--lora-targets q_proj v_proj gate_proj"),
    "nemotron": LAYOUTS["TP2 SP"],
    "llada": LAYOUTS["PP2 VPP2"],
    "llada_moe": MIXTURE_OF_EXPERTS["CP2 EP2"],
    "qwen3_moe": MIXTURE_OF_EXPERTS["DP2 EP2"],  # four experts on two ranks, see `command`
    "llada2": TP2_EP2,
    "glm4_moe": (2, f"{MIXTURE_OF_EXPERTS['PP2'][1]} --dllm-mask-token-id 2"),
}

few = lambda *names: [name if name in names else slow(name) for name in RUNS]
WITH_EXPERTS = ("qwen3_moe", "llada2", "glm4_moe", "llada_moe")


@pytest.fixture(scope="module")
def command(hf_folder, hf_command, tmp_path_factory):
    """command(name) -> (its folder, flags of a run that starts from it)."""
    four, _ = make("qwen3_moe", tmp_path_factory.mktemp("four"), shape=dict(num_experts=4))

    def get(name):
        path, argv = hf_folder(name)[0], hf_command(name)
        if name == "qwen3_moe":
            argv = [four if word == path else word for word in argv] + ["--dllm-mask-token-id", 2]
            path = four
        return path, [*argv, "--init-from-hf", *LORA]

    return get


@pytest.fixture(scope="module")
def trained(pool, command, tmp_path_factory):
    """trained(name) -> (folder it began from, its run of two steps, the result)."""
    made = {}

    def get(name):
        if name not in made:
            path, argv = command(name)
            run = tmp_path_factory.mktemp("trained") / "run"
            processes, flags = RUNS[name]
            made[name] = path, run, pool.run([*argv, *flags.split(), "--save", run, "--save-interval", 2], processes)
        return made[name]

    return get


def reloaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.parametrize("name", few("qwen3_moe", "llada2"))
def test_weights_stay_and_merging_adds_what_the_adapter_says(converter, trained, tmp_path, name):
    """W + (alpha / r) B A of every module, from the files alone, in the words of the family's own folder."""
    path, run, _ = trained(name)
    out = {kind: tmp_path / kind for kind in ("base", "merge", "adapter")}
    for kind, folder in out.items():
        converter.run("export", "--load", run, "--save", folder, "--lora", kind)
    before, base, merged = tensors(path), tensors(out["base"]), tensors(out["merge"])
    assert before.keys() == base.keys() and all(torch.equal(before[key], base[key]) for key in before)
    adapter = load_file(out["adapter"] / "adapter_model.safetensors")
    config = json.loads((out["adapter"] / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == path and config["r"] == 3 and config["lora_alpha"] == 6
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    for key in sorted(changed):
        delta = 2.0 * of_module(adapter, key)
        error = (merged[key] - base[key] - delta).abs().max()
        assert error < 1e-6 * max(1.0, delta.abs().max()), key
    words = ("norm", "embed", "lm_head", "mlp.gate.", "bias", "head.weight", "wte", "ln_f", "transformer.ff_out")
    matched = lambda key: any(key.removesuffix(".weight").endswith(f".{target}") for target in config["target_modules"])
    assert not any(matched(key) and any(word in key for word in words) for key in base)
    if name == "dream":
        assert len(changed) == 4 * 3
    else:
        targets = {key for key in base if not any(word in key for word in words)}
        # of these few tokens, some experts had none
        assert changed <= targets and all(".experts." in key for key in targets - changed)
        assert len([key for key in changed if ".experts." in key]) >= 8 * (name in WITH_EXPERTS)


def of_module(adapter: dict, key: str) -> torch.Tensor:
    """B A of one weight of a folder; of an expert, from the tensors of all of them."""
    place = "base_model.model." + key.removesuffix(".weight")
    if f"{place}.lora_A.weight" in adapter:
        return adapter[f"{place}.lora_B.weight"] @ adapter[f"{place}.lora_A.weight"]
    container, _, number, leaf = place.rsplit(".", 3)[0] + ".experts", *place.rsplit(".", 3)[1:]
    container += ".base_layer" if leaf != "down_proj" else ""
    matrix_A, matrix_B = adapter[f"{container}.lora_A.weight"], adapter[f"{container}.lora_B.weight"]
    experts = len(matrix_A) // (3 if leaf == "down_proj" else 6)
    number, own = int(number), len(matrix_A) // experts
    of_expert = matrix_A[number * own : (number + 1) * own]
    product = sum(
        matrix_B[:, r * experts + number : r * experts + number + 1] @ of_expert[r : r + 1] for r in range(own)
    )
    half = len(product) // 2
    return {"down_proj": product, "gate_proj": product[:half], "up_proj": product[half:]}[leaf]


@pytest.mark.parametrize("name", few("dream", "qwen3_moe", "glm4_moe"))
def test_peft_computes_the_same(converter, trained, tmp_path, name):
    peft = pytest.importorskip("peft")
    _, run, _ = trained(name)
    base = tmp_path / "base"
    export = ("export", "--load", run, "--save")
    converter.run(*export, base, "--lora", "base", "--export-as", "transformers")
    converter.run(*export, tmp_path / "merged", "--export-as", "transformers")
    converter.run(*export, tmp_path / "adapter", "--lora", "adapter", "--hf-model", base)
    merged, plain = logits(reloaded(tmp_path / "merged")), logits(reloaded(base))
    adapted = logits(peft.PeftModel.from_pretrained(reloaded(base), tmp_path / "adapter"))
    assert (adapted - merged).abs().max() < 1e-5 * merged.abs().max() < (plain - merged).abs().max()
    text = " ".join(f"w{i}" for i in range(4, 34))
    said = converter.run("check", "--hf-model", tmp_path / "merged", "--load", run, "--text", text)
    assert "30 tokens: equal." in said


# embedding and head in stages of their own, which have nothing to train
ENDS_ALONE = 4, "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|tt|tt|L"


@pytest.mark.parametrize(
    ("name", "first", "layout", "more"),
    (
        slow("nemotron", LAYOUTS["TP2 SP"], LAYOUTS["PP2"], ""),
        ("nemotron", LAYOUTS["TP2 SP"], (2, ""), "--use-distributed-optimizer"),
        ("qwen3_moe", RUNS["qwen3_moe"], TP2_EP2, ""),
        slow("nemotron", ENDS_ALONE, LAYOUTS["TP2 SP"], "--use-distributed-optimizer"),
        slow("nemotron", LAYOUTS["TP2 SP"], ENDS_ALONE, ""),
        slow("nemotron", ENDS_ALONE, ENDS_ALONE, "--bf16"),
        slow("nemotron", ENDS_ALONE, ENDS_ALONE, "--bf16 --use-distributed-optimizer"),
    ),
)
def test_a_run_goes_on_in_another_layout(pool, command, tmp_path, name, first, layout, more):
    _, argv = command(name)
    processes, flags = first
    argv = [*argv, *more.split(), "--lr", "1e-3", "--train-iters", 4, "--save-interval", 2, "--save", tmp_path]
    straight = pool.run([*argv, *flags.split()], processes)[-1]
    state = saved_tensors(tmp_path / "iter_0000004")
    moments = {key: value for key, value in state.items() if "exp_avg" in key}
    assert moments and all(".lora_" in key for key in moments)
    adapters = {key: value for key, value in state.items() if ".lora_" in key and not key.startswith("optimizer")}
    for moment in ("exp_avg.", "exp_avg_sq."):
        count = sum(value.numel() for key, value in moments.items() if moment in key)
        assert count == sum(value.numel() for value in adapters.values())
    shutil.rmtree(tmp_path / "iter_0000004")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    processes, flags = layout
    resumed = pool.run([*argv, *flags.split(), "--load", tmp_path, "--save", tmp_path / "on"], processes)[-1]
    assert close(resumed["losses"], straight["losses"][2:]) and close(resumed["grad_norms"], straight["grad_norms"][2:])
    on = saved_tensors(tmp_path / "on" / "iter_0000004")
    for key, value in state.items():
        if ".lora_" not in key and "weight" in key and "embedding" not in key and "output_layer" not in key:
            assert torch.equal(value, on[key])  # which has been the folder's, see above
        elif ".lora_" in key:
            assert torch.allclose(value, on[key], rtol=1e-3, atol=1e-6)


def test_adapters_begin_on_converted_and_on_trained_weights(pool, converter, command, hf_command, hf_folder, tmp_path):
    path, argv = command("dream")
    direct = pool.run(argv)[0]
    converter.run("import", "--hf-model", path, "--save", tmp_path / "imported")
    argv = [word for word in argv if word != "--init-from-hf"]
    processes, flags = LAYOUTS["PP2 VPP2"]
    argv += ["--load", tmp_path / "imported"]
    converted = pool.run([*argv, *flags.split(), "--save", tmp_path / "run", "--save-interval", 2], processes)[-1]
    assert close(converted["losses"], direct["losses"]) and close(converted["grad_norms"], direct["grad_norms"])
    # its checkpoint has them
    converter.run("export", "--load", tmp_path / "run", "--save", tmp_path / "merged")
    before, merged = tensors(path), tensors(tmp_path / "merged")
    assert len([key for key in before if not torch.equal(before[key], merged[key])]) == 4 * 7
    again = pool.run([*argv[:-1], tmp_path / "run", "--finetune"])[0]
    assert not close(again["losses"][0], direct["losses"][0], 1e-3)
    full = [*hf_command("dream"), "--init-from-hf", "--save", tmp_path / "full", "--save-interval", 2]
    pool.run(full)
    with pytest.raises(CaseFailed, match="was trained without adapters: give --finetune to begin --lora-rank 3"):
        pool.run([*argv[:-1], tmp_path / "full"])
    assert len(pool.run([*argv[:-1], tmp_path / "full", "--finetune"])[0]["losses"]) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    (
        (["--lora-rank", "4"], "holds adapters of --lora-rank 3 --lora-alpha 6 .*and this run has --lora-rank 4"),
        (["--lora-alpha", "7"], "use the same"),
        (["--lora-targets", "q_proj"], "--lora-targets q_proj,v_proj,gate_proj, and this run has .*q_proj: use"),
        (None, "holds adapters beside its weights: give --lora-rank 3 .* to train them on, or export the run"),
    ),
)
def test_other_adapters_are_refused(pool, hf_command, trained, changes, why):
    _, run, _ = trained("dream")
    argv = [*hf_command("dream"), "--load", run]
    if changes is not None:
        argv += [*LORA, *RUNS["dream"][1].split(), *changes]
    with pytest.raises(CaseFailed, match=why) as failure:
        pool.run(argv)
    assert failure.value.error.startswith("ValueError")


def test_what_has_no_adapter_or_no_form_is_refused(converter, pool, command, hf_command, hf_folder, trained, tmp_path):
    export = ("export", "--save", tmp_path / "out", "--lora", "adapter", "--load")
    path, run, _ = trained("dream")
    with pytest.raises(ValueError, match="holds adapters beside its weights: export the run"):
        target.describe(str(run))
    other = shutil.copytree(path, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][3, 1] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    said = converter.run(*export, run, "--hf-model", other, code=2)
    assert "model.layers.2.mlp.down_proj.weight of" in said and "is not what the adapters of" in said
    assert list(tmp_path.iterdir()) == [other]
    converter.run("import", "--hf-model", path, "--save", tmp_path / "imported")
    assert "holds no adapters: leave out --lora." in converter.run(*export, tmp_path / "imported", code=2)
    argv = [*hf_command("llada2 merged"), "--init-from-hf", *LORA, "--save", tmp_path / "packed"]
    pool.run([*argv, "--save-interval", 2])
    said = converter.run(*export, tmp_path / "packed", code=2)
    assert "keeps the experts of a layer in one tensor in code of its own" in said and not (tmp_path / "out").exists()
    merged = tmp_path / "merged"
    converter.run("export", "--save", merged, "--load", tmp_path / "packed")
    assert tensors(merged).keys() == tensors(hf_folder("llada2 merged")[0]).keys()


@pytest.mark.slow
def test_every_few_steps_a_folder_of_merged_weights(pool, command, tmp_path):
    path, argv = command("dream")
    pool.run([*argv, "--save", tmp_path / "run", "--save-interval", 2, "--save-hf-interval", 2])
    before, after = tensors(path), tensors(tmp_path / "run" / "hf_0000002")
    assert before.keys() == after.keys() and len([k for k in before if not torch.equal(before[k], after[k])]) == 4 * 7


assert TRAIN[TRAIN.index("--train-iters") + 1] == "2"  # what these runs save after
