"""The head with its gradient taken in forward, against full logits, F.cross_entropy and autograd.

The reference runs in float64. (`gradcheck` itself cannot be used: the head computes in fp32 whatever comes in.)
Tensor parallelism runs as threads, one a rank, that meet in the all-gather; real processes are in tests/parallel.
"""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dllm.models import scoring
from megatron_dllm.models.head import WeightedNLL
from megatron_dllm.modes import mdlm
from megatron_dllm.parallel import RankTerm
from tests.one_process import OneRank, attributes_of, one_process, packed, randomize, small_model

D = 12


def problem(N, V, seed=0, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(N, D, generator=g) * scale).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=g)
    weights = torch.rand(N, generator=g) * 20
    return hidden, weight, targets, weights


def naive(hidden, weight, targets, weights, upstream=1.0):
    """(loss, nll, gradients) in float64, from logits over the true vocabulary."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    nll = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    loss = (nll * weights.double()).sum()
    (loss * upstream).backward()
    return loss.detach(), nll.detach(), hidden.grad, weight.grad


def ours(hidden, weight, targets, weights, chunk=7, vocab=None, group=None, upstream=1.0):
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    vocab = len(weight) if vocab is None else vocab
    loss, nll, _ = WeightedNLL.apply(hidden, weight, targets, weights, group or OneRank(), vocab, chunk)
    assert not nll.requires_grad and loss.dtype == nll.dtype == torch.float32
    (loss * upstream).backward()
    return loss.detach(), nll, hidden.grad, weight.grad


def relative(a, b) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()


def close(a, b, tolerance=1e-6):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape and relative(x, y) < tolerance


@pytest.mark.parametrize("upstream", [1.0, 0.125, -3.0])
@pytest.mark.parametrize("N", [1, 6, 7, 8, 30])
def test_loss_and_gradients(N, upstream):
    case = problem(N, 41)
    close(ours(*case, upstream=upstream), naive(*case, upstream=upstream))


@pytest.mark.parametrize("chunk", [1, 7, 30, 100])
def test_any_chunk_size(chunk):
    case = problem(30, 41, seed=1)
    close(ours(*case, chunk=chunk), naive(*case))


def test_rows_of_weight_zero_and_targets_at_both_ends():
    hidden, weight, targets, weights = problem(8, 41, seed=2)
    weights[:4] = 0
    targets[::2], targets[1::2] = 40, 0
    out = ours(hidden, weight, targets, weights)
    close(out, naive(hidden, weight, targets, weights))
    assert not out[2][:4].any() and out[2][4:].any()


def test_no_rows():
    hidden, weight, targets, weights = problem(0, 41)
    loss, nll, grad_hidden, grad_weight = ours(hidden, weight, targets, weights)
    assert loss == 0 and nll.shape == (0,) and grad_hidden.shape == (0, D)
    assert grad_weight.shape == weight.shape and not grad_weight.any()


def test_right_is_where_the_target_is_the_likeliest():
    hidden, weight, targets, weights = problem(30, 41)
    likeliest = (hidden @ weight.t()).argmax(-1)
    targets[::3] = likeliest[::3]
    *_, right = WeightedNLL.apply(hidden, weight, targets, weights, OneRank(), 41, 7)
    assert torch.equal(right, likeliest == targets) and 10 <= right.sum() < 20


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_asked_for(needs):
    """A frozen head, frozen hidden states, evaluation."""
    case = problem(9, 41)
    hidden, weight = (x.detach().requires_grad_(need) for x, need in zip(case, needs, strict=False))
    loss, nll, _ = WeightedNLL.apply(hidden, weight, *case[2:], OneRank(), 41, 4)
    expected = naive(*case)
    close((loss.detach(), nll), expected[:2])
    if any(needs):
        loss.backward()
    for x, need, gradient in zip((hidden, weight), needs, expected[2:], strict=True):
        assert (x.grad is not None) == need
        assert not need or relative(x.grad, gradient) < 1e-6


@pytest.mark.parametrize("padding", [1, 3, 20])
def test_padding_columns_get_neither_probability_nor_gradient(padding):
    hidden, weight, targets, weights = problem(9, 41, seed=3)
    loud = torch.full((padding, D), 50.0)
    padded = torch.cat([weight.detach(), loud]).requires_grad_()
    loss, nll, grad_hidden, grad_weight = ours(hidden, padded, targets, weights, vocab=41)
    close((loss, nll, grad_hidden, grad_weight[:41]), naive(hidden, weight, targets, weights))
    assert not grad_weight[41:].any()


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
def test_huge_logits(magnitude):
    hidden, weight, targets, weights = problem(20, 41, seed=4, scale=magnitude / D**0.5)
    out = ours(hidden, weight, targets, weights)
    assert all(x.isfinite().all() for x in out)
    assert (hidden @ weight.t()).abs().max() > magnitude
    close(out, naive(hidden, weight, targets, weights), 1e-5)


def test_bf16_is_as_good_as_the_usual_way():
    hidden, weight, targets, weights = problem(200, 301, seed=5, dtype=torch.bfloat16)
    loss, nll, *gradients = ours(hidden, weight, targets, weights, chunk=64)
    exact = naive(hidden, weight, targets, weights)
    usual = F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")
    (usual * weights).sum().backward()
    assert relative(loss, exact[0]) < 2e-3 and relative(nll, exact[1]) < 1e-2
    for gradient, reference, expected in zip(gradients, (hidden.grad, weight.grad), exact[2:], strict=True):
        assert gradient.dtype == torch.bfloat16
        assert relative(gradient, expected) < max(2 * relative(reference, expected), 2**-8)


def test_backward_twice_is_an_error_and_not_a_wrong_gradient():
    hidden, weight, targets, weights = problem(9, 41)
    loss, *_ = WeightedNLL.apply(hidden, weight, targets, weights, OneRank(), 41, 4)
    (loss * 3).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation|second backward"):
        (loss * 3).backward()


# --- memory -------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, in forward and in backward."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_of_rows_times_vocabulary():
    N, V, chunk = 256, 101, 16
    case = problem(N, V)
    with LargestTensor() as usual:
        nll = F.cross_entropy(case[0] @ case[1].t(), case[2], reduction="none")
        (nll * case[3]).sum().backward()
    assert usual.elements == N * V  # the probe sees it
    with LargestTensor() as fused:
        ours(*case, chunk=chunk)
    assert fused.elements <= max(chunk * V, N * D)


def test_the_chunk_size_reaches_the_training_path(monkeypatch):
    Q, V = 128, 512
    with one_process():
        model = small_model(true_vocab_size=V, padded_vocab_size=V)
        randomize(model)
        documents_BQ, positions_BQ = packed([[Q]], Q)
        tokens_BQ = torch.randint(V, (1, Q), generator=torch.Generator().manual_seed(0))
        term = RankTerm(torch.arange(Q), tokens_BQ[0], torch.ones(Q), torch.ones(Q))

        def step(chunk):
            monkeypatch.setattr(scoring, "HEAD_CHUNK_ROWS", chunk)
            model.zero_grad()
            attributes_BQA = attributes_of(documents_BQ, positions_BQ)
            with LargestTensor() as largest:
                loss = partial(mdlm.loss, args=None)
                (out,) = model(tokens_BQ, positions_BQ, attributes_BQA, loss=loss, terms={"dllm": term})
                out.sum.backward()
            return out.sum.detach(), {n: p.grad for n, p in model.named_parameters()}, largest.elements

        loss, gradients, elements = step(1024)
        chunked_loss, chunked_gradients, chunked_elements = step(16)
    assert elements >= Q * V > 2 * chunked_elements
    assert relative(chunked_loss, loss) < 1e-6
    for name, gradient in gradients.items():
        assert relative(chunked_gradients[name], gradient) < 1e-5, name


# --- vocabulary parallel ----------------------------------------------------------------------------------------------


class Ranks:
    """Threads that stand for tensor-parallel ranks and meet in `all_gather_into_tensor`."""

    def __init__(self, size: int):
        self.members = [Member(rank, self) for rank in range(size)]
        self.barrier = threading.Barrier(size, timeout=120)
        self.slots = [None] * size
        self.gathers = 0

    def all_gather_into_tensor(self, out, mine, group):
        self.slots[group.rank()] = mine.clone()
        self.barrier.wait()
        out.copy_(torch.cat(self.slots))
        self.gathers += group.rank() == 0
        self.barrier.wait()

    def run(self, function) -> list:
        results, errors = [None] * len(self.members), []

        def work(member):
            try:
                results[member.rank()] = function(member)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(member,)) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return results


class Member(OneRank):
    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks

    def rank(self):
        return self._rank

    def size(self):
        return len(self._ranks.members)


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from([2, 3, 4]),
    vocab=st.integers(5, 40),
    N=st.integers(0, 11),
    chunk=st.sampled_from([1, 4, 100]),
    scale=st.sampled_from([1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_vocabulary_parallel_equals_one_rank(size, vocab, N, chunk, scale, seed):
    """Vocabularies that do not divide: the last ranks hold padding columns, possibly nothing else."""
    hidden, weight, targets, weights = problem(N, vocab, seed, scale=scale)
    if N:
        targets[0] = vocab - 1
    per_rank = -(-vocab // size) + seed % 3
    padded = torch.full((size * per_rank, D), 9.0)
    padded[:vocab] = weight.detach()
    ranks = Ranks(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_into_tensor", ranks.all_gather_into_tensor)
        out = ranks.run(lambda m: ours(hidden, padded.chunk(size)[m.rank()], targets, weights, chunk, vocab, m))
    assert ranks.gathers == -(-N // chunk)  # one small collective a chunk, on every rank
    for loss, nll, _, _ in out:
        assert torch.equal(loss, out[0][0]) and torch.equal(nll, out[0][1])
    grad_hidden = sum(o[2] for o in out)
    grad_weight = torch.cat([o[3] for o in out])
    assert not grad_weight[vocab:].any()
    if N:
        # what fp32 can know: a logit is off by `rounding`, so a probability p by p (1 - p) times that
        rounding = 4e-7 * (hidden @ weight.t()).abs().max().item()
        loss, nll, *gradients = naive(hidden, weight, targets, weights)
        assert abs(out[0][0] - loss) < 1e-6 * loss + rounding * weights.sum()
        assert (out[0][1] - nll).abs().max() < 1e-6 * nll.max() + rounding
        for a, b, factor in zip((grad_hidden, grad_weight[:vocab]), gradients, (weight, hidden), strict=True):
            unit = weights.max() * factor.abs().max()  # of the products that cancel in a gradient
            assert (a - b).abs().max() < (1e-5 + 4 * rounding) * b.abs().max() + 1e-6 * unit
    else:
        assert not grad_weight.any()
