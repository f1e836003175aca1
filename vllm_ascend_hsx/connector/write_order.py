"""Writes to one request's file: which positions it has, and in which order rows are written."""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections import deque

from vllm_ascend_hsx.connector.threads import Job

Positions = tuple[int, float]  # [first, end) of token positions
EVERY_POSITION: Positions = (0, math.inf)
_NAMED = 8  # missing spans that an error names; it counts the others


class SpanSet:
    """Token positions that have been written.

    Attributes:
        spans: sorted spans [first, end) that do not touch. Writing in order keeps it at one.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def add(self, first: int, end: int) -> None:
        """Add positions [first, end). An empty span adds nothing."""
        if first >= end:
            return
        apart = []
        for span in self.spans:
            if span[1] < first or end < span[0]:
                apart.append(span)
            else:
                first, end = min(first, span[0]), max(end, span[1])
        insort(apart, (first, end))
        self.spans = apart

    def missing(self, end: int) -> list[tuple[int, int]]:
        """Return the spans of [0, end) that are not in the set, in order."""
        gaps, position = [], 0
        for span in [*self.spans, (end, end)]:
            if position < min(span[0], end):
                gaps.append((position, min(span[0], end)))
            position = max(position, span[1])
        return gaps


def describe_missing(missing: list[tuple[int, int]], tokens: int) -> str:
    """Return the missing spans of `tokens` positions as text."""
    named = ", ".join(f"[{first}, {end})" for first, end in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more spans" if len(missing) > _NAMED else ""
    return f"{named}{more} of {tokens}"


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
        self._waiting: deque[tuple[Positions, Job]] = deque()

    def begin(self, rows: Positions, job: Job) -> bool:
        """Return True if the caller may run `job` now.

        Otherwise a later call of `done` returns it.
        """
        with self._mutex:
            if self._collide(rows, self._running) or self._collide(rows, [each for each, _ in self._waiting]):
                self._waiting.append((rows, job))
                return False
            self._running.append(rows)
            return True

    def done(self, rows: Positions) -> list[Job]:
        """Record that the job on `rows` has ended. Return the jobs that the caller must run now."""
        with self._mutex:
            self._running.remove(rows)
            ready: list[Job] = []
            while self._waiting and not self._collide(self._waiting[0][0], self._running):
                waited_for, job = self._waiting.popleft()
                self._running.append(waited_for)
                ready.append(job)
            return ready

    def _collide(self, rows: Positions, others: list[Positions]) -> bool:
        if not self._side_by_side:
            return bool(others)
        return any(rows[0] < other[1] and other[0] < rows[1] for other in others)
