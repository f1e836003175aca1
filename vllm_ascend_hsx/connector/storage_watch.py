"""How long storage has been silent, how long a step waits for it, and what the log says meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from vllm_ascend_hsx.connector.pace import StepRate, WriteRate
from vllm_ascend_hsx.connector.reminder import Reminder
from vllm_ascend_hsx.connector.stats import SILENT_STORAGE, SLOW_STORAGE, StatsRecorder

logger = logging.getLogger(__name__)

_STALLED_S = 0.5  # of waiting for storage, after which the log says so
_QUIET_S = 1.0  # without an answer, after which nothing new should begin
_HUNG_S = 2.0  # ... after which new requests are refused where no step waits for storage
_MIB = 1 << 20
_TOO_SLOW = (
    "its rows would have had to wait for slow storage, and slow_storage is 'fail': use faster storage, raise pinned_ring_bytes, "
    "or set it to 'wait'"
)


class StorageWatch:
    """Watches the storage of one worker. `answered` is for any thread, `wait` for the main one.

    Args:
        patience: seconds that a step waits for storage that does nothing at all.
        slow_storage: see HsxConfig.
        where: the storage, in words.
        backlog: bytes that are to be written.
        stats: what is counted.
        write_rate, step_rate: of the worker.
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
        """The storage has taken something, or is given something after it had nothing to do."""
        self._answered_at = time.monotonic()

    def silent_for(self) -> float:
        """Seconds for which there was something to write and nothing was written."""
        return time.monotonic() - self._answered_at if self._backlog() else 0.0

    @property
    def is_quiet(self) -> bool:
        """Nothing new should begin."""
        return self.silent_for() >= min(_QUIET_S, self._limit)

    @property
    def is_stuck(self) -> bool:
        """New requests are refused."""
        return self.silent_for() >= self._limit

    @property
    def silence(self) -> str:
        """Why a request fails when the storage is stuck."""
        return f"the storage did not answer for {self._limit:g} s"

    @property
    def failure(self) -> tuple[str, str]:
        """Reason and kind of failure of a request for which a step does not wait, or does not any longer."""
        return (self.silence, SILENT_STORAGE) if self.steps_wait or self.is_stuck else (_TOO_SLOW, SLOW_STORAGE)

    @property
    def _limit(self) -> float:
        return self.patience if self.steps_wait else min(self.patience, _HUNG_S)

    def wait(self, done: Callable[[float], bool], silent_for: Callable[[], float]) -> bool:
        """Have the step wait, count it, and say so in the log. False: the patience is over.

        Args:
            done: waits so many seconds at most, and returns whether there is nothing more to wait for.
            silent_for: seconds that the storage has not answered.
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
            "slow storage: steps, and with them all requests, have waited %.1f s until rows are written to %s: %.1f MiB are computed, "
            "and it takes %.1f MiB/s. Use faster storage; more pinned_ring_bytes carries bursts; with slow_storage set to 'fail' "
            "requests that are extracted fail instead.",
            self._stall.seconds,
            self._where,
            self._backlog() / _MIB,
            (self._write_rate.value() or 0) / _MIB,
        )
        self._stall.told()
