"""Decoding of models that are autoregressive and diffuse at once: Nemotron-Labs-Diffusion (`--dllm-mode hybrid`).

The clean stream is causal and predicts the next token; the noisy one fills blocks. Three ways to use them (`--mode`):

diffusion    The causal head writes the first token of a block, diffusion the rest: each step commits the most trusted
             tokens, and all others above the threshold. The finished block is run once more as clean tokens, which
             stores its keys and values and predicts the next block's first token. Blocks are counted from the answer.
ar           One token at a time from the causal head.
speculative  Diffusion drafts a block in one step, the causal head verifies it in another, and as many tokens are kept
             as it agrees with, plus the one that it puts after them. At temperature 0 the text is that of `ar`; above,
             a draft d is kept with probability min(1, p(d) / q(d)) and else replaced by a draw from max(p - q, 0), so
             tokens are distributed as with `ar` (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1).

Shapes: n tokens of a pass, C rows of logits, V vocabulary.
"""

import torch

from megatron_dllm.generation.network import Pass
from megatron_dllm.generation.prompts import Canvas
from megatron_dllm.generation.rows import Decoding, Row, Schedule, steps_of_a_block
from megatron_dllm.generation.selection import draw


class CausalRow(Row):
    """A row of clean tokens, `length` of which are written; `held` of them are in the cache."""

    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self.cached = self.config.cache != "none"
        self.length, self._held = self.start, 0

    def view(
        self, end: int, wanted: torch.Tensor, clean: int | None = None, guesses: torch.Tensor | None = None
    ) -> Pass:
        """The tokens from the first that the cache lacks up to place `end`; those from place `clean` on are one noisy
        block, the others are clean and in the cache afterwards.

        wanted: places in the row; guesses: what is looked at after the written tokens, as if it were written too.
        """
        held, clean = self._held, end if clean is None else clean
        places = torch.arange(held, end)
        tokens = self.tokens[places]
        if guesses is not None:
            tokens[self.length - held : self.length - held + len(guesses)] = guesses
        is_noisy = places >= clean
        if self.cached:
            self._held = clean
        return Pass(tokens, places, is_noisy, is_noisy.long(), wanted - held, cached=held)

    def append_verified(self, ids: torch.Tensor, trust: torch.Tensor) -> None:
        """`append`, after a view of guesses: what was refused leaves the cache, and the last token has not been run."""
        self.append(ids, trust)
        self._held = min(self._held, self.length - 1)

    def append(self, ids: torch.Tensor, trust: torch.Tensor | None = None) -> None:
        """Write the next tokens, of which there is room for."""
        ids = ids[: len(self.tokens) - self.length]
        self.write(
            torch.arange(self.length, self.length + len(ids)), ids, trust if trust is None else trust[: len(ids)]
        )
        self.length += len(ids)
        self.end_at_eos()
        self.done = self.done or self.length == len(self.tokens)

    def next(self, logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([1] id, [1] probability) of the token after the last row's."""
        candidates = self.candidates(logits_CV[-1:], tempered=True)
        ids = candidates.draw("next")
        return ids, candidates.distribution().gather(-1, ids[:, None])[:, 0]


class AutoregressiveRow(CausalRow):
    def passes(self) -> list[Pass]:
        return [self.view(self.length, torch.tensor([self.length - 1]))]

    def take(self, logits: list[torch.Tensor]) -> None:
        self.append(*self.next(logits[0]))


class SpeculativeRow(CausalRow):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self._draft: tuple[torch.Tensor, torch.Tensor] | None = None  # ids and the distributions they were drawn from
        self._seeded = False
        self._block = self.config.gen_block_length or decoding.args.dllm_block_size

    def passes(self) -> list[Pass]:
        if not self._seeded:
            return [self.view(self.length, torch.tensor([self.length - 1]))]
        seed = self.length - 1
        # the last token of all needs no draft: it comes with the verification
        count = min(self._block - 1, len(self.tokens) - self.length - 1)
        if self._draft is None and count > 0:  # the seed is the noisy block's first token
            return [self.view(self.length + count, torch.arange(self.length, self.length + count), clean=seed)]
        if self._draft is None:
            self._draft = self.tokens[:0], torch.zeros(0, 0)
        end = self.length + len(self._draft[0])
        return [self.view(end, torch.arange(seed, end), guesses=self._draft[0])]

    def take(self, logits: list[torch.Tensor]) -> None:
        logits_CV = logits[0]
        if not self._seeded:
            self._seeded = True
            self.append(*self.next(logits_CV))
        elif self._draft is None:
            candidates = self.candidates(logits_CV)
            self._draft = candidates.draw().cpu(), candidates.distribution().cpu()
        else:
            ids, trust = verify(*self._draft, self.candidates(logits_CV).distribution().cpu(), self.draws)
            self._draft = None
            self.append_verified(ids, trust)


def verify(draft_C: torch.Tensor, q_CV: torch.Tensor, p_NV: torch.Tensor, draws) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, p of each): the draft tokens that are kept, and one more. N = C + 1: p of each draft's place, and of the
    one after them. At temperature 0 both are certain, and drafts are kept as far as they are p's."""
    ids, trust = draft_C.tolist(), []
    u_C = draws.uniform("accept", len(ids)).tolist()
    for i, token in enumerate(ids):
        p, q = p_NV[i], q_CV[i]
        if u_C[i] * q[token] >= p[token]:  # strictly below p / q: what p excludes is never kept
            ids[i:] = draw((p - q).clamp(min=0)[None], draws.uniform("replace", 1)).tolist()
            return torch.tensor(ids), torch.tensor([*trust, p[ids[i]].item()])
        trust.append(p[token].item())
    last = draw(p_NV[-1:], draws.uniform("next", 1))
    return torch.cat([draft_C, last]), torch.tensor([*trust, p_NV[-1, last].item()])


class DiffusionRow(CausalRow):
    def __init__(self, canvas: Canvas, decoding: Decoding):
        super().__init__(canvas, decoding)
        self._size = self.config.gen_block_length or decoding.args.dllm_block_size
        count = -(-(len(self.tokens) - self.start) // self._size)
        self._steps = steps_of_a_block(self.config, self._size, count)
        self._seeded = False  # whether the current block has its first token

    def passes(self) -> list[Pass]:
        if not self._seeded:
            return [self.view(self.length, torch.tensor([self.length - 1]))]
        return [self.view(self._last, self.masked(self.length, self._last), clean=self.length)]

    def take(self, logits: list[torch.Tensor]) -> None:
        logits_CV = logits[0]
        if not self._seeded:
            ids, trust = self.next(logits_CV)
            self.write(torch.tensor([self.length]), ids, trust)
            self._last = min(self.length + self._size, len(self.tokens))
            self._schedule = Schedule(self._last - self.length - 1, self._steps)
            self._seeded = True
        else:
            places = self.masked(self.length, self._last)
            candidates = self.candidates(logits_CV)
            chosen_K, ids_K = self.decoding.reverse(candidates, self._schedule.quota(), self.config.threshold)
            self.write(places[chosen_K.cpu()], ids_K, candidates.trust(chosen_K))
            self._schedule.advance(len(ids_K))
        if self.end_at_eos():
            return
        if len(self.masked(self.length, self._last)) == 0:
            self.length, self._seeded = self._last, False
            self.done = self.length == len(self.tokens)
