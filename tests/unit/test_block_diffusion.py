"""block_diffusion: blocks, canvases, noise, layout and loss, against loops and against published numbers."""

import argparse
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.modes import block_diffusion as mode
from megatron_dllm.modes.base import ANCHOR, BLOCK, CLEAN, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM
from megatron_dllm.noise import Draws, ValidationDraws
from megatron_dllm.parallel import digest, rank_positions, shard
from tests.unit.block_cases import golden, make_sample
from tests.unit.canvas_cases import (
    EOS,
    FILL,
    V,
    block_numbers,
    canvases,
    expected_part,
    flags,
    laid_out,
    sees,
)
from tests.unit.test_block_modes import view_of

texts = dict(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bits=st.lists(st.booleans(), min_size=27, max_size=27),
    size=st.sampled_from([1, 3, 4, 16]),
    fill=st.booleans(),
    full=st.booleans(),
    ends=st.booleans(),
    seed=st.integers(0, 99),
)


def text_of(lengths, bits, size, fill, full, ends, seed, **changes):
    """A sample and its flags. full: as long as --seq-length; ends: its last token is EOS."""
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    tokens = torch.randint(EOS, (len(documents),), generator=torch.Generator().manual_seed(seed))
    tokens[-1] = EOS if ends else 3
    sample = make_sample(documents, bits[: len(documents)], seed, tokens)
    length = len(sample) if full else 64
    changes = dict(dllm_block_size=size, block_diffusion_eos_fill=fill, dllm_sequence_length=length) | changes
    return sample, flags(**changes)


# --- blocks and canvases ----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(**texts)
def test_every_supervised_token_is_in_one_canvas_and_no_other_token_is(**drawn):
    sample, args = text_of(**drawn)
    block_S, offset_S, places_NK, F = mode.blocks(sample, args)
    S = len(sample)
    entries = [[None if p < 0 else FILL if p >= S else p for p in row] for row in places_NK.tolist()]
    assert entries == canvases(sample, args)
    assert block_S.tolist() == block_numbers(sample, args)
    placed = [p for row in places_NK.tolist() for p in row if p >= 0]
    supervised = sample.loss_mask_S.nonzero()[:, 0].tolist()
    assert sorted(placed) == supervised + list(range(S, S + F))  # each once, and each token of the fill
    for number, row in enumerate(places_NK.tolist(), 1):
        own = [p for p in row if 0 <= p < S]
        assert own and len({int(sample.document_S[p]) for p in own}) == 1  # nothing of another document
        assert all(int(block_S[p]) == number and int(offset_S[p]) == k for k, p in enumerate(own))


@settings(max_examples=80, deadline=None)
@given(
    **texts,
    chosen=st.sampled_from([1, 2, "all"]),
    multiple=st.sampled_from([1, 4, 6]),
    extra=st.integers(0, 4),
    variable=st.booleans(),
    weight=st.sampled_from([0.0, 0.7]),
)
def test_layout_token_by_token(chosen, multiple, extra, variable, weight, **drawn):
    sample, args = text_of(
        **drawn,
        block_diffusion_canvases=chosen,
        dllm_length_multiple=multiple,
        dllm_variable_lengths=variable,
        encoder_ar_loss_weight=weight,
    )
    other = make_sample([0] * 5, [0, 1, 1, 1, 1], 1000)
    (c, _), batch = laid_out([sample, other], args, max(len(sample), 5) + extra)
    S, D = max(len(sample), 5) + extra, batch.drafted
    assert batch.tokens_BQ.shape == (2, S + D) and D % multiple == 0 and batch.streams == 1
    every, S_own = canvases(sample, args), len(sample)
    starts = [canvas[0] for canvas in every]
    picked = [starts.index(row[0]) for row in c.places_NK.tolist()]  # which of them, in order
    assert picked == sorted(set(picked))
    assert len(picked) == (len(every) if chosen == "all" else min(chosen, len(every)))
    fills = [sum(e is FILL for e in canvas) for canvas in every]
    seen_of_fill = [x for n in picked for x in c.fill_x_t_F[sum(fills[:n]) : sum(fills[: n + 1])].tolist()]

    def noised_of(entry, fill):
        return seen_of_fill[fill] if entry is FILL else int(c.x_t_S[entry])

    expected = expected_part(sample, [every[n] for n in picked], block_numbers(sample, args), noised_of, args)
    term, count = batch.terms["dllm"], 0
    for d in range(D):
        row = batch.attributes_BQA[0, S + d]
        want = expected[d] if d < len(expected) else None
        if want is None:
            assert row[DOCUMENT] == -1 and row[STREAM] == NOISY and row[BLOCK] < 0
            assert term.weights_BQ[0, S + d] == 0 and batch.tokens_BQ[0, S + d] == args.dllm_pad_token_id
            continue
        assert {column: int(row[column]) for column in range(NUM_ATTRIBUTES + 1)} == {
            column: want[column] for column in range(NUM_ATTRIBUTES + 1)
        }
        assert batch.position_ids_BQ[0, S + d] == want[POSITION]
        assert batch.tokens_BQ[0, S + d] == want["sees"] and term.targets_BQ[0, S + d] == want["target"]
        assert term.weights_BQ[0, S + d] == 1 and term.offsets_BQ[0, S + d] == want["offset"]
        assert term.levels_BQ[0, S + d] == c.level
        count += 1
    assert not term.weights_BQ[:, :S].any()
    assert term.count == count + term.weights_BQ[1].sum()
    if not variable and chosen != "all":
        assert mode.model_length(args) == args.dllm_sequence_length + D
    # the text
    pairs = [i for i in range(S_own - 1) if sample.document_S[i] == sample.document_S[i + 1]]
    if weight:
        ar = batch.terms["encoder ar"]
        assert ar.weights_BQ[0].nonzero()[:, 0].tolist() == pairs
        assert ar.targets_BQ[0, pairs].tolist() == [int(sample.tokens_S[i + 1]) for i in pairs]
        assert ar.count == len(pairs) + 4
    else:
        assert set(batch.terms) == {"dllm"}
    assert batch.tokens_BQ[0, :S_own].tolist() == sample.tokens_S.tolist()
    assert (batch.attributes_BQA[0, :S, STREAM] == CLEAN).all()
    assert (batch.attributes_BQA[0, :S, ANCHOR] == batch.position_ids_BQ[0, :S]).all()
    # who sees whom
    rows = [tuple(row) for row in batch.attributes_BQA[0].tolist()]
    allowed = mode.visible(batch.attributes_BQA[0, :, None], batch.attributes_BQA[0, None])
    assert allowed.tolist() == [[sees(q, k) for k in rows] for q in rows]
    assert allowed.diagonal().all()  # no row is empty


def test_a_conversation_written_out():
    """Two answers in blocks of 2: after the first one the second prompt sees it, and the second answer sees both."""
    # user a b, assistant c d e, user f, assistant g
    sample = make_sample([0] * 7, [0, 0, 1, 1, 1, 0, 1])
    _, batch = laid_out([sample], flags(dllm_block_size=2))
    attributes = batch.attributes_BQA[0]
    assert attributes[:, BLOCK].tolist() == [0, 0, 1, 1, 2, 2, 3, 1, 1, 2, 2, 3, 3]
    assert attributes[7:, POSITION].tolist() == [2, 3, 4, 5, 6, 7]
    assert attributes[7:, ANCHOR].tolist() == [2, 2, 4, 4, 6, 6]
    assert batch.terms["dllm"].targets_BQ[0, 7:].tolist() == [2, 3, 4, EOS, 6, EOS]
    allowed = mode.visible(attributes[:, None], attributes[None])
    assert ["".join(str(int(x)) for x in row) for row in allowed] == [
        *("1" * n + "0" * (13 - n) for n in range(1, 8)),
        *["1100000" + "110000"] * 2,
        *["1111000" + "001100"] * 2,
        *["1111110" + "000011"] * 2,
    ]


def test_a_turn_that_the_sample_cuts_off_is_not_filled():
    """Packed text: the first document ends, the second one goes on in another sample, or ends with EOS."""
    documents = [0] * 3 + [1] * 3
    for tokens, filled in (([1, 2, 3, 4, 5, 6], 1), ([1, 2, 3, 4, 5, EOS], 2)):
        sample = make_sample(documents, tokens=tokens)
        _, _, places_NK, F = mode.blocks(sample, flags(dllm_sequence_length=6))
        assert filled == F and (places_NK < 0).sum() == 2 - filled
        assert mode.blocks(sample, flags(dllm_sequence_length=9))[3] == 2  # chat that was not cut


def test_padding_of_the_data_is_no_turn():
    sample = make_sample([0] * 5 + [-1] * 3)  # all supervised, as a careless data source would say
    _, batch = laid_out([sample], flags(dllm_sequence_length=8))
    assert batch.terms["dllm"].count == 8 and batch.tokens["supervised"] == 8  # five tokens and three of EOS
    assert batch.terms["encoder ar"].count == 4


# --- noise ------------------------------------------------------------------------------------------------------------


class Seeded(Draws):
    """Published draws of a row."""

    def generator(self, stream="corruption"):
        return torch.Generator().manual_seed(self.seed) if stream == "corruption" else super().generator(stream)


# the published mode draws one level a row; the kernel's other cases have one a block
@pytest.mark.parametrize("case", [c for c in golden("05_corrupt_uniform_random.json") if c["block_size"] is None])
def test_published_noise(case):
    (tokens,), (supervised,) = case["input_ids"], case["loss_mask"]
    sample = make_sample([0] * len(tokens), supervised, tokens=tokens)
    args = flags(vocab_size=case["vocab"], dllm_block_size=3)  # the fill, which is drawn afterwards, changes nothing
    c = mode.corrupt(sample, Seeded(case["seed"], 0), args)
    assert len(c.fill_x_t_F) > 0
    assert c.x_t_S.tolist() == case["noisy"][0] and c.noised_S.int().tolist() == case["noise"][0]


def test_fill_is_noised_like_the_rest():
    """EOS is replaced as often as any token, and by any token."""
    args = flags(dllm_block_size=32)
    drawn = [mode.corrupt(make_sample([0] * 20, index=i), Draws(1, i), args) for i in range(2000)]
    rate = torch.stack([c.fill_noised_F.float() for c in drawn]).mean()
    assert abs(rate - torch.stack([c.noised_S.float() for c in drawn]).mean()) < 0.01 and abs(rate - 0.5) < 0.03
    gets = torch.cat([c.fill_x_t_F[c.fill_noised_F] for c in drawn])
    assert torch.bincount(gets, minlength=V).min() > 100 and gets.max() < V
    assert all((c.fill_x_t_F[~c.fill_noised_F] == EOS).all() for c in drawn)


def test_blocks_are_chosen_uniformly_and_apart_from_noise_and_coin():
    """One random stream for both would tie the coin to the block: all samples of the first ones would get it."""
    args = flags(block_diffusion_canvases=1, dllm_block_size=2, dllm_architecture="diffusion_gemma")
    sample = make_sample([0] * 9)  # five blocks
    counts = torch.zeros(5, 2)
    for i in range(4000):
        c = mode.corrupt(sample, Draws(3, i), args)
        counts[int(c.places_NK[0, 0]) // 2, int(c.self_conditioned)] += 1
    expected = 4000 / 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees of freedom: 0.1 %
    args.block_diffusion_canvases = 3
    pairs = [tuple(mode.corrupt(sample, Draws(3, i), args).places_NK[:, 0].tolist()) for i in range(1000)]
    assert len(set(pairs)) == 10 and min(map(pairs.count, set(pairs))) > 60


@pytest.mark.parametrize(
    ("moved", "decides"),
    [
        ("corruption", "noise"),
        ("block diffusion canvases", "choice"),
        ("block diffusion self-conditioning", "coin"),
    ],
)
def test_each_random_stream_decides_one_thing(moved, decides):
    """Other numbers in one stream change what it is for, and nothing else."""

    class Moved(Draws):
        def generator(self, stream="corruption"):
            return super().generator(stream if stream != moved else "another")

    args = flags(block_diffusion_canvases=1, dllm_block_size=2, dllm_architecture="diffusion_gemma")
    changed = dict(noise=False, choice=False, coin=False)
    for i in range(30):
        one, other = (mode.corrupt(make_sample([0] * 9), draws(3, i), args) for draws in (Draws, Moved))
        changed["noise"] |= not torch.equal(one.x_t_S, other.x_t_S)
        changed["choice"] |= not torch.equal(one.places_NK, other.places_NK)
        changed["coin"] |= one.self_conditioned != other.self_conditioned
    assert changed == {what: what == decides for what in changed}


def test_noise_does_not_depend_on_the_choice_or_the_coin():
    sample = make_sample([0] * 11)
    drawn = [
        mode.corrupt(sample, Draws(3, 5), flags(block_diffusion_canvases=n, dllm_block_size=2)) for n in (1, 2, "all")
    ]
    for c in drawn[1:]:
        assert torch.equal(c.x_t_S, drawn[0].x_t_S) and torch.equal(c.fill_x_t_F, drawn[0].fill_x_t_F)


def test_evaluations_have_no_self_conditioning_and_coins_reach_the_rank():
    args = flags(dllm_architecture="diffusion_gemma", block_diffusion_self_conditioning=1.0)
    samples = [make_sample([0] * 5, index=i) for i in range(3)]
    evaluated = [mode.corrupt(s, ValidationDraws(s.index), args) for s in samples]
    assert not mode.layout(evaluated, 5, args).self_conditioned_B.any()
    _, batch = laid_out(samples, args)
    assert batch.self_conditioned_B.tolist() == [True] * 3
    assert shard(batch, [0, 1, 2], 1, 0, False).to("cpu").self_conditioned_B.tolist() == [True] * 3
    known = digest(batch, [0])
    batch.self_conditioned_B[1] = False
    assert digest(batch, [0]) != known
    args.block_diffusion_self_conditioning = 0.0
    assert laid_out(samples, args)[1].self_conditioned_B is None


# --- loss -------------------------------------------------------------------------------------------------------------


def test_nothing_to_score():
    args = flags()
    samples = [make_sample([]), make_sample([0] * 5, [0] * 5, 1)]
    _, batch = laid_out(samples, args, 6)
    assert batch.terms["dllm"].count == 0 and batch.terms["encoder ar"].count == 4
    view, _ = view_of(batch, torch.randn(2, batch.tokens_BQ.shape[1], V, requires_grad=True))
    assert mode.loss(view, args)[0].sum == 0


def test_context_parallel_ranks_cover_text_and_canvases():
    _, batch = laid_out([make_sample([0] * 8)], flags(dllm_block_size=3, dllm_length_multiple=4))
    assert batch.drafted == 12
    ranks = [rank_positions(8, 1, 2, r, 12) for r in range(2)]
    assert torch.equal(torch.cat(ranks).sort().values, torch.arange(20))
    assert all((rank < 8).sum() == 4 for rank in ranks)


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dllm_block_size=0), "--dllm-block-size 0"),
        (dict(dllm_block_size=300), "give at most 256"),
        (dict(dllm_eps=0.0), "--dllm-eps"),
        (dict(block_diffusion_canvases=65), "no text has more blocks than tokens"),
        (dict(dllm_pad_block_size=4), "only a turn's last canvas"),
        (dict(dllm_eos_token_id=None), "--no-block-diffusion-eos-fill"),
        (dict(encoder_ar_loss_weight=-1.0), "--encoder-ar-loss-weight"),
        (dict(block_diffusion_self_conditioning=0.5), "has no self-conditioning"),
        (dict(block_diffusion_self_conditioning=2.0), "no probability"),
    ],
)
def test_flags_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        flags(**changes)


@pytest.mark.parametrize("text", ["0", "-1", "some", "²", "1.5"])
def test_a_number_of_canvases_is_one(text):
    parser = argparse.ArgumentParser(exit_on_error=False)
    mode.add_args(parser)
    with pytest.raises(argparse.ArgumentError, match="give selected, all or a number"):
        parser.parse_args(["--block-diffusion-canvases", text])
    assert parser.parse_args(["--block-diffusion-canvases", "selected"]).block_diffusion_canvases == 1


def test_defaults_are_the_published_ones():
    args = flags(dllm_block_size=None, dllm_architecture="diffusion_gemma")
    assert (args.dllm_block_size, args.block_diffusion_self_conditioning) == (256, 0.5)
    assert flags().block_diffusion_self_conditioning == 0.0
    assert flags(dllm_eos_token_id=None, block_diffusion_eos_fill=False).dllm_eos_token_id is None


def test_all_canvases_make_lengths_vary_and_a_number_fixes_them():
    args = flags(dllm_variable_lengths=False)
    assert args.dllm_variable_lengths and mode.model_length(args) == 128
    args = flags(dllm_variable_lengths=False, block_diffusion_canvases=3, dllm_block_size=5, dllm_length_multiple=4)
    assert not args.dllm_variable_lengths and mode.model_length(args) == 64 + 16
    for sample in (make_sample([0] * 64), make_sample([0] * 2)):
        assert laid_out([sample], args, 64)[1].tokens_BQ.shape[1] == 80


def test_the_picture_in_the_documents_is_the_rule():
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    picture = text.split("```text block_diffusion\n")[1].split("```")[0]
    _, batch = laid_out([make_sample([0] * 6, [0, 0, 1, 1, 1, 1])], flags(dllm_block_size=2))
    attributes = batch.attributes_BQA[0]
    rows = ["".join("■" if x else "·" for x in row) for row in mode.visible(attributes[:, None], attributes[None])]
    assert [line.replace("  ", "") for line in picture.splitlines() if line] == rows
