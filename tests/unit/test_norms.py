"""Our RMS norm on a CPU is torch's, forward and gradient."""

import pytest
import torch

from megatron_dllm.models.norms import rms_norm


def both(x, weight, eps, direction):
    """[(output, gradients)] of ours and torch's."""
    found = []
    for norm in (rms_norm, lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)):
        inputs = [None if t is None else t.clone().requires_grad_() for t in (x, weight)]
        out = norm(*inputs, eps)
        given = [t for t in inputs if t is not None]
        found.append((out.detach(), torch.autograd.grad(out, given, direction)))
    return found


@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 3, 7), (4, 2, 3, 8)])
@pytest.mark.parametrize("weighted", (True, False))
@pytest.mark.parametrize("eps", (1e-6, 0.5))
def test_output_and_gradients_in_float64(shape, weighted, eps):
    g = torch.Generator().manual_seed(len(shape))
    draw = lambda *size: torch.randn(size, generator=g, dtype=torch.float64)
    weight = draw(shape[-1]) if weighted else None
    x = draw(*shape) if len(shape) > 1 else draw(1, *shape)
    (ours, our_grads), (theirs, their_grads) = both(x, weight, eps, draw(*x.shape))
    assert torch.allclose(ours, theirs, atol=1e-14, rtol=1e-13)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-13, rtol=1e-12)


def test_rows_of_zeros_and_of_extremes():
    """A zero row's gradient is that of x / sqrt(eps); large and small rows stay finite."""
    x = torch.tensor([[0.0] * 4, [1e15] * 4, [1e-15] * 4, [1.0, -2.0, 3.0, -4.0]])
    (ours, (our_grad, _)), (theirs, (their_grad, _)) = both(x, torch.ones(4), 1e-6, torch.ones_like(x))
    assert torch.isfinite(ours).all() and torch.isfinite(our_grad).all()
    assert torch.allclose(ours, theirs, rtol=1e-6) and torch.allclose(our_grad, their_grad, rtol=1e-5, atol=1e-6)


def test_only_what_is_asked_for_and_not_contiguous():
    x = torch.randn(6, 5).t().requires_grad_()
    weight = torch.randn(6)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    frozen, trained = torch.randn(3, 6), weight.clone().requires_grad_()
    rms_norm(frozen, trained, 1e-6).sum().backward()
    expected = torch.nn.functional.rms_norm(frozen, (6,), None, 1e-6).sum(0)
    assert torch.allclose(trained.grad, expected, atol=1e-6)


def test_lower_precision_is_torchs_own():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
