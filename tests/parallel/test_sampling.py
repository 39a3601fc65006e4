"""Every sampler in every layout writes the tokens of one process, drawn or not, in as many forwards."""

import functools

import pytest

PROMPTS = [[10, 20, 30], [40, 50, 60, 70, 71], [80], [80]]
NEW = dict(max_new_tokens=10, batch_size=3)
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
}
LAYOUTS = {"TP2": (2, 1), "PP2": (1, 2), "TP2 PP2": (2, 2)}


@pytest.fixture(scope="module")
def written(pool, hf_folder):
    """written(mode, tp, pp): what the samplers of that mode write."""

    @functools.cache
    def run(mode, tp, pp):
        name, configs = MODELS[mode]
        plan = dict(hf_model=hf_folder(name)[0], tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        plan["mode"] = mode.split()[0]
        configs = [NEW | config for config in configs]
        ranks = pool.run(
            [], tp * pp, function="tests.parallel.sampling:write", plan=plan, configs=configs, prompts=PROMPTS
        )
        for rank in ranks:
            del rank["output"]
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    return run


@pytest.mark.parametrize(("mode", "layout"), [(mode, layout) for mode in MODELS for layout in LAYOUTS])
def test_layouts_write_the_same(written, mode, layout):
    one = written(mode, 1, 1)
    assert written(mode, *LAYOUTS[layout]) == one
    assert all(len(ids) == 10 and 2 not in ids for answers in one["ids"] for ids in answers)
