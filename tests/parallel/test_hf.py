"""Weights of a Hugging Face folder, read into every layout: all equal the single process, and that transformers."""

import pytest

from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, close
from tests.parallel.hf import theirs

DENSE = ("qwen3 tied", "nemotron", "dream")  # tied with norms of heads; untied with yarn; with bias
EXPERTS = ("qwen3_moe", "llada2")
DENSE_LAYOUTS = {name: LAYOUTS[name] for name in ("TP2 SP", "PP2", "PP2 VPP2", "CP2 a2a")} | {
    "TP2": (2, "--tensor-model-parallel-size 2"),
    # two key/value heads for four ranks, and two ranks with nothing but padding of the vocabulary
    "TP4": (4, "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 48"),
}
EXPERT_LAYOUTS = {
    name: MIXTURE_OF_EXPERTS[name] for name in ("DP2 EP2", "TP2 SP EP2 ETP1", "TP2 SP EP2 ETP2", "PP2", "DP2 EP2 PP2")
}


@pytest.mark.parametrize("name", (*DENSE, *EXPERTS))
def test_the_single_process_equals_transformers(started, hf_folder, name):
    family = started(name)
    result = family.run(1, "", record_nll=True)[0]
    loss, nll = theirs(hf_folder(name)[1], family.argv, result["indices"][0][0] + result["indices"][0][1])
    assert result["nll"]["dllm"].keys() == nll.keys() and len(nll) > 20
    assert result["nll"]["dllm"] == pytest.approx(nll, rel=1e-5, abs=1e-5)
    assert close(result["losses"][0], loss)


# every layout and every family, not each with each: the tables differ by family, how a rank cuts them does not
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("qwen3 tied", layout) for layout in ("TP2", "TP4", "PP2", "PP2 VPP2")),
        *(("nemotron", layout) for layout in ("TP2 SP", "PP2 VPP2", "CP2 a2a")),
        *(("dream", layout) for layout in ("TP4", "PP2")),
    ],
)
def test_dense_layouts(started, name, layout):
    started(name).check(*DENSE_LAYOUTS[layout])


@pytest.mark.parametrize("name", ("qwen3 tied", "dream"))
def test_distributed_optimizer(started, name):
    started(name).check(2, "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce", gradients=False)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3_moe", "DP2 EP2"), ("qwen3_moe", "TP2 SP EP2 ETP2"), *(("llada2", layout) for layout in EXPERT_LAYOUTS)],
)
def test_expert_layouts(started, name, layout):
    started(name).check(*EXPERT_LAYOUTS[layout])
