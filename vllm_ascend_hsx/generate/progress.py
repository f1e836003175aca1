"""What a user sees while a run goes on: a bar on a terminal, a line now and then elsewhere; and the table at its end."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from vllm_ascend_hsx.protocol.names import printable

LINE_SECONDS = 10.0
WINDOW_SECONDS = 30.0


class Rates:
    """How much was done per second of late.

    Args:
        now: the clock, in seconds.
        window: seconds that count.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, window: float = WINDOW_SECONDS) -> None:
        self._now = now
        self._window = window
        self._began = now()
        self._events: deque[tuple[float, int, int]] = deque()
        self._sums = [0, 0, 0]

    def add(self, tokens: int, num_bytes: int) -> None:
        """A row was done."""
        self._events.append((self._now(), tokens, num_bytes))
        self._sums = [self._sums[0] + 1, self._sums[1] + tokens, self._sums[2] + num_bytes]

    def per_second(self) -> tuple[float, float, float]:
        """Rows, tokens and bytes per second, over the window, or over the run while it is shorter."""
        now = self._now()
        while self._events and self._events[0][0] < now - self._window:
            _, gone_tokens, gone_bytes = self._events.popleft()
            self._sums = [self._sums[0] - 1, self._sums[1] - gone_tokens, self._sums[2] - gone_bytes]
        seconds = min(self._window, now - self._began)
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        rows, tokens, num_bytes = self._sums
        return rows / seconds, tokens / seconds, num_bytes / seconds


class Progress(ABC):
    """Is told what happens. Use as a context manager.

    Args:
        console: to write to.
        total: rows of the run.
        before: of them were finished already.
        now: the clock, in seconds.
    """

    def __init__(self, console: Console, total: int, before: int, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._total = total
        self._finished = before
        self._failures = 0
        self._retries = 0
        self._rates = Rates(now)

    @abstractmethod
    def __enter__(self) -> Progress: ...

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None: ...

    def done(self, tokens: int, num_bytes: int) -> None:
        """A row has its file."""
        self._rates.add(tokens, num_bytes)
        self._advance(finished=True)

    def passed(self) -> None:
        """A row's file was there, and right."""
        self._advance(finished=True)

    def failed(self) -> None:
        """A row has failed for good."""
        self._failures += 1
        self._advance(finished=False)

    def retried(self) -> None:
        """A row is asked for again."""
        self._retries += 1

    def say(self, text: str) -> None:
        """Something that a user should know now."""
        with suppress(OSError):  # as in `Lines`; what matters is in the ledger, too
            self._console.print(printable(text), style="yellow", markup=False, highlight=False, soft_wrap=True)

    @abstractmethod
    def _advance(self, finished: bool) -> None: ...

    def _facts(self) -> str:
        rows, tokens, num_bytes = self._rates.per_second()
        left = self._total - self._finished - self._failures
        facts = [f"{rows:.1f} rows/s", f"{tokens:,.0f} tokens/s", f"{decimal(round(num_bytes))}/s", f"{self._failures} failed"]
        if self._retries:
            facts.append(f"{self._retries} retries")
        return ", ".join([*facts, f"ETA {duration(left / rows) if rows else '?'}"])


class Bar(Progress):
    """One live line on a terminal."""

    def __init__(self, console: Console, total: int, before: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, total, before, now)
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(self._facts(), total=total, completed=before)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.stop()

    def _advance(self, finished: bool) -> None:
        self._finished += finished
        self._bar.update(self._task, advance=1, description=self._facts())


class Lines(Progress):
    """A line every LINE_SECONDS, whether rows come or not."""

    def __init__(self, console: Console, total: int, before: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, total, before, now)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="hsx-progress", daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def line(self) -> str:
        """What is to be said now."""
        return f"{self._finished:,} of {self._total:,} rows, {self._facts()}"

    def _advance(self, finished: bool) -> None:
        self._finished += finished

    def _tell(self) -> None:
        with suppress(OSError):  # nobody reads them, or their disk is full; rows are made all the same
            while not self._over.wait(LINE_SECONDS):
                self._console.print(self.line(), markup=False, highlight=False, soft_wrap=True)


def progress_on(console: Console, total: int, before: int) -> Progress:
    """A bar if somebody looks at it, lines if not."""
    return (Bar if console.is_terminal else Lines)(console, total, before)


def duration(seconds: float) -> str:
    """In hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
