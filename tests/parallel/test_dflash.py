"""Drafts are trained alike in every layout, of themselves and of their target; gradients equal a naive computation."""

import re

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.hf_models import VOCABULARY
from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, Family, close
from tests.parallel.hf import TRAIN, write_words

DRAFT = "--dllm-mode dflash --num-layers 2 --dllm-block-size 4 --dflash-num-anchors 8 --cp-comm-type all_gather"
HEADS = "--num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 48"
CHAT = "TP2|TP4|TP2 SP|CP2 all_gather|DP2|recompute full|TP2 SP CP2|DP2 CP2".split("|")
VARIANTS = {
    "causal block, window": "--dflash-causal-block --dflash-window 6 --dflash-anchor-sampling overlap",
    "variable prefix": "--dflash-loss variable-prefix",
    "automodel": "--dflash-anchor-sampling nonoverlap --dllm-compat automodel --dflash-loss-decay 2.5",
}
OBJECTIVES = {
    "dpace": ("chat", "--dflash-loss dpace --dflash-dpace-alpha 0.3"),
    "kl": ("text", "--dflash-kl-weight 1 --dflash-kl-temperature 2 --dflash-loss-decay inf --dflash-target-layers 0 2"),
    "dpace and kl": ("text", "--dflash-loss dpace --dflash-kl-weight 0.4 --eval-iters 2 --eval-interval 1000"),
}


def write_text(folder) -> str:
    """Documents of 3 to 40 tokens, packed: some are shorter than a block, some longer than a sequence."""
    prefix, draw = str(folder / "text"), torch.Generator().manual_seed(2)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for i in range(60):
        ids = torch.randint(4, VOCABULARY, (3 + (i * 11) % 38,), generator=draw).tolist() + [1]
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(prefix + ".idx")
    return prefix


@pytest.fixture(scope="module")
def drafts(pool, hf_folder, tmp_path_factory):
    """drafts(target, data, *flags): the single process, and what is compared with it."""
    folder = tmp_path_factory.mktemp("data")
    data = dict(
        chat=["--sft-data-path", write_words(folder)], text=["--data-path", write_text(folder), "--split", "80,20,0"]
    )
    made = {}

    def get(target, kind, *flags):
        key = (target, kind, *flags)
        if key not in made:
            argv = [*TRAIN, "--dflash-target", hf_folder(target)[0], *f"{DRAFT} {' '.join(flags)}".split(), *data[kind]]
            made[key] = Family(pool, tmp_path_factory.mktemp("reference"), argv)
        return made[key]

    return get


@pytest.mark.parametrize(("target", "kind"), [("qwen3 tied", "chat"), ("llama", "text"), ("llada2", "chat")])
def test_the_single_process_equals_the_naive_computation(drafts, target, kind):
    reference = drafts(target, kind, HEADS if target == "llada2" else "").reference
    assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
    assert reference["grad_error"] < 2e-6 and reference["grad_norms"][0] > 0.1
    (report, *_) = reference["reports"]
    assert 0 <= report["draft accuracy"] < 0.5 and 1 <= report["accepted tokens a block"] < 3


@pytest.mark.parametrize("layout", CHAT)
def test_chat(drafts, layout):
    family = drafts("qwen3 tied", "chat")
    reports = family.check(*LAYOUTS[layout])[-1]["reports"], family.reference["reports"]
    measured = [
        [{name: x for name, x in report.items() if name.startswith(("draft ", "accepted "))} for report in of]
        for of in reports
    ]
    assert len(measured[1][0]) == 5  # sums over all ranks, divided once
    assert measured[0] == [{name: pytest.approx(x, rel=1e-6) for name, x in report.items()} for report in measured[1]]


@pytest.mark.parametrize("layout", ("TP2 SP", "CP2 all_gather"))
def test_packed_text(drafts, layout):
    drafts("llama", "text").check(*LAYOUTS[layout])


@pytest.mark.parametrize("layout", ("TP2", "DP2"))
def test_targets_with_experts(drafts, layout):
    drafts("llada2", "chat", HEADS).check(*LAYOUTS[layout])


@pytest.mark.parametrize("layout", ("TP2", "TP2 SP", "CP2 all_gather", "DP2"))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives(drafts, objective, layout):
    """The nll and the divergence are reported by name, what is trained as `loss`."""
    kind, flags = OBJECTIVES[objective]
    family = drafts("llama" if kind == "text" else "qwen3 tied", kind, flags)
    reference = family.reference
    assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
    assert reference["grad_error"] < 2e-6 and reference["grad_norms"][0] > 0.1
    assert [sorted(e)[-2:] for e in reference["evaluations"]] == [["kl loss", "loss"]] * ("eval" in flags)
    reports = family.check(*LAYOUTS[layout])[-1]["reports"]
    for report, single in zip(reports, reference["reports"], strict=True):
        assert ("kl loss" in report) == ("kl" in flags)
        for name in report.keys() & {"dllm loss", "kl loss", "draft accuracy", "accepted tokens a block"}:
            assert close(report[name], single[name])


@pytest.mark.parametrize(
    ("target", "kind", "layout"),
    [
        # of the chat samples some are longer than others, and some have no block that counts
        ("llada2", "chat", "DP2 EP2"),
        ("llada2", "chat", "TP2 SP EP2 ETP1"),
        ("qwen3_moe", "text", "TP2 SP EP2 ETP2"),
        ("qwen3_moe", "text", "CP2 EP2"),
    ],
)
def test_experts_of_the_target_are_shared_out(drafts, target, kind, layout):
    processes, flags = MIXTURE_OF_EXPERTS[layout]
    family = drafts(target, kind, HEADS)
    results = family.check(processes, f"{flags} --cp-comm-type all_gather")
    shares = 2 * (2 if "ETP2" in layout else 1)
    assert {result["target_experts"] * shares for result in results} == {family.reference["target_experts"]}


def test_experts_and_the_distributed_optimizer(drafts):
    flags = "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
    drafts("llada2", "chat", HEADS).check(2, flags, gradients=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(drafts, variant):
    family = drafts("qwen3 tied", "chat", VARIANTS[variant])
    assert family.reference["grad_error"] < 2e-6
    family.check(*LAYOUTS["TP2 SP"])


def test_bf16_within_its_rounding(drafts):
    family = drafts("qwen3 tied", "chat")
    processes, flags = LAYOUTS["TP2 SP"]
    result = family.run(processes, f"{flags} --bf16 --accumulate-allreduce-grads-in-fp32")[-1]
    assert close(result["losses"], family.reference["losses"], 2e-2)
    assert close(result["grad_norms"], family.reference["grad_norms"], 5e-2)


def test_distributed_optimizer(drafts):
    flags = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
    drafts("qwen3 tied", "chat").check(2, flags, gradients=False)


def test_an_overfitted_draft_is_accepted(pool, hf_folder, tmp_path):
    """What is learned is what decoding asks for: of a text that the target writes itself, nearly all is guessed."""
    target = hf_folder("llama")[0]
    plan = dict(hf_model=target, mode="hybrid", mask_token_id=2)
    prompt, new = [10, 20, 30, 40], dict(mode="ar", max_new_tokens=44)
    written = pool.run([], 1, function="tests.parallel.sampling:write", plan=plan, configs=[new], prompts=[prompt])
    text = prompt + written[0]["ids"][0][0]
    assert len(set(text)) > 8
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    for _ in range(40):
        builder.add_document(np.array(text), [len(text)])
    builder.finalize(str(tmp_path / "text.idx"))
    flags = f"""{DRAFT} --data-path {tmp_path}/text --split 100,0,0 --seq-length {len(text)} --train-iters 60 --lr 1e-2
        --dflash-num-anchors 40 --dflash-eval-interval 30 --dflash-eval-prompts 1 --dflash-eval-tokens 36"""
    (result,) = pool.run([*TRAIN, "--dflash-target", target, *flags.split()], 1)
    yields = [
        float(found) for found in re.findall(r"tokens per pass of the target at iteration \d+: (\S+)", result["output"])
    ]
    assert len(yields) == 2 and yields[1] > 0.9 * 4
    assert result["reports"][-1]["accepted tokens a block"] > 3.9 > 2 > result["reports"][0]["accepted tokens a block"]
