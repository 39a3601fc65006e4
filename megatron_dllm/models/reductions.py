"""Losses that are not linear in the nll, over vocabulary-parallel rows, with the gradient taken in forward.

A mode says what one row costs in terms of the row's log-probabilities log q: of some of them (`at`), and of sums
over all of them (`sum`). Here the logits are made chunk by chunk, as in head.py, and dropped:

    forward     logits of a chunk -> log q, in place -> the mode's losses, a few numbers a row
    gradient    autograd from the losses to these few numbers; from there to the logits in closed form:
                d/d logit_v = Σ_sums g f'(log q_v) + Σ_ats g 1[v = id] - q_v · (Σ_sums g Σ_u f'(log q_u) + Σ_ats g)

So three matrix products in all (recomputing chunks in backward would need four), and of chunk-by-V tensors one for the
logits and one for each f'.

Tensor parallelism: a rank holds some columns of a chunk and never sees the others'. Of every reduction a row's
number crosses ranks, in one small all-gather, and all of them in forward: f' is summed along with f.
"""

from collections.abc import Callable, Iterator

import torch

from megatron_dllm.models.head import hand_over


class LogProbabilities:
    """log q of n rows, over the tokens that take part, each rank holding some; fp32. What a mode's row loss sees.

    Results of `at` and `sum` are differentiable and the same on all ranks, which all call them in the same order.
    """

    def __init__(self, logits: list[torch.Tensor], starts: list[int], group, differentiable: bool):
        """logits: this rank's columns in parts [n, any], fp32, overwritten; starts: the token of each one's first."""
        self._starts, self._group, self._differentiable = starts, group, differentiable
        local_n = torch.stack([part.logsumexp(1) for part in logits]).logsumexp(0)
        log_normalizer_n = self._everyone(local_n).logsumexp(0)
        self._log_q = [part.sub_(log_normalizer_n[:, None]) for part in logits]
        self._ats: list[tuple[torch.Tensor, torch.Tensor]] = []  # ids, values
        self._sums: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []  # f', Σ f', Σ f

    def at(self, ids_nK: torch.Tensor) -> torch.Tensor:
        """[n, K] log q of the tokens ids_nK; -inf where a token takes no part."""
        value = torch.full(ids_nK.shape, float("-inf"), device=ids_nK.device)
        for log_q, (column, owned) in zip(self._log_q, self._columns(ids_nK), strict=True):
            if log_q.shape[1]:
                value = torch.where(owned, log_q.gather(1, column), value)
        value = self._everyone(value).amax(0).requires_grad_(self._differentiable)
        self._ats.append((ids_nK, value))
        return value

    def sum(self, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[n] Σ_v f(log q_v) over the tokens that take part. f: elementwise. It may use constants of the rows, as
        [n, 1], but no result of `at` or `sum`: no gradient would go through it."""
        derivatives, sums = [], []
        for log_q in self._log_q:
            with torch.set_grad_enabled(self._differentiable):
                log_q = log_q.detach().requires_grad_(self._differentiable)
                total_n = f(log_q).sum(1)
            slope_n = torch.zeros_like(total_n)
            if self._differentiable:
                derivatives += torch.autograd.grad(total_n, log_q, torch.ones_like(total_n))
                slope_n = derivatives[-1].sum(1)
            sums.append(torch.stack([total_n.detach(), slope_n]))
        total_n, slope_n = self._everyone(torch.stack(sums).sum(0)).sum(0)
        total_n = total_n.clone().requires_grad_(self._differentiable)
        self._sums.append((derivatives, slope_n, total_n))
        return total_n

    def gradient(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """d loss / d logits of this rank's columns, [n, any] fp32 each. Overwrites log q: call it once, at the end."""
        results = [value for _, value in self._ats] + [value for *_, value in self._sums]
        upstream = list(torch.autograd.grad(loss, results, allow_unused=True, materialize_grads=True))
        ats, sums = upstream[: len(self._ats)], upstream[len(self._ats) :]
        mass_n = sum(g.sum(1) for g in ats) + sum(g * slope for g, (_, slope, _) in zip(sums, self._sums, strict=True))
        gradients = [log_q.exp_().mul_(-mass_n[:, None]) for log_q in self._log_q]
        for i, gradient in enumerate(gradients):
            for g, (derivatives, *_) in zip(sums, self._sums, strict=True):
                gradient.addcmul_(derivatives[i], g[:, None])
        for g, (ids_nK, _) in zip(ats, self._ats, strict=True):
            for gradient, (column, owned) in zip(gradients, self._columns(ids_nK), strict=True):
                for k in range(ids_nK.shape[1] if gradient.shape[1] else 0):  # an id may stand in several columns
                    gradient.scatter_add_(1, column[:, k : k + 1], (g * owned)[:, k : k + 1])
        return gradients

    def _columns(self, ids_nK: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each part the column of every id, any where it is not there, and whether it is."""
        for log_q, start in zip(self._log_q, self._starts, strict=True):
            column, width = ids_nK - start, log_q.shape[1]
            yield column.clamp(0, max(0, width - 1)), (column >= 0) & (column < width)

    def _everyone(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: `mine` of all ranks."""
        size = self._group.size()
        if size == 1:
            return mine[None]
        everyone = mine.new_empty(size * len(mine), *mine.shape[1:])
        torch.distributed.all_gather_into_tensor(everyone, mine.contiguous(), group=self._group)
        return everyone.view(size, *mine.shape)


RowLoss = Callable[[LogProbabilities, slice], torch.Tensor]


class WeightedLoss(torch.autograd.Function):
    """(Σ_i w_i · loss_i, loss_N), fp32, of rows hidden_ND under weight_VD; loss_N is not differentiable.

    hidden_ND        rows, the same on all ranks of `group`; the gradient returned is this rank's partial sum
    weight_VD        this rank's rows of the head
    weights_N        float32
    group            tensor-parallel group;  vocab_size: true size, columns beyond it are padding
    loss             (log q of a chunk of rows, which rows) -> [n] what each costs; the same on all ranks
    excluded         a token that is never predicted (None: there is none)
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, weights_N, group, vocab_size, loss: RowLoss, excluded, chunk_rows):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        N, V = hidden_ND.shape[0], weight_VD.shape[0]
        first = group.rank() * V
        parts = taking_part(first, V, vocab_size, excluded)
        losses_N = torch.empty(N, dtype=torch.float32, device=hidden_ND.device)
        # zeros: a rank without scored rows still contributes a gradient to the reductions
        grad_hidden = torch.zeros_like(hidden_ND) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        chunk_rows = -(-N // max(1, -(-N // chunk_rows)))  # equal chunks
        buffers = [hidden_ND.new_empty(chunk_rows, part.stop - part.start) for part in parts]
        for start in range(0, N, max(1, chunk_rows)):
            rows = slice(start, min(start + chunk_rows, N))
            h = hidden_ND[rows]
            logits = [
                torch.mm(h, weight_VD[part].t(), out=buffer[: len(h)]).float()
                for part, buffer in zip(parts, buffers, strict=True)
            ]
            log_q = LogProbabilities(logits, [first + part.start for part in parts], group, need_hidden or need_weight)
            with torch.set_grad_enabled(need_hidden or need_weight):
                losses_n = loss(log_q, rows).float()
                weighted = losses_n @ weights_N[rows]
            losses_N[rows] = losses_n.detach()
            if not (need_hidden or need_weight):
                continue
            gradients = log_q.gradient(weighted)
            for part, gradient in zip(parts, gradients, strict=True):
                gradient = gradient.to(h.dtype)
                if need_hidden:
                    grad_hidden[rows].addmm_(gradient, weight_VD[part])
                if need_weight and h.dtype == torch.float32:
                    grad_weight[part].addmm_(gradient.t(), h)
                elif need_weight:
                    grad_weight[part] += gradient.t() @ h
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype))
        ctx.mark_non_differentiable(losses_N)
        return torch.dot(losses_N, weights_N), losses_N

    @staticmethod
    def backward(ctx, upstream, _):
        hidden, weight = hand_over(ctx, upstream)
        return hidden, weight, None, None, None, None, None, None


def taking_part(first: int, columns: int, vocab_size: int, excluded: int | None) -> list[slice]:
    """Of a rank's `columns`, from token `first` on, those below `vocab_size` and not `excluded`: at least one slice,
    which may be empty."""
    end = max(0, min(columns, vocab_size - first))
    hole = end if excluded is None else excluded - first
    if not 0 <= hole < end:
        return [slice(0, end)]
    parts = [slice(0, hole), slice(hole + 1, end)]
    return [part for part in parts if part.stop > part.start] or parts[:1]
