"""What the tests of tools/regenerate.py share: chat data, a run of the tool in this process, what it wrote."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet

pytest.importorskip("httpx2")


ROOT = Path(__file__).parents[2]
*PROMPTS, DEFAULTS = json.loads((ROOT / "tests/golden/24_regenerate.json").read_text())["cases"]


def say(role, content="x", **more):
    return {"role": role, "content": content, **more}


def chat(*roles):
    return [say(role, f"{role} {i}") for i, role in enumerate(roles)]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows(folder):
    """All rows in the order of the shards."""
    return [row for path in sorted(folder.glob("shard-*.parquet")) for row in parquet.read_table(path).to_pylist()]


def answers(folder):
    return {row["index"]: row["messages"][-1]["content"] for row in rows(folder)}


def reports(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("shard-*.json"))]


def failures(folder):
    return {failed["index"]: failed["kind"] for report in reports(folder) for failed in report["failed"]}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


ALL = {i: f"1: q{i}" for i in range(23)}
