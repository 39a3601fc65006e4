"""Blocks and noise of bd3lm, hybrid and idlm, against loops and against published numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.modes import bd3lm, common, hybrid, idlm, mdlm
from megatron_dllm.noise import Draws, ValidationDraws
from tests.unit.block_cases import MASK, flags, golden, make_sample

# --- blocks -----------------------------------------------------------------------------------------------------------


def naive_blocks(documents, supervised, size, origin):
    blocks, offsets, block, start = [], [], -1, 0
    for i in range(len(documents)):
        first = i == 0 or documents[i] != documents[i - 1]
        answers = i > 0 and supervised[i] and not supervised[i - 1]
        if first or (origin == "response" and answers):
            start = i
        if (i - start) % size == 0:
            block += 1
        blocks.append(block)
        offsets.append((i - start) % size)
    return blocks, offsets


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    bits=st.lists(st.booleans(), min_size=36, max_size=36),
    size=st.sampled_from([1, 3, 4, 16]),
    origin=st.sampled_from(["sequence", "response"]),
)
def test_blocks_token_by_token(lengths, bits, size, origin):
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    supervised = bits[: len(documents)]
    block_S, offset_S = common.blocks(make_sample(documents, supervised), size, origin)
    assert (block_S.tolist(), offset_S.tolist()) == naive_blocks(documents, supervised, size, origin)


def test_blocks_by_hand():
    sample = make_sample([0] * 7 + [1] * 2, [0, 0, 0, 1, 1, 1, 0, 1, 1])
    assert common.blocks(sample, 2, "sequence")[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 4]
    assert common.blocks(sample, 2, "response")[0].tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 4]


# --- noise ------------------------------------------------------------------------------------------------------------


def published_draws(seed):
    return Draws(seed, 0)  # seed_for_index adds a multiple of 2**32, which the generator does not see


@pytest.mark.parametrize("case", golden("03_corrupt_blockwise.json"), ids=lambda c: f"block {c['block_size']}")
def test_published_blockwise_corruption(case):
    ids, supervised = case["input_ids"][0], case["loss_mask"][0]
    sample = make_sample([0] * len(ids), supervised, tokens=ids)
    if case["block_size"] is None:  # only reachable as a kernel: one block, in which at least one place is chosen
        g = published_draws(case["seed"]).generator()
        m = case["eps"] + (1 - case["eps"]) * torch.rand(1, generator=g)
        rate = math.log(2) / (case["half_life"] * len(ids))
        chosen = hybrid.gumbel_blocks(torch.tensor([len(ids)]), len(ids), m, rate, g, least=1)[0]
        assert (chosen & sample.loss_mask_S).int().tolist() == case["noise"][0]
        return
    args = flags(
        dllm_mask_token_id=case["mask_id"],
        dllm_eps=case["eps"],
        dllm_block_size=case["block_size"],
        dllm_corruption="blockwise",
        dllm_half_life_ratio=case["half_life"],
    )
    out = hybrid.corrupt(sample, published_draws(case["seed"]), args)
    assert out.x_t_S.tolist() == case["noisy"][0]
    assert out.noised_S.int().tolist() == case["noise"][0]
    assert torch.allclose(out.level_S, torch.tensor(case["p"][0]), rtol=0, atol=1e-6)
    assert torch.allclose(out.weight_S, torch.tensor(case["noise"][0]) / out.level_S, rtol=1e-6)


def test_published_blockwise_corruption_at_recipe_level():
    case = golden("08_recipe_corruption.json")[3]
    assert case["what"] == "hybrid block 4"
    args = flags(dllm_mask_token_id=999, dllm_corruption="blockwise")
    rows = torch.arange(100, 132).view(4, 8)
    step = 5
    for j in range(4):
        sample = make_sample([0] * 8, [0, 0, 1, 1, 1, 1, 1, 1], step * 4 + j, rows[j])
        out = hybrid.corrupt(sample, Draws(42, sample.index), args)
        assert out.x_t_S.tolist() == case["noisy"][j]
        assert torch.allclose(out.level_S, torch.tensor(case["p"][j]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", golden("04_gumbel_topk.json"), ids=lambda c: f"seed {c['seed']}")
def test_published_gumbel_top_k(case):
    g = torch.Generator().manual_seed(case["seed"])
    log_weights = torch.tensor([[float(x) for x in row] for row in case["log_w"]])
    chosen = hybrid.gumbel_top_k(log_weights, torch.tensor(case["k"]), g)
    assert chosen.int().tolist() == case["mask"]


def test_published_all_masked():
    (case,) = golden("07_all_masked.json")
    sample = make_sample([0] * 12, case["loss_mask"][0], tokens=case["input_ids"][0])
    out = idlm.corrupt(sample, Draws(0, 0), flags("idlm", dllm_mask_token_id=99))
    assert out.x_t_S.tolist() == case["noisy"][0]
    assert out.noised_S.int().tolist() == case["noise"][0]
    assert (out.level_S == 1).all()


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_block_diffusion_noise_block_by_block(size, validation):
    documents = [0] * 7 + [1] * 6
    sample = make_sample(documents, [0, 1] * 6 + [1], index=3)
    draws = ValidationDraws(3) if validation else Draws(1, 3)
    out = bd3lm.corrupt(sample, draws, flags("bd3lm", dllm_block_size=size))
    blocks, offsets = naive_blocks(documents, None or sample.loss_mask_S.tolist(), size, "sequence")
    g = draws.generator()
    levels = [0.999 * u + 1e-3 for u in draws.level(g, (blocks[-1] + 1,)).tolist()]
    for i, r in enumerate(torch.rand(13, generator=g).tolist()):
        p = levels[blocks[i]]
        noised = r < p and bool(sample.loss_mask_S[i])
        assert out.noised_S[i] == noised and out.level_S[i].item() == pytest.approx(p, rel=1e-6)
        assert out.x_t_S[i] == (MASK if noised else sample.tokens_S[i])
        assert out.weight_S[i].item() == pytest.approx(noised / p, rel=1e-6)
        assert (out.block_S[i], out.offset_S[i]) == (blocks[i], offsets[i])


@pytest.mark.parametrize("index", range(5))
def test_one_block_has_the_noise_of_mdlm(index):
    sample = make_sample([0] * 20, [0] * 3 + [1] * 17, index)
    ours = bd3lm.corrupt(sample, Draws(42, index), flags("bd3lm", dllm_block_size=20))
    uniform = hybrid.corrupt(sample, Draws(42, index), flags(dllm_block_size=4))
    for out in (ours, uniform):
        expected = mdlm.corrupt(sample, Draws(42, index), flags())
        for name in ("x_t_S", "noised_S", "weight_S", "level_S"):
            assert torch.equal(getattr(out, name), getattr(expected, name))


MONTE_CARLO = 5000


def mean_weights(mode, args, supervised, draws=MONTE_CARLO):
    """Mean and standard error of each token's weight over noise: 1 for an unbiased objective."""
    sample = make_sample([0] * len(supervised), supervised)
    weights = torch.stack([mode.corrupt(sample, Draws(5, i), args).weight_S for i in range(draws)])
    return weights.mean(0), weights.std(0) / draws**0.5


def test_inclusion_weights_are_unbiased_at_every_place_and_published_ones_are_not():
    supervised = [0] * 3 + [1] * 13 + [0, 1, 0, 0, 0, 1, 1, 1]
    blockwise = dict(dllm_corruption="blockwise", dllm_block_size=8, dllm_eps=0.2)
    mean, error = mean_weights(hybrid, flags(dllm_blockwise_weights="inclusion", **blockwise), supervised)
    scored = torch.tensor(supervised).bool()
    assert not mean[~scored].any()
    assert ((mean - 1).abs() < 5 * error)[scored].all()
    assert error.max() < 0.03  # the tolerance means something
    mean, error = mean_weights(hybrid, flags(**blockwise), supervised, 2000)
    assert mean[8] < 0.85 and mean[15] > 1.15  # first and last of a block


def test_inclusion_probabilities_average_the_level_and_keep_the_odds():
    sample = make_sample([0] * 20, [0, 0, 1, 1, 1, 1, 0, 1] * 2 + [1] * 4)
    block_S, offset_S = common.blocks(sample, 8, "sequence")
    m_N, rate = torch.tensor([0.3, 0.999, 0.02]), math.log(2) / 2
    pi_S = hybrid.inclusion(block_S, offset_S, sample.loss_mask_S, m_N, rate).double()
    for b in range(3):
        inside = (block_S == b) & sample.loss_mask_S
        assert pi_S[inside].mean().item() == pytest.approx(m_N[b].item(), rel=1e-5)
    odds = pi_S / (1 - pi_S)
    assert (odds[3] / odds[2]).item() == pytest.approx(math.exp(rate * 0.7), rel=1e-4)
    assert (odds[18] / odds[16]).item() == pytest.approx(math.exp(2 * rate * 0.98), rel=1e-4)


def test_an_unsupervised_block_has_no_inclusion_to_find():
    sample = make_sample([0] * 8, [0] * 4 + [1] * 4)
    block_S, offset_S = common.blocks(sample, 4, "sequence")
    pi_S = hybrid.inclusion(block_S, offset_S, sample.loss_mask_S, torch.tensor([0.5, 1.0]), 0.7)
    assert torch.isfinite(pi_S).all() and (pi_S[4:] == 1).all()


def test_complementary_masks_are_unbiased_and_cover_every_token():
    sample = make_sample([0] * 12, [0] * 2 + [1] * 10)
    args = flags("bd3lm", bd3lm_complementary_masks=True, dllm_eps=0.05)
    totals = torch.zeros(2, 12, dtype=torch.float64)
    for i in range(MONTE_CARLO):
        out = bd3lm.corrupt(sample, Draws(5, i), args)
        assert out.level_S.min() >= 0.05 and out.level_S.max() <= 0.95
        term = bd3lm.layout([out], 12, args).terms["dllm"] if i < 50 else None
        rest = (sample.loss_mask_S & ~out.noised_S) / (1 - out.level_S)
        totals += torch.stack([out.weight_S, rest])
        if term is not None:
            noisy, complement, clean = term.weights_BQ[0].chunk(3)
            assert torch.equal(noisy, out.weight_S) and torch.allclose(complement, rest) and not clean.any()
            assert (((noisy > 0).int() + (complement > 0).int()) == sample.loss_mask_S.int()).all()
            assert term.count == 20
            assert bd3lm.layout([out], 12, args).tokens["noised"] == 10
    assert ((totals[:, 2:] / MONTE_CARLO - 1).abs() < 0.2).all()


def test_block_sizes_follow_the_schedule_by_the_sample_alone():
    args = flags("bd3lm", dllm_block_size=None, dllm_block_size_schedule="1:4:32", dllm_block_size_schedule_iters=3)
    sizes = [bd3lm.block_size(index, args) for index in range(100)]  # 8 samples an iteration
    assert sizes == [1] * 24 + [4] * 24 + [32] * 52
    sample = make_sample([0] * 40, index=30)
    assert bd3lm.corrupt(sample, Draws(1, 30), args).block_S[-1] == 9
    assert bd3lm.corrupt(sample, ValidationDraws(30), args).block_S[-1] == 1  # evaluations use the last size


def test_the_noise_count_counts_noise_twice():
    """O6: weights 1/p and division by the number of noised tokens. For a constant nll of 1 the unbiased loss of a
    sample averages 1, the published default many times that."""
    sample = make_sample([0] * 256)
    scale = {}
    for normalization in ("supervised", "noise"):
        args = flags(dllm_loss_normalization=normalization)
        values = []
        for i in range(3000):
            term = hybrid.layout([hybrid.corrupt(sample, Draws(9, i), args)], 256, args).terms["dllm"]
            values.append(float(term.weights_BQ.sum()) / max(term.count, 1))
        scale[normalization] = torch.tensor(values)
    assert scale["supervised"].mean().item() == pytest.approx(1, abs=0.1)
    assert scale["noise"].mean() > 4 and scale["noise"].median() > 1.7
