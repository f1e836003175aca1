"""The table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import Ledger
from vllm_ascend_hsx.generate.outcome import Interrupted, Outcome
from vllm_ascend_hsx.generate.progress import duration
from vllm_ascend_hsx.protocol.names import printable


def show_summary(console: Console, outcome: Outcome, ledger: Ledger) -> None:
    """Prints what became of the rows, what it took, and what went wrong."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("rows", f"{outcome.total:,}")
    table.add_row("finished before", f"{outcome.before:,}")
    table.add_row("generated", f"{outcome.done:,}")
    if outcome.recovered:
        table.add_row("found on the server's side", f"{outcome.recovered:,}")
    table.add_row("failed", f"[red]{outcome.failed:,}[/red]" if outcome.failed else "0")
    if outcome.missing > outcome.failed:
        table.add_row("not done", f"{outcome.missing - outcome.failed:,}")
    table.add_row("tokens", f"{outcome.tokens:,}")
    table.add_row("size", decimal(outcome.bytes))
    table.add_row("requests", f"{outcome.requests:,}")
    table.add_row("time", duration(outcome.seconds))
    if outcome.seconds:
        rows = outcome.done + outcome.recovered
        table.add_row("rows/s", f"{rows / outcome.seconds:,.1f}")
        table.add_row("tokens/s", f"{outcome.tokens / outcome.seconds:,.0f}")
        table.add_row("size/s", f"{decimal(round(outcome.bytes / outcome.seconds))}")
    if len(outcome.endpoints) > 1:
        for endpoint in outcome.endpoints:
            table.add_row(endpoint.url, f"{endpoint.answered:,} answered, {endpoint.failed:,} failed")
    console.print(printable(str(ledger.path.parent)), markup=False, highlight=False, soft_wrap=True)
    console.print(table, highlight=False)
    for row, reason in outcome.failures:
        _say(console, f"row {row}: {reason}")
    if outcome.failed > len(outcome.failures):
        _say(console, f"... and {outcome.failed - len(outcome.failures):,} more: {ledger.path}")
    for path in outcome.left:
        _say(console, f"{path} is still being written by the server; the next run removes it")
    stopped = outcome.stopped_by
    if isinstance(stopped, Interrupted):
        _say(console, "interrupted; what is done is kept: call again to go on")
    elif stopped is not None and not isinstance(stopped, InputError):
        _say(console, f"stopped: {stopped}")


def _say(console: Console, text: str) -> None:
    console.print(printable(text), style="red", markup=False, highlight=False, soft_wrap=True)
