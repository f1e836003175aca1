"""Statistics since the last engine step, recorded on both sides of the connector."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from operator import add
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from vllm_ascend_hsx.connector.histogram import NUM_BUCKETS, bucket_of, quantile
from vllm_ascend_hsx.sinks.base import REFUSED, SinkError

# Kinds of failures without an errno.
UNRESPONSIVE_STORAGE = "unresponsive_storage"  # storage did not answer for storage_timeout_s
SLOW_STORAGE = "slow_storage"  # rows would have made a step wait, with slow_storage="fail"
ENGINE_FAILED = "engine"  # the device has failed, or a step has raised
NOT_FINITE = "not_finite"  # a row has a NaN or an infinity, with check_finite
RELOADED = "reloaded_adapter"  # the adapter of a running request was reloaded with other weights
MISSING_ROWS = "missing_rows"  # the request ended without some rows
OTHER_FAILURE = "other"

_HELD_KEY = "requests_held scheduler"

# The parts of HsxStats.data, and the function that combines two values of a key.
_SUMS = ("counters", "failures", "observations", "nanoseconds")
_PARTS: dict[str, Callable[[Any, Any], Any]] = {**dict.fromkeys(_SUMS, add), "gauges": max}


class HsxStats(KVConnectorStats):
    """Counters, gauges and latency histograms of one or more ranks.

    `data` is sent by pickle to the scheduler and by msgpack to the API server. It has five parts
    {key: number} of builtin types:
    * counters: by name. Times are in nanoseconds, because sums of integers do not depend on their
      order.
    * failures: by kind; see `failure_kind`.
    * observations, nanoseconds: number and sum of a histogram's values, by "<name> <bucket>".
    * gauges: by "<name> <rank>". The rank is "scheduler" for values that belong to no rank.
    """

    def counter(self, name: str) -> int:
        """Return a counter, 0 if absent.

        Names: "copied_bytes", "written_bytes", "published_bytes", "published", "failed", "aborted",
        "stall_ns", "backpressure_ns", "reused_tokens".
        """
        return int(self._part("counters").get(name, 0))

    @property
    def failures(self) -> Mapping[str, int]:
        """Failed files by kind."""
        return self._part("failures")

    def gauge(self, name: str) -> Mapping[str, float]:
        """Return a gauge by rank, for the ranks that reported one.

        Names: "ring_fill" (0 to 1), "backlog_bytes", "batch_bytes", "write_rate" (bytes per
        second), "requests_held", "open_sources", "open_source_bytes".
        """
        keys = ((*key.split(), value) for key, value in self._part("gauges").items())
        return {rank: value for gauge, rank, value in keys if gauge == name}

    def histogram(self, name: str) -> tuple[list[int], list[int]]:
        """Return the number of observations and their sum in nanoseconds, for each bucket.

        Names: "copy", "write", "publish".
        """
        keys = [f"{name} {bucket}" for bucket in range(NUM_BUCKETS)]
        counts, sums = self._part("observations"), self._part("nanoseconds")
        return [counts.get(key, 0) for key in keys], [sums.get(key, 0) for key in keys]

    def aggregate(self, other: KVConnectorStats) -> HsxStats:
        """Return the sum of both. Ranks and times may differ.

        Keeps the larger of two gauges. Neither operand is changed.
        """
        merged = {}
        for part, combine in _PARTS.items():
            one, two = self._part(part), other._part(part)
            merged[part] = {
                **one,
                **two,
                **{key: combine(one[key], two[key]) for key in one.keys() & two.keys()},
            }
        return HsxStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's log line.

        Latencies are interpolated within a bucket.
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

        MultiConnector's metrics assume msgpack (multi_connector.py:125, 0.23.0), but an engine and
        a front end in one process do not use it.
        """
        return {"data": self.data}[field]

    def _part(self, name: str) -> dict[str, Any]:
        part: dict[str, Any] = self.data.get(name, {})
        return part


class StatsRecorder:
    """Record the statistics of one worker process. Thread-safe; a call takes a few microseconds.

    Args:
        rank: tensor-parallel rank.
        gauges: returns gauges by name. `take` returns stats whenever a gauge has changed.
        write_rate: returns the bytes per second that storage takes, None if unknown.
    """

    def __init__(
        self,
        rank: int,
        gauges: Callable[[], Mapping[str, float]] = dict,
        write_rate: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._gauges = gauges
        self._write_rate = write_rate
        self._lock = threading.Lock()  # guards everything below
        self._sums: dict[str, Counter[str]] = {part: Counter() for part in _SUMS}
        self._must_send = False
        self._taken_gauges: Mapping[str, float] = {}

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Record a chunk that reached pinned memory `seconds` after the copy was issued."""
        self._observe("copy", seconds, copied_bytes=num_bytes)

    def wrote(self, num_bytes: int, seconds: float) -> None:
        """Record one call of SinkFile.write."""
        self._observe("write", seconds, written_bytes=num_bytes)

    def published(self, num_bytes: int, seconds: float) -> None:
        """Record a file published `seconds` after the last row was on the host."""
        self._observe("publish", seconds, published_bytes=num_bytes, published=1)

    def failed(self, kind: str = OTHER_FAILURE) -> None:
        """Record a request that gets no file. See `failure_kind`."""
        with self._lock:
            self._sums["counters"]["failed"] += 1
            self._sums["failures"][kind] += 1

    def aborted(self) -> None:
        """Record a file that was discarded after an abort."""
        with self._lock:
            self._sums["counters"]["aborted"] += 1

    def stalled(self, seconds: float) -> None:
        """Record that a step waited for storage."""
        with self._lock:
            self._sums["counters"]["stall_ns"] += int(seconds * 1e9)

    def send(self) -> None:
        """Make the next `take` return stats in any case."""
        with self._lock:
            self._must_send = True

    def take(self) -> HsxStats | None:
        """Return the stats since the last call and the current gauges.

        Return None if nothing has changed.
        """
        gauges = self._gauges()
        not_zero = {name: value for name, value in gauges.items() if value}
        with self._lock:
            if (
                not self._must_send
                and not any(self._sums.values())
                and not_zero == self._taken_gauges
            ):
                return None
            taken, self._sums = self._sums, {part: Counter() for part in _SUMS}
            self._must_send, self._taken_gauges = False, not_zero
        # msgpack accepts only builtin integers, not numpy's.
        data: dict[str, Any] = {
            part: {key: int(value) for key, value in sums.items()} for part, sums in taken.items()
        }
        shown = {**gauges, "write_rate": self._write_rate()}
        data["gauges"] = {
            f"{name} {self._rank}": value for name, value in shown.items() if value is not None
        }
        return HsxStats(data=data)

    def _observe(self, histogram: str, seconds: float, **counters: int) -> None:
        nanoseconds = int(seconds * 1e9)
        key = f"{histogram} {bucket_of(nanoseconds)}"
        with self._lock:
            self._sums["observations"][key] += 1
            self._sums["nanoseconds"][key] += nanoseconds
            for name, number in counters.items():
                self._sums["counters"][name] += number


class SchedulerRecorder:
    """Record held and refused requests. For the scheduler's thread only.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held = 0
        self._since = 0.0  # when `held` or `take` was called last
        self._seconds = 0.0
        self._taken_held = 0
        self._refused: Counter[str] = Counter()
        self._reused = 0

    def reused(self, num_tokens: int) -> None:
        """Record tokens with rows copied from another request."""
        self._reused += num_tokens

    def refused(self, kind: str = REFUSED) -> None:
        """Record a request that asked for rows and was refused, by kind of failure."""
        self._refused[kind] += 1

    def held(self, number: int) -> None:
        """Record the number of requests that wait from now on."""
        self._settle()
        self._held = number

    @property
    def has_news(self) -> bool:
        """True if `take` would return statistics."""
        return bool(
            self._held or self._seconds or self._taken_held or self._refused or self._reused
        )

    def take(self) -> HsxStats | None:
        """Return the stats since the last call, or None if nothing was recorded."""
        if not self.has_news:
            return None
        self._settle()
        self._taken_held = self._held
        nanoseconds, self._seconds = int(self._seconds * 1e9), 0.0
        refused, self._refused = self._refused, Counter()
        reused, self._reused = self._reused, 0
        counters = {
            "backpressure_ns": nanoseconds,
            "failed": refused.total(),
            "reused_tokens": reused,
        }
        counters = {
            name: number for name, number in counters.items() if number or name == "backpressure_ns"
        }
        return HsxStats(
            data={
                "counters": counters,
                "failures": dict(refused),
                "gauges": {_HELD_KEY: self._taken_held},
            }
        )

    def _settle(self) -> None:
        now = self._clock()
        if self._held:
            self._seconds += now - self._since
        self._since = now


def failure_kind(error: BaseException | None) -> str:
    """Return the kind of a failure, as the value of a metric's label.

    Follow the exception and its causes to the first SinkError with a kind or OSError with an errno.
    Return this kind, the name of the errno (for example "ENOSPC"), or "other" without either.
    """
    while error is not None:
        if isinstance(error, SinkError) and error.kind is not None:
            return error.kind
        if isinstance(error, OSError) and error.errno is not None:
            return errno.errorcode.get(error.errno, OTHER_FAILURE)
        error = error.__cause__ or error.__context__
    return OTHER_FAILURE
