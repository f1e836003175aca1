"""Decide when a log line is due about a problem that comes and goes."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 10.0


class Reminder:
    """Schedule log lines: one soon after a problem begins, then one every ten seconds.

    A problem that returns within ten seconds counts as the same problem. For one thread only.

    Args:
        first: seconds of trouble until the first line is due.
        clock: monotonic clock in seconds.
    """

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._clock = clock
        self._before = 0.0  # seconds of earlier spells of the same problem
        self._began: float | None = None
        self._ended = -EVERY_S
        self._told = -EVERY_S

    def begin(self) -> None:
        """Record the beginning of a problem. Does nothing if one has begun."""
        if self._began is None:
            self._began = self._clock()
            if self._began - self._ended >= EVERY_S:
                self._before = 0.0

    def end(self) -> float:
        """Record the end of the problem. Return its seconds, or 0 if there was none."""
        if self._began is None:
            return 0.0
        self._ended = self._clock()
        seconds, self._began = self._ended - self._began, None
        self._before += seconds
        return seconds

    @property
    def seconds(self) -> float:
        """Seconds of the problem so far, earlier spells included."""
        return self._before + (0.0 if self._began is None else self._clock() - self._began)

    def due_in(self) -> float:
        """Return the seconds until a line is due, if the problem lasts.

        Requires that one has begun.
        """
        return max(0.0, self._first - self.seconds, self._told + EVERY_S - self._clock())

    def told(self) -> None:
        """Record that a line was logged."""
        self._told = self._clock()
