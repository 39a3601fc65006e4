"""bd3lm, hybrid and idlm: visibility, layout and loss, against loops and against published numbers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.modes import common, hybrid, idlm
from megatron_dllm.modes.base import (
    BLOCK,
    CLEAN,
    COMPLEMENT,
    DOCUMENT,
    NOISY,
    NUM_ATTRIBUTES,
    POSITION,
    STREAM,
    Corrupted,
)
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import shard
from tests.unit.block_cases import MASK, MODES, PAD, GivenLogits, flags, golden, make_sample

# --- visibility -------------------------------------------------------------------------------------------------------


def sees(mode: str, q: tuple, k: tuple) -> bool:
    """The rule in words. q, k: (stream, block, position, document)."""
    if q[3] != k[3]:
        return False
    if k[0] == CLEAN and q[0] != CLEAN:  # context
        return k[1] < q[1]
    if k[0] == CLEAN:  # clean to clean
        return k[1] <= q[1] if mode == "bd3lm" else k[2] <= q[2]
    if q[0] != k[0]:  # clean to noisy, or another noisy stream
        return False
    return k[1] == q[1] and (mode != "idlm" or k[2] <= q[2])


def mask_of(mode: str, attributes_BQA) -> torch.Tensor:
    return MODES[mode].visible(attributes_BQA[:, :, None], attributes_BQA[:, None])


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.sampled_from([1, 3, 4, 16, 27]),
    extra=st.integers(0, 4),
    origin=st.sampled_from(["sequence", "response"]),
    complementary=st.booleans(),
    bits=st.lists(st.booleans(), min_size=27, max_size=27),
)
def test_visible_element_by_element(mode, lengths, size, extra, origin, complementary, bits):
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    sample = make_sample(documents, bits[: len(documents)])
    args = flags(mode, dllm_block_size=size, dllm_block_origin=origin, bd3lm_complementary_masks=complementary)
    batch = MODES[mode].layout([MODES[mode].corrupt(sample, Draws(1, 0), args)], len(sample) + extra, args)
    attributes = batch.attributes_BQA
    allowed = mask_of(mode, attributes)[0]
    rows = [tuple(row) for row in attributes[0].tolist()]
    for q, query in enumerate(rows):
        for k, key in enumerate(rows):
            assert allowed[q, k].item() == sees(mode, query, key)
    assert allowed.diagonal().all()  # no row is empty


@pytest.mark.parametrize("case", golden("16_mask_idlm.json"), ids=lambda c: f"block {c['block']}")
def test_published_idlm_mask(case):
    L = case["L"]
    valid = torch.tensor(case["valid"]).bool()
    attributes = torch.zeros(1, 2 * L, NUM_ATTRIBUTES, dtype=torch.int32)
    attributes[0, :, STREAM] = torch.tensor([NOISY] * L + [CLEAN] * L)
    attributes[0, :, POSITION] = torch.arange(L).repeat(2)
    attributes[0, :, BLOCK] = attributes[0, :, POSITION] // case["block"]
    # the published mask lets padding queries see real keys; here they see padding: nobody scores those rows
    real = valid.repeat(2)
    attributes[0, ~real, DOCUMENT] = -1
    ours = mask_of("idlm", attributes)[0].int()
    published = torch.tensor([[int(c) for c in row] for row in case["rows"]])
    assert torch.equal(ours[real], published[real])
    assert not ours[~real][:, real].any()


TABLES = {
    # four tokens in blocks of two; columns: noisy 0-3, clean 0-3
    "hybrid": "11000000 11000000 00111100 00111100 00001000 00001100 00001110 00001111",
    "bd3lm": "11000000 11000000 00111100 00111100 00001100 00001100 00001111 00001111",
    "idlm": "10000000 11000000 00101100 00111100 00001000 00001100 00001110 00001111",
}


@pytest.mark.parametrize("mode", TABLES)
def test_mask_written_out(mode):
    args = flags(mode, dllm_block_size=2)
    batch = MODES[mode].layout([MODES[mode].corrupt(make_sample([0] * 4), Draws(1, 0), args)], 4, args)
    rows = ["".join(str(int(x)) for x in row) for row in mask_of(mode, batch.attributes_BQA)[0]]
    assert " ".join(rows) == TABLES[mode]


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_streams_side_by_side(mode):
    documents = [0] * 5 + [1] * 4
    samples = [make_sample(documents, [0, 1, 1] * 3, 0), make_sample([0] * 6, index=1)]
    args = flags(mode, bd3lm_complementary_masks=True)
    corrupted = [MODES[mode].corrupt(s, Draws(3, s.index), args) for s in samples]
    batch = MODES[mode].layout(corrupted, 11, args)
    n = MODES[mode].streams(args)
    assert batch.streams == n and batch.tokens_BQ.shape == (2, 11 * n)
    streams = {2: [NOISY, CLEAN], 3: [NOISY, COMPLEMENT, CLEAN]}[n]
    for b, c in enumerate(corrupted):
        for q in range(11 * n):
            stream, i = streams[q // 11], q % 11
            attributes = batch.attributes_BQA[b, q]
            assert attributes[STREAM] == stream
            if i >= len(c.sample):
                assert batch.tokens_BQ[b, q] == PAD and attributes[DOCUMENT] == -1
                assert all(term.weights_BQ[b, q] == 0 for term in batch.terms.values())
                continue
            clean, rest = c.sample.tokens_S[i], c.sample.loss_mask_S[i] & ~c.noised_S[i]
            expected = {NOISY: c.x_t_S[i], CLEAN: clean, COMPLEMENT: MASK if rest else clean}[stream]
            assert batch.tokens_BQ[b, q] == expected
            assert attributes[POSITION] == batch.position_ids_BQ[b, q] == c.sample.position_S[i]
            assert (attributes[BLOCK], attributes[DOCUMENT]) == (c.block_S[i], c.sample.document_S[i])
    assert batch.tokens["data"] == 15 and batch.tokens["processed"] == 22 * n


@pytest.mark.parametrize("compat", [None, "automodel"])
def test_next_token_terms_count_what_they_score(compat):
    documents = [0, 0, 0, 1, 1, 1]
    sample = make_sample(documents, [1, 0, 1, 1, 1, 0])
    for mode, names in (("hybrid", ["ar"]), ("idlm", ["dllm", "clean"])):
        args = flags(mode, dllm_compat=compat)
        batch = MODES[mode].layout([MODES[mode].corrupt(sample, Draws(1, 0), args)], 8, args)
        for name in names:
            term = batch.terms[name]
            start = 0 if (mode, name) == ("idlm", "dllm") else 8
            # 0 has no token before it, 3 begins a document
            assert term.weights_BQ[0].nonzero()[:, 0].tolist() == [start + 1, start + 3]
            assert term.targets_BQ[0, [start + 1, start + 3]].tolist() == [2, 4]
            assert term.count == (4 if compat else 2)


# --- losses -----------------------------------------------------------------------------------------------------------


def view_of(batch, logits_BQV) -> tuple[ScoreView, dict]:
    rank = shard(batch, list(range(len(logits_BQV))), 1, 0, False)
    return ScoreView(GivenLogits(logits_BQV.shape[-1]), logits_BQV.transpose(0, 1), rank.terms), rank.counts


HYBRID, *HYBRID_RESULTS = golden("10_loss_hybrid.json")


@pytest.mark.parametrize("published", HYBRID_RESULTS, ids=lambda c: f"alpha {c['alpha']} AR {c.get('ar', 'concat')}")
def test_published_hybrid_loss(published):
    args = flags(
        diffusion_loss_weight=published["alpha"],
        ar_loss_weight=1.0 if published.get("ar", True) else 0.0,
        dllm_compat="automodel",
    )
    samples = []
    for b, ids in enumerate(HYBRID["target"]):
        clean = make_sample([0] * 5, HYBRID["loss_mask"][b], b, ids)
        noised = torch.tensor(HYBRID["noise"][b]).bool() & clean.loss_mask_S
        p = torch.tensor(HYBRID["p"][b])
        blocks = common.blocks(clean, 4, "sequence")
        samples.append(Corrupted(clean, clean.tokens_S.masked_fill(noised, MASK), noised, noised / p, p, *blocks))
    logits = torch.cat([torch.tensor(HYBRID["logits"]), torch.tensor(HYBRID["causal_logits"])], dim=1).requires_grad_()
    view, counts = view_of(hybrid.layout(samples, 5, args), logits)
    if published["N_diff"] is not None:
        assert counts == {"dllm": published["N_diff"], "ar": published["N_ar"]}
    else:
        counts = {"dllm": 1, "ar": 1}  # undivided
    terms = {term.name: term.weight * term.sum / counts[term.name] for term in hybrid.loss(view, args)}
    assert terms["dllm"].item() == pytest.approx(published["dllm"], rel=1e-5)
    assert sum(terms.values()).item() == pytest.approx(published["total"], rel=1e-5)


IDLM, *IDLM_RESULTS = golden("13_loss_idlm.json")


@pytest.mark.parametrize("published", IDLM_RESULTS, ids=lambda c: f"w {c['w']} auto {c['auto']} N {c['N']}")
def test_published_idlm_loss(published):
    args = flags(
        "idlm",
        idlm_clean_loss_weight=None if published["auto"] else published["w"],
        idlm_auto_balance=published["auto"],
        dllm_compat="automodel",
    )
    samples = []
    for b, ids in enumerate(IDLM["target"]):
        documents = [0 if valid else -1 for valid in IDLM["valid"][b]]
        clean = make_sample(documents, IDLM["answer"][b], b, ids)
        samples.append(idlm.corrupt(clean, Draws(1, b), args))
    view, counts = view_of(idlm.layout(samples, 5, args), torch.tensor(IDLM["logits"]))
    if published["N"] is None:
        counts = dict.fromkeys(counts, sum(len(t.rows_N) for t in view._terms.values()) / 2)  # the scored pairs
    else:
        assert counts == {"dllm": published["N"], "clean": published["N"]}
    noisy, clean = idlm.loss(view, args)
    assert (noisy.sum / counts["dllm"]).item() == pytest.approx(published["dllm_ce_noisy"], rel=1e-5)
    total = noisy.sum / counts["dllm"] + clean.weight * clean.sum / counts["clean"]
    assert total.item() == pytest.approx(published["total"], rel=1e-5)


def test_auto_balance_takes_the_ratio_of_the_step_before():
    args = flags("idlm", idlm_auto_balance=True)
    view = SimpleNamespace(weighted_nll=lambda name: torch.tensor({"dllm": 8.0, "clean": 3.0}[name]))
    assert [term.weight for term in idlm.loss(view, args)] == [1.0, 0.2]
    idlm.after_step({"dllm": 3.0, "clean": 1.5}, args)
    assert [term.weight for term in idlm.loss(view, args)] == [1.0, 2.0]
    idlm.after_step({"dllm": 0.0, "clean": 0.0}, args)  # a step without anything to score says nothing
    assert idlm.loss(view, args)[1].weight == 2.0


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        ("bd3lm", dict(dllm_block_size=0), "--dllm-block-size 0"),
        ("idlm", dict(dllm_block_size=-2), "at least 1"),
        ("bd3lm", dict(dllm_eps=0.0), "--dllm-eps"),
        ("bd3lm", dict(dllm_eps=0.6, bd3lm_complementary_masks=True), "less than 0.5"),
        ("bd3lm", dict(dllm_block_size_schedule_iters=3), "needs --dllm-block-size-schedule"),
        ("bd3lm", dict(dllm_block_size_schedule="1:4"), "not both"),
        ("bd3lm", dict(dllm_block_size=None, dllm_block_size_schedule="1:4"), "schedule-iters"),
        ("bd3lm", dict(dllm_block_size=None, dllm_block_size_schedule="1:x"), "separated by colons"),
        ("bd3lm", dict(dllm_block_size=None, dllm_block_size_schedule="0:4"), "separated by colons"),
        (
            "bd3lm",
            dict(
                dllm_block_size=None,
                dllm_block_size_schedule="1:4",
                dllm_block_size_schedule_iters=2,
                step_batch_size_schedule="0:8",
            ),
            "step-batch-size-schedule",
        ),
        ("hybrid", dict(diffusion_loss_weight=-1.0), "--diffusion-loss-weight"),
        ("hybrid", dict(ar_loss_weight=float("nan")), "--ar-loss-weight"),
        ("hybrid", dict(ar_loss_weight=0.0, diffusion_loss_weight=0.0), "no loss"),
        ("hybrid", dict(dllm_half_life_ratio=0.5), "needs --dllm-corruption blockwise"),
        ("hybrid", dict(dllm_blockwise_weights="inclusion"), "needs --dllm-corruption blockwise"),
        ("hybrid", dict(dllm_corruption="blockwise", dllm_half_life_ratio=0.0), "share of a block"),
        ("hybrid", dict(dllm_corruption="blockwise", dllm_half_life_ratio=float("inf")), "share of a block"),
        ("bd3lm", dict(dllm_block_size=10**20), "at most the sequence length"),
        ("bd3lm", dict(dllm_block_size=None, dllm_block_size_schedule="²:4"), "separated by colons"),
        ("idlm", dict(idlm_clean_loss_weight=-0.1), "--idlm-clean-loss-weight"),
        ("idlm", dict(idlm_clean_loss_weight=0.3, idlm_auto_balance=True), "remove --idlm-clean-loss-weight"),
        (
            "idlm",
            dict(idlm_auto_balance=True, dllm_compat="automodel", context_parallel_size=2),
            "--context-parallel-size 1",
        ),
    ],
)
def test_flags_that_mean_nothing_are_refused(mode, changes, message):
    with pytest.raises(ValueError, match=message):
        flags(mode, **changes)


@pytest.mark.parametrize("mode", MODES)
def test_clean_data_with_the_mask_token_is_refused(mode):
    with pytest.raises(ValueError, match="holds the mask token"):
        MODES[mode].corrupt(make_sample([0] * 3, tokens=[1, MASK, 2]), Draws(1, 0), flags(mode))


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_sample_and_one_without_supervision(mode):
    args = flags(mode, bd3lm_complementary_masks=True)
    samples = [make_sample([]), make_sample([0] * 5, [0] * 5, 1)]
    batch = MODES[mode].layout([MODES[mode].corrupt(s, Draws(1, s.index), args) for s in samples], 6, args)
    assert all(term.count == 0 and not term.weights_BQ.any() for term in batch.terms.values())
    view, _ = view_of(batch, torch.randn(2, batch.tokens_BQ.shape[1], 5, requires_grad=True))
    assert all(term.sum == 0 for term in MODES[mode].loss(view, args))


def test_defaults_are_the_published_ones():
    assert flags("hybrid", dllm_block_size=None).dllm_loss_normalization == "noise"
    assert flags("bd3lm", dllm_block_size=None).dllm_loss_normalization == "supervised"
    sizes = {mode: flags(mode, dllm_block_size=None).dllm_block_size for mode in MODES}
    assert sizes == {"bd3lm": 32, "hybrid": 32, "idlm": 1}
    assert flags("idlm").idlm_clean_loss_weight == 0.2


@pytest.mark.parametrize("mode", MODES)
def test_pictures_in_the_documents_are_the_rule(mode):
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    picture = text.split(f"```text {mode}\n")[1].split("```")[0]
    args = flags(mode, dllm_block_size=2)
    batch = MODES[mode].layout([MODES[mode].corrupt(make_sample([0] * 6), Draws(1, 0), args)], 6, args)
    rows = ["".join("■" if x else "·" for x in row) for row in mask_of(mode, batch.attributes_BQA)[0]]
    assert [line.replace("  ", "") for line in picture.splitlines() if line] == rows
