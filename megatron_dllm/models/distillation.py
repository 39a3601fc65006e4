"""KL divergence of rows from a teacher's, vocabulary-parallel, with the gradient taken in forward (as in head.py).

Teacher and student share the head. Of a chunk of rows, with logits y of the teacher and z of the student, both divided
by the temperature T:

    p = softmax(y),  q = softmax(z)
    KL(p ‖ q) = Σ_v p_v (y_v - z_v) - lse(y) + lse(z),    d KL / d(z T) = (q - p) / T

so three matrix products (two of logits, one of the gradient) and three chunk-by-V buffers.

Tensor parallelism: a rank holds V/tp columns. With P_r its local softmax of the teacher, one small all-gather a chunk
of (lse of either, Σ_v P_r,v (y_v - z_v)) gives both normalisers, and p's sum as Σ_r exp(lse_r - lse) times the rank's.
"""

import torch

from megatron_dllm.models.head import check_frozen, hand_over


class RowKL(torch.autograd.Function):
    """kl_N fp32, differentiable row by row, of rows hidden_ND and teacher_ND under weight_VD.

    hidden_ND, teacher_ND    rows, the same on all ranks of `group`; the gradient of hidden_ND that is returned is this
                             rank's partial sum, and the teacher has none
    weight_VD                this rank's rows of the head, frozen: RuntimeError if it wants a gradient
    temperature              above 0
    group                    tensor-parallel group;  vocab_size: true size, columns beyond it are padding
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, teacher_ND, temperature, group, vocab_size, chunk_rows):
        check_frozen(ctx)
        need_hidden = ctx.needs_input_grad[0]
        N, V = hidden_ND.shape[0], weight_VD.shape[0]
        real = max(0, min(V, vocab_size - group.rank() * V))  # columns of this rank that are tokens

        def local(rows_nD, buffer):
            """Logits / temperature; padding gets no probability, and the same from both."""
            logits = torch.mm(rows_nD, weight_VD.t(), out=buffer[: len(rows_nD)]).float().div_(temperature)
            logits[:, real:] = torch.finfo(torch.float32).min
            return logits

        kl_N = torch.empty(N, dtype=torch.float32, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if need_hidden else None
        chunk_rows = -(-N // max(1, -(-N // chunk_rows)))  # equal chunks
        buffers = [hidden_ND.new_empty(chunk_rows, V) for _ in range(2)]  # for all chunks, as in head.py
        for start in range(0, N, max(1, chunk_rows)):
            rows = slice(start, min(start + chunk_rows, N))
            teacher, student = (local(x[rows], b) for x, b in zip((teacher_ND, hidden_ND), buffers, strict=True))
            p, lse_p = _softmax(teacher.clone())
            mean = teacher.sub_(student).mul_(p).sum(-1)
            q, lse_q = _softmax(student)
            kl_N[rows], of_p, of_q = _combine(lse_p, lse_q, mean, group)
            if need_hidden:
                gradient = q.mul_(of_q[:, None]).sub_(p.mul_(of_p[:, None]))
                grad_hidden[rows] = (gradient.to(hidden_ND.dtype) @ weight_VD).div_(temperature)
        ctx.gradients = (grad_hidden,)
        return kl_N

    @staticmethod
    def backward(ctx, upstream_N):
        return *hand_over(ctx, upstream_N[:, None]), None, None, None, None, None, None


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax over this rank's columns, in place; their log-sum-exp)."""
    maximum = logits.amax(-1)
    total = logits.sub_(maximum[:, None]).exp_().sum(-1)
    return logits.div_(total[:, None]), maximum + total.log()


def _combine(lse_p, lse_q, mean, group):
    """(KL, this rank's share of p's mass, of q's), [n] each."""
    mine = torch.stack([lse_p, lse_q, mean])
    everyone = mine[None]
    if group.size() > 1:
        everyone = mine.new_empty(group.size() * 3, mine.shape[1])
        torch.distributed.all_gather_into_tensor(everyone, mine, group=group)
        everyone = everyone.view(group.size(), *mine.shape)
    all_p, all_q = everyone[:, 0].logsumexp(0), everyone[:, 1].logsumexp(0)
    kl = ((everyone[:, 0] - all_p).exp() * everyone[:, 2]).sum(0) - all_p + all_q
    return kl, (lse_p - all_p).exp(), (lse_q - all_q).exp()
