"""Worker side: takes filled staging slots, and sees to it that each row of an owned request reaches its file and the file is decided."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from vllm_ascend_hsx.config import FAILURE_REPORT_TIMEOUT_S
from vllm_ascend_hsx.connector.admission import OwedRows
from vllm_ascend_hsx.connector.extraction import Extraction, leave_reason
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RankState, RequestEnd, RequestStart, WorkerReport
from vllm_ascend_hsx.connector.pace import StepRate, WriteRate
from vllm_ascend_hsx.connector.stats import COPY_FAILED, REFUSED, SILENT_STORAGE, HsxStats, StatsRecorder
from vllm_ascend_hsx.connector.storage_watch import StorageWatch
from vllm_ascend_hsx.connector.threads import JobThread, OpenerThread, WriterJob, WriterPool
from vllm_ascend_hsx.connector.write_order import EVERY_POSITION
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import ALL_ROWS, Span
from vllm_ascend_hsx.drafter.staging import Copier, HostChunk, StagingCache, StagingSlot
from vllm_ascend_hsx.protocol.mooncake_manifest import handle_of
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, file_name
from vllm_ascend_hsx.sinks.base import Sink

logger = logging.getLogger(__name__)

# Requests that were refused because the storage is silent, and whose reason waits to be left in their place.
_MAX_REASONS = 10_000
# Rows of a piece that one writer takes at a time: enough for its work to outweigh the hand-over.
_JOB_BYTES = 1 << 20
_OPENS_S = 0.05  # that files may take to open, once their step is over, before that counts as waiting for storage


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
        slow_storage: "fail": a step does not wait for storage; the requests whose rows would have to wait fail.
        where: the storage, in words.
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
        slow_storage: Literal["wait", "fail"] = "wait",
        where: str = "the storage",
        check_finite: bool = False,
        stored_row_bytes: int | None = None,
    ) -> None:
        self._rank = rank
        self._staging = staging
        self._ring = ring
        self._sink = sink
        self._check_finite = check_finite
        self._row_bytes = ring.row_bytes
        self._stored_row_bytes = stored_row_bytes or ring.row_bytes
        self._owned: dict[str, Extraction] = {}  # the main thread's
        self._opening: list[Extraction] = []  # the main thread's
        self._extractions: dict[str, Extraction] = {}  # the copier thread's
        self._mutex = threading.Condition()  # guards the next six
        self._not_ended: set[Extraction] = set()  # notified when one of them goes
        self._under_way: OwedRows[Extraction] = OwedRows()
        self._decided: list[tuple[Extraction, str | None]] = []
        self._refused: dict[str, str] = {}
        self._backlog = 0
        self._num_started = 0
        self._staged_bytes = 0  # by the step that runs
        self._reported = RankState()
        self._write_rate = WriteRate(num_writers)
        self._step_rate = StepRate()
        self._stats = StatsRecorder(rank, ring.take_peak_fill, lambda: self._backlog, self._write_rate.value)
        self._watch = StorageWatch(
            patience, slow_storage, where, lambda: self._backlog, self._stats, self._write_rate, self._step_rate
        )
        self._opener = OpenerThread("hsx-opener")
        self._reasons = JobThread("hsx-reasons")
        self._writers = WriterPool(num_writers, "hsx-writer")
        staging.wait_for_slot = self._wait_for_slot
        self._copier = Copier(ring, device, self._deliver, self._on_copy_error)

    # Main thread

    def start_step(self, metadata: HsxConnectorMetadata) -> None:
        """Open the files of new requests, end those of finished ones, and select the rows of this step."""
        if metadata.stats_wanted:
            self._stats.send()
        for ended in metadata.ended:
            self._staging.wanted.pop(ended.request_id, None)
            if self._owned.pop(ended.request_id, None) is not None:
                self._copier.then(partial(self._end, ended))
        for start in metadata.started:
            if start.owner == self._rank:
                self._num_started += 1
                self._start(start)

    def _start(self, start: RequestStart) -> None:
        if start.request_id in self._owned:
            self._refuse(start, "another request of this id is under way", REFUSED)
            return
        if self._watch.is_stuck:
            self._refuse(start, self._watch.silence, SILENT_STORAGE)
            return
        row_bytes = self._row_bytes, self._stored_row_bytes
        extraction = Extraction(
            start, self._writers, self._sink.writes_side_by_side, row_bytes, self._on_decided, self._on_ended, self._stats
        )
        self._owned[start.request_id] = extraction
        with self._mutex:
            self._not_ended.add(extraction)
            self._under_way.begin(extraction, len(start.token_ids), start.max_output_rows)
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
        self._staged_bytes = slot.num_rows * self._row_bytes
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
            self._wait_until_open()
        staged, self._staged_bytes = self._staged_bytes, 0
        self._step_rate.stepped(staged)
        with self._mutex:
            state = self._state()
            if not self._decided and not self._refused and state == self._reported:
                return None
            decided, self._decided = self._decided, []
            refused, self._refused = self._refused, {}
            self._reported = state
            report = WorkerReport({**refused}, {self._rank: state})
        for extraction, error in decided:
            report.outcomes[extraction.request_id] = error
            if error is not None and self._owned.get(extraction.request_id) is extraction:
                self._staging.wanted.pop(extraction.request_id, None)  # nobody needs the rest of its rows
        return report

    def _state(self) -> RankState:
        return RankState(
            backlog=self._backlog,
            prompt_owed=self._under_way.prompt * self._row_bytes,
            output_owed=self._under_way.output * self._row_bytes,
            generating=self._under_way.generating,
            started=self._num_started,
            write_rate=self._write_rate.value(),
            prompt_rate=self._step_rate.bytes_per_s,
            step_rate=self._step_rate.steps_per_s,
            quiet=self._watch.is_quiet,
            stuck=self._watch.is_stuck,
        )

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
        finally:  # also when a signal handler raises: readers that wait for a file must learn of it
            patience = left()
            self._give_up(why, None if patience is None else patience + FAILURE_REPORT_TIMEOUT_S)

    def _drain(self, left: Callable[[], float | None]) -> bool:
        """Have all that was staged written. False: not in the time that is left; the threads go on until the storage answers."""

        # Behind the last piece: the copier would wait for ever for memory that a writer which ended earlier does not give back.
        self._copier.then(self._writers.end)
        return self._copier.close(left()) and self._writers.join(left()) and self._reasons.close(left())

    def _give_up(self, why: str, timeout: float | None) -> None:
        """Leave a reason in place of each file that is not complete, and end the opener."""
        with self._mutex:
            not_ended = list(self._not_ended)
        unfinished = [extraction for extraction in not_ended if extraction.give_up()]
        names = ", ".join(sorted(extraction.request_id for extraction in unfinished))
        if unfinished:
            logger.error("stopping without the files of %d requests, %s: %s", len(unfinished), why, names)
        self._reasons.close(0)
        self._opener.submit(partial(self._end_files, not_ended))
        if not self._opener.close(timeout):
            logger.error("the storage does not answer: some of these files may have no reason in their place")

    def _end_files(self, extractions: Sequence[Extraction]) -> None:
        """Leave the reasons, wait for what other threads are publishing, and close the sink."""
        for extraction in extractions:
            extraction.stop()
        with self._mutex:
            self._mutex.wait_for(lambda: not self._not_ended)
        self._reasons.close()
        self._sink.close()

    def _wait_for_slot(self, slot: StagingSlot, spans: Sequence[Span]) -> bool:
        """Wait until the slot may be written. False: that is not to be waited for, and these requests have failed."""
        slot.settled.wait()
        if slot.issued.is_set():
            return True
        if self._watch.steps_wait and self._watch.wait(slot.issued.wait, self._watch.silent_for):
            slot.settled.wait()  # follows at once
            return True
        for span in spans:
            self._staging.wanted.pop(span.request_id, None)
            self._owned[span.request_id].fail(*self._watch.failure)
        return False

    def _wait_until_open(self) -> None:
        """Wait for the files of this step's new requests; those that do not open in time fail."""
        if self._watch.steps_wait:
            done = self._opener.wait(_OPENS_S) or self._watch.wait(self._opener.wait, self._opener.silent_for)
        else:
            done = self._opener.wait(max(_OPENS_S, self._step_rate.longest))
        for extraction in self._opening:
            if not done and not extraction.has_opened:
                extraction.fail(*self._watch.failure)
        self._opening = []

    # Copier thread

    def _deliver(self, piece: HostChunk) -> None:
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

    def _write(self, piece: HostChunk, parts: list[tuple[Extraction, Span]]) -> list[WriterJob]:
        written = 0
        try:
            landed_at = piece.wait()
            self._write_rate.begin(sum(span.num_rows for _, span in parts) * self._row_bytes)
            try:
                for extraction, span in parts:
                    check = piece.rows[span.row : span.row + span.num_rows] if self._check_finite else None
                    written += extraction.write(span.first, piece.read(span), landed_at, check) * self._row_bytes
            finally:
                self._write_rate.end(written)
        except Exception as error:  # noqa: BLE001 - waiting for the copy failed; this thread serves other files too
            for extraction, _ in parts:
                extraction.fail(f"copy from the device failed: {error}", COPY_FAILED)
        finally:
            if piece.release([span for _, span in parts]):
                self._stats.copied(len(piece.rows) * self._row_bytes, piece.landed_after)
            self._leave_memory(parts)
        return [job for extraction, span in parts for job in extraction.order.done(span.positions)]

    def _end_file(self, extraction: Extraction, end: RequestEnd) -> tuple[()]:
        self._write_rate.begin(0)
        extraction.end(end)
        self._write_rate.end(0)
        return ()

    # Any thread

    def _add_backlog(self, rows: int) -> None:
        with self._mutex:
            if rows < 0 or not self._backlog:
                self._watch.answered()
            self._backlog += rows * self._row_bytes

    def _leave_memory(self, parts: Sequence[tuple[Extraction, Span]]) -> None:
        self._add_backlog(-sum(span.num_rows for _, span in parts))
        with self._mutex:
            for extraction, span in parts:
                self._under_way.wrote(extraction, *span.positions)

    def _on_decided(self, extraction: Extraction, error: str | None) -> None:
        with self._mutex:
            self._under_way.end(extraction)
            self._decided.append((extraction, error))

    def _on_ended(self, extraction: Extraction) -> None:
        with self._mutex:
            self._not_ended.discard(extraction)
            self._mutex.notify_all()
