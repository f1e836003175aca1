"""One owned request: its file, its rows, and the one decision about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_ascend_hsx.compat.adapters import adapter_of
from vllm_ascend_hsx.connector.kept_files import KeptFiles
from vllm_ascend_hsx.connector.metadata import RequestEnd, RequestStart
from vllm_ascend_hsx.connector.stats import MISSING_ROWS, NOT_FINITE, RELOADED, StatsRecorder, failure_kind
from vllm_ascend_hsx.connector.threads import EVERY_POSITION, SpanSet, ThreadPool, WriteOrder, describe_missing
from vllm_ascend_hsx.protocol.rows import TokenIds
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, Sink, SinkError, SinkFile
from vllm_ascend_hsx.sinks.data_file import RowSource

logger = logging.getLogger(__name__)


class Extraction:
    """An owned request. It keeps what SinkFile demands of its caller.

    It is decided once: complete, failed or aborted. Then its file is ended once, by the thread that
    takes it out of `_file`: the one that decided, a writer if that one must not wait for storage,
    or the one that stops the worker. A failure does not wait for writes in flight; the last of them
    closes the file.

    The opener calls `open`. Writers call `write`, `copy` and `end`, as far as `order` lets them:
    not before its file is open, or it has failed. Any thread may call the other methods.

    Args:
        start: the scheduler's message.
        writers: threads that work on its file.
        side_by_side: whether several of them may write at the same time.
        row_bytes: bytes of one token, in memory and as stored.
        on_decided: called once, with the error, or None for a file that is complete or was
            discarded after an abort.
        on_ended: called once, when readers can see the outcome, or the file could not be opened.
        kept_files: gets its published file, if others may copy its rows.
        stats: records writes and outcomes.
    """

    def __init__(
        self,
        start: RequestStart,
        writers: ThreadPool,
        side_by_side: bool,
        row_bytes: tuple[int, int],
        on_decided: Callable[[Extraction, str | None], None],
        on_ended: Callable[[Extraction], None],
        kept_files: KeptFiles,
        stats: StatsRecorder,
    ) -> None:
        self.request_id = start.request_id
        self.order = WriteOrder(side_by_side)
        self.order.begin(EVERY_POSITION, list)  # the opening
        self._writers = writers
        self.path = start.path
        self._prompt = start.token_ids
        self._arrived_ns = start.arrived_ns
        self._lora = start.lora
        self._adapter = adapter_of(start.lora)  # the runner loads it before the connector is given the step
        self._placeholders = start.placeholders
        self._keeps_source = start.keeps_source
        self.number = start.number
        self.is_kept = False  # whether its file was given to `kept_files`
        self._include_output = start.include_output
        self._row_bytes, self._stored_row_bytes = row_bytes
        self._on_decided = on_decided
        self._on_ended = on_ended
        self._kept_files = kept_files
        self._stats = stats
        self._mutex = threading.Lock()  # guards everything below
        self._written = SpanSet()
        self._landed_at = time.perf_counter()
        self._decided = False
        self._has_opened = False
        self._failure: str | None = None  # published in place of the file by the thread that takes the file
        self._file: SinkFile | None = None  # open, and not being ended
        self._writing = 0  # writes in flight
        self._closed_by_writer = False

    @property
    def is_decided(self) -> bool:
        """True if it is complete, failed or aborted, though its file may not have ended yet."""
        return self._decided

    @property
    def has_opened(self) -> bool:
        """True if its file is open, or it has failed."""
        return self._has_opened

    def open(self, sink: Sink) -> None:
        """Open the file. If the request has failed meanwhile, leave the reason in its place."""
        if self._failure is not None:
            leave_reason(sink, self.request_id, self.path, self._failure)
            self._let_writers_in()
            self._on_ended(self)
            return
        try:
            file = sink.open(self.request_id, self.path, len(self._prompt), self._arrived_ns, self._adapter)
        except Exception as error:  # noqa: BLE001 - whatever it is concerns this request alone
            with self._mutex:
                undecided, self._decided = not self._decided, True
            if undecided:
                self._report(_reason_of(error), failure_kind(error))
            self._on_ended(self)
        else:
            with self._mutex:
                self._file, failed = file, self._failure is not None
                file.placeholders, file.keeps_source = self._placeholders, self._keeps_source
            if failed:
                self.stop()
        finally:
            self._let_writers_in()

    def write(self, first: int, rows: memoryview, landed_at: float, check: torch.Tensor | None = None) -> int:
        """Write rows. The last rows of a prompt complete its file.

        Args:
            first: token position of the first row.
            rows: bytes of the rows.
            landed_at: when they arrived in host memory, by time.perf_counter.
            check: the same rows [rows, layers, hidden] if they must be finite.

        Returns:
            Number of rows written: 0 if the request is decided or the write failed.
        """
        count = len(rows) // self._row_bytes

        def write(file: SinkFile) -> None:
            if check is not None and (problem := describe_not_finite(first, check)):
                raise SinkError(self.request_id, self.path, problem, NOT_FINITE)
            began = time.perf_counter()
            file.write(first, rows)
            self._stats.wrote(count * self._stored_row_bytes, time.perf_counter() - began)

        return self._store(first, count, write, landed_at)

    def copy(self, source: RowSource, num_rows: int) -> None:
        """Copy the first rows from another request's file, as `write` does."""
        self._store(0, num_rows, lambda file: file.copy(source, num_rows))

    def _store(self, first: int, count: int, write: Callable[[SinkFile], None], landed_at: float = 0.0) -> int:
        """Write `count` rows; return how many were written. The last ones complete the file."""
        with self._mutex:
            file = None if self._decided else self._file
            if file is None:
                return 0
            self._writing += 1
        failure = None
        try:
            write(file)
        except Exception as error:  # noqa: BLE001 - any error fails this request alone
            count, failure = 0, error
        with self._mutex:
            self._writing -= 1
            self._written.add(first, first + count)
            self._landed_at = max(self._landed_at, landed_at)
            # The last write in flight commits. Another one may be writing recomputed rows.
            done = not self._include_output and not self._writing and not self._written.missing(len(self._prompt))
            taken = self._claim() if done or failure is not None else None
            unused = self._closed_by_writer and not self._writing
        if unused:
            file.close()
        elif taken is not None and failure is not None:
            self._fail_file(taken, failure)
        elif taken is not None:
            self._commit(taken, self._prompt)
        return count

    def end(self, end: RequestEnd) -> None:
        """End the file: no more rows will come, and no write is in flight."""
        token_ids = np.concatenate([self._prompt, end.output_token_ids])
        with self._mutex:
            file, missing = self._claim(), self._written.missing(len(token_ids))
        if file is None:
            return
        if end.aborted:
            file.discard()
            self._on_ended(self)
            self._stats.aborted()
            self._on_decided(self, None)
        elif missing:
            spans = describe_missing(missing, len(token_ids))
            reason = f"the request ended without rows of token positions {spans}"
            self._fail_file(file, SinkError(self.request_id, self.path, reason, MISSING_ROWS))
        else:
            self._commit(file, token_ids)

    def fail(self, reason: str, kind: str) -> None:
        """Decide that the request failed; a writer leaves the reason in place of the file."""
        with self._mutex:
            if self._decided:
                return
            self._decided, self._failure, opened = True, reason, self._file is not None
        self._let_writers_in()  # they free the memory of its rows
        self._report(reason, kind)
        if opened:
            self._writers.submit(self.stop)

    def fail_if_reloaded(self) -> None:
        """Fail if its adapter has other weights than when it began. Its last row is yet to come."""
        if adapter_of(self._lora) != self._adapter:
            self.fail(f"its adapter {self._adapter.name!r} was loaded again, with other weights, before its last row", RELOADED)

    def give_up(self) -> bool:
        """Write no more rows, because the server stops. False: the request was decided before."""
        with self._mutex:
            undecided, self._decided = not self._decided, True
            self._failure = self._failure or SERVER_STOPPED
        return undecided

    def stop(self) -> None:
        """Leave the reason in place of the file, unless another thread ends it.

        Call `fail` or `give_up` first.
        """
        with self._mutex:
            file, self._file = self._file, None
        if file is not None:
            assert self._failure is not None
            self._leave_reason(file, self._failure)

    def _let_writers_in(self) -> None:
        """End the opening, once; what waited for it can start."""
        with self._mutex:
            if self._has_opened:
                return
            self._has_opened = True
        if jobs := self.order.done(EVERY_POSITION):
            self._writers.submit(*jobs)

    def _claim(self) -> SinkFile | None:
        """Decide, and take the file. None: it was decided before. The caller holds the mutex."""
        if self._decided:
            return None
        self._decided = True
        file, self._file = self._file, None
        return file

    def _fail_file(self, file: SinkFile, error: Exception) -> None:
        self._leave_reason(file, _reason_of(error))
        self._report(_reason_of(error), failure_kind(error))

    def _leave_reason(self, file: SinkFile, reason: str) -> None:
        """Fail a file that was taken. No write begins anymore, and those in flight may hang."""
        with self._mutex:
            idle = not self._writing
        file.fail(reason, close=idle)
        if not idle:
            with self._mutex:
                self._closed_by_writer, idle = True, not self._writing
            if idle:
                file.close()
        self._on_ended(self)

    def _commit(self, file: SinkFile, token_ids: TokenIds) -> None:
        try:
            file.commit(token_ids, num_prompt_tokens=len(self._prompt))
        except SinkError as error:
            self._on_ended(self)
            self._report(error.reason, failure_kind(error))
            return
        except Exception as error:  # noqa: BLE001 - a bug, and the file has not ended
            self._fail_file(file, error)
            return
        if file.source is not None:
            self._kept_files.add(self.number, file.source)
            self.is_kept = True
        self._on_ended(self)
        seconds = time.perf_counter() - self._landed_at
        self._stats.published(len(token_ids) * self._stored_row_bytes, seconds)
        self._on_decided(self, None)

    def _report(self, reason: str, kind: str) -> None:
        self._stats.failed(kind)
        self._kept_files.failed(kind)
        logger.error("request %r, %s: %s", self.request_id, self.path, reason)
        self._on_decided(self, reason)


def _reason_of(error: Exception) -> str:
    return error.reason if isinstance(error, SinkError) else f"{type(error).__name__}: {error}"


def leave_reason(sink: Sink, request_id: str, path: str, reason: str) -> None:
    """Leave the reason for readers of a request whose file was never opened. Blocks on storage.

    Rows that are there by now stay.
    """
    try:
        sink.open(request_id, path).fail(reason)
    except Exception as error:  # noqa: BLE001 - any error fails this request alone
        logger.error("request %r, %s: the reason of its failure could not be left there: %s", request_id, path, error)


def describe_not_finite(first: int, rows: torch.Tensor) -> str | None:
    """Name the first row with a NaN or an infinity. Return None if all are finite.

    Args:
        first: token position of the first row.
        rows: [rows, layers, hidden].
    """
    low, high = torch.aminmax(rows)  # propagates NaN; one pass and no temporary, unlike isfinite
    if torch.isfinite(low) and torch.isfinite(high):
        return None
    row, layer = (~torch.isfinite(rows).all(dim=-1)).nonzero()[0].tolist()
    return f"the row of token position {first + row} is not finite in layer {layer} of the {rows.shape[1]} that are stored"
