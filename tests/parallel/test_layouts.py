"""Every layout equals the single process: losses, gradient norms, and each gradient against a naive reference.

The reference of a family of cases runs once on one process; it also writes the gradients of the first step
computed the plain way (full logits, F.cross_entropy, autograd over the whole global batch).
"""

import pytest

from tests.parallel.families import DISTRIBUTED_OPTIMIZER, LAYOUTS, MIXTURE_OF_EXPERTS, close

SOME = ("DP2|TP2 SP|PP2 VPP2|CP2 a2a|CP2 all_gather|recompute full|TP2 SP PP2|TP2 SP CP2|PP2 CP2|DP2 CP2").split("|")
TIED = "one micro-batch|TP2 SP|PP2|PP2 VPP2|TP2 SP PP2".split("|")


def test_the_single_process_equals_the_naive_computation(family):
    for kind, steps in (("chat", 3), ("text", 2)):
        reference = family(kind, steps=steps).reference
        assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
        assert reference["grad_error"] < 2e-6
        assert len(reference["losses"]) == steps and reference["grad_norms"][0] > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_chat(family, name):
    family("chat", steps=3).check(*LAYOUTS[name])


@pytest.mark.parametrize("name", SOME)
def test_packed_text(family, name):
    family("text").check(*LAYOUTS[name])


@pytest.mark.parametrize("name", DISTRIBUTED_OPTIMIZER)
def test_distributed_optimizer(family, name):
    family("chat", steps=3).check(*DISTRIBUTED_OPTIMIZER[name], gradients=False)


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings(family, name):
    family("text", "--tie-embeddings-and-output-weights").check(*LAYOUTS[name])


@pytest.mark.parametrize("name", MIXTURE_OF_EXPERTS)
def test_mixture_of_experts(family, name):
    family("chat", "--model-preset tiny-moe").check(*MIXTURE_OF_EXPERTS[name])


@pytest.mark.parametrize("name", ("DP2 EP2", "TP2 SP EP2 ETP1", "TP2 SP EP2 ETP2", "PP2", "CP2"))
def test_auxiliary_loss_of_experts(family, name):
    """With the balancing loss (the naive reference leaves it out). It is a mean over micro-batches by definition,
    so only layouts with the same micro-batches agree."""
    aux = family("chat", "--model-preset tiny-moe --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss")
    plain = family("chat", "--model-preset tiny-moe").reference
    assert abs(aux.reference["grad_norms"][0] - plain["grad_norms"][0]) > 1e-4
    aux.check(*MIXTURE_OF_EXPERTS[name], gradients=False)


@pytest.mark.parametrize("name", ("TP2 SP", "TP4", "PP2"))
def test_fewer_key_value_groups_than_ranks(family, name):
    family("text", "--num-query-groups 2").check(*LAYOUTS[name])


@pytest.mark.parametrize("name", ("DP2", "TP2 SP", "PP2", "CP2 a2a"))
@pytest.mark.parametrize("padding", ("supervise", "block fill", "noise count"))
def test_other_objectives(family, padding, name):
    flags = {
        "supervise": "--dllm-padding supervise",
        "block fill": "--dllm-pad-block-size 16",
        "noise count": "--dllm-loss-normalization noise",
    }
    # the naive reference divides by supervised tokens
    family("chat", flags[padding]).check(*LAYOUTS[name], gradients=padding != "noise count")


@pytest.mark.parametrize("multiple", (1, 128))
@pytest.mark.parametrize("name", ("one micro-batch", "TP2"))
def test_vocabulary_padding_changes_nothing(family, name, multiple):
    processes, flags = LAYOUTS[name]
    if name == "TP2" and multiple == 1:
        multiple = 3
    family("chat").check(processes, f"{flags} --make-vocab-size-divisible-by {multiple}")


@pytest.mark.parametrize("name", ("DP2", "TP2 SP", "PP2", "CP2 a2a", "TP2 SP PP2"))
def test_bf16_within_its_rounding(family, name):
    reference = family("chat").reference
    processes, flags = LAYOUTS[name]
    result = family("chat").run(processes, f"{flags} --bf16 --accumulate-allreduce-grads-in-fp32")[-1]
    assert close(result["losses"], reference["losses"], 2e-2)
    assert close(result["grad_norms"], reference["grad_norms"], 5e-2)
