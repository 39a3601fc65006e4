"""What all decoding loops share: a row that is being written, and the loop that runs many of them together.

A sampler is a kind of row. It says what it wants to see next (`passes`), and writes tokens when it has seen the logits
(`take`); every row keeps its own time, so prompts of any length share a batch and each is answered as if alone. A row
that is done leaves the batch.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_dllm.generation.config import GenerationConfig
from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.selection import Candidates, RowDraws, quotas
from megatron_dllm.models.cache import KeyValueCache

Predict = Callable[[Sequence[Pass], KeyValueCache | None], list[torch.Tensor]]
Reverse = Callable[[Candidates, int, float | None], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Decoding:
    """How a batch is decoded. reverse: the mode's; mask_id: what stands where nothing is written; vocab_size: ids of
    the tokenizer; args: the arguments of the run that trained the model."""

    config: GenerationConfig
    reverse: Reverse
    mask_id: int
    eos_id: int | None
    vocab_size: int
    args: Namespace


@dataclass(frozen=True)
class Commit:
    """Tokens that one step wrote: their places in the row, and how much each was trusted.

    trust: probabilities, random numbers with random remasking, or None where nothing was predicted: EOS that fills up
    """

    step: int
    places: list[int]
    ids: list[int]
    trust: list[float] | None


class Row:
    """One canvas being written.

    tokens [n] int64, masks where nothing is written yet; given [n] bool, the prompt's; start: where the answer begins
    steps: rounds in which the row took part; forwards: sequences of it that went through the network
    commits: what was written, step by step; seconds: from the start of the batch until it was done
    """

    # Whether passes rely on tokens of earlier ones; a row may say so for itself.
    cached = False

    def __init__(self, canvas: Canvas, decoding: Decoding):
        self.tokens = torch.tensor(canvas.tokens, dtype=torch.int64)
        self.given = self.tokens != decoding.mask_id
        self.start = canvas.start
        self.draws = RowDraws(decoding.config.seed, canvas.tokens, canvas.copy)
        self.decoding, self.config, self.mask_id = decoding, decoding.config, decoding.mask_id
        self.steps, self.forwards, self.seconds = 0, 0, 0.0
        self.commits: list[Commit] = []
        self.done = bool(self.given.all())

    def passes(self) -> list[Pass]:
        """What to run now, while the row is not done; always the same number of passes."""
        raise NotImplementedError

    def take(self, logits: list[torch.Tensor]) -> None:
        """The logits [C, V] that each pass asked for."""
        raise NotImplementedError

    def candidates(self, logits_CV: torch.Tensor, tempered: bool = False) -> Candidates:
        config = self.config
        return Candidates(
            logits_CV,
            self.mask_id,
            config.temperature,
            config.remasking,
            draws=self.draws,
            top_k=config.top_k,
            top_p=config.top_p,
            tempered=tempered,
        )

    def write(self, places_K: torch.Tensor, ids_K: torch.Tensor, trust_K: torch.Tensor | None = None) -> None:
        """places_K int64, on the CPU; the others anywhere."""
        if len(places_K) == 0:
            return
        ids_K = ids_K.cpu()
        self.tokens[places_K] = ids_K
        trust = None if trust_K is None else trust_K.tolist()
        self.commits.append(Commit(self.steps, places_K.tolist(), ids_K.tolist(), trust))

    def masked(self, first: int, last: int) -> torch.Tensor:
        """Places in first..last that are not written yet."""
        return first + (self.tokens[first:last] == self.mask_id).nonzero()[:, 0]

    @property
    def settled(self) -> int:
        """How many tokens from the left no later step can change."""
        masked = self.masked(0, len(self.tokens))
        return int(masked[0]) if len(masked) else len(self.tokens)

    def end_at_eos(self) -> bool:
        """Whether the answer has an EOS that no mask precedes, if that is to end it: then EOS fills the rest."""
        if not self.config.stop_at_eos:
            return False
        answer, eos_id = self.tokens[self.start :], self.decoding.eos_id
        ends = ((answer == eos_id) | (answer == self.mask_id)).nonzero()[:, 0]
        if len(ends) == 0 or answer[ends[0]] != eos_id:
            return False
        filled = self.start + int(ends[0]) + (answer[ends[0] :] != eos_id).nonzero()[:, 0]
        if len(filled):
            self.write(filled, torch.full_like(filled, eos_id))
        self.done = True
        return True


class Schedule:
    """How many of `total` tokens each of at most `steps` steps has to write; what runs ahead of it has time left."""

    def __init__(self, total: int, steps: int):
        self._due = torch.tensor(quotas(total, max(1, min(total, steps)))).cumsum(0).tolist()
        self._step = self._written = 0

    def quota(self) -> int:
        return max(1, self._due[self._step] - self._written)

    def advance(self, written: int) -> None:
        self._step, self._written = self._step + 1, self._written + written


def steps_of_a_block(config: GenerationConfig, length: int, count: int) -> int:
    """Steps for each of `count` blocks of so many tokens; by default one for each token."""
    if config.steps is None:
        return config.steps_per_block or length
    return -(-config.steps // max(1, count))


def blocks(first: int, last: int, length: int, origin: int) -> list[tuple[int, int]]:
    """first..last cut where blocks of `length`, counted from `origin`, begin."""
    edges = [first]
    while edges[-1] < last:
        edges.append(min(edges[-1] + length - (edges[-1] - origin) % length, last))
    return list(zip(edges[:-1], edges[1:], strict=True))


def run(rows: Sequence[Row], predict: Predict, observe: Callable[[Sequence[Row]], None] | None = None) -> None:
    """Write all rows. observe: is called with the rows that took part in a step, after it."""
    began = time.perf_counter()
    cache, inside = None, []  # whose tokens the cache holds: (row, number of the pass)
    while active := [row for row in rows if not row.done]:
        passes = [row.passes() for row in active]
        now = [(row, k) for row, own in zip(active, passes, strict=True) for k in range(len(own))]
        if rows[0].cached:
            if cache is None:
                cache = KeyValueCache(len(now))
            elif now != inside:
                cache.select([inside.index(one) for one in now])
            inside = now
        logits = iter(predict([one for own in passes for one in own], cache))
        for row, own in zip(active, passes, strict=True):
            row.steps += 1
            row.forwards += len(own)
            row.take([next(logits) for _ in own])
            row.seconds = time.perf_counter() - began
        if observe is not None:
            observe(active)
