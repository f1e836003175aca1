"""How long to wait before something is tried again."""

from __future__ import annotations

import random

LONGEST = 60.0  # seconds


class Backoff:
    """Doubles the time with each attempt, and scatters it, so that what failed together does not come back together.

    Args:
        first: seconds after the first attempt, on average.
        scatter: gives numbers in [0, 1).
    """

    def __init__(self, first: float, scatter: random.Random | None = None) -> None:
        self._first = first
        self._scatter = scatter or random.Random()

    def seconds(self, attempt: int, at_least: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt` (1, 2, ...): between a half and one and a half of the doubled time.

        Args:
            attempt: that failed.
            at_least: what the server asked for.
        """
        doubled = min(LONGEST, self._first * 2 ** min(attempt - 1, 32))
        return max(doubled * (0.5 + self._scatter.random()), at_least or 0.0)
