"""The model class that lm-eval (the Language Model Evaluation Harness) asks its questions, with the extra `eval`.

    lm = EvaluatedModel(loaded)
    lm_eval.simple_evaluate(model=lm, tasks=["local_mc"], task_manager=TaskManager(include_path="tasks"))

To lm-eval the job is one process: every process hands all requests to the model, which shares them out over its copies
and knows all answers afterwards, so that the harness's own arithmetic is the same everywhere.

Texts become ids as at training: no BOS or EOS is added. Only where a likelihood is exact and there is no context, BOS
(else EOS) is the token before the first one. As elsewhere in the harness, spaces at the end of a context belong to the
continuation, both are encoded together, and a context that does not fit loses its beginning.
"""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lm_eval.api.model import LM

from megatron_dllm.data.chat import render_prompt
from megatron_dllm.data.messages import Message
from megatron_dllm.data.tokenizer import Tokenizer
from megatron_dllm.evaluation import AUTO, EXACT
from megatron_dllm.evaluation.likelihood import Score, Statistics, has_likelihood, kind_of, loglikelihood, windows
from megatron_dllm.evaluation.replicas import share_out
from megatron_dllm.generation import GenerationConfig, generate
from megatron_dllm.generation.load import Loaded
from megatron_dllm.generation.samplers import has_ladder, stops_at_eos

ANSWER_TOKENS = 256  # where a task does not say, as in lm-eval


class EvaluatedModel(LM):
    """A loaded model as lm-eval sees it.

    likelihood, num_draws, seed, check_greedy: of evaluation.likelihood.loglikelihood; batch_size: also of decoding
    decoding         how `generate_until` decodes, but for what follows here
    max_new_tokens   at most so many, also where a task allows more
    steps            denoising steps of an answer; default one for each token
    temperature      default: the task's where it samples, else 0; of samplers that have one
    chat             texts come from the chat template: names of special tokens in them are read as these tokens
    Methods raise ValueError (one sentence) for requests that do not fit the model.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        likelihood: str = AUTO,
        num_draws: int = 128,
        batch_size: int = 8,
        seed: int = 1234,
        check_greedy: bool = False,
        decoding: GenerationConfig | None = None,
        max_new_tokens: int | None = None,
        steps: int | None = None,
        temperature: float | None = None,
        chat: bool = False,
    ):
        super().__init__()
        self._loaded, self._tokenizer = loaded, loaded.tokenizer
        self._encode = partial(encode_chat, tokenizer=loaded.tokenizer) if chat else loaded.tokenizer.encode
        # a model without any can still be asked to write
        self._kind = kind_of(loaded.args, likelihood) if has_likelihood(loaded.args) else likelihood
        self._options = dict(
            likelihood=self._kind, num_draws=num_draws, batch_size=batch_size, seed=seed, check_greedy=check_greedy
        )
        self._decoding = decoding or GenerationConfig(
            seed=seed, batch_size=batch_size, stop_at_eos=stops_at_eos(loaded.args, loaded.tokenizer)
        )
        self._most, self._steps, self._temperature = max_new_tokens, steps, temperature
        self._positions = loaded.args.max_position_embeddings
        self._warned = False
        self.statistics = Statistics()

    # --- what lm-eval asks ------------------------------------------------------------------------------------------

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """(nats, is_greedy) of each request's (context, continuation)."""
        pairs = [self._fit(*self._encode_pair(*request.args)) for request in requests]
        return [tuple(score) for score in self._score(pairs)]

    def loglikelihood_rolling(self, requests) -> list[float]:
        """Nats of each whole text, cut into windows of the model's positions (likelihood.windows)."""
        prefix = self._prefix() if self._kind == EXACT else []
        texts = [windows(self._encode(text), self._positions, prefix) for (text,) in _arguments(requests)]
        scores = iter(self._score([window for text in texts for window in text]))
        return [sum(next(scores).nats for _ in text) for text in texts]

    def generate_until(self, requests) -> list[str]:
        """Each request's answer, cut where the first of its stop strings begins."""
        answers: list[str] = [""] * len(requests)
        groups: dict[tuple[int, float], list[int]] = {}  # by what is decoded alike
        prompts, stops = [], []
        for i, (prompt, asked) in enumerate(_arguments(requests)):
            new, temperature, until = self._wishes(asked)
            groups.setdefault((new, temperature), []).append(i)
            prompts.append(self._prompt(prompt, new))
            stops.append(until)
        for (new, temperature), members in groups.items():
            config = replace(self._decoding, max_new_tokens=new, steps=self._steps, temperature=temperature)
            for i, text in zip(members, self._write([prompts[i] for i in members], config), strict=True):
                answers[i] = cut(text, stops[i])
        return answers

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text that is encoded to the ids which the model was trained with."""
        if not add_generation_prompt:
            raise ValueError("a task that begins the answers (gen_prefix) cannot go with --apply-chat-template.")
        return chat_text(chat_history, self._tokenizer)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self._loaded.args, "tokenizer_model", None) or self._loaded.args.tokenizer_type)

    def get_model_info(self) -> dict:
        """What lm-eval writes into its results beside its own settings."""
        args = self._loaded.args
        return dict(
            model="megatron_dllm", dllm_mode=args.dllm_mode, dllm_block_size=getattr(args, "dllm_block_size", None)
        ) | {name: value for name, value in self._options.items() if name != "batch_size"}

    # --- texts and ids ----------------------------------------------------------------------------------------------

    def _score(self, pairs: list) -> list[Score]:
        return loglikelihood(self._loaded, pairs, statistics=self.statistics, **self._options)

    def _prefix(self) -> list[int]:
        tokenizer = self._tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise ValueError(
                "a text without context has nothing before its first token, and the tokenizer has neither BOS nor EOS: "
                "use --likelihood bound or a tokenizer with one."
            )
        return [first]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return (self._prefix() if self._kind == EXACT else []), self._encode(continuation)
        before, whole = self._encode(context), self._encode(context + continuation)
        if whole[: len(before)] != before:  # a token would belong to both
            return before, self._encode(continuation)
        return before, whole[len(before) :]

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        needed = 1 if self._kind == EXACT else 0
        if len(continuation) + needed > self._positions:
            raise ValueError(
                f"a continuation is {len(continuation)} tokens long, but the model has {self._positions} positions: "
                "leave out this task."
            )
        return self._shorten(context, self._positions - len(continuation)), continuation

    def _prompt(self, text: str, new: int) -> list[int]:
        check_answer(new, self._positions)
        return self._shorten(self._encode(text), self._positions - new)

    def _shorten(self, context: list[int], longest: int) -> list[int]:
        if len(context) <= longest:
            return context
        if not self._warned:
            self._warned = True
            print("Some contexts are longer than the model's positions: they lose their beginning.", file=sys.stderr)
        return context[len(context) - longest :]

    # --- answers ----------------------------------------------------------------------------------------------------

    def _wishes(self, asked: dict) -> tuple[int, float, list[str]]:
        """(new tokens, temperature, stop strings) of a request's generation arguments."""
        until = asked.get("until") or []
        new = answer_tokens(asked, self._most)
        temperature = self._temperature
        if has_ladder(self._loaded.args):
            temperature = 0.0
        elif temperature is None:
            temperature = float(asked.get("temperature", 1.0)) if asked.get("do_sample") else 0.0
        return new, temperature, [until] if isinstance(until, str) else list(until)

    def _write(self, prompts: list[list[int]], config: GenerationConfig) -> list[str]:
        """The answers' texts. Equal prompts go to one copy of the model, whose sampler draws each anew."""
        count = Counter(map(tuple, prompts))

        def write(own: list[tuple[int, ...]]) -> list[list[str]]:
            asked = [list(prompt) for prompt in own for _ in range(count[prompt])]
            completions = generate(self._loaded.model, self._tokenizer, asked, config) if asked else []
            texts = iter([completion.text for completion in completions])
            return [[next(texts) for _ in range(count[prompt])] for prompt in own]

        distinct = list(count)
        texts = {prompt: iter(found) for prompt, found in zip(distinct, share_out(distinct, write), strict=True)}
        return [next(texts[tuple(prompt)]) for prompt in prompts]


def _arguments(requests: Sequence) -> list[tuple]:
    return [request.args for request in requests]


def answer_tokens(asked: dict, most: int | None) -> int:
    """How long an answer to a request with these generation arguments may be."""
    new = int(asked.get("max_gen_toks", ANSWER_TOKENS))
    return new if most is None else min(new, most)


def check_answer(new: int, positions: int) -> None:
    """ValueError if so many new tokens leave no place for a prompt."""
    if new >= positions:
        raise ValueError(
            f"answers of {new} tokens leave no place for a prompt in the model's {positions} positions: give a smaller "
            "--max-new-tokens."
        )


def cut(text: str, stops: Sequence[str]) -> str:
    """`text` up to where the first of `stops` begins."""
    ends = [text.find(stop) for stop in stops if stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def encode_chat(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text in which special tokens are written by name, as data/chat.py reads conversations."""
    if tokenizer.hf is not None:
        return tokenizer.encode(text)
    ids = {
        tokenizer.special_text(i): i for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if i is not None
    }
    pieces = re.split("(" + "|".join(map(re.escape, ids)) + ")", text) if ids else [text]
    return [i for piece in pieces if piece for i in ([ids[piece]] if piece in ids else tokenizer.encode(piece))]


def chat_text(messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """A conversation through the chat template, as text. ValueError if it cannot be read back: then the template
    writes what the tokenizer reads otherwise."""
    ids = render_prompt(messages, tokenizer)
    text = tokenizer.decode(ids, show_special=True)
    if encode_chat(text, tokenizer) != ids:
        raise ValueError(
            "the tokenizer reads the chat template's text otherwise than the template means it: leave out "
            "--apply-chat-template."
        )
    return text
