"""The rules of the sampler of canvases against loops and against transformers' own, and where a canvas ends."""

from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
)

from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.diffusion_gemma import MOST_STEPS, DenoisedRow, accepted, temperature
from megatron_dllm.generation.prompts import BLANK, Canvas, number_copies
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.modes import block_diffusion

V, K, EOS = 7, 4, 0


def naive_accepted(entropies, bound):
    """The surest places first; each as long as those before it add up to at most the bound."""
    chosen, total = set(), 0.0
    for place in sorted(range(len(entropies)), key=lambda place: (entropies[place], place)):
        if chosen and total > bound:
            break
        chosen.add(place)
        total += entropies[place]
    return [place in chosen for place in range(len(entropies))]


# in 64ths, of which sums are exact
entropies = st.lists(st.integers(0, 8) | st.integers(0, 700), min_size=1, max_size=40)


@given(entropies, st.integers(0, 9) | st.integers(0, 2000))
@settings(max_examples=300, deadline=None)
def test_the_accepted_places_are_those_of_a_loop(values, bound):
    values, bound = [x / 64 for x in values], bound / 64
    got = accepted(torch.tensor(values, dtype=torch.float64), bound).tolist()
    assert got == naive_accepted(values, bound)
    assert any(got)


@given(st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 5.0]), st.sampled_from([0.2, 1.0, 5.0]))
@settings(max_examples=60, deadline=None)
def test_the_accepted_places_are_those_of_transformers(seed, bound, width):
    logits = width * torch.randn(12, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), 12, 30, 5)
    theirs.accept_canvas(torch.zeros(1, 12).long(), torch.ones(1, 12).long(), logits[None], 3)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    assert torch.equal(accepted(entropy, bound), theirs.accepted_token_mask[0])


@given(st.integers(1, 64), st.floats(0, 2), st.floats(0.01, 2))
def test_the_ladder_goes_down_in_equal_steps(steps, t_min, more):
    ladder = [temperature(left, steps, t_min, t_min + more) for left in range(steps, 0, -1)]
    assert ladder[0] == pytest.approx(t_min + more)
    assert ladder[-1] == pytest.approx(t_min + more / steps)  # t_min itself would be a step later
    falls = [a - b for a, b in zip(ladder[:-1], ladder[1:], strict=True)]
    assert falls == pytest.approx([more / steps] * (steps - 1), abs=1e-12)
    theirs = LinearTemperatureScheduleLogitsProcessor(t_min, t_min + more, steps)
    ones = torch.ones(1, dtype=torch.float64)
    assert [1 / t for t in ladder] == pytest.approx([float(theirs(None, ones, n)) for n in range(steps, 0, -1)])


# --- on toy networks ------------------------------------------------------------------------------------------------


class Toy:
    """Logits of every place, the same in every step unless there are several for a step; remembers the passes."""

    def __init__(self, *logits):
        self.logits, self.passes = logits, []

    def __call__(self, passes, cache):
        step = len(self.passes)
        self.passes.append(passes)
        table = self.logits[min(step, len(self.logits) - 1)]
        return [table[one.positions[one.wanted] % len(table)].clone() for one in passes]


def sure(*ids):
    """Places whose tokens are all but certain."""
    return 40.0 * torch.nn.functional.one_hot(torch.tensor(ids), V).double()


def written(network, prompts=((),), new=K, conditions=0.0, **options):
    args = Namespace(
        dllm_block_size=K, block_diffusion_self_conditioning=conditions, vocab_size=V, max_position_embeddings=99
    )
    config = GenerationConfig(max_new_tokens=new, **options)
    decoding = Decoding(config, block_diffusion.reverse, BLANK, EOS, V, args)
    canvases = number_copies([Canvas([*prompt, *[BLANK] * new], len(prompt)) for prompt in prompts])
    rows = [DenoisedRow(canvas, decoding) for canvas in canvases]
    run(rows, network)
    return rows


def test_a_canvas_ends_when_it_is_stable_and_sure():
    same, other, vague = sure(1, 2, 3, 4), sure(1, 2, 3, 5), 0.05 * sure(1, 2, 3, 4)
    steps = lambda *logits, **options: written(Toy(*logits), **options)[0].steps
    assert steps(same) == 2
    assert steps(same, stability_threshold=0) == 1
    assert steps(same, stability_threshold=3) == 4
    assert steps(other, same) == 3
    assert steps(same, same, other, stability_threshold=2) == 5
    assert steps(vague, vague, same) == 3  # the same tokens, but not sure of them before
    assert steps(vague) == MOST_STEPS == 48
    assert steps(same, confidence_threshold=0) == 48
    assert steps(vague, steps_per_block=5) == 5
    assert steps(vague, steps=11, new=2 * K) == 2 * 6  # rounded up
    assert written(Toy(other, same))[0].tokens.tolist() == [1, 2, 3, 4]


def test_stability_is_that_of_one_canvas():
    """The first step of the second canvas is compared with nothing."""
    (row,) = written(Toy(sure(1, 2, 3, 4)), new=2 * K)
    assert row.steps == 4 and row.tokens.tolist() == [1, 2, 3, 4] * 2


def test_eos_ends_where_it_stands_if_that_is_asked_for():
    toy = lambda: Toy(sure(1, 2, EOS, 4))
    (row,) = written(toy(), new=3 * K, stop_at_eos=True)
    assert row.steps == 2 and row.tokens.tolist() == [1, 2] + [EOS] * 10
    (row,) = written(toy(), new=3 * K)
    assert row.steps == 6 and row.tokens.tolist() == [1, 2, EOS, 4] * 3
    (row,) = written(Toy(sure(1, 2, 3, 4)), new=3 * K, stop_at_eos=True)
    assert row.steps == 6 and EOS not in row.tokens
    (row,) = written(Toy(sure(1, 2, 3, EOS)), new=3, stop_at_eos=True)  # it stands behind the answer
    assert row.tokens.tolist() == [1, 2, 3]


def test_the_network_sees_text_once_and_a_canvas_in_every_step():
    toy = Toy(sure(1, 2, 3, 4))
    (row,) = written(toy, prompts=[[5, 6]], new=2 * K, conditions=0.5)
    seen = [one for (one,) in toy.passes]
    assert [one.cached for one in seen] == [0, 2, 2, 6]
    assert [one.positions.tolist() for one in seen] == [[*range(6)], [*range(2, 6)], [*range(2, 10)], [*range(6, 10)]]
    assert [one.noisy.sum().item() for one in seen] == [K] * 4
    assert [one.anchor for one in seen] == [2, 2, 6, 6]
    assert [one.blocks.tolist() for one in seen[::2]] == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2]]
    assert [one.earlier is None for one in seen] == [True, False, True, False]
    assert torch.equal(seen[1].earlier, sure(3, 4, 1, 2) / 0.8)  # processed: at the temperature of its step
    assert seen[2].tokens[:K].tolist() == row.tokens[2:6].tolist()


def test_what_is_not_accepted_is_uniform_noise():
    """One token is certain, and no other is accepted: these are noise in every step, of all ids that there are."""
    vague = torch.zeros(K, V, dtype=torch.float64)
    vague[1] = sure(3)
    toy = Toy(vague)
    written(toy, prompts=[[]] * 300, steps_per_block=4, entropy_bound=0.0)
    canvases = torch.stack([torch.stack([one.tokens for one in passes]) for passes in toy.passes])  # [step, row, K]
    # with a bound of 0 the certain place is accepted, and as it costs nothing one more
    first, later = canvases[0], canvases[1:]
    assert (later[:, :, 1] == 3).all() and not (first[:, 1] == 3).all()
    for ids in (first.flatten(), later[:, :, [0, 2, 3]].flatten()):
        share = torch.bincount(ids, minlength=V).double() / len(ids)
        assert ((share - 1 / V).abs() < 0.04).all()
    assert len({tuple(row.tolist()) for row in first}) > 100  # equal prompts are drawn anew


def test_what_was_written_can_be_played_again():
    (row,) = written(Toy(sure(1, 2, 3, 4), sure(1, 2, 5, 4)), prompts=[[5, 6]], new=K + 1)
    tokens = [5, 6] + [BLANK] * (K + 1)
    for commit in row.commits:
        assert len(commit.places) == len(commit.ids) == len(commit.trust) > 0
        for place, id in zip(commit.places, commit.ids, strict=True):
            assert tokens[place] != id
            tokens[place] = id
    assert tokens == row.tokens.tolist()
    assert row.settled == len(tokens)
