"""The run: check, request and log many rows at a time, until all are done."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_ascend_hsx.generate.client import LONGEST_DELAY_S, Client
from vllm_ascend_hsx.generate.dataset import Dataset
from vllm_ascend_hsx.generate.endpoints import Balancer, Endpoint, reread
from vllm_ascend_hsx.generate.errors import Fault, ForeignRowError, InputError, RequestError, RunError, StoppedError
from vllm_ascend_hsx.generate.files import RowFiles, RowLog, identity_of
from vllm_ascend_hsx.generate.ledger import REMEDY, Status
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.order import BLOCK_ROWS, RowOrder, Turn
from vllm_ascend_hsx.generate.progress import SHOWN_FAILURES, Outcome, Progress
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.reader.check import Examination, Expected

T = TypeVar("T")


@dataclass
class Work:
    """One row under way.

    Attributes:
        turn: the row with its place in the order.
        expected: tokens of its file, as far as they are known.
        asked: ids of the requests sent, as their responses have them.
        spared: those of them that were trials of an endpoint, and do not count.
        endpoint: of the last request.
        failed_at: where the last attempt failed, if one did.
        problem: why the row's existing file cannot be used, or None.
        reused: number of tokens whose rows the server copied from an earlier file.
    """

    turn: Turn
    expected: Expected
    asked: list[str] = field(default_factory=list)
    spared: int = 0
    endpoint: Endpoint | None = None
    failed_at: Endpoint | None = None
    problem: str | None = None
    reused: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def row(self) -> Row:
        return self.turn.row

    @property
    def attempts(self) -> int:  # requests sent
        return len(self.asked)


class Generation:
    """One run.

    Args:
        options: of the run.
        dataset: checked.
        ledger: locked.
        outcome: filled in here.
        progress: shows messages.

    Attributes:
        outcome, progress: as given.
    """

    def __init__(self, options: Options, dataset: Dataset, ledger: RowLog, outcome: Outcome, progress: Progress) -> None:
        self.outcome = outcome
        self._options = options
        self._ledger = ledger
        self.progress = progress
        self._files = RowFiles(options, ledger)
        self._balancer = Balancer(options.endpoints, options.retry_delay)
        block_rows = BLOCK_ROWS if options.order == "prefix" else 1
        self._order = RowOrder(dataset.rows(options.is_wanted), block_rows)
        self._mutex = threading.Lock()  # guards the order and counts of rows that were there
        self._held = asyncio.Lock()  # one worker waits until a row may be sent, the others for it
        self._row_ended = asyncio.Event()
        self._all_taken = False
        self._errors_in_a_row = 0
        self._cancelled_by_stop: set[asyncio.Future[Any]] = set()
        self._asked: set[int] = set()  # rows requested, neither done nor failed
        outcome.endpoints = self._balancer.endpoints

    async def run(self) -> None:
        """Do all rows. The outcome says what stopped the run; only unexpected errors are raised."""
        started = time.monotonic()
        options = self._options
        with ThreadPoolExecutor(options.concurrency, "hsx-check") as self._pool:
            with reread(options.endpoint_file, self._balancer, self.progress.say):
                async with Client(options) as self._client:
                    await asyncio.gather(*(self._work() for _ in range(options.concurrency)))
            await self._tidy()
        self.outcome.seconds = time.monotonic() - started
        stopped = self.outcome.stopped_by
        if not isinstance(stopped, (InputError, RunError, StoppedError, OSError, type(None))):
            raise stopped

    def stop(self, reason: Exception) -> None:
        """End the run: cancel requests, keep finished files. The first reason counts."""
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = reason
            self._files.stopped.set()
            for waiting in self._cancelled_by_stop:
                waiting.cancel()

    async def _work(self) -> None:
        try:
            work = await self._take(None)
            while work is not None:
                await self._do(work)
                work = await self._take(work)
        except StoppedError:
            return
        except Exception as error:  # noqa: BLE001 (the other workers stop; `run` raises it)
            self.stop(error)

    async def _take(self, ended: Work | None) -> Work | None:
        """Wait for the next row that has no valid file, and may be sent; None if there is none."""
        work = await self._in_pool(self._next, ended)
        self._row_ended.set()
        while work is None and not self._all_taken:
            async with self._held:
                self._row_ended.clear()
                work = await self._in_pool(self._next)
                if work is None and not self._all_taken:
                    await self._unless_stopped(self._row_ended.wait())
        return work

    def _next(self, ended: Work | None = None) -> Work | None:
        """Return the next row that has no valid file; log and count those that have one.

        None if there is none, or not before a row under way has ended.
        """
        output = None if self._options.include_output_tokens else ()
        if ended is not None:
            self._end(ended, ended.endpoint)
        while self.outcome.stopped_by is None:
            with self._mutex:
                turn, self._all_taken = self._order.take(), self._order.is_over
            if turn is None:
                return None
            work = Work(turn, Expected(turn.row.token_ids, output))
            if (found := self._find(work)) is None:
                if work.problem is not None:
                    name = self._files.path(turn.row.index).name
                    self.progress.say(f"{name}: {work.problem}; it is asked for again")
                return work
            with self._mutex:
                self._pass(work, found)
                self._order.end(turn)
        return None

    def _end(self, work: Work, endpoint: Endpoint | None) -> None:
        with self._mutex:
            self._order.end(work.turn, endpoint)

    async def _do(self, work: Work) -> None:
        """Request a row until it succeeds or the retries are used up."""
        while True:
            try:
                return self._succeed(work, await self._attempt(work))
            except RequestError as error:
                if error.is_unreached:
                    continue
                await self._in_pool(self._end, work, None)  # what begins with this row does not wait for retries
                self._row_ended.set()
                last = not error.again or work.attempts - work.spared > self._options.max_retries
                if not last:
                    self.outcome.retries += 1
                    await self._unless_stopped(asyncio.sleep(self._delay(work, error)))
                found = await self._in_pool(self._find, work) if last or error.lost else None
                if found is not None:
                    return self._succeed(work, found)
                if last:
                    return self._fail(work, error)

    def _find(self, work: Work) -> Examination | None:
        """Return the row's file if it is valid; wait for a server that is writing it."""
        work.problem = None
        try:
            return self._check(work)
        except RequestError as error:
            work.problem = None if error.missing else error.reason
            return None

    def _check(self, work: Work) -> Examination:
        return self._files.check(work.row.index, work.expected, work.asked)

    async def _attempt(self, work: Work) -> Examination:
        """Request the row and check its file. Raises RequestError, InputError."""
        async with self._leased_endpoint(work) as endpoint:
            work.failed_at, is_trial = endpoint, endpoint.is_on_trial
            if endpoint.model is None:
                endpoint.model = await self._unless_stopped(self._client.model(endpoint.url))
            await self._in_pool(self._ledger.require_in_place)  # else it would replace another run's
            request_id, work.endpoint, work.reused = uuid.uuid4().hex, endpoint, 0
            work.asked.append(work.row.response_id(request_id))
            self._asked.add(work.row.index)
            request = self._client.ask(endpoint.url, endpoint.model, work.row, self._files.server_path(work.row.index), request_id)
            try:
                work.expected, work.reused = await self._unless_stopped(request)
                found = await self._in_pool(self._check, work)
            except RequestError as error:
                if error.is_unreached:
                    work.asked.pop()
                if not endpoint.proven or isinstance(error, ForeignRowError):
                    self._refuse(endpoint, error)
                elif error.missing:  # a server without locks may publish after its answer
                    error.fault = Fault.NONE
                if is_trial and error.fault is not Fault.NONE and not error.is_unreached:
                    self._spare(work, endpoint)
                raise
            return found

    def _spare(self, work: Work, endpoint: Endpoint) -> None:
        """Do not count an attempt that was a trial of its endpoint, if another one may be well.

        At most once for each endpoint, so that a row that fails everywhere ends.
        """
        if work.spared < len(self._balancer.used) and self._balancer.may_do_elsewhere(endpoint):
            work.spared += 1

    def _refuse(self, endpoint: Endpoint, error: RequestError) -> None:
        """Raise InputError if a server is another than the rest, or a new one is misconfigured."""
        if isinstance(error, ForeignRowError):
            remedy = f"serve the same model and layers, or {REMEDY}"
            raise InputError(f"{endpoint.url}: {error.reason}; {remedy}") from error
        if error.missing and endpoint.failed >= self._options.max_retries:
            raise InputError(error.reason) from error

    @asynccontextmanager
    async def _leased_endpoint(self, work: Work) -> AsyncIterator[Endpoint]:
        near = work.turn.parent.endpoint if work.turn.parent is not None else None
        endpoint = await self._unless_stopped(self._balancer.acquire(work.failed_at, near))
        fault: Fault | None = None
        retry_after, problem = None, ""
        try:
            yield endpoint
            fault = Fault.NONE
        except RequestError as error:
            fault, retry_after, problem = error.fault, error.retry_after, error.reason
            raise
        except InputError as error:
            if not self._balancer.go_on_without(endpoint, error):
                raise
            fault, problem = Fault.DOWN, str(error)
            raise RequestError(problem, fault=fault) from error
        finally:
            if self._balancer.release(endpoint, fault, retry_after):
                self._note_rest(endpoint, problem)
            if not (endpoint.is_used or endpoint.in_flight):
                self.progress.say(f"{endpoint.url} has nothing under way any more")

    def _note_rest(self, endpoint: Endpoint, problem: str) -> None:
        self.progress.say(f"{problem}; {endpoint.url} {endpoint.consequence()}")
        everyone = self._balancer.used
        if any(each.model is not None for each in everyone):
            if all(each.downs for each in everyone):
                self._count_error(problem)
        elif all(each.failed > self._options.max_retries for each in everyone):
            self.stop(RunError(problem))

    def _delay(self, work: Work, error: RequestError) -> float:
        """Return the seconds before the next attempt: exponential back-off with jitter."""
        doubled = min(LONGEST_DELAY_S, self._options.retry_delay * 2 ** min(work.attempts - 1, 32))
        return max(doubled * random.uniform(0.5, 1.5), error.retry_after or 0)

    # What became of a row

    def _pass(self, work: Work, found: Examination) -> None:
        """Count a row whose file existed. A killed run may not have logged it."""
        if not self._ledger.is_logged(work.row.index):
            self._ledger.append(work.row.index, "found", file=identity_of(found))
        self.outcome.before += 1

    def _succeed(self, work: Work, found: Examination) -> None:
        self._log(work, "done", file=identity_of(found), tokens=found.tokens, reused=work.reused or None, bytes=found.file_bytes)
        self._errors_in_a_row = 0
        if work.endpoint is not None:
            work.endpoint.proven = True
        self.outcome.done += 1
        self.outcome.tokens += found.tokens
        self.outcome.bytes += found.file_bytes
        self.outcome.prompt_tokens += found.tokens if found.prompt_tokens is None else found.prompt_tokens
        self.outcome.reused += work.reused

    def _fail(self, work: Work, error: RequestError) -> None:
        self._log(work, "failed", error=error.reason)
        self.outcome.failed += 1
        if len(self.outcome.failures) < SHOWN_FAILURES:
            self.outcome.failures.append((work.row.index, error.reason))
        if error.again:  # a refusal of this row says nothing about the next one
            self._count_error(error.reason)

    def _log(self, work: Work, status: Status, **facts: Any) -> None:
        self._asked.discard(work.row.index)
        self.outcome.requests += work.attempts
        seconds = round(time.monotonic() - work.started, 3)
        facts |= {"seconds": seconds, "attempts": work.attempts, "endpoint": work.endpoint and work.endpoint.url}
        self._ledger.append(work.row.index, status, **facts)

    def _count_error(self, problem: str) -> None:
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= self._options.errors_to_stop:
            errors = f"{self._errors_in_a_row} errors in a row (--max-consecutive-errors), the last: {problem}"
            self.stop(RunError(f"{errors}; what is done is kept: call again to go on"))

    async def _tidy(self) -> None:
        """Remove what servers left: locks and errors, and rows of another server."""
        try:
            await self._in_pool(self._ledger.require_in_place)
            self.outcome.left = await self._in_pool(self._files.remove_companions)
            await self._in_pool(self._files.remove_leftovers, self._asked)
        except (OSError, RunError) as error:
            self.progress.say(f"locks and errors of this run could not be removed: {error}")
        if self._files.leftovers:
            self.progress.say(f"removed {self._files.leftovers} files of another server that unfinished requests had left")

    # Waiting

    def _in_pool(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """Wait for something that `stop` cancels. Raises StoppedError: the run is stopped."""
        waiting = asyncio.ensure_future(awaitable)
        self._cancelled_by_stop.add(waiting)
        if self.outcome.stopped_by is not None:
            waiting.cancel()
        try:
            return await waiting
        except asyncio.CancelledError:
            if self.outcome.stopped_by is None:
                raise
            raise StoppedError from None
        finally:
            self._cancelled_by_stop.discard(waiting)
