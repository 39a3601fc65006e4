"""Decoding of models that attend in both directions, block by block (LLaDA; Nie et al. 2025, 2.4 and appendix B.4).

Every step runs the network over the whole canvas and commits some of the masked tokens of the current block; committed
tokens stay. A block is finished before the next one begins.

Where we differ from the published loop: each row has its own blocks and its own steps, so prompts of different
lengths share a batch and are answered as if alone; a finished block costs nothing more, a finished row leaves
the batch; a block's last step commits all that is left, so no mask remains whatever steps and threshold are.

`--cache prefix` and `--cache dual` (Fast-dLLM; Wu et al. 2025, arXiv:2505.22618) keep keys and values from the first
step of a block: of everything before it, or of everything around it. They are of tokens as they were seen then, so
this is an approximation, and other tokens may be written. `--factor f` commits, of the most trusted tokens, the r + 1
whose last has a confidence of at least 1 - f / (r + 2) (their section 3.3).

Shapes: C masked tokens of a row's block.
"""

import torch

from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding, Row, Schedule, blocks, steps_of_a_block
from megatron_dllm.generation.selection import Candidates
from megatron_dllm.modes import mdlm

DEFAULT_BLOCK_LENGTH = 128


def shifted(args) -> bool:
    """Whether logits predict the token after their own, in a model trained with `args`."""
    return args.dllm_mode == "mdlm" and mdlm.shifted(args)


class CanvasRow(Row):
    """A row of which the network sees all, masks included."""

    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self.shift = shifted(decoding.args)

    def whole(self, wanted: torch.Tensor, tokens: torch.Tensor | None = None) -> Pass:
        """A pass over all places of the canvas (or other `tokens` there), asking for logits of the tokens at
        `wanted`."""
        return self.part(torch.arange(len(self.tokens)), wanted, self.tokens if tokens is None else tokens)

    def part(self, places: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor, **cache) -> Pass:
        """A pass over some places, in this order. Where logits predict the next token, they come from the place
        before; the first token of all has none, and takes its own."""
        rows = (wanted - 1).clamp(min=0) if self.shift else wanted
        at = torch.empty(len(tokens), dtype=torch.int64)
        at[places] = torch.arange(len(places))
        same = torch.zeros(len(places), dtype=torch.int64)
        return Pass(tokens[places], places, same.bool() | True, same, at[rows], **cache)


class LLaDARow(CanvasRow):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        config = self.config
        self.cached = config.cache in ("prefix", "dual")
        length = config.gen_block_length or DEFAULT_BLOCK_LENGTH
        cut = blocks(canvas.start, len(self.tokens), length, canvas.start)
        self._blocks = [block for block in cut if len(self.masked(*block))]
        self._steps = steps_of_a_block(config, length, len(self._blocks))
        self._begin_block()

    def passes(self) -> list[Pass]:
        wanted = self.masked(*self._blocks[0])
        if self.cached:
            return [self._beside_cache(wanted)]
        if not self.config.cfg_scale:
            return [self.whole(wanted)]
        # guidance: the same canvas once more, without what was given
        return [self.whole(wanted), self.whole(wanted, self.tokens.masked_fill(self.given, self.mask_id))]

    def take(self, logits: list[torch.Tensor]) -> None:
        logits_CV = logits[0]
        if self.config.cfg_scale:
            conditional, unconditional = logits
            logits_CV = unconditional + (self.config.cfg_scale + 1) * (conditional - unconditional)
        places = self.masked(*self._blocks[0])
        candidates = self.candidates(logits_CV)
        quota, threshold = self._schedule.quota(), self.config.threshold
        if self.config.factor is not None:
            quota = max(quota, trusted_together(candidates, self.config.factor))
        chosen_K, ids_K = self.decoding.reverse(candidates, quota, threshold)
        self.write(places[chosen_K.cpu()], ids_K, candidates.trust(chosen_K))
        self._schedule.advance(len(ids_K))
        if self.end_at_eos():
            return
        while self._blocks and len(self.masked(*self._blocks[0])) == 0:
            del self._blocks[0]
            self._begin_block()

    def _begin_block(self) -> None:
        self.done = self.done or not self._blocks
        self._held = 0  # tokens that the cache holds for this block
        if self._blocks:
            self._schedule = Schedule(len(self.masked(*self._blocks[0])), self._steps)

    def _beside_cache(self, wanted: torch.Tensor) -> Pass:
        first, last = self._blocks[0]
        # where logits predict the next token, the block's first is predicted at the place before it
        first = max(0, first - 1) if self.shift else first
        all_places = torch.arange(len(self.tokens))
        fresh = all_places >= first
        if self.config.cache == "dual":
            fresh &= all_places < last
        kept, fresh = all_places[~fresh], all_places[fresh]
        if self._held or len(kept) == 0:
            return self.part(fresh, wanted, self.tokens, cached=self._held)
        self._held = len(kept)
        return self.part(torch.cat([kept, fresh]), wanted, self.tokens)


def trusted_together(candidates: Candidates, factor: float) -> int:
    """How many of the most trusted tokens may be committed at once: r as long as the r-th has a confidence of at least
    1 - factor / (r + 1); the first always."""
    confidence_C = candidates.propose()[1].sort(descending=True).values.tolist()
    count = 1
    while count < len(confidence_C) and confidence_C[count] >= 1 - factor / (count + 2):
        count += 1
    return count
