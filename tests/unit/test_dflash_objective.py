"""What guesses cost in mode dflash: D-PACE's weights and the divergence from the target, against loops and autograd."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.modes import dflash, guesses
from megatron_dllm.noise import Draws
from tests.unit.block_cases import make_sample
from tests.unit.dflash_cases import flags, view_of

V = 7
PAIRS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 14), min_size=1, max_size=3), st.lists(st.integers(0, 4), min_size=42, max_size=42)
    ),
    min_size=1,
    max_size=3,
)


def drawn(pairs, args):
    """(corrupted samples, their batch)."""
    found = []
    for i, (lengths, bits) in enumerate(pairs):
        documents = [d for d, n in enumerate(lengths) for _ in range(n)]
        tokens = torch.randint(V, (len(documents),), generator=torch.Generator().manual_seed(i))
        sample = make_sample(documents, [bit > 0 for bit in bits[: len(documents)]], i, tokens)
        found.append(dflash.corrupt(sample, Draws(4, i), args))
    return found, dflash.layout(found, max(len(c.sample) for c in found), args)


def given_view(batch, seed: int = 0):
    """(view, logits of the blocks [B, N·K, V] float64 with a gradient to come, logits of the teacher [B, S, V])."""
    g = torch.Generator().manual_seed(seed)
    B, S = len(batch.tokens_BQ), batch.tokens_BQ.shape[1] - batch.drafted
    logits_BRV = torch.randn(B, batch.drafted, V, generator=g).requires_grad_()
    teacher_BSV = 2 * torch.randn(B, S, V, generator=g)
    view, counts = view_of(batch, logits_BRV)
    view._model.teacher_rows = lambda places_N, rows_N: teacher_BSV[rows_N % B, places_N]
    return view, counts["dllm"], logits_BRV, teacher_BSV


def naive(found, logits_BRV, teacher_BSV, args):
    """(Σ weight · nll, Σ weight · KL, denominator), block by block, token by token."""
    K, text, divergence, blocks, total = args.dllm_block_size, 0.0, 0.0, 0, 0.0
    for b, c in enumerate(found):
        s, T = c.sample, args.dflash_kl_temperature
        for block, (a, kept, known) in enumerate(
            zip(c.anchors_N.tolist(), c.kept_N.tolist(), c.prefix_N.tolist(), strict=True)
        ):
            scored = [
                k
                for k in range(known, K)
                if kept and a + k < len(s) and s.loss_mask_S[a + k] and s.document_S[a + k] == s.document_S[a]
            ]
            nll = {k: F.cross_entropy(logits_BRV[b, block * K + k], s.tokens_S[a + k]) for k in scored}
            weights, run = {}, 1.0
            if args.dflash_loss == "dpace":
                value, alpha = {}, args.dflash_dpace_alpha
                for k in scored:
                    run *= (1 - alpha) * math.exp(-nll[k].item()) + alpha
                    value[k] = run
                weights = {j: sum(value[m] for m in scored if m >= j) for j in scored}
            else:
                weights = {k: math.exp(-(k - known) / args.dflash_loss_decay) for k in scored}
            for k in scored:
                p, q = ((x / T).log_softmax(-1) for x in (teacher_BSV[b, a + k - 1], logits_BRV[b, block * K + k]))
                text = text + weights[k] * nll[k]
                divergence = divergence + weights[k] * (p.exp() * (p - q)).sum()
            blocks, total = blocks + bool(scored), total + sum(weights.values())
    return text, divergence, blocks if args.dflash_loss == "dpace" else total


@settings(max_examples=60, deadline=None)
@given(
    pairs=PAIRS,
    K=st.integers(2, 6),
    loss=st.sampled_from(guesses.LOSSES),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    T=st.sampled_from([1.0, 2.5]),
    alpha=st.sampled_from([0.2, 0.5, 1.0]),
    way=st.sampled_from(dflash.SAMPLINGS),
)
def test_the_loss_and_its_gradient_are_those_of_loops(pairs, K, loss, share, T, alpha, way):
    args = flags(
        dllm_block_size=K,
        dflash_num_anchors=5,
        dflash_loss=loss,
        dflash_loss_decay=math.inf if share == 1 else 3.0,
        dflash_kl_weight=share,
        dflash_kl_temperature=T,
        dflash_dpace_alpha=alpha,
        dflash_anchor_sampling=way,
    )
    found, batch = drawn(pairs, args)
    view, count, logits, teacher = given_view(batch)
    terms = dflash.loss(view, args)
    assert [term.name for term in terms] == ["dllm", "kl"][: 1 + (share > 0)]
    assert all(term.counted == "dllm" for term in terms)
    total = sum(term.weight * term.sum for term in terms)
    total.backward()
    exact = logits.detach().double().requires_grad_()
    text, divergence, denominator = naive(found, exact, teacher.double(), args)
    assert count == pytest.approx(denominator, rel=1e-5)
    assert terms[0].sum.item() == pytest.approx(float(text), rel=1e-5)
    if share:
        assert terms[1].sum.item() == pytest.approx(float(divergence), rel=1e-5, abs=1e-6)
    expected = (1 - share) * text + share * T**2 * divergence
    assert total.item() == pytest.approx(float(expected), rel=1e-5)
    if count:
        expected.backward()
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=2e-5)
    assert len(view.nll["dllm"]) == len(view.right["dllm"]) == batch.tokens["noised"]  # for the measures
    assert dflash.measure(view, args)["draft accuracy"][1] == batch.tokens["noised"]


@settings(max_examples=60, deadline=None)
@given(pairs=PAIRS, K=st.integers(2, 6), alpha=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_weights_of_dpace(pairs, K, alpha, seed):
    """They never rise along a block, lie between those of no and of full confidence, and carry no gradient."""
    args = flags(dllm_block_size=K, dflash_num_anchors=5, dflash_loss="dpace")
    _, batch = drawn(pairs, args)
    view, *_ = given_view(batch)
    rows = view.rows("dllm")
    nll_N = (3 * torch.rand(len(rows.rows_N), generator=torch.Generator().manual_seed(seed))).requires_grad_()
    weights_N = guesses.dpace(nll_N, rows, view.batch_size, K, alpha)
    assert not weights_N.requires_grad
    certain_N = guesses.dpace(nll_N, rows, view.batch_size, K, 1.0)
    blocks = {}
    for row, offset, weight, certain in zip(
        rows.rows_N.tolist(), rows.offsets_N.tolist(), weights_N.tolist(), certain_N.tolist(), strict=True
    ):
        blocks.setdefault(row - offset * view.batch_size, []).append((offset, weight, certain))
    assert len(blocks) == batch.terms["dllm"].count
    for block in blocks.values():
        ordered = sorted(block)
        assert [certain for *_, certain in ordered] == list(range(len(block), 0, -1))  # K - j in a whole block
        found = [weight for _, weight, _ in ordered]
        assert found == sorted(found, reverse=True)
        for j, weight in enumerate(found):
            lowest = sum(alpha ** (m + 1) for m in range(j, len(found)))
            assert lowest * (1 - 1e-5) <= weight <= (len(found) - j) * (1 + 1e-5)


def test_weights_by_hand():
    """alpha = 0.5, confidences 1, 1/2 and 1/4 make 1, 3/4 and 5/8; the place between is not supervised."""
    args = flags(dllm_block_size=5, dflash_loss="dpace")
    sample = make_sample([0] * 5, [1, 1, 0, 1, 1])
    corrupted = dflash.corrupt(sample, Draws(1, 0), flags(dflash_num_anchors=1, dllm_mask_token_id=-1))
    batch = dflash.layout(
        [dataclasses.replace(corrupted, anchors_N=torch.tensor([0]), kept_N=torch.tensor([True]))], 5, args
    )
    view, *_ = given_view(batch)
    nll_N = -torch.tensor([1, 1 / 2, 1 / 4]).log()
    weights = guesses.dpace(nll_N, view.rows("dllm"), 1, 5, 0.5).tolist()
    assert weights == pytest.approx([1 + 3 / 4 + 15 / 32, 3 / 4 + 15 / 32, 15 / 32], rel=1e-6)
    assert batch.terms["dllm"].count == 1
