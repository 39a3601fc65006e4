"""Likelihoods of given texts: exact ones against a forward for every token, bounds against enumeration."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_dllm.data.tokenizer import Null
from megatron_dllm.evaluation import likelihood as module
from megatron_dllm.evaluation.estimators import estimator_of
from megatron_dllm.evaluation.likelihood import Statistics, loglikelihood, windows
from megatron_dllm.evaluation.masks import masks, masks_of_blocks, passes
from megatron_dllm.generation.load import Loaded
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import NUM_ATTRIBUTES, POSITION
from tests.one_process import one_process, randomize, small_model
from tests.unit.block_cases import MASK, flags

V = 61  # MASK is its last id
CONTEXT, TEXT = [5, 9, 33, 2, 17], [40, 8, 21, 8, 50, 3, 12, 30, 9, 44, 7]
SCDD = dict(scdd_max_ratio=0.0, scdd_gamma_shape=1.0, scdd_peak_time=0.5, scdd_timesteps=1000, scdd_chunk_size=256)


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    with one_process():
        yield


def loaded_of(mode: str, rule=None, **changes) -> Loaded:
    """The same wide weights whatever the mode."""
    model = small_model(rule=rule or get_mode(mode).visible)
    randomize(model)
    known = mode if mode in ("bd3lm", "hybrid", "idlm") else "bd3lm"
    args = flags(known, **changes)
    vars(args).update(dllm_mode=mode, vocab_size=V, max_position_embeddings=32, **SCDD)
    return Loaded(model.eval(), Null(V, eos_id=0), args)


def log_q(loaded: Loaded, tokens: list[int], without_mask: bool = False) -> torch.Tensor:
    """[Q, V] of one plain sequence, from a model that sees what its rule allows in one block of one stream."""
    attributes = torch.zeros(1, len(tokens), NUM_ATTRIBUTES, dtype=torch.int32)
    attributes[..., POSITION] = torch.arange(len(tokens))
    with torch.no_grad():
        logits = loaded.model(torch.tensor([tokens]), torch.arange(len(tokens))[None], attributes)[0, :, :V]
    if without_mask:
        logits[:, MASK] = float("-inf")
    return logits.double().log_softmax(-1)


def causal(query, key):
    return key[..., POSITION] <= query[..., POSITION]


def subsets_bound(context, text, **options) -> float:
    """Σ over sizes l and subsets M: 1/L · 1/C(L, l) · L/l · Σ_{i in M} nll, every subset in a forward of its own."""
    loaded, L, bound = loaded_of("mdlm"), len(text), 0.0
    for size in range(1, L + 1):
        for chosen in itertools.combinations(range(L), size):
            noised = context + [MASK if i in chosen else token for i, token in enumerate(text)]
            scores = log_q(loaded, noised, **options)
            nll = -sum(scores[len(context) + i, text[i]].item() for i in chosen)
            bound += nll / size / math.comb(L, size)
    return bound


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hybrid", "idlm"])
def test_a_causal_stream_is_exact_and_knows_what_is_greedy(mode):
    loaded = loaded_of(mode)
    scores = log_q(loaded_of("mdlm", rule=causal), CONTEXT + TEXT)
    expected = sum(scores[len(CONTEXT) + i - 1, token].item() for i, token in enumerate(TEXT))
    written = list(CONTEXT)
    while len(written) < 16:
        row = log_q(loaded_of("mdlm", rule=causal), written)[-1]
        row[MASK] = float("-inf")
        written.append(int(row.argmax()))
    greedy = written[len(CONTEXT) :]
    wrong = [*greedy[:-1], (greedy[-1] + 1) % MASK]
    statistics = Statistics()
    requests = [(CONTEXT, text) for text in (TEXT, greedy, wrong, TEXT[:4])] + [(CONTEXT + TEXT[:4], TEXT[4:])]
    found = loglikelihood(loaded, requests, num_draws=3, batch_size=2, statistics=statistics)
    assert found[0].nats == pytest.approx(expected, rel=1e-5)
    assert [score.is_greedy for score in found[:3]] == [False, True, False]
    assert found[3].nats + found[4].nats == pytest.approx(expected, rel=1e-5)  # the context is never scored
    assert statistics.forwards == 5


def test_the_mask_is_never_what_greedy_decoding_writes():
    best = int(log_q(loaded_of("mdlm", rule=causal), [1])[-1].argmax())
    models = loaded_of("mdlm", rule=causal), loaded_of("idlm")
    for loaded in models:  # the mask looks like the likeliest token, only more so
        with torch.no_grad():
            loaded.model.output_layer.weight[MASK] = 1.5 * loaded.model.output_layer.weight[best]
    row = log_q(models[0], [1])[-1]
    assert row.argmax() == MASK
    found = loglikelihood(models[1], [([1], [best]), ([1], [best - 1])])
    assert [score.is_greedy for score in found] == [True, False]
    assert found[0].nats == pytest.approx(row[best].item(), rel=1e-5)  # the mask keeps its probability


def test_blocks_of_one_token_are_the_autoregressive_likelihood():
    """bd3lm: Σ of -log q(x_i | x_<i), each from a forward of its own over [x_<i, mask]; also without a context."""
    scores = lambda tokens: log_q(loaded_of("mdlm", rule=causal), tokens)[-1]
    for context in (CONTEXT, []):
        (found,) = loglikelihood(loaded_of("bd3lm", dllm_block_size=1), [(context, TEXT)], num_draws=64)
        expected = sum(scores(context + TEXT[:i] + [MASK])[TEXT[i]].item() for i in range(len(TEXT)))
        assert found.nats == pytest.approx(expected, rel=1e-5)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bd3lm", "hybrid"])
@pytest.mark.parametrize("draws", [5, 5000])
def test_one_block_is_mdlm_with_the_same_draws(mode, draws):
    """With few draws, and with so many that the bound is enumerated."""
    context, text = CONTEXT, TEXT[:4] if draws > 5 else TEXT
    options = dict(num_draws=draws, batch_size=3, seed=7, likelihood="bound")
    (one,) = loglikelihood(loaded_of(mode, dllm_block_size=32), [(context, text)], **options)
    (other,) = loglikelihood(loaded_of("mdlm"), [(context, text)], **options)
    assert one.nats == pytest.approx(other.nats, rel=1e-5)


def test_a_bound_is_enumerated_where_that_costs_no_more():
    statistics = Statistics()
    (found,) = loglikelihood(loaded_of("mdlm"), [(CONTEXT, TEXT[:3])], num_draws=7, statistics=statistics)
    assert statistics.forwards == 7
    assert -found.nats == pytest.approx(subsets_bound(CONTEXT, TEXT[:3]), rel=1e-5)


def test_the_bound_bounds_what_decoding_in_random_order_writes():
    """p(x) is the mean over all orders of the product of the network's predictions."""
    loaded, text = loaded_of("mdlm"), TEXT[:3]
    products = []
    for order in itertools.permutations(range(3)):
        tokens, nats = CONTEXT + [MASK] * 3, 0.0
        for i in order:
            nats += log_q(loaded, tokens)[len(CONTEXT) + i, text[i]].item()
            tokens[len(CONTEXT) + i] = text[i]
        products.append(nats)
    exact = torch.tensor(products).logsumexp(0).item() - math.log(6)
    (found,) = loglikelihood(loaded, [(CONTEXT, text)])
    assert found.nats == pytest.approx(sum(products) / 6, rel=1e-5) and found.nats < exact - 0.1


def test_few_draws_estimate_the_bound_without_bias():
    loaded, request = loaded_of("mdlm"), (CONTEXT, TEXT[:4])
    (exact,) = loglikelihood(loaded, [request])
    found = [loglikelihood(loaded, [request], num_draws=6, batch_size=6, seed=seed)[0].nats for seed in range(60)]
    found = torch.tensor(found, dtype=torch.float64)
    assert found.std() > 0 and abs(found.mean() - exact.nats) < 3.5 * found.std() / 60**0.5


def test_masks_have_exact_counts_spread_evenly_and_the_right_expectation():
    g = torch.Generator().manual_seed(0)
    value_L = torch.rand(9, dtype=torch.float64)
    cost = lambda masked_NL: masked_NL.double() @ value_L * masked_NL.sum(1) ** 0.5  # any function of the subset
    everything_NL, weight_N = masks(9, 511, g)
    assert len(everything_NL) == 511 and len(everything_NL.unique(dim=0)) == 511
    exact = cost(everything_NL) @ weight_N
    drawn, with_rates = [], []
    for _ in range(300):
        masked_NL, weight_N = masks(9, 18, g)
        assert masked_NL.sum(1).bincount(minlength=10).tolist() == [0, *[2] * 9]  # every size equally often
        drawn.append((cost(masked_NL) @ weight_N).item())
        p_N = 1e-3 + (1 - 1e-3) * torch.rand(18, generator=g)  # the noise of training
        with_rates.append((cost(torch.rand(18, 9, generator=g) < p_N[:, None]) / p_N).mean().item())
    drawn, with_rates = torch.tensor(drawn), torch.tensor(with_rates)
    assert abs(drawn.mean() - exact) < 3.5 * drawn.std() / 300**0.5
    assert drawn.std() < 0.5 * with_rates.std()
    assert [passes(length, 128) for length in (1, 3, 7, 8, 10_000)] == [1, 7, 127, 128, 128]


def test_masks_of_blocks_are_those_of_each_block_alone():
    block_S = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    scored_S = torch.tensor([False, False, True, True, True, True, True, True])
    masked_NS, weight_NS = masks_of_blocks(block_S, scored_S, 16, torch.Generator())
    assert masked_NS.shape == (15, 8) and not masked_NS[:, :2].any() and (weight_NS[~masked_NS] == 0).all()
    for block, size in ((0, 1), (1, 4), (2, 1)):
        masked_NL = masked_NS[:, scored_S & (block_S == block)]
        assert masked_NL.any(1).sum() == 2**size - 1
        assert torch.allclose(weight_NS[:, scored_S & (block_S == block)].sum(0), _inclusion(size))


def _inclusion(size: int) -> torch.Tensor:
    """Σ of the weights of the masks that hold one given token: Σ_l 1/L · C(L-1, l-1) / C(L, l) · L/l = 1."""
    return torch.ones(size)


def test_scdd_without_random_tokens_is_mdlm_that_never_predicts_the_mask():
    (found,) = loglikelihood(loaded_of("scdd"), [(CONTEXT, TEXT[:3])], num_draws=3000, batch_size=256)
    assert -found.nats == pytest.approx(subsets_bound(CONTEXT, TEXT[:3], without_mask=True), rel=0.05)


def test_levels_of_scdd_are_all_of_its_chain():
    """As published, level T counts as T - 1."""
    loaded = loaded_of("scdd")
    loaded.args.scdd_timesteps = 10
    sample = module._sample(1, (CONTEXT, TEXT), loaded.args, "bound")
    noised = estimator_of(False, loaded.args, 10, seed=3).corrupt(sample)
    assert sorted(round(10 * c.level_S[0].item()) for c in noised) == [*range(1, 10), 9]
    assert all(c.weight_S.tolist() == [0.0] * len(CONTEXT) + [pytest.approx(0.1)] * len(TEXT) for c in noised)


# --- what nothing depends on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kind"), [*((m, "bound") for m in ("mdlm", "bd3lm", "scdd")), ("idlm", "exact")])
def test_neither_order_nor_batch_nor_company_changes_a_likelihood(mode, kind):
    loaded = loaded_of(mode)
    requests = [(CONTEXT, TEXT), ([1], TEXT[:4]), (CONTEXT, TEXT[2:7]), (CONTEXT + [3], TEXT[:1]), (CONTEXT, TEXT)]
    options = dict(num_draws=6, likelihood=kind)
    together = loglikelihood(loaded, requests, batch_size=4, **options)
    assert loglikelihood(loaded, requests, batch_size=4, **options) == together
    close = lambda scores: [pytest.approx(score.nats, rel=1e-5) for score in scores]
    assert [score.nats for score in loglikelihood(loaded, requests[::-1], batch_size=100, **options)] == close(
        together[::-1]
    )
    alone = [loglikelihood(loaded, [request], batch_size=1, **options)[0] for request in requests]
    assert [score.nats for score in alone] == close(together)
    other = loglikelihood(loaded, requests[:1], seed=5, **options)[0].nats
    assert (other == pytest.approx(together[0].nats, rel=1e-5)) == (kind == "exact")
    assert not loaded.model.training


def test_copies_of_the_model_share_the_work(monkeypatch):
    """Each copy scores some batches; the sum is the same to the last bit."""
    loaded, seen = loaded_of("mdlm"), []

    def share_out(items, work):
        results = [None] * len(items)
        for copy in range(3):
            part = work(list(items[copy::3]))
            seen.append(len(part))
            results[copy::3] = part
        return results

    requests = [(CONTEXT, TEXT), ([], TEXT[:5]), (CONTEXT, TEXT[2:])]
    one = loglikelihood(loaded, requests, num_draws=9, batch_size=4)
    monkeypatch.setattr(module, "share_out", share_out)
    assert loglikelihood(loaded, requests, num_draws=9, batch_size=4) == one
    assert seen == [3, 2, 2]


def test_equally_long_answers_to_one_question_are_compared_on_equal_masks():
    estimator = estimator_of(False, loaded_of("mdlm").args, 20, 1)
    sample = lambda context, text: module._sample(1, (context, text), loaded_of("mdlm").args, "bound")
    first, second, third = (
        torch.stack([c.noised_S for c in estimator.corrupt(sample(*request))])
        for request in ((CONTEXT, TEXT[:6]), (CONTEXT, TEXT[5:]), (CONTEXT[::-1], TEXT[:6]))
    )
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_windows_score_every_token_once_and_fit():
    text = list(range(10))
    assert windows(text, 4) == [([], [0, 1, 2, 3]), ([3], [4, 5, 6]), ([6], [7, 8, 9])]
    assert windows(text[:9], 4, [50]) == [([50], [0, 1, 2]), ([2], [3, 4, 5]), ([5], [6, 7, 8])]
    assert windows(text[:8], 4) == [([], [0, 1, 2, 3]), ([3], [4, 5, 6]), ([4, 5, 6], [7])]
    assert windows([], 4) == []


# --- edges and refusals -----------------------------------------------------------------------------------------------


def test_nothing_is_certain_and_no_context_is_none():
    for mode in ("mdlm", "hybrid"):
        assert loglikelihood(loaded_of(mode), [(CONTEXT, []), ([], [])]) == [(0.0, True)] * 2
        assert loglikelihood(loaded_of(mode), []) == []
    (found,) = loglikelihood(loaded_of("mdlm"), [([], TEXT[:3])])
    assert -found.nats == pytest.approx(subsets_bound([], TEXT[:3]), rel=1e-5)


def test_greedy_of_a_bound_is_what_the_sampler_writes(monkeypatch):
    answers = {(1, 2): [7, 8], (3,): [9, 9]}

    def generate(model, tokenizer, prompts, config):
        assert config.max_new_tokens == config.steps == 2 and config.temperature == 0
        return [SimpleNamespace(ids=answers[tuple(prompt)]) for prompt in prompts]

    monkeypatch.setattr("megatron_dllm.generation.generate", generate)
    requests = [([1, 2], [7, 8]), ([1, 2], [8, 7]), ([3], [9, 9]), ([3], [])]
    found = loglikelihood(loaded_of("mdlm"), requests, num_draws=1, check_greedy=True)
    assert [score.is_greedy for score in found] == [True, False, True, True]
    assert [s.is_greedy for s in loglikelihood(loaded_of("mdlm"), requests, num_draws=1)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("mode", "request_", "options", "words"),
    [
        ("mdlm", (CONTEXT * 6, TEXT), {}, "request 1 is 41 tokens long, but the model has 32 positions"),
        ("mdlm", (CONTEXT, [MASK]), {}, "request 1 holds the mask token 60"),
        ("mdlm", (CONTEXT, [V]), {}, "ids outside the model's vocabulary of 61"),
        ("hybrid", ([], TEXT), {}, "no context to predict its first token from"),
        ("mdlm", (CONTEXT, TEXT), dict(likelihood="exact"), "has no exact likelihood"),
        ("idlm", (CONTEXT, TEXT), dict(likelihood="bound"), "is for bd3lm, hybrid, mdlm, scdd"),
        ("mdlm", (CONTEXT, TEXT), dict(likelihood="best"), "choose one of auto, exact, bound"),
        ("mdlm", (CONTEXT, TEXT), dict(num_draws=0), "must be at least 1"),
    ],
)
def test_what_is_refused(mode, request_, options, words):
    with pytest.raises(ValueError, match=words) as error:
        loglikelihood(loaded_of(mode), [request_], **options)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
