"""Can a conversation be trained on? Asked of every one when a run starts, so that none stops it later.

Whether a message is an object with a role and a text is seen at a look. Whether the chat template takes the
conversation, and turns and tokens can be found in what it writes, is known for certain only by rendering and
tokenising it. That takes a hundred times as long as reading it, and millions may have to be read, so it is
done for the first `THOROUGH` conversations and then for those in which a message is of a new kind.

A kind is what templates decide by: the roles around the message, which of its fields are there, of which type and
whether they are empty, whether they begin or end in white space, and which of the template's own markers (such as
`</think>`) they hold. The data's own words make no kinds, so there are few.

What stays unseen until the conversation is drawn is an objection to a value as such: a template that counts the
letters of a tool call's id, for instance.
"""

from collections.abc import Hashable, Sequence

from megatron_dllm.data import chat
from megatron_dllm.data.messages import Message, check_messages

THOROUGH = 256
"""So many conversations are rendered and tokenised whatever they look like; takes a second or so."""


class ConversationCheck:
    """check(messages) raises ValueError if `messages` cannot be trained on, as far as the module's docstring says.

    Raises ValueError for a template that is not Jinja and for a tokenizer without EOS.
    """

    def __init__(self, tokenizer, template: str | None = None, last_turn_only: bool = False):
        chat.check_template(tokenizer, template)
        self._tokenizer, self._template, self._last_turn_only = tokenizer, template, last_turn_only
        self._source = template or tokenizer.chat_template or chat.PLAIN_TEMPLATE
        self._markers = _markers(self._source)
        self._mask_text = chat.mask_text(tokenizer)
        self._kinds: set[Hashable] = set()
        self.rendered = 0

    def __call__(self, messages: list[Message]) -> None:
        check_messages(messages, training=True)
        text = "\n".join([message["content"] for message in messages])
        kinds = self._kinds_of(messages, text)
        spells_mask = self._mask_text != "" and self._mask_text in text  # perhaps: tokenising decides
        if self.rendered < THOROUGH or spells_mask or not kinds <= self._kinds:
            chat.render(messages, self._tokenizer, self._template, self._last_turn_only)
            self.rendered += 1
            self._kinds |= kinds

    def _kinds_of(self, messages: Sequence[Message], text: str) -> set[Hashable]:
        """One a message; `text` is that of all. The usual message takes the short ways, as there are millions."""
        markers = [marker for marker in self._markers if marker in text]
        roles = ["", "", *[message["role"] for message in messages], ""]
        kinds = set()
        for i, message in enumerate(messages):
            content = message["content"]
            held = tuple([marker for marker in markers if marker in content]) if markers else ()
            others = {key: value for key, value in message.items() if key != "content"} if len(message) > 2 else {}
            ends = content[:1].isspace(), content[-1:].isspace(), not content
            kinds.add((*roles[i : i + 4], ends, held, self._fields(others)))
        return kinds

    def _fields(self, value) -> Hashable:
        """What a template can tell a value by that is not the text of a message."""
        if isinstance(value, dict):  # names that the template does not know (a tool's arguments) are all alike to it
            known = self._source.__contains__
            return frozenset([(key if known(key) else "", self._fields(item)) for key, item in value.items()])
        if isinstance(value, list):
            return min(len(value), 2), frozenset(map(self._fields, value))
        if isinstance(value, str):
            return value == "", *[marker for marker in self._markers if marker in value]
        return type(value), bool(value)


def _markers(source: str) -> tuple[str, ...]:
    """Strings in a template that are neither words (roles and fields mostly) nor short."""
    import jinja2

    strings = {text[1:-1] for _, kind, text in jinja2.Environment().lex(source) if kind == "string"}
    strings = {text.replace("\\n", "\n").strip() for text in strings}
    return tuple(sorted(text for text in strings if len(text) > 2 and not text.replace("_", "").isalnum()))
