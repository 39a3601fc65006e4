"""What a user asks to be answered, from flags and files, and how answers become JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_dllm.data.messages import check_characters, check_messages, read_json
from megatron_dllm.generation.config import Completion

_KINDS = ("prompt", "messages", "tokens")
MEASURED = ("tokens_per_pass", "plain_tokens_per_second", "speed_up", "same_as_plain")  # of drafts (comparison.py)
_ANSWERED = (*(field.name for field in fields(Completion)), *MEASURED)


@dataclass(frozen=True)
class Request:
    """prompt: text, token ids or a conversation, as `generate` takes it; name: what errors call it; carried: fields of
    its line, which stand before the answer's in the line that is written."""

    prompt: str | list[int] | list[dict]
    name: str
    carried: dict[str, Any] = field(default_factory=dict)

    def in_chat(self) -> "Request":
        """A text as what a user says, for models that answer through a chat template; others as they are."""
        if not isinstance(self.prompt, str):
            return self
        return Request([dict(role="user", content=self.prompt)], self.name, self.carried)

    def line(self, completion: Completion, measured: dict[str, Any] | None = None) -> str:
        """The request's fields and the completion's as a line of JSON; measured: more of the answer's."""
        return json.dumps(self.carried | vars(completion) | (measured or {}), ensure_ascii=False) + "\n"


def collect(
    prompts: Sequence[str] = (), messages_file: str | None = None, prompts_file: str | None = None
) -> list[Request]:
    """All requests in order. Raises ValueError naming the line of a file that holds none."""
    if prompts_file is not None:
        if prompts or messages_file is not None:
            raise ValueError("--prompts-file has all prompts of a run: leave out --prompt and --messages-file.")
        requests = [_request(record, name) for name, record in _records("--prompts-file", prompts_file)]
    else:
        requests = [Request(text, f"prompt {number}") for number, text in enumerate(prompts, 1)]
        if messages_file is not None:
            requests += [_conversation(record, name) for name, record in _records("--messages-file", messages_file)]
    if not requests:
        raise ValueError("there is nothing to generate from: give --prompt, --messages-file or --prompts-file.")
    return requests


def _records(flag: str, path: str) -> list[tuple[str, Any]]:
    """(name, JSON) of each line that is not blank."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path} cannot be read ({error}): correct the path.") from error
    records = []
    for number, line in enumerate(lines, 1):
        name = f"{path}, line {number}"
        if line.strip():
            try:
                records.append((name, read_json(line)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return records


def _conversation(record: Any, name: str) -> Request:
    messages = record.get("messages") if isinstance(record, dict) else record
    return Request(_checked(messages, name), name)


def _checked(messages: Any, name: str) -> list[dict]:
    try:
        check_messages(messages, training=False)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return messages


def _request(record: Any, name: str) -> Request:
    kinds = [kind for kind in _KINDS if isinstance(record, dict) and kind in record]
    if len(kinds) != 1:
        raise ValueError(f'{name} must be an object with one of "prompt", "messages" and "tokens": correct it.')
    (kind,) = kinds
    prompt = record[kind]
    if kind == "messages":
        _checked(prompt, name)
    elif kind == "prompt":
        if not isinstance(prompt, str):
            raise ValueError(f'{name}: "prompt" must be a string; a conversation is "messages", ids are "tokens".')
        check_characters(prompt, name)
    elif not isinstance(prompt, list) or any(type(id) is not int for id in prompt):
        raise ValueError(f'{name}: "tokens" must be a list of token ids: write integers.')
    taken = [key for key in record if key in _ANSWERED]
    if taken:
        raise ValueError(f'{name} has a field "{taken[0]}", which the answer will have too: rename it.')
    return Request(prompt, name, record)
