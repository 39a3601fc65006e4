"""Block diffusion: finished blocks are clean, the current one is noisy, what comes later is not there.

So a model was trained that attends by bd3lm's rule (BD3-LM, Arriola et al. 2025; LLaDA2.0, arXiv:2512.15745) or by
hybrid's, and the keys and values of finished blocks never change: with a cache (the default) a step runs the current
block alone, and computes the same as without. A finished block is run as clean tokens in the first step of the next.
An answer may begin within a block: then the prompt's end is part of the first noisy block, as in LLaDA2.0.

A step commits every token more trusted than the threshold if they are at least its share of the block's steps, else
that share of the most trusted ones (LLaDA2.0). With `--editing-threshold` (LLaDA2.1) a step may also
overwrite tokens of the answer that it wrote in this block: those for which the network now prefers another token with
more than this confidence. A block then ends when nothing is masked and nothing was overwritten, or after
`--max-post-steps` steps without a mask; the shares are one token a step.
"""

import torch

from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding, Row, blocks, steps_of_a_block
from megatron_dllm.generation.selection import quotas


class BlockRow(Row):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        args, config = decoding.args, self.config
        self.cached = config.cache != "none"
        self._length = args.dllm_block_size
        from_answer = args.dllm_block_origin == "response"
        self._origin = canvas.start if from_answer else 0
        place = torch.arange(len(self.tokens))
        self._block_of = place // self._length
        if from_answer:  # counted anew from there; the prompt's last block may be short
            after = -(-self.start // self._length) + (place - self.start) // self._length
            self._block_of = torch.where(place < self.start, place // self._length, after)
        self._blocks = blocks(self.start, len(self.tokens), self._length, self._origin)
        self._steps = min(self._length, steps_of_a_block(config, self._length, len(self._blocks)))
        self._held = 0
        self._begin_block()

    def passes(self) -> list[Pass]:
        first, last = self._blocks[0]
        begin = max(0, first - (first - self._origin) % self._length)
        wanted = torch.arange(first, last) if self._edits else self.masked(first, last)
        places = torch.arange(self._held, last)
        held = self._held
        if self.cached:
            self._held = begin
        blocks_of = self._block_of[places]
        return [Pass(self.tokens[places], places, places >= begin, blocks_of, wanted - held, cached=held)]

    def take(self, logits: list[torch.Tensor]) -> None:
        first, last = self._blocks[0]
        logits_CV, changed = logits[0], 0
        places = torch.arange(first, last)
        is_masked = self.tokens[places] == self.mask_id
        masked = places[is_masked]
        edited = places[:0]
        candidates = self.candidates(logits_CV, tempered=True)
        if self._edits:
            ids, trust = (x.cpu() for x in candidates.propose())
            better = ~is_masked & (ids != self.tokens[places]) & (trust > self.config.editing_threshold)
            edited, changed = places[better], int(better.sum())
            candidates = candidates.of(is_masked)
        if len(masked):
            chosen_K, ids_K = self.decoding.reverse(candidates, self._quota(), self.config.threshold)
            self.write(masked[chosen_K.cpu()], ids_K, candidates.trust(chosen_K))
        else:
            self._after += 1
        if changed:
            self.write(edited, ids[better], trust[better])
        self._step += 1
        unfinished = len(self.masked(first, last)) > 0
        if self._edits:
            unfinished = unfinished or (changed > 0 and self._after < self.config.max_post_steps)
        # tokens that may still be overwritten do not end an answer
        if (not self._edits or not unfinished) and self.end_at_eos():
            return
        if not unfinished:
            del self._blocks[0]
            self._begin_block()

    @property
    def settled(self) -> int:
        return self._blocks[0][0] if self._edits and not self.done else super().settled

    @property
    def _edits(self) -> bool:
        return self.config.editing_threshold is not None

    def _begin_block(self) -> None:
        self.done = self.done or not self._blocks
        self._step = self._after = 0
        if self._blocks:
            self._quotas = quotas(self._length, self._steps)

    def _quota(self) -> int:
        """The published shares are those of a whole block, also where the prompt fills a part of it; a block's last
        step takes what is left."""
        first, last = self._blocks[0]
        left = len(self.masked(first, last))
        if self._edits:
            return 1
        return left if self._step >= len(self._quotas) - 1 else min(left, self._quotas[self._step])
