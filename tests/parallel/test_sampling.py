"""Every sampler in every layout writes the tokens of one process, drawn or not, in as many forwards."""

import functools

import pytest

from tests import gemma
from tests.hf_models import write_tokenizer
from tests.parallel.families import slow

PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 71], [80], [80]]
NEW = dict(max_new_tokens=10, batch_size=3)
GEMMA = "diffusion_gemma"
MODELS = {
    "mdlm": ("llada", [dict(gen_block_length=4), dict(temperature=0.7, top_p=0.9), dict(cache="dual", threshold=0.2)]),
    "mdlm shifted": (
        "dream",
        [dict(algorithm="origin", temperature=1.0), dict(steps=4), dict(sampler="llada", cache="prefix")],
    ),
    "scdd": ("qwen3 tied", [dict(steps=5), dict(temperature=1.0)]),
    "bd3lm": (
        "llada2",
        [dict(threshold=0.2), dict(threshold=0.2, editing_threshold=0.1), dict(temperature=0.7, top_k=5)],
    ),
    "hybrid": (
        "nemotron",
        [dict(gen_block_length=4), dict(mode="ar"), dict(mode="speculative", temperature=0.7), dict(sampler="llada2")],
    ),
    "idlm": ("nemotron", [dict(gen_block_length=4, stop_at_eos=True), dict(temperature=0.7)]),
    "block_diffusion": ("qwen3 tied", [dict(steps_per_block=5, entropy_bound=3.0), dict(steps=4, cache="none")]),
    "block_diffusion of gemma": (GEMMA, [dict(steps_per_block=5), dict(steps=8, entropy_bound=4.0)]),
}
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2), "TP2 PP2": (2, 2)}


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory):
    path = gemma.make_folder(str(tmp_path_factory.mktemp("models") / "gemma"))
    write_tokenizer(path, gemma.VOCABULARY)
    return path


@pytest.fixture(scope="module")
def written(pool, hf_folder, gemma_folder):
    """written(mode, tp, pp): what the samplers of that mode write."""

    @functools.cache
    def run(mode, tp, pp):
        name, configs = MODELS[mode]
        path = gemma_folder if name == GEMMA else hf_folder(name)[0]
        plan = dict(hf_model=path, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        plan["mode"] = mode.split()[0]
        configs = [NEW | config for config in configs]
        case = dict(plan=plan, configs=configs, prompts=PROMPTS, double=name == GEMMA)
        ranks = pool.run([], tp * pp, function="tests.parallel.sampling:write", **case)
        for rank in ranks:
            del rank["output"]
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    return run


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        (pytest.param if layout == "TP2 PP2" or mode in ("mdlm", "bd3lm") else slow)(mode, layout)
        for mode in MODELS
        for layout in LAYOUTS
    ],
)
def test_layouts_write_the_same(written, mode, layout):
    one = written(mode, 1, 1)
    assert written(mode, *LAYOUTS[layout]) == one
    has_mask = not mode.startswith("block_diffusion")
    assert all(len(ids) == 10 and not (has_mask and 2 in ids) for answers in one["ids"] for ids in answers)
