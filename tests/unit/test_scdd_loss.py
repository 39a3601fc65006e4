"""The loss of self-correcting diffusion: the published values, and an enumeration of the chain's step back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.modes import mdlm, scdd
from megatron_dllm.modes.base import Corrupted
from megatron_dllm.noise import Draws
from megatron_dllm.parallel import shard
from tests.parallel.naive import scdd_shares, scdd_step
from tests.unit.block_cases import GivenLogits
from tests.unit.test_scdd import MASK, PUBLISHED, flags, make_sample


def batch_of(x_BS, z_BS, supervised_BS, t_B, args):
    """This rank's batch of given noise."""
    samples = []
    for b, (x, z, supervised) in enumerate(zip(x_BS, z_BS, supervised_BS, strict=True)):
        clean, x_t = make_sample(x, supervised, b), torch.tensor(z)
        level = torch.tensor([t_B[b]]).expand(len(x))
        samples.append(Corrupted(clean, x_t, x_t != clean.tokens_S, clean.loss_mask_S.float(), level))
    batch = scdd.layout(samples, len(x_BS[0]), args)
    return shard(batch, list(range(len(samples))), 1, 0, scdd.FULL_WITHIN_DOCUMENT)


def loss_of(logits_BSV, rank, args, mode=scdd):
    """(the term's sum, loss of each row, gradient of the logits)."""
    logits_BSV = logits_BSV.clone().requires_grad_()
    view = ScoreView(GivenLogits(args.vocab_size), logits_BSV.transpose(0, 1), rank.terms)
    (term,) = mode.loss(view, args)
    assert term.name == "dllm" and term.weight == 1
    term.sum.backward()
    return term.sum.detach(), view.nll["dllm"], logits_BSV.grad


def entropy(x, z, t, args) -> float:
    """-H of the true step back: what the published loss leaves out. By enumeration."""
    M, K, s = args.dllm_mask_token_id, args.vocab_size - 1, t - 1 / args.scdd_timesteps
    (clean_s, uniform_s), (clean_t, uniform_t) = scdd_shares(s, args), scdd_shares(t, args)
    gamma_s, gamma_t = clean_s + uniform_s, clean_t + uniform_t
    rho_s, rho_t = clean_s / gamma_s, clean_t / gamma_t
    total = 0.0
    for v in set(range(args.vocab_size)) - {M}:
        prior = (1 - rho_s) / K + rho_s * (v == x)
        if z == M:
            weight = (gamma_s - gamma_t) / (1 - gamma_t) * prior
            total += weight * math.log(prior) if prior else 0.0
        else:
            step = rho_t / rho_s * (v == z) + (rho_s - rho_t) / rho_s / K
            evidence = (1 - rho_t) / K + rho_t * (z == x)
            weight = prior * step / evidence
            total += weight * math.log(prior / evidence) if weight else 0.0
    return total


@pytest.mark.parametrize("case", [c for c in PUBLISHED if "logits" in c], ids=lambda c: f"T={c['T']} N={c['N']}")
def test_published_loss(case):
    """Published is our loss without the entropy of the true step back, which no model changes."""
    args = flags(
        vocab_size=7, dllm_mask_token_id=6, scdd_max_ratio=case["max_ratio"], scdd_timesteps=case["T"],
        scdd_chunk_size=case["chunk"] or 1024,
    )  # fmt: skip
    x_BS, z_BS, supervised_BS = (torch.tensor(case[name]) for name in ("target", "z_t", "loss_mask"))
    count = supervised_BS.sum().item()
    if not case["max_ratio"]:  # the case has replaced tokens where there can be none: published, they cost nothing
        supervised_BS = supervised_BS * ((z_BS == x_BS) | (z_BS == 6))
    x_BS, z_BS, supervised_BS = x_BS.tolist(), z_BS.tolist(), supervised_BS.tolist()
    rank = batch_of(x_BS, z_BS, supervised_BS, case["t"], args)
    total, _, _ = loss_of(torch.tensor(case["logits"]), rank, args)
    assert rank.counts["dllm"] == sum(map(sum, supervised_BS))
    for b, t in enumerate(case["t"]):
        for x, z, supervised in zip(x_BS[b], z_BS[b], supervised_BS[b], strict=True):
            total -= case["T"] * entropy(x, z, t, args) if supervised else 0
    assert total.item() / (case["N"] or count) == pytest.approx(case["total"], rel=1e-4)


def problem(seed, args, width=2.0, rows=3, length=8):
    """Noise that `corrupt` draws, and logits that now and then are wrong with confidence."""
    g = torch.Generator().manual_seed(seed)
    others = [v for v in range(args.vocab_size) if v != args.dllm_mask_token_id]
    samples = [
        make_sample([others[i] for i in torch.randint(len(others), (length,), generator=g)], index=b)
        for b in range(rows)
    ]
    corrupted = [scdd.corrupt(sample, Draws(seed, sample.index), args) for sample in samples]
    rank = shard(scdd.layout(corrupted, length, args), list(range(rows)), 1, 0, True)
    logits = torch.randn(rows, length, args.vocab_size, generator=g) * width
    return logits, rank


def enumerated(logits_BSV, rank, args):
    """(loss of each row, gradient of the logits), float64, from the enumeration of z_s."""
    logits = logits_BSV.double().requires_grad_()
    mask = torch.arange(args.vocab_size) == args.dllm_mask_token_id
    flat_QV, term = logits.transpose(0, 1).flatten(0, 1), rank.terms["dllm"]
    losses = []
    for n, row in enumerate(term.rows_N):
        q_V = flat_QV[row].masked_fill(mask, float("-inf")).softmax(-1)
        x, z, t = term.targets_N[n].item(), term.inputs_N[n].item(), term.levels_N[n].item()
        losses.append(args.scdd_timesteps * scdd_step(q_V, x, z, t, args))
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach(), logits.grad


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([3, 5, 12]),
    mask=st.sampled_from([0, 2]),
    R=st.sampled_from([0.0, 0.01, 0.1, 0.6]),
    peak=st.sampled_from([0.1, 0.5, 0.9]),
    shape=st.sampled_from([0.3, 1.0, 1.1]),
    T=st.sampled_from([2, 10, 1000]),
    width=st.sampled_from([0.5, 3.0]),
    chunk=st.sampled_from([1, 5, 100]),
)
def test_the_loss_is_the_divergence_of_the_step_back(seed, vocab, mask, R, peak, shape, T, width, chunk):
    args = flags(vocab_size=vocab, dllm_mask_token_id=mask, scdd_max_ratio=R, scdd_peak_time=peak,
                 scdd_gamma_shape=shape, scdd_timesteps=T, scdd_chunk_size=chunk)  # fmt: skip
    logits, rank = problem(seed, args, width)
    total, losses, gradient = loss_of(logits, rank, args)
    expected, expected_gradient = enumerated(logits, rank, args)
    # the logits are float32: log q is known to 1e-6, and T x that much of the step back may hang on it
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert total.item() == pytest.approx(expected.sum().item(), rel=1e-5, abs=1e-4)
    assert (gradient - expected_gradient).abs().max() < 1e-5 * expected_gradient.abs().max() + 1e-6
    assert (losses > -1e-6).all()
    assert not gradient[..., args.dllm_mask_token_id].any()


def test_a_perfect_model_costs_nothing():
    for R in (0.0, 0.1, 0.6):
        args = flags(scdd_max_ratio=R)
        logits, rank = problem(1, args)
        targets_BS = rank.terms["dllm"].targets_N.view(8, 3).t()  # all rows are scored
        _, losses, gradient = loss_of(
            torch.full_like(logits, -60.0).scatter_(2, targets_BS[..., None], 60.0), rank, args
        )
        assert losses.abs().max() < 1e-6 and gradient.abs().max() < 1e-6
        _, losses, _ = loss_of(logits, rank, args)
        assert losses.max() > 1  # which nobody else gets


@pytest.mark.parametrize("eps", [1e-3, 0.3])
def test_without_replacement_it_is_mdlm(eps):
    """At R = 0: mdlm's loss at p = t, of a model that never predicts the mask token."""
    args = flags(scdd_max_ratio=0.0, dllm_eps=eps)
    logits, rank = problem(2, args)
    total, losses, gradient = loss_of(logits, rank, args)
    term = rank.terms["dllm"]
    absorbed = term.inputs_N == MASK
    assert absorbed.any() and not absorbed.all() and torch.equal(term.inputs_N[~absorbed], term.targets_N[~absorbed])

    never = logits.clone()
    never[..., MASK] = -1e4
    term.weights_N = absorbed / term.levels_N
    total_mdlm, nll, gradient_mdlm = loss_of(never, rank, args, mdlm)
    assert not losses[~absorbed].any()
    assert torch.allclose(losses, nll * absorbed / term.levels_N, rtol=1e-6, atol=1e-6)
    assert total.item() == pytest.approx(total_mdlm.item(), rel=1e-6)
    assert torch.allclose(gradient, gradient_mdlm, rtol=1e-5, atol=1e-6)
    assert gradient[..., MASK].eq(0).all() and gradient.abs().max() > 0.1


def test_no_cancellation_at_a_real_vocabulary():
    """T times a difference of nearly equal logarithms, and sums of 32,000 terms: float32 must not show."""
    V, M, n = 32000, 31999, 64
    args = flags(vocab_size=V, dllm_mask_token_id=M, scdd_chunk_size=64)
    g = torch.Generator().manual_seed(0)
    clean = make_sample(torch.randint(M, (n,), generator=g).tolist())
    x_t_S, noised_S = scdd.mix(clean, 0.4, 0.3, M, V, g)
    worst = 0.0
    for t in (0.002, 0.3, 0.999):
        rank = batch_of([clean.tokens_S.tolist()], [x_t_S.tolist()], [[1] * n], [t], args)
        logits = torch.randn(1, n, V, generator=g) * 2
        logits[0, torch.arange(n), clean.tokens_S] += 12  # a trained model
        _, losses, gradient = loss_of(logits, rank, args)
        expected, expected_gradient = enumerated(logits, rank, args)
        worst = max(worst, ((losses.double() - expected).abs() / (1e-3 + expected)).max().item())
        assert (gradient - expected_gradient).abs().max() < 1e-5 * expected_gradient.abs().max()
    assert worst < 1e-4
    assert 0 < noised_S.sum() < n


def test_a_batch_without_supervision():
    rank = batch_of([[1, 2, 3]], [[1, 2, 3]], [[0, 0, 0]], [0.5], flags())
    total, losses, gradient = loss_of(torch.randn(1, 3, 12), rank, flags())
    assert rank.counts == {"dllm": 0} and total == 0 and len(losses) == 0 and not gradient.any()
