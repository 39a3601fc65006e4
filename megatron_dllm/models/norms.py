"""RMS norms under Megatron's constructor: y = x / sqrt(mean(x²) + eps) · w.

torch.nn.RMSNorm is one kernel on a GPU. On a CPU it is seven, and its gradient, made by autograd of these, a dozen: in
a stack with many norms half as long as the matrix products. There the gradient is taken in closed form, with x̂ = x·r
and r = 1 / sqrt(mean(x²) + eps):

    dL/dw = Σ_rows g · x̂;      dL/dx = r · (g·w - x̂ · mean(g · w · x̂))
"""

import torch


class RMSNorm(torch.nn.RMSNorm):
    """Of the residual stream. The wrapped torch norm of Megatron's local spec refuses sequence parallelism; all it
    takes is to mark the weight, so that its gradient is summed over shards."""

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class HeadRMSNorm(torch.nn.RMSNorm):
    """Of query and key heads: it sees whole sequences, also under sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[..., D] normed along its last dimension; weight [D], None for none."""
    full = x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype)
    if x.is_cuda or not full:  # lower precisions are computed in fp32, which torch's own does
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, weight)
        y = x * r
        return y if weight is None else y.mul_(weight)

    @staticmethod
    def backward(ctx, g):
        x, r, weight = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        normed = x * r
        product = g * normed
        grad_weight = product.flatten(0, -2).sum(0) if need_weight else None
        if not need_x:
            return None, grad_weight, None
        if weight is None:
            mean, grad_x = product.mean(-1, keepdim=True), g.clone()
        else:
            mean, grad_x = (product @ weight)[..., None] / x.shape[-1], g * weight
        return grad_x.addcmul_(normed, mean, value=-1).mul_(r), grad_weight, None
