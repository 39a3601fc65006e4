"""What is passed through the network for one request, and what is read off: three ways to a likelihood.

Each has `passes(sample)`, how many sequences a request needs; `corrupt(sample)`, these sequences; `layout(samples,
length)`, what the network sees; and `score(view, terms)`: (the scored rows, their loss in nats [N] float32, whether
each target is the likeliest token [N] bool). A request costs the weighted sum over its sequences.
"""

from argparse import Namespace
from dataclasses import replace

import torch

from megatron_dllm import noise
from megatron_dllm.data.sample import Sample
from megatron_dllm.evaluation.masks import masks_of_blocks, passes
from megatron_dllm.models.scoring import ScoreView
from megatron_dllm.modes import common, get_mode
from megatron_dllm.modes.base import CLEAN, Corrupted, ModelInput
from megatron_dllm.parallel import RankTerm

CLEAN_TERM = {"hybrid": "ar", "idlm": "clean"}  # modes with a causal stream, and what they call its loss
HEAD_ROWS = 512  # rows of logits that exist at a time
_STREAM = "evaluation"
Scores = tuple[RankTerm, torch.Tensor, torch.Tensor]


def noise_index(sample: Sample) -> int:
    """What the noise of a request depends on, beside the seed: its context, or all of it if there is none."""
    context_S = sample.tokens_S[~sample.loss_mask_S]
    return noise.hashed_seed(*(context_S if len(context_S) else sample.tokens_S).tolist())


class Exact:
    """The clean stream alone, once."""

    def __init__(self, args):
        self._args, self._term = args, CLEAN_TERM[args.dllm_mode]

    def passes(self, sample: Sample) -> int:
        return int(sample.loss_mask_S.any())

    def corrupt(self, sample: Sample) -> list[Corrupted]:
        nothing_S = torch.zeros(len(sample))
        return [Corrupted(sample, sample.tokens_S, nothing_S.bool(), nothing_S, nothing_S)]

    def layout(self, samples: list[Corrupted], length: int) -> ModelInput:
        rows = common.pad_rows(samples, length, self._args.dllm_pad_token_id)
        term = common.next_token_term(rows, before=0, compat=None)
        return common.streams_side_by_side(rows, [(CLEAN, rows.tokens_BS)], {self._term: term})

    def score(self, view: ScoreView, terms: dict[str, RankTerm]) -> Scores:
        """The mask aside: it is never written, so it cannot be the likeliest."""
        predicted = []

        def nll(log_q, rows: RankTerm) -> torch.Tensor:
            mask_n = torch.full_like(rows.targets_N, self._args.dllm_mask_token_id)
            log_q_x, log_q_mask = log_q.at(torch.stack([rows.targets_N, mask_n], dim=1)).unbind(1)
            likelier_n = log_q.sum(lambda each: (each > log_q_x[:, None]).float()) - (log_q_mask > log_q_x).float()
            predicted.append(likelier_n < 0.5)
            return -log_q_x

        view.weighted_loss(self._term, nll, None, HEAD_ROWS)
        return terms[self._term], view.nll[self._term], torch.cat(predicted)


class _Bound:
    """Noised continuations through the mode's own layout and loss."""

    def __init__(self, args, draws: int, seed: int):
        # one noisy stream, and scdd's first level too: what these flags change in training would bias the estimate
        self._args = Namespace(**(vars(args) | dict(bd3lm_complementary_masks=False, dllm_eps=0.0)))
        self._mode, self._draws, self._seed = get_mode(args.dllm_mode), draws, seed
        self._last: tuple[Sample | None, list[Corrupted]] = (None, [])

    def corrupt(self, sample: Sample) -> list[Corrupted]:
        """All passes of a request. They are asked for one after the other: the last request's are kept."""
        if self._last[0] is not sample:
            self._last = (sample, self._corrupt(sample))
        return self._last[1]

    def layout(self, samples: list[Corrupted], length: int) -> ModelInput:
        return self._mode.layout(samples, length, self._args)

    def score(self, view: ScoreView, terms: dict[str, RankTerm]) -> Scores:
        self._mode.loss(view, self._args)
        nats_N = view.nll["dllm"]
        return terms["dllm"], nats_N, torch.zeros_like(nats_N, dtype=torch.bool)


class Masked(_Bound):
    """Masks of exact counts: mdlm, and block by block bd3lm and hybrid."""

    def _blocks(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        if self._mode.FULL_WITHIN_DOCUMENT:
            return torch.zeros(len(sample), dtype=torch.int32), torch.arange(len(sample), dtype=torch.int32)
        return common.blocks(sample, self._args.dllm_block_size, self._args.dllm_block_origin)

    def passes(self, sample: Sample) -> int:
        scored = self._blocks(sample)[0][sample.loss_mask_S]
        return max((passes(length, self._draws) for length in scored.unique(return_counts=True)[1].tolist()), default=0)

    def _corrupt(self, sample: Sample) -> list[Corrupted]:
        block_S, offset_S = self._blocks(sample)
        g = noise.generator(self._seed, _STREAM, noise_index(sample))
        masked_NS, weight_NS = masks_of_blocks(block_S, sample.loss_mask_S, self._draws, g)
        level = torch.zeros(len(sample))  # logged in training; here nobody asks
        x_t = lambda masked_S: sample.tokens_S.masked_fill(masked_S, self._args.dllm_mask_token_id)
        return [
            Corrupted(sample, x_t(masked_S), masked_S, weight_S, level, block_S, offset_S)
            for masked_S, weight_S in zip(masked_NS, weight_NS, strict=True)
        ]


class Chain(_Bound):
    """scdd: the mode's own noise, at stratified levels."""

    def passes(self, sample: Sample) -> int:
        return self._draws if sample.loss_mask_S.any() else 0

    def _corrupt(self, sample: Sample) -> list[Corrupted]:
        index = noise_index(sample)
        noised = []
        for draw in range(self._draws):
            corrupted = self._mode.corrupt(sample, _StratifiedDraws(self._seed, index, draw, self._draws), self._args)
            noised.append(replace(corrupted, weight_S=corrupted.weight_S / self._draws))
        return noised


class _StratifiedDraws(noise.Draws):
    """One of n passes of a request: their levels are one uniform number each, and together spread evenly."""

    def __init__(self, seed: int, index: int, draw: int, draws: int):
        super().__init__(seed, index)
        self._draw, self._draws = draw, draws

    def generator(self, stream: str = noise.CORRUPTION) -> torch.Generator:
        return noise.generator(self.seed, f"{_STREAM}/{stream}/{self._draw}", self.index)

    def level(self, g: torch.Generator, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
        first = torch.rand(shape, generator=noise.generator(self.seed, f"{_STREAM}/level", self.index))
        return ((first.double() + self._draw / self._draws) % 1.0).float().clamp_(max=1 - 2**-24)


def estimator_of(exact: bool, args, draws: int, seed: int) -> Exact | Masked | Chain:
    """args: of a model whose mode has such a likelihood; draws, seed: of a bound."""
    if exact:
        return Exact(args)
    return (Chain if args.dllm_mode == "scdd" else Masked)(args, draws, seed)
