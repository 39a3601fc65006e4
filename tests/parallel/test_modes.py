"""The other modes in every layout, exact as mdlm: losses, gradient norms, gradients against the naive computation."""

import pytest

from tests.parallel.families import DISTRIBUTED_OPTIMIZER, LAYOUTS, MIXTURE_OF_EXPERTS, close, slow

# 5 divides neither the length nor a context-parallel chunk
BLOCKS = {
    "bd3lm": "--dllm-mode bd3lm --dllm-block-size 5",
    "hybrid": "--dllm-mode hybrid --dllm-block-size 5 --diffusion-loss-weight 0.3",
    "idlm": "--dllm-mode idlm --dllm-block-size 5",
}
MODES = BLOCKS | {"scdd": "--dllm-mode scdd --scdd-max-ratio 0.3 --scdd-chunk-size 7"}
VARIANTS = {
    "complementary": "--dllm-mode bd3lm --dllm-block-size 5 --bd3lm-complementary-masks",
    "schedule": "--dllm-mode bd3lm --dllm-block-size-schedule 1:4:16 --dllm-block-size-schedule-iters 1",
    "one block": "--dllm-mode bd3lm --dllm-block-size 64",
    # at the usual learning rate, steps amplify rounding
    "blockwise": "--dllm-mode hybrid --dllm-block-size 5 --dllm-corruption blockwise --lr 3e-4",
    "inclusion": "--dllm-mode hybrid --dllm-block-size 5 --dllm-corruption blockwise "
    "--dllm-blockwise-weights inclusion --dllm-loss-normalization supervised",
    "automodel": "--dllm-mode hybrid --dllm-block-size 5 --ar-loss-weight 0.7 --dllm-compat automodel",
    "heavy clean stream": "--dllm-mode idlm --dllm-block-size 5 --idlm-clean-loss-weight 1.5",
    "shifted": "--dllm-mode mdlm --mdlm-shift-logits --lr 3e-4",  # likewise
    "response": "--dllm-mode idlm --dllm-block-size 5 --dllm-block-origin response",
}
OTHER_WEIGHTS = ("inclusion", "automodel", "heavy clean stream", "one block")  # the same rows and parts as a mode
CHAT = "TP4|TP2 SP|PP2 VPP2|CP2 a2a|CP4 a2a|recompute full|TP2 SP PP2|TP2 SP CP2|PP2 CP2|DP2 CP2".split("|")
TEXT = "TP2 SP|CP2 a2a|CP2 all_gather|PP2 CP2".split("|")
FEW = "TP2 SP PP2|CP2 all_gather".split("|")
ONCE = ("TP4", "CP4 a2a", "DP2 CP2")  # on four ranks: in one mode
# of each mode in the layout named first; further ones only with -m slow
ROUNDED = {"bd3lm": "TP2 SP|CP2 a2a|PP2", "hybrid": "CP2 a2a|TP2 SP|PP2", "idlm": "PP2|TP2 SP|CP2 a2a"}
ROUNDED |= {"scdd": "TP2 SP|CP2 a2a|PP2"}
LEAKS = {"bd3lm": "PP2 CP2", "hybrid": "CP2 all_gather|PP2 CP2", "idlm": "CP2 a2a|PP2 CP2", "scdd": "PP2|PP2 CP2"}
SELF_CORRECTING = {
    "chat": "DP2|TP4|PP2 VPP2|CP2 all_gather|TP2 SP PP2|TP2 SP CP2|PP2 CP2",
    "text": "one micro-batch|TP2 SP|CP2 a2a|recompute selective",
    "tied": "TP2|TP2 SP PP2",
}


def first_of(layouts: dict[str, str]) -> list:
    """Cases (mode, layout), all but the first of a mode marked slow."""
    each = [(mode, *names.split("|")) for mode, names in layouts.items()]
    return [(slow if i else pytest.param)(mode, name) for mode, *names in each for i, name in enumerate(names)]


def weighted(mode: str, terms: dict) -> float:
    """`loss` of a report or an evaluation, from its terms."""
    weights = {"hybrid": dict(dllm=0.3, ar=1.0), "idlm": dict(dllm=1.0, clean=0.2)}.get(mode, dict(dllm=1.0))
    return sum(weight * terms[f"{name} loss"] for name, weight in weights.items())


@pytest.mark.parametrize("mode", MODES)
def test_the_single_process_equals_the_naive_computation(family, mode):
    for kind in ("chat", "text"):
        reference = family(kind, MODES[mode]).reference
        assert close(reference["losses"][0], reference["naive_loss"], 1e-6)
        assert reference["grad_error"] < 2e-6
        assert len(reference["losses"]) == 2 and reference["grad_norms"][0] > 0
        terms = [*reference["reports"][:1], *reference["evaluations"]]
        assert len(terms) == (2 if kind == "text" else 1)  # the chat run has nothing to evaluate on
        assert all(close(t["loss"], weighted(mode, t)) for t in terms)


@pytest.mark.parametrize(
    ("mode", "name"),
    [(slow if n in ONCE and mode != "bd3lm" else pytest.param)(mode, n) for mode in BLOCKS for n in CHAT],
)
def test_chat(family, mode, name):
    family("chat", MODES[mode]).check(*LAYOUTS[name])


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("name", TEXT)
def test_packed_text(family, mode, name):
    family("text", MODES[mode]).check(*LAYOUTS[name])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in SELF_CORRECTING.items() for name in names.split("|")]
)
def test_self_correction(family, kind, name):
    """The loss that is not linear in the nll: its reductions cross tensor-parallel ranks."""
    data = ("text", "--tie-embeddings-and-output-weights") if kind == "tied" else (kind,)
    family(data[0], MODES["scdd"], *data[1:]).check(*LAYOUTS[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("DP2 PP2 VPP2 overlap",))
def test_distributed_optimizer(family, mode, name):
    family("chat", MODES[mode]).check(*DISTRIBUTED_OPTIMIZER[name], gradients=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("TP2 SP EP2 ETP1",))
def test_mixture_of_experts(family, mode, name):
    family("chat", MODES[mode], "--model-preset tiny-moe").check(*MIXTURE_OF_EXPERTS[name])


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        (slow if name == "TP2 SP PP2" and variant in OTHER_WEIGHTS else pytest.param)(variant, name)
        for variant in VARIANTS
        for name in FEW
    ],
)
def test_variants(family, variant, name):
    family("chat", VARIANTS[variant]).check(*LAYOUTS[name])


@pytest.mark.parametrize("name", ("CP2 a2a", "CP2 all_gather", "PP2 VPP2", "recompute full"))
@pytest.mark.parametrize("kind", ("chat", "text"))
def test_attention_in_tiles(family, kind, name):
    """Against the reference of a dense mask, which `auto` takes for sequences this short."""
    processes, flags = LAYOUTS[name]
    family(kind, MODES["hybrid"]).check(processes, f"{flags} --dllm-attention-backend tiled")


# --- leaks ------------------------------------------------------------------------------------------------------------

PLACE = 17  # of 64, in block 3 of 5 tokens


def rows(family, name: str, **disturbance) -> dict[str, float]:
    """What each noisy row of the first step costs, by sample and place."""
    found = {}
    results = family.run(*LAYOUTS[name], record_nll=True, **disturbance)
    for result in results:
        found.update(result["nll"].get("dllm", {}))
    assert "change_padding" not in disturbance or sum(result.get("padding", 0) for result in results) > 50
    return found


@pytest.mark.parametrize(("mode", "name"), first_of(LEAKS))
def test_padding_and_other_documents_move_nothing(family, mode, name):
    """To the last bit, whatever the padding holds; other tokens in a sample's last document move rows of it alone."""
    chat, text = family("chat", MODES[mode]), family("text", MODES[mode])
    before = rows(chat, name)
    assert before == rows(chat, name, change_padding=True) and len(before) > 50
    before, after = rows(text, name), rows(text, name, change_last_document=True)
    changed, same = set(), set()
    for key in before:
        sample, _, place = key.partition(":")
        (changed if before[key] != after[key] else same).add((int(sample), int(place)))
    for sample in {sample for sample, _ in changed}:
        first = min(place for s, place in changed if s == sample)
        assert not {place for s, place in same if s == sample and place > first}
    assert len(same) > 50 and len(changed) > 50


@pytest.mark.parametrize("name", ("CP2 a2a", "PP2 CP2"))
def test_self_correction_never_sees_an_answer(family, name):
    """Another clean token under the mask moves the row that predicts it and no other."""
    text = family("text", MODES["scdd"])
    before, after = rows(text, name), rows(text, name, change_clean_token=PLACE)
    changed = {int(key.partition(":")[2]) for key in before if before[key] != after[key]}
    assert changed == {PLACE} and before.keys() == after.keys() and len(before) > 100


@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("name", ("CP2 a2a", "PP2 CP2"))  # the latter gathers keys and values
def test_no_answer_is_visible_in_any_layout(family, mode, name):
    """Another clean token at a noised place: of its sample, the nll of noisy rows in its block and before stays as it
    is to the last bit (but for the row that predicts it), that of later blocks does not."""
    text = family("text", MODES[mode])
    before, after = rows(text, name), rows(text, name, change_clean_token=PLACE)
    assert before.keys() == after.keys() and len(before) > 100
    predicts_it = PLACE - (mode == "idlm")
    changed, same = set(), set()
    for key in before:
        place = int(key.partition(":")[2])
        if place != predicts_it:
            (changed if before[key] != after[key] else same).add(place)
    assert changed and min(changed) >= 18  # documents cut the blocks of some samples shorter
    assert {place for place in same if place < PLACE}


# --- auto-balance -----------------------------------------------------------------------------------------------------

BALANCE = "--dllm-mode idlm --dllm-block-size 5 --idlm-auto-balance"


@pytest.mark.parametrize("name", ("DP2, micro-batch 1", "TP2 SP", "PP2 VPP2", "CP2 a2a", "PP2 CP2"))
def test_auto_balance_does_not_depend_on_the_layout(family, name):
    """And the log says what the next step will use."""
    chat = family("chat", BALANCE)
    fixed = family("chat", MODES["idlm"]).reference
    assert close(chat.reference["losses"][0], fixed["losses"][0]) and not close(
        chat.reference["losses"][1], fixed["losses"][1]
    )
    last = chat.check(*LAYOUTS[name])[-1]
    ratio = last["reports"][0]["dllm loss"] / last["reports"][0]["clean loss"]
    assert f"next idlm clean loss weight: {ratio:.6E}" in last["output"]


@pytest.mark.parametrize("flags", (BALANCE, VARIANTS["schedule"]), ids=("auto-balance", "schedule"))
def test_what_steps_hand_on_survives_a_resume(pool, family, tmp_path, flags):
    """The third step after a checkpoint of the second, in another layout, is that of the uninterrupted run."""
    chat = family("chat", flags, steps=3)
    pool.run([*chat.argv, "--save", str(tmp_path), "--save-interval", "2"], 1)
    load = ["--load", str(tmp_path), "--ckpt-step", "2"]
    resumed = pool.run([*chat.argv, *load, *LAYOUTS["TP2 SP PP2"][1].split()], 4)[-1]
    assert close(resumed["losses"], chat.reference["losses"][2:])
    assert close(resumed["grad_norms"], chat.reference["grad_norms"][2:])


@pytest.mark.parametrize(("mode", "name"), first_of(ROUNDED))
def test_bf16_within_its_rounding(family, mode, name):
    reference = family("chat", MODES[mode]).reference
    processes, flags = LAYOUTS[name]
    result = family("chat", MODES[mode]).run(processes, f"{flags} --bf16 --accumulate-allreduce-grads-in-fp32")[-1]
    assert close(result["losses"], reference["losses"], 2e-2)
    assert close(result["grad_norms"], reference["grad_norms"], 5e-2)
