"""`hsx status`: how far the runs of `hsx generate` in some directories have come."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path
from vllm_ascend_hsx.cli.output import OneConsole, make_console, say
from vllm_ascend_hsx.generate.machines.status import WINDOW_S, Counts, Progress, Rank, Status, read_status
from vllm_ascend_hsx.generate.progress import duration
from vllm_ascend_hsx.protocol.names import printable


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx status`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx status",
        description="Shows how far runs of `hsx generate` have come: rows done, failed and remaining, and the rows per second of the last "
        f"{WINDOW_S:.0f} seconds, of each rank and in total. It reads ledgers alone, and disturbs no run. "
        "Exit code: 0 all ledgers were read, 1 some were not, 2 none was.",
    )
    add = parser.add_argument
    add("directories", nargs="+", type=non_empty_path, metavar="DIR", help="that is --output of `hsx generate`")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx status` and return its exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    now = time.time()
    status = read_status(options.directories, now)
    if options.json:
        print(json.dumps({**asdict(status), "total": asdict(status.total)}))
    else:
        _show(make_console(), status, now)
    for each in status.problems:
        say(f"hsx status: {each['path']}: {each['problem']}", error=True)
    return (1 if status.runs else 2) if status.problems else 0


def _show(console: OneConsole, status: Status, now: float) -> None:
    for run in status.runs:
        others = sum(each.directory == run.directory for each in status.runs) > 1
        dataset = f" (dataset {run.digest[:12]})" if others else ""
        console.tell(f"{run.directory}{dataset}: {_line(run)}")
        console.print(_table(run, now), highlight=False)
    if len(status.runs) > 1:
        console.tell(f"all: {_line(status.total)}")


def _line(counts: Counts) -> str:
    share = f" ({counts.done / counts.rows:.1%})" if counts.rows else ""
    left = f"ETA {duration(counts.remaining / counts.rows_per_s)}" if counts.rows_per_s and counts.remaining else ""
    facts = [
        f"{counts.done:,} of {counts.rows:,} rows{share}",
        f"{counts.failed:,} failed",
        f"{counts.remaining:,} remaining",
        f"{_rate(counts)} rows/s",
        *([left] if left else []),
    ]
    return ", ".join(facts)


def _table(run: Progress, now: float) -> Table:
    table = Table("rank", "done", "failed", "remaining", "rows/s", "last row", "ledger")
    for each in run.ranks:
        numbers = (f"{each.done:,}", f"{each.failed:,}", f"{each.remaining:,}", _rate(each))
        table.add_row(f"{each.rank} of {each.world_size}", *numbers, _age(each, now), printable(each.ledger))
    return table


def _rate(counts: Counts) -> str:
    return "?" if counts.rows_per_s is None else f"{counts.rows_per_s:,.1f}"


def _age(rank: Rank, now: float) -> str:
    return "?" if rank.last is None else f"{duration(max(now - rank.last, 0.0))} ago"
