"""A run of tools/regenerate.py in this process, on chat data of 23 lines."""

import os

import pytest

pytest.importorskip("httpx2")

from megatron_dllm.regeneration import client, command
from tests.regeneration.cases import say, write_jsonl


@pytest.fixture
def chats(tmp_path):
    """23 conversations of one question each."""
    return write_jsonl(
        tmp_path / "chat.jsonl", [{"messages": [say("user", f"q{i}"), say("assistant")]} for i in range(23)]
    )


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    own = client.Server.__init__
    monkeypatch.setattr(client.Server, "__init__", lambda self, *args: own(self, *args, first_pause_s=0.01))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here cuts the power
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def regenerate(tmp_path, chats):
    """Runs the tool, in this process; its exit code."""

    def run(server, *flags, data=chats, output="out"):
        url = server if isinstance(server, str) else server.url
        data = data if isinstance(data, list) else [data]
        argv = ["--input-data", *data, "--output-dir", tmp_path / output, "--target-server", url, "--model", "m"]
        return command.main([*map(str, argv), "--shard-size", "5", *flags])

    return run
