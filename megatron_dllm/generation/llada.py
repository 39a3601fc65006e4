"""Decoding of masked diffusion models, block by block (LLaDA; Nie et al. 2025, section 2.4 and appendix B.4).

Every step runs the network and commits some of the masked tokens of the current block; committed tokens stay. A block
is finished before the next one begins. A model that attends in both directions sees the whole canvas in every step. One
that was trained in blocks (BD3-LM, Arriola et al. 2025; LLaDA2.0; Nemotron-Labs-Diffusion) sees the finished blocks as
clean tokens and the current one as noisy ones, which is its noisy block in training; what comes later is not there.

Where we differ from the published loop: each row has its own blocks and its own steps, so prompts of different
lengths share a batch and are answered as if alone; a finished block costs nothing more, a finished row leaves
the batch; a block's last step commits all that is left, so no mask remains whatever steps and threshold are.

Shapes: B rows still being written, Q longest canvas, N masked tokens in all rows' blocks, C in one row's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.selection import Candidates, RowDraws, quotas

Predict = Callable[[torch.Tensor, list["Seen"], torch.Tensor], torch.Tensor]
"""(tokens_BQ int64, what the network sees of each row, rows_N = position · B + row, int64) -> logits [N, V], V without
padding."""


@dataclass(frozen=True)
class Structure:
    """The blocks that a model was trained in. from_answer: counted anew from where an answer begins."""

    length: int
    from_answer: bool = False


@dataclass(frozen=True)
class Seen:
    """Of one row: its first `length` tokens, of which those from `noisy_from` on are being written; where its answer
    starts."""

    length: int
    noisy_from: int = 0
    start: int = 0

DEFAULT_BLOCK_LENGTH = 128

Reverse = Callable[[Candidates, int, float | None], tuple[torch.Tensor, torch.Tensor]]


class Row:
    """One canvas being written: its tokens, its current block, and how far the block's steps have come."""

    def __init__(
        self, canvas: Canvas, config: GenerationConfig, mask_id: int, draws: RowDraws, structure: Structure | None
    ):
        self.tokens = torch.tensor(canvas.tokens, dtype=torch.int64)
        self.given = self.tokens != mask_id
        self.start, self.draws = canvas.start, draws
        self.steps, self.seconds = 0, 0.0
        self._mask_id = mask_id
        self._structure = structure
        length = config.gen_block_length or DEFAULT_BLOCK_LENGTH
        origin = canvas.start
        if structure is not None:
            length = structure.length
            origin = canvas.start if structure.from_answer else 0
        self._blocks, first = [], canvas.start
        while first < len(self.tokens):
            last = min(first + length - (first - origin) % length, len(self.tokens))
            if not self.given[first:last].all():
                self._blocks.append((first, last))
            first = last
        self._origin, self._length = origin, length
        self._block_steps = -(-config.steps // max(1, len(self._blocks)))
        self._begin_block()

    @property
    def in_blocks(self) -> bool:
        return self._structure is not None

    @property
    def done(self) -> bool:
        return not self._blocks

    @property
    def seen(self) -> Seen:
        """What the network sees of this row, now. An answer may begin within a block: the prompt's end is noisy too."""
        if self._structure is None:
            return Seen(len(self.tokens))
        first, last = self._blocks[0]
        noisy_from = max(0, first - (first - self._origin) % self._length)
        return Seen(last, noisy_from, self.start)

    def candidates(self) -> torch.Tensor:
        """[C] positions of the block's masks."""
        first, last = self._blocks[0]
        return first + (self.tokens[first:last] == self._mask_id).nonzero()[:, 0]

    def quota(self) -> int:
        """How many tokens this step must commit to keep to the schedule; 1 if the threshold has run ahead of it."""
        return max(1, self._due[self._step] - self._committed)

    def commit(self, positions_K: torch.Tensor, ids_K: torch.Tensor) -> None:
        self.tokens[positions_K] = ids_K
        self._step, self._committed, self.steps = self._step + 1, self._committed + len(ids_K), self.steps + 1
        while self._blocks and len(self.candidates()) == 0:
            del self._blocks[0]
            self._begin_block()

    def stop_at(self, eos_id: int) -> None:
        """End the row if its answer has an EOS that no mask precedes."""
        for place, token in enumerate(self.tokens[self.start :].tolist(), self.start):
            if token == self._mask_id:
                return
            if token == eos_id:
                self.tokens[place:] = torch.where(self.tokens[place:] == self._mask_id, eos_id, self.tokens[place:])
                self._blocks = []
                return

    def _begin_block(self) -> None:
        self._step = self._committed = 0
        if self._blocks:
            masked = len(self.candidates())
            per_step = quotas(masked, min(masked, self._block_steps))  # a step commits at least one
            self._due = torch.tensor(per_step).cumsum(0).tolist()


def decode(
    canvases: Sequence[Canvas],
    predict: Predict,
    reverse: Reverse,
    config: GenerationConfig,
    mask_id: int,
    eos_id: int | None = None,
    structure: Structure | None = None,
) -> list[Row]:
    """Write all canvases; afterwards no row holds `mask_id`. `reverse`: the mode's (see modes/base.py); structure: of a
    model that was trained in blocks."""
    draws = lambda canvas: RowDraws(config.seed, canvas.tokens, canvas.copy)
    rows = [Row(canvas, config, mask_id, draws(canvas), structure) for canvas in canvases]
    longest = max((len(row.tokens) for row in rows), default=0)  # one length throughout: shapes that compile once
    began = time.perf_counter()
    while active := [row for row in rows if not row.done]:
        positions = [row.candidates() for row in active]
        logits = _logits(active, positions, predict, config, mask_id, longest)
        for row, places, logits_CV in zip(active, positions, logits, strict=True):
            candidates = Candidates(logits_CV, mask_id, config.temperature, config.remasking, draws=row.draws)
            chosen_K, ids_K = reverse(candidates, row.quota(), config.threshold)
            row.commit(places[chosen_K.cpu()], ids_K.cpu())
            if config.stop_at_eos:
                row.stop_at(eos_id)
            row.seconds = time.perf_counter() - began
    return rows


def _logits(active, positions, predict: Predict, config: GenerationConfig, mask_id: int, longest: int):
    """[C, V] logits of every row's candidates; one call of the network."""
    guided = config.cfg_scale > 0
    sequences, seen = [row.tokens for row in active], [row.seen for row in active]
    if active[0].in_blocks:
        longest = max(view.length for view in seen)
    if guided:  # the same canvases once more, without what was given
        sequences += [row.tokens.masked_fill(row.given, mask_id) for row in active]
        positions, seen = positions + positions, seen + seen
    B = len(sequences)
    tokens_BQ = torch.full((B, longest), mask_id, dtype=torch.int64)  # beyond a row's length nobody looks
    for b, sequence in enumerate(sequences):
        tokens_BQ[b, : seen[b].length] = sequence[: seen[b].length]
    rows_N = torch.cat([places * B + b for b, places in enumerate(positions)])
    logits_NV = predict(tokens_BQ, seen, rows_N)
    logits = logits_NV.split([len(places) for places in positions])
    if not guided:
        return logits
    half = len(active)
    return [u + (config.cfg_scale + 1) * (c - u) for c, u in zip(logits[:half], logits[half:], strict=True)]
