"""Asks for every row that is not decided, many at once, and writes down what comes of it.

Requests of one shard do not wait for those of another: with a slow answer outstanding, the next shards are begun.
"""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence

from megatron_dllm.data.messages import Message
from megatron_dllm.regeneration.client import Refusal, Server, ServerGone, Trouble
from megatron_dllm.regeneration.conversations import plan
from megatron_dllm.regeneration.shards import ANSWERED, FAILED, Journal, Shards, read_journal


class Run:
    """One process's part of the work.

    shards: of the whole output. mine: numbers of those that this process makes. options: the command's flags. begin:
    called before the first thing is written. progress: called for each decided row with (rows done, failures so far,
    generated tokens so far).
    """

    def __init__(
        self,
        server: Server,
        shards: Shards,
        mine: Sequence[int],
        options,
        begin: Callable[[], None] = lambda: None,
        progress: Callable[[int, int, int], None] = lambda done, failed, tokens: None,
    ):
        self._server, self._shards, self._options = server, shards, options
        self._begin, self._progress = begin, progress
        self._mine = mine
        self._open: dict[int, tuple[Journal, set[int]]] = {}  # by shard, with the rows that it still waits for
        self._held: list[tuple[int, int, dict]] = []  # failures since the last answer
        self._answered_before = any(_has_answers(shards, shard) for shard in mine)
        self._begun = False
        self.answered = self.failed = self.tokens = 0

    async def __call__(self) -> None:
        """Returns when all shards are done. Raises ServerGone where that is not to be expected, and ValueError for an
        output folder that is in use or damaged; what is decided by then is kept."""
        rows = self._rows()
        tasks = [asyncio.create_task(self._work(rows)) for _ in range(self._options.concurrency)]
        try:
            await asyncio.gather(*tasks)
            if self._held and not self.answered and not self._answered_before and self._options.stop_after:
                raise ServerGone(self._told(f"None of the {len(self._held)} conversations was answered"))
            self._settle()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for journal, _ in self._open.values():
                if not journal.decided and os.path.getsize(journal.path) == 0:
                    os.remove(journal.path)
                journal.close()

    def _rows(self) -> Iterator[tuple[int, int]]:
        """(shard, row) of all that is to be asked for. Opens a shard's journal at its first row."""
        for shard in self._mine:
            journal_path, report = self._shards.path(shard, "journal"), self._shards.report(shard)
            wanted = report is None or (self._options.retry_failed and report["failed"])
            if not wanted and not os.path.exists(journal_path):
                continue
            journal = Journal(journal_path)
            todo = self._shards.todo(shard, journal.decided, self._options.retry_failed)
            self._open[shard] = journal, set(todo)
            if not todo:
                self._finish(shard)
            yield from ((shard, row) for row in todo)

    async def _work(self, rows: Iterator[tuple[int, int]]) -> None:
        for shard, row in rows:  # shared by all tasks: each takes the next
            try:
                messages = await self._converse(row)
            except Refusal as error:
                alive = error.kind != "refused"  # it did answer, only to no use
                self._fail(shard, row, error.kind, error, alive)
            except Trouble as error:
                self._fail(shard, row, error.kind, error, alive=False)
            else:
                self._settle()
                self.answered += 1
                self._record(shard, row, ANSWERED, messages)

    async def _converse(self, row: int) -> list[Message]:
        """The conversation with its new answers. A call of a tool whose result is not in the data ends it."""
        source = self._shards.source
        planned = plan(source.messages(row), self._options.turns) or []
        tools = source.tools(row)
        done: list[Message] = []
        sent: list[Message] = []
        for place, message in enumerate(planned):
            if message is None:
                try:
                    answer = await self._server.ask(sent, tools, seed_of(self._options.seed, row, place))
                except (Refusal, Trouble) as error:
                    error.place = place
                    raise
                self.tokens += answer.tokens
                done.append(answer.message)
                # as a template would show an earlier turn: without what led to it
                sent.append({key: value for key, value in answer.message.items() if key != "reasoning_content"})
                if "tool_calls" in answer.message:
                    break
            else:
                done.append(message)
                sent.append(message)
        return done

    def _fail(self, shard: int, row: int, kind: str, error: Exception, alive: bool) -> None:
        failure = {"kind": kind, "message": error.place, "reason": str(error)}
        self.failed += 1
        if alive:
            self._settle()
            self._record(shard, row, FAILED, failure)
            return
        self._held.append((shard, row, failure))
        if self._options.stop_after and len(self._held) >= self._options.stop_after:
            raise ServerGone(self._told(f"The last {len(self._held)} conversations all failed"))

    def _told(self, what: str) -> str:
        _, row, failure = self._held[-1]
        return (
            f"{what}, the last one ({self._shards.source.where(row)}) so: {failure['reason']} They are not recorded; "
            "--stop-after 0 would record them and go on."
        )

    def _settle(self) -> None:
        """The server does answer: the failures before were the conversations' own."""
        held, self._held = self._held, []
        for shard, row, failure in held:
            self._record(shard, row, FAILED, failure)

    def _record(self, shard: int, row: int, key: str, value) -> None:
        journal, waiting = self._open[shard]
        self._started()
        journal.add(row, key, value)
        waiting.remove(row)
        self._progress(self.answered + self.failed, self.failed, self.tokens)
        if not waiting:
            self._finish(shard)

    def _finish(self, shard: int) -> None:
        journal, _ = self._open.pop(shard)
        try:
            if journal.decided or self._shards.report(shard) is None:
                self._started()
                self._shards.finish(shard)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(journal.path)
        finally:
            journal.close()

    def _started(self) -> None:
        if not self._begun:
            self._begin()
            self._begun = True


def remaining(shards: Shards, mine: Sequence[int], retry_failed: bool) -> int:
    """Rows that a run would ask for."""
    count = 0
    for shard in mine:
        decided = {line["index"] for line in read_journal(shards.path(shard, "journal"))}
        count += len(shards.todo(shard, decided, retry_failed))
    return count


def seed_of(seed: int | None, row: int, place: int) -> int | None:
    """Of one answer's sampling: the same whenever and by whichever process it is asked for, another for each."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}:{row}:{place}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1  # what every server takes: 31 bits


def _has_answers(shards: Shards, shard: int) -> bool:
    report = shards.report(shard)
    return bool(report and report["answered"]) or any(
        ANSWERED in line for line in read_journal(shards.path(shard, "journal"))
    )
