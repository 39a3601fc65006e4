"""The block modes in every layout, exact as mdlm: losses, gradient norms, gradients against the naive computation."""

import pytest

from tests.parallel.families import LAYOUTS, close

# 5 divides neither the length nor a context-parallel chunk
MODES = {
    "bd3lm": "--dllm-mode bd3lm --dllm-block-size 5",
    "hybrid": "--dllm-mode hybrid --dllm-block-size 5 --diffusion-loss-weight 0.3",
    "idlm": "--dllm-mode idlm --dllm-block-size 5",
}
VARIANTS = {
    "complementary": "--dllm-mode bd3lm --dllm-block-size 5 --bd3lm-complementary-masks",
    "schedule": "--dllm-mode bd3lm --dllm-block-size-schedule 1:4:16 --dllm-block-size-schedule-iters 1",
    "one block": "--dllm-mode bd3lm --dllm-block-size 64",
    "blockwise": "--dllm-mode hybrid --dllm-block-size 5 --dllm-corruption blockwise",
    "inclusion": "--dllm-mode hybrid --dllm-block-size 5 --dllm-corruption blockwise "
    "--dllm-blockwise-weights inclusion --dllm-loss-normalization supervised",
    "response": "--dllm-mode idlm --dllm-block-size 5 --dllm-block-origin response",
}
CHAT = (
    "DP2|TP2 SP|TP4|PP2 VPP2|PP4|CP2 a2a|CP2 all_gather|CP4 a2a|recompute full|TP2 SP PP2|TP2 SP CP2|PP2 CP2|DP2 CP2"
).split("|")
TEXT = "one micro-batch|TP2 SP|PP2|CP2 a2a|CP2 all_gather|recompute selective|PP2 CP2|DP2 PP2 VPP2".split("|")
FEW = "DP2|TP2 SP|CP2 all_gather|PP2 CP2".split("|")


@pytest.mark.parametrize("mode", MODES)
def test_the_single_process_equals_the_naive_computation(family, mode):
    for kind in ("chat", "text"):
        reference = family(kind, MODES[mode]).reference
        assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
        assert reference["grad_error"] < 2e-6
        assert len(reference["losses"]) == 3 and reference["grad_norms"][0] > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHAT)
def test_chat(family, mode, name):
    family("chat", MODES[mode]).check(*LAYOUTS[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEXT)
def test_packed_text(family, mode, name):
    family("text", MODES[mode]).check(*LAYOUTS[name])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FEW)
def test_variants(family, variant, name):
    family("chat", VARIANTS[variant]).check(*LAYOUTS[name])
