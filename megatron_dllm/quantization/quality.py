"""A transformers model under a mode's attention rule, and its loss by noise level.

The loss is the mode's own (`loss`), computed by the head that training uses, from the model's last hidden states.

Shapes: B rows, Q model length, D width, V vocabulary, N scored rows.
"""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from megatron_dllm.models.head import WeightedNLL
from megatron_dllm.models.reductions import WeightedLoss
from megatron_dllm.models.scoring import HEAD_CHUNK_ROWS, ScoreView
from megatron_dllm.modes import get_mode
from megatron_dllm.modes.base import Rule
from megatron_dllm.parallel import RankBatch

LEVELS = 5  # bins of the noise level t in [0, 1]


@dataclass
class Quality:
    """loss: the mode's, over all samples at once: Σ_terms weight · (Σ / count), in nats per token for most modes.
    terms: each of them, unweighted. sums, counts: of the unweighted nll (of scdd: its row loss) of scored rows by noise
    level; all 0 where a mode has one level only."""

    loss: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(LEVELS, dtype=torch.float64))
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(LEVELS, dtype=torch.float64))

    def by_level(self) -> list[tuple[str, int, float]]:
        """(level, scored tokens, their mean loss) of the bins that have any."""
        bins = enumerate(zip(self.sums.tolist(), self.counts.tolist(), strict=True))
        return [(f"{i / LEVELS:.1f}-{(i + 1) / LEVELS:.1f}", int(n), total / n) for i, (total, n) in bins if n]


def rule_of(args: Namespace) -> Rule:
    """Who sees whom in a run of these arguments."""
    mode = get_mode(args.dllm_mode)
    return mode.rule(args) if hasattr(mode, "rule") else mode.visible


def hidden_states(model: torch.nn.Module, batch: RankBatch, rule: Rule) -> torch.Tensor:
    """[B, Q, D] last hidden states of a batch on the model's device. The model's own mask, which is causal, is replaced
    by one of the rule; a query that sees nothing is padding, and sees everything."""
    B, Q = batch.tokens_BQ.shape
    mask_B1QQ = torch.zeros(B, 1, Q, Q, dtype=model.dtype, device=batch.tokens_BQ.device)
    if batch.attributes_BQA is not None:
        allowed_BQQ = rule(batch.attributes_BQA[:, :, None], batch.attributes_BQA[:, None])
        mask_B1QQ.masked_fill_(~allowed_BQQ[:, None], torch.finfo(model.dtype).min)
    options = dict(attention_mask=mask_B1QQ, position_ids=batch.position_ids_BQ, use_cache=False)
    return model.get_decoder()(input_ids=batch.tokens_BQ, **options).last_hidden_state


@torch.no_grad()
def measure(model: torch.nn.Module, batches: Iterable[RankBatch], args: Namespace) -> Quality:
    """The loss of a transformers model on corrupted batches."""
    mode, rule, quality = get_mode(args.dllm_mode), rule_of(args), Quality()
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    weights: dict[str, float] = {}
    head = _Head(model.get_output_embeddings().weight)
    for batch in batches:
        batch = batch.to(model.device)
        view = ScoreView(head, hidden_states(model, batch, rule).transpose(0, 1), batch.terms)
        for term in mode.loss(view, args):
            sums[term.name] = sums.get(term.name, 0.0) + term.sum.item()
            counts[term.name] = counts.get(term.name, 0.0) + batch.counts[term.counted]
            weights[term.name] = term.weight
        for name, nll_N in view.nll.items():
            if (levels_N := batch.terms[name].levels_N) is not None:
                bins_N = (levels_N.cpu() * LEVELS).long().clamp(0, LEVELS - 1)
                quality.sums.index_add_(0, bins_N, nll_N.cpu().double())
                quality.counts += torch.bincount(bins_N, minlength=LEVELS)
    quality.terms = {name: total / max(counts[name], 1.0) for name, total in sums.items()}
    quality.loss = sum(weights[name] * value for name, value in quality.terms.items())
    return quality


class _Head:
    """What a ScoreView asks of a model: rows of its hidden states [Q, B, D], and what the head makes of them."""

    share_embeddings_and_output_weights = False

    def __init__(self, weight_VD: torch.Tensor):
        self.weight_VD, self.true_vocab_size = weight_VD, len(weight_VD)

    def select_rows(self, hidden_QBD: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        return hidden_QBD.flatten(0, 1)[rows_N]

    def output_layer(self, hidden_ND, weight, vocab, weights_N, targets_N=None, loss=None):
        if loss is not None:
            return WeightedLoss.apply(hidden_ND, self.weight_VD, weights_N, _Alone(), vocab, *loss)
        rows = hidden_ND, self.weight_VD, targets_N, weights_N
        return WeightedNLL.apply(*rows, _Alone(), vocab, HEAD_CHUNK_ROWS)


class _Alone:
    """A tensor-parallel group of one process."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1
