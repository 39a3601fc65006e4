"""Which turns of a conversation are asked for, and the one form that messages are kept and sent in."""

import json
from collections.abc import Sequence
from typing import Any

from megatron_dllm.data.messages import Message, check_characters

SENT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of a message that go to the server; strict ones refuse a request with any other."""

Plan = list[Message | None]
"""A conversation in which None stands for an answer that is to be asked for."""


def prompt_of(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation without the assistant's turns at its end; None if that leaves no user turn."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return list(messages[:end]) if any(message["role"] == "user" for message in messages[:end]) else None


def plan(messages: Sequence[Message], turns: str = "last") -> Plan | None:
    """What to ask for.

    turns: "last" replaces what the assistant says at the end. "all" replaces every answer to the user or to a tool,
        one after the other. What the assistant says before the first user turn stays, and so does a turn that calls a
        tool whose result follows: the result belongs to that call.
    None for a conversation without a prompt.
    """
    prompt = prompt_of(messages)
    if prompt is None or turns == "last":
        return None if prompt is None else [*prompt, None]
    planned: Plan = []
    start, asked = 0, False
    while start < len(messages):
        role = messages[start]["role"]
        stop = start + 1
        if role != "assistant":
            asked |= role == "user"
            planned.append(messages[start])
        else:
            while stop < len(messages) and messages[stop]["role"] == "assistant":
                stop += 1
            has_result = stop < len(messages) and messages[stop]["role"] == "tool"
            planned += messages[start:stop] if has_result or not asked else [None]
        start = stop
    return planned if planned[-1] is None else [*planned, None]


def normal(messages: Sequence[Message]) -> list[Message]:
    """Messages in one form, whatever file they come from: without empty fields (a parquet column gives every message
    the fields of all), and tool calls as the protocol has them, with arguments as JSON text.

    Raises ValueError for tool calls of another form and for text that is not UTF-8.
    """
    return [_normal(message, i) for i, message in enumerate(messages)]


def _normal(message: Message, i: int) -> Message:
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = tool_calls(message["tool_calls"], f"message {i}")
    else:
        message.pop("tool_calls", None)
    for key, value in message.items():
        if isinstance(value, str):
            check_characters(value, f"message {i} ({key})")
    return message


def tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Raises ValueError unless `calls` is a list of {"id", "function": {"name", "arguments"}}; `name` says whose."""
    found = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'The tool_calls of {name} must be a list of {{"id", "function": {{"name", "arguments"}}}} as in '
                "OpenAI's protocol: rewrite them."
            )
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json_text({} if arguments is None else arguments, f"the tool_calls of {name}")
        ids = {} if call.get("id") is None else {"id": str(call["id"])}
        found.append({**ids, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    json_text(found, f"the tool_calls of {name}")
    return found


def json_text(value: Any, name: str) -> str:
    """`value` as JSON that every reader takes. Raises ValueError, calling it `name`, where there is none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"JSON cannot hold {name} ({error}): rewrite or remove it.") from error
    check_characters(text, name)
    return text
