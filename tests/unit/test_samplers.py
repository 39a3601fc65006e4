"""Samplers above temperature 0 against exact distributions, and where they stop, on toy networks."""

import itertools
from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.generation.config import ALGORITHMS, GenerationConfig
from megatron_dllm.generation.dream import DreamRow
from megatron_dllm.generation.idlm import StridedRow
from megatron_dllm.generation.llada import LLaDARow, trusted_together
from megatron_dllm.generation.llada2 import BlockRow
from megatron_dllm.generation.nemotron import AutoregressiveRow, DiffusionRow, SpeculativeRow
from megatron_dllm.generation.prompts import Canvas, number_copies
from megatron_dllm.generation.rows import Decoding, run
from megatron_dllm.generation.scdd import CorrectingRow, step_back
from megatron_dllm.generation.selection import Candidates, RowDraws, draw, keep_likely
from megatron_dllm.modes import common
from megatron_dllm.modes.scdd import schedule

MASK, V, EOS = 4, 5, 0
SCDD = Namespace(scdd_max_ratio=0.3, scdd_gamma_shape=1.0, scdd_peak_time=0.5)


def rows_of(kind, prompts, new, **options):
    config = GenerationConfig(max_new_tokens=new, **options)
    run_args = dict(dllm_mode="mdlm", dllm_block_size=3, dllm_block_origin="sequence", vocab_size=V)
    args = Namespace(**run_args, **vars(SCDD))
    decoding = Decoding(config, common.most_trusted, MASK, EOS, V, args)
    canvases = number_copies([Canvas([*prompt, *[MASK] * new], len(prompt)) for prompt in prompts])
    return [kind(canvas, decoding) for canvas in canvases]


class Toy:
    """Clean tokens predict the next one, masks what a poor draft model would; all at the temperature of 1."""

    def __init__(self, table=None):
        self.calls = 0
        generator = torch.Generator().manual_seed(1)
        self.clean, self.noisy = (torch.randn(V, V, generator=generator).double() for _ in range(2))
        self.noisy = self.clean + 0.7 * self.noisy

    def __call__(self, passes, cache):
        self.calls += 1
        return [self.of(one)[one.wanted] for one in passes]

    def of(self, one):
        return torch.where(one.noisy[:, None], self.noisy[one.tokens], self.clean[one.tokens])


def matches(drawn, probabilities):
    """Chi-square of counts below its mean plus five standard deviations."""
    expected = probabilities * drawn.sum()
    statistic = ((drawn - expected) ** 2 / expected).sum().item()
    freedom = len(drawn) - 1
    return statistic < freedom + 5 * (2 * freedom) ** 0.5


# --- exact distributions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AutoregressiveRow, SpeculativeRow, StridedRow])
@pytest.mark.parametrize("options", [dict(temperature=1.0), dict(temperature=0.6, top_k=3)])
def test_drafts_do_not_change_the_distribution(kind, options):
    toy = Toy()
    q = keep_likely(
        toy.clean.index_fill(1, torch.tensor([MASK]), -torch.inf) / options["temperature"], options.get("top_k"), None
    )
    p = q.softmax(-1)
    exact = torch.stack([p[1, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(MASK), repeat=3)])
    rows = rows_of(kind, [[1]] * 3000, 3, cache="none", **options)
    run(rows, toy)
    place = torch.tensor([MASK**2, MASK, 1])
    drawn = torch.bincount(torch.stack([(row.tokens[1:] * place).sum() for row in rows]), minlength=MASK**3)
    assert (drawn[exact == 0] == 0).all()
    assert matches(drawn[exact > 0].double(), exact[exact > 0])
    if kind is not AutoregressiveRow:
        assert len({row.forwards for row in rows}) > 1  # drafts are kept and refused


def test_a_wrong_acceptance_would_be_noticed(monkeypatch):
    """The check above, of drafts that are always kept."""
    from megatron_dllm.generation import nemotron

    monkeypatch.setattr(
        nemotron, "verify", lambda d, q, p, r: (torch.cat([d, draw(p[-1:], r.uniform("n", 1))]), torch.ones(len(d) + 1))
    )
    toy = Toy()
    rows = rows_of(SpeculativeRow, [[1]] * 3000, 3, cache="none", temperature=1.0)
    run(rows, toy)
    p = toy.clean.index_fill(1, torch.tensor([MASK]), -torch.inf).softmax(-1)
    exact = torch.stack([p[1, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(MASK), repeat=3)])
    place = torch.tensor([MASK**2, MASK, 1])
    drawn = torch.bincount(torch.stack([(row.tokens[1:] * place).sum() for row in rows]), minlength=MASK**3)
    assert not matches(drawn.double(), exact)


@pytest.mark.parametrize("steps", [1, 9])
def test_correcting_walks_the_chain_back_exactly(steps):
    """Places that say nothing about each other: the best prediction of each is the data's distribution."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    network = lambda passes, cache: [p.log().expand(len(one.wanted), -1) for one in passes]
    rows = rows_of(CorrectingRow, [[1]] * 1500, 2, steps=steps, temperature=1.0)
    run(rows, network)
    written = torch.stack([row.tokens[1:] for row in rows])
    assert matches(torch.bincount(written.flatten(), minlength=V)[:MASK].double(), p[:MASK])
    if steps > 4:
        assert any(
            len({place for c in row.commits for place in c.places}) < sum(len(c.places) for c in row.commits)
            for row in rows
        )


def test_a_step_back_by_bayes():
    t, s = torch.tensor([0.6, 0.4], dtype=torch.float64)
    at_t, at_s = schedule(t, SCDD), schedule(s, SCDD)
    q = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
    K = V - 1
    for z in range(V):
        expected = torch.zeros(V, dtype=torch.float64)
        for x, v in itertools.product(range(MASK), repeat=2):
            there = (1 - at_s.rho) / K + at_s.rho * (v == x)
            kept = at_t.rho / at_s.rho
            onward = 1.0 if z == MASK else (1 - kept) / K + kept * (v == z)
            expected[v] += q[x] * there * onward
        (found,) = step_back(q[None].clone(), torch.tensor([z]), torch.tensor([MASK]), at_t.rho, at_s.rho)
        assert torch.allclose(found, expected / expected.sum())


def test_correcting_replaces_what_later_tokens_speak_against():
    """Alone, the first place is taken for a 1; as soon as the second is a 2, it must have been a 3."""

    def network(passes, cache):
        (one,) = passes
        first = torch.tensor([-9.0, 0.5, -9.0, -9.0 if one.tokens[2] == MASK else 40.0, -99.0])
        second = torch.tensor([-9.0, 0.1, 0.3, -9.0, -99.0])
        return [torch.stack([first, second]).double()]

    (row,) = rows_of(CorrectingRow, [[1]], 2, steps=8)
    run([row], network)
    assert row.tokens.tolist() == [1, 3, 2]
    assert [c.ids for c in row.commits if 1 in c.places][0][0] == 1
    assert row.steps == 8


# --- where they stop ----------------------------------------------------------------------------------------


class Ender(Toy):
    """Sure of every token; EOS stands at place 4."""

    def of(self, one):
        following = torch.where(one.noisy, one.positions, one.positions + 1)
        logits = torch.zeros(len(one.tokens), V).double()
        logits[torch.arange(len(one.tokens)), torch.where(following == 4, EOS, 1 + following % 3)] = 30.0
        return logits


@pytest.mark.parametrize(
    ("kind", "options", "forwards"),
    [
        (LLaDARow, dict(gen_block_length=3), 3),  # two tokens of block 2..5, one of which is EOS
        (BlockRow, {}, 3),
        (BlockRow, dict(threshold=0.5), 2),
        (BlockRow, dict(editing_threshold=0.5, threshold=0.5), 2),
        (DiffusionRow, dict(threshold=0.5), 2),
        (AutoregressiveRow, {}, 3),
    ],
)
def test_a_row_ends_with_its_eos_and_what_follows_is_not_computed(kind, options, forwards):
    ending, other = rows_of(kind, [[1, 2], [1, 2, 3, 3, 3, 3]], 12, stop_at_eos=True, **options)
    run([ending, other], Ender())
    assert ending.tokens[4:].tolist() == [EOS] * 10 and EOS not in ending.tokens[:4]
    assert ending.forwards == forwards
    assert EOS not in other.tokens and MASK not in other.tokens and other.forwards > forwards


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [LLaDARow, DreamRow, CorrectingRow, BlockRow, DiffusionRow, AutoregressiveRow, SpeculativeRow, StridedRow]
    ),
    st.lists(st.lists(st.integers(0, MASK - 1), min_size=1, max_size=7), min_size=1, max_size=3),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 20)),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from(ALGORITHMS),
)
def test_exactly_the_tokens_asked_for(kind, prompts, new, steps, temperature, algorithm):
    rows = rows_of(kind, prompts, new, steps=steps, temperature=temperature, algorithm=algorithm)
    run(rows, Toy())
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens[: len(prompt)].tolist() == prompt and len(row.tokens) == len(prompt) + new
        assert MASK not in row.tokens
        # the commits tell the whole story
        replay = torch.tensor([*prompt, *[MASK] * new])
        for commit in row.commits:
            replay[commit.places] = torch.tensor(commit.ids)
        assert torch.equal(replay, row.tokens)
        (alone,) = rows_of(kind, [prompt], new, steps=steps, temperature=temperature, algorithm=algorithm)
        if prompts.count(prompt) == 1:
            run([alone], Toy())
            assert torch.equal(alone.tokens, row.tokens) and alone.forwards == row.forwards


def test_dream_writes_as_many_as_are_due_and_skips_empty_steps():
    (row,) = rows_of(DreamRow, [[1]], 6, steps=50)
    run([row], Toy())
    assert all(commit.places for commit in row.commits) and row.forwards == len(row.commits) in (5, 6)
    (row,) = rows_of(DreamRow, [[1]], 6, steps=1)
    run([row], Toy())
    assert row.forwards == 1
    drawn = {tuple(c.places[0] for c in row.commits) for row in _drawn_orders()}
    assert len(drawn) > 10


def _drawn_orders():
    rows = rows_of(DreamRow, [[1]] * 50, 6, steps=50, algorithm_temperature=5.0)
    run(rows, Toy())
    return rows


# --- numbers ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=6), st.integers(1, 6), st.floats(0.01, 1)
)
def test_likely_tokens(logits, top_k, top_p):
    kept = keep_likely(torch.tensor([logits], dtype=torch.float64), top_k, top_p)[0]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    expected = [i for i in order if logits[i] >= logits[order[min(top_k, len(order)) - 1]]]
    weights = torch.tensor([logits[i] for i in expected], dtype=torch.float64).softmax(0).tolist()
    nucleus, total = [], 0.0
    for i, weight in zip(expected, weights, strict=True):
        if nucleus and total >= top_p - 1e-12:
            break
        nucleus.append(i)
        total += weight
    found = {i for i in range(len(logits)) if kept[i] > -torch.inf}
    assert found == set(nucleus) or abs(total - top_p) < 1e-9


def test_draws_follow_their_probabilities_and_never_leave_them():
    p = torch.tensor([0.0, 0.2, 0.0, 0.8, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.19, 0.21, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.expand(4, -1), u).tolist() == [1, 1, 3, 3]


def test_tokens_that_are_trusted_together():
    for confidence, factor in itertools.product(
        itertools.product((0.2, 0.5, 0.7, 0.9), repeat=3), (0.0, 0.5, 1.0, 2.0)
    ):
        logits = torch.stack([torch.tensor([c, 1 - c, 1e-30]).double().log() for c in confidence])
        candidates = Candidates(logits, mask_id=1, draws=RowDraws(0, []))
        expected, ordered = 1, sorted(confidence, reverse=True)
        while expected < 3 and ordered[expected] >= 1 - factor / (expected + 2):
            expected += 1
        assert trusted_together(candidates, factor) == expected
