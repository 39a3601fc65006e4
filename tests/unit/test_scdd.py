"""Self-correcting diffusion: noise, schedule and flags, against the published numbers and token by token."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import scdd
from megatron_dllm.noise import Draws, ValidationDraws
from tests.parallel.naive import scdd_shares

GOLDEN = Path(__file__).parents[1] / "golden"
CORRUPTED = json.loads((GOLDEN / "06_corrupt_mix_scdd.json").read_text())["cases"]
PUBLISHED = json.loads((GOLDEN / "14_scdd.json").read_text())["cases"]
MASK = 9


def flags(**changes):
    values = dict(
        dllm_mask_token_id=MASK,
        dllm_pad_token_id=0,
        dllm_eps=1e-3,
        dllm_loss_normalization="supervised",
        vocab_size=12,
        scdd_max_ratio=0.1,
        scdd_gamma_shape=1.0,
        scdd_peak_time=0.5,
        scdd_timesteps=1000,
        scdd_chunk_size=3,
    )
    return SimpleNamespace(**(values | changes))


def make_sample(ids, supervised=None, index: int = 0) -> Sample:
    n = len(ids)
    supervised = torch.ones(n) if supervised is None else torch.tensor(supervised)
    return Sample(torch.tensor(ids), supervised.bool(), torch.zeros(n, dtype=torch.int32), torch.arange(n), index)


# --- corruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CORRUPTED, ids=lambda c: f"{c['kind']} {c['seed']}")
def test_published_corruption(case):
    (ids,), (supervised,), (noisy,), (noise,) = (case[k] for k in ("input_ids", "loss_mask", "noisy", "noise"))
    sample = make_sample(ids, supervised)
    if case["kind"] == "mix":
        g = torch.Generator().manual_seed(case["seed"])
        x_t_S, noised_S = scdd.mix(sample, case["mask_prob"], case["uniform_prob"], MASK, case["vocab"], g)
        assert x_t_S.tolist() == noisy and noised_S.int().tolist() == noise
        return
    with pytest.raises(ValueError, match="before any noise"):  # the published case has clean mask tokens
        scdd.corrupt(sample, Draws(case["seed"], 0), flags())
    kept = [i for i, token in enumerate(ids) if token != MASK]
    other = make_sample([0 if token == MASK else token for token in ids], supervised)
    out = scdd.corrupt(other, Draws(case["seed"], 0), flags())  # seed_for_index adds a multiple of 2**32
    assert torch.allclose(out.level_S, torch.tensor(case["t"][0]), rtol=0, atol=1e-7)
    assert [out.x_t_S[i].item() for i in kept] == [noisy[i] for i in kept]
    assert [out.noised_S[i].item() for i in kept] == [noise[i] for i in kept]
    assert out.weight_S.tolist() == supervised


@settings(max_examples=80, deadline=None)
@given(
    supervised=st.lists(st.booleans(), min_size=1, max_size=30),
    seed=st.integers(0, 2**31),
    index=st.integers(0, 10**9),
    vocab=st.integers(3, 14),
    mask=st.integers(0, 13),
    R=st.sampled_from([0.0, 0.1, 0.8]),
    T=st.sampled_from([2, 7, 1000]),
    eps=st.sampled_from([1e-3, 1.0]),
    validation=st.booleans(),
)
def test_corruption_token_by_token(supervised, seed, index, vocab, mask, R, T, eps, validation):
    mask %= vocab
    others = [v for v in range(vocab) if v != mask]
    clean = make_sample([others[i % len(others)] for i in range(len(supervised))], supervised, index)
    args = flags(vocab_size=vocab, dllm_mask_token_id=mask, scdd_max_ratio=R, scdd_timesteps=T, dllm_eps=eps)
    draws = ValidationDraws(index) if validation else Draws(seed, index)
    out = scdd.corrupt(clean, draws, args)
    g = draws.generator()
    k = int(((1 - eps) * draws.level(g) + eps) * T) + 1
    t = min(k, T - 1) / T
    clean_share, uniform_share = scdd_shares(t, args)
    absorbed, replaced = 1 - clean_share - uniform_share, uniform_share * (vocab - 2) / (vocab - 1)
    u = torch.rand(len(supervised), generator=g).tolist()
    d = torch.randint(0, vocab - 2, (len(supervised),), generator=g).tolist()
    for i, x in enumerate(clean.tokens_S.tolist()):
        z = out.x_t_S[i].item()
        assert out.level_S[i].item() == pytest.approx(t, rel=1e-6) and 0 < out.level_S[i] < 1
        assert out.weight_S[i] == supervised[i]
        if min(abs(u[i] - absorbed), abs(u[i] - absorbed - replaced)) < 1e-6:
            continue
        if supervised[i] and u[i] < absorbed:
            assert z == mask and out.noised_S[i]
        elif supervised[i] and u[i] < absorbed + replaced:
            assert z == [v for v in others if v != x][d[i]] and out.noised_S[i]
        else:
            assert z == x and not out.noised_S[i]
    assert not (R == 0 and (out.x_t_S[out.noised_S] != mask).any())


def test_replacements_are_uniform_over_the_other_tokens():
    V, x, n = 8, 2, 40000
    sample, g = make_sample([x] * n), torch.Generator().manual_seed(0)
    out, noised = scdd.mix(sample, 0.0, 1.0, 5, V, g)
    counts = torch.bincount(out, minlength=V)
    assert noised.all() and counts[x] == counts[5] == 0
    expected = n / (V - 2)
    assert (counts[[v for v in range(V) if v not in (x, 5)]] - expected).abs().max() < 5 * expected**0.5


# --- schedule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in PUBLISHED if "gamma" in c], ids=lambda c: f"R={c['max_ratio']}")
def test_published_schedule(case):
    args = flags(scdd_max_ratio=case["max_ratio"], scdd_gamma_shape=case["gamma_shape"], scdd_peak_time=case["t_peak"])
    level = scdd.schedule(torch.tensor(case["t"]).double(), args)
    for name in ("clean", "uniform", "absorbed", "rho"):
        published = torch.tensor(case[name]).double()
        assert torch.allclose(getattr(level, name), published, rtol=2e-4 if name == "rho" else 2e-5, atol=1e-7), name
    gamma = torch.tensor(case["gamma"]).double()
    assert torch.allclose(level.clean + level.uniform, gamma, rtol=2e-5, atol=1e-7)


def test_worked_example():
    half = scdd.schedule(torch.tensor(0.5, dtype=torch.float64), flags())
    assert [x.item() for x in half[:3]] == pytest.approx([0.45, 0.1, 0.45])
    assert half.rho.item() == pytest.approx(0.45 / 0.55)


def test_increments_are_exact():
    """A step's change times T is in the loss: against fractions of 50 digits."""
    from decimal import Decimal, getcontext

    getcontext().prec = 50
    args, T = flags(), 1000

    def exact(k):
        t = Decimal(k) / T
        c = Decimal(1) / 9 * (4 * t * (1 - t)).sqrt()
        clean, uniform = (1 - t) / (1 + c), c / (1 + c)
        return clean / (clean + uniform), clean + uniform

    level = scdd.schedule(torch.arange(T, dtype=torch.float64) / T, args)
    for k in (1, 2, 10, 500, 998, 999):
        (rho_s, gamma_s), (rho_t, gamma_t) = exact(k - 1), exact(k)
        assert (level.rho[k - 1] - level.rho[k]).item() == pytest.approx(float(rho_s - rho_t), rel=1e-10)
        released = 1 - level.absorbed[k - 1] / level.absorbed[k]
        assert released.item() == pytest.approx(float((gamma_s - gamma_t) / (1 - gamma_t)), rel=1e-10)


def valid_chain(args) -> bool:
    """Are all transition probabilities of all steps probabilities?"""
    shares = [scdd_shares(k / args.scdd_timesteps, args) for k in range(args.scdd_timesteps)]
    gamma = [clean + uniform for clean, uniform in shares]
    rho = [clean / (clean + uniform) for clean, uniform in shares]
    pairs = lambda values: zip(values, values[1:], strict=False)
    return all(b <= a * (1 + 1e-12) for values in (gamma, rho) for a, b in pairs(values))


@settings(max_examples=60, deadline=None)
@given(R=st.floats(0, 0.97), peak=st.floats(0.03, 0.97), shape=st.floats(0.05, 25), T=st.sampled_from([2, 5, 40]))
def test_exactly_the_schedules_that_are_chains_are_accepted(R, peak, shape, T):
    args = flags(scdd_max_ratio=R, scdd_peak_time=peak, scdd_gamma_shape=shape, scdd_timesteps=T)
    if valid_chain(args):
        scdd.validate(args)
    else:
        with pytest.raises(ValueError, match="are no diffusion"):
            scdd.validate(args)
    if shape * (1 - peak) <= 1 and shape * peak <= 1:  # enough, whatever the rest
        assert valid_chain(args)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(scdd_max_ratio=1.0), r"--scdd-max-ratio 1.0 is out of range: give a number in \[0, 1\)"),
        (dict(scdd_max_ratio=-0.1), "--scdd-max-ratio"),
        (dict(scdd_max_ratio=math.nan), "--scdd-max-ratio"),
        (dict(scdd_peak_time=0.0), "--scdd-peak-time"),
        (dict(scdd_peak_time=1.0), "--scdd-peak-time"),
        (dict(scdd_gamma_shape=0.0), "--scdd-gamma-shape"),
        (dict(scdd_gamma_shape=math.inf), "--scdd-gamma-shape"),
        (dict(scdd_timesteps=1), "--scdd-timesteps 1 is out of range: give 2 to 1000000"),
        (dict(scdd_chunk_size=0), "--scdd-chunk-size"),
        (dict(dllm_eps=0.0), "--dllm-eps"),
        (dict(vocab_size=2), "a vocabulary of 2 has nothing to replace a token by"),
        # published, but no chains
        (dict(scdd_max_ratio=0.5, scdd_gamma_shape=2.0, scdd_peak_time=0.3), "more clean tokens among the visible"),
        (dict(scdd_gamma_shape=3.0), "1 - --scdd-peak-time"),
        (dict(scdd_max_ratio=0.9, scdd_gamma_shape=10.0, scdd_peak_time=0.95), "more visible tokens"),
    ],
)
def test_bad_flags(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        scdd.validate(flags(**changes))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


# --- layout ---------------------------------------------------------------------------------------------------------


def test_layout_scores_every_supervised_token():
    samples = [make_sample([1, 2, 3, 4, 5], [0, 1, 1, 1, 1], 0), make_sample([6, 7, 8], [1, 0, 1], 1)]
    corrupted = [scdd.corrupt(sample, Draws(3, sample.index), flags()) for sample in samples]
    batch = scdd.layout(corrupted, 6, flags())
    term = batch.terms["dllm"]
    assert term.count == 6 == batch.tokens["supervised"] and batch.streams == 1
    assert term.weights_BQ.tolist() == [[0, 1, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0]]
    assert torch.equal(term.inputs_BQ, batch.tokens_BQ) and (batch.tokens_BQ[1, 3:] == 0).all()
    for b, c in enumerate(corrupted):
        n = len(c.sample)
        assert torch.equal(batch.tokens_BQ[b, :n], c.x_t_S) and torch.equal(term.targets_BQ[b, :n], c.sample.tokens_S)
        assert (term.levels_BQ[b, :n] == c.level_S).all()
