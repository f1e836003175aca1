"""The run itself: rows are read, sent, collected and noted, many at a time, until all are done or something stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vllm_ascend_hsx.generate.backoff import Backoff
from vllm_ascend_hsx.generate.client import Client
from vllm_ascend_hsx.generate.clock import Clock
from vllm_ascend_hsx.generate.collect import Collector
from vllm_ascend_hsx.generate.dataset import Dataset
from vllm_ascend_hsx.generate.errors import InputError, RequestError, RunError
from vllm_ascend_hsx.generate.examine import CheckError, Examined, Expected, ServerFacts
from vllm_ascend_hsx.generate.in_place import InPlaceCollector, remove_companions
from vllm_ascend_hsx.generate.ledger import REMEDY, Entry
from vllm_ascend_hsx.generate.leftovers import find_leftovers, remove_leftovers
from vllm_ascend_hsx.generate.names import RequestNames, row_file
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.outcome import SHOWN_FAILURES, Outcome, StoppedError
from vllm_ascend_hsx.generate.output import Output
from vllm_ascend_hsx.generate.progress import Progress
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.generate.servers import Answered, Servers
from vllm_ascend_hsx.protocol.files import NotAFileError, describe
from vllm_ascend_hsx.reader.load import remove

SETTLE_SECONDS = 10.0  # for a server to let go of the file of a request that was given up

T = TypeVar("T")


class Generation:
    """One run.

    Args:
        options: of the run.
        dataset: checked.
        output: opened.
        outcome: is filled in; its total and before are set.
        unfinished: rows that have no file yet.
        progress: is told what happens.
        clock: for back-off and rests.
    """

    def __init__(
        self,
        options: Options,
        dataset: Dataset,
        output: Output,
        outcome: Outcome,
        unfinished: int,
        progress: Progress,
        clock: Clock | None = None,
    ) -> None:
        self.outcome = outcome
        self._unfinished = unfinished
        self._options = options
        self._dataset = dataset
        self._output = output
        self._progress = progress
        self._clock = clock or Clock()
        self._backoff = Backoff(options.retry_delay)
        self._names = RequestNames.for_this_process(output.ledger.token)
        self._collector = (InPlaceCollector if options.in_place else Collector)(
            output.path,
            output.ledger.token,
            timeout=options.request_timeout,
            validate=options.validate,
            copy=options.copy,
            durable=options.durability == "fdatasync",
        )
        self._leftovers: dict[int | None, list[Path]] = {}
        self._errors_in_a_row = 0
        self._giving_up: set[asyncio.Future[Any]] = set()  # what is cancelled when the run is stopped

    async def run(self) -> None:
        """Do all rows. What stops it is noted in the outcome; only a mistake of ours is raised."""
        started = self._clock.now()
        options = self._options
        # Twice as many as there may be requests: one half waits for answers, the other for files and disks.
        with ThreadPoolExecutor(options.concurrency, "hsx-collect") as self._pool, ThreadPoolExecutor(1, "hsx-read") as self._reader:
            async with Client(options.request_timeout, options.api_key) as client:
                self._servers = Servers(
                    options, client, self._collector, self._output.ledger, self._names, self._pool, self._clock, self._on_down
                )
                self.outcome.endpoints = self._servers.endpoints
                try:
                    await self._work()
                finally:
                    await self._clean_up()
                    self.outcome.seconds = self._clock.now() - started
        if self.outcome.stopped_by is not None and not isinstance(self.outcome.stopped_by, (InputError, RunError, StoppedError, OSError)):
            raise self.outcome.stopped_by

    def stop(self, reason: BaseException) -> None:
        """End the run: requests under way are given up, files that are there are still taken. The first reason counts."""
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = reason
            for waiting in self._giving_up:
                waiting.cancel()

    async def _work(self) -> None:
        try:
            await self._find_leftovers()
            if self._servers.facts is None:
                self._servers.facts = await self._in_pool(self._facts_of_finished)
            if self._unfinished:
                await self._unless_stopped(self._servers.meet(self._backoff))
            if self._options.validate:
                await self._in_pool(self._check_ledger)
        except (InputError, RunError, OSError) as error:
            return self.stop(error)
        except StoppedError:
            return
        rows = self._dataset.rows(self._is_wanted)
        turn = asyncio.Lock()
        await asyncio.gather(*(self._worker(rows, turn) for _ in range(2 * self._options.concurrency)))

    def _facts_of_finished(self) -> ServerFacts | None:
        """What the rows that are there have in common, where no server line says it: their run ended before its first answer.

        Raises:
            InputError: nothing; they come from several servers.
        """
        found: dict[ServerFacts, int] = {}
        for row in sorted(self._output.finished):
            with suppress(CheckError, OSError):  # `--validate` finds it
                found.setdefault(self._collector.facts(row), row)
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise InputError(
                f"{self._output.path} holds rows of several servers: row {first} is {one}, row {second} is {other}; {REMEDY}"
            )
        return next(iter(found), None)

    def _check_ledger(self) -> None:
        """Whether one file at least comes from the server that the ledger names: a file that differs from that is removed.

        Raises:
            InputError: there are files, and none does, so it is the ledger that is wrong.
        """
        facts, others = self._servers.facts, None
        for row in filter(self._is_wanted, self._output.finished if facts is not None else ()):
            with suppress(CheckError, OSError):  # `_is_right` says so
                found = self._collector.facts(row)
                if found == facts:
                    return
                others = found
        if others is not None:
            raise InputError(
                f"{self._output.path}: the rows hold {others}, and the ledger says {facts}, so none is what it has to be; nothing was "
                "removed: name the right --output, or have the server's line in the ledger say what the rows hold"
            )

    def _is_wanted(self, row: int) -> bool:
        options = self._options
        if not options.is_ours(row) or (options.limit is not None and row >= options.limit):
            return False
        return options.validate or row not in self._output.finished

    async def _worker(self, rows: Iterator[Row], turn: asyncio.Lock) -> None:
        loop = asyncio.get_running_loop()
        while self.outcome.stopped_by is None:
            try:
                async with turn:
                    row = await loop.run_in_executor(self._reader, next, rows, None)
                if row is None:
                    return
                await self._do(row)
            except StoppedError:
                return
            except BaseException as error:  # noqa: BLE001 (the others have to be stopped; `run` raises what is not expected)
                return self.stop(error)

    async def _do(self, row: Row) -> None:
        if row.index in self._output.finished and await self._is_right(row):
            self.outcome.before += 1
            return self._progress.passed()
        started = self._clock.now()
        leftovers = self._leftovers.pop(row.index, []) + self._own_file(row)
        attempt = 0
        while True:
            collected = await self._take_leftovers(row, leftovers)
            if collected is not None:
                return self._succeed(row, collected, "recovered" if not attempt else "done", started, attempt, None)
            attempt += 1
            self.outcome.requests += 1
            endpoint = None
            try:
                answered = await self._unless_stopped(self._servers.ask(row, attempt))
                endpoint = answered.endpoint
                collected = await self._collect(row, answered)
                return self._succeed(row, collected, "done", started, attempt, endpoint)
            except RequestError as error:
                if not error.again or attempt > self._options.max_retries:
                    self.outcome.left += await self._remove(self._own_file(row))
                    return self._fail(row, error.reason, started, attempt, endpoint)
                self._progress.retried()
                await self._unless_stopped(self._clock.sleep(self._backoff.seconds(attempt, error.retry_after)))
                leftovers = await self._lost(row) if error.lost else []

    async def _lost(self, row: Row) -> list[Path]:
        """Where the file of a request may be that had no answer, or none in time."""
        found = await self._in_pool(self._leftovers_of, self._output.tokens)
        return found.get(row.index, []) + self._own_file(row)

    def _own_file(self, row: Row) -> list[Path]:
        """Where a file in place is, or will be when the server has written it: of an earlier run, or of a request that was lost."""
        return [self._output.path / row_file(row.index)] if self._options.in_place else []

    async def _is_right(self, row: Row) -> bool:
        """Return True if the row's file is as it has to be; remove it if its content is not.

        Raises:
            RunError: it cannot be read. That says nothing of what is in it, so it stays.
        """
        path = self._output.path / row_file(row.index)
        try:
            await self._in_pool(self._collector.examine, row.index, self._expected(row, None))
        except (CheckError, FileNotFoundError, NotAFileError) as error:
            self._progress.say(f"{path.name}: {error}; it is asked for again")
            await self._in_pool(remove, path)
            return False
        except OSError as error:
            raise RunError(describe(f"{path} cannot be read", error)) from error
        return True

    async def _take_leftovers(self, row: Row, paths: list[Path]) -> Examined | None:
        """The file of an earlier request of this row, if there is one that is right."""
        for path in paths:
            with suppress(RequestError):
                return await self._in_pool(self._collector.collect, path, row.index, self._expected(row, None))
        return None

    async def _collect(self, row: Row, answered: Answered) -> Examined:
        return await self._in_pool(self._collector.collect, answered.path, row.index, self._expected(row, answered))

    def _expected(self, row: Row, answered: Answered | None) -> Expected:
        generates = self._options.include_output_tokens
        facts: ServerFacts | None = self._servers.facts
        if answered is None:
            return Expected(row.token_ids, None if generates else (), facts)
        # The last token that was generated has no row: it was never an input.
        return Expected(answered.answer.prompt, answered.answer.output[:-1] if generates else (), facts)

    # What became of a row

    def _succeed(self, row: Row, found: Examined, status: Any, started: float, attempts: int, endpoint: str | None) -> None:
        if endpoint is not None:
            self._servers.note_file(endpoint, found.facts)
        seconds = round(self._clock.now() - started, 3)
        entry = Entry(row.index, status, row_file(row.index), found.tokens, found.bytes, seconds, attempts, None, endpoint)
        self._output.ledger.append(entry)
        self._errors_in_a_row = 0
        self.outcome.done += status == "done"
        self.outcome.recovered += status == "recovered"
        self.outcome.tokens += found.tokens
        self.outcome.bytes += found.bytes
        self._progress.done(found.tokens, found.bytes)

    def _fail(self, row: Row, reason: str, started: float, attempts: int, endpoint: str | None) -> None:
        seconds = round(self._clock.now() - started, 3)
        self._output.ledger.append(Entry(row.index, "failed", None, None, None, seconds, attempts, reason, endpoint))
        self.outcome.failed += 1
        if len(self.outcome.failures) < SHOWN_FAILURES:
            self.outcome.failures.append((row.index, reason))
        self._progress.failed()
        self._count_error(reason)

    def _on_down(self, problem: str, nobody_is_well: bool) -> None:
        self._progress.say(problem)
        if nobody_is_well:
            self._count_error(problem)

    def _count_error(self, problem: str) -> None:
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= self._options.errors_to_stop:
            self.stop(
                RunError(
                    f"{self._errors_in_a_row} errors in a row (--max-consecutive-errors), the last: {problem}; "
                    "what is done is kept: call again to go on"
                )
            )

    # What is left on the servers' side

    async def _find_leftovers(self) -> None:
        """Files that earlier runs asked for: those of rows that are wanted are taken when their turn comes, the others removed."""
        found = await self._in_pool(self._leftovers_of, self._output.tokens)
        self._leftovers = {row: paths for row, paths in found.items() if self._is_unfinished(row)}
        overwritten = await self._in_pool(self._leftovers_of, self._output.overwritten)
        useless = [*(item for item in found.items() if item[0] not in self._leftovers), *overwritten.items()]
        await self._remove([path for _, paths in useless for path in paths])

    async def _clean_up(self) -> None:
        """Nothing of ours stays there, whatever became of its row."""
        try:
            found = await self._in_pool(self._leftovers_of, self._output.tokens | self._output.overwritten)
            self.outcome.left = await self._remove([path for paths in found.values() for path in paths])
            if self._options.in_place:
                self.outcome.left += await self._in_pool(remove_companions, self._output.path, self._options.is_ours, SETTLE_SECONDS)
        except OSError as error:
            self._progress.say(f"files of this run could not be removed on the server's side: {error}")

    async def _remove(self, paths: list[Path]) -> list[Path]:
        busy = await asyncio.gather(*(self._in_pool(remove_leftovers, [path], SETTLE_SECONDS) for path in paths))
        return [path for each in busy for path in each]

    def _is_unfinished(self, row: int | None) -> bool:
        return row is not None and self._is_wanted(row) and row not in self._output.finished

    def _leftovers_of(self, tokens: set[str]) -> dict[int | None, list[Path]]:
        directories = dict.fromkeys([*self._output.directories, *self._output.ledger.content.directories])
        return find_leftovers(map(Path, directories), tokens) if tokens else {}

    # Waiting

    async def _in_pool(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """Wait for something that is given up when the run is stopped. Raises StoppedError: it is."""
        waiting = asyncio.ensure_future(awaitable)
        self._giving_up.add(waiting)
        if self.outcome.stopped_by is not None:
            waiting.cancel()
        try:
            return await waiting
        except asyncio.CancelledError:
            if self.outcome.stopped_by is None:
                raise
            raise StoppedError from None
        finally:
            self._giving_up.discard(waiting)
