"""When the log is to have a line about trouble that comes, goes and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 10.0


class Reminder:
    """Says when a line is due: within the first seconds of some trouble, then every ten seconds while it lasts.

    Trouble that returns within ten seconds is the same trouble. One thread uses this.

    Args:
        first: seconds of trouble after which the first line is due.
        clock: seconds that never run backwards.
    """

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = first
        self._clock = clock
        self._before = 0.0  # seconds of trouble before the present one
        self._began: float | None = None
        self._ended = -EVERY_S
        self._told = -EVERY_S

    def begin(self) -> None:
        """Trouble begins. Nothing changes if it has begun."""
        if self._began is None:
            self._began = self._clock()
            if self._began - self._ended >= EVERY_S:
                self._before = 0.0

    def end(self) -> float:
        """It is over. Returns how many seconds it lasted; 0 if there was none."""
        if self._began is None:
            return 0.0
        self._ended = self._clock()
        seconds, self._began = self._ended - self._began, None
        self._before += seconds
        return seconds

    @property
    def seconds(self) -> float:
        """Of trouble so far."""
        return self._before + (0.0 if self._began is None else self._clock() - self._began)

    def due_in(self) -> float:
        """Seconds until a line is due if the trouble lasts; 0 if one is due now. There has to be some."""
        return max(0.0, self._first - self.seconds, self._told + EVERY_S - self._clock())

    def told(self) -> None:
        """There is a line."""
        self._told = self._clock()
