"""Seeds and draws: the published numbers bit for bit, and streams that have nothing to do with each other."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.sample import Sample
from megatron_dllm.modes import mdlm
from megatron_dllm.noise import (
    CORRUPTION,
    Draws,
    ValidationDraws,
    corruption_sample_seed,
    generator,
    hashed_seed,
    seed_for_index,
)

GOLDEN = Path(__file__).parents[1] / "golden"
LOW_32 = (1 << 32) - 1
STREAMS = (CORRUPTION, "anchors", "self-conditioning", "canvas", "validation/corruption")


def golden(name: str) -> list[dict]:
    return json.loads((GOLDEN / name).read_text())["cases"]


def sample(ids, loss_mask, index=0) -> Sample:
    n = len(ids)
    return Sample(
        torch.tensor(ids),
        torch.tensor(loss_mask).bool(),
        torch.zeros(n, dtype=torch.int32),
        torch.arange(n),
        index,
    )


def flags(mask_id: int, eps: float = 1e-3):
    return SimpleNamespace(dllm_mask_token_id=mask_id, dllm_eps=eps)


# --- the published corruption stream ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("01_seeds.json")[0]["corruption"])
def test_published_seeds(case):
    seed = corruption_sample_seed(
        case["base"],
        case["step"],
        case["dp_rank"],
        case["dp_size"],
        case["local_bs"],
        case["grad_acc"],
        case["mb"],
        case["offset"],
    )
    assert seed == int(case["seed"])
    assert seed & LOW_32 == case["low32"]
    assert torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() == case["first_two_rand"]


def test_seeds_are_63_bit_and_do_not_collide():
    assert 0 <= seed_for_index(2**62, 2**40) < 2**63
    low = {seed_for_index(42, index) & LOW_32 for index in range(20000)}
    assert len(low) == 20000


class RowOfBatch(Draws):
    """The published kernel draws u [B], then r [B, L]; training draws row by row (B = 1). This replays row b."""

    def __init__(self, seed, b, B, L):
        super().__init__(seed, 0)
        self.b, self.B, self.L = b, B, L

    def level(self, g, shape=(1,)):
        u = torch.rand(self.B, generator=g)
        torch.rand(self.b * self.L, generator=g)
        return u[self.b : self.b + 1]


@pytest.mark.parametrize("case", golden("02_corrupt_uniform.json"))
def test_published_uniform_corruption(case):
    B, L = len(case["input_ids"]), len(case["input_ids"][0])
    for b in range(B):
        clean = sample(case["input_ids"][b], case["loss_mask"][b])
        # seed_for_index adds a multiple of 2**32, which the generator does not see
        draws = Draws(case["seed"], 0) if B == 1 else RowOfBatch(case["seed"], b, B, L)
        out = mdlm.corrupt(clean, draws, flags(case["mask_id"], case["eps"]))
        assert out.x_t_S.tolist() == case["noisy"][b]
        assert out.noised_S.int().tolist() == case["noise"][b]
        p = torch.tensor(case["p"][b])
        assert torch.allclose(out.level_S, p, rtol=0, atol=1e-6)
        assert torch.allclose(out.weight_S, torch.tensor(case["noise"][b]) / p, rtol=1e-6)


def test_published_corruption_at_recipe_level():
    one_rank, two_ranks, other_base, _ = golden("08_recipe_corruption.json")
    rows = torch.arange(100, 132).view(4, 8)
    supervised = [0, 0, 1, 1, 1, 1, 1, 1]
    args = flags(999)

    def corrupted(row, base, index):
        return mdlm.corrupt(sample(rows[row].tolist(), supervised, index), Draws(base, index), args)

    step = one_rank["step"]
    seen = [corrupted(j, 42, step * 4 + j) for j in range(4)]
    assert [c.x_t_S.tolist() for c in seen] == one_rank["noisy"]
    assert [c.level_S[0].item() for c in seen] == one_rank["p"]
    # two data-parallel ranks of two rows own every second row of the stream
    assert two_ranks["equal"]
    for rank in range(2):
        for offset in range(2):
            row = rank + offset * 2
            strided = corruption_sample_seed(42, step, rank, 2, 2, 1, 0, offset)
            assert strided == corruption_sample_seed(42, step, 0, 1, 4, 1, 0, row) == seed_for_index(42, step * 4 + row)
    levels = [corrupted(j, 7, step * 4 + j).level_S[0].item() for j in range(4)]
    assert levels == other_base["p"]


@settings(max_examples=50, deadline=None)
@given(
    base=st.integers(0, 2**31),
    step=st.integers(0, 10**6),
    # factors of a global batch of 24 rows, in any order
    factors=st.permutations([2, 3, 4]),
    row=st.integers(0, 23),
)
def test_any_schedule_gives_a_global_row_the_same_seed(base, step, factors, row):
    dp_size, local, accumulation = factors
    # naive: walk the strided schedule until it meets the row
    for microbatch in range(accumulation):
        for offset in range(local):
            for rank in range(dp_size):
                if (microbatch * local + offset) * dp_size + rank == row:
                    seed = corruption_sample_seed(base, step, rank, dp_size, local, accumulation, microbatch, offset)
                    assert seed == seed_for_index(base, step * 24 + row)
                    return
    raise AssertionError("no rank owns the row")


# --- streams and indices are independent -----------------------------------------------------------------------


def test_streams_differ_in_the_bits_a_cpu_generator_keeps():
    """Offsets above 2**32 would be inert: `published coins` and `published block choices` read one stream."""
    (_, published) = golden("01_seeds.json")
    assert all(case["identical"] for case in published["self_cond_and_block_select"])
    first = [generator(42, stream, 0).initial_seed() & LOW_32 for stream in STREAMS]
    assert len(set(first)) == len(STREAMS)
    low = {hashed_seed(seed, s, index) & LOW_32 for seed in range(10) for s in STREAMS for index in range(400)}
    total = 10 * len(STREAMS) * 400
    assert len(low) >= total - 3  # 0.05 collisions expected among 20000 of 2**32


def test_every_low_bit_of_a_hashed_seed_is_a_fair_coin():
    seeds = [hashed_seed(42, "anchors", index) for index in range(4000)]
    for bit in range(32):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert abs(ones - 2000) < 5 * 4000**0.5 / 2, bit


@pytest.mark.parametrize("stream", STREAMS)
def test_streams_depend_on_seed_and_index_and_nothing_else(stream):
    draw = lambda seed, index: torch.rand(64, generator=generator(seed, stream, index))
    assert torch.equal(draw(1, 5), draw(1, 5))
    pairs = [(draw(1, 5), draw(2, 5)), (draw(1, 5), draw(1, 6)), (draw(1, 0), draw(1, 1))]
    for a, b in pairs:
        assert not torch.equal(a, b)
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.5


def test_drawing_from_one_stream_moves_no_other():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draws = Draws(42, 3)
    expected = torch.rand(8, generator=Draws(42, 3).generator())
    torch.rand(1000, generator=draws.generator("anchors"))
    g = draws.generator()
    torch.rand(1000, generator=draws.generator("anchors"))
    assert torch.equal(torch.rand(8, generator=g), expected)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is nobody's


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 33, 100])
def test_draws_of_a_longer_row_begin_with_those_of_a_shorter_one(length):
    """So that noise does not depend on how far a sample was padded."""
    long = torch.rand(257, generator=Draws(42, 9).generator())
    assert torch.equal(torch.rand(length, generator=Draws(42, 9).generator()), long[:length])


# --- validation --------------------------------------------------------------------------------------------------


def validation_levels(indices) -> torch.Tensor:
    draws = [ValidationDraws(index) for index in indices]
    return torch.cat([d.level(d.generator()) for d in draws])


def discrepancy(levels: torch.Tensor) -> float:
    """Largest difference between the empirical distribution and the uniform one (naive: at every level)."""
    ordered, n = sorted(levels.tolist()), len(levels)
    return max(max((i + 1) / n - x, x - i / n) for i, x in enumerate(ordered))


@pytest.mark.parametrize("n", [8, 32, 100])
@pytest.mark.parametrize("start", [0, 1, 777, 10**6])
def test_validation_levels_are_stratified(n, start):
    # three-gap theorem: gaps of the golden-ratio sequence are at most 1.9/n apart
    assert discrepancy(validation_levels(range(start, start + n))) < 2.0 / n + 1e-3
    independent = torch.rand(n, generator=torch.Generator().manual_seed(start))
    if n >= 32:
        assert discrepancy(validation_levels(range(start, start + n))) < discrepancy(independent)


@pytest.mark.parametrize("samples", [8, 16, 64])
def test_levels_of_blocks_are_stratified_at_every_place_and_over_any_number_of_blocks(samples):
    counts = [1 + (i * 5) % 21 for i in range(samples)]
    drawn = [ValidationDraws(i).level(None, (counts[i],)) for i in range(samples)]
    together = torch.cat(drawn)
    assert len(set(together.tolist())) == len(together) == sum(counts)
    independent = torch.rand(len(together), generator=torch.Generator().manual_seed(samples))
    assert discrepancy(together) < discrepancy(independent)
    for place in range(21):
        levels = torch.stack([ValidationDraws(i).level(None, (21,))[place] for i in range(samples)])
        assert discrepancy(levels) < 2.5 / samples
    assert torch.equal(ValidationDraws(3).level(None, (21,))[:4], ValidationDraws(3).level(None, (4,)))


@pytest.mark.parametrize("n", [1, 8, 100])
def test_no_validation_level_lies_at_the_end_of_the_range(n):
    levels = validation_levels(range(n))
    assert levels.min() > 0.1 / n and levels.max() < 1 - 0.1 / n


def test_levels_stay_below_one():
    """Multiples of the golden ratio by Fibonacci numbers come closest to whole numbers, and would round to 1."""
    near_one = [28656, 10**9, 24157817]
    levels = validation_levels([*near_one, *range(0, 3_000_000, 997)])
    assert levels.dtype == torch.float32 and levels.min() >= 0 and levels.max() < 1


def test_validation_noise_depends_on_the_sample_alone():
    """`ValidationDraws` knows neither run seed nor step; and it is not the training noise of any sample."""
    clean = sample(range(100, 164), [1] * 64)
    first = mdlm.corrupt(clean, ValidationDraws(3), flags(999))
    torch.rand(100)
    again = mdlm.corrupt(clean, ValidationDraws(3), flags(999))
    assert torch.equal(first.x_t_S, again.x_t_S) and torch.equal(first.level_S, again.level_S)
    uniforms = lambda draws: torch.rand(8, generator=draws.generator()).tolist()
    assert not set(uniforms(ValidationDraws(3))) & set(uniforms(Draws(0, 3)))
    others = [mdlm.corrupt(clean, ValidationDraws(4), flags(999))]
    others += [mdlm.corrupt(clean, Draws(seed, 3), flags(999)) for seed in (0, 42)]
    assert not any(torch.equal(first.noised_S, other.noised_S) for other in others)
