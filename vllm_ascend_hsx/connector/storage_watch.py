"""Slow storage: limit the time that steps wait for storage, and the log lines about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from vllm_ascend_hsx.connector.progress import RankProgress
from vllm_ascend_hsx.connector.stats import SLOW_STORAGE, UNRESPONSIVE_STORAGE, StatsRecorder
from vllm_ascend_hsx.connector.threads import ThreadPool

logger = logging.getLogger(__name__)

_STALLED_S = 0.5  # seconds that a step waits for storage before a log line is due
_PAUSE_AFTER_S = 1.0  # seconds without an answer, after which no new request starts
_UNRESPONSIVE_S = 2.0  # ... after which new requests are refused, with slow_storage="fail"
_PEER_UNRESPONSIVE_S = 1.0  # seconds that a step waits if storage is unresponsive for another rank
_OPENS_S = 0.05  # seconds for new files to open before the step counts as waiting for storage
# A step that waited for files delays the next new request by this multiple of the wait, but at most
# by storage_timeout. No step waits longer than that, so steps wait at most half of the time.
_PAUSE = 3.0
_REMIND_S = 10.0  # seconds between two log lines about one problem
_MIB = 1 << 20
_TOO_SLOW = (
    "storage is too slow for the rows of this request, and slow_storage is 'fail': use faster "
    "storage, raise pinned_ring_bytes, or set slow_storage to 'wait'"
)


class Reminder:
    """Schedule log lines: one soon after a problem begins, then one every ten seconds.

    A problem that returns within ten seconds counts as the same problem. For one thread only.

    Args:
        first: seconds of a problem until the first line is due.
        clock: monotonic clock in seconds.
    """

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._clock = clock
        self._before = 0.0  # seconds of earlier occurrences of the same problem
        self._began: float | None = None
        self._ended = -_REMIND_S
        self._logged_at = -_REMIND_S

    def begin(self) -> None:
        """Record the beginning of a problem, unless it has begun already."""
        if self._began is None:
            self._began = self._clock()
            if self._began - self._ended >= _REMIND_S:
                self._before = 0.0

    def end(self) -> float:
        """Record the end of the problem. Return the duration in seconds, 0 without a problem."""
        if self._began is None:
            return 0.0
        self._ended = self._clock()
        seconds, self._began = self._ended - self._began, None
        self._before += seconds
        return seconds

    @property
    def seconds(self) -> float:
        """Seconds of the problem so far, including earlier occurrences."""
        return self._before + (0.0 if self._began is None else self._clock() - self._began)

    def due_in(self) -> float:
        """Return the seconds until a line is due, if the problem lasts."""
        return max(0.0, self._first - self.seconds, self._logged_at + _REMIND_S - self._clock())

    def logged(self) -> None:
        """Record that a line was logged."""
        self._logged_at = self._clock()


class StorageRules(NamedTuple):
    """The treatment of slow storage.

    Attributes:
        timeout: seconds that a step waits for storage that makes no progress.
        slow_storage: see HsxConfig.
        description: name of the storage in log lines.
    """

    timeout: float = 30.0
    slow_storage: Literal["wait", "fail"] = "wait"
    description: str = "the storage"


class StorageWatch:
    """Watch the storage of one worker. Only the main thread may call methods that wait.

    Args:
        rules: the treatment of slow storage.
        progress: progress of the worker.
        stats: records stalls.

    Attributes:
        peer_is_unresponsive: whether storage is unresponsive for another rank. Ranks share the
            storage, so steps would wait for each rank in turn.
        opens_slowly: whether the last step with new files had to wait for them, with
            slow_storage="wait". If so, new requests start one at a time.
    """

    def __init__(self, rules: StorageRules, progress: RankProgress, stats: StatsRecorder) -> None:
        self.storage_timeout = rules.timeout
        self.steps_wait = rules.slow_storage == "wait"
        self._description = rules.description
        self._progress = progress
        self._stats = stats
        self._stall = Reminder(_STALLED_S)
        self._paused_until = 0.0
        self.peer_is_unresponsive = False
        self.opens_slowly = False
        self._stalled_opener: ThreadPool | None = None  # set while files do not open in time

    @property
    def is_paused(self) -> bool:
        """True while no new request should start."""
        return time.monotonic() < self._paused_until or self._progress.stalled_for() >= min(
            _PAUSE_AFTER_S, self._limit
        )

    @property
    def is_unresponsive(self) -> bool:
        """True while new requests are refused.

        With 'fail', this begins when the files of a step are not open in time, because the files of
        the next step would be late, too. It ends when all late files are open or have failed.
        """
        return self._is_stalled or (
            not self.steps_wait
            and self._stalled_opener is not None
            and self._stalled_opener.pending > 0
        )

    @property
    def _is_stalled(self) -> bool:
        opener = self._stalled_opener
        return self._progress.stalled_for() >= self._limit or (
            opener is not None and opener.stalled_for() >= self._limit
        )

    @property
    def stall_reason(self) -> str:
        """Reason of a request that fails because storage is unresponsive."""
        return f"the storage did not answer for {self._limit:g} s"

    @property
    def failure(self) -> tuple[str, str]:
        """Failure reason and kind of requests that are refused or that steps do not wait for."""
        return (
            (self.stall_reason, UNRESPONSIVE_STORAGE)
            if self.steps_wait or self._is_stalled
            else (_TOO_SLOW, SLOW_STORAGE)
        )

    @property
    def _limit(self) -> float:
        return self._step_limit if self.steps_wait else min(self.storage_timeout, _UNRESPONSIVE_S)

    @property
    def _step_limit(self) -> float:
        return (
            min(self.storage_timeout, _PEER_UNRESPONSIVE_S)
            if self.peer_is_unresponsive
            else self.storage_timeout
        )

    def wait_for_files(self, opener: ThreadPool) -> bool:
        """Make the step wait until the files of new requests are open.

        After a step that waited, no new request starts for a while, and running requests continue.
        Their tokens are delayed by one file, not by all files that wait. With 'fail', the step
        waits at most as long as a usual step takes. New requests pause only if files are not open
        by then.

        Returns:
            False if the files are not open in time.
        """
        since = time.monotonic()
        if opener.wait(_OPENS_S):
            self.opens_slowly, self._stalled_opener = False, None
            return True
        if self.steps_wait:
            since = time.monotonic()
            done = self.wait(opener.wait, opener.stalled_for)
        else:
            done = opener.wait(max(0.0, self._progress.step_rate.longest - _OPENS_S))
            self._waited(time.monotonic() - since)
        now = time.monotonic()
        self._stalled_opener = None if done else opener
        if self.steps_wait or not done:
            self._paused_until = now + min(_PAUSE * (now - since), self.storage_timeout)
        self.opens_slowly = self.steps_wait
        return done

    def wait(self, done: Callable[[float], bool], stalled_for: Callable[[], float]) -> bool:
        """Make the step wait for storage, count the time, and log it.

        Args:
            done: waits for at most the given number of seconds; returns True if nothing is left to
                wait for.
            stalled_for: returns the seconds since storage last answered.

        Returns:
            False if storage did not answer for `storage_timeout` seconds, or for at most a second
            if it is unresponsive for another rank.
        """
        self._stall.begin()
        try:
            while not done(min(self._stall.due_in(), max(0.0, self._step_limit - stalled_for()))):
                if stalled_for() >= self._step_limit:
                    return False
                if self._stall.due_in() == 0:
                    self._warn()
        finally:
            self._waited(self._stall.end())
        return True

    def _waited(self, seconds: float) -> None:
        self._stats.stalled(seconds)
        self._progress.step_rate.waited(seconds)  # this time is no part of the step's length

    def _warn(self) -> None:
        logger.warning(
            "slow storage: steps, and with them all requests, have waited %.1f s for rows to be "
            "written to %s: %.1f MiB are computed. Storage takes %.1f MiB/s. Use faster storage, "
            "raise pinned_ring_bytes to absorb bursts, or set slow_storage to 'fail' to fail "
            "extracted requests instead.",
            self._stall.seconds,
            self._description,
            self._progress.backlog / _MIB,
            (self._progress.write_rate() or 0) / _MIB,
        )
        self._stall.logged()
