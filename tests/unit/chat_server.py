"""A chat completion server that answers, refuses, stalls and dies as a test wants."""

import asyncio
import contextlib
import json
import threading
from collections import Counter


def completion(content="fine", finish_reason="stop", **message):
    """(status, headers, body) of a good answer."""
    message = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return 200, {}, {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 3}}


def failure(status, text="no", **headers):
    return status, headers, {"error": {"message": text}}


def last(body):
    """Text of the last message of a request."""
    return body["messages"][-1]["content"]


def echo(body):
    return completion(f"{len(body['messages'])}: {last(body)}")


class ChatServer:
    """with ChatServer(answer) as server: ... server.url. It listens in a thread of its own.

    answer(body) -> (status, headers, body), or None to break the connection; it may be a coroutine. `bodies`: requests
    in the order of their arrival; `headers`: of the last one; `most`: requests that were there at once.
    """

    def __init__(self, answer=echo):
        self.answer = answer
        self.bodies, self.headers, self.paths, self.now, self.most = [], {}, [], 0, 0

    def __enter__(self):
        started = threading.Event()

        async def serve():
            self._stopped = asyncio.Event()
            self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
            self.port = self._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}/v1"
            started.set()
            await self._stopped.wait()
            self._server.close()

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[serve()], daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    def die(self):
        """No more connections, from within `answer` (the ones that are open end as it says)."""
        self._server.close()

    def asked(self) -> Counter:
        """How often each last message came."""
        return Counter(map(last, self.bodies))

    async def _connection(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = (line.split(": ", 1) for line in head[1:] if line)
            self.headers = {name.lower(): value for name, value in fields}
            self.paths.append(head[0].split()[1])
            body = json.loads(await reader.readexactly(int(self.headers["content-length"])))
            self.bodies.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                found = self.answer(body)
                found = await found if asyncio.iscoroutine(found) else found
            finally:
                self.now -= 1
            if found is not None:
                status, headers, payload = found
                payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                headers = {"Content-Length": len(payload), "Connection": "close", **headers}
                lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):  # the other side was killed
            pass
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()
