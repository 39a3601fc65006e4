"""Training in emulated FP8: the first step is the same in layouts that leave the order of sums alone, near it in the
others, and near training in full precision."""

import pytest

from tests.parallel.families import LAYOUTS, MIXTURE_OF_EXPERTS, close

# A sum in another order moves a number across the middle between two of FP8 here and there, 6 % of that number.
ROUNDED = 5e-3
EMULATED = {
    "mdlm mxfp8": ("chat", "--dllm-emulate-fp8 mxfp8"),
    "hybrid tensorwise": ("text", "--dllm-mode hybrid --dllm-block-size 5 --dllm-emulate-fp8 tensorwise"),
    "experts mxfp8": ("chat", "--model-preset tiny-moe --dllm-emulate-fp8 mxfp8"),
}


def near(family, name: str, worst: float):
    kind = MIXTURE_OF_EXPERTS if "tiny-moe" in " ".join(family.argv) else LAYOUTS
    last = family.run(*kind[name])[-1]
    for figure in ("losses", "grad_norms"):
        first, *later = last[figure]
        expected, *others = family.reference[figure]
        assert first == pytest.approx(expected, rel=worst)
        assert later == pytest.approx(others, rel=0.03)  # a step divides by gradients' magnitudes, small ones too


@pytest.mark.parametrize("case", EMULATED)
def test_near_full_precision_but_not_the_same(family, case):
    data, flags = EMULATED[case]
    plain = family(data, *([flags.split(" --dllm-emulate")[0]] if " --dllm-emulate" in flags else [])).reference
    rounded = family(data, flags).reference
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=0.02)
    assert not close(rounded["losses"], plain["losses"], 1e-4)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mdlm mxfp8", "DP2"),
        ("mdlm mxfp8", "PP2"),
        ("mdlm mxfp8", "recompute full"),
        ("hybrid tensorwise", "PP2 VPP2"),
        ("experts mxfp8", "PP2"),
    ],
)
def test_exact_where_sums_are_the_same(family, case, name):
    near(family(*EMULATED[case][:1], EMULATED[case][1]), name, 1e-5)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mdlm mxfp8", "TP2 SP"),
        ("mdlm mxfp8", "CP2 a2a"),
        ("hybrid tensorwise", "TP2 SP CP2"),
        ("experts mxfp8", "DP2 EP2"),
        ("experts mxfp8", "TP2 SP EP2 ETP1"),
    ],
)
def test_near_where_they_are_not(family, case, name):
    near(family(*EMULATED[case][:1], EMULATED[case][1]), name, ROUNDED)
