"""Worker side: takes filled staging slots, and sees to it that each row of an owned request reaches its file and the file is decided."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from vllm_ascend_hsx.config import LAST_WORDS_S
from vllm_ascend_hsx.connector.extraction import Extraction, leave_reason
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart, WorkerReport
from vllm_ascend_hsx.connector.row_order import EVERY_POSITION
from vllm_ascend_hsx.connector.stats import COPY_FAILED, REFUSED, SILENT_STORAGE, HsxStats, StatsRecorder
from vllm_ascend_hsx.connector.threads import JobThread, OpenerThread, WriterJob, WriterPool
from vllm_ascend_hsx.sinks.base import Sink
from vllm_ascend_hsx.sinks.names import ERROR_SUFFIX, file_name
from vllm_ascend_hsx.sinks.packed import handle_of
from vllm_ascend_hsx.spans import ALL_ROWS, Span
from vllm_ascend_hsx.staging import Copier, Piece, PinnedRing, StagingCache, StagingSlot

logger = logging.getLogger(__name__)

# Requests that were refused because the storage is silent, and whose reason waits to be left in their place.
_MAX_REASONS = 10_000
# Rows of a piece that one writer takes at a time: enough for its work to outweigh the hand-over.
_JOB_BYTES = 1 << 20


class ExtractionWorker:
    """One rank's part of the extraction.

    The main thread only stages and passes slots on; an opener opens files; the copier thread issues copies and knows who is under way;
    writer threads write and decide files. What passes between them is queues, so no lock is held while anything slow happens.

    Args:
        rank: tensor-parallel rank; requests of other owners are ignored.
        staging: the cache-only layer's.
        ring: pinned memory that rows pass through.
        sink: makes files.
        device: the worker's NPU.
        num_writers: writer threads.
        patience: seconds that a step waits for storage that does nothing at all; then the requests whose rows it holds fail.
        check_finite: whether a file with a NaN or an infinity fails.
        stored_row_bytes: of one token in the sink; those of a row of the ring if None.
    """

    def __init__(
        self,
        *,
        rank: int,
        staging: StagingCache,
        ring: PinnedRing,
        sink: Sink,
        device: torch.device,
        num_writers: int,
        patience: float = 30.0,
        check_finite: bool = False,
        stored_row_bytes: int | None = None,
    ) -> None:
        self._rank = rank
        self._staging = staging
        self._ring = ring
        self._sink = sink
        self._patience = patience
        self._check_finite = check_finite
        self._row_bytes = ring.row_bytes
        self._stored_row_bytes = stored_row_bytes or ring.row_bytes
        self._owned: dict[str, Extraction] = {}  # the main thread's
        self._opening: list[Extraction] = []  # the main thread's
        self._extractions: dict[str, Extraction] = {}  # the copier thread's
        self._mutex = threading.Lock()  # guards the next four
        self._under_way: set[Extraction] = set()
        self._decided: list[tuple[Extraction, str | None]] = []
        self._refused: dict[str, str] = {}
        self._backlog = 0
        self._reported = (0, False)
        self._stats = StatsRecorder(rank, ring.take_peak_fill, lambda: self._backlog)
        self._opener = OpenerThread("hsx-opener")
        self._reasons = JobThread("hsx-reasons")
        self._writers = WriterPool(num_writers, "hsx-writer")
        staging.wait_for_slot = self._wait_for_slot
        self._copier = Copier(ring, device, self._deliver, self._on_copy_error)

    # Main thread

    def start_step(self, metadata: HsxConnectorMetadata) -> None:
        """Let the files of requests that begin be opened, close those of requests that ended, and say what is wanted of this step."""
        if metadata.stats_wanted:
            self._stats.send()
        for ended in metadata.ended:
            self._staging.wanted.pop(ended.request_id, None)
            if self._owned.pop(ended.request_id, None) is not None:
                self._copier.then(partial(self._end, ended))
        for start in metadata.started:
            if start.owner == self._rank:
                self._start(start)

    def _start(self, start: RequestStart) -> None:
        if start.request_id in self._owned:
            self._refuse(start, "another request of this id is under way", REFUSED)
            return
        if self._storage_is_stuck():
            self._refuse(start, self._stuck_reason(), SILENT_STORAGE)
            return
        row_bytes = self._row_bytes, self._stored_row_bytes
        extraction = Extraction(start, self._writers, self._sink.writes_side_by_side, row_bytes, self._on_decided, self._stats)
        self._owned[start.request_id] = extraction
        with self._mutex:
            self._under_way.add(extraction)
        self._opening.append(extraction)
        self._staging.wanted[start.request_id] = ALL_ROWS if start.include_output else len(start.token_ids)
        self._copier.then(partial(self._extractions.__setitem__, start.request_id, extraction))
        self._opener.submit(partial(extraction.open, self._sink))

    def _refuse(self, start: RequestStart, reason: str, kind: str) -> None:
        self._stats.failed(kind)
        logger.error("request %r, %s: %s", start.request_id, start.path, reason)
        with self._mutex:
            self._refused[start.request_id] = reason
        path = Path(start.path)
        # Only under its own name: one that its client has chosen may be another request's when the storage answers.
        if kind == SILENT_STORAGE and path.name in (file_name(start.request_id), handle_of(start.request_id)):
            if self._reasons.waiting < _MAX_REASONS:
                self._reasons.submit(partial(leave_reason, self._sink, start.request_id, path, reason))
            else:
                logger.error("%s%s will not be there: %d others wait for the storage", path, ERROR_SUFFIX, _MAX_REASONS)

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
        """What happened since the last report, or None if nothing did.

        The files of this step's new requests are open when this returns: their locks must be held before a response can leave.
        """
        if self._opening:
            if not self._opener.wait(self._patience):
                for extraction in self._opening:
                    extraction.fail(self._stuck_reason(), SILENT_STORAGE)
            self._opening = []
        stuck = self._storage_is_stuck()
        with self._mutex:
            if not self._decided and not self._refused and (self._backlog, stuck) == self._reported:
                return None
            decided, self._decided = self._decided, []
            refused, self._refused = self._refused, {}
            self._reported = (self._backlog, stuck)
            report = WorkerReport({**refused}, {self._rank: self._backlog}, {self._rank} if stuck else set())
        for extraction, error in decided:
            report.outcomes[extraction.request_id] = error
            if error is not None and self._owned.get(extraction.request_id) is extraction:
                self._staging.wanted.pop(extraction.request_id, None)  # nobody needs the rest of its rows
        return report

    def take_stats(self) -> HsxStats | None:
        """What was counted since the last call."""
        return self._stats.take()

    def close(self, timeout: float | None = None) -> None:
        """Finish what was staged, then end all threads; files that are still incomplete fail with that reason.

        Args:
            timeout: seconds for what was staged; what is not in its file by then is lost, and its file fails. None: as long as it takes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        if self._backlog and timeout != 0:
            limit = "" if timeout is None else f", in at most {timeout:g} s"
            logger.warning("the server stops when %d bytes of rows are in their files%s", self._backlog, limit)
        why = "it was interrupted while it wrote"
        try:
            if self._drain(left):
                why = "they were not complete"
            else:
                why = f"the storage did not take {self._backlog} bytes within {timeout:g} s"
        finally:  # also when a signal handler raises: whoever waits for a file is to hear of it
            patience = left()
            self._give_up(why, None if patience is None else patience + LAST_WORDS_S)

    def _drain(self, left: Callable[[], float | None]) -> bool:
        """Have all that was staged written. False: not in the time that is left; the threads go on until the storage answers."""

        # Behind the last piece: the copier would wait for ever for memory that a writer which ended earlier does not give back.
        self._copier.then(self._writers.end)
        return self._copier.close(left()) and self._writers.join(left()) and self._reasons.close(left())

    def _give_up(self, why: str, timeout: float | None) -> None:
        """Leave a reason in place of each file that is not complete, and end the opener."""
        with self._mutex:
            unfinished, self._under_way = self._under_way, set()
        for extraction in unfinished:
            extraction.give_up()
        names = ", ".join(sorted(extraction.request_id for extraction in unfinished))
        if unfinished:
            logger.error("stopping without the files of %d requests, %s: %s", len(unfinished), why, names)
        self._reasons.close(0)
        self._opener.submit(self._sink.close)
        if not self._opener.close(timeout):
            logger.error("the storage does not answer: some of these files may have no reason in their place")

    def _wait_for_slot(self, slot: StagingSlot, spans: Sequence[Span]) -> bool:
        """Wait while the ring is full and the storage gets on; False: it does not, and these requests have failed."""
        if slot.issued.is_set():
            return True
        began = time.perf_counter()
        issued = slot.issued.wait(self._patience - self._ring.stuck_for())
        while not issued and not self._storage_is_stuck():
            issued = slot.issued.wait(self._patience - self._ring.stuck_for())
        self._stats.stalled(time.perf_counter() - began)
        if not issued:
            for span in spans:
                self._staging.wanted.pop(span.request_id, None)
                self._owned[span.request_id].fail(self._stuck_reason(), SILENT_STORAGE)
        return issued

    def _storage_is_stuck(self) -> bool:
        return self._ring.stuck_for() >= self._patience

    def _stuck_reason(self) -> str:
        return f"the storage did not answer for {self._patience:g} s"

    # Copier thread

    def _deliver(self, piece: Piece) -> None:
        parts: list[tuple[Extraction, Span]] = []
        num_bytes = 0
        for span in piece.spans:
            part = (self._extractions[span.request_id], span)
            if not part[0].order.begin(span.positions, partial(self._write, piece, [part])):
                continue
            parts.append(part)
            num_bytes += span.num_rows * self._row_bytes
            if num_bytes >= _JOB_BYTES:
                self._writers.submit(partial(self._write, piece, parts))
                parts, num_bytes = [], 0
        if parts:
            self._writers.submit(partial(self._write, piece, parts))

    def _on_copy_error(self, spans: Sequence[Span], lost_rows: int, error: Exception) -> None:
        for span in spans:
            self._extractions[span.request_id].fail(f"copy from the device failed: {error}", COPY_FAILED)
        self._add_backlog(-lost_rows)

    def _end(self, end: RequestEnd) -> None:
        extraction = self._extractions.pop(end.request_id)
        job = partial(self._end_file, extraction, end)
        if extraction.order.begin(EVERY_POSITION, job):
            self._writers.submit(job)

    # Writer threads

    def _write(self, piece: Piece, parts: list[tuple[Extraction, Span]]) -> list[WriterJob]:
        try:
            landed_at = piece.wait()
            for extraction, span in parts:
                check = piece.rows[span.row : span.row + span.num_rows] if self._check_finite else None
                extraction.write(span.first, piece.read(span), landed_at, check)
        except Exception as error:  # noqa: BLE001 - waiting for the copy failed; this thread serves other files too
            for extraction, _ in parts:
                extraction.fail(f"copy from the device failed: {error}", COPY_FAILED)
        finally:
            if piece.release(len(parts)):
                self._stats.copied(len(piece.rows) * self._row_bytes, piece.landed_after)
            self._add_backlog(-sum(span.num_rows for _, span in parts))
        return [job for extraction, span in parts for job in extraction.order.done(span.positions)]

    @staticmethod
    def _end_file(extraction: Extraction, end: RequestEnd) -> tuple[()]:
        extraction.end(end)
        return ()

    # Any thread

    def _add_backlog(self, rows: int) -> None:
        with self._mutex:
            self._backlog += rows * self._row_bytes

    def _on_decided(self, extraction: Extraction, error: str | None) -> None:
        with self._mutex:
            self._under_way.discard(extraction)
            self._decided.append((extraction, error))
