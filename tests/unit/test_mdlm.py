"""Masked diffusion: corruption, layout and loss against loops that say the same thing token by token."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.data.sample import Sample
from megatron_dllm.data.stream import CorruptedSamples, Split
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.modes import MODES, get_mode, mdlm
from megatron_dllm.modes.base import BLOCK, DOCUMENT, POSITION, STREAM, Corrupted
from megatron_dllm.noise import Draws, ValidationDraws
from megatron_dllm.parallel import shard
from tests.unit.block_cases import GivenLogits

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "09_loss_mdlm.json").read_text())["cases"]
MASK, PAD = 99, 7


def flags(**changes):
    values = dict(
        dllm_mask_token_id=MASK,
        dllm_pad_token_id=PAD,
        dllm_eps=1e-3,
        dllm_loss_normalization="supervised",
        dllm_mode="mdlm",
        mdlm_shift_logits=False,
        dllm_padding="ignore",
        dllm_sequence_length=32,
        seed=42,
        eval_iters=2,
        eval_global_batch_size=4,
    )
    return SimpleNamespace(**(values | changes))


def make_sample(n: int, index: int = 0, supervised=None, documents=None) -> Sample:
    loss_mask = torch.ones(n, dtype=torch.bool) if supervised is None else torch.tensor(supervised).bool()
    document = torch.zeros(n, dtype=torch.int32) if documents is None else torch.tensor(documents, dtype=torch.int32)
    position = torch.tensor([i - documents.index(d) for i, d in enumerate(documents)] if documents else range(n))
    return Sample(torch.arange(10, 10 + n), loss_mask, document, position.long(), index)


# --- the published loss, through the path that training takes -------------------------------------------------------


def loss_of(case, normalization="supervised"):
    """(Σ weight·nll, the term's count) of a golden case."""
    samples = []
    for b, ids in enumerate(case["target"]):
        clean = make_sample(len(ids), b, case["loss_mask"][b])
        object.__setattr__(clean, "tokens_S", torch.tensor(ids))
        noised = torch.tensor(case["noise"][b]).bool() & clean.loss_mask_S
        p = torch.tensor(case["p"][b])
        samples.append(Corrupted(clean, clean.tokens_S.masked_fill(noised, MASK), noised, noised / p, p))
    length = len(case["target"][0])
    batch = mdlm.layout(samples, length, flags(dllm_loss_normalization=normalization))
    rank = shard(batch, [0, 1], 1, 0, mdlm.FULL_WITHIN_DOCUMENT)
    logits_BQV = torch.tensor(case["logits"]).requires_grad_()
    view = ScoreView(GivenLogits(case["V"]), logits_BQV.transpose(0, 1), rank.terms)
    (term,) = mdlm.loss(view, None)
    assert term.name == "dllm" and term.weight == 1
    return term.sum, rank.counts["dllm"], view.nll["dllm"], logits_BQV


@pytest.mark.parametrize("published", GOLDEN[1:], ids=lambda c: f"N={c['num_diffusion_tokens']}")
def test_published_loss(published):
    """The published function divides by max(N, 1), or not at all for N = None.

    Here a term returns its undivided sum (N = None) and a count. Training divides by max(global count, 1), so
    N = 0 leaves the sum as it is; that an uncounted batch could have a loss at all is only the golden case's:
    our count comes from the same tokens as the weights.
    """
    total, count, _, _ = loss_of(GOLDEN[0])
    N = published["num_diffusion_tokens"]
    if N is not None:
        assert count == 7 and (count == N or N == 0)
        total = total / max(N, 1.0)
    assert total.item() == pytest.approx(published["total"], rel=1e-6)


def test_published_token_losses_and_the_gradient():
    case = GOLDEN[0]
    total, _, nll_N, logits_BQV = loss_of(case)
    scored_QB = (torch.tensor(case["noise"]) * torch.tensor(case["loss_mask"])).bool().t()
    assert torch.allclose(nll_N, torch.tensor(case["nll"]).t()[scored_QB], rtol=1e-6)
    total.backward()
    naive = torch.tensor(case["logits"]).requires_grad_()
    nll = F.cross_entropy(naive.flatten(0, 1), torch.tensor(case["target"]).flatten(), reduction="none")
    (nll * (scored_QB.t() / torch.tensor(case["p"])).flatten()).sum().backward()
    assert torch.allclose(logits_BQV.grad, naive.grad, atol=1e-6)


def test_normalization_by_noised_tokens():
    total, count, _, _ = loss_of(GOLDEN[0], "noise")
    noised = (torch.tensor(GOLDEN[0]["noise"]) * torch.tensor(GOLDEN[0]["loss_mask"])).sum().item()
    assert count == noised == 5
    assert total.item() == pytest.approx(GOLDEN[1]["total"], rel=1e-6)  # the sum is the same


# --- corruption ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    supervised=st.lists(st.booleans(), min_size=1, max_size=40),
    index=st.integers(0, 10**9),
    seed=st.integers(0, 2**31),
    eps=st.sampled_from([1e-3, 0.2, 1.0]),
    validation=st.booleans(),
)
def test_corruption_token_by_token(supervised, index, seed, eps, validation):
    draws = ValidationDraws(index) if validation else Draws(seed, index)
    clean = make_sample(len(supervised), index, supervised)
    out = mdlm.corrupt(clean, draws, flags(dllm_eps=eps))
    g = draws.generator()
    u = draws.level(g).item()
    p = (1 - eps) * u + eps
    for i, r in enumerate(torch.rand(len(supervised), generator=g).tolist()):
        assert out.level_S[i].item() == pytest.approx(p, rel=1e-6)
        if not supervised[i] or abs(r - p) < 1e-6:
            assert supervised[i] or not out.noised_S[i]
            continue
        assert out.noised_S[i].item() == (r < p)
        assert out.x_t_S[i].item() == (MASK if r < p else clean.tokens_S[i].item())
        assert out.weight_S[i].item() == pytest.approx(1 / p if r < p else 0, rel=1e-6)
    if eps == 1.0:
        assert torch.equal(out.noised_S, clean.loss_mask_S)
    assert clean.tokens_S.tolist() == list(range(10, 10 + len(supervised)))  # the sample is not written to


def test_a_draw_equal_to_p_is_not_noised():
    """Strictly less: a level of exactly p = r keeps the token, as published."""
    g = Draws(42, 0).generator()
    torch.rand(1, generator=g)
    r = torch.rand(8, generator=g)

    class Level(Draws):
        def level(self, g, shape=(1,)):
            super().level(g, shape)
            return r[3:4]

    out = mdlm.corrupt(make_sample(8), Level(42, 0), flags(dllm_eps=0.0))
    assert out.noised_S.tolist() == [x < r[3].item() for x in r.tolist()]
    assert not out.noised_S[3]


def test_the_weights_are_unbiased():
    """E[Σ noised / p] over noise is the number of supervised tokens, whatever the level."""
    clean = make_sample(24, supervised=[0] * 4 + [1] * 20)
    sums = torch.stack([mdlm.corrupt(clean, Draws(1, i), flags(dllm_eps=0.05)).weight_S for i in range(6000)])
    per_token = sums[:, 4:].mean(0)
    error = sums[:, 4:].std(0) / 6000**0.5
    assert (per_token - 1).abs().max() < 5 * error.max()
    total = sums.sum(1)
    assert abs(total.mean() - 20) < 4 * total.std() / 6000**0.5
    assert total.std() / 6000**0.5 < 0.2  # the tolerance means something


# --- layout ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    extra=st.integers(0, 5),
    normalization=st.sampled_from(["supervised", "noise"]),
)
def test_layout_row_by_row(rows, extra, normalization):
    samples = []
    for index, documents in enumerate(rows):
        document = [d for d, (n, _) in enumerate(documents) for _ in range(n)]
        supervised = [flag for n, flag in documents for _ in range(n)]
        samples.append(make_sample(len(document), index, supervised, document))
    args = flags(dllm_loss_normalization=normalization, dllm_eps=0.3)
    corrupted = [mdlm.corrupt(s, Draws(42, s.index), args) for s in samples]
    length = max(map(len, samples)) + extra
    batch = mdlm.layout(corrupted, length, args)
    term = batch.terms["dllm"]
    noised = supervised_count = 0
    assert batch.tokens_BQ.shape == (len(rows), length) and batch.streams == 1
    assert batch.attributes_BQA.dtype == torch.int32
    for b, c in enumerate(corrupted):
        for i in range(length):
            attributes = batch.attributes_BQA[b, i].tolist()
            scored = term.weights_BQ[b, i].item()
            if i < len(c.sample):
                noised += c.noised_S[i].item()
                supervised_count += c.sample.loss_mask_S[i].item()
                assert batch.tokens_BQ[b, i] == c.x_t_S[i]
                assert term.targets_BQ[b, i] == 10 + i
                assert batch.position_ids_BQ[b, i] == c.sample.position_S[i] == attributes[POSITION]
                assert attributes[DOCUMENT] == c.sample.document_S[i]
                assert scored == c.weight_S[i] and (scored > 0) == c.noised_S[i]
                assert term.levels_BQ[b, i] == c.level_S[i]
            else:
                assert batch.tokens_BQ[b, i] == PAD
                assert attributes[DOCUMENT] == -1 and scored == 0
            assert attributes[STREAM] == attributes[BLOCK] == 0
    assert term.count == (supervised_count if normalization == "supervised" else noised)
    assert batch.tokens == dict(
        supervised=supervised_count, noised=noised, data=sum(map(len, samples)), processed=len(rows) * length
    )


def test_a_batch_without_supervision_scores_nothing():
    corrupted = [mdlm.corrupt(make_sample(6, i, [0] * 6), Draws(42, i), flags()) for i in range(2)]
    batch = mdlm.layout(corrupted, 8, flags())
    rank = shard(batch, [0, 1], 1, 0, True)
    assert rank.counts == {"dllm": 0} and len(rank.terms["dllm"].rows_N) == 0
    assert (batch.tokens_BQ[:, :6] == torch.arange(10, 16)).all()
    hidden = torch.randn(8, 2, 5, requires_grad=True)
    (term,) = mdlm.loss(ScoreView(GivenLogits(5), hidden, rank.terms), flags())
    term.sum.backward()
    assert term.sum == 0 and not hidden.grad.any()


def test_a_sample_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="cut it"):
        mdlm.layout([mdlm.corrupt(make_sample(9), Draws(42, 0), flags())], 8, flags())


# --- padding policies -------------------------------------------------------------------------------------------------


class Source:
    def __init__(self, *lengths):
        self.lengths = lengths

    def sample(self, index):
        n = self.lengths[index % len(self.lengths)]
        return make_sample(n, index, [0] * 2 + [1] * (n - 2))


def stream_batch(padding: str, length: int):
    args = flags(dllm_padding=padding, dllm_sequence_length=length)
    samples = CorruptedSamples(Source(9, 5, 12), args, Split.train)
    corrupted = [samples[i] for i in range(3)]
    return corrupted, mdlm.layout(corrupted, length, args)


def test_ignored_padding_can_be_doubled():
    short, long = stream_batch("ignore", 16)[1], stream_batch("ignore", 32)[1]
    assert short.terms["dllm"].count == long.terms["dllm"].count == 7 + 3 + 10
    assert short.tokens | dict(processed=0) == long.tokens | dict(processed=0)
    for tensor in ("tokens_BQ", "position_ids_BQ", "attributes_BQA"):
        assert torch.equal(getattr(short, tensor), getattr(long, tensor)[:, :16])
    for tensor in ("targets_BQ", "weights_BQ", "levels_BQ"):
        assert torch.equal(getattr(short.terms["dllm"], tensor), getattr(long.terms["dllm"], tensor)[:, :16])
    assert not long.terms["dllm"].weights_BQ[:, 16:].any()


def test_supervised_padding_is_part_of_the_answer():
    corrupted, batch = stream_batch("supervise", 32)
    assert batch.terms["dllm"].count == 3 * (32 - 2)
    assert batch.tokens["data"] == 3 * 32
    assert (batch.attributes_BQA[..., DOCUMENT] == 0).all()
    assert torch.equal(batch.position_ids_BQ, torch.arange(32).expand(3, 32))
    for b, n in enumerate((9, 5, 12)):
        assert (batch.terms["dllm"].targets_BQ[b, n:] == PAD).all()
    pads_noised = sum(c.noised_S[12:].sum() for c in corrupted)
    assert pads_noised > 0
    # the real tokens get the noise they get without padding
    for padded, ignored in zip(corrupted, stream_batch("ignore", 32)[0], strict=True):
        n = len(ignored.sample)
        assert torch.equal(padded.x_t_S[:n], ignored.x_t_S) and torch.equal(padded.weight_S[:n], ignored.weight_S)


def test_every_evaluation_reads_the_same_corrupted_samples():
    args = flags()
    training = CorruptedSamples(Source(12, 9, 10), args, Split.train)
    evaluation = CorruptedSamples(Source(12, 9, 10), args, Split.valid)
    other_seed = CorruptedSamples(Source(12, 9, 10), flags(seed=1), Split.valid)
    period = args.eval_iters * args.eval_global_batch_size
    for i in range(period):
        assert torch.equal(evaluation[i].x_t_S, evaluation[i + period].x_t_S)
        assert torch.equal(evaluation[i].x_t_S, other_seed[i].x_t_S)
        assert evaluation[i].level_S[0] != training[i].level_S[0]
    assert training[3].level_S[0] != training[3 + period].level_S[0]


# --- visibility, flags ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.integers(-1, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_visible_element_by_element(rows):
    attributes = torch.randint(-1, 4, (len(rows), 6, 4), dtype=torch.int32)  # the rule looks at documents alone
    attributes[..., DOCUMENT] = torch.tensor(rows)
    allowed = mdlm.visible(attributes[:, :, None], attributes[:, None])
    for b, documents in enumerate(rows):
        for q in range(6):
            for k in range(6):
                assert allowed[b, q, k].item() == (documents[q] == documents[k])


@pytest.mark.parametrize("eps", [0.0, -0.1, 1.5])
def test_a_masking_rate_outside_its_range_is_refused(eps):
    with pytest.raises(ValueError, match="--dllm-eps"):
        mdlm.validate(flags(dllm_eps=eps))
    mdlm.validate(flags(dllm_eps=1.0))


def test_modes_are_found_by_name():
    assert all(get_mode(name) is module for name, module in MODES.items())
    with pytest.raises(ValueError, match="choose one of .*mdlm"):
        get_mode("no such mode")
