"""Worker side: takes filled staging slots, and sees to it that each row of an owned request reaches its file and the file is decided."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart, WorkerReport
from vllm_ascend_hsx.sinks.base import Sink, SinkError, SinkFile
from vllm_ascend_hsx.sinks.spans import SpanSet
from vllm_ascend_hsx.spans import ALL_ROWS, Span
from vllm_ascend_hsx.staging import Copier, Piece, PinnedRing, StagingCache

OnDecided = Callable[[str, str | None], None]


class _WriterThread:
    """Runs what it is given in order. All work on one file goes through one writer, so a row that is computed again is written again
    behind its first version, and the end of a request comes behind all of its rows."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _Extraction:
    """One owned request: its file, and whether that is decided. Touched by its writer thread alone once it is under way."""

    def __init__(self, start: RequestStart, file: SinkFile, writer: _WriterThread, on_decided: OnDecided) -> None:
        self.request_id = start.request_id
        self.writer = writer
        self._prompt = start.token_ids
        self._include_output = start.include_output
        self._file = file
        self._on_decided = on_decided
        self._written = SpanSet()
        self._decided = False

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Write rows [rows, layers, hidden] of token positions from `first`; the last ones of a prompt complete its file."""
        if self._decided:
            return
        with self._failing_alone():
            self._file.write(first, rows.view(torch.uint8).numpy())
            self._written.add(first, first + rows.shape[0])
            if not self._include_output and not self._written.missing(len(self._prompt)):
                self._commit(self._prompt)

    def end(self, end: RequestEnd) -> None:
        """No more rows will come. A file that is not complete now never will be."""
        if self._decided:
            return
        if end.aborted:
            self._file.discard()
            self._decide(None)
            return
        token_ids = np.concatenate([self._prompt, end.output_token_ids])
        if missing := self._written.missing(len(token_ids)):
            self.fail(f"the request ended without rows for token positions {missing}")
            return
        with self._failing_alone():
            self._commit(token_ids)

    def fail(self, reason: str) -> None:
        """Give the file up and say why to whoever waits for it."""
        if not self._decided:
            self._file.fail(reason)
            self._decide(reason)

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Whatever goes wrong inside concerns this file alone: its writer serves others too."""
        try:
            yield
        except SinkError as error:
            self.fail(error.reason)
        except Exception as error:  # noqa: BLE001
            self.fail(f"{type(error).__name__}: {error}")

    def _commit(self, token_ids: np.ndarray) -> None:
        self._file.commit(token_ids, num_prompt_tokens=len(self._prompt))
        self._decide(None)

    def _decide(self, error: str | None) -> None:
        self._decided = True
        self._on_decided(self.request_id, error)


class ExtractionWorker:
    """One rank's part of the extraction.

    The main thread only stages, opens files and passes slots on; the copier thread issues copies and knows who is under way; writer
    threads write and decide files. What passes between them is queues, so no lock is held while anything slow happens.

    Args:
        rank: tensor-parallel rank; requests of other owners are ignored.
        staging: the cache-only layer's.
        ring: pinned memory that rows pass through.
        sink: makes files.
        device: the worker's NPU.
        num_writers: writer threads.
    """

    def __init__(self, *, rank: int, staging: StagingCache, ring: PinnedRing, sink: Sink, device: torch.device, num_writers: int) -> None:
        self._rank = rank
        self._staging = staging
        self._sink = sink
        self._row_bytes = staging.rows[0, 0].numel() * staging.rows.element_size()
        self._owned: set[str] = set()  # the main thread's
        self._extractions: dict[str, _Extraction] = {}  # the copier thread's
        self._writers = [_WriterThread(f"hsx-writer-{index}") for index in range(num_writers)]
        self._opened = 0
        self._report_lock = threading.Lock()
        self._outcomes: dict[str, str | None] = {}
        self._backlog = 0
        self._reported_backlog = 0
        self._copier = Copier(ring, device, self._deliver, self._on_copy_error)

    # Main thread

    def start_step(self, metadata: HsxConnectorMetadata) -> None:
        """Open the files of requests that begin, close those of requests that ended, and say what is wanted of this step."""
        for ended in metadata.ended:
            self._staging.wanted.pop(ended.request_id, None)
            if ended.request_id in self._owned:
                self._owned.remove(ended.request_id)
                self._copier.then(partial(self._end, ended))
        for start in metadata.started:
            if start.owner == self._rank:
                self._start(start)

    def _start(self, start: RequestStart) -> None:
        try:
            # Here and not in a thread: its lock must be held before the response can leave.
            file = self._sink.open(start.request_id, Path(start.path))
        except SinkError as error:
            self._on_decided(start.request_id, error.reason)
            return
        writer = self._writers[self._opened % len(self._writers)]
        self._opened += 1
        extraction = _Extraction(start, file, writer, self._on_decided)
        self._owned.add(start.request_id)
        self._staging.wanted[start.request_id] = ALL_ROWS if start.include_output else len(start.token_ids)
        self._copier.then(partial(self._extractions.__setitem__, start.request_id, extraction))

    def save(self) -> None:
        """Pass on the slot that this step filled, if it filled one."""
        slot = self._staging.take()
        if slot is None:
            return
        for span in slot.spans:
            # The last row that is wanted: a request that only decodes from here on costs nothing any more.
            if span.first + span.num_rows == self._staging.wanted[span.request_id]:
                del self._staging.wanted[span.request_id]
        self._add_backlog(slot.num_rows)
        self._copier.submit(slot)

    def drain_copies(self) -> None:
        """Wait until no copy reads a staging slot."""
        self._copier.drain()

    def report(self) -> WorkerReport | None:
        """What happened since the last report, or None if nothing did."""
        with self._report_lock:
            if not self._outcomes and self._backlog == self._reported_backlog:
                return None
            outcomes, self._outcomes = self._outcomes, {}
            self._reported_backlog = self._backlog
            return WorkerReport(outcomes, {self._rank: self._backlog})

    def close(self) -> None:
        """Finish what was staged, then end all threads; files that are still incomplete fail with that reason."""
        self._copier.close()
        for writer in self._writers:
            writer.close()
        self._sink.close()

    # Copier thread

    def _deliver(self, piece: Piece) -> None:
        for span in piece.spans:
            extraction = self._extractions[span.request_id]
            extraction.writer.submit(partial(self._write, extraction, piece, span))

    def _on_copy_error(self, spans: Sequence[Span], lost_rows: int, error: Exception) -> None:
        for span in spans:
            extraction = self._extractions[span.request_id]
            extraction.writer.submit(partial(extraction.fail, f"copy from the device failed: {error}"))
        self._add_backlog(-lost_rows)

    def _end(self, end: RequestEnd) -> None:
        extraction = self._extractions.pop(end.request_id)
        extraction.writer.submit(partial(extraction.end, end))

    # Writer threads

    def _write(self, extraction: _Extraction, piece: Piece, span: Span) -> None:
        try:
            extraction.write(span.first, piece.read(span))
        except Exception as error:  # noqa: BLE001 - waiting for the copy failed; this thread serves other files too
            extraction.fail(f"copy from the device failed: {error}")
        finally:
            piece.release()
            self._add_backlog(-span.num_rows)

    # Any thread

    def _add_backlog(self, rows: int) -> None:
        with self._report_lock:
            self._backlog += rows * self._row_bytes

    def _on_decided(self, request_id: str, error: str | None) -> None:
        with self._report_lock:
            self._outcomes[request_id] = error
