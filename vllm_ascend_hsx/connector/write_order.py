"""Order of writes to one request's file: recomputed rows are written after their first version."""

from __future__ import annotations

import math
import threading
from collections import deque

from vllm_ascend_hsx.connector.threads import WriterJob

Positions = tuple[int, float]  # [first, end) of token positions
EVERY_POSITION: Positions = (0, math.inf)


class WriteOrder:
    """Make work on rows [first, end) wait for all earlier work on any of them, running or waiting.

    Other work may run at the same time. A request computes its rows in order, so several threads
    can write its chunks. Only after a preemption does it recompute rows that may still be on their
    way to the file.

    Args:
        side_by_side: whether work on different rows may run at the same time. If not, jobs run one
            after the other.
    """

    def __init__(self, side_by_side: bool = True) -> None:
        self._side_by_side = side_by_side
        self._mutex = threading.Lock()
        self._running: list[Positions] = []
        self._waiting: deque[tuple[Positions, WriterJob]] = deque()

    def begin(self, rows: Positions, job: WriterJob) -> bool:
        """Return True if the caller may run `job` now.

        Otherwise a later call of `done` returns it.
        """
        with self._mutex:
            if self._collide(rows, self._running) or self._collide(
                rows, [each for each, _ in self._waiting]
            ):
                self._waiting.append((rows, job))
                return False
            self._running.append(rows)
            return True

    def done(self, rows: Positions) -> list[WriterJob]:
        """Record that the job on `rows` has ended. Return the jobs that the caller must run now."""
        with self._mutex:
            self._running.remove(rows)
            ready: list[WriterJob] = []
            while self._waiting and not self._collide(self._waiting[0][0], self._running):
                waited_for, job = self._waiting.popleft()
                self._running.append(waited_for)
                ready.append(job)
            return ready

    def _collide(self, rows: Positions, others: list[Positions]) -> bool:
        if not self._side_by_side:
            return bool(others)
        return any(rows[0] < other[1] and other[0] < rows[1] for other in others)
