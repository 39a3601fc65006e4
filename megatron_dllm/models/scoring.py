"""What comes after the last hidden states: the head, and how a mode's loss asks for the rows that it scores."""

from collections.abc import Callable

import torch
from megatron.core import tensor_parallel

from megatron_dllm.models.distillation import RowKL
from megatron_dllm.models.head import RowNLL, WeightedNLL
from megatron_dllm.models.reductions import LogProbabilities, WeightedLoss
from megatron_dllm.parallel import RankTerm

Loss = Callable[[LogProbabilities, RankTerm], torch.Tensor]
HEAD_CHUNK_ROWS = 512  # below ~128 rows the gradient of the head is memory-bound; beyond 1024 nothing is gained
FROZEN_CHUNK_ROWS = 256  # without that gradient fewer do, in half the memory


class Head(tensor_parallel.ColumnParallelLinear):
    """Megatron's output layer, which can also return the cross entropy of its rows, or another loss.

    vocab: without it the result is logits. loss: for a WeightedLoss; teacher: (its rows [N, D], temperature) for a
    RowKL; weights_N: those of a WeightedNLL, without them a RowNLL.

    One module for all, so that hooks on it (the distributed optimizer's overlapped parameter gather) run.
    softcap: c where logits l are c·tanh(l / c), else None.
    """

    softcap: float | None = None

    def forward(
        self,
        input_,
        weight=None,
        runtime_gather_output=None,
        targets_N=None,
        weights_N=None,
        vocab=None,
        loss=None,
        teacher=None,
    ):
        if vocab is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        if not torch.is_grad_enabled():  # inside a Function that cannot be seen, and it would take gradients
            input_, weight = input_.detach(), weight.detach()
        if loss is not None:
            return WeightedLoss.apply(input_, weight, weights_N, self.tp_group, vocab, *loss)
        if teacher is not None:
            return RowKL.apply(input_, weight, *teacher, self.tp_group, vocab, FROZEN_CHUNK_ROWS)
        if weights_N is None:
            return RowNLL.apply(input_, weight, targets_N, self.tp_group, vocab, FROZEN_CHUNK_ROWS)
        options = self.tp_group, vocab, HEAD_CHUNK_ROWS, self.softcap
        return WeightedNLL.apply(input_, weight, targets_N, weights_N, *options)

    def logits(self, hidden_ND: torch.Tensor, weight: torch.Tensor | None, true_vocab_size: int) -> torch.Tensor:
        """[N, V/tp] fp32 logits of this rank's columns; padding columns hold the lowest float."""
        logits, _ = self(hidden_ND, weight=weight)
        logits = logits.float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.output_size == true_vocab_size:
            return logits
        columns = torch.arange(logits.shape[-1], device=logits.device) + self.tp_group.rank() * logits.shape[-1]
        return logits.masked_fill(columns >= true_vocab_size, torch.finfo(torch.float32).min)


class ScoreView:
    """How a mode's `loss` sees the model: by term, without hidden states, layouts or vocabulary shards."""

    def __init__(self, model, hidden: torch.Tensor, terms: dict[str, RankTerm]):
        self._model, self._hidden, self._terms = model, hidden, terms
        self._selected: dict[str, torch.Tensor] = {}
        # of each scored row, detached; filled in by the methods
        self.nll: dict[str, torch.Tensor] = {}  # its loss
        self.right: dict[str, torch.Tensor] = {}  # of the nll: whether the target is the likeliest token

    def weighted_nll(self, term: str) -> torch.Tensor:
        """Σ weight · nll over this rank's rows of `term`: fp32 scalar, differentiable, never holding logits."""
        rows = self._terms[term]
        total, self.nll[term], self.right[term] = self._head(term, targets_N=rows.targets_N, weights_N=rows.weights_N)
        return total

    def weighted_loss(self, term: str, loss: Loss, excluded: int | None, chunk_rows: int) -> torch.Tensor:
        """Σ weight · loss, likewise. loss: (log q of some rows, these rows) -> what each costs; `excluded` is a
        token that the model never predicts."""
        rows = self._terms[term]
        row_loss = lambda log_q, chunk: loss(log_q, rows.chunk(chunk))
        total, self.nll[term] = self._head(term, weights_N=rows.weights_N, loss=(row_loss, excluded, chunk_rows))
        return total

    def row_nll(self, term: str, differentiable: bool = True) -> torch.Tensor:
        """[N] fp32 nll of this rank's rows of `term`, each with its gradient: for weights that depend on it. The head
        must be frozen (RuntimeError)."""
        nll_N, self.right[term] = self._head(term, differentiable=differentiable, targets_N=self._terms[term].targets_N)
        self.nll[term] = nll_N.detach()
        return nll_N

    def row_kl(self, term: str, temperature: float) -> torch.Tensor:
        """[N] fp32 KL(p ‖ q) of these rows, likewise: p is the teacher's distribution of the token that a row predicts,
        q the model's, both of logits / temperature."""
        rows = self._terms[term]
        teacher_ND = self._model.teacher_rows(rows.teacher_N, rows.rows_N)
        return self._head(term, teacher=(teacher_ND, temperature))

    def rows(self, term: str) -> RankTerm:
        """What this rank scores of a term."""
        return self._terms[term]

    @property
    def batch_size(self) -> int:
        return self._hidden.shape[1]

    @property
    def hidden_QBD(self) -> torch.Tensor:
        """Last hidden states (a shard of Q under sequence parallelism): for models, not for modes."""
        return self._hidden

    def _head(self, term: str, differentiable: bool = True, **options):
        model = self._model
        if term not in self._selected:  # of a term that is asked for twice, once
            self._selected[term] = model.select_rows(self._hidden, self._terms[term].rows_N)
        hidden_ND = self._selected[term]
        shared = model.share_embeddings_and_output_weights
        return model.output_layer(
            hidden_ND if differentiable else hidden_ND.detach(),
            weight=model.shared_embedding_or_output_weight() if shared else None,
            vocab=model.true_vocab_size,
            **options,
        )
