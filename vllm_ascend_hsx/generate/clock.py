"""Time as the run sees it; tests put their own in its place."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The machine's."""

    def now(self) -> float:
        """Seconds since any moment; never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
