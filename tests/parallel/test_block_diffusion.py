"""block_diffusion in every layout: losses, gradient norms, gradients against the naive computation."""

import json

import pytest

from tests.parallel.cases import ANSWERS, TINY, write_text
from tests.parallel.families import DISTRIBUTED_OPTIMIZER, LAYOUTS, MIXTURE_OF_EXPERTS, Family, close, slow

# canvases of 5 tokens: no layout divides them; the learning rate: at the usual one, steps amplify rounding
MODE = "--dllm-mode block_diffusion --dllm-block-size 5 --lr 3e-4"
SELECTED = f"{MODE} --encoder-ar-loss-weight 0.6"
ALL = f"{MODE} --block-diffusion-canvases all"
SOME = f"{MODE} --block-diffusion-canvases 3 --encoder-ar-loss-weight 0.6"
SHORT = f"{MODE} --block-diffusion-canvases 2 --no-block-diffusion-eos-fill --encoder-ar-loss-weight 0"
CASES = {
    "chat": (SELECTED, "TP2 SP|PP2|CP2 a2a|CP2 all_gather|DP2, micro-batch 1|recompute full|TP2 SP CP2"),
    "chat, all": (ALL, "one micro-batch|PP2 VPP2|CP2 a2a|TP2 SP PP2"),
    "chat, short": (SHORT, "TP2 SP"),
    "chat, padded": (f"{SELECTED} --dllm-padding supervise", "PP2"),  # all of one length
    "text": (SOME, "TP2 SP|PP2|PP2 VPP2|CP2 a2a|PP2 CP2"),
    "text, all": (ALL, "PP2|CP2 all_gather"),
}


REPEATED = (("chat, all", "CP2 a2a"), ("text", "PP2"), ("text, all", "PP2"), ("chat", "CP2 all_gather"))


def write_conversations(folder) -> str:
    """One to three answers each, up to five canvases long; some begin with the assistant, some are cut off."""
    path = folder / "conversations.jsonl"
    with open(path, "w") as file:
        for i in range(40):
            messages = []
            for turn in range(1 + i % 3):
                messages.append(dict(role="user", content="Why? "[: 1 + (i + turn) % 5]))
                messages.append(dict(role="assistant", content=ANSWERS[(i + turn) % 5][: 2 + (i * 7 + turn * 5) % 23]))
            file.write(json.dumps(dict(messages=messages[i % 7 == 6 :])) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """runs(kind, *flags): the single process on that data, and what is compared with it."""
    folder = tmp_path_factory.mktemp("data")
    data = dict(
        chat=["--sft-data-path", write_conversations(folder), "--seq-length", "96", "--split", "70,30,0"],
        text=["--data-path", write_text(folder), "--split", "70,30,0"],
    )
    made = {}

    def get(kind, *flags):
        if (kind, *flags) not in made:
            argv = [*TINY, *data[kind], *" ".join(flags).split()]
            made[kind, *flags] = Family(pool, tmp_path_factory.mktemp("reference"), argv)
        return made[kind, *flags]

    return get


def of(runs, case: str):
    return runs(case.partition(",")[0], CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_the_single_process_equals_the_naive_computation(runs, case):
    reference = of(runs, case).reference
    assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
    assert reference["grad_error"] < 2e-6 and reference["grad_norms"][0] > 0
    (evaluation,) = reference["evaluations"][:1]
    weight = 0.0 if case == "chat, short" else 1.0 if case.endswith("all") else 0.6
    for report in (reference["reports"][0], evaluation):
        assert ("encoder ar loss" in report) == (weight > 0)
        assert close(report["loss"], report["dllm loss"] + weight * report.get("encoder ar loss", 0.0))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (slow if (case, name) in REPEATED else pytest.param)(case, name)
        for case in CASES
        for name in CASES[case][1].split("|")
    ],
)
def test_layouts(runs, case, name):
    of(runs, case).check(*LAYOUTS[name])


@pytest.mark.parametrize("name", ("DP2 EP2", "TP2 SP EP2 ETP1"))
def test_mixture_of_experts(runs, name):
    runs("chat", SOME, "--model-preset tiny-moe").check(*MIXTURE_OF_EXPERTS[name])


def test_distributed_optimizer(runs):
    of(runs, "text").check(*DISTRIBUTED_OPTIMIZER["DP2 PP2 VPP2 overlap"], gradients=False)


def test_attention_in_tiles(runs):
    """Against the reference of a dense mask, which `auto` takes for sequences this short."""
    processes, flags = LAYOUTS["CP2 all_gather"]
    of(runs, "chat, all").check(processes, f"{flags} --dllm-attention-backend tiled")


def test_bf16_within_its_rounding(runs):
    family = of(runs, "text")
    processes, flags = LAYOUTS["PP2"]
    result = family.run(processes, f"{flags} --bf16 --accumulate-allreduce-grads-in-fp32")[-1]
    assert close(result["losses"], family.reference["losses"], 2e-2)
    assert close(result["grad_norms"], family.reference["grad_norms"], 5e-2)


def test_released_weights_as_encoder_and_canvas(pool, hf_command, tmp_path):
    """A causal Qwen3 folder, whose head is tied."""
    argv = [*hf_command("qwen3 tied"), "--init-from-hf", *SOME.split()]
    family = Family(pool, tmp_path, argv)
    assert family.reference["grad_error"] < 2e-6
    family.check(*LAYOUTS["TP2 SP"])
