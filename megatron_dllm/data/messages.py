"""A conversation as data: what its messages must be, whatever a chat template makes of them."""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
"""role, content, and what else a template may read."""


def read_json(line: str | bytes) -> Any:
    """Raises ValueError for what is not JSON, in whatever way."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, a number too long, brackets too deep
        raise ValueError(f"it is not valid JSON ({getattr(error, 'msg', error)}): write one object a line.") from error


def check_messages(messages: Any, training: bool = True) -> None:
    """Raises ValueError unless `messages` is a list of {"role": str, "content": str, ...}; for `training` one
    of them must be the assistant's."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"A conversation must be a non-empty list of messages, but this one is {_short(messages)}.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'Message {i} must be an object with a "role" and a "content", but it is {_short(message)}.'
            )
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"The content of message {i} must be a string, but it is {_short(message.get('content'))}: "
                "join the text parts and leave out the others."
            )
        check_characters(message["content"], f"message {i}")
    if training and not any(message["role"] == "assistant" for message in messages):
        raise ValueError("The conversation has no assistant message to learn from: remove it from the data.")


def check_characters(text: str, name: str) -> None:
    """Raises ValueError for text that cannot be UTF-8; `name` says what it is the text of."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text of {name} holds {text[error.start]!a}, half of a character, which no tokenizer reads: remove it."
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
