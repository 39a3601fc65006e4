"""The output: a parquet file for each range of rows, and what makes it survive being killed at any moment.

    journal-000003.jsonl    rows of shard 3 as they are decided, a line each; locked by the process that asks for them
    shard-000003.parquet    the answered rows in the input's order, once all rows are decided; none if there are none
    shard-000003.json       what became of the shard: counts, and the failed rows with their reasons. Written last,
                            it says that the shard is done; then the journal goes

Whatever is there when a process starts, a journal's rows count, and finishing a shard twice makes the same files. A
shard that is done and has a journal is one whose failed rows are asked for again: the journal's rows replace its own.
"""

import contextlib
import fcntl
import json
import os
from typing import Any

from megatron_dllm.regeneration.source import INDEX, INTEGER, MESSAGES, NUMBER, ORIGINAL, TRUTH, Source, encode

ANSWERED, FAILED = "messages", "failed"
"""Keys of a journal's line besides the index: the new conversation, or {"kind", "reason", ...}."""


class Shards:
    """All shards of an output folder.

    reasoning: answers may hold reasoning_content. Raises ValueError where files of the folder are damaged.
    """

    def __init__(self, folder: str, source: Source, size: int, reasoning: bool = False):
        self.folder, self.source, self.size, self.reasoning = folder, source, size, reasoning
        self._schema = _schema(source, reasoning)

    def __len__(self) -> int:
        return -(-len(self.source) // self.size)

    def rows(self, shard: int) -> list[int]:
        """Row numbers of the usable conversations, in the order of the output."""
        return [int(row) for row in self._range(shard) if self.source.usable[row]]

    def path(self, shard: int, kind: str) -> str:
        """kind: "journal", "parquet" or "report"."""
        name = {"journal": "journal-{:06d}.jsonl", "parquet": "shard-{:06d}.parquet", "report": "shard-{:06d}.json"}
        return os.path.join(self.folder, name[kind].format(shard))

    def begun(self, shard: int) -> bool:
        """Is anything decided? A journal may still be empty."""
        journal = self.path(shard, "journal")
        return (os.path.exists(journal) and os.path.getsize(journal) > 0) or any(
            os.path.exists(self.path(shard, kind)) for kind in ("report", "parquet")
        )

    def report(self, shard: int) -> dict[str, Any] | None:
        """None for a shard that is not done."""
        path = self.path(shard, "report")
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            report = {"answered": found["answered"], "skipped": found["skipped"], "failed": list(found["failed"])}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, and the shard is made anew.") from error
        if report["answered"] and not os.path.exists(self.path(shard, "parquet")):
            raise ValueError(f"{path} tells of answers whose .parquet is gone: remove it, and the shard is made anew.")
        return report

    def todo(self, shard: int, decided: set[int], retry_failed: bool) -> list[int]:
        """Rows to ask for. decided: those in the journal."""
        report = self.report(shard)
        if report is None:
            wanted = self.rows(shard)
        else:
            failed = {failure[INDEX] for failure in report["failed"]} if retry_failed else set()
            wanted = [row for row in self.rows(shard) if row in failed]
        return [row for row in wanted if row not in decided]

    def finish(self, shard: int) -> dict[str, Any]:
        """Makes the files of a shard whose rows are all decided; its report."""
        report, lines = self.report(shard), read_journal(self.path(shard, "journal"))
        failed = {} if report is None else {failure[INDEX]: failure for failure in report["failed"]}
        found = {} if report is None or not report["answered"] else self._read(shard)
        for line in lines:  # a later line counts
            row = line[INDEX]
            failed.pop(row, None)
            found.pop(row, None)
            if ANSWERED in line:
                found[row] = self._encoded(row, line[ANSWERED])
            else:
                failed[row] = {INDEX: row, "where": self.source.where(row), **line[FAILED]}
        rows = self.rows(shard)
        if found:
            self._write(shard, [found[row] for row in rows if row in found])
        report = {
            "answered": len(found),
            "skipped": len(self._range(shard)) - len(rows),
            "failed": [failed[row] for row in rows if row in failed],
        }
        with _partial(self.path(shard, "report")) as partial, open(partial, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path(shard, "journal"))
        return report

    def _range(self, shard: int):
        return self.source.order[shard * self.size : (shard + 1) * self.size]

    def _encoded(self, row: int, messages: list[dict]) -> dict[str, Any]:
        return {
            INDEX: row,
            MESSAGES: [self._encoded_message(message) for message in messages],
            ORIGINAL: [self._encoded_message(message) for message in self.source.messages(row)],
            **self.source.others(row),
        }

    def _encoded_message(self, message: dict) -> dict[str, Any]:
        kinds = self.source.fields
        return {key: encode(value, kinds[key], key) if key in kinds else value for key, value in message.items()}

    def _read(self, shard: int) -> dict[int, dict]:
        import pyarrow
        from pyarrow import parquet

        path = self.path(shard, "parquet")
        try:
            return {row[INDEX]: row for row in parquet.read_table(path, schema=self._schema).to_pylist()}
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it with its .json to make it anew.") from error

    def _write(self, shard: int, rows: list[dict]) -> None:
        import pyarrow
        from pyarrow import parquet

        with _partial(self.path(shard, "parquet")) as partial:
            parquet.write_table(pyarrow.Table.from_pylist(rows, schema=self._schema), partial)


class Journal:
    """Lines of one shard in progress. Locks the file: raises ValueError where another process has it.

    `decided`: rows that it holds already.
    """

    def __init__(self, path: str):
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115  (open as long as the shard is)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
                f"Another process works on {path}: wait for it, or give each its own --num-workers-shard."
            ) from error
        except OSError:  # a file system without locks
            pass
        self._file.truncate(_whole(path))  # a line that was being written when the process was killed
        self.decided = {line[INDEX] for line in read_journal(path)}

    def add(self, row: int, key: str, value: Any) -> None:
        """key: ANSWERED or FAILED. The line is the operating system's when this returns."""
        self._file.write(json.dumps({INDEX: row, key: value}).encode() + b"\n")
        self._file.flush()
        self.decided.add(row)

    def close(self) -> None:
        self._file.close()


def read_journal(path: str) -> list[dict]:
    """Its whole lines; none if there is no journal. Raises ValueError for lines that no run has written."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
            if not isinstance(found[-1][INDEX], int) or not {ANSWERED, FAILED} & found[-1].keys():
                raise ValueError("no row")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}, is damaged ({error}): remove the line.") from error
    return found


def _whole(path: str) -> int:
    """Bytes up to the end of the last whole line."""
    with open(path, "rb") as file:
        return file.read().rfind(b"\n") + 1


@contextlib.contextmanager
def _partial(path: str):
    """A name to write to, which becomes `path` when all is on disk."""
    partial = f"{path}.partial"  # the journal's lock makes its writer the only one
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)


def _schema(source: Source, reasoning: bool):
    """The same for all shards, so that they can be read as one data set."""
    import pyarrow as pa

    types = {INTEGER: pa.int64(), NUMBER: pa.float64(), TRUTH: pa.bool_()}
    of = lambda kind: types.get(kind, pa.string())
    fields = {"role": pa.string(), "content": pa.string()}
    fields |= {name: of(kind) for name, kind in sorted(source.fields.items())}
    if reasoning:
        fields["reasoning_content"] = pa.string()
    if source.calls_tools:
        function = pa.struct({"name": pa.string(), "arguments": pa.string()})
        fields["tool_calls"] = pa.list_(pa.struct({"id": pa.string(), "type": pa.string(), "function": function}))
    conversation = pa.list_(pa.struct(fields))
    others = {name: of(kind) for name, kind in sorted(source.columns.items())}
    return pa.schema({INDEX: pa.int64(), MESSAGES: conversation, ORIGINAL: conversation, **others})
