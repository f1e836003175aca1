"""Lane: order the work on one file."""

from __future__ import annotations

import threading
from collections import deque

from vllm_ascend_hsx.connector.threads import Job


class Lane:
    """Order the jobs of one file. Thread-safe.

    Jobs start in the order in which they enter. Jobs that share the lane may run at the same time.
    A job that runs alone waits for all earlier jobs, and all later jobs wait for it. The thread
    that has run a job calls `leave`.

    Args:
        shares: False if every job runs alone.
    """

    def __init__(self, shares: bool = True) -> None:
        self._shares = shares
        self._mutex = threading.Lock()  # guards everything below
        self._running = 0
        self._is_alone = False  # the running job
        self._waiting: deque[tuple[Job, bool]] = deque()

    def enter(self, job: Job, alone: bool = False) -> bool:
        """Return True if the caller may run `job` now. Otherwise a later `leave` returns it.

        Args:
            job: must end with a call of `leave`.
            alone: whether no other job may run at the same time.
        """
        with self._mutex:
            self._waiting.append((job, alone or not self._shares))
            return job in self._start_ready()

    def enter_if_empty(self) -> bool:
        """Return True if no job was in the lane. The caller then runs alone until it leaves."""
        with self._mutex:
            if self._running:
                return False
            self._running, self._is_alone = 1, True
            return True

    def leave(self) -> list[Job]:
        """Record the end of a job. Return the jobs that the caller must run or submit now."""
        with self._mutex:
            self._running -= 1
            self._is_alone = False
            return self._start_ready()

    def _start_ready(self) -> list[Job]:
        ready: list[Job] = []
        while self._waiting and not self._is_alone and not (self._waiting[0][1] and self._running):
            job, self._is_alone = self._waiting.popleft()
            self._running += 1
            ready.append(job)
        return ready
