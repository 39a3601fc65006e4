"""Decoding with a draft (DFlash, arXiv:2602.06036): it guesses a block at once, its target verifies it in one pass.

The target reads the prompt and writes the first token. Then, in turn: the draft guesses the tokens after the last one,
from masks and from the target's hidden states of everything before it; the target runs the last token and the guesses,
keeps as many as it agrees with, and puts one of its own after them. At temperature 0 the text is what the target alone
would write, above it has the same distribution (`nemotron.verify`). Both keep keys and values of text that stands;
those of refused guesses, and the draft's of a block, are taken back.

`forwards` counts passes of the target, so tokens over forwards is what a pass yields. `--mode ar` is the target alone.

Shapes: S new context tokens of a row, n of its block, F features; B rows, K slots of both in a batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

from megatron_dllm.generation.nemotron import CausalRow, verify
from megatron_dllm.generation.network import Network, Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding, Row
from megatron_dllm.models.attention import RuleAttention
from megatron_dllm.models.cache import KeyValueCache
from megatron_dllm.models.dflash import DraftOfTarget
from megatron_dllm.modes.base import ANCHOR, BLOCK, CONTEXT, DOCUMENT, NOISY, NUM_ATTRIBUTES, POSITION, STREAM


@dataclass(frozen=True)
class Guess:
    """What the draft is shown of one row: features [S, F] of the tokens from `first` on, the last token that is
    written, and how many tokens to guess after it."""

    features: torch.Tensor
    first: int
    token: int
    count: int


class DraftedRow(CausalRow):
    """Its `passes` and `take` are the target's; `guess` and `guessed` the draft's."""

    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self._block = decoding.args.dllm_block_size
        self._plain = self.config.mode == "ar"
        self._draft: tuple[torch.Tensor, torch.Tensor | None] = (self.tokens[:0], None)
        self._known = 0  # tokens whose features the draft has seen
        self._features: torch.Tensor | None = None

    def passes(self) -> list[Pass]:
        self._seen_from = self._held
        end = self.length + len(self._draft[0])
        return [self.view(end, torch.arange(self.length - 1, end), guesses=self._draft[0])]

    def take(self, logits: list[torch.Tensor], features_SF: torch.Tensor | None = None) -> None:
        """features: of the tokens of the pass."""
        ids, q_CV = self._draft
        new, trust = verify(ids, q_CV, self.candidates(logits[0]).distribution().cpu(), self.draws)
        self.append_verified(new, trust)
        self._draft = (self.tokens[:0], None)
        # of those that stand, but for the last, which the target has not run yet
        self._features = features_SF[self._known - self._seen_from : self.length - 1 - self._seen_from]

    def guess(self) -> Guess | None:
        """None if there is nothing to guess: the last token of all comes with the verification."""
        count = min(self._block - 1, len(self.tokens) - self.length - 1)
        if self.done or self._plain or count < 1:
            return None
        first, self._known = self._known, self.length - 1
        return Guess(self._features, first, int(self.tokens[self.length - 1]), count)

    def guessed(self, logits_CV: torch.Tensor) -> None:
        candidates = self.candidates(logits_CV)
        self._draft = candidates.draw("draft").cpu(), candidates.distribution().cpu()


class Pair:
    """A draft and its target on this rank."""

    def __init__(self, model: torch.nn.Module, vocab_size: int, mask_id: int):
        self._model: DraftOfTarget = unwrap_model(model)
        self._target = self._model.target
        self._vocab_size, self._mask_id = vocab_size, mask_id
        self.network = Network(self._target.model, vocab_size, full=False)
        self._attentions = [module for module in self._model.modules() if isinstance(module, RuleAttention)]

    def verify(self, passes: Sequence[Pass], cache: KeyValueCache) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(logits [C, V] that each pass wants, features [S, F] of all its tokens)."""
        logits = self.network(passes, cache)
        features_QBF = self._target.taken()
        return logits, [features_QBF[: len(one.tokens), b] for b, one in enumerate(passes)]

    def guess(self, guesses: Sequence[Guess], cache: KeyValueCache) -> list[torch.Tensor]:
        """[count, V] logits of each."""
        B, device = len(guesses), torch.cuda.current_device()
        tp, sequence_parallel = self._model.pg_collection.tp, self._model.config.sequence_parallel
        S, n = max(len(g.features) for g in guesses), max(g.count for g in guesses) + 1
        if sequence_parallel:  # of a draft in training
            S, n = (-(-x // tp.size()) * tp.size() for x in (S, n))
        features_SBF = guesses[0].features.new_zeros(S, B, guesses[0].features.shape[1])
        tokens_BQ = torch.full((B, n), self._mask_id)
        positions_BT = torch.zeros(B, S + n, dtype=torch.int64)
        attributes_BTA = torch.zeros(B, S + n, NUM_ATTRIBUTES + 1, dtype=torch.int32)
        attributes_BTA[..., DOCUMENT] = attributes_BTA[..., BLOCK] = -1  # padding is of no block either
        for b, one in enumerate(guesses):
            s, own = len(one.features), slice(S, S + one.count + 1)
            features_SBF[:s, b] = one.features
            tokens_BQ[b, 0] = one.token
            anchor = one.first + s
            positions_BT[b, :s] = torch.arange(one.first, anchor)
            positions_BT[b, own] = torch.arange(anchor, anchor + one.count + 1)
            attributes_BTA[b, :s, DOCUMENT] = attributes_BTA[b, own, DOCUMENT] = 0
            attributes_BTA[b, own, ANCHOR], attributes_BTA[b, own, BLOCK] = anchor, 0
        attributes_BTA[:, :S, STREAM], attributes_BTA[:, S:, STREAM] = CONTEXT, NOISY
        attributes_BTA[..., POSITION] = positions_BT
        cache.begin(attributes_BTA, [one.first for one in guesses])
        for attention in self._attentions:
            attention.cache = cache
        try:
            embeddings_QBD = self._target.embed(tokens_BQ.to(device))
            hidden = self._model.hidden_states(features_SBF, embeddings_QBD, positions_BT.to(device))
        finally:
            for attention in self._attentions:
                attention.cache = None
        if sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=tp)
        rows = [torch.arange(1, one.count + 1, device=device) * B + b for b, one in enumerate(guesses)]
        logits = self._target.model.logits(hidden.flatten(0, 1)[torch.cat(rows)])
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=tp)
        logits = logits[:, : self._model.true_vocab_size].float().contiguous()
        logits[:, self._vocab_size :] = torch.finfo(logits.dtype).min
        return list(logits.split([one.count for one in guesses]))




def run(rows: Sequence[DraftedRow], pair: Pair, observe: Callable[[Sequence[Row]], None] | None = None) -> None:
    """Write all rows, in turns of the target and the draft."""
    began = time.perf_counter()
    caches = _Cached(), _Cached()
    while active := [row for row in rows if not row.done]:
        passes = [row.passes()[0] for row in active]
        logits, features = pair.verify(passes, caches[0].of(active))
        for row, own, known in zip(active, logits, features, strict=True):
            row.steps, row.forwards = row.steps + 1, row.forwards + 1
            row.take([own], known)
            row.seconds = time.perf_counter() - began
        if observe is not None:
            observe(active)
        guesses = [(row, guess) for row in active if (guess := row.guess()) is not None]
        if guesses:
            guessing = [row for row, _ in guesses]
            found = pair.guess([guess for _, guess in guesses], caches[1].of(guessing))
            for row, own in zip(guessing, found, strict=True):
                row.guessed(own)


class _Cached:
    """A cache, and whose rows it holds: rows only leave."""

    def __init__(self):
        self._cache, self._rows = None, []

    def of(self, rows: list[Row]) -> KeyValueCache:
        if self._cache is None:
            self._cache = KeyValueCache(len(rows))
        elif rows != self._rows:
            self._cache.select([self._rows.index(row) for row in rows])
        self._rows = list(rows)
        return self._cache
