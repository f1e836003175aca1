"""Batches: rows that come one per step are collected, so that one write stores many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_ascend_hsx.connector.extraction import Extraction
from vllm_ascend_hsx.connector.progress import RankProgress
from vllm_ascend_hsx.drafter.landing import HostChunk
from vllm_ascend_hsx.drafter.spans import Span

BATCH_BYTES = 256 << 10  # of a file: from here on a larger write is hardly faster


class Batch:
    """Consecutive rows of one request, copied from the ring. Writers use it like a HostChunk.

    Args:
        extraction: the request.
        first: token position of the first row.

    Attributes:
        num_bytes: size of the rows.
        end: token position after the last row.
        landed_at: when the last row arrived in host memory, by time.perf_counter.
    """

    def __init__(self, extraction: Extraction, first: int) -> None:
        self.extraction = extraction
        self.end = first
        self.num_bytes = 0
        self.landed_at = 0.0
        self._first = first
        self._rows: list[bytes] = []

    def append(self, chunk: HostChunk, span: Span) -> None:
        """Copy the row that follows the last one."""
        row = bytes(chunk.read(span))
        self._rows.append(row)
        self._like = chunk.rows
        self.num_bytes += len(row)
        self.end += 1
        self.landed_at = chunk.landed_at

    @property
    def span(self) -> Span:
        """All its rows."""
        return Span(self.extraction.request_id, self._first, self.end - self._first, 0)

    @property
    def rows(self) -> torch.Tensor:
        """The rows [rows, layers, hidden], copied."""
        data = torch.frombuffer(bytearray(b"".join(self._rows)), dtype=self._like.dtype)
        return data.view(-1, *self._like.shape[1:])

    def read(self, span: Span) -> memoryview:
        """Return the bytes of its rows."""
        assert span.first == self._first
        return memoryview(b"".join(self._rows))

    def release(self, spans: Sequence[Span]) -> None:
        """Free its memory."""
        self._rows.clear()


class Batches:
    """Collect single rows. For the lander's thread only.

    A decode adds one row per request and step. A write for each row takes several times the CPU
    time of a joined write. The last row of a prompt is not collected if the request needs no more.

    Rows are collected while less than half of the ring's bytes wait to be written, so the batches
    never have more memory than that. Otherwise all batches are written, and the next rows are
    written from the ring. So rows do not wait here while storage is slow.

    Args:
        progress: records the collected rows.
        ring_bytes: size of the ring.
        enter: has a batch written, behind all earlier rows of its request.
    """

    def __init__(self, progress: RankProgress, ring_bytes: int, enter: Callable[[Batch], None]) -> None:
        self._progress = progress
        self._most_bytes = ring_bytes // 2
        self._enter = enter
        self._open: dict[Extraction, Batch] = {}

    def collect(self, chunk: HostChunk) -> list[Span]:
        """Collect single rows of a chunk, and return the spans that the caller must write itself.

        A request's batch is written before rows that do not follow it.
        """
        has_room = self._progress.backlog < self._most_bytes
        if not has_room:
            self.flush_all()
        collected, others = list[Span](), list[Span]()
        for span in chunk.spans:
            waits = has_room and span.num_rows == 1 and not chunk.requests[span.request_id].completes(span)
            (collected if waits else others).append(span)
        for span in others if self._open else ():
            self.flush(chunk.requests[span.request_id])
        if collected:
            self._progress.collect(len(collected))
            for span in collected:
                self._append(chunk.requests[span.request_id], chunk, span)
            chunk.release(collected)
        return others

    def flush(self, extraction: Extraction) -> None:
        """Have a request's batch written, if it has one."""
        if (batch := self._open.pop(extraction, None)) is not None:
            self._progress.end_batch(batch.num_bytes)
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
            batch = self._open[extraction] = Batch(extraction, span.first)
        batch.append(chunk, span)
        if batch.num_bytes >= BATCH_BYTES:
            self.flush(extraction)
