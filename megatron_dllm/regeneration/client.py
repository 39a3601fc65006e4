"""One question to an OpenAI-compatible server, and what can go wrong with it.

Three kinds of trouble are kept apart: `Refusal`, the answer is no or of no use, and asking again would not change it;
`Trouble`, something that passes: asked again, with pauses; `ServerGone`, nothing more is to be had from the server.
"""

import asyncio
import email.utils
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from megatron_dllm.data.messages import Message, check_characters
from megatron_dllm.regeneration.conversations import SENT, tool_calls

_LONGEST_PAUSE_S = 30.0
_LONGEST_RETRY_AFTER_S = 3600.0
_COMPLETE = {"stop", "tool_calls", "function_call", "eos_token", "stop_sequence"}  # the last two: older servers
_WRONG_FOR_ALL = {401: "the API key", 402: "the account", 404: "--target-server or --model", 405: "--target-server"}
_BUSY = {429, 503}


class Refusal(Exception):
    """Final for this conversation. kind: "truncated", "empty", "filtered" or "refused" (a 4xx)."""

    place = 0  # of the turn that was asked for, in its conversation

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Trouble(Exception):
    """May pass. kind: "timeout", "server", "malformed", "busy" or "unreachable"; retry_after_s: what it asks for."""

    place = 0

    def __init__(self, kind: str, reason: str, retry_after_s: float = 0.0):
        super().__init__(reason)
        self.kind, self.retry_after_s = kind, retry_after_s

    @property
    def is_not_ours(self) -> bool:
        """Whatever was asked, the answer would have been the same."""
        return self.kind in ("busy", "unreachable")


class ServerGone(Exception):
    """No further question makes sense."""


@dataclass
class Answer:
    message: Message
    tokens: int
    """Generated, as the server counts; 0 if it does not."""


class Server:
    """Asks for answers. An async context manager; any number of `ask`s may run at once.

    options: the command's flags. api_key: sent as a bearer token and never shown. first_pause_s: before the first
    retry; it doubles with each.
    """

    def __init__(self, options, api_key: str | None = None, first_pause_s: float = 1.0):
        import httpx2

        self._http, self._options, self._key, self._first_pause_s = httpx2, options, api_key, first_pause_s
        self.url = options.target_server.rstrip("/") + "/chat/completions"
        # A connection a request: servers reset kept ones after an error, and a balancer spreads new ones.
        headers = {"Connection": "close"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        host = httpx2.URL(self.url).host
        self._client = httpx2.AsyncClient(
            headers=headers,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx2.Timeout(None, connect=min(30.0, options.timeout_s)),  # the whole is timed in `_once`
            trust_env=not (host == "localhost" or host.startswith("127.") or host == "::1"),  # no proxy to oneself
        )
        self._not_before = 0.0  # until then a Retry-After keeps everybody waiting
        self.responses = 0

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.aclose()

    async def ask(self, messages: list[Message], tools: list[dict] | None, seed: int | None = None) -> Answer:
        """Raises Refusal, Trouble when it has lasted through all retries, ServerGone where more questions are vain."""
        body = json.dumps(self._body(messages, tools, seed), ensure_ascii=False, allow_nan=False).encode()
        attempt, responses = 0, self.responses
        while True:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            try:
                answer = await self._once(body, bool(tools))
                self.responses += 1
                return answer
            except Refusal:
                self.responses += 1
                raise
            except Trouble as trouble:
                if trouble.is_not_ours and self.responses != responses:  # others get answers: it is our turn soon
                    attempt, responses = 0, self.responses
                if trouble.retry_after_s > _LONGEST_RETRY_AFTER_S:
                    raise ServerGone(f"{trouble} It asks to wait {trouble.retry_after_s:.0f} s.") from trouble
                if attempt >= self._options.max_retries:
                    if trouble.is_not_ours:
                        raise ServerGone(f"{trouble} It did so {attempt + 1} times.") from trouble
                    raise
                pause = min(self._first_pause_s * 2**attempt, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
                if trouble.retry_after_s:
                    self._not_before = max(self._not_before, time.monotonic() + trouble.retry_after_s)
                    pause = trouble.retry_after_s * random.uniform(1.0, 1.1)
                attempt += 1
                await asyncio.sleep(pause)

    def _body(self, messages: list[Message], tools: list[dict] | None, seed: int | None) -> dict[str, Any]:
        options = self._options
        body = {
            "model": options.model,
            "messages": [{key: message[key] for key in SENT if key in message} for message in messages],
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
        }
        if options.top_k > 0:  # not OpenAI's: some servers refuse the very name
            body["top_k"] = options.top_k
        if seed is not None:
            body["seed"] = seed
        if tools:
            body["tools"] = tools
        if options.reasoning == "disable":
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body | options.extra_body

    async def _once(self, body: bytes, tools_offered: bool) -> Answer:
        http = self._http
        try:
            async with asyncio.timeout(self._options.timeout_s):
                response = await self._client.post(
                    self.url, content=body, headers={"Content-Type": "application/json"}
                )
        except (http.ConnectError, http.ConnectTimeout, http.ProxyError) as error:
            raise Trouble("unreachable", f"{self.url} cannot be reached ({_name(error)}).") from error
        except (TimeoutError, http.TimeoutException) as error:
            raise Trouble("timeout", f"No answer within --timeout-s {self._options.timeout_s:g}.") from error
        except http.HTTPError as error:
            raise Trouble("server", f"The connection broke ({_name(error)}).") from error
        status = response.status_code
        if status == 200:
            return read_answer(response.content, self._options, tools_offered)
        told = f"The server answers {status}: {self._words(response)}"
        if status in _WRONG_FOR_ALL:
            raise ServerGone(f"{told} Correct {_WRONG_FOR_ALL[status]} ({self.url}).")
        if status in _BUSY:
            raise Trouble("busy", told, retry_after_s(response.headers.get("Retry-After")))
        if status >= 500:
            raise Trouble("server", told)
        raise Refusal("refused", told)

    def _words(self, response) -> str:
        """What the server says about an error, shortened, without the key."""
        text = response.text.strip()
        try:
            told = json.loads(text)
            found = told.get("error", told.get("detail", told.get("message", text))) if isinstance(told, dict) else text
            text = found.get("message", text) if isinstance(found, dict) else found
        except (ValueError, RecursionError):
            pass
        text = " ".join(str(text).split()).encode("utf-8", "replace").decode()
        if self._key:
            text = text.replace(self._key, "***")
        return (text if len(text) <= 300 else text[:297] + "...") or "(no words)"


def read_answer(content: bytes, options, tools_offered: bool) -> Answer:
    """The answer in a response's body. Raises Refusal for one that is cut off, empty or filtered, Trouble for a body
    that holds none."""
    try:
        payload = json.loads(content)
        choice = payload["choices"][0]
        found, ended = choice["message"], choice.get("finish_reason")
        text = found.get("content")
        if not isinstance(text, str | None):
            raise TypeError("its content is no text")
        calls = tool_calls(found["tool_calls"], "the answer") if tools_offered and found.get("tool_calls") else []
        usage = payload.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
        thought = found.get("reasoning_content", found.get("reasoning"))  # the newer name
        check_characters(text or "", "the answer")
        check_characters(thought if isinstance(thought, str) else "", "the reasoning")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise Trouble("malformed", f"The server's answer is not a chat completion ({_name(error)}).") from error
    if ended == "length":
        raise Refusal("truncated", f"Cut off at --max-new-tokens {options.max_new_tokens}, or at the model's limit.")
    if ended == "content_filter":
        raise Refusal("filtered", "The server's content filter stopped the answer.")
    if ended not in _COMPLETE:
        raise Trouble("malformed", f"The answer does not say that it is complete (finish_reason {ended!r}).")
    if not calls and not (text or "").strip():
        raise Refusal("empty", "The answer is empty.")
    message: Message = {"role": "assistant", "content": text or ""}
    if options.reasoning == "save" and isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return Answer(message, tokens if isinstance(tokens, int) and tokens > 0 else 0)


def retry_after_s(value: str | None) -> float:
    """Seconds from now, of a number or a date; 0 for anything else."""
    try:
        return max(0.0, float(value)) if float(value) < float("inf") else 0.0
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _name(error: BaseException) -> str:
    """What went wrong, in a few words; some errors of httpx have none of their own."""
    return " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())[:200]
