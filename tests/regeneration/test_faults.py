"""tools/regenerate.py against a server with faults: every answer once, whatever dies when."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("httpx2")

from megatron_dllm.regeneration.client import retry_after_s
from tests.regeneration.cases import (
    ALL,
    ROOT,
    answers,
    chat,
    contents,
    failures,
    reports,
    rows,
    say,
)
from tests.unit.chat_server import ChatServer, completion, echo, failure, last

# --- faults ----------------------------------------------------------------------------------------------------------


def test_what_is_of_no_use_is_dropped_and_counted(regenerate, tmp_path, capsys):
    odd = {
        "q1": completion("so it goes", "length"),
        "q2": completion(""),
        "q3": completion(None),
        "q4": completion(" \n"),
        "q6": completion("I", "content_filter"),
        "q7": failure(400, "prompt too long"),
        "q8": failure(422, "no such field"),
        "q9": failure(408, "too slow"),
    }
    with ChatServer(lambda body: odd.get(last(body)) or echo(body)) as server:
        assert regenerate(server) == 0
        assert set(server.asked().values()) == {1}  # none is asked again
        out = tmp_path / "out"
        told = capsys.readouterr()
        assert "15 answered, 8 failed (3 empty, 1 filtered, 3 refused, 1 truncated)" in told.out
        assert re.search(r"23/23 .*[\d.]+rows/s, 8 failed, \d+ tokens/s", told.err)
        assert answers(out) == {i: text for i, text in ALL.items() if f"q{i}" not in odd}
        assert failures(out) == {
            1: "truncated", 2: "empty", 3: "empty", 4: "empty", 6: "filtered", 7: "refused", 8: "refused", 9: "refused"
        }  # fmt: skip
        (failed,) = [f for report in reports(out) for f in report["failed"] if f["index"] == 7]
        assert failed["where"].endswith("chat.jsonl, line 8") and failed["message"] == 1
        assert failed["reason"] == "The server answers 400: prompt too long"

        before = contents(out)
        assert regenerate(server, "--resume") == 0 and len(server.bodies) == 23  # failures stay, unless
        assert contents(out) == before
        odd.pop("q2")
        odd.pop("q7")
        assert regenerate(server, "--resume", "--retry-failed") == 0
        assert len(server.bodies) == 31 and "17 answered, 6 failed" in capsys.readouterr().out
        assert list(answers(out)) == [i for i in range(23) if f"q{i}" not in odd]
        odd.clear()
        assert regenerate(server, "--resume", "--retry-failed") == 0
        assert regenerate(server, output="fresh") == 0
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize(
    "fault",
    [
        failure(500),
        failure(503),
        (200, {}, b'{"choices": [{"mess'),
        (200, {}, {"choices": []}),
        (200, {}, {"error": "overloaded"}),
        (200, {}, [1]),
        completion("half an ans", "abort"),
        completion("a", None),
        completion("\ud800"),
        completion(["a"]),
        None,
    ],
    ids=lambda fault: str(fault and (fault[0], fault[2]))[:60],
)
def test_what_may_pass_is_asked_again(regenerate, tmp_path, fault):
    def once(body):
        return fault if server.asked()[last(body)] == 1 and last(body) in ("q3", "q9") else echo(body)

    with ChatServer(once) as server:
        assert regenerate(server, "--max-retries", "1") == 0
    assert server.asked()["q3"] == 2 and server.asked()["q4"] == 1
    assert answers(tmp_path / "out") == ALL


def test_what_does_not_pass_is_recorded(regenerate, tmp_path):
    async def answer(body):
        if last(body) == "q5":
            await asyncio.sleep(5)
        return {"q3": failure(500, "out of memory"), "q4": (200, {}, b"<html>"), "q6": None}.get(last(body), echo(body))

    with ChatServer(answer) as server:
        assert regenerate(server, "--max-retries", "1", "--timeout-s", "1", "--concurrency", "4") == 0
    assert [server.asked()[f"q{i}"] for i in (2, 3, 4, 5, 6)] == [1, 2, 2, 2, 2]
    assert failures(tmp_path / "out") == {3: "server", 4: "malformed", 5: "timeout", 6: "server"}


def test_retry_after_holds_everybody(regenerate, tmp_path):
    limited = []

    def answer(body):
        if last(body) == "q3" and not limited:
            limited.append(time.monotonic())
            return failure(429, "slow down", **{"Retry-After": "0.4"})
        if limited and time.monotonic() < limited[0] + 0.35 and server.answered_late > 2:
            return failure(429, "I said so", **{"Retry-After": "0.4"})
        server.answered_late += bool(limited)
        return echo(body)

    with ChatServer(answer) as server:
        server.answered_late = 0
        start = time.monotonic()
        assert regenerate(server, "--concurrency", "2", "--max-retries", "1") == 0
    assert time.monotonic() - start > 0.4 and len(server.bodies) == 24
    assert answers(tmp_path / "out") == ALL


def test_retry_after_is_seconds_or_a_date():
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 98 < retry_after_s(date) < 101
    texts = ["7", "1.5", "-1", "inf", "nan", "soon", "", None, "Fri, 01 Jan 1999 00:00:00 GMT"]
    assert [retry_after_s(text) for text in texts] == [7, 1.5, 0, 0, 0, 0, 0, 0, 0]


def test_interrupted(regenerate, tmp_path, capsys):
    def answer(body):
        if len(server.bodies) == 12:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return echo(body)

    with ChatServer(answer) as server:
        assert regenerate(server, "--concurrency", "1") == 130
        assert "interrupted" in capsys.readouterr().err and len(reports(tmp_path / "out")) == 2
        assert regenerate(server, "--resume") == 0
        assert server.asked().total() == 24 and answers(tmp_path / "out") == ALL


def test_a_busy_server_is_no_fault_of_the_conversation(regenerate, tmp_path, capsys):
    """With others being answered a request waits as long as it takes; with none, the run ends."""
    turns = iter(range(10**6))
    with ChatServer(lambda body: echo(body) if next(turns) % 4 == 0 else failure(429)) as server:
        assert regenerate(server, "--concurrency", "8", "--max-retries", "3") == 0
    assert answers(tmp_path / "out") == ALL
    with ChatServer(lambda body: failure(429, "quota used up")) as server:
        assert regenerate(server, "--max-retries", "1", output="none") == 1
    assert "quota used up" in capsys.readouterr().err and contents(tmp_path / "none") == {}
    with ChatServer(lambda body: failure(429, **{"Retry-After": "86400"})) as server:
        assert regenerate(server, output="none") == 1
    assert "wait 86400 s" in capsys.readouterr().err


def test_a_server_that_dies_half_way(regenerate, tmp_path, capsys):
    def dying(body):
        if len(server.bodies) > 11:
            server.die()
            return None
        return echo(body)

    out = tmp_path / "out"
    with ChatServer(dying) as server:
        assert regenerate(server, "--concurrency", "4", "--max-retries", "1") == 1
        assert regenerate(server, "--resume", "--max-retries", "1") == 1  # still dead
    error = capsys.readouterr().err
    assert "cannot be reached" in error and "--resume" in error and "Traceback" not in error
    assert failures(out) == {} and not list(out.glob("*.partial*"))
    with ChatServer() as server:  # on another port
        assert regenerate(server, "--resume") == 0
        assert 23 - 11 <= len(server.bodies) <= 23 - 7  # at most the four that were on their way
        assert regenerate(server, output="fresh") == 0
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("status", [401, 402, 404, 405])
def test_what_is_wrong_for_all_ends_the_run(regenerate, tmp_path, capsys, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with ChatServer(lambda body: failure(status, "not with sk-secret")) as server:
        assert regenerate(server, "--concurrency", "1") == 1
        assert len(server.bodies) == 1
    error = capsys.readouterr().err
    assert f"answers {status}: not with ***" in error and "sk-secret" not in error
    assert contents(tmp_path / "out") == {}  # so that a run with the right flags can begin


def test_a_server_that_refuses_everything(regenerate, tmp_path, capsys):
    with ChatServer(lambda body: failure(422, "Unexpected fields: top_k")) as server:
        assert regenerate(server, "--top-k", "5", "--stop-after", "7", "--concurrency", "1") == 1
        assert len(server.bodies) == 7 and "Unexpected fields: top_k" in capsys.readouterr().err
        assert regenerate(server, "--top-k", "5") == 1 and len(server.bodies) == 30
        assert contents(tmp_path / "out") == {}
        assert regenerate(server, "--top-k", "5", "--stop-after", "0") == 0
    assert len(failures(tmp_path / "out")) == 23 and not list((tmp_path / "out").glob("*.parquet"))


def test_failures_in_a_row_between_answers_are_recorded(regenerate, tmp_path):
    bad = [f"q{i}" for i in (*range(5, 11), *range(18, 23))]
    with ChatServer(lambda body: failure(400) if last(body) in bad else echo(body)) as server:
        assert regenerate(server, "--stop-after", "6", "--concurrency", "1") == 1
        assert reports(tmp_path / "out") == [{"answered": 5, "skipped": 0, "failed": []}]
        assert regenerate(server, "--resume", "--stop-after", "7", "--concurrency", "1") == 0
    assert [f"q{i}" for i in failures(tmp_path / "out")] == bad


# --- killed ----------------------------------------------------------------------------------------------------------


def test_kill_9_at_any_moment(regenerate, tmp_path, chats):
    """The tool itself, killed twice with requests on their way, in the middle of shards."""

    async def answer(body):
        number = len(server.bodies)
        await asyncio.sleep(0.01)
        if number == moment:
            process.kill()
        return echo(body)

    out = tmp_path / "out"
    command_line = [sys.executable, str(ROOT / "tools/regenerate.py"), "--input-data", str(chats), "--model", "m"]
    command_line += ["--output-dir", str(out), "--shard-size", "5", "--concurrency", "3", "--resume"]
    with ChatServer(answer) as server:
        for moment in (7, 17):
            process = subprocess.Popen([*command_line, "--target-server", server.url], cwd=ROOT)
            assert process.wait(60) == -signal.SIGKILL
            decided = len(rows(out)) + sum(path.read_bytes().count(b"\n") for path in out.glob("journal-*"))
            assert moment - 7 <= decided < moment
    with (tmp_path / "out" / "journal-000004.jsonl").open("ab") as journal:
        journal.write(b'{"index": 22, "mess')  # as if killed in the middle of a line
    with ChatServer() as server:
        assert regenerate(server, "--resume") == 0
        assert set(server.asked().values()) == {1} and len(server.bodies) == 23 - decided
        assert regenerate(server, output="fresh") == 0
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("retried", [False, True])
def test_killed_between_any_two_changes_of_the_disk(regenerate, tmp_path, chats, monkeypatch, retried):
    """The run is stopped dead before its n-th change of a file, for every n, and goes on."""
    chats.write_text("".join(chats.read_text().splitlines(keepends=True)[:12]))
    bad = ["q2", "q6"]
    states = []

    class Killed(BaseException):
        pass

    # what dies here is not a process, so that its locks would remain
    monkeypatch.setattr("megatron_dllm.regeneration.shards.fcntl.flock", lambda *_: None)

    def limit(name):
        own = getattr(os, name)

        def changed(*args, **kwargs):
            if str(tmp_path) in str(args[0]):
                states.append(name)
                if len(states) > allowed:
                    raise Killed
            return own(*args, **kwargs)

        monkeypatch.setattr(os, name, changed)

    def answer(body):
        return completion("") if last(body) in bad else echo(body)

    with ChatServer(answer) as server:
        allowed = 10**6
        assert regenerate(server, output="start") == 0
        wanted = tmp_path / "wanted"
        assert regenerate(server, output="wanted") == 0
        if retried:
            bad.clear()
            assert regenerate(server, "--resume", "--retry-failed", output="wanted") == 0
        for name in ("replace", "remove", "link"):
            limit(name)
        for allowed in range(30):
            states.clear()
            out = tmp_path / f"out{allowed}"
            out.mkdir()
            if retried:
                for name, content in contents(tmp_path / "start").items():
                    (out / name).write_bytes(content)
            try:
                regenerate(server, "--concurrency", "2", "--resume", "--retry-failed", output=out.name)
                complete = True
            except Killed:
                complete = False
            stopped, states[:], allowed = allowed, [], 10**6
            server.bodies.clear()
            assert regenerate(server, "--resume", "--retry-failed", output=out.name) == 0
            assert contents(out) == contents(wanted), f"killed before change {stopped + 1}"
            if complete:
                break
    assert complete and stopped > 3


def test_two_processes_do_not_make_the_same_shard(regenerate, tmp_path, capsys):
    inner = []

    async def answer(body):
        if last(body) == "q0" and not inner:
            inner.append(None)
            inner[0] = await asyncio.to_thread(regenerate, server, "--resume", "--num-workers-shard", "0/2")
        return echo(body)

    with ChatServer(answer) as server:
        assert regenerate(server) == 0
    assert inner == [1] and "Another process works on" in capsys.readouterr().err
    assert answers(tmp_path / "out") == ALL and set(server.asked().values()) == {1}


# --- refused before anything is written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--concurrency 0", "--concurrency 0 must be"),
        ("--concurrency 100000000", "open files"),
        ("--shard-size 0", "--shard-size 0 must be"),
        ("--max-new-tokens 0", "--max-new-tokens 0 must be"),
        ("--max-retries -1", "--max-retries -1 must be"),
        ("--timeout-s 0", "--timeout-s 0 must be"),
        ("--timeout-s nan", "--timeout-s nan must be"),
        ("--temperature -1", "--temperature -1"),
        ("--top-p 0", "--top-p 0 must be"),
        ("--retry-failed", "give --resume too"),
        ('--reasoning disable --extra-body {"chat_template_kwargs":{}}', "leave one away"),
        ("--target-server localhost:30000", "must be like http://"),
        ("--target-server http://me:secret@localhost/v1", "holds a password"),
        ("--num-workers-shard 2/2", "'2/2' is no part"),
        ("--extra-body [1]", "is not a JSON object"),
        ("--output-dir /proc/out", "--output-dir /proc/out is not a folder that can be written to"),
        ("--input-data /", "/ is a folder, and chat data are files: name those in it."),
        ("--extra-body {", "is not JSON"),
        ('--extra-body {"model":"x"}', "model cannot be given here"),
    ],
)
def test_bad_flags(regenerate, tmp_path, capsys, flags, message):
    with ChatServer() as server:
        try:
            assert regenerate(server, *flags.split()) == 2
        except SystemExit as error:
            assert error.code == 2
    error = capsys.readouterr().err
    assert message in error and "secret" not in error and server.bodies == []
    assert [path.name for path in tmp_path.iterdir()] == ["chat.jsonl"]


CALLS = [say("user"), say("assistant", tool_calls=[{"name": "f"}]), say("user")]


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "bad.jsonl does not exist"),
        ('{"messages": \n', "bad.jsonl, line 1: it is not valid JSON"),
        ('{"text": "x"}', 'line 1: it must be a JSON object with the key "messages"'),
        ('{"messages": [{"role": "user"}]}', "line 1: The content of message 0 must be a string"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "has a user turn"),
        (json.dumps({"messages": chat("user"), "tools": "f("}), 'line 1: "tools" is text that is not JSON'),
        (json.dumps({"messages": chat("user"), "tools": [1]}), 'line 1: "tools" must be a list of objects'),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": NaN}]}', 'line 1: JSON cannot hold "tools"'),
        (json.dumps({"messages": CALLS}), "line 1: The tool_calls of message 1 must be a list"),
        ('{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}]}', "half of a character"),
        (json.dumps({"messages": chat("user"), "id": float("nan")}), "JSON cannot hold"),
    ],
)
def test_bad_input(regenerate, tmp_path, capsys, content, message):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with ChatServer() as server:
        assert regenerate(server, data=path) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and server.bodies == []
    assert not (tmp_path / "out").exists()


def test_an_output_folder_of_another_run(regenerate, tmp_path, capsys, chats):
    with ChatServer() as server:
        assert regenerate(server) == 0
        before = contents(tmp_path / "out")
        for flags, message in {
            "": "go on with --resume",
            "--resume --temperature 1": "temperature 0.0, now 1.0",
            "--resume --shard-size 6": "shard_size 5, now 6",
            "--resume --model n": "model 'm', now 'n'",
        }.items():
            assert regenerate(server, *flags.split()) == 2
            assert message in capsys.readouterr().err
        moved = chats.rename(tmp_path / "moved.jsonl")
        assert regenerate(server, "--resume", "--concurrency", "3", data=moved) == 0  # what is asked is the same
        moved.write_text(moved.read_text() + json.dumps({"messages": chat("user")}) + "\n")
        assert regenerate(server, "--resume", data=moved) == 2
        assert "the input's content; rows 23, now 24" in capsys.readouterr().err
        assert contents(tmp_path / "out") == before and len(server.bodies) == 23
        (tmp_path / "out" / "shard-000001.parquet").unlink()
        moved.write_text("\n".join(moved.read_text().splitlines()[:-1]) + "\n")
        assert regenerate(server, "--resume", data=moved) == 2
        assert "shard-000001.json tells of answers" in capsys.readouterr().err
        (tmp_path / "out" / "shard-000001.json").unlink()
        assert regenerate(server, "--resume", data=moved) == 0 and contents(tmp_path / "out") == before
        (tmp_path / "out" / "manifest.json").unlink()
        assert regenerate(server, "--resume", data=moved) == 2
    assert "shards but no manifest.json" in capsys.readouterr().err


def test_a_folder_of_something_else(regenerate, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with ChatServer() as server:
        for flags in ([], ["--resume"]):
            assert regenerate(server, *flags, output="model") == 2
            assert "model holds something else (config.json): choose an empty or a new" in capsys.readouterr().err
        assert server.bodies == [] and [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
        (tmp_path / "model/config.json").rename(tmp_path / "model/.hidden")
        assert regenerate(server, output="model") == 0
        (tmp_path / "model/notes.txt").write_text("mine")  # beside shards that are ours
        assert regenerate(server, "--resume", output="model") == 0


def test_a_key_that_is_not_there(regenerate, monkeypatch, capsys):
    with ChatServer() as server:
        for value in (None, " "):
            monkeypatch.delenv("MY_KEY", raising=False) if value is None else monkeypatch.setenv("MY_KEY", value)
            assert regenerate(server, "--api-key-variable", "MY_KEY") == 2
            assert "--api-key-variable MY_KEY is not set or empty" in capsys.readouterr().err
    assert server.bodies == []
