"""Adapters in every layout: losses, gradient norms, and every gradient against dense gradients of merged weights by the
chain rule, in one process. Runs begin with B drawn, save where it matters that it is zero."""

import pytest

from tests.parallel.cases import TINY, write_text
from tests.parallel.families import DISTRIBUTED_OPTIMIZER, LAYOUTS, MIXTURE_OF_EXPERTS, Family, close, slow
from tests.parallel.lora import Stirred
from tests.parallel.test_block_diffusion import write_conversations
from tests.parallel.test_diffusion_gemma import HALF, ROUNDING
from tests.parallel.test_modes import MODES

LORA = ("--lora-rank", "3", "--lora-alpha", "6")
SOME = ("--lora-targets", "q_proj,v_proj", "up_proj")
MANY = ["--make-vocab-size-divisible-by", "48"]  # four ranks need more rows than the vocabulary has
DENSE = [
    *(("qwen3 tied", layout) for layout in "TP2|TP4|PP2 VPP2|CP2 a2a|TP2 SP recompute".split("|")),
    ("dream", "TP2 SP"),  # of some targets
    *(slow("qwen3 tied", layout) for layout in "TP2 SP|PP2|recompute full|TP2 SP PP2|CP4 all_gather".split("|")),
    *(slow("dream", layout) for layout in "TP4|PP2 VPP2|recompute block".split("|")),
]
EXPERTS = [
    *(("qwen3_moe", layout) for layout in "DP2 EP2|TP4 SP EP2 ETP2".split("|")),
    ("llada2", "TP2 SP EP2 ETP2"),  # with a shared one, after a dense layer
    *(slow("qwen3_moe", layout) for layout in "TP2 SP ETP2|TP2 SP EP2 ETP1|CP2 EP2|DP2 EP2 PP2".split("|")),
    *(slow("llada2", layout) for layout in "DP2 EP2|TP4 SP EP2 ETP2|CP2".split("|")),
]
OVERLAP = DISTRIBUTED_OPTIMIZER["DP2 overlap"][1]
NOTHING_TO_TRAIN = "--pipeline-model-parallel-layout E|tt|tt|L"  # in the first and the last stage


@pytest.fixture(scope="module")
def adapted(pool, hf_command, tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            some = SOME if name == "dream" else ()
            argv = [*hf_command(name), "--init-from-hf", *LORA, *some]
            made[name] = Family(Stirred(pool), tmp_path_factory.mktemp("reference"), argv)
        return made[name]

    return get


@pytest.mark.parametrize("name", ("qwen3 tied", "dream", "qwen3_moe", "llada2"))
def test_the_single_process_equals_the_chain_rule(adapted, name):
    reference = adapted(name).reference
    assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
    assert reference["grad_error"] < 1e-5 and reference["grad_norms"][0] > 0


@pytest.mark.parametrize(("name", "layout"), DENSE)
def test_dense_layouts(adapted, name, layout):
    processes, flags = LAYOUTS[layout]
    family = adapted(name)
    family.check(processes, " ".join([flags, *(MANY if processes == 4 else ())]))


@pytest.mark.parametrize(("name", "layout"), EXPERTS)
def test_expert_layouts(adapted, name, layout):
    adapted(name).check(*MIXTURE_OF_EXPERTS[layout])


@pytest.mark.parametrize(
    ("name", "processes", "flags"),
    (
        slow("qwen3 tied", *DISTRIBUTED_OPTIMIZER["DP2 overlap"]),
        slow("qwen3 tied", 4, f"{LAYOUTS['DP2 PP2 VPP2'][1]} --micro-batch-size 1 {OVERLAP}"),
        ("qwen3_moe", 2, f"--expert-model-parallel-size 2 {OVERLAP}"),
    ),
)
def test_distributed_optimizer(adapted, name, processes, flags):
    adapted(name).check(processes, flags, gradients=False)


@pytest.mark.parametrize("flags", (slow(""), OVERLAP))
def test_stages_without_anything_to_train(adapted, flags):
    """Embedding and head, which are tied, are alone in their stages."""
    layout = f"--pipeline-model-parallel-size 4 {NOTHING_TO_TRAIN} {flags}"
    results = adapted("qwen3 tied").check(4, layout, gradients=not flags)
    assert [result["optimizer_elements"] > 0 for result in results] == [False, True, True, False]


@pytest.mark.parametrize("name", ("qwen3 tied", slow("llada2")))
def test_the_first_step_is_that_of_the_weights_alone(pool, started, adapted, name):
    fresh = pool.run([*started(name).argv, *LORA])[0]
    assert fresh["losses"][0] == started(name).reference["losses"][0] != adapted(name).reference["losses"][0]
    assert fresh["losses"][1] != started(name).reference["losses"][1]


@pytest.mark.parametrize(
    ("name", "layout"),
    (
        slow("qwen3 tied", (1, "")),
        ("qwen3 tied", (2, "--use-distributed-optimizer")),
        ("qwen3_moe", MIXTURE_OF_EXPERTS["DP2 EP2"]),
    ),
)
def test_the_optimizer_knows_adapters_alone(pool, started, name, layout):
    processes, flags = layout
    results = pool.run([*started(name).argv, *LORA, *flags.split()], processes)
    h, d, heads, groups, r, layers = 40, 16, 4, 2, 3, 4
    attention = 3 * r * h + (heads + 2 * groups) * d * r + heads * d * r + r * h
    mlp = lambda f: 2 * r * h + 2 * f * r + r * f + h * r
    if name == "qwen3 tied":
        assert sum(result["optimizer_elements"] for result in results) == layers * (attention + mlp(48))
    else:  # data-parallel ranks have the same of all but experts
        assert [result["optimizer_elements"] for result in results] == [layers * (attention + 4 * mlp(24))] * 2


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return ["--data-path", write_text(tmp_path_factory.mktemp("text")), "--split", "70,30,0"]


@pytest.mark.parametrize("mode", [mode if mode == "hybrid" else slow(mode) for mode in MODES])
def test_modes(pool, text, tmp_path, mode):
    family = Family(Stirred(pool), tmp_path, [*TINY, *text, *MODES[mode].split(), *LORA])
    assert close(family.reference["losses"][0], family.reference["naive_loss"], 1e-6)
    assert family.reference["grad_error"] < 1e-5
    family.check(*LAYOUTS["TP2 SP PP2"])


@pytest.fixture(scope="module")
def gemma(pool, tmp_path_factory):
    chat = ["--sft-data-path", write_conversations(tmp_path_factory.mktemp("chat")), "--seq-length", "96"]
    return Family(Stirred(pool), tmp_path_factory.mktemp("reference"), [*TINY, *chat, *HALF.split(), *LORA])


@pytest.mark.parametrize("layout", ("one", "TP2 SP EP2 ETP2", slow("DP2 EP2 PP2"), slow("recompute full")))
def test_diffusion_gemma(gemma, layout):
    """Its self-conditioning and its experts, and layers without a value projection."""
    if layout == "one":
        assert close(gemma.reference["losses"][0], gemma.reference["naive_loss"], 1e-6)
        assert gemma.reference["grad_error"] < ROUNDING
    else:
        gemma.check(*MIXTURE_OF_EXPERTS[layout], worst=ROUNDING)


DROPOUT = ("--lora-dropout", "0.3")


@pytest.mark.parametrize(
    ("name", "layout"),
    (
        slow("qwen3 tied", (1, "")),
        slow("qwen3 tied", LAYOUTS["TP2"]),
        ("qwen3 tied", LAYOUTS["TP2 SP"]),
        slow("qwen3_moe", MIXTURE_OF_EXPERTS["TP2 SP EP2 ETP1"]),
    ),
)
def test_dropout(adapted, name, layout):
    """It is drawn anew, but the same where activations are recomputed; ranks that share a matrix agree about it."""
    (processes, flags), recompute = layout, LAYOUTS["recompute full"][1]
    family = adapted(name)
    argv = " ".join([flags, *DROPOUT])
    once, again = (family.run(processes, f"{argv} {more}", note_whole_adapters=True) for more in ("", recompute))
    assert once[-1]["losses"] == pytest.approx(again[-1]["losses"], rel=1e-6)
    assert once[-1]["grad_norms"] == pytest.approx(again[-1]["grad_norms"], rel=1e-6)
    assert not close(once[-1]["losses"], family.reference["losses"], 1e-3)
    sums = [result["whole_adapters"] for result in once]
    shared = [name for name in sums[0] if ".experts." not in name]
    assert len(shared) > 4
    assert all(each[name] == pytest.approx(sums[0][name], rel=1e-5, abs=1e-7) for each in sums for name in shared)
