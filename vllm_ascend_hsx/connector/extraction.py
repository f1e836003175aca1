"""Extraction: the file, the rows and the outcome of a request that this rank owns."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from functools import partial

import numpy as np
import torch

from vllm_ascend_hsx.compat.adapters import adapter_of
from vllm_ascend_hsx.connector.lane import Lane
from vllm_ascend_hsx.connector.metadata import RequestEnd, RequestStart
from vllm_ascend_hsx.connector.open_sources import OpenSources
from vllm_ascend_hsx.connector.stats import (
    MISSING_ROWS,
    NOT_FINITE,
    RELOADED,
    StatsRecorder,
    failure_kind,
)
from vllm_ascend_hsx.connector.threads import Job, SpanSet, ThreadPool, describe_missing
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.protocol.rows import TokenIds
from vllm_ascend_hsx.protocol.weights import Origin
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, Sink, SinkError, SinkFile
from vllm_ascend_hsx.sinks.data_file import RowSource

logger = logging.getLogger(__name__)


class State(Enum):
    """The state of a request. Once a request is decided, the state is ENDING or FAILED."""

    OPENING = "the file is not open"
    OPEN = "the file is open"
    ENDING = "all rows have arrived; the file is being published or removed"
    FAILED = "a reason is published in place of the file"


class Extraction:
    """A request that this rank owns. Observes the contract of SinkFile.

    All work on the file passes through a lane: the opening, the copy of a prefix, writes, and the
    end. The opening holds the lane until the file is open or the request has failed. The first
    write, a write of recomputed rows, the copy and the end run alone. The end enters the lane
    after the last row, so no thread has to count writes.

    A failure does not wait in the lane, because a write may hang. The reason is published
    immediately. Only closing the file waits in the lane.

    The opener calls `open`. The lander calls `enter` and `enter_end`. Writers run the jobs that
    have entered: `write`, `copy`, `complete` and `end`. Any thread may call the other methods.

    Args:
        start: the scheduler's message.
        writers: threads that work on the file.
        shares: whether several writers may write at the same time.
        row_bytes: bytes of one token, in memory and as stored.
        on_decided: called with the error, or None for a file that is complete or was discarded
            after an abort. Called once, but never after `give_up` decides the request.
        on_ended: called once, when readers can see the outcome or the file could not be opened.
        open_sources: keeps the published file open if others may copy from it.
        stats: records writes and outcomes.

    Attributes:
        weights: versions of the weights that have computed the rows. The main thread sets them
            before it stages the first rows of another version.
        stored_bytes: bytes of the published file; 0 before that, and without a file.
    """

    def __init__(
        self,
        start: RequestStart,
        writers: ThreadPool,
        shares: bool,
        row_bytes: tuple[int, int],
        on_decided: Callable[[Extraction, str | None], None],
        on_ended: Callable[[Extraction], None],
        open_sources: OpenSources,
        stats: StatsRecorder,
    ) -> None:
        self.request_id = start.request_id
        self._lane = Lane(shares)
        self._lane.enter_if_empty()  # for the opening
        self._writers = writers
        self.path = start.path
        self._prompt = start.token_ids
        self._arrived_ns = start.arrived_ns
        self._lora = start.lora
        self._adapter = adapter_of(start.lora)  # the runner has loaded it before this step
        self._placeholders = start.placeholders
        self._keeps_source = start.keeps_source
        self.number = start.number
        self.has_open_source = False  # whether `open_sources` has the file
        self.stored_bytes = 0
        self.include_output = start.include_output
        self.weights = start.weights
        self._row_bytes, self._stored_row_bytes = row_bytes
        self._on_decided = on_decided
        self._on_ended = on_ended
        self._open_sources = open_sources
        self._stats = stats
        self._entered = SpanSet()  # rows whose writes have entered the lane; for the lander
        self._mutex = threading.Lock()  # guards everything below
        self._landed_at = time.perf_counter()
        self._state = State.OPENING
        self._failure = ""  # the thread that takes the file publishes it instead
        self._file: SinkFile | None = None  # open, and not being ended

    @property
    def is_decided(self) -> bool:
        """True if the request is complete, failed or aborted. The file may not have ended yet."""
        return self._state in (State.ENDING, State.FAILED)

    @property
    def is_opening(self) -> bool:
        """True if the file is not open and the request has not failed."""
        return self._state is State.OPENING

    def open(self, sink: Sink) -> None:
        """Open the file. If the request has failed meanwhile, publish the reason instead."""
        if self.is_decided:
            leave_reason(sink, self.request_id, self.path, self._failure)
            self._on_ended(self)
            return
        try:
            file = sink.open(
                self.request_id, self.path, len(self._prompt), self._arrived_ns, self._adapter
            )
        except Exception as error:  # noqa: BLE001 - any error fails this request alone
            if self._set_failed(_reason_of(error)):
                self._report(_reason_of(error), failure_kind(error))
            self._on_ended(self)
            return
        file.placeholders, file.keeps_source = self._placeholders, self._keeps_source
        with self._mutex:
            self._file, opens = file, self._state is State.OPENING
            if opens:
                self._state = State.OPEN
        if opens:
            self._writers.submit(*self._lane.leave())
        else:
            self.stop()

    def enter(self, positions: tuple[int, int], job: Job) -> bool:
        """Enter a job that stores these positions. Return True if the caller may run it now."""
        first, end = positions
        spans = self._entered.spans
        alone = not spans or first < spans[-1][1]  # the first job, or recomputed rows
        self._entered.add(first, end)
        return self._lane.enter(job, alone)

    def completes(self, span: Span) -> bool:
        """Return True if the span ends with the last row of the file."""
        return not self.include_output and span.first + span.num_rows == len(self._prompt)

    def is_complete(self) -> bool:
        """Return True if all rows of the file have entered the lane."""
        return not self.include_output and not self._entered.missing(len(self._prompt))

    def enter_end(self, job: Job) -> bool:
        """Enter the job that ends the file. Return True if the caller may run it now."""
        return self._lane.enter(job, alone=True)

    def write(
        self, first: int, rows: memoryview, landed_at: float, check: torch.Tensor | None = None
    ) -> tuple[int, list[Job]]:
        """Write rows, and leave the lane.

        Args:
            first: token position of the first row.
            rows: bytes of the rows.
            landed_at: arrival time of the rows in host memory, by time.perf_counter.
            check: the same rows [rows, layers, hidden] if they must be finite.

        Returns:
            The number of rows written, 0 if the request is decided or the write failed; and the
            jobs that the caller must run now.
        """
        count = len(rows) // self._row_bytes

        def write(file: SinkFile) -> None:
            if check is not None and (problem := describe_not_finite(first, check)):
                raise SinkError(self.request_id, self.path, problem, NOT_FINITE)
            began = time.perf_counter()
            file.write(first, rows)
            self._stats.wrote(count * self._stored_row_bytes, time.perf_counter() - began)

        is_written, jobs = self._store(write, landed_at)
        return count if is_written else 0, jobs

    def copy(self, source: RowSource, num_rows: int) -> list[Job]:
        """Copy the first rows from another request's file, as `write` does."""
        return self._store(lambda file: file.copy(source, num_rows))[1]

    def _store(
        self, write: Callable[[SinkFile], None], landed_at: float = 0.0
    ) -> tuple[bool, list[Job]]:
        with self._mutex:
            self._landed_at = max(self._landed_at, landed_at)
            file = self._file if self._state is State.OPEN else None
        if file is None:
            return False, self._lane.leave()
        try:
            write(file)
        except Exception as error:  # noqa: BLE001 - any error fails this request alone
            jobs = self._lane.leave()
            if self._set_failed(_reason_of(error)):
                jobs += self._publish_failure()
                self._report(_reason_of(error), failure_kind(error))
            return False, jobs
        return True, self._lane.leave()

    def complete(self) -> list[Job]:
        """Publish the rows of the prompt, alone in the lane. Leave the lane as `write` does."""
        if (file := self._take_to_end()) is not None:
            self._commit(file, self._prompt)
        return self._lane.leave()

    def end(self, end: RequestEnd) -> list[Job]:
        """End the file after the last row, alone in the lane. Leave the lane as `write` does."""
        if (file := self._take_to_end()) is not None:
            token_ids = np.concatenate([self._prompt, end.output_token_ids])
            missing = self._entered.missing(len(token_ids))
            if end.aborted:
                self._end_aborted(
                    file,
                    token_ids[: min(end.most_kept, missing[0][0] if missing else len(token_ids))],
                )
            elif missing:
                spans = describe_missing(missing, len(token_ids))
                reason = f"the request ended without rows of token positions {spans}"
                self._fail_file(file, SinkError(self.request_id, self.path, reason, MISSING_ROWS))
            else:
                self._commit(file, token_ids)
        return self._lane.leave()

    def _end_aborted(self, file: SinkFile, token_ids: TokenIds) -> None:
        """Publish the rows to keep, without a source for other requests, or discard the file."""
        if len(token_ids):
            file.keeps_source = False
            self._commit(file, token_ids, is_aborted=True)
            return
        file.discard()
        self._on_ended(self)
        self._stats.aborted()
        self._on_decided(self, None)

    def fail(self, reason: str, kind: str) -> None:
        """Fail the request. A writer publishes the reason in place of the file."""
        if self._set_failed(reason):
            self._report(reason, kind)
            self._writers.submit(self._publish_failure)

    def fail_if_reloaded(self) -> None:
        """Fail the request if its adapter was reloaded with other weights before the last row."""
        if adapter_of(self._lora) != self._adapter:
            self.fail(
                (
                    f"adapter {self._adapter.name!r} was reloaded with other weights before the "
                    "last row of this request"
                ),
                RELOADED,
            )

    def give_up(self) -> bool:
        """Fail the request because the server stops. Return False if it was already decided."""
        return self._set_failed(SERVER_STOPPED)

    def stop(self) -> None:
        """Publish the reason in place of the file, unless another thread ends the file.

        Call `fail` or `give_up` first.
        """
        self._writers.submit(*self._publish_failure())

    def _set_failed(self, reason: str) -> bool:
        """Record the failure. Return False if the request was already decided."""
        with self._mutex:
            before = self._state
            if self.is_decided:
                return False
            self._state, self._failure = State.FAILED, reason
        if before is State.OPENING:
            self._writers.submit(*self._lane.leave())  # these jobs free the rows' memory
        return True

    def _take_to_end(self) -> SinkFile | None:
        """Decide the request and return the file, or None if the request was already decided."""
        with self._mutex:
            if self._state is not State.OPEN:
                return None
            file, self._file, self._state = self._file, None, State.ENDING
            return file

    def _publish_failure(self) -> list[Job]:
        """Publish the reason in place of the file, once, without waiting for writes that hang."""
        with self._mutex:
            file = self._file if self._state is State.FAILED else None
            if file is None:
                return []
            self._file = None
        idle = self._lane.enter_if_empty()
        file.fail(self._failure, close=idle)
        self._on_ended(self)
        if idle:
            return self._lane.leave()
        close = partial(self._close, file)
        return close() if self._lane.enter(close, alone=True) else []

    def _close(self, file: SinkFile) -> list[Job]:
        file.close()
        return self._lane.leave()

    def _fail_file(self, file: SinkFile, error: Exception) -> None:
        file.fail(_reason_of(error))
        self._on_ended(self)
        self._report(_reason_of(error), failure_kind(error))

    def _commit(self, file: SinkFile, token_ids: TokenIds, is_aborted: bool = False) -> None:
        file.origin = Origin(self.weights, is_aborted)
        try:
            file.commit(token_ids, num_prompt_tokens=min(len(self._prompt), len(token_ids)))
        except SinkError as error:
            self._on_ended(self)
            self._report(error.reason, failure_kind(error))
            return
        except Exception as error:  # noqa: BLE001 - a bug, and the file has not ended
            self._fail_file(file, error)
            return
        self.stored_bytes = file.stored_bytes
        if file.source is not None:
            self._open_sources.add(self.number, file.source)
            self.has_open_source = True
        self._on_ended(self)
        seconds = time.perf_counter() - self._landed_at
        self._stats.published(len(token_ids) * self._stored_row_bytes, seconds)
        self._on_decided(self, None)

    def _report(self, reason: str, kind: str) -> None:
        self._stats.failed(kind)
        self._open_sources.failed(kind)
        logger.error("request %r, %s: %s", self.request_id, self.path, reason)
        self._on_decided(self, reason)


def _reason_of(error: Exception) -> str:
    return error.reason if isinstance(error, SinkError) else f"{type(error).__name__}: {error}"


def leave_reason(sink: Sink, request_id: str, path: str, reason: str) -> None:
    """Publish the reason for a request whose file was never opened. Blocks on storage.

    A published file of the same name is not changed.
    """
    try:
        sink.open(request_id, path).fail(reason)
    except Exception as error:  # noqa: BLE001 - any error fails this request alone
        logger.error(
            "request %r, %s: the reason of the failure cannot be written: %s",
            request_id,
            path,
            error,
        )


def describe_not_finite(first: int, rows: torch.Tensor) -> str | None:
    """Describe the first row with a NaN or an infinity. Return None if all rows are finite.

    Args:
        first: token position of the first row.
        rows: [rows, layers, hidden].
    """
    low, high = torch.aminmax(rows)  # propagates NaN; one pass and no temporary, unlike isfinite
    if torch.isfinite(low) and torch.isfinite(high):
        return None
    row, layer = (~torch.isfinite(rows).all(dim=-1)).nonzero()[0].tolist()
    return (
        f"the row of token position {first + row} is not finite in layer {layer} of "
        f"{rows.shape[1]} stored layers"
    )
