"""How a run went, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from vllm_ascend_hsx.generate.endpoints import Endpoint
from vllm_ascend_hsx.generate.errors import InputError, Interrupted
from vllm_ascend_hsx.generate.progress import duration
from vllm_ascend_hsx.protocol.names import printable

SHOWN_FAILURES = 10


@dataclass
class Outcome:
    """How a run went.

    Attributes:
        total: rows of this rank.
        before, done, failed: rows that were there, that were made, and that have no file.
        failures: the first failed rows, with the reason.
        requests: sent for rows.
        tokens, bytes: of the files made.
        seconds: of the run.
        left: files that the servers were still writing at the end.
        stopped_by: what ended the run early, or None.
        endpoints: the servers.
    """

    total: int
    before: int = 0
    done: int = 0
    failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    left: list[Path] = field(default_factory=list)
    stopped_by: Exception | None = None
    endpoints: Sequence[Endpoint] = ()

    @property
    def missing(self) -> int:
        """Rows without a file."""
        return self.total - self.before - self.done


def show(console: Console, outcome: Outcome, ledger: Path) -> None:
    """Print what became of the rows, what they took, and what went wrong."""
    seconds = outcome.seconds or 1.0
    lines = {
        "rows": f"{outcome.total:,}",
        "finished before": f"{outcome.before:,}",
        "generated": f"{outcome.done:,}",
        "failed": f"[red]{outcome.failed:,}[/red]" if outcome.failed else "0",
        "not done": f"{outcome.missing - outcome.failed:,}",
        "requests": f"{outcome.requests:,}",
        "tokens": f"{outcome.tokens:,}, {outcome.tokens / seconds:,.0f}/s",
        "size": f"{decimal(outcome.bytes)}, {decimal(round(outcome.bytes / seconds))}/s",
        "time": f"{duration(outcome.seconds)}, {outcome.done / seconds:,.1f} rows/s",
    }
    if len(outcome.endpoints) > 1:
        for each in outcome.endpoints:
            lines[each.url] = f"{each.answered:,} answered, {each.failed:,} failed"
    table = Table(show_header=False)
    for name, value in lines.items():
        table.add_row(name, value)
    _print(console, str(ledger.parent), "")
    console.print(table, highlight=False)
    for row, reason in outcome.failures:
        _print(console, f"row {row}: {reason}")
    if outcome.failed > len(outcome.failures):
        _print(console, f"... and {outcome.failed - len(outcome.failures):,} more: {ledger}")
    for path in outcome.left:
        _print(console, f"{path} is still being written by the server; the next run checks it")
    stopped = outcome.stopped_by
    if isinstance(stopped, Interrupted):
        _print(console, "interrupted; what is done is kept: call again to go on")
    elif stopped is not None and not isinstance(stopped, InputError):
        _print(console, f"stopped: {stopped}")


def _print(console: Console, text: str, style: str = "red") -> None:
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)
