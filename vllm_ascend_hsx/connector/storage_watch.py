"""Track how long storage has been silent, limit how long a step waits for it, and log both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from vllm_ascend_hsx.connector.pace import StepRate, WriteRate
from vllm_ascend_hsx.connector.reminder import Reminder
from vllm_ascend_hsx.connector.stats import SILENT_STORAGE, SLOW_STORAGE, StatsRecorder

logger = logging.getLogger(__name__)

_STALLED_S = 0.5  # seconds that a step waits for storage before a log line is due
_QUIET_S = 1.0  # seconds without an answer, after which no new request starts
_HUNG_S = 2.0  # ... after which new requests are refused if no step waits for storage
_MIB = 1 << 20
_TOO_SLOW = (
    "its rows would have had to wait for slow storage, and slow_storage is 'fail': use faster "
    "storage, raise pinned_ring_bytes, or set it to 'wait'"
)


class StorageWatch:
    """Watch the storage of one worker.

    Any thread may call `answered`; only the main thread may call `wait`.

    Args:
        patience: seconds that a step waits for storage that makes no progress.
        slow_storage: see HsxConfig.
        where: description of the storage.
        backlog: returns the bytes that have yet to be written.
        stats: records stalls.
        write_rate, step_rate: the worker's rates.
    """

    def __init__(
        self,
        patience: float,
        slow_storage: Literal["wait", "fail"],
        where: str,
        backlog: Callable[[], int],
        stats: StatsRecorder,
        write_rate: WriteRate,
        step_rate: StepRate,
    ) -> None:
        self.patience = patience
        self.steps_wait = slow_storage == "wait"
        self._where = where
        self._backlog = backlog
        self._stats = stats
        self._write_rate = write_rate
        self._step_rate = step_rate
        self._answered_at = 0.0
        self._stall = Reminder(_STALLED_S)

    def answered(self) -> None:
        """Record that storage has made progress, or gets its first work after it was idle."""
        self._answered_at = time.monotonic()

    def silent_for(self) -> float:
        """Return the seconds since the last progress, or 0 if there is nothing to write."""
        return time.monotonic() - self._answered_at if self._backlog() else 0.0

    @property
    def is_quiet(self) -> bool:
        """True while no new request should start."""
        return self.silent_for() >= min(_QUIET_S, self._limit)

    @property
    def is_stuck(self) -> bool:
        """True while new requests are refused."""
        return self.silent_for() >= self._limit

    @property
    def silence(self) -> str:
        """Reason for which a request fails if storage is stuck."""
        return f"the storage did not answer for {self._limit:g} s"

    @property
    def failure(self) -> tuple[str, str]:
        """Reason and kind of failure of a request whose rows no step waits for any longer."""
        return (
            (self.silence, SILENT_STORAGE)
            if self.steps_wait or self.is_stuck
            else (_TOO_SLOW, SLOW_STORAGE)
        )

    @property
    def _limit(self) -> float:
        return self.patience if self.steps_wait else min(self.patience, _HUNG_S)

    def wait(self, done: Callable[[float], bool], silent_for: Callable[[], float]) -> bool:
        """Make the step wait for storage, count the time, and log it.

        Args:
            done: waits for at most the given number of seconds; returns True if there is nothing
                left to wait for.
            silent_for: returns the seconds since storage last answered.

        Returns:
            False if storage was silent for `patience` seconds.
        """
        self._stall.begin()
        try:
            while not done(min(self._stall.due_in(), max(0.0, self.patience - silent_for()))):
                if silent_for() >= self.patience:
                    return False
                if self._stall.due_in() == 0:
                    self._warn()
        finally:
            seconds = self._stall.end()
            self._stats.stalled(seconds)
            self._step_rate.waited(seconds)
        return True

    def _warn(self) -> None:
        logger.warning(
            "slow storage: steps, and with them all requests, have waited %.1f s for rows to be "
            "written to %s: %.1f MiB are computed, and storage takes %.1f MiB/s. Use faster "
            "storage, raise pinned_ring_bytes to absorb bursts, or set slow_storage to 'fail' to "
            "fail extracted requests instead.",
            self._stall.seconds,
            self._where,
            self._backlog() / _MIB,
            (self._write_rate.value() or 0) / _MIB,
        )
        self._stall.told()
