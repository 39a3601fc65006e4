"""Losses that are not linear in the nll, with their gradient taken in forward: against full logits and autograd.

The reference runs in float64. Tensor parallelism runs as threads that meet in the all-gather; real processes are in
tests/parallel.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dllm.models.reductions import WeightedLoss, taking_part
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.parallel import RankTerm
from tests.one_process import OneRank, attributes_of, one_process, packed, randomize, small_model
from tests.unit.test_head import D, LargestTensor, Ranks, close, problem, relative

SOFT = lambda x: F.softplus(x + 3)


def example(log_q, targets_n):
    """Two ids a row (sometimes the same), two sums, nothing linear. For one chunk: rows look at their neighbours."""
    ids = torch.stack([targets_n, targets_n.roll(1)], dim=1)
    at = log_q.at(ids)
    slope = torch.linspace(0.5, 1.5, len(targets_n), dtype=at.dtype)[:, None]  # a constant of each row
    entropy = log_q.sum(lambda x: (slope * x).exp() * -x.clamp(min=-700))
    return (at[:, 0].exp() - 0.3 * at[:, 1]).square() + entropy * log_q.sum(SOFT).log()


class Full:
    """log q as the plain way has it."""

    def __init__(self, logits, excluded):
        columns = torch.arange(logits.shape[1]) == (-1 if excluded is None else excluded)
        self.log_q, self.taking_part = logits.masked_fill(columns, float("-inf")).log_softmax(-1), ~columns

    def at(self, ids):
        return self.log_q.gather(1, ids)

    def sum(self, f):
        return f(self.log_q[:, self.taking_part]).sum(1)


def naive(hidden, weight, targets, weights, excluded=None, upstream=1.0, loss=example):
    """(Σ, loss of each row, gradients) in float64, from all logits."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = loss(Full(hidden @ weight.t(), excluded), targets)
    total = (losses * weights.double()).sum()
    (total * upstream).backward()
    return total.detach(), losses.detach(), hidden.grad, weight.grad


def ours(
    hidden, weight, targets, weights, chunk=100, vocab=None, group=None, excluded=None, upstream=1.0, loss=example
):
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    vocab = len(weight) if vocab is None else vocab
    row_loss = lambda log_q, rows: loss(log_q, targets[rows])
    total, losses = WeightedLoss.apply(hidden, weight, weights, group or OneRank(), vocab, row_loss, excluded, chunk)
    assert not losses.requires_grad and total.dtype == losses.dtype == torch.float32
    (total * upstream).backward()
    return total.detach(), losses, hidden.grad, weight.grad


def case_without(excluded, *args, **options):
    """A problem whose targets are not the excluded token."""
    hidden, weight, targets, weights = problem(*args, **options)
    if excluded is not None:
        targets = torch.where(targets == excluded, (excluded + 1) % len(weight), targets)
    return hidden, weight, targets, weights


@pytest.mark.parametrize("upstream", [1.0, -3.0])
@pytest.mark.parametrize("excluded", [None, 0, 17, 40])
@pytest.mark.parametrize("N", [1, 8, 30])
def test_loss_and_gradients(N, excluded, upstream):
    case = case_without(excluded, N, 41)
    out = ours(*case, excluded=excluded, upstream=upstream)
    close(out, naive(*case, excluded=excluded, upstream=upstream), 2e-6)
    if excluded is not None:
        assert not out[3][excluded].any()


def per_row(log_q, targets_n):
    return log_q.at(targets_n[:, None])[:, 0].square() * log_q.sum(SOFT)


@pytest.mark.parametrize("chunk", [1, 7, 30, 100])
def test_any_chunk_size(chunk):
    case = case_without(5, 30, 41, seed=1)
    close(ours(*case, chunk=chunk, excluded=5, loss=per_row), naive(*case, excluded=5, loss=per_row), 2e-6)


def test_the_nll_is_a_special_case():
    case = problem(30, 41, seed=2)
    nll = lambda log_q, targets_n: -log_q.at(targets_n[:, None])[:, 0]
    expected = naive(*case, loss=nll)
    close(ours(*case, chunk=7, loss=nll), expected)
    reference = F.cross_entropy(case[0].double() @ case[1].double().t(), case[2], reduction="none")
    assert relative(expected[1], reference) < 1e-12


def test_a_sum_alone_and_a_token_alone():
    case = problem(9, 41)
    for loss in (lambda log_q, _: log_q.sum(SOFT), lambda log_q, targets: log_q.at(targets[:, None])[:, 0]):
        close(ours(*case, chunk=4, loss=loss), naive(*case, loss=loss), 2e-6)


def test_a_token_that_takes_no_part_has_no_probability():
    hidden, weight, targets, weights = problem(4, 41)
    seen = {}

    def look(log_q, targets_n):
        seen["at"] = log_q.at(torch.tensor([[3, 4, 38, 40]] * 4)).detach()
        seen["count"] = log_q.sum(lambda x: torch.ones_like(x) + 0 * x)
        return log_q.at(targets_n[:, None])[:, 0]

    ours(hidden, weight, targets.clamp(5, 30), weights, vocab=39, excluded=4, loss=look)
    assert (seen["at"][:, [1, 3]] == float("-inf")).all() and seen["at"][:, [0, 2]].isfinite().all()
    assert (seen["count"] == 38).all()


@pytest.mark.parametrize("padding", [1, 3, 20])
def test_padding_columns_get_neither_probability_nor_gradient(padding):
    hidden, weight, targets, weights = case_without(11, 9, 41, seed=3)
    padded = torch.cat([weight.detach(), torch.full((padding, D), 50.0)])
    total, losses, grad_hidden, grad_weight = ours(hidden, padded, targets, weights, vocab=41, excluded=11)
    expected = naive(hidden, weight, targets, weights, excluded=11)
    close((total, losses, grad_hidden, grad_weight[:41]), expected, 2e-6)
    assert not grad_weight[41:].any()


def test_no_rows():
    total, losses, grad_hidden, grad_weight = ours(*problem(0, 41))
    assert total == 0 and losses.shape == (0,) and grad_hidden.shape == (0, D)
    assert grad_weight.shape == (41, D) and not grad_weight.any()


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_asked_for(needs):
    case = problem(9, 41)
    hidden, weight = (x.detach().requires_grad_(need) for x, need in zip(case, needs, strict=False))
    derivatives = []

    def loss(log_q, rows):
        value = per_row(log_q, case[2][rows])
        derivatives.extend(log_q._sums[0][0])
        return value

    total, losses = WeightedLoss.apply(hidden, weight, case[3], OneRank(), 41, loss, None, 4)
    expected = naive(*case, loss=per_row)
    close((total.detach(), losses), expected[:2], 2e-6)
    assert any(needs) == bool(derivatives)  # without gradients none of their ingredients
    if any(needs):
        total.backward()
    for x, need, gradient in zip((hidden, weight), needs, expected[2:], strict=True):
        assert (x.grad is not None) == need
        assert not need or relative(x.grad, gradient) < 2e-6


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
def test_huge_logits(magnitude):
    hidden, weight, targets, weights = problem(20, 41, seed=4, scale=magnitude / D**0.5)
    out = ours(hidden, weight, targets, weights, chunk=6, loss=per_row)
    assert all(x.isfinite().all() for x in out)
    # a logit is off by some 1e-7 of its size, a probability by that factor
    close(out, naive(hidden, weight, targets, weights, loss=per_row), 1e-6 * magnitude)


def test_bf16_is_as_good_as_the_usual_way():
    hidden, weight, targets, weights = problem(200, 301, seed=5, dtype=torch.bfloat16)
    total, losses, *gradients = ours(hidden, weight, targets, weights, chunk=64, excluded=None, loss=per_row)
    exact = naive(hidden, weight, targets, weights, loss=per_row)
    usual = per_row(Full((hidden @ weight.t()).float(), None), targets)
    (usual * weights).sum().backward()
    assert relative(total, exact[0]) < 2e-3 and relative(losses, exact[1]) < 1e-2
    for gradient, reference, expected in zip(gradients, (hidden.grad, weight.grad), exact[2:], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert relative(gradient, expected) < max(2 * relative(reference, expected), 2**-8)


def test_backward_twice_is_an_error_and_not_a_wrong_gradient():
    case = problem(9, 41)
    loss = lambda log_q, rows: per_row(log_q, case[2][rows])
    total, _ = WeightedLoss.apply(*case[:2], case[3], OneRank(), 41, loss, None, 4)
    (total * 3).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation|second backward"):
        (total * 3).backward()


@settings(max_examples=100, deadline=None)
@given(
    first=st.integers(0, 30),
    columns=st.integers(1, 20),
    vocab=st.integers(1, 40),
    excluded=st.none() | st.integers(0, 45),
)
def test_who_takes_part(first, columns, vocab, excluded):
    parts = taking_part(first, columns, vocab, excluded)
    own = [column for part in parts for column in range(part.start, part.stop)]
    assert own == [c for c in range(columns) if first + c < vocab and first + c != excluded]
    assert len(parts) >= 1 and (len(parts) == 1 or all(part.stop > part.start for part in parts))


# --- memory, and the way that training takes ------------------------------------------------------------------------


def test_no_tensor_of_rows_times_vocabulary():
    N, V, chunk = 256, 101, 16
    case = case_without(50, N, V)
    with LargestTensor() as usual:
        (per_row(Full(case[0] @ case[1].t(), 50), case[2]) * case[3]).sum().backward()
    assert usual.elements == N * V  # the probe sees it
    with LargestTensor() as chunked:
        ours(*case, chunk=chunk, excluded=50, loss=per_row)
    assert chunked.elements <= max(chunk * V, N * D)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_and_all_its_gradients(tied):
    """Through ScoreView, selected rows and the output layer, tied or not, against the model's own logits."""
    Q, V, excluded = 24, 61, 7
    with one_process():
        model = small_model(true_vocab_size=V, share_embeddings_and_output_weights=tied)
        randomize(model)
        documents_BQ, positions_BQ = packed([[Q], [10, 9]], Q)
        tokens_BQ = torch.randint(8, V, (2, Q), generator=torch.Generator().manual_seed(0))
        inputs = (tokens_BQ, positions_BQ, attributes_of(documents_BQ, positions_BQ))
        rows_N = torch.tensor([0, 3, 4, 17, 20, 31])
        term = RankTerm(rows_N, tokens_BQ.t().flatten()[rows_N], torch.rand(6), inputs_N=torch.arange(6) * 1.0)
        row_loss = lambda log_q, rows: per_row(log_q, rows.targets_N) + rows.inputs_N
        views = []

        def loss(view: ScoreView):
            views.append(view)
            return view.weighted_loss("x", row_loss, excluded, chunk_rows=4)

        total = model(*inputs, loss=loss, terms={"x": term})
        total.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        logits = model(*inputs).transpose(0, 1).flatten(0, 1)[rows_N, :V].double()
        losses = row_loss(Full(logits, excluded), term)
        expected = (losses * term.weights_N).sum()
        expected.backward()
        assert relative(total.detach(), expected.detach()) < 1e-6
        assert relative(views[0].nll["x"], losses.detach()) < 1e-6
        for name, parameter in model.named_parameters():
            assert relative(gradients[name], parameter.grad) < 1e-5, name


class HeadProducts(TorchDispatchMode):
    """How many matrix products had the vocabulary (67 tokens, 72 rows) as a dimension."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket._qualified_op_name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.count += any({67, 72} & set(x.shape) for x in (*args, out) if isinstance(x, torch.Tensor))
        return out


@pytest.mark.parametrize("method", ["weighted_loss", "weighted_nll"])
def test_an_evaluation_takes_no_gradients(method):
    """Inside a Function parameters look as if they wanted gradients under no_grad too."""
    Q, V, chunks = 24, 67, {"weighted_loss": 2, "weighted_nll": 1}[method]
    with one_process():
        model = small_model(true_vocab_size=V, padded_vocab_size=72)
        randomize(model)
        documents_BQ, positions_BQ = packed([[Q]], Q)
        tokens_BQ = torch.randint(V, (1, Q), generator=torch.Generator().manual_seed(0))
        term = RankTerm(torch.arange(Q), tokens_BQ[0], torch.ones(Q))
        nll = lambda log_q, rows: -log_q.at(rows.targets_N[:, None])[:, 0]
        extra = (nll, None, 16) if method == "weighted_loss" else ()
        score = lambda view: getattr(view, method)("x", *extra)
        inputs = (tokens_BQ, positions_BQ, attributes_of(documents_BQ, positions_BQ))
        with HeadProducts() as training:
            trained = model(*inputs, loss=score, terms={"x": term}).detach()
        with torch.no_grad(), HeadProducts() as evaluation:
            assert torch.equal(model(*inputs, loss=score, terms={"x": term}), trained)
        assert training.count == 3 * chunks and evaluation.count == chunks


# --- vocabulary parallel --------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from([2, 3, 4]),
    vocab=st.integers(7, 40),
    N=st.integers(0, 11),
    chunk=st.sampled_from([1, 4, 100]),
    excluded=st.none() | st.integers(0, 5),
    spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_vocabulary_parallel_equals_one_rank(size, vocab, N, chunk, excluded, spare, seed):
    """Vocabularies that do not divide: the last ranks hold padding columns, possibly nothing else; and a rank may hold
    the excluded token and nothing else."""
    hidden, weight, targets, weights = case_without(excluded, N, vocab, seed)
    if N:
        targets[0] = vocab - 1
    per_rank = -(-vocab // size) + spare
    padded = torch.full((size * per_rank, D), 9.0)
    padded[:vocab] = weight.detach()
    ranks = Ranks(size)
    both = lambda log_q, targets_n: per_row(log_q, targets_n) + log_q.sum(torch.exp).square()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_into_tensor", ranks.all_gather_into_tensor)
        run = lambda m: ours(
            hidden, padded.chunk(size)[m.rank()], targets, weights, chunk, vocab, m, excluded, loss=both
        )
        out = ranks.run(run)
    assert ranks.gathers == 4 * -(-N // chunk)  # one a reduction and chunk, on every rank
    for total, losses, _, _ in out:
        assert torch.equal(total, out[0][0]) and torch.equal(losses, out[0][1])
    grad_weight = torch.cat([o[3] for o in out])
    assert not grad_weight[vocab:].any()
    if N:
        total, losses, *gradients = naive(hidden, weight, targets, weights, excluded=excluded, loss=both)
        close(out[0][:2], (total, losses), 1e-5)
        ours_summed = (sum(o[2] for o in out), grad_weight[:vocab])
        for a, b, factor in zip(ours_summed, gradients, (weight, hidden), strict=True):
            unit = weights.max() * factor.abs().max()  # of the products that cancel in a gradient
            assert (a - b).abs().max() < 1e-5 * b.abs().max() + 2e-6 * unit
    else:
        assert not grad_weight.any()


def test_a_rank_with_nothing_that_takes_part():
    """Two tokens on three ranks: one holds the excluded token alone, one padding alone."""
    hidden, weight, targets, weights = problem(5, 3, seed=1)
    targets = torch.tensor([1, 0, 1, 1, 0])
    padded = torch.cat([weight.detach()[[0, 1]], torch.full((2, D), 9.0), torch.full((2, D), 5.0)])
    padded[2] = weight.detach()[2]
    ranks = Ranks(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_into_tensor", ranks.all_gather_into_tensor)
        out = ranks.run(lambda m: ours(hidden, padded.chunk(3)[m.rank()], targets, weights, 2, 3, m, 2, loss=per_row))
    expected = naive(hidden, weight, targets, weights, excluded=2, loss=per_row)
    grad_weight = torch.cat([o[3] for o in out])
    close((*out[2][:2], sum(o[2] for o in out), grad_weight[:3]), expected, 1e-5)
    assert not grad_weight[2:].any()
