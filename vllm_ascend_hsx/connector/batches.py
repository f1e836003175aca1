"""Batches: collect rows that arrive one per step, and store many of them with one write."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import torch

from vllm_ascend_hsx.connector.extraction import Extraction
from vllm_ascend_hsx.connector.progress import RankProgress
from vllm_ascend_hsx.drafter.landing import HostChunk
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import Span

BATCH_BYTES = 256 << 10  # per file; larger writes are hardly faster
_PART = 4  # unwritten batches hold at most 1 / _PART of the ring


class _Memory(threading.local):
    """Memory in which a writer joins rows. It begins at a page, for direct I/O."""

    def __init__(self) -> None:
        self._data = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Return the first bytes of the memory. Their former content is lost."""
        if len(self._data) < num_bytes:
            self._data = memoryview(mmap.mmap(-1, num_bytes))
        return self._data[:num_bytes]


_memory = _Memory()


class Batch:
    """Consecutive rows of one request, scattered over the ring. Writers use it like a HostChunk.

    A batch keeps no tracked object per row, because the garbage collector would visit each in
    every step.

    Args:
        extraction: the request.
        first: token position of the first row.
        ring: holds the rows.

    Attributes:
        landed_at: arrival time of the last row in host memory, by time.perf_counter.
    """

    def __init__(self, extraction: Extraction, first: int, ring: PinnedRing) -> None:
        self.extraction = extraction
        self.landed_at = 0.0
        self._first = first
        self._ring = ring
        self._data: list[memoryview] = []  # of the chunk of each row
        self._rows: list[int] = []  # index in the chunk
        self._ring_rows: list[int] = []  # index in the ring

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def end(self) -> int:
        """Token position after the last row."""
        return self._first + len(self._rows)

    @property
    def span(self) -> Span:
        """Span of all rows."""
        return Span(self.extraction.request_id, self._first, len(self._rows), 0)

    @property
    def rows(self) -> torch.Tensor:
        """A copy of all rows [rows, layers, hidden]."""
        return self._ring.as_rows(self.read(self.span))

    def append(self, chunk: HostChunk, span: Span) -> None:
        """Add the row that follows the last one."""
        self._data.append(chunk.data)
        self._rows.append(span.row)
        self._ring_rows.append(chunk.first + span.row)
        self.landed_at = chunk.landed_at

    def read(self, span: Span) -> memoryview:
        """Return a copy of all rows as bytes, valid until this thread reads another batch."""
        assert span.first == self._first
        size = self._ring.row_bytes
        joined = _memory.take(len(self._rows) * size)
        for index, (data, row) in enumerate(zip(self._data, self._rows, strict=True)):
            joined[index * size : (index + 1) * size] = data[row * size : (row + 1) * size]
        return joined

    def release(self, spans: Sequence[Span]) -> None:
        """Release all rows; their memory may be reused."""
        self._ring.free(*((row, 1) for row in self._ring_rows))


class Batches:
    """Collect single rows in the ring. For the lander's thread only.

    A decode adds one row per request and step. A write for each row takes several times the CPU
    time of a joined write. The last row of a prompt is not collected if the request needs no more.

    A batch is written when it has `BATCH_BYTES`, and when the request ends. All batches are written
    when they hold more than a quarter of the ring, and when the lander finds the ring full.

    Args:
        progress: counts rows that are ready to be written.
        ring: holds the rows.
        enter: has a batch written, after all earlier rows of the same request.

    Attributes:
        num_rows: rows that wait to be written together.
    """

    def __init__(
        self, progress: RankProgress, ring: PinnedRing, enter: Callable[[Batch], None]
    ) -> None:
        self._progress = progress
        self._ring = ring
        self._most_rows = ring.num_rows // _PART
        self._batch_rows = max(1, BATCH_BYTES // ring.row_bytes)
        self._enter = enter
        self._open: dict[Extraction, Batch] = {}
        self.num_rows = 0

    def collect(self, chunk: HostChunk) -> list[Span]:
        """Collect single rows of a chunk, and return all other spans for the caller to write.

        A request's batch is written before rows that do not follow it.
        """
        others: list[Span] = []
        for span in chunk.spans:
            extraction = chunk.requests[span.request_id]
            if span.num_rows == 1 and not extraction.completes(span):
                self._append(extraction, chunk, span)
            else:
                self.flush(extraction)
                others.append(span)
        if self.num_rows > self._most_rows:
            self.flush_all()
        return others

    def flush(self, extraction: Extraction) -> None:
        """Have a request's batch written, if it has one."""
        if (batch := self._open.pop(extraction, None)) is not None:
            self.num_rows -= batch.num_rows
            self._progress.landed(batch.num_rows)
            self._enter(batch)

    def flush_all(self) -> None:
        """Have all batches written."""
        for extraction in list(self._open):
            self.flush(extraction)

    def _append(self, extraction: Extraction, chunk: HostChunk, span: Span) -> None:
        batch = self._open.get(extraction)
        if batch is not None and batch.end != span.first:  # rows that are computed again
            self.flush(extraction)
            batch = None
        if batch is None:
            batch = self._open[extraction] = Batch(extraction, span.first, self._ring)
        batch.append(chunk, span)
        self.num_rows += 1
        if batch.num_rows >= self._batch_rows:
            self.flush(extraction)
