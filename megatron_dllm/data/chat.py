"""Conversations -> token ids and the mask of what the assistant said.

A conversation becomes text through a Jinja chat template: the one given with `--chat-template`, else the
tokenizer's own, else `PLAIN_TEMPLATE`. Where the assistant's turns are, we learn in one of two ways:

* the template marks them with `{% generation %}` ... `{% endgeneration %}`;
* else the conversation is rendered again turn by turn: what `messages[:i+1]` adds to `messages[:i]` with the
  generation prompt is turn i. That needs a template whose renderings are prefixes of one another.

How a turn ends. The model can only stop if it is taught to, and it must be taught once:

* the template ends the turn with EOS: that EOS is supervised and no other is added, whether it stands inside
  or just behind the generation tags;
* the template ends the turn with special tokens of its own that are not EOS (`<|im_end|>`, `<|eot_id|>`):
  they are supervised, and one supervised EOS follows them at the end of the conversation only. Between turns
  an EOS would contradict the template that the model was pre-trained with;
* the template ends the turn with nothing, or with ordinary text: one supervised EOS stands directly after the
  content of every assistant turn.

What the template writes after that end (a newline, ordinary text) is not supervised. After the *last*
assistant turn it is cut off, as are later messages: unsupervised tokens are never noised, so a bidirectional
model would see them behind the answer and read off where the answer ends, which it cannot when it generates.

The mask comes from positions in the text, never from comparing ids: the pad id may be the EOS id.
As in transformers, the text of a special token inside a message is read as that token.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from megatron_dllm.data.messages import Message, check_characters, check_messages

PLAIN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ 'Assistant:\\n' }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}"
    "{{ message.role.capitalize() + ':\\n' + message.content + '\\n\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)
"""For tokenizers that bring no template. A conversation reads

    System:\\nBrief!\\n\\nUser:\\nHi.\\n\\nAssistant:\\nHello.<eos>User:\\nBye.\\n\\nAssistant:\\nCiao.<eos>

with BOS in front if there is one. Headers end in a newline because no usual tokenizer merges a newline with
the word after it, so that a prompt's tokens are a prefix of the whole conversation's."""

PLAIN_ROLES = ("system", "user", "assistant")

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLACEHOLDER = "PLACEHOLDERxOFxTHExANSWER"  # in place of a turn's content, shows what a template puts after it

Span = tuple[int, int]  # [start, end) in the characters of the rendered text


def render(
    messages: Sequence[Message], tokenizer, template: str | None = None, last_turn_only: bool = False
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation and, of the same length, True where a token is supervised.

    Supervised are every assistant turn's content and its end (see the module's docstring), or only the last
    turn's. The ids end with the end of the last assistant turn.
    template: Jinja text that replaces the tokenizer's own template.
    Raises ValueError: malformed messages, no assistant turn, a tokenizer without EOS, a template that rejects
    the conversation or does not tell where a turn begins, the mask token spelled inside the conversation.
    """
    check_messages(messages, training=True)
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    script = _Script(messages[: last + 1], tokenizer, template)
    spans = script.close_turns(only_last=last_turn_only, end_of_conversation=True)
    ids, mask = script.encode(spans, supervised=spans[-1:] if last_turn_only else spans)
    if ids[-1] != tokenizer.eos_id:  # the text ends with it
        raise ValueError(
            f"The tokenizer does not read {script.eos!r} as its EOS token {tokenizer.eos_id}: register it "
            "there as a special token."
        )
    return _without_mask_token(ids, tokenizer), mask


def render_prompt(messages: Sequence[Message], tokenizer, template: str | None = None) -> list[int]:
    """Token ids that ask for the next assistant turn: the conversation so far and the generation prompt.

    Earlier assistant turns end as they did in training (see the module's docstring).
    Raises ValueError as `render` does, and where the last message already is the assistant's.
    """
    check_messages(messages, training=False)
    if messages[-1]["role"] == "assistant":
        raise ValueError("The prompt ends with an assistant message: end it with the message to be answered.")
    script = _Script(messages, tokenizer, template, generation_prompt=True)
    spans = script.close_turns(only_last=True, end_of_conversation=False) if script.turns else []
    return _without_mask_token(script.encode(spans, supervised=[])[0], tokenizer)


def check_template(tokenizer, template: str | None = None) -> None:
    """Raises ValueError for a template that is not Jinja, whatever the data, or a tokenizer without EOS."""
    import jinja2

    try:
        _Script([], tokenizer, template)
    except ValueError as error:
        if error.__cause__ is None or isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            raise  # what else a template may say, it says about a conversation without messages


class _Script:
    """A rendered conversation: its text, and where in the text each assistant turn stands."""

    def __init__(self, messages: Sequence[Message], tokenizer, template: str | None, generation_prompt: bool = False):
        if tokenizer.eos_id is None:
            raise ValueError("The tokenizer has no EOS token, which must end assistant turns: use one that has it.")
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template or PLAIN_TEMPLATE
        self.tagged = _GENERATION_TAG.search(self.template) is not None
        self.eos = tokenizer.special_text(tokenizer.eos_id)
        self.messages = [self._clean(message) for message in messages]
        self.turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if self.template is PLAIN_TEMPLATE:
            for i, message in enumerate(self.messages):
                if message["role"] not in PLAIN_ROLES:
                    raise ValueError(
                        f"Message {i} has the role {message['role']!r}, but the plain template knows only "
                        f"{', '.join(PLAIN_ROLES)}: give a template that knows it with --chat-template."
                    )
        self.text, self.tags = self._render(self.messages, generation_prompt)

    def _clean(self, message: Message) -> Message:
        # parquet fills absent keys with None, on which many templates stumble
        message = {key: value for key, value in message.items() if value is not None}
        if message["role"] == "assistant":  # data with a hand-appended EOS must not get a second one
            while (content := message["content"].rstrip()).endswith(self.eos):
                message["content"] = content.removesuffix(self.eos)
        return message

    def _render(self, messages: list[Message], generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Text of `messages`, and the spans inside generation tags, if the template has any."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # transformers' own renderer, also for tokenizers that are not its own: one sandbox, one dialect
            (text,), tags = render_jinja_template(
                conversations=[messages],
                chat_template=self.template,
                return_assistant_tokens_mask=self.tagged,
                add_generation_prompt=generation_prompt,
                **_special_texts(self.tokenizer),
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"The chat template is not valid Jinja (line {error.lineno}: {error.message}): correct it, or pass "
                "another with --chat-template."
            ) from error
        except Exception as error:  # a template is a program, which can fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"The chat template rejects the conversation ({reason.rstrip('.')}): mend the data or pass another "
                "template with --chat-template."
            ) from error
        check_characters(text, "the rendered conversation")
        return text, list(tags[0]) if tags else []

    def close_turns(self, only_last: bool, end_of_conversation: bool) -> list[Span]:
        """Spans of the assistant turns with their ends; inserts EOS into `text` where the template has none.

        only_last: earlier turns are not asked for, and looked up only if they may need an EOS.
        end_of_conversation: the last turn ends the text, and what follows it is cut off.
        """
        end = self._end_mark()
        if only_last and end and not self.tagged and self.tokenizer.hf is not None:
            # spares templates that render earlier turns differently (without their reasoning) the check
            spans = [self._span(len(self.turns) - 1)] if end_of_conversation else []
        else:
            spans = [self._span(turn) for turn in range(len(self.turns))]
        text, closed, done = "", [], 0
        for i, (start, stop) in enumerate(spans):
            ends_itself = self._own_end(start, stop, end)
            stop = stop if ends_itself is None else ends_itself
            is_end = end_of_conversation and i == len(spans) - 1
            begin = len(text) + start - done
            text += self.text[done:stop]
            if ends_itself is None or (is_end and not end.endswith(self.eos)):
                text += self.eos
            closed.append((begin, len(text)))
            done = stop
        self.text = text if end_of_conversation else text + self.text[done:]
        return closed

    def _span(self, turn: int) -> Span:
        """Characters of one assistant turn: what its generation tags enclose, else from the end of the
        generation prompt to the end of its content."""
        if self.tagged:
            if len(self.tags) != len(self.turns):
                raise ValueError(
                    f"The chat template's generation tags mark {len(self.tags)} regions for "
                    f"{len(self.turns)} assistant turns: wrap each assistant turn in exactly one "
                    "{% generation %} block."
                )
            return self.tags[turn]
        i = self.turns[turn]
        head = self._render(self.messages[:i], generation_prompt=True)[0]
        whole = self._render(self.messages[: i + 1])[0]
        stand_in = {**self.messages[i], "content": _PLACEHOLDER}
        before, found, tail = self._render([*self.messages[:i], stand_in])[0].rpartition(_PLACEHOLDER)
        stop = len(whole) - len(tail)
        if not (
            found
            and self.text.startswith(whole)
            and whole.startswith(head)
            and before.startswith(head)
            and whole.endswith(tail)
            and stop >= len(head)
        ):
            raise self._not_prefix_stable()
        return len(head), stop

    def _end_mark(self) -> str | None:
        """The special tokens with which the template itself ends a turn, EOS among them or not."""
        if self.turns[-1] < len(self.messages) - 1:  # what follows the turn may belong to the next message
            return _Script(self.messages[: self.turns[-1] + 1], self.tokenizer, self.template)._end_mark()
        start, stop = self._span(len(self.turns) - 1)
        specials = _special_tokens(self.tokenizer)
        body = self.text[start:stop].rstrip()
        inside = next((s for s in specials if body.endswith(s)), None) if self.tagged else None
        eos, others = re.escape(self.eos), "|".join(re.escape(s) for s in specials if s != self.eos)
        other = rf"(?:\s*(?:{others}))" if others else r"(?!)"
        after = re.match(rf"{other}*\s*{eos}|{other}+", self.text[stop:])
        after = after[0] if after else None
        return inside if inside == self.eos else after or inside

    def _own_end(self, start: int, stop: int, end: str | None) -> int | None:
        """Where the turn's end mark ends, or None where the template ended the turn without it."""
        if end is None:
            return None
        body = self.text[start:stop].rstrip()
        if body.endswith(end):
            return start + len(body)
        return stop + len(end) if self.text.startswith(end, stop) else None

    def encode(self, spans: list[Span], supervised: list[Span]) -> tuple[list[int], list[bool]]:
        """ids of `text`, and True for the tokens inside the `supervised` ones of the `spans`."""
        if self.tokenizer.hf is None:
            return self._encode_apart(spans, supervised)
        hf = self.tokenizer.hf
        tokenise = lambda text, **kwargs: hf(text, add_special_tokens=False, verbose=False, **kwargs)
        with_offsets = self.tagged and hf.is_fast
        encoded = tokenise(self.text, return_offsets_mapping=with_offsets)
        ids = list(encoded["input_ids"])
        mask = [False] * len(ids)
        if with_offsets:  # as transformers' return_assistant_tokens_mask: a token that touches the span belongs to it
            for k, (first, last) in enumerate(encoded["offset_mapping"]):
                mask[k] = any(first < stop and last > start for start, stop in supervised)
            return ids, mask
        for start, stop in supervised:
            before, upto = (list(tokenise(self.text[:at])["input_ids"]) if at else [] for at in (start, stop))
            if ids[: len(before)] != before or ids[: len(upto)] != upto:
                raise self._not_prefix_stable()
            mask[len(before) : len(upto)] = [True] * (len(upto) - len(before))
        return ids, mask

    def _encode_apart(self, spans: list[Span], supervised: list[Span]) -> tuple[list[int], list[bool]]:
        # The sampler encodes the prompt before the answer exists, so prompt and answer never share a token.
        tokenizer = self.tokenizer
        special = {
            tokenizer.special_text(i): i
            for i in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
            if i is not None
        }
        special[self.eos] = tokenizer.eos_id  # where several share one text
        split = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        cuts = sorted({0, len(self.text), *(at for span in spans for at in span)})
        ids, mask = [], []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            is_answer = any(first <= start and stop <= last for first, last in supervised)
            for piece in filter(None, split.split(self.text[start:stop])):
                more = [special[piece]] if piece in special else tokenizer.encode(piece)
                ids += more
                mask += [is_answer] * len(more)
        return ids, mask

    def _not_prefix_stable(self) -> ValueError:
        return ValueError(
            "The chat template is not prefix-stable (the beginning of a conversation renders differently than "
            "inside the whole), so assistant turns cannot be found: mark them with {% generation %} ... "
            "{% endgeneration %} in a template given with --chat-template."
        )


def _special_texts(tokenizer) -> dict[str, str]:
    """The variables bos_token, eos_token, ... that templates use."""
    texts = dict(tokenizer.hf.special_tokens_map) if tokenizer.hf is not None else {}
    for name in ("bos", "eos", "pad"):
        if (token := getattr(tokenizer, f"{name}_id")) is not None:
            texts[f"{name}_token"] = tokenizer.special_text(token)
    return texts


@lru_cache(maxsize=8)  # transformers rebuilds its table of added tokens at every look
def _special_tokens(tokenizer) -> tuple[str, ...]:
    """Texts that the tokenizer reads as one special token, such as <|im_end|>; the longest first."""
    texts = {text for text in _special_texts(tokenizer).values() if isinstance(text, str)}
    if tokenizer.hf is not None:
        texts |= {token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special}
    return tuple(sorted(texts - {""}, key=lambda text: (-len(text), text)))


def mask_text(tokenizer) -> str:
    """What text must hold, at least, to be read as the mask token; empty if no text is."""
    try:
        return tokenizer.decode([tokenizer.mask_id], show_special=True).strip()
    except (ValueError, TypeError):  # an id that is the model's alone, or none
        return ""


def _without_mask_token(ids: list[int], tokenizer) -> list[int]:
    if tokenizer.mask_id is not None and tokenizer.mask_id in ids:
        raise ValueError(
            f"The conversation spells the mask token {mask_text(tokenizer)!r}, which clean text must not contain: "
            "rewrite or remove that message."
        )
    return ids
