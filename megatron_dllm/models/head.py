"""Output head and cross entropy over the scored rows, vocabulary-parallel, with the gradient taken in forward.

The usual way (logits, then autograd through cross entropy) holds [rows, V] logits, their softmax and their
gradient, and recomputing them costs a fourth GEMM. For a loss that is linear in the tokens' negative
log-likelihoods with weights known beforehand, d loss / d logits is known as soon as the logits are: so the
forward pass walks over chunks of rows, forms each chunk's softmax once, accumulates both gradients from it
and drops it. Three GEMMs in all and one chunk-by-V buffer; backward only multiplies by the scalar upstream
gradient. Where weights depend on the nll themselves (`RowNLL`), forward takes each row's own gradient and backward
multiplies it by the row's: possible for the gradient of the rows, hence under a head that is frozen.

Tensor parallelism: a rank holds V/tp columns and never sees the others'. With local softmax P_r and local
log-sum-exp lse_r, one small all-gather a chunk gives lse = log Σ_r exp(lse_r), and P_r · exp(lse_r - lse) is
the slice of the true softmax. The factor scales rows, so no V-wide tensor is exchanged.

Capped logits c·tanh(l / c) (Gemma) have the slope 1 - tanh², which multiplies both gradients column by column.
"""

import torch


class WeightedNLL(torch.autograd.Function):
    """(Σ_i w_i · nll_i, nll_N, right_N) of rows hidden_ND under weight_VD; right_N: is the target the likeliest?

    Only the sum is differentiable.

    hidden_ND        rows, the same on all ranks of `group`; the gradient returned is this rank's partial sum
    weight_VD        this rank's rows of the head
    targets_N int64  global ids;  weights_N float32
    group            tensor-parallel group;  vocab_size: true size, columns beyond it are padding
    softcap          c of capped logits, None where they are not
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, weights_N, group, vocab_size, chunk_rows, softcap=None):
        inputs = hidden_ND, weight_VD, targets_N, weights_N, group, vocab_size, chunk_rows
        nll_N, right_N, ctx.gradients = _walk(*inputs, *ctx.needs_input_grad[:2], softcap)
        ctx.mark_non_differentiable(nll_N, right_N)
        return torch.dot(nll_N, weights_N), nll_N, right_N

    @staticmethod
    def backward(ctx, upstream, *_):
        hidden, weight = hand_over(ctx, upstream)
        return hidden, weight, None, None, None, None, None, None


class RowNLL(torch.autograd.Function):
    """(nll_N, right_N), as in a WeightedNLL, nll_N differentiable row by row.

    weight_VD must be frozen: RuntimeError if it wants a gradient.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, group, vocab_size, chunk_rows):
        check_frozen(ctx)
        one_N = torch.ones(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        nll_N, right_N, ctx.gradients = _walk(
            hidden_ND, weight_VD, targets_N, one_N, group, vocab_size, chunk_rows, *ctx.needs_input_grad[:2]
        )
        ctx.mark_non_differentiable(right_N)
        return nll_N, right_N

    @staticmethod
    def backward(ctx, upstream_N, _):
        hidden, _ = hand_over(ctx, upstream_N[:, None])
        return hidden, None, None, None, None, None


def check_frozen(ctx) -> None:
    """RuntimeError if a Function (rows, head, ...) that gives each row its gradient is asked for the head's."""
    if ctx.needs_input_grad[1]:
        raise RuntimeError("rows have gradients of their own only under a frozen head: use weighted_nll for this one.")


def _walk(
    hidden_ND, weight_VD, targets_N, weights_N, group, vocab_size, chunk_rows, need_hidden, need_weight, softcap=None
):
    """(nll_N, right_N, gradients of Σ weight · nll, None where not needed)."""
    N, V = hidden_ND.shape[0], weight_VD.shape[0]
    first = group.rank() * V
    padding = max(0, min(V, first + V - vocab_size))  # the last columns of this rank
    nll_N = torch.empty(N, dtype=torch.float32, device=hidden_ND.device)
    right_N = torch.empty(N, dtype=torch.bool, device=hidden_ND.device)
    grad_hidden = torch.empty_like(hidden_ND) if need_hidden else None
    grad_weight = None
    chunks = -(-N // chunk_rows)
    chunk_rows = -(-N // max(1, chunks))  # of equal size: a small last chunk would waste its matrix products
    buffer = hidden_ND.new_empty(chunk_rows, V)  # one for all chunks: fresh pages cost as much as the product
    for start in range(0, N, max(1, chunk_rows)):
        rows = slice(start, min(start + chunk_rows, N))
        h, y, w = hidden_ND[rows], targets_N[rows] - first, weights_N[rows]
        logits = torch.mm(h, weight_VD.t(), out=buffer[: h.shape[0]]).float()
        slope = None
        if softcap is not None:
            logits.div_(softcap).tanh_()
            slope = 1 - logits.square()
            logits.mul_(softcap)
        if padding:
            logits[:, V - padding :] = torch.finfo(torch.float32).min
        owned = (y >= 0) & (y < V)
        y = y.clamp(0, V - 1)  # where not owned: any column, with weight 0 (no data-dependent shapes on a GPU)
        target = logits.gather(1, y[:, None])[:, 0].masked_fill(~owned, 0.0)
        # softmax in place; its normaliser is at least 1, the maximum's own term
        maximum = logits.amax(dim=-1)
        probabilities = logits.sub_(maximum[:, None]).exp_()
        total = probabilities.sum(-1)
        lse_local = maximum + total.log()
        lse, target, largest = _combine(lse_local, target, maximum, group)
        nll_N[rows], right_N[rows] = lse - target, target >= largest
        if not (need_hidden or need_weight):
            continue
        scale = w * torch.exp(lse_local - lse) / total
        minus_w = -w.masked_fill(~owned, 0.0)[:, None]
        if slope is not None:
            probabilities.mul_(slope)
            minus_w *= slope.gather(1, y[:, None])
        probabilities = probabilities.to(h.dtype)
        if need_hidden:
            partial = (probabilities @ weight_VD).mul_(scale[:, None])
            grad_hidden[rows] = partial.add_(weight_VD[y].mul_(minus_w))
        if need_weight:
            scaled = (h * scale[:, None]).to(h.dtype)
            if grad_weight is None:
                grad_weight = (probabilities.t() @ scaled).float()
            elif grad_weight.dtype == h.dtype:
                grad_weight.addmm_(probabilities.t(), scaled)
            else:
                grad_weight += probabilities.t() @ scaled
            grad_weight.index_add_(0, y, (h * minus_w).float())
        del logits, probabilities
    if need_weight:
        # a rank without scored rows still contributes a (zero) gradient to the reductions
        grad_weight = torch.zeros_like(weight_VD) if grad_weight is None else grad_weight.to(weight_VD.dtype)
    # Callers do not save_for_backward: it would keep a reference, and autograd copy what it could otherwise take over.
    return nll_N, right_N, (grad_hidden, grad_weight)


def hand_over(ctx, upstream: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients that forward took, times `upstream`, a scalar or a number for each row [N, 1]. They exist once:
    RuntimeError the second time."""
    if ctx.gradients is None:
        raise RuntimeError("the gradient of the head exists once: a second backward would need a new forward.")
    gradients, ctx.gradients = ctx.gradients, None
    return [g if g is None else g.mul_(upstream) for g in gradients]


def _combine(lse_local, target, maximum, group):
    """Log-sum-exp and maximum over all ranks' columns, and the target logit from the rank that owns it."""
    if group.size() == 1:
        return lse_local, target, maximum
    mine = torch.stack([lse_local, target, maximum])
    everyone = mine.new_empty(3 * group.size(), mine.shape[1])
    torch.distributed.all_gather_into_tensor(everyone, mine, group=group)
    return everyone[0::3].logsumexp(0), everyone[1::3].sum(0), everyone[2::3].amax(0)
