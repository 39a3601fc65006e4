"""What a draft is worth: how many tokens a pass of its target yields, and how much sooner its text comes than that of
the target alone.

The pass over the prompt, and the token that it writes, are not counted: 1 is what the target does alone, as in the
logs of training.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_dllm.generation import stream
from megatron_dllm.generation.config import Completion, GenerationConfig
from megatron_dllm.generation.requests import MEASURED

_WARM_UP_TOKENS = 8


def is_drafted(args, config: GenerationConfig) -> bool:
    return args.dllm_mode == "dflash" and config.mode != "ar"


def alone(model, tokenizer, prompts: Sequence, config: GenerationConfig) -> list[Completion]:
    """What the target writes without its draft. On every rank. Both have been run a little before, so that neither
    pays for what only a first pass does."""
    plain = replace(config, mode="ar")
    short = min(_WARM_UP_TOKENS, config.max_new_tokens)
    for one in (config, plain):
        list(stream(model, tokenizer, prompts[: config.batch_size], replace(one, max_new_tokens=short)))
    return list(stream(model, tokenizer, prompts, plain))


class Comparison:
    """Of answers in their order. plain: what the target alone has written, None if it was not asked."""

    def __init__(self, tokenizer, config: GenerationConfig, plain: Sequence[Completion] | None = None):
        self._eos_id, self._config, self._plain = tokenizer.eos_id, config, plain
        self._drafted: list[Completion] = []

    def add(self, completion: Completion) -> dict:
        """The next answer; returns what is to be said of it, under the names MEASURED."""
        self._drafted.append(completion)
        tokens, passes = self._counts(completion)
        found = [round(tokens / passes, 4) if passes else None]
        if self._plain is not None:
            plain = self._plain[len(self._drafted) - 1]
            speed_up = completion.tokens_per_second / plain.tokens_per_second
            found += [plain.tokens_per_second, round(speed_up, 4), completion.ids == plain.ids]
        return dict(zip(MEASURED, found, strict=False))

    def _counts(self, completion: Completion) -> tuple[int, int]:
        """(tokens, passes) after those of the prompt; what fills an answer behind its EOS is not written."""
        ids, written = completion.ids, len(completion.ids)
        if self._config.stop_at_eos and self._eos_id in ids:
            written = ids.index(self._eos_id) + 1
        return written - 1, completion.forwards - 1

    def summary(self) -> str:
        tokens, passes = (sum(counts) for counts in zip(*map(self._counts, self._drafted), strict=True))
        yielded = f"{tokens / passes:.2f}" if passes else "no"
        said = f"tokens per pass of the target: {yielded} ({tokens} tokens, {passes} passes)"
        if self._plain is None:
            return said
        rates = [tokens / self._seconds(answers) for answers in (self._drafted, self._plain)]
        said += f"; {rates[0]:.1f} tokens a second, {rates[1]:.1f} without the draft: {rates[0] / rates[1]:.2f} times"
        if self._config.temperature == 0:
            same = sum(a.ids == b.ids for a, b in zip(self._drafted, self._plain, strict=True))
            said += f"; the same text for {same} of {len(self._plain)} prompts"
        return said

    def _seconds(self, answers: Sequence[Completion]) -> float:
        """Of all batches: each takes as long as its slowest answer."""
        size = self._config.batch_size
        seconds = [len(answer.ids) / answer.tokens_per_second for answer in answers]
        return sum(max(seconds[first : first + size]) for first in range(0, len(seconds), size))
