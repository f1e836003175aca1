"""`hsx status`: show the progress of runs of `hsx generate`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path
from vllm_ascend_hsx.cli.output import OneConsole, Output, say
from vllm_ascend_hsx.generate.ledger import State
from vllm_ascend_hsx.generate.progress import duration
from vllm_ascend_hsx.generate.status import WINDOW_S, Progress, read_status
from vllm_ascend_hsx.protocol.names import printable

COUNTS = ("rows", "done", "made", "failed", "invalid", "remaining", "rows_per_s")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx status`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx status",
        description="Shows the progress of runs of `hsx generate`, by rank and in total: the state "
        "(running, waiting, stopped or finished), the rows that are done, made by this run, "
        f"failed, invalid and remaining, and rows per second over the last {WINDOW_S:.0f} seconds. "
        "Only reads ledgers and does not disturb runs. Exit code: 0 all ledgers were read, 1 some "
        "were not, 2 none was.",
    )
    add = parser.add_argument
    add(
        "directories",
        nargs="+",
        type=non_empty_path,
        metavar="DIR",
        help="--output of `hsx generate`",
    )
    parser.add_output("runs with their ranks, problems and the total")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx status` and return the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    runs, problems = read_status(options.directories, time.time())
    total = Progress("all", **{name: sum(getattr(run, name) for run in runs) for name in COUNTS})
    counts = {name: getattr(total, name) for name in COUNTS}
    facts = {"runs": [asdict(run) for run in runs], "problems": problems, "total": counts}
    Output(options).give(facts, lambda console: _show(console, runs, total))
    for each in problems:
        say(f"hsx status: {each['path']}: {each['problem']}", error=True)
    return 2 if not runs else 1 if problems else 0


def _show(console: OneConsole, runs: Sequence[Progress], total: Progress) -> None:
    for run in runs:
        console.tell(f"{run.name}: {run.state}, {_line(run)}")
        table = Table(
            "ledger", "state", "done", "by this run", "failed", "invalid", "remaining", "rows/s"
        )
        for each in run.ranks:
            numbers = (each.done, each.made, each.failed, each.invalid, each.remaining)
            table.add_row(
                printable(each.name),
                each.state,
                *(f"{number:,}" for number in numbers),
                f"{each.rows_per_s:,.1f}",
            )
        console.print(table, highlight=False)
        for each in run.ranks:
            if each.reason:
                console.tell(f"{each.name}: {each.state}: {each.reason}")
    if len(runs) > 1:
        console.tell(f"all: {_line(total)}")


def _line(run: Progress) -> str:
    facts = [
        f"{run.done:,} of {run.rows:,} rows done ({run.done / (run.rows or 1):.1%})",
        f"{run.made:,} by this run",
        *(
            f"{number:,} {name}"
            for number, name in (
                (run.failed, "failed"),
                (run.invalid, "invalid"),
                (run.remaining, "remaining"),
            )
        ),
        f"{run.rows_per_s:,.1f} rows/s",
    ]
    if run.rows_per_s and run.remaining and State.RUNNING.value in run.state:
        facts.append(f"ETA {duration(run.remaining / run.rows_per_s)}")
    return ", ".join(facts)
