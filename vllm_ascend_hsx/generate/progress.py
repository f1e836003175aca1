"""Show a run while it goes on: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from vllm_ascend_hsx.protocol.names import printable

LINE_S = 10.0
WINDOW_S = 30.0


class Progress:
    """Is told what happens, and shows it. Use as a context manager.

    Args:
        console: to write to.
        total: rows of the run.
        now: the clock, in seconds.
    """

    def __init__(
        self, console: Console, total: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._total = total
        self._made = self._passed = self._failures = self._retries = 0
        self._now = now
        self._began = now()
        self._done: deque[tuple[float, int, int]] = deque()  # when; tokens, bytes
        self._over = threading.Event()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)
        self._thread = threading.Thread(target=self._refresh, name="hsx-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._bar.stop()

    def done(self, tokens: int, num_bytes: int) -> None:
        """Count a row that was made."""
        self._made += 1
        self._done.append((self._now(), tokens, num_bytes))

    def passed(self) -> None:
        """Count a row whose file was there. Called by other threads than the rest."""
        self._passed += 1

    def failed(self) -> None:
        """Count a row that failed for good."""
        self._failures += 1

    def retried(self) -> None:
        """Count a row that is asked for again."""
        self._retries += 1

    def say(self, text: str) -> None:
        """Print a line at once."""
        with suppress(OSError):  # nobody reads it, or the disk is full; rows are made all the same
            self._console.print(printable(text), style="yellow", markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """Return what is shown now."""
        rows, tokens, num_bytes = self._rates()
        finished = self._made + self._passed
        left = self._total - finished - self._failures
        facts = [
            f"{finished:,} of {self._total:,} rows",
            f"{rows:.1f} rows/s",
            f"{tokens:,.0f} tokens/s",
            f"{decimal(round(num_bytes))}/s",
            f"{self._failures} failed",
            *([f"{self._retries} retries"] if self._retries else []),
            f"ETA {duration(left / rows) if rows else '?'}",
        ]
        return ", ".join(facts)

    def _rates(self) -> tuple[float, float, float]:
        """Return rows, tokens and bytes per second over the last `WINDOW_S`."""
        now = self._now()
        recent = [each for each in list(self._done) if each[0] >= now - WINDOW_S]
        while self._done and self._done[0][0] < now - WINDOW_S:
            self._done.popleft()
        seconds = min(WINDOW_S, now - self._began) or 1.0
        amounts = len(recent), sum(each[1] for each in recent), sum(each[2] for each in recent)
        return amounts[0] / seconds, amounts[1] / seconds, amounts[2] / seconds

    def _refresh(self) -> None:
        is_terminal = self._console.is_terminal
        with suppress(OSError):
            while not self._over.wait(1.0 if is_terminal else LINE_S):
                if is_terminal:
                    completed = self._made + self._passed + self._failures
                    self._bar.update(self._task, completed=completed, description=self.line())
                else:
                    self._console.print(self.line(), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
