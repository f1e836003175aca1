"""Check, request and log rows concurrently until all are done."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm_ascend_hsx.generate.answers import Answers
from vllm_ascend_hsx.generate.client import LONGEST_DELAY_S, Answer, Client
from vllm_ascend_hsx.generate.endpoints import Balancer, Endpoint, reread
from vllm_ascend_hsx.generate.errors import (
    MAY_HAVE_FILE,
    Failure,
    InputError,
    Interrupted,
    RequestError,
    RunError,
    StoppedError,
    UnreachedError,
)
from vllm_ascend_hsx.generate.files import RowFiles, request_in
from vllm_ascend_hsx.generate.ledger import REMEDY, Ledger, State, Status
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.order import BLOCK_ROWS, RowOrder, Turn
from vllm_ascend_hsx.generate.progress import SHOWN_FAILURES, Outcome, Progress
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.generate.show import second_bos
from vllm_ascend_hsx.reader.check import Examination, Expected

T = TypeVar("T")
GRACE_S = 2.0  # after a signal, for requests in flight


@dataclass(eq=False)
class Work:
    """One row in progress.

    Attributes:
        turn: the row and the place in the order.
        identity: identity of the row.
        expected: known tokens of the row's file.
        answer: the last answer of a server.
        attempts: number of requests sent.
        spared: attempts that tried an endpoint and do not count.
        endpoint: endpoint of the last request.
        failed_at: endpoint of the last failed attempt, if any.
        problem: why the existing file cannot be used; "" if there is no such file.
    """

    turn: Turn
    identity: str
    expected: Expected
    answer: Answer | None = None
    attempts: int = 0
    spared: int = 0
    endpoint: Endpoint | None = None
    failed_at: Endpoint | None = None
    problem: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def row(self) -> Row:
        return self.turn.row


class Generation:
    """One run.

    Args:
        options: options of the run.
        rows: rows to do.
        ledger: ledger of this run.
        answers: stores the target's answers; None if no tokens are generated.
        outcome: result, updated during the run.
        progress: prints messages.
    """

    def __init__(
        self,
        options: Options,
        rows: Iterator[Row],
        ledger: Ledger,
        answers: Answers | None,
        outcome: Outcome,
        progress: Progress,
    ) -> None:
        self.outcome = outcome
        self.progress = progress
        self._options = options
        self._ledger = ledger
        self._answers = answers
        self._files = RowFiles(options, ledger)
        self._balancer = Balancer(options.endpoints, options.retry_delay)
        self._order = RowOrder(rows, BLOCK_ROWS if options.order == "prefix" else 1)
        self._mutex = threading.Lock()  # guards `_order` and `outcome.before`
        self._turn = asyncio.Lock()  # only one worker at a time waits for `_row_ended`
        self._row_ended = asyncio.Event()
        self._errors_in_a_row = 0
        self._is_waiting = False
        self._knows_bos = False
        self._waits: set[asyncio.Future[Any]] = set()  # `stop` cancels them immediately
        self._requests: set[asyncio.Future[Any]] = set()  # cancelled GRACE_S after a signal
        self._asked: set[int] = set()  # requested rows that are neither done nor failed
        self._unsettled: set[int] = set()  # rows whose last request may still produce a file
        outcome.endpoints = self._balancer.endpoints

    async def run(self) -> None:
        """Do all rows. Only unexpected errors are raised; `outcome.stopped_by` has the others."""
        started = time.monotonic()
        options = self._options
        with ThreadPoolExecutor(options.concurrency, "hsx-check") as self._pool:
            with reread(options.endpoint_file, self._balancer, self.progress.say):
                async with Client(options) as self._client:
                    await asyncio.gather(*(self._work() for _ in range(options.concurrency)))
            await self._tidy()
        self.outcome.seconds = time.monotonic() - started
        self.outcome.unsettled = len(self._unsettled)
        stopped = self.outcome.stopped_by
        if not isinstance(stopped, (InputError, RunError, StoppedError, OSError, type(None))):
            raise stopped

    def stop(self, reason: Exception) -> None:
        """End the run and keep finished files. Only the first reason is recorded.

        After a signal, requests in flight have GRACE_S to end before they are cancelled.
        """
        if self.outcome.stopped_by is None:
            self.outcome.stopped_by = reason
            for waiting in self._waits:
                waiting.cancel()
            asyncio.get_running_loop().call_later(
                GRACE_S if isinstance(reason, Interrupted) else 0, self._cancel_requests
            )

    def _cancel_requests(self) -> None:
        self._files.stopped.set()
        for request in self._requests:
            request.cancel()

    async def _work(self) -> None:
        try:
            ended = None
            while (work := await self._take(ended)) is not None:
                await self._do(work)
                ended = work
        except StoppedError:
            return
        except Exception as error:  # noqa: BLE001 (the other workers stop; `run` raises it)
            self.stop(error)

    async def _take(self, ended: Work | None) -> Work | None:
        """Wait for the next row without a valid file that may be sent. Return None at the end."""
        work = await self._in_pool(self._next, ended)
        self._row_ended.set()
        while work is None and not self._order.is_over:
            async with self._turn:
                self._row_ended.clear()
                work = await self._in_pool(self._next, None)
                if work is None and not self._order.is_over:
                    await self._unless_stopped(self._row_ended.wait())
        return work

    def _next(self, ended: Work | None) -> Work | None:
        """Return the next row without a valid file. Log and count rows that have one.

        None means that there is no such row, or that all are held until another row ends.
        """
        if ended is not None:
            self._end(ended, ended.endpoint)
        while self.outcome.stopped_by is None:
            with self._mutex:
                turn = self._order.take()
            if turn is None:
                return None
            output = None if self._options.include_output else ()
            work = Work(
                turn, turn.row.identity(self._options.request), Expected(turn.row.token_ids, output)
            )
            if (found := self._find(work)) is None:
                if work.problem:
                    self.progress.say(
                        f"{self._files.path(turn.row.index).name}: {work.problem}; "
                        "requesting the row again"
                    )
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
                if error.failure is Failure.UNREACHED:
                    continue
                # Rows that extend this one do not wait for retries.
                await self._in_pool(self._end, work, None)
                self._row_ended.set()
                last = (
                    error.failure is Failure.REFUSED
                    or work.attempts - work.spared > self._options.max_retries
                )
                if not last:
                    self.outcome.retries += 1
                    await self._unless_stopped(asyncio.sleep(self._delay(work, error)))
                found = (
                    await self._in_pool(self._find, work)
                    if last or error.failure in MAY_HAVE_FILE
                    else None
                )
                if found is not None:
                    return self._succeed(work, found)
                if last:
                    return self._fail(work, error)

    def _find(self, work: Work) -> Examination | None:
        """Return the row's file if it is valid; wait for a server that is writing it."""
        work.problem = ""
        try:
            return self._check(work)
        except RequestError as error:
            work.problem = "" if error.failure is Failure.ABSENT else error.reason
            return None

    def _check(self, work: Work) -> Examination:
        """Check the row's file and the stored answer. Raises like `RowFiles.check`."""
        found = self._files.check(work.row.index, work.identity, work.expected, work.attempts > 0)
        request_id = request_in(found.metadata)
        is_answered = work.answer is not None and work.answer.request_id == request_id
        if (
            self._answers is not None
            and not is_answered
            and not self._answers.has(work.row.index, request_id)
        ):
            error = RequestError("the answer is not stored")
            self._files.discard(work.row.index, error)
            raise error
        return found

    async def _attempt(self, work: Work) -> Examination:
        """Request the row at the best endpoint and check the file. Raises like `_request`."""
        near = work.turn.parent.endpoint if work.turn.parent is not None else None
        endpoint = work.failed_at = await self._unless_stopped(
            self._balancer.acquire(work.failed_at, near)
        )
        try:
            found = await self._request(work, endpoint)
        except RequestError as error:
            self._note_failure(endpoint, error)
            raise
        except InputError as error:
            if not self._balancer.go_on_without(endpoint, error):
                raise
            failed = RequestError(str(error), Failure.UNREACHED)
            self._note_failure(endpoint, failed)
            raise failed from error
        else:
            self._balancer.note_answer(endpoint)
            return found
        finally:
            self._balancer.give_back(endpoint)
            if not (endpoint.is_used or endpoint.in_flight):
                self.progress.say(f"{endpoint.url} has no requests in flight any more")

    async def _request(self, work: Work, endpoint: Endpoint) -> Examination:
        """Request the row at an endpoint and check the file. Raises RequestError, InputError."""
        is_trial = endpoint.is_on_trial
        if endpoint.model is None:
            endpoint.model = await self._unless_stopped(self._client.model(endpoint.url))
        # In another directory the server could write over the files of another run.
        await self._in_pool(self._ledger.require_in_place)
        work.endpoint, work.attempts = endpoint, work.attempts + 1
        self._asked.add(work.row.index)
        self._unsettled.add(work.row.index)
        path = self._files.server_path(work.row.index)
        try:
            request = self._client.ask(endpoint.url, endpoint.model, work.row, path, work.identity)
            work.answer = await self._unless_stopped(request, self._requests)
            work.expected = work.answer.expected
            await self._note_second_bos(work, endpoint.url, endpoint.model)
            return await self._in_pool(self._check, work)
        except InputError:
            self._unsettled.discard(work.row.index)  # the server stores no row of this run
            raise
        except RequestError as error:
            if error.failure in (Failure.REFUSED, Failure.UNREACHED, Failure.UNSTORED):
                self._unsettled.discard(work.row.index)
            if error.failure is Failure.UNREACHED:
                work.attempts -= 1
            elif is_trial and error.failure is not Failure.REFUSED:
                self._spare(work, endpoint)
            self._raise_permanent(endpoint, error)
            raise

    async def _note_second_bos(self, work: Work, url: str, model: str) -> None:
        """Report once that a text with a BOS token got a second one."""
        text, prompt = work.row.content, work.expected.prompt
        if isinstance(text, str) and prompt is not None and not self._knows_bos:
            self._knows_bos = True
            with suppress(RequestError, InputError):  # the server does not decode tokens
                if note := await self._unless_stopped(
                    second_bos(self._client, url, model, text, prompt)
                ):
                    self.progress.say(note)

    def _spare(self, work: Work, endpoint: Endpoint) -> None:
        """Do not count an attempt that tried an endpoint, if another endpoint may work.

        At most once per endpoint, so that a row that fails everywhere ends.
        """
        if work.spared < len(self._balancer.used) and self._balancer.may_do_elsewhere(endpoint):
            work.spared += 1

    def _raise_permanent(self, endpoint: Endpoint, error: RequestError) -> None:
        """Raise InputError if every other row would fail for the same reason."""
        if error.failure is Failure.FOREIGN:
            raise InputError(
                f"{endpoint.url}: {error.reason}; serve the same model and layers, or {REMEDY}"
            ) from error
        if error.failure is Failure.GONE:
            endpoint.model = None  # look it up again: the server may serve another model now
        if (
            error.failure in (Failure.UNSTORED, Failure.ABSENT)
            and not endpoint.proven
            and endpoint.failed >= self._options.max_retries
        ):
            remedy = (
                ""
                if error.failure is Failure.ABSENT
                else "; fix the server's storage, or set --output to a folder in it, not to a link"
            )
            raise InputError(f"{endpoint.url}: {error.reason}{remedy}") from error

    def _note_failure(self, endpoint: Endpoint, error: RequestError) -> None:
        """Report once that a server fails. If all servers fail, report when the run will end."""
        if not self._balancer.note_failure(endpoint, error):
            return
        if not endpoint.is_used:
            self.progress.say(f"{error}; {endpoint.url} will not be used")
        elif endpoint.pauses == 1:
            self.progress.say(
                f"{error}; next request to {endpoint.url} in {endpoint.pause_left():.0f} s"
            )
        used = self._balancer.used
        if not any(each.model is not None for each in used):
            if all(each.failed > self._options.max_retries for each in used):
                self.stop(
                    UnreachedError(
                        f"{error.reason}; start a server there, or give another --endpoint"
                    )
                )
        elif all(each.pauses for each in used):
            self._count_error(error.reason)
            if not self._is_waiting and self.outcome.stopped_by is None:
                self._is_waiting = True
                left = self._options.errors_to_stop - self._errors_in_a_row
                self.progress.say(
                    f"all servers fail; {left} more errors end the run (--max-consecutive-errors)"
                )
                self._ledger.note_state(State.WAITING, error.reason)

    def _delay(self, work: Work, error: RequestError) -> float:
        """Return the seconds before the next attempt: exponential back-off with jitter."""
        doubled = min(LONGEST_DELAY_S, self._options.retry_delay * 2 ** min(work.attempts - 1, 32))
        return max(doubled * random.uniform(0.5, 1.5), error.retry_after or 0)

    # The end of a row

    def _pass(self, work: Work, found: Examination) -> None:
        """Count a row whose file existed. Log it if a killed run did not."""
        if not self._ledger.is_done(work.row.index, work.identity):
            self._ledger.append(
                work.row.index,
                Status.FOUND,
                work.identity,
                tokens=found.tokens,
                bytes=found.file_bytes,
            )
        self.outcome.before += 1

    def _succeed(self, work: Work, found: Examination) -> None:
        if self._answers is not None and work.answer is not None:
            self._answers.append(work.row.index, work.answer)
        reused = work.answer.reused if work.answer is not None else 0
        self._log_row(
            work, Status.DONE, tokens=found.tokens, reused=reused or None, bytes=found.file_bytes
        )
        self._errors_in_a_row = 0
        if self._is_waiting:
            self._is_waiting = False
            self._ledger.note_state(State.RUNNING)
        if work.endpoint is not None:
            work.endpoint.proven = True
        self.outcome.done += 1
        self.outcome.tokens += found.tokens
        self.outcome.bytes += found.file_bytes
        self.outcome.prompt_tokens += (
            found.tokens if found.prompt_tokens is None else found.prompt_tokens
        )
        self.outcome.reused += reused

    def _fail(self, work: Work, error: RequestError) -> None:
        self._log_row(work, Status.FAILED, error=error.reason)
        self.outcome.failed += 1
        if len(self.outcome.failures) < SHOWN_FAILURES:
            self.outcome.failures.append((work.row.index, error.reason))
            self.progress.say(f"row {work.row.index} failed: {error}")
        if error.failure is not Failure.REFUSED:  # a refusal concerns this row only
            self._count_error(error.reason)

    def _log_row(self, work: Work, status: Status, **facts: Any) -> None:
        self._asked.discard(work.row.index)
        self.outcome.requests += work.attempts
        seconds = round(time.monotonic() - work.started, 3)
        url = None if work.endpoint is None else work.endpoint.url
        self._ledger.append(
            work.row.index,
            status,
            work.identity,
            seconds=seconds,
            attempts=work.attempts,
            endpoint=url,
            **facts,
        )

    def _count_error(self, problem: str) -> None:
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= self._options.errors_to_stop:
            errors = (
                f"{self._errors_in_a_row} errors in a row (--max-consecutive-errors), the last: "
                f"{problem}"
            )
            self.stop(RunError(f"{errors}; finished rows are kept; run again to continue"))

    async def _tidy(self) -> None:
        """Remove locks and error files of this run, and rows of another server."""
        try:
            await self._in_pool(self._ledger.require_in_place)
            self.outcome.left = await self._in_pool(self._files.remove_companions)
            await self._in_pool(self._files.remove_foreign, self._asked)
        except (OSError, RunError) as error:
            self.progress.say(f"cannot remove locks and error files of this run: {error}")

    # Waiting

    def _in_pool(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def _unless_stopped(
        self, awaitable: Awaitable[T], waits: set[asyncio.Future[Any]] | None = None
    ) -> T:
        """Await something that `stop` cancels. Raises StoppedError: the run was stopped."""
        waiting = asyncio.ensure_future(awaitable)
        waits = self._waits if waits is None else waits
        waits.add(waiting)
        if self.outcome.stopped_by is not None:
            waiting.cancel()
        try:
            return await waiting
        except asyncio.CancelledError:
            if self.outcome.stopped_by is None:
                raise
            raise StoppedError from None
        finally:
            waits.discard(waiting)
