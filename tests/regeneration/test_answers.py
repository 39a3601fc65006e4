"""tools/regenerate.py against a server: what is asked for and what comes out."""

import asyncio
import json

import pyarrow
import pytest
from pyarrow import parquet

pytest.importorskip("httpx2")

from megatron_dllm.data.chat_files import Parquet
from megatron_dllm.data.messages import check_messages
from megatron_dllm.regeneration import command
from megatron_dllm.regeneration.conversations import normal, plan, prompt_of
from megatron_dllm.regeneration.loop import seed_of
from megatron_dllm.regeneration.manifest import manifest
from tests.regeneration.cases import (
    ALL,
    DEFAULTS,
    PROMPTS,
    answers,
    chat,
    contents,
    reports,
    rows,
    say,
    write_jsonl,
)
from tests.unit.chat_server import ChatServer, completion, echo, last

# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: "-".join(case["messages"]) or "nothing")
def test_prompts_are_the_published_ones(case):
    found = prompt_of(chat(*case["messages"]))
    assert (found and [message["role"] for message in found]) == case["prompt"]
    assert plan(chat(*case["messages"])) == (found and [*found, None])


def test_defaults_and_manifest_are_the_published_ones():
    options = command.parser().parse_args("--input-data d --output-dir o --model m".split())
    ours, published = vars(options), DEFAULTS["defaults"] | {"input_data": ["d"]}
    # data sets are files here, with no splits of a hub's; there is nothing to log
    assert published.keys() - ours.keys() == {"split", "dataset_name", "log_level"}
    assert {name: ours[name] for name in published.keys() & ours.keys()} == {
        name: published[name] for name in published.keys() & ours.keys()
    }
    made = manifest(options, ["digest"], 7)
    # the input is known by what is in it, and the server may move
    missing = {"input_data", "target_server", "split", "dataset_name"}
    assert DEFAULTS["manifest"].keys() - made.keys() == missing
    assert {key: made[key] for key in DEFAULTS["manifest"].keys() - missing} == {
        key: value for key, value in DEFAULTS["manifest"].items() if key not in missing
    }


@pytest.mark.parametrize(
    "roles, expected",
    [
        ("user assistant user assistant", "user ANSWER user ANSWER"),
        ("system user assistant assistant user", "system user ANSWER user ANSWER"),
        ("assistant user assistant", "assistant user ANSWER"),
        ("user assistant tool assistant", "user assistant tool ANSWER"),
        ("user assistant tool", "user assistant tool ANSWER"),
        ("assistant", None),
    ],
)
def test_all_turns(roles, expected):
    found = plan(chat(*roles.split()), "all")
    assert (found and " ".join("ANSWER" if m is None else m["role"] for m in found)) == expected


def test_every_turn_is_answered_on_top_of_the_new_answers(regenerate, tmp_path):
    talk = chat("system", "user", "assistant", "user", "assistant")
    data = write_jsonl(tmp_path / "talk.jsonl", [{"messages": talk}])
    with ChatServer(lambda body: completion(f"after {last(body)}")) as server:
        assert regenerate(server, "--turns", "all", data=data) == 0
    (row,) = rows(tmp_path / "out")
    assert [m["content"] for m in row["messages"]] == ["system 0", "user 1", "after user 1", "user 3", "after user 3"]
    assert row["original_messages"] == talk
    assert server.bodies[1]["messages"] == row["messages"][:4]


def test_the_request(regenerate, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    flags = "--max-new-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 4 --seed 3 --reasoning disable"
    with ChatServer() as server:
        assert regenerate(server, *flags.split(), "--extra-body", '{"min_p": 0.1}', "--api-key-variable", "MY_KEY") == 0
        body = next(body for body in server.bodies if last(body) == "q2")
        assert body == dict(
            model="m",
            messages=[say("user", "q2")],
            max_tokens=7,
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            seed=seed_of(3, 2, 1),
            chat_template_kwargs={"enable_thinking": False},
            min_p=0.1,
        )
        assert server.headers["authorization"] == "Bearer sk-secret"
        assert set(server.paths) == {"/v1/chat/completions"}
        assert regenerate(server, output="plain") == 0
        assert server.bodies[-1].keys() == {"model", "messages", "max_tokens", "temperature", "top_p"}
        assert "authorization" not in server.headers
    assert len({seed_of(3, row, place) for row in range(50) for place in (1, 3)}) == 100
    assert "sk-secret" not in "".join(capsys.readouterr())


# --- what comes out --------------------------------------------------------------------------------------------------


def test_shards_are_chat_data(regenerate, tmp_path, capsys):
    with ChatServer() as server:
        assert regenerate(server) == 0
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json",
        *sorted(f"shard-{i:06d}.{kind}" for i in range(5) for kind in ("json", "parquet")),
    ]
    assert list(answers(out).items()) == list(ALL.items())
    assert "23 answered, 0 failed; 5 shards" in capsys.readouterr().out
    shard = Parquet(str(out / "shard-000001.parquet"), check_messages)
    assert shard.messages(0) == [say("user", "q5"), say("assistant", "1: q5")]


def test_same_bytes_whatever_the_concurrency(regenerate, tmp_path):
    async def late(body):
        await asyncio.sleep(0.002 * (int(last(body)[1:]) * 7 % 5))
        return echo(body)

    with ChatServer(late) as server:
        for output, flags in {"a": "1", "b": "23"}.items():
            assert regenerate(server, "--concurrency", flags, output=output) == 0
        for part in "201":
            assert regenerate(server, "--num-workers-shard", f"{part}/3", output="c") == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_concurrency_is_what_was_asked_for(regenerate, tmp_path):
    data = write_jsonl(tmp_path / "many.jsonl", [{"messages": [say("user", f"q{i}")]} for i in range(300)])
    everybody = None

    async def together(body):  # nobody is answered before all have asked
        nonlocal everybody
        everybody = everybody or asyncio.Barrier(150)
        async with asyncio.timeout(60):
            await everybody.wait()
        return echo(body)

    with ChatServer(together) as server:
        assert regenerate(server, "--concurrency", "150", data=data) == 0
    assert server.most == 150 and len(rows(tmp_path / "out")) == 300


def test_a_slow_answer_holds_up_no_other_shard(regenerate, tmp_path):
    async def slow(body):
        while last(body) == "q0" and len(server.bodies) < 23:
            await asyncio.sleep(0.005)
        return echo(body)

    with ChatServer(slow) as server:
        assert regenerate(server, "--concurrency", "2", "--timeout-s", "20") == 0
    assert answers(tmp_path / "out") == ALL


def test_columns_and_tools_are_kept(regenerate, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    talk = [say("user"), say("assistant", "", tool_calls=[call], weight=1), say("tool", "5", tool_call_id="1")]
    records = [
        {"messages": [*talk, say("assistant")], "tools": tools, "id": 7, "tags": ["a"], "score": 1, "index": 3},
        {"messages": chat("user"), "tools": json.dumps(tools), "id": 8, "tags": {"b": 1}, "score": 0.5},
        {"messages": chat("user"), "tools": None, "id": None},
    ]
    data = write_jsonl(tmp_path / "tools.jsonl", records)
    new = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a": 2}'}}

    def answer(body):
        return completion(None, "tool_calls", tool_calls=[new]) if "tools" in body else echo(body)

    with ChatServer(answer) as server:
        assert regenerate(server, "--concurrency", "1", "--reasoning", "save", data=data) == 0
        assert [body.get("tools") for body in server.bodies] == [tools, tools, None]
        called = call | {"function": {"name": "f", "arguments": '{"a": null}'}}
        assert server.bodies[0]["messages"][1] == say("assistant", "", tool_calls=[called])
        found = rows(tmp_path / "out")
        assert [row["index"] for row in found] == [0, 1, 2]
        assert [row["id"] for row in found] == [7, 8, None] and [row["score"] for row in found] == [1.0, 0.5, None]
        assert [row["tags"] for row in found] == ['["a"]', '{"b": 1}', None]
        assert [row["tools"] and json.loads(row["tools"]) for row in found] == [tools, tools, None]
        assert normal(found[0]["messages"])[-1] == say("assistant", "", tool_calls=[new])
        assert normal(found[0]["original_messages"])[1] == say("assistant", "", tool_calls=[called], weight=1)
        # what comes out goes in again
        shard = tmp_path / "out" / "shard-000000.parquet"
        assert regenerate(server, "--concurrency", "1", data=shard, output="again") == 0
        assert [body.get("tools") for body in server.bodies[3:]] == [tools, tools, None]
    again = rows(tmp_path / "again")
    assert [row["messages"] for row in again] == [
        [{k: v for k, v in m.items() if k != "reasoning_content"} for m in row["messages"]] for row in found
    ]


def test_parquet_with_columns_that_json_has_no_word_for(regenerate, tmp_path, capsys):
    table = {"messages": [chat("user")], "image": [b"\xff"], "id": ["a"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with ChatServer() as server:
        assert regenerate(server, data=tmp_path / "a.parquet") == 0
    assert rows(tmp_path / "out")[0].keys() == {"index", "messages", "original_messages", "id"}
    assert "not kept: image" in capsys.readouterr().err


def test_reasoning(regenerate, tmp_path, chats):
    def answer(body):
        field = "reasoning" if last(body) == "q1" else "reasoning_content"
        return completion("fine", **{field: "hm"})

    with ChatServer(answer) as server:
        assert regenerate(server, "--reasoning", "save", output="saved") == 0
        assert regenerate(server, output="left") == 0
    assert {row["messages"][1]["reasoning_content"] for row in rows(tmp_path / "saved")} == {"hm"}
    assert rows(tmp_path / "left")[0]["messages"][1] == say("assistant", "fine")


def test_rows_without_a_user_turn_are_skipped(regenerate, tmp_path, capsys):
    kinds = ["user assistant", "assistant", "system", "user"] + ["assistant"] * 6
    data = write_jsonl(tmp_path / "some.jsonl", [{"messages": chat(*kind.split())} for kind in kinds])
    with ChatServer() as server:
        assert regenerate(server, data=data) == 0
    assert list(answers(tmp_path / "out")) == [0, 3]
    assert [report["skipped"] for report in reports(tmp_path / "out")] == [3, 5]
    assert not (tmp_path / "out" / "shard-000001.parquet").exists()  # a reader of chat data refuses an empty one
    assert "2 answered, 0 failed, 8 without a user turn; 2 shards" in capsys.readouterr().out


def test_several_files_are_one_input(regenerate, tmp_path, chats):
    first, second = tmp_path / "a.parquet", write_jsonl(tmp_path / "b.jsonl", [{"messages": chat("user")}] * 2)
    table = pyarrow.table({"messages": [[say("user", f"q{i}")] for i in range(7)], "id": list(range(7))})
    parquet.write_table(table, first, row_group_size=3)
    with ChatServer() as server:
        assert regenerate(server, "--concurrency", "4", data=[first, second]) == 0
    found = rows(tmp_path / "out")
    assert answers(tmp_path / "out") == {i: ALL[i] for i in range(7)} | {7: "1: user 0", 8: "1: user 0"}
    assert [row["id"] for row in found] == [*range(7), None, None]


def test_shuffled(regenerate, tmp_path):
    with ChatServer() as server:
        assert regenerate(server, "--shuffle-seed", "1") == 0
    found = answers(tmp_path / "out")
    assert found == ALL and list(found) != sorted(found)
