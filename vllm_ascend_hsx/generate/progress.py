"""Count the results of a run, show progress, and print a summary."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from vllm_ascend_hsx.generate.errors import InputError, Interrupted, UnreachedError
from vllm_ascend_hsx.protocol.names import printable

if TYPE_CHECKING:
    # Imports the openai client; `hsx status` does not need it.
    from vllm_ascend_hsx.generate.endpoints import Endpoint

LINE_S = 10.0
WINDOW_S = 30.0
SHOWN_FAILURES = 10


@dataclass
class Outcome:
    """Result of a run so far.

    Attributes:
        total: number of valid rows of this rank.
        invalid: number of skipped rows of this rank.
        before, done, failed: numbers of rows whose file existed, rows generated, rows given up.
        failures: the first failed rows, with the reason.
        removed: rows whose files were removed during the run.
        requests, retries: number of requests, and of retries among them.
        tokens, bytes: size of the generated files.
        prompt_tokens, reused: prompt tokens in these files, and how many were not computed again.
        seconds: duration of the run.
        left: files that servers were still writing at the end.
        unsettled: number of rows whose last request may still produce a file.
        stopped_by: error or signal that ended the run early, or None.
        endpoints: the servers.
    """

    total: int
    invalid: int = 0
    before: int = 0
    done: int = 0
    failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    requests: int = 0
    retries: int = 0
    tokens: int = 0
    bytes: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    seconds: float = 0.0
    left: list[Path] = field(default_factory=list)
    unsettled: int = 0
    stopped_by: Exception | None = None
    endpoints: Sequence[Endpoint] = ()

    @property
    def is_refused(self) -> bool:
        """True if the run was refused before it had any result."""
        return isinstance(self.stopped_by, (InputError, UnreachedError)) and not (
            self.before or self.done or self.failed or self.unsettled
        )

    @property
    def missing(self) -> int:
        """Number of rows without a file."""
        return self.total - self.before - self.done + len(self.removed)


class Progress:
    """Show an outcome during the run: a bar on a terminal, elsewhere a line every 10 seconds.

    Use as a context manager.

    Args:
        console: output for the progress.
        outcome: result, updated by the run.
        beat: called at least every ten seconds.
        now: clock, in seconds.
    """

    def __init__(
        self,
        console: Console,
        outcome: Outcome,
        beat: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._outcome = outcome
        self._beat = beat
        self._now = now
        self._samples = deque([(now(), 0, 0, 0)])  # time, rows, tokens, bytes
        self._ended = threading.Event()
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._bar = RichProgress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=outcome.total)
        self._thread = threading.Thread(target=self._refresh, name="hsx-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line immediately."""
        # A closed pipe or a full disk must not end the run.
        with suppress(OSError):
            tell(self._console, text, "yellow")

    def line(self) -> str:
        """Return the state in one line. Rates cover the last `WINDOW_S` seconds."""
        outcome = self._outcome
        self._samples.append((self._now(), outcome.done, outcome.tokens, outcome.bytes))
        while len(self._samples) > 2 and self._samples[1][0] <= self._samples[-1][0] - WINDOW_S:
            self._samples.popleft()
        seconds, *amounts = (
            now - before for before, now in zip(self._samples[0], self._samples[-1], strict=True)
        )
        rows, tokens, num_bytes = (amount / (seconds or 1.0) for amount in amounts)
        facts = [
            f"{outcome.before + outcome.done:,} of {outcome.total:,} rows",
            f"{rows:.1f} rows/s",
            f"{tokens:,.0f} tokens/s",
            f"{decimal(round(num_bytes))}/s",
            f"{outcome.failed} failed",
            *([f"{outcome.retries} retries"] if outcome.retries else []),
            f"ETA {duration((outcome.missing - outcome.failed) / rows) if rows else '?'}",
        ]
        return ", ".join(facts)

    def _refresh(self) -> None:
        is_terminal = self._console.is_terminal
        while not self._ended.wait(1.0 if is_terminal else LINE_S):
            self._beat()
            with suppress(OSError):  # as in `say`
                if is_terminal:
                    completed = self._outcome.total - self._outcome.missing + self._outcome.failed
                    self._bar.update(self._task, completed=completed, description=self.line())
                else:
                    tell(self._console, self.line())


def facts_of(outcome: Outcome, output: Path) -> dict[str, Any]:
    """Return the outcome in the form of --json."""
    names = (
        "total",
        "invalid",
        "before",
        "done",
        "failed",
        "missing",
        "removed",
        "requests",
        "retries",
    )
    sizes = ("tokens", "prompt_tokens", "reused", "bytes", "seconds")
    return {
        "output": str(output),
        **{name: getattr(outcome, name) for name in (*names, *sizes)},
        "failures": [{"row": row, "reason": reason} for row, reason in outcome.failures],
        "left": list(map(str, outcome.left)),
        "stopped_by": None
        if outcome.stopped_by is None
        else str(outcome.stopped_by) or type(outcome.stopped_by).__name__,
        "endpoints": [
            {"url": each.url, "answered": each.answered, "failed": each.failed}
            for each in outcome.endpoints
        ],
    }


def show(console: Console, outcome: Outcome, output: Path) -> None:
    """Print the numbers of an outcome as a table."""
    seconds = outcome.seconds or 1.0
    lines = {
        "rows": f"{outcome.total:,}",
        "finished before": f"{outcome.before:,}",
        "generated": f"{outcome.done:,}",
        **({"invalid, skipped": f"{outcome.invalid:,}"} if outcome.invalid else {}),
        "failed": f"[red]{outcome.failed:,}[/red]" if outcome.failed else "0",
        "not done": f"{outcome.missing - outcome.failed:,}",
        "requests": f"{outcome.requests:,}",
        "tokens": f"{outcome.tokens:,}, {outcome.tokens / seconds:,.0f}/s",
        "reused": (
            f"{outcome.reused:,} of {outcome.prompt_tokens:,} prompt tokens "
            f"({_share(outcome.reused, outcome.prompt_tokens)})"
        ),
        "size": f"{decimal(outcome.bytes)}, {decimal(round(outcome.bytes / seconds))}/s",
        "time": f"{duration(outcome.seconds)}, {outcome.done / seconds:,.1f} rows/s",
    }
    if len(outcome.endpoints) > 1:
        lines |= {
            each.url: f"{each.answered:,} answered, {each.failed:,} failed"
            for each in outcome.endpoints
        }
    table = Table(show_header=False)
    for line in lines.items():
        table.add_row(*line)
    tell(console, str(output))
    console.print(table, highlight=False)


def show_problems(console: Console, outcome: Outcome) -> None:
    """Print failures, removed rows, unfinished files and the reason of an early end."""
    for row, reason in outcome.failures:
        tell(console, f"row {row}: {reason}", "red")
    if outcome.failed > len(outcome.failures):
        tell(
            console,
            f"... and {outcome.failed - len(outcome.failures):,} more: see the ledger",
            "red",
        )
    if removed := outcome.removed:
        rows = ", ".join(map(str, removed[:SHOWN_FAILURES])) + (
            ", ..." if len(removed) > SHOWN_FAILURES else ""
        )
        tell(
            console,
            (
                f"{len(removed):,} finished rows were removed during the run: {rows}; run the same "
                "command again"
            ),
            "red",
        )
    for path in outcome.left:
        tell(console, f"{path} is still being written by the server; the next run checks it", "red")
    if isinstance(outcome.stopped_by, Interrupted):
        tell(console, "interrupted; finished rows are kept; run again to continue", "red")
    elif outcome.stopped_by is not None and not isinstance(
        outcome.stopped_by, (InputError, UnreachedError)
    ):
        tell(console, f"stopped: {outcome.stopped_by}", "red")


def tell(console: Console, text: str, style: str = "") -> None:
    """Print one line literally, with control characters escaped."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def _share(part: int, whole: int) -> str:
    return f"{part / (whole or 1):.0%}"


def duration(seconds: float) -> str:
    """Format seconds as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
