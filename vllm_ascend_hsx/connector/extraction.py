"""One owned request: its file, which of its rows are there, and the one decision about it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vllm_ascend_hsx.connector.metadata import RequestEnd, RequestStart
from vllm_ascend_hsx.connector.stats import MISSING_ROWS, NOT_FINITE, StatsRecorder, failure_kind
from vllm_ascend_hsx.connector.threads import WriterPool
from vllm_ascend_hsx.connector.write_order import WriteOrder
from vllm_ascend_hsx.sinks.base import Sink, SinkError, SinkFile
from vllm_ascend_hsx.sinks.spans import SpanSet

logger = logging.getLogger(__name__)


class Extraction:
    """An owned request. `open` belongs to the opener, `write` and `end` to the writers as far as `order` lets them, `fail` to any thread.

    Args:
        start: what the scheduler said of it.
        writers: do all work on its file.
        side_by_side: whether several of them may write at the same time.
        row_bytes: of one token, as they come and as they are stored.
        on_decided: called once, with the error or None for a file that is complete or was discarded after an abort.
        stats: what is counted.
    """

    def __init__(
        self,
        start: RequestStart,
        writers: WriterPool,
        side_by_side: bool,
        row_bytes: tuple[int, int],
        on_decided: Callable[[Extraction, str | None], None],
        stats: StatsRecorder,
    ) -> None:
        self.request_id = start.request_id
        self.order = WriteOrder(side_by_side)
        self._writers = writers
        self._path = Path(start.path)
        self._prompt = start.token_ids
        self._include_output = start.include_output
        self._row_bytes, self._stored_row_bytes = row_bytes
        self._on_decided = on_decided
        self._stats = stats
        self._written = SpanSet()
        self._landed_at = time.perf_counter()
        self._opened_or_failed = threading.Event()
        self._mutex = threading.Lock()  # guards everything below, _written and _landed_at
        self._file: SinkFile | None = None
        self._claimed = False
        self._failure: str | None = None  # to be left in its place

    @property
    def is_ending(self) -> bool:
        """Whether it has been decided, or is being."""
        return self._claimed

    @property
    def has_opened(self) -> bool:
        """Whether its file is open, or it has failed."""
        return self._opened_or_failed.is_set()

    def open(self, sink: Sink) -> None:
        """Open its file. If the request has failed meanwhile, leave the reason in its place."""
        try:
            file = sink.open(self.request_id, self._path, len(self._prompt), may_grow=self._include_output)
        except Exception as error:  # noqa: BLE001 - whatever it is concerns this request alone
            if self._claim():
                self._stats.failed(failure_kind(error))
                self._decide(error.reason if isinstance(error, SinkError) else f"{type(error).__name__}: {error}")
        else:
            with self._mutex:
                self._file, failure = file, self._failure
            if failure is not None:
                file.fail(failure)
        finally:
            self._opened_or_failed.set()

    def write(self, first: int, rows: memoryview, landed_at: float, check: torch.Tensor | None = None) -> int:
        """Write rows; the last ones of a prompt complete its file.

        Args:
            first: token position of the first one.
            rows: their bytes.
            landed_at: when they were in host memory, by time.perf_counter.
            check: the same rows [rows, layers, hidden] if they must be finite.

        Returns:
            How many rows were written: none if there is no file any more, or it has failed.
        """
        file, count = self._wait_until_open(), 0
        if file is None:
            return 0
        with self._failing_alone(file):
            if check is not None and (problem := describe_not_finite(first, check)):
                raise SinkError(self.request_id, self._path, problem, NOT_FINITE)
            began = time.perf_counter()
            file.write(first, rows)
            count = len(rows) // self._row_bytes
            self._stats.wrote(count * self._stored_row_bytes, time.perf_counter() - began)
            with self._mutex:
                self._written.add(first, first + count)
                self._landed_at = max(self._landed_at, landed_at)
                complete = not self._include_output and not self._written.missing(len(self._prompt))
            if complete:
                self._commit(file, self._prompt)
        return count

    def end(self, end: RequestEnd) -> None:
        """No more rows will come. A file that is not complete now never will be."""
        file = self._wait_until_open()
        if file is None:
            return
        if end.aborted:
            if self._claim():
                file.discard()
                self._stats.aborted()
                self._decide(None)
            return
        with self._failing_alone(file):
            token_ids = np.concatenate([self._prompt, end.output_token_ids])
            if missing := self._written.missing(len(token_ids)):
                reason = f"the request ended without rows for token positions {missing}"
                raise SinkError(self.request_id, self._path, reason, MISSING_ROWS)
            self._commit(file, token_ids)

    def fail(self, reason: str, kind: str) -> None:
        """Give the file up: the decision is known at once, and stands in the file's place as soon as a writer gets there."""
        if self._claim():
            with self._mutex:
                self._failure, file = reason, self._file
            self._opened_or_failed.set()  # writers that wait for the file have others to serve
            self._stats.failed(kind)
            self._decide(reason)
            if file is not None:
                self._writers.submit(partial(_fail, file, reason))

    def give_up(self) -> None:
        """Write nothing more: its sink is about to be closed, and then has a reason in place of the file."""
        self._claim()

    def _wait_until_open(self) -> SinkFile | None:
        """Its file, or None if there is nothing more to do with it."""
        self._opened_or_failed.wait()
        return None if self._claimed else self._file

    @contextmanager
    def _failing_alone(self, file: SinkFile) -> Iterator[None]:
        """Whatever goes wrong inside concerns this file alone: its writers serve others too."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            reason = error.reason if isinstance(error, SinkError) else f"{type(error).__name__}: {error}"
            if self._claim():
                file.fail(reason)
                self._stats.failed(failure_kind(error))
                self._decide(reason)

    def _commit(self, file: SinkFile, token_ids: np.ndarray) -> None:
        if not self._claim():
            return
        error: str | None = "its writer was interrupted"
        try:
            file.commit(token_ids, num_prompt_tokens=len(self._prompt))
            self._stats.published(len(token_ids) * self._stored_row_bytes, time.perf_counter() - self._landed_at)
            error = None
        except Exception as problem:  # noqa: BLE001
            error = problem.reason if isinstance(problem, SinkError) else f"{type(problem).__name__}: {problem}"
            file.fail(error)
            self._stats.failed(failure_kind(problem))
        finally:
            self._decide(error)

    def _claim(self) -> bool:
        """Whether the caller is the one who decides."""
        with self._mutex:
            claimed, self._claimed = self._claimed, True
        return not claimed

    def _decide(self, error: str | None) -> None:
        if error is not None:
            logger.error("request %r, %s: %s", self.request_id, self._path, error)
        self._on_decided(self, error)


def _fail(file: SinkFile, reason: str) -> tuple[()]:
    file.fail(reason)
    return ()


def leave_reason(sink: Sink, request_id: str, path: Path, reason: str) -> None:
    """Have readers of a request whose file was never opened find the reason. Waits as long as the storage does not answer."""
    try:
        if path.exists():  # the rows of another request of this name, which had better luck
            return
        sink.open(request_id, path).fail(reason)
    except Exception as error:  # noqa: BLE001 - whatever it is concerns this request alone
        logger.error("request %r, %s: the reason of its failure could not be left there: %s", request_id, path, error)


def describe_not_finite(first: int, rows: torch.Tensor) -> str | None:
    """The first token position and layer whose row holds a NaN or an infinity, in words; None if all are finite.

    Args:
        first: token position of the first row.
        rows: [rows, layers, hidden].
    """
    low, high = torch.aminmax(rows)  # NaN comes out as NaN; one pass and no temporary, unlike isfinite
    if torch.isfinite(low) and torch.isfinite(high):
        return None
    row, layer = (~torch.isfinite(rows).all(dim=-1)).nonzero()[0].tolist()
    return f"the row of token position {first + row} is not finite in layer {layer} of the {rows.shape[1]} that are stored"
