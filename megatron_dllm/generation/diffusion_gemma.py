"""Decoding of models with an encoder and canvases (`--dllm-mode block_diffusion`; DiffusionGemma, Google 2026).

Text is written canvas after canvas, each of the K tokens of `--dllm-block-size`. The finished text is the clean stream,
whose keys and values never change: with a cache (the default) they are computed once, in the first step of the next
canvas, and that is exact. A canvas begins as ids drawn uniformly. With N steps at most, the one that has n = N .. 1
left does, at every place i of the canvas:

    p_i = softmax(logits_i / T),   T = t_min + (t_max - t_min) n / N,   H_i the entropy of p_i
    draws x_i from p_i, and accepts it at the surest places: those of the smallest H, as long as the H of all before it
    add up to at most the bound (Ben-Hamu et al. 2025, arXiv:2505.24857); all others are drawn anew, uniformly

So an accepted token may be noise again in the next step. A self-conditioned model is told the expectation of its
embedding under the p of the step before, and in the first step of a canvas exactly nothing. A canvas is finished after
N steps, or when argmax p was the same in the `--stability-threshold` steps before and the mean of H is below
`--confidence-threshold`. What stands then is argmax p, and before that it is what is shown as written.

As in transformers 5.24 (DiffusionGemmaForBlockDiffusion.generate), which we differ from where its rows do not end
together: here each row has its own time. The answer's length need not be a multiple of K: the rest of the last canvas
is dropped. A canvas is shorter only where the model has no more positions.

Shapes: C places of a canvas, V vocabulary.
"""

import torch

from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding, Row, steps_of_a_block
from megatron_dllm.generation.selection import draw

MOST_STEPS = 48  # of a canvas, unless told otherwise; as published


class DenoisedRow(Row):
    """A row whose first `length` tokens are finished; the canvas after them is noise beside it. `held` are cached."""

    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        args = decoding.args
        self.cached = self.config.cache != "none"
        self._size = args.dllm_block_size
        count = -(-(len(self.tokens) - self.start) // self._size)
        self._steps = steps_of_a_block(self.config, MOST_STEPS, count)
        # decoded as it was trained: without the branch where no sample has passed through it
        self._conditions = bool(args.block_diffusion_self_conditioning)
        self.length, self._held = self.start, 0
        self._begin_canvas()

    @property
    def settled(self) -> int:
        return len(self.tokens) if self.done else self.length

    def passes(self) -> list[Pass]:
        held, canvas = self._held, self._canvas
        tokens = torch.cat([self.tokens[held : self.length], canvas])
        places = torch.arange(held, self.length + len(canvas))
        blocks = torch.where(places < self.start, 0, (places - self.start) // self._size + 1)
        if self.cached:
            self._held = self.length
        return [
            Pass(
                tokens,
                places,
                places >= self.length,
                blocks,
                wanted=torch.arange(self.length, self.length + len(canvas)) - held,
                cached=held,
                anchor=self.length,
                earlier=self._earlier,
            )
        ]

    def take(self, logits: list[torch.Tensor]) -> None:
        config = self.config
        logits_CV = logits[0] / temperature(self._left, self._steps, config.t_min, config.t_max)
        p_CV = logits_CV.double().softmax(-1)
        entropy_C = torch.special.entr(p_CV).sum(-1)
        drawn_C = draw(p_CV, self.draws.uniform("tokens", len(p_CV))).cpu()
        is_accepted = accepted(entropy_C, config.entropy_bound).cpu()
        self._canvas = torch.where(is_accepted, drawn_C, self._noise(len(drawn_C)))
        self._earlier = logits_CV if self._conditions else None
        trust_C, best_C = p_CV.max(-1)
        self._show(best_C.cpu(), trust_C.cpu())
        confident = float(entropy_C.mean()) < config.confidence_threshold
        self._left -= 1
        if (self._is_stable(best_C.cpu()) and confident) or self._left == 0:
            self._finish_canvas()

    def _begin_canvas(self) -> None:
        self._canvas = self._noise(min(self._size, self.decoding.args.max_position_embeddings - self.length))
        self._left = self._steps
        self._earlier: torch.Tensor | None = None
        self._best: list[torch.Tensor] = []  # argmax p of the last steps

    def _noise(self, count: int) -> torch.Tensor:
        """[count] ids, of all that the model has, as in training."""
        known = self.decoding.args.vocab_size
        return (self.draws.uniform("noise", count) * known).long().clamp(max=known - 1)

    def _show(self, best_C: torch.Tensor, trust_C: torch.Tensor) -> None:
        """Write the canvas as it would be if it were finished now, as far as the answer goes."""
        places = torch.arange(self.length, min(self.length + len(best_C), len(self.tokens)))
        best_C, trust_C = best_C[: len(places)], trust_C[: len(places)]
        changed = best_C != self.tokens[places]
        self.write(places[changed], best_C[changed], trust_C[changed])

    def _is_stable(self, best_C: torch.Tensor) -> bool:
        """Whether the steps before had the same; of the whole canvas, also of what the answer has no room for."""
        needed = self.config.stability_threshold
        before = self._best[max(0, len(self._best) - needed) :]
        self._best = [*before, best_C]
        return len(before) == needed and all(torch.equal(one, best_C) for one in before)

    def _finish_canvas(self) -> None:
        self.length = min(self.length + len(self._canvas), len(self.tokens))
        if self.end_at_eos():
            return
        self.done = self.length == len(self.tokens)
        if not self.done:
            self._begin_canvas()


def temperature(left: int, steps: int, t_min: float, t_max: float) -> float:
    """Of the step that has `left` of `steps` left, itself included."""
    return t_min + (t_max - t_min) * (left / steps)


def accepted(entropy_C: torch.Tensor, bound: float) -> torch.Tensor:
    """[C] bool: the places of the smallest entropies such that those before each add up to at most `bound`; the first
    always. Of equal ones the first."""
    ordered_C, order_C = entropy_C.sort(stable=True)
    before_C = ordered_C.cumsum(0) - ordered_C
    return torch.zeros_like(order_C, dtype=torch.bool).scatter_(0, order_C, before_C <= bound)
