"""Decoding of Dream models (arXiv:2508.15487): the whole answer at once, along a schedule of noise levels.

Times go from 1 to eps in as many equal parts as there are steps. From t to s a masked token is due with probability
1 - s / t, and in the last step with certainty. `--algorithm` says which of them:

origin         each by itself, at random
maskgit_plus   the share of masked tokens that is due, rounded down; those whose token is most probable
topk_margin    those whose token is most probable compared with the second
entropy        those whose distribution has the lowest entropy

all after temperature, top-k and top-p. With `--algorithm-temperature` the choice is drawn from a softmax of these
numbers divided by it. A step in which no token is due costs nothing: it would change nothing.
"""

import torch

from megatron_dllm.generation.llada import CanvasRow
from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding

EPS = 1e-3


class DreamRow(CanvasRow):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        steps = self.config.steps or int((~self.given).sum())
        self._times = torch.linspace(1, EPS, steps + 1, dtype=torch.float64).tolist()
        self._step = -1
        self._next_step()

    def passes(self) -> list[Pass]:
        if self.config.algorithm == "origin":
            return [self.whole(self._due)]
        return [self.whole(self.masked(0, len(self.tokens)))]

    def take(self, logits: list[torch.Tensor]) -> None:
        candidates = self.candidates(logits[0], tempered=True)
        ids_C, confidence_C = candidates.propose()
        if self.config.algorithm == "origin":
            places, chosen_K = self._due, torch.arange(len(ids_C))
        else:
            chosen_K = self._choose(confidence(candidates, self.config.algorithm).cpu())
            places = self.masked(0, len(self.tokens))[chosen_K]
        self.write(places, ids_C.cpu()[chosen_K], confidence_C.cpu()[chosen_K])
        if not self.end_at_eos():
            self._next_step()

    def _choose(self, confidence_C: torch.Tensor) -> torch.Tensor:
        """[K] of the candidates, as many as are due."""
        alpha = self.config.algorithm_temperature
        if alpha:
            # the largest of logits with Gumbel noise are draws without replacement
            u = self.draws.uniform("order", len(confidence_C)).clamp(min=torch.finfo(torch.float64).tiny)
            confidence_C = confidence_C / alpha - torch.log(-torch.log(u))
        return confidence_C.argsort(descending=True, stable=True)[: self._count]

    def _next_step(self) -> None:
        """Go to the next step in which a token is due."""
        masked = self.masked(0, len(self.tokens))
        while len(masked):
            self._step += 1
            last = self._step == len(self._times) - 2
            share = 1.0 if last else 1 - self._times[self._step + 1] / self._times[self._step]
            if self.config.algorithm == "origin":
                drawn = self.draws.uniform("when", len(masked)) < share
                self._due = masked if last else masked[drawn]
                if len(self._due):
                    return
            else:
                self._count = len(masked) if last else int(len(masked) * share)
                if self._count:
                    return
        self.done = True


def confidence(candidates, algorithm: str) -> torch.Tensor:
    """[C] float64, larger is surer."""
    if algorithm == "maskgit_plus":
        return candidates.propose()[1]
    probabilities_CV = candidates.likely().softmax(-1)
    if algorithm == "topk_margin":
        two = probabilities_CV.topk(2, dim=-1).values
        return two[:, 0] - two[:, 1]
    return torch.xlogy(probabilities_CV, probabilities_CV).sum(-1)
