"""Statistics since the last engine step, recorded on both sides of the connector."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from vllm_ascend_hsx.connector.histogram import NUM_BUCKETS, bucket_of, quantile
from vllm_ascend_hsx.sinks.base import SinkError

# Kinds of failures that no errno names.
SILENT_STORAGE = "silent_storage"  # storage did not answer for storage_patience_s
SLOW_STORAGE = "slow_storage"  # a step would have had to wait for storage, with slow_storage="fail"
COPY_FAILED = "copy"  # a copy from the device failed
NOT_FINITE = "not_finite"  # a row has a NaN or an infinity, with check_finite
MISSING_ROWS = "missing_rows"  # the request ended without some of its rows
REFUSED = "refused"  # the request asks for something that is not supported
OTHER_FAILURE = "other"

_SCHEDULER = "scheduler"


class HsxStats(KVConnectorStats):
    """Counters, gauges and latency histograms of one or more ranks.

    `data` is what is sent (by pickle to the scheduler, by msgpack to the API server). It holds
    builtin types only and omits zeros:
    * counters: {name: int}. Times are in nanoseconds, because sums of integers do not depend on
      their order.
    * failures: {kind: int}; see `failure_kind`.
    * gauges: {name: {rank: number}}. The rank is "scheduler" for values that belong to no rank.
    * histograms: {name: [counts, sums]}, both by bucket; sums are in nanoseconds.
    """

    def counter(self, name: str) -> int:
        """Return a counter, 0 if absent.

        Names: "copied_bytes", "written_bytes", "published_bytes", "published", "failed", "aborted",
        "stall_ns", "backpressure_ns".
        """
        return int(self._part("counters").get(name, 0))

    @property
    def failures(self) -> Mapping[str, int]:
        """Failed files by kind."""
        return self._part("failures")

    def gauge(self, name: str) -> Mapping[str, float]:
        """Return a gauge by rank, for the ranks that reported one.

        Names: "ring_fill" (0 to 1), "backlog_bytes", "write_rate" (bytes per second),
        "requests_held".
        """
        return self._part("gauges").get(name, {})

    def histogram(self, name: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the number of observations and their sum in nanoseconds, for each bucket.

        Names: "copy", "write", "publish".
        """
        counts, sums = self._part("histograms").get(name) or _no_observations()
        return counts, sums

    def aggregate(self, other: KVConnectorStats) -> HsxStats:
        """Return the sum of both, which may be of different ranks or times.

        Keeps the larger of two gauges.

        Neither operand is changed.
        """
        gauges = {name: dict(by_rank) for name, by_rank in self._part("gauges").items()}
        for name, by_rank in other._part("gauges").items():
            known = gauges.setdefault(name, {})
            known.update(
                {rank: max(value, known.get(rank, value)) for rank, value in by_rank.items()}
            )
        histograms = dict(self._part("histograms"))
        for name, (counts, sums) in other._part("histograms").items():
            known_counts, known_sums = histograms.get(name) or _no_observations()
            histograms[name] = [
                list(map(add, known_counts, counts)),
                list(map(add, known_sums, sums)),
            ]
        return HsxStats(
            data={
                "counters": _sums(self._part("counters"), other._part("counters")),
                "failures": _sums(self._part("failures"), other._part("failures")),
                "gauges": gauges,
                "histograms": histograms,
            }
        )

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line.

        Latencies are interpolated within their bucket.
        """
        counts, _ = self.histogram("publish")
        write_ns = sum(self.histogram("write")[1])
        return {
            "Files": self.counter("published"),
            "Failed": self.counter("failed"),
            "Aborted": self.counter("aborted"),
            "GB written": round(self.counter("written_bytes") / 1e9, 3),
            "GB/s per writer": round(self.counter("written_bytes") / write_ns, 3)
            if write_ns
            else 0.0,
            "Max ring fill (%)": round(100 * max(self.gauge("ring_fill").values(), default=0.0), 1),
            "Last row to file P50 (ms)": round(1e3 * quantile(counts, 0.5), 3),
            "Last row to file P99 (ms)": round(1e3 * quantile(counts, 0.99), 3),
            "Back-pressure (s)": round(self.counter("backpressure_ns") / 1e9, 3),
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reset(self) -> None:
        self.data.clear()

    def __getitem__(self, field: str) -> dict[str, Any]:
        """Return a field as if the object had been through msgpack.

        MultiConnector's metrics assume that (multi_connector.py:125, 0.23.0), but it does not
        happen if engine and front end share a process.
        """
        return {"data": self.data}[field]

    def _part(self, name: str) -> dict[str, Any]:
        part: dict[str, Any] = self.data.get(name, {})
        return part


class StatsRecorder:
    """Record the statistics of one worker process. Thread-safe; a call takes about a microsecond.

    Args:
        rank: tensor-parallel rank.
        ring_fill: returns the largest share of the pinned ring in use since its last call, from 0
            to 1.
        backlog: returns the bytes of rows that were computed but are not yet in their files.
        write_rate: returns the bytes per second that storage takes, None if unknown.
    """

    def __init__(
        self,
        rank: int,
        ring_fill: Callable[[], float],
        backlog: Callable[[], int],
        write_rate: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._rank = str(rank)
        self._write_rate = write_rate
        self._ring_fill = ring_fill
        self._backlog = backlog
        self._lock = threading.Lock()
        self._restart()
        self._taken_gauges = (0.0, 0)

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Record a chunk that reached pinned memory `seconds` after its copy was issued."""
        self._observe("copy", seconds, "copied_bytes", num_bytes)

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Record one call of SinkFile.write."""
        self._observe("write", seconds, "written_bytes", num_bytes)

    def published(self, num_bytes: int, seconds: float) -> None:
        """Record a published file, `seconds` after its last row was on the host."""
        self._observe("publish", seconds, "published_bytes", num_bytes, "published")

    def failed(self, kind: str = OTHER_FAILURE) -> None:
        """Record a request that gets no file. See `failure_kind`."""
        with self._lock:
            self._counters["failed"] = self._counters.get("failed", 0) + 1
            self._failures[kind] = self._failures.get(kind, 0) + 1
            self._happened = True

    def aborted(self) -> None:
        """Record a file that was discarded because its request was aborted."""
        with self._lock:
            self._counters["aborted"] = self._counters.get("aborted", 0) + 1
            self._happened = True

    def stalled(self, seconds: float) -> None:
        """Record that the main thread waited for a staging slot."""
        with self._lock:
            self._counters["stall_ns"] = self._counters.get("stall_ns", 0) + int(seconds * 1e9)
            self._happened = True

    def send(self) -> None:
        """Make the next `take` return stats in any case."""
        with self._lock:
            self._happened = True

    def take(self) -> HsxStats | None:
        """Return the stats since the last call with the current gauges.

        None if nothing has changed.
        """
        gauges = (float(self._ring_fill()), int(self._backlog()))
        with self._lock:
            if not self._happened and gauges == self._taken_gauges:
                return None
            self._taken_gauges = gauges
            counters, failures, histograms = self._counters, self._failures, self._histograms
            self._restart()
        shown: dict[str, float | int | None] = {
            "ring_fill": gauges[0],
            "backlog_bytes": gauges[1],
            "write_rate": self._write_rate(),
        }
        return HsxStats(
            data={
                # msgpack does not accept other integer types, such as numpy's.
                "counters": {name: int(value) for name, value in counters.items()},
                "failures": failures,
                "gauges": {
                    name: {self._rank: value} for name, value in shown.items() if value is not None
                },
                "histograms": histograms,
            }
        )

    def _observe(
        self,
        histogram: str,
        seconds: float,
        bytes_counter: str,
        num_bytes: int,
        counter: str | None = None,
    ) -> None:
        nanoseconds = int(seconds * 1e9)
        bucket = bucket_of(nanoseconds)
        with self._lock:
            columns = self._histograms.get(histogram)
            if columns is None:
                columns = self._histograms[histogram] = _no_observations()
            columns[0][bucket] += 1
            columns[1][bucket] += nanoseconds
            self._counters[bytes_counter] = self._counters.get(bytes_counter, 0) + num_bytes
            if counter is not None:
                self._counters[counter] = self._counters.get(counter, 0) + 1
            self._happened = True

    def _restart(self) -> None:
        self._happened = False
        self._counters: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._histograms: dict[str, list[list[int]]] = {}


class SchedulerRecorder:
    """Record held and refused requests. For the scheduler's thread only.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: set[str] = set()
        self._since = 0.0  # valid while a request is held
        self._seconds = 0.0
        self._taken_held = 0
        self._refused = 0

    def refused(self) -> None:
        """Record a request that asked for rows and was refused."""
        self._refused += 1

    def held(self, request_id: str) -> None:
        """Record that the request has to wait. It may be waiting already."""
        if not self._held:
            self._since = self._clock()
        self._held.add(request_id)

    def let_go(self, request_id: str) -> None:
        """Record that the request no longer waits. Ignores one that was not held."""
        if request_id in self._held:
            self._settle()
            self._held.remove(request_id)

    @property
    def has_news(self) -> bool:
        """Whether `take` would return stats."""
        return bool(self._held or self._seconds or self._taken_held or self._refused)

    def take(self) -> HsxStats | None:
        """Return the stats since the last call. None if no request was held or refused."""
        if not self.has_news:
            return None
        self._settle()
        self._taken_held = len(self._held)
        nanoseconds, self._seconds = int(self._seconds * 1e9), 0.0
        refused, self._refused = self._refused, 0
        return HsxStats(
            data={
                "counters": {
                    "backpressure_ns": nanoseconds,
                    **({"failed": refused} if refused else {}),
                },
                "failures": {REFUSED: refused} if refused else {},
                "gauges": {"requests_held": {_SCHEDULER: self._taken_held}},
            }
        )

    def _settle(self) -> None:
        if self._held:
            now = self._clock()
            self._seconds += now - self._since
            self._since = now


def failure_kind(error: BaseException | None) -> str:
    """Return the kind of a failure, as the value of a metric's label.

    It is the kind of a SinkError, else the name of the errno, such as "ENOSPC", of the exception or
    one of its causes, else "other".
    """
    while error is not None:
        if isinstance(error, SinkError) and error.kind is not None:
            return error.kind
        if isinstance(error, OSError) and error.errno is not None:
            return errno.errorcode.get(error.errno, OTHER_FAILURE)
        error = error.__cause__ or error.__context__
    return OTHER_FAILURE


def _no_observations() -> list[list[int]]:
    return [[0] * NUM_BUCKETS, [0] * NUM_BUCKETS]


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
