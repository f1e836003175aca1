"""Worker side: move the rows of owned requests from staging slots to files."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from vllm_ascend_hsx.compat.adapters import loaded_weights
from vllm_ascend_hsx.config import FAILURE_REPORT_TIMEOUT_S
from vllm_ascend_hsx.connector.batches import Batch, Batches
from vllm_ascend_hsx.connector.budget import StoredFiles
from vllm_ascend_hsx.connector.extraction import Extraction, leave_reason
from vllm_ascend_hsx.connector.failure import WorkerFailure
from vllm_ascend_hsx.connector.metadata import (
    HsxConnectorMetadata,
    RequestEnd,
    RequestStart,
    WorkerReport,
)
from vllm_ascend_hsx.connector.open_sources import OpenSources
from vllm_ascend_hsx.connector.progress import RankProgress
from vllm_ascend_hsx.connector.stats import ENGINE_FAILED, HsxStats, StatsRecorder
from vllm_ascend_hsx.connector.storage_watch import StorageRules, StorageWatch
from vllm_ascend_hsx.connector.threads import Job, ThreadPool
from vllm_ascend_hsx.drafter.landing import DeviceError, HostChunk, Lander
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import ALL_ROWS, Span
from vllm_ascend_hsx.drafter.staging import StagingCache, StagingSlot
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX
from vllm_ascend_hsx.sinks.base import REFUSED, Sink
from vllm_ascend_hsx.sinks.data_file import RowSource

logger = logging.getLogger(__name__)

NAME_IN_USE = "another request with this name has not ended, because the storage is slow"

_MAX_REASONS = 10_000  # most reasons of refused requests that wait for unresponsive storage
_JOB_BYTES = 1 << 20  # bytes that a write job collects, to outweigh the hand-over


class ExtractionWorker:
    """Extract the requests of one rank.

    The main thread stages rows and passes slots on. An opener opens files. The lander copies rows
    to the host. Writers write and finish files. Threads exchange work through queues. Only the
    main thread and the lander use the device.

    Args:
        rank: tensor-parallel rank. Requests with other owners are ignored.
        staging, ring: slots of the cache-only layer, and pinned memory.
        sink: makes files.
        num_writers: returns the number of writer threads. Called here, and again in the first
            step, because vllm-ascend binds the process to CPUs at the end of the warm-up
            (bind_cpus, worker/worker.py:781 in 0.23.0).
        storage: the treatment of slow storage.
        check_finite: whether a file with a NaN or an infinity fails.
        stored_row_bytes: bytes of one token in the sink; None if equal to a row of the ring.
        files: as for RankProgress.
    """

    def __init__(
        self,
        *,
        rank: int,
        staging: StagingCache,
        ring: PinnedRing,
        sink: Sink,
        num_writers: Callable[[], int],
        storage: StorageRules,
        check_finite: bool = False,
        stored_row_bytes: int | None = None,
        files: StoredFiles | None = None,
    ) -> None:
        self._rank = rank
        self._staging = staging
        self._sink = sink
        self._check_finite = check_finite
        self._row_bytes = ring.row_bytes
        self._stored_row_bytes = stored_row_bytes or ring.row_bytes
        # For the main thread only.
        self._owned: dict[str, Extraction] = {}
        self._weights: dict[int, str] = {}  # weights of adapters in the last step
        self._opening: list[Extraction] = []
        # Runs jobs that may wait for storage. No other thread waits for these jobs.
        self._background = ThreadPool(1, "hsx-background")
        self._open_sources = OpenSources(self._background.submit)
        self._count_writers: Callable[[], int] | None = num_writers  # None after the first step
        self._progress = RankProgress(ring.row_bytes, num_writers(), files)
        self._check = 1  # number of the last requested check for removed files
        self._stats = StatsRecorder(rank, lambda: self._gauges(ring), self._progress.write_rate)
        self._watch = StorageWatch(storage, self._progress, self._stats)
        self._not_ended: dict[str, Extraction] = {}  # by path
        # Guards `_not_ended` and `_failure`. Notified when a file has ended.
        self._ended = threading.Condition()
        self._opener = ThreadPool(1, "hsx-opener")
        self._writers = ThreadPool(num_writers(), "hsx-writer")
        self._failure = WorkerFailure()
        staging.wait_for_slot = self._wait_for_slot
        staging.pass_on = self._pass_on
        self._batches = Batches(self._progress, ring, self._enter_batch)
        self._lander = Lander(
            ring,
            staging.rows.device,
            self._deliver,
            self._on_device_error,
            self._batches.flush_all,
        )

    # Main thread

    def _gauges(self, ring: PinnedRing) -> dict[str, float]:
        open_sources, open_source_bytes = self._open_sources.space()
        return {
            "ring_fill": ring.take_peak_fill(),
            "backlog_bytes": self._progress.backlog,
            "batch_bytes": self._batches.num_rows * self._row_bytes,
            "open_sources": open_sources,
            "open_source_bytes": open_source_bytes,
        }

    def start_step(self, metadata: HsxConnectorMetadata) -> None:
        """End finished requests, and open the files of new ones.

        Raises:
            DeviceError: see raise_failure.
        """
        self.raise_failure()
        if self._count_writers is not None:
            self._resize_writers(self._count_writers())
            self._count_writers = None
        if metadata.stats_wanted:
            self._stats.send()
        self._watch.peer_is_unresponsive = not metadata.unresponsive <= {self._rank}
        if metadata.check > self._check:
            self._check = metadata.check
            self._background.submit(partial(self._progress.check, metadata.check))
        for number in metadata.released:
            self._open_sources.release(number)
        for ended in metadata.ended:
            self._staging.wanted.pop(ended.request_id, None)
            extraction = self._owned.pop(ended.request_id, None)
            if extraction is not None and (extraction.include_output or not extraction.is_decided):
                self._lander.then(partial(self._end, extraction, ended))
        for request_id, versions in metadata.weights.items():
            if (known := self._owned.get(request_id)) is not None:
                known.weights = versions
        if self._weights != loaded_weights():
            self._weights = dict(loaded_weights())
            for request_id in self._staging.wanted:
                self._owned[request_id].fail_if_reloaded()
        begun = [
            extraction
            for start in metadata.started
            if start.owner == self._rank and (extraction := self._start(start))
        ]
        if begun:  # one call: a lock and a queue per request would cost as much as the rest
            self._opening += begun
            self._opener.submit(*(partial(each.open, self._sink) for each in begun))

    def _start(self, start: RequestStart) -> Extraction | None:
        """Return the request with a file to open, or None if the request was refused."""
        if start.request_id in self._owned:
            self._refuse(start, "another request with this id is running", REFUSED)
            return None
        if self._watch.is_unresponsive:
            self._refuse(start, *self._watch.failure)
            return None
        if start.path in self._not_ended:
            self._refuse(start, NAME_IN_USE, REFUSED)
            return None
        extraction = Extraction(
            start,
            self._writers,
            self._sink.writes_side_by_side,
            (self._row_bytes, self._stored_row_bytes),
            self._on_decided,
            self._on_ended,
            self._open_sources,
            self._stats,
        )
        self._owned[start.request_id] = extraction
        with self._ended:
            self._not_ended[start.path] = extraction
        copied_rows = start.prefix.num_rows if start.prefix else 0
        self._progress.begin(extraction, len(start.token_ids) - copied_rows)
        self._staging.wanted[start.request_id] = (
            ALL_ROWS if start.include_output else len(start.token_ids)
        )
        if start.prefix and (source := self._open_sources.retain(start.prefix.source)):
            extraction.enter((0, copied_rows), partial(self._copy, extraction, source, copied_rows))
        if self._failure.reason is not None:  # since this step began
            extraction.fail(self._failure.reason, ENGINE_FAILED)
        return extraction

    def _refuse(self, start: RequestStart, reason: str, kind: str) -> None:
        self._stats.failed(kind)
        logger.error("request %r, %s: %s", start.request_id, start.path, reason)
        self._progress.refuse(start.request_id, reason)
        if kind == REFUSED:  # the other request with this id or name publishes the outcome
            return
        if self._background.pending >= _MAX_REASONS:
            logger.error(
                "%s%s is not written: %d other reasons already wait for the storage",
                start.path,
                ERROR_SUFFIX,
                _MAX_REASONS,
            )
            return
        self._background.submit(
            partial(leave_reason, self._sink, start.request_id, start.path, reason)
        )

    def save(self) -> None:
        """Pass on the slot that this step filled last, if any.

        Raises:
            DeviceError: see raise_failure.
        """
        self.raise_failure()
        if (slot := self._staging.take()) is not None:
            self._pass_on(slot)

    def _pass_on(self, slot: StagingSlot) -> None:
        slot.requests = {span.request_id: self._owned[span.request_id] for span in slot.spans}
        for span in slot.spans:
            # The request has all rows. Later steps need no work for this request.
            if span.first + span.num_rows == self._staging.wanted[span.request_id]:
                del self._staging.wanted[span.request_id]
        self._progress.staged(
            slot.num_rows, ((slot.requests[span.request_id], span) for span in slot.spans)
        )
        self._lander.submit(slot)

    def drain_copies(self) -> None:
        """Wait until no copy reads a staging slot.

        Raises:
            DeviceError: see raise_failure.
        """
        self._lander.drain()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise if the device has failed: this process must compute no more answers.

        The device reports a failure once, to one thread. If this thread is the lander, the main
        thread learns of the failure here. Answers to work before this call were computed before
        the failure.

        Raises:
            DeviceError: with the text of the first error.
        """
        self._lander.finish_call()
        if self._failure.reason is not None:
            raise DeviceError(self._failure.reason)

    def ask_device(self) -> None:
        """Raise if the device has failed, even if no thread has noticed the failure yet.

        Raises:
            DeviceError: see raise_failure.
            RuntimeError: from the device.
        """
        self._lander.ask()
        self.raise_failure()

    def fail(self, error: Exception) -> None:
        """Fail all files, because a step has raised `error` and vLLM ends the engine."""
        self._lander.abandon()
        self._fail_all(f"the engine failed: {type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        with self._ended:
            if self._failure.reason is not None:
                return
            self._failure.set(reason)
            not_ended = list(self._not_ended.values())
        for extraction in not_ended:
            extraction.fail(reason, ENGINE_FAILED)

    def _resize_writers(self, num_writers: int) -> None:
        self._writers.resize(num_writers)
        self._progress.resize_writers(num_writers)
        num_cpus = len(os.sched_getaffinity(0))
        logger.info(
            "rank %d: %d writers, on the %d CPUs of this process", self._rank, num_writers, num_cpus
        )

    def before_sleep(self) -> None:
        """Complete all copies before device memory is unmapped; see StagingCache.before_sleep."""
        self.drain_copies()
        self._staging.before_sleep()

    def report(self) -> WorkerReport | None:
        """Return the changes since the last report, or None without changes.

        Waits for the files of this step's new requests, because their locks must be held before a
        response can leave.

        Raises:
            DeviceError: see raise_failure.
        """
        self.raise_failure()
        if self._opening:
            self._wait_until_open()
        watch, needs_space = self._watch, self._open_sources.needs_space()
        if (
            news := self._progress.end_step(
                watch.is_paused, watch.is_unresponsive, watch.opens_slowly, needs_space
            )
        ) is None:
            return None
        state, decided, refused = news
        report = WorkerReport(refused, {self._rank: state})
        report.sources = frozenset(
            extraction.number for extraction, _ in decided if extraction.has_open_source
        )
        for extraction, error in decided:
            report.outcomes[extraction.request_id] = error
            if error is not None and self._owned.get(extraction.request_id) is extraction:
                self._staging.wanted.pop(extraction.request_id, None)  # no more rows are needed
        return report

    def take_stats(self) -> HsxStats | None:
        """Return the statistics since the last call, or None if nothing has changed."""
        return self._stats.take()

    def close(self, timeout: float | None = None) -> None:
        """Write all staged rows, then end all threads. Incomplete files fail with the reason.

        Args:
            timeout: most seconds to write the staged rows, None for no limit. Rows that are not
                written by then are lost, and their files fail.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        if self._progress.backlog and self._failure.reason is None and timeout != 0:
            limit = "" if timeout is None else f", in at most {timeout:g} s"
            logger.warning(
                "the server stops after writing %d bytes of rows%s",
                self._progress.backlog,
                limit,
            )
        self._failure.vllm_ends_worker()
        why = "interrupted while writing"
        try:
            # The writers end after the last chunk, when the last file is open. If they ended
            # earlier, no thread would release memory, and the lander would wait forever.
            self._lander.then(self._batches.flush_all)
            self._lander.then(self._opener.wait)
            self._lander.then(self._writers.end)
            if (
                self._lander.close(left())
                and self._writers.join(left())
                and self._background.close(left())
            ):
                why = "the requests were not complete"
            elif self._lander.waits_for_device:
                why = f"the device did not complete the copies of rows within {timeout:g} s"
            else:
                why = (
                    f"the storage did not take {self._progress.backlog} bytes within {timeout:g} s"
                )
        finally:  # also if a signal handler raises: readers wait for the outcome
            self._give_up(
                why, None if timeout is None else (left() or 0.0) + FAILURE_REPORT_TIMEOUT_S
            )

    def _give_up(self, why: str, timeout: float | None) -> None:
        """Publish a reason in place of each incomplete file, and end the opener."""
        with self._ended:
            not_ended = list(self._not_ended.values())
        unfinished = [extraction for extraction in not_ended if extraction.give_up()]
        names = ", ".join(sorted(extraction.request_id for extraction in unfinished))
        if unfinished:
            logger.error(
                "stopping without the files of %d requests (%s): %s", len(unfinished), why, names
            )
        self._background.close(0)
        self._opener.submit(partial(self._end_files, not_ended))
        if not self._opener.close(timeout):
            logger.error(
                "the storage does not answer: some of these requests may have no error file"
            )

    def _end_files(self, extractions: Sequence[Extraction]) -> None:
        self._open_sources.close()
        for extraction in extractions:
            extraction.stop()
        with self._ended:
            self._ended.wait_for(lambda: not self._not_ended)  # other threads end some files
        self._background.close()
        self._sink.close()

    def _wait_for_slot(self, slot: StagingSlot, spans: Sequence[Span]) -> bool:
        """Wait until the slot may be written. If storage takes too long, fail the requests."""
        slot.settled.wait()
        if slot.issued.is_set():
            return True
        if self._watch.steps_wait and self._watch.wait(
            slot.issued.wait, self._progress.stalled_for
        ):
            slot.settled.wait()  # set right after `issued`
            return True
        for span in spans:
            self._staging.wanted.pop(span.request_id, None)
            self._owned[span.request_id].fail(*self._watch.failure)
        return False

    def _wait_until_open(self) -> None:
        """Wait for this step's new files. Fail requests with files not open in time."""
        done = self._watch.wait_for_files(self._opener)
        for extraction in self._opening:
            if not done and extraction.is_opening:
                extraction.fail(*self._watch.failure)
        self._opening = []

    # Lander

    def _on_device_error(self, error: Exception) -> None:
        self._fail_all(f"the device failed: {error}")

    def _deliver(self, chunk: HostChunk) -> None:
        self._stats.copied(len(chunk.rows) * self._row_bytes, chunk.landed_at - chunk.issued_at)
        spans = self._batches.collect(chunk)
        self._progress.landed(sum(span.num_rows for span in spans))
        parts: list[tuple[Extraction, Span]] = []
        num_bytes = 0
        for span in spans:
            extraction = chunk.requests[span.request_id]
            part: tuple[Extraction, Span] = (extraction, span)
            if extraction.enter(span.positions, partial(self._write, chunk, [part])):
                parts.append(part)
                num_bytes += span.num_rows * self._row_bytes
            if extraction.is_complete():
                self._enter_end(extraction, extraction.complete)
            if num_bytes >= _JOB_BYTES:
                self._writers.submit(partial(self._write, chunk, parts))
                parts, num_bytes = [], 0
        if parts:
            self._writers.submit(partial(self._write, chunk, parts))

    def _enter_batch(self, batch: Batch) -> None:
        job = partial(self._write, batch, [(batch.extraction, batch.span)])
        if batch.extraction.enter(batch.span.positions, job):
            self._writers.submit(job)

    def _end(self, extraction: Extraction, end: RequestEnd) -> None:
        self._batches.flush(extraction)
        if not extraction.is_decided:
            self._enter_end(extraction, partial(extraction.end, end))

    def _enter_end(self, extraction: Extraction, end: Callable[[], list[Job]]) -> None:
        job = partial(self._end_file, end)
        if extraction.enter_end(job):
            self._writers.submit(job)

    # Writer threads

    def _write(self, chunk: HostChunk | Batch, parts: list[tuple[Extraction, Span]]) -> list[Job]:
        num_rows, written, jobs = sum(span.num_rows for _, span in parts), 0, []
        self._progress.begin_write(num_rows)
        try:
            for extraction, span in parts:
                check = (
                    chunk.rows[span.row : span.row + span.num_rows] if self._check_finite else None
                )
                count, ready = extraction.write(
                    span.first, chunk.read(span), chunk.landed_at, check
                )
                written += count
                jobs += ready
        finally:
            chunk.release([span for _, span in parts])
            self._progress.end_write(num_rows, written)
        return jobs

    def _copy(self, extraction: Extraction, source: RowSource, num_rows: int) -> list[Job]:
        with self._progress.finishing():
            jobs = extraction.copy(source, num_rows)
        source.release()
        return jobs

    def _end_file(self, end: Callable[[], list[Job]]) -> list[Job]:
        with self._progress.finishing():
            return end()

    # Any thread

    def _on_decided(self, extraction: Extraction, error: str | None) -> None:
        self._progress.decide(extraction, error)

    def _on_ended(self, extraction: Extraction) -> None:
        with self._ended:
            self._not_ended.pop(extraction.path, None)
            self._ended.notify_all()
