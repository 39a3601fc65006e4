"""Rows with their own gradients under a frozen head: nll, and divergence from a teacher, against float64 autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dllm.models.distillation import RowKL
from megatron_dllm.models.head import RowNLL
from tests.one_process import OneRank
from tests.unit.test_head import D, LargestTensor, Ranks, close, problem, relative


def case(N, V, seed=0, **options):
    """(rows, head, teacher's rows, targets, upstream of each row, of either sign)."""
    hidden, weight, targets, weights = problem(N, V, seed, **options)
    teacher, *_ = problem(N, V, seed + 1000, **options)
    return hidden.detach(), weight.detach(), teacher.detach(), targets, weights - 10


def naive(hidden, weight, teacher, targets, upstream, T=1.0):
    """[(value, gradient)] of nll and of KL, in float64 from logits of the true vocabulary."""
    out = []
    for kind in ("nll", "kl"):
        h = hidden.double().requires_grad_()
        logits, wanted = h @ weight.double().t(), teacher.double() @ weight.double().t()
        if kind == "nll":
            rows = F.cross_entropy(logits, targets, reduction="none")
        else:
            p, q = ((x / T).log_softmax(-1) for x in (wanted, logits))
            rows = (p.exp() * (p - q)).sum(-1)
        (rows * upstream.double()).sum().backward()
        out.append((rows.detach(), h.grad))
    return out


def ours(hidden, weight, teacher, targets, upstream, T=1.0, chunk=7, vocab=None, group=None):
    vocab, group, out = len(weight) if vocab is None else vocab, group or OneRank(), []
    for kind in ("nll", "kl"):
        h = hidden.clone().requires_grad_()
        if kind == "nll":
            rows, right = RowNLL.apply(h, weight, targets, group, vocab, chunk)
            assert not right.requires_grad
        else:
            rows = RowKL.apply(h, weight, teacher, T, group, vocab, chunk)
        assert rows.dtype == torch.float32
        (rows * upstream).sum().backward()
        out.append((rows.detach(), h.grad))
    return out


def equal(found, expected, tolerance=2e-6):
    for pair, wanted in zip(found, expected, strict=True):
        close(pair, wanted, tolerance)


@pytest.mark.parametrize("T", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_values_and_gradients(chunk, T):
    given = case(30, 41)
    equal(ours(*given, T=T, chunk=chunk), naive(*given, T=T))


def test_no_rows():
    for values, gradient in ours(*case(0, 41)):
        assert values.shape == (0,) and gradient.shape == (0, D)


def test_a_teacher_is_not_diverged_from_by_itself():
    hidden, weight, _, targets, upstream = case(30, 41)
    (_, _), (kl, gradient) = ours(hidden, weight, hidden, targets, upstream)
    assert not kl.any() and not gradient.any()


def test_padding_takes_no_part():
    hidden, weight, teacher, targets, upstream = case(9, 41, seed=3)
    padded = torch.cat([weight, torch.full((5, D), 50.0)])
    equal(ours(hidden, padded, teacher, targets, upstream, T=0.3, vocab=41), naive(*case(9, 41, seed=3), T=0.3), 1e-5)


def test_huge_logits():
    given = case(20, 41, seed=4, scale=1e3)
    found = ours(*given)
    assert all(x.isfinite().all() for pair in found for x in pair)
    equal(found, naive(*given), 1e-5)


def test_bf16_within_its_rounding():
    given = case(200, 301, seed=5, dtype=torch.bfloat16)
    found, expected = ours(*given, T=2.0, chunk=64), naive(*given, T=2.0)
    for (values, gradient), (exact, its) in zip(found, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert relative(values, exact) < 2e-2 and relative(gradient, its) < 2e-2


def test_only_under_a_frozen_head_and_once():
    hidden, weight, teacher, targets, _ = case(9, 41)
    trained, h = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="only under a frozen head"):
        RowNLL.apply(h, trained, targets, OneRank(), 41, 4)
    with pytest.raises(RuntimeError, match="only under a frozen head"):
        RowKL.apply(h, trained, teacher, 1.0, OneRank(), 41, 4)
    rows = RowKL.apply(h, weight, teacher, 1.0, OneRank(), 41, 4)
    rows.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        rows.sum().backward()
    assert not RowKL.apply(hidden, weight, teacher, 1.0, OneRank(), 41, 4).requires_grad


def test_no_tensor_of_rows_times_vocabulary():
    N, V, chunk = 256, 101, 16
    with LargestTensor() as largest:
        ours(*case(N, V), chunk=chunk)
    assert largest.elements <= max(chunk * V, N * D)


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from([2, 3, 4]),
    vocab=st.integers(5, 40),
    N=st.integers(0, 11),
    chunk=st.sampled_from([1, 4, 100]),
    T=st.sampled_from([0.5, 1.0, 3.0]),
    seed=st.integers(0, 99),
)
def test_vocabulary_parallel_equals_one_rank(size, vocab, N, chunk, T, seed):
    """Vocabularies that do not divide: the last ranks hold padding columns, possibly nothing else."""
    hidden, weight, teacher, targets, upstream = case(N, vocab, seed)
    padded = torch.full((size * (-(-vocab // size) + seed % 3), D), 9.0)
    padded[:vocab] = weight
    ranks = Ranks(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_into_tensor", ranks.all_gather_into_tensor)
        shard = lambda m: padded.chunk(size)[m.rank()]
        out = ranks.run(lambda m: ours(hidden, shard(m), teacher, targets, upstream, T, chunk, vocab, m))
    assert ranks.gathers == 2 * -(-N // chunk)  # one small collective a chunk for each
    for found in out[1:]:
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, out[0], strict=True))
    for kind, (values, gradient) in enumerate(naive(hidden, weight, teacher, targets, upstream, T)):
        if N:
            close((out[0][kind][0], sum(found[kind][1] for found in out)), (values, gradient), 2e-5)
