"""block_diffusion against published masks, windows and losses."""

import pytest
import torch

from megatron_dllm.modes import block_diffusion as mode
from megatron_dllm.modes.base import ANCHOR, CLEAN, POSITION, STREAM
from megatron_dllm.noise import Draws
from tests.unit.block_cases import golden, make_sample
from tests.unit.canvas_cases import flags, laid_out
from tests.unit.test_block_modes import view_of

# --- published masks and windows --------------------------------------------------------------------------------------


def windowed(query, key, window):
    """The rule, with a sliding window as a model has it in some of its layers."""
    allowed = mode.visible(query, key)
    if window is not None:
        allowed &= (key[..., STREAM] != CLEAN) | (query[..., ANCHOR] - key[..., POSITION] < window)
    return allowed


def table(attributes_QA, window=None) -> list[str]:
    allowed = windowed(attributes_QA[:, None], attributes_QA[None], window)
    return ["".join(str(int(x)) for x in row) for row in allowed]


DECODER = [c for c in golden("17_mask_diffusion_gemma.json") if "encoder" not in c]
ENCODER = [c for c in golden("17_mask_diffusion_gemma.json") if "encoder" in c]


@pytest.mark.parametrize("case", DECODER, ids=lambda c: f"window {c['sliding']} prefix {c['prefix']}")
def test_published_decoder_masks(case):
    prefixes = case["prefix"] if isinstance(case["prefix"], list) else [case["prefix"]]
    E, R = case["E"], case["R"]
    for b, prefix in enumerate(prefixes):
        # columns after the response exist in some cases; their clean tokens are padding there
        documents = [0] * (prefix + R) + [-1] * (E - prefix - R)
        sample = make_sample(documents, [0] * prefix + [1] * R + [0] * (E - prefix - R))
        _, batch = laid_out([sample], flags(dllm_block_size=case["block"]))
        assert batch.drafted == R
        for name, window in (("full", None), ("slide", case["sliding"])):
            assert table(batch.attributes_BQA[0], window)[E:] == case[name][b]


@pytest.mark.parametrize("case", ENCODER, ids=lambda c: f"window {c['sliding']}")
def test_published_encoder_masks(case):
    S = case["S"]
    sample = make_sample([-1 if padding else 0 for padding in case["pad"]], [0] * S)
    _, batch = laid_out([sample], flags())
    rows = [row[:S] for row in table(batch.attributes_BQA[0], case["sliding"])[:S]]
    for row, published, padding in zip(rows, case["rows"], case["pad"], strict=True):
        assert row == published or padding  # a row of padding sees padding here, which nobody scores


WINDOWS = golden("21_response_window.json")


@pytest.mark.parametrize("case", WINDOWS, ids=lambda c: f"step {c['step']} {c['mb']}")
def test_published_response_window(case):
    """Rows, noise, positions and masks of two samples; the published block is chosen by hand."""
    w, K, args = case["window"], 2, flags(dllm_block_size=2, vocab_size=1000)
    corrupted = []
    for b in range(2):
        valid = case["attention_mask"][b]
        sample = make_sample([0 if v else -1 for v in valid], case["loss_mask"][b], b, case["clean"][b])
        every = mode.corrupt(sample, Draws(42, 2 * (case["step"] + case["mb"]) + b), args)
        assert every.x_t_S.tolist() == case["noisy"][b]
        corrupted.append(every)
    batch = mode.layout(corrupted, 8, args)
    term, rank_rows = batch.terms["dllm"], 0
    for b in range(2):
        real = [j for j, padding in enumerate(w["decoder_padding_mask"][b]) if not padding]
        at = [8 + j for j in real]
        pick = lambda values, real=real: [values[j] for j in real]
        assert batch.tokens_BQ[b, at].tolist() == pick(w["canvas_ids"][b])
        assert term.targets_BQ[b, at].tolist() == pick(w["target_ids"][b])
        assert batch.position_ids_BQ[b, at].tolist() == pick(w["decoder_position_ids"][b])
        for name, window in (("full_rows", None), ("slide_rows", 3)):
            rows = table(batch.attributes_BQA[b], window)
            assert [rows[i] for i in at] == pick(w[name][b])
        selected = [j // K for j, scored in enumerate(w["loss_mask"][b]) if scored]
        scored = [j for j in real if j // K in selected and term.weights_BQ[b, 8 + j]]
        assert scored == [j for j, s in enumerate(w["loss_mask"][b]) if s]
        rank_rows += len(scored)
    assert [rank_rows, batch.terms["encoder ar"].count] == case["denominators"]


# --- loss -------------------------------------------------------------------------------------------------------------

LOSS, *LOSSES = golden("12_loss_block_diffusion.json")


def test_published_diffusion_loss():
    """The file's logits are by place in the text: each goes where a canvas has that token."""
    args = flags(dllm_block_size=5, block_diffusion_eos_fill=False, vocab_size=7)
    samples = [make_sample([0] * 5, LOSS["loss_mask"][b], b, ids) for b, ids in enumerate(LOSS["target"])]
    corrupted, batch = laid_out(samples, args)
    logits_BQV = torch.zeros(*batch.tokens_BQ.shape, 7)
    for b, c in enumerate(corrupted):
        places = c.places_NK.flatten()
        logits_BQV[b, 5 : 5 + len(places)][places >= 0] = torch.tensor(LOSS["logits"])[b, places[places >= 0]]
    view, counts = view_of(batch, logits_BQV)
    total = mode.loss(view, args)[0].sum.item()
    for case in LOSSES[:2]:
        assert total / (case["N"] or counts["dllm"]) == pytest.approx(case["total"], rel=1e-5)


def test_published_encoder_loss():
    logits = torch.tensor(golden("10_loss_hybrid.json")[0]["causal_logits"])
    for case in LOSSES[2:]:
        samples = []
        for b, ids in enumerate(LOSS["target"]):
            valid = case["valid"][b] if case["valid"] else [1] * 5
            samples.append(make_sample([0 if v else -1 for v in valid], [0] * 5, b, ids))
        args = flags(vocab_size=7)
        _, batch = laid_out(samples, args)
        padded = torch.nn.functional.pad(logits, (0, 0, 0, batch.drafted))
        view, counts = view_of(batch, padded)
        term = mode.loss(view, args)[1]
        assert (term.name, term.weight) == ("encoder ar", 1.0)
        assert (term.sum / (case["N"] or counts["encoder ar"])).item() == pytest.approx(case["loss"], rel=1e-5)
