"""Mode dflash: anchors, blocks and metrics, against loops; whose function they are."""

import copy
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.sample import Sample
from megatron_dllm.generation.acceptance import canvas_of
from megatron_dllm.modes import dflash, guesses
from megatron_dllm.modes.base import POSITION
from megatron_dllm.noise import Draws
from tests.unit.block_cases import MASK, make_sample
from tests.unit.dflash_cases import anchored, flags, scored

# --- anchors ----------------------------------------------------------------------------------------------------------

SAMPLES = dict(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    bits=st.lists(st.integers(0, 4), min_size=56, max_size=56),
    K=st.integers(2, 6),
    N=st.integers(1, 9),
    index=st.integers(0, 2**40),
)


def packed(lengths: list[int], bits: list[int], index: int = 0) -> Sample:
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    return make_sample(documents, [bit > 0 for bit in bits[: len(documents)]], index)


@settings(max_examples=60, deadline=None)
@given(**SAMPLES)
def test_anchors_are_supervised_tokens_with_a_whole_block(lengths, bits, K, N, index):
    sample = packed(lengths, bits, index)
    found = dflash.corrupt(sample, Draws(3, index), flags(dllm_block_size=K, dflash_num_anchors=N))
    assert len(found.anchors_N) == len(found.kept_N) == N
    documents, supervised = sample.document_S.tolist(), sample.loss_mask_S.tolist()
    inside = lambda a: a + K <= len(sample) and documents[a] == documents[a + K - 1]
    possible = [a for a in range(len(sample)) if supervised[a] and inside(a)]
    expected = min(N, len(possible)) if sum(supervised) >= 2 * K else 0
    anchors = found.anchors_N[found.kept_N].tolist()
    assert found.kept_N.tolist() == [True] * expected + [False] * (N - expected)
    assert anchors == sorted(set(anchors)) and set(anchors) <= set(possible)
    more = dflash.corrupt(sample, Draws(3, index), flags(dllm_block_size=K, dflash_num_anchors=N + 3))
    assert set(anchors) <= set(more.anchors_N[more.kept_N].tolist())  # a larger N adds some


@settings(max_examples=200, deadline=None)
@given(length=st.integers(1, 80), K=st.integers(2, 9), N=st.integers(1, 40), index=st.integers(0, 2**40))
def test_blocks_that_do_not_overlap(length, K, N, index):
    """As many as fit after the first token, each whole and at a place of its own."""
    anchors_N, kept_N = dflash.nonoverlap(make_sample([0] * length, index=index), N, K, Draws(3, index).generator("x"))
    assert len(anchors_N) == len(kept_N) == N and anchors_N.max() < length
    anchors = anchors_N[kept_N].tolist()
    assert kept_N.tolist() == [True] * min(N, (length - 1) // K) + [False] * (N - min(N, (length - 1) // K))
    assert all(a + K <= b for a, b in zip(anchors, anchors[1:], strict=False))
    assert not anchors or (anchors[0] >= 1 and anchors[-1] + K <= length)


def test_blocks_that_fill_a_sample():
    """191 blocks of 16 in 3072 tokens leave 16 between them. Of fewer, every arrangement is as likely as another."""
    anchors_N, kept_N = dflash.nonoverlap(make_sample([0] * 3072), 512, 16, Draws(1, 0).generator("x"))
    assert len(anchors_N[kept_N].unique()) == kept_N.sum() == 191
    sample, g = make_sample([0] * 11), Draws(1, 0).generator("x")  # three blocks, two tokens to spare
    drawn = [tuple(dflash.nonoverlap(sample, 3, 3, g)[0].tolist()) for _ in range(4000)]
    shares = {anchors: drawn.count(anchors) / len(drawn) for anchors in set(drawn)}
    assert len(shares) == 4 and all(share == pytest.approx(1 / 4, abs=0.03) for share in shares.values())


@settings(max_examples=30, deadline=None)
@given(way=st.sampled_from(dflash.SAMPLINGS), seed=st.integers(0, 2**31), **SAMPLES)
def test_nothing_else_moves_them(way, seed, lengths, bits, K, N, index):
    args = flags(dllm_block_size=K, dflash_num_anchors=N, dflash_anchor_sampling=way)
    sample = packed(lengths, bits, index)
    state = torch.random.get_rng_state()
    first = dflash.corrupt(sample, Draws(seed, index), args)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(7)
    draws = Draws(seed, index)
    torch.rand(5, generator=draws.generator())
    dflash.corrupt(packed(lengths[:1], bits, index + 1), Draws(seed, index + 1), args)
    again = dflash.corrupt(copy.deepcopy(sample), draws, args)
    assert torch.equal(first.anchors_N, again.anchors_N) and torch.equal(first.kept_N, again.kept_N)


@pytest.mark.parametrize("way", dflash.SAMPLINGS)
def test_another_seed_or_sample_moves_them(way):
    args = flags(dflash_anchor_sampling=way)
    drawn = {
        tuple(dflash.corrupt(make_sample([0] * 200, index=i), Draws(seed, i), args).anchors_N.tolist())
        for seed in (1, 2)
        for i in (5, 6)
    }
    assert len(drawn) == 4


def test_prefixes():
    """P(l) ~ 0.9^l, drawn by itself: the anchors stay where they are. A block always has a guess."""
    N, odds = 20_000, [0.9**length for length in range(2, 6)]
    drawn_N = dflash.prefixes(N, 6, Draws(1, 0).generator("x"))
    shares = drawn_N.bincount(minlength=6) / N
    assert shares.tolist() == pytest.approx([0, 0, *(x / sum(odds) for x in odds)], abs=0.015)
    assert (dflash.prefixes(9, 2, Draws(1, 0).generator("x")) == 1).all()
    found = {
        (seed, index, loss): dflash.corrupt(
            make_sample([0] * 90, index=index), Draws(seed, index), flags(dflash_loss=loss)
        )
        for seed, index, loss in itertools.product((1, 2), (5, 6), guesses.LOSSES)
    }
    assert all(torch.equal(c.anchors_N, found[seed, i, "decay"].anchors_N) for (seed, i, _), c in found.items())
    assert all((c.prefix_N == 1).all() for (*_, loss), c in found.items() if loss != "variable-prefix")
    assert len({tuple(c.prefix_N.tolist()) for (*_, loss), c in found.items() if loss == "variable-prefix"}) == 4


# --- the layout -------------------------------------------------------------------------------------------------------


def block_rows(batch, length: int, b: int, blocks: int, K: int) -> list[torch.Tensor]:
    """What row b of a batch has to say about its first blocks. (In the mask a document has the number it had.)"""
    term, end = batch.terms["dllm"], length + blocks * K
    tensors = (batch.tokens_BQ, batch.position_ids_BQ, batch.attributes_BQA, term.targets_BQ, term.weights_BQ)
    return [x[b, length:end] for x in tensors]


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(SAMPLES["lengths"], SAMPLES["bits"]), min_size=1, max_size=3),
    K=SAMPLES["K"],
    N=SAMPLES["N"],
    extra=st.integers(0, 3),
    way=st.sampled_from(dflash.SAMPLINGS),
    loss=st.sampled_from(guesses.LOSSES),
)
def test_layout_block_by_block(pairs, K, N, extra, way, loss):
    """Element by element, and the same in every batch."""
    args = flags(dllm_block_size=K, dflash_num_anchors=N, dflash_anchor_sampling=way, dflash_loss=loss)
    samples = [packed(*pair, i) for i, pair in enumerate(pairs)]
    found = [dflash.corrupt(s, Draws(9, i), args) for i, s in enumerate(samples)]
    length = max(map(len, samples)) + extra
    batch = dflash.layout(found, length, args)
    term, n = batch.terms["dllm"], batch.drafted // K
    assert batch.tokens_BQ.shape[1] == length + n * K and 1 <= n <= N and batch.streams == 1
    total, count, blocks = 0.0, 0, set()
    for b, (s, c) in enumerate(zip(samples, found, strict=True)):
        assert batch.tokens_BQ[b, : len(s)].tolist() == s.tokens_S.tolist()
        assert not term.weights_BQ[b, :length].any()
        assert not c.kept_N[n:].any()
        for q in range(n * K):
            (block, k), row = divmod(q, K), length + q
            anchor, kept, prefix = int(c.anchors_N[block]), bool(c.kept_N[block]), int(c.prefix_N[block])
            place = anchor + k
            there = kept and place < len(s) and s.document_S[place] == s.document_S[anchor]
            assert batch.tokens_BQ[b, row] == (s.tokens_S[place] if there and k < prefix else MASK)
            position = int(s.position_S[anchor]) + k if len(s) else k
            assert batch.position_ids_BQ[b, row] == batch.attributes_BQA[b, row, POSITION] == position
            counts = there and k >= prefix and bool(s.loss_mask_S[place])
            weight = torch.tensor(0.0 if loss == "dpace" else -(k - prefix) / args.dflash_loss_decay).exp() * counts
            assert term.weights_BQ[b, row] == pytest.approx(float(weight), rel=1e-6)
            if counts:
                assert term.targets_BQ[b, row] == s.tokens_S[place] and term.offsets_BQ[b, row] == k
                total, count, blocks = total + float(weight), count + 1, blocks | {(b, block)}
        alone = dflash.layout([c], length, args)
        own = alone.drafted // K
        pairs_of = zip(block_rows(alone, length, 0, own, K), block_rows(batch, length, b, own, K), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs_of)
    assert batch.tokens["noised"] == count
    if loss == "dpace":
        assert term.count == len(blocks)
        return
    assert term.count == pytest.approx(total, rel=1e-6)
    args.dllm_compat = "automodel"
    assert dflash.layout(found, length, args).terms["dllm"].count == count


def test_a_block_that_does_not_count_sees_itself_alone():
    """Not even padding, which is of no document either. No row is empty."""
    sample = anchored(make_sample([0] * 6), [2, 3], [True, False])
    short = anchored(make_sample([0] * 6, index=1), [1, 3])
    attributes = dflash.layout([sample, short], 9, flags(dllm_block_size=2)).attributes_BQA
    allowed = dflash.visible(attributes[0, 9:, None], attributes[0, None])
    assert allowed.nonzero()[allowed.nonzero()[:, 0] >= 2].tolist() == [[2, 11], [2, 12], [3, 11], [3, 12]]


def test_first_guess_weighs_one():
    """The anchor has no weight, and the token after it the largest; divided by the sum of weights."""
    first, second = guesses.decay(torch.tensor([[1, 2]]), 4, 7.0)[0].tolist()
    assert first == pytest.approx([0, 1, 0.866878, 0.751477], rel=1e-5)
    assert second == pytest.approx([0, 0, 1, 0.866878], rel=1e-5)
    sample = anchored(make_sample([0] * 8), [2])
    assert dflash.layout([sample], 8, flags()).terms["dllm"].count == pytest.approx(1 + 0.866878 + 0.751477, rel=1e-5)


def test_prompts_that_are_decoded_in_training():
    """What comes before the answer, of text a quarter of the first document; the end of what is too long."""
    args = flags(max_position_embeddings=12, dflash_eval_tokens=8)
    chat = make_sample([0] * 12, [0] * 3 + [1] * 9, tokens=range(10, 22))
    for sample, prompt in (
        (chat, [10, 11, 12]),
        (dataclasses.replace(chat, loss_mask_S=torch.arange(12) >= 6), [12, 13, 14, 15]),
        (make_sample([0] * 8 + [1] * 8, tokens=range(10, 26)), [10, 11]),
        (make_sample([0] * 40), [6, 7, 8, 9]),
        (make_sample([0, 1, 1]), [0]),
    ):
        canvas = canvas_of(sample, args)
        assert canvas.tokens == prompt + [MASK] * 8 and canvas.start == len(prompt)


# --- metrics ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.tuples(SAMPLES["lengths"], SAMPLES["bits"]), min_size=1, max_size=3), K=SAMPLES["K"])
def test_metrics_equal_loops(pairs, K):
    args = flags(dllm_block_size=K, dflash_num_anchors=5)
    found = [dflash.corrupt(packed(*pair, i), Draws(4, i), args) for i, pair in enumerate(pairs)]
    batch = dflash.layout(found, max(len(c.sample) for c in found), args)
    S, V = batch.tokens_BQ.shape[1] - batch.drafted, 3
    batch.terms["dllm"].targets_BQ %= V  # so that guesses are right often
    logits = torch.randn(len(found), batch.drafted, V, generator=torch.Generator().manual_seed(sum(pairs[0][1])))
    *_, measures = scored(batch, logits, args)
    right = (logits.argmax(-1) == batch.terms["dllm"].targets_BQ[:, S:]).tolist()
    counts = (batch.terms["dllm"].weights_BQ[:, S:] > 0).tolist()
    at, lengths = {k: [0, 0] for k in range(1, K)}, []
    for b in range(len(found)):
        for start in range(0, batch.drafted, K):
            run, going, any_scored = 1, True, False
            for k in range(1, K):
                if counts[b][start + k]:
                    hit, any_scored = right[b][start + k], True
                    at[k] = [at[k][0] + hit, at[k][1] + 1]
                    going = going and hit
                    run += going
            lengths += [run] if any_scored else []
    assert [measures[f"draft accuracy at {k}"] for k in range(1, K)] == [at[k] for k in range(1, K)]
    assert measures["draft accuracy"] == [sum(x) for x in zip(*at.values(), strict=True)]
    assert measures["accepted tokens a block"] == [sum(lengths), len(lengths)]


def test_pictures_in_the_documents_are_the_rule():
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    picture = text.split("```text dflash\n")[1].split("```")[0]
    batch = dflash.layout([anchored(make_sample([0] * 6), [2, 4])], 6, flags(dllm_block_size=2))
    attributes = batch.attributes_BQA[0]
    allowed = dflash.visible(attributes[6:, None], attributes[None])
    rows = ["".join("■" if x else "·" for x in row) for row in allowed]
    assert [line.replace("  ", "") for line in picture.splitlines() if line] == rows
