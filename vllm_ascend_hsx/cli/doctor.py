"""`hsx doctor`: check whether extraction will work on this machine, and suggest fixes."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path
from vllm_ascend_hsx.cli.output import OneConsole, Output, say
from vllm_ascend_hsx.doctor import patch_points, storage
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.doctor.software import check_software
from vllm_ascend_hsx.doctor.target import check_target, stored_format
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.names import printable
from vllm_ascend_hsx.sinks.data_file import FileOptions

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `hsx doctor`. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx doctor",
        description="Checks whether extraction of hidden states will work on this machine, and "
        "suggests fixes. Checks versions, NPUs, patch points in vllm and vllm-ascend, a storage "
        "directory and a model. Exit code 0: no problems; 1: problems; 2: invalid options.",
    )
    parser.add_argument(
        "--out",
        type=non_empty_path,
        metavar="DIR",
        help="storage directory to test by writing 256 MiB",
    )
    parser.add_argument(
        "--io",
        choices=("buffered", "direct"),
        default="buffered",
        help="I/O mode of the files in --out (default: buffered)",
    )
    parser.add_argument(
        "--durability",
        choices=("none", "fdatasync"),
        default="none",
        help="durability of the files in --out (default: none)",
    )
    parser.add_argument(
        "--no-lock", action="store_true", help="test --out with use_synchronization_lock false"
    )
    presets = ", ".join(PRESETS)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"config.json, the directory with it, or one of: {presets}",
    )
    parser.add_output("whether all is well, and the findings")
    options = parser.parse_args(argv)
    if options.out is None and (
        options.io != "buffered" or options.durability != "none" or options.no_lock
    ):
        parser.error("--io, --durability and --no-lock are for the files in --out; add --out DIR")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx doctor` and return the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    out = Output(options)
    try:
        found = list(findings(options, out.progress))
    except UserError as error:
        say(f"hsx doctor: {error}", error=True)
        return 2
    healthy = all(each.verdict != "problem" for each in found)
    out.give(
        {"ok": healthy, "findings": [asdict(each) for each in found]},
        lambda console: show(console, found),
    )
    return 0 if healthy else 1


def findings(options: argparse.Namespace, progress: OneConsole) -> Iterator[Finding]:
    """Yield the findings for a command line. Raises UserError: the model cannot be read."""
    if options.model is not None:
        yield from check_target(options.model)  # first, because the name may be wrong
    software = list(check_software())
    yield from software
    _announce(progress, "importing vllm and vllm-ascend, which can take a minute")
    yield from patch_points.check_patch_points(all(each.verdict != "problem" for each in software))
    if options.out is not None:
        _announce(progress, f"writing {storage.WRITTEN >> 20} MiB to {options.out}")
        files = FileOptions(
            use_lock=not options.no_lock, io=options.io, durability=options.durability
        )
        yield from storage.check_storage(
            options.out.absolute(), files, stored_format(options.model)
        )


def _announce(progress: OneConsole, what: str) -> None:
    progress.tell(f"hsx doctor: {what} ...")


def show(console: Console, found: Sequence[Finding]) -> None:
    """Print the findings as a table, with one row for all patch points that hold."""
    table = Table("topic", "what", "", "found", "what to do")
    for column in (1, 3, 4):
        table.columns[column].overflow = "fold"
    holding = [each for each in found if each.topic == patch_points.TOPIC and each.verdict == "ok"]
    shown = [each for each in found if each not in holding]
    if holding:
        # Others have rows of their own.
        number = (
            f"{len(holding)} hold"
            if any(each.topic == patch_points.TOPIC for each in shown)
            else f"all {len(holding)} hold"
        )
        place = next(
            (
                index
                for index, each in enumerate(shown)
                if each.topic in (patch_points.TOPIC, storage.TOPIC)
            ),
            len(shown),
        )
        shown.insert(place, Finding(patch_points.TOPIC, "vllm, vllm-ascend", "ok", number))
    for each in shown:
        verdict = Text(each.verdict, style=_STYLES[each.verdict])
        table.add_row(
            each.topic,
            Text(printable(each.name)),
            verdict,
            Text(printable(each.found)),
            Text(printable(each.what_to_do)),
        )
    console.print(table)
    count = Counter(each.verdict for each in found)
    if problems := count["problem"]:
        number = "1 problem" if problems == 1 else f"{problems} problems"
        console.print(
            f"{number}: extraction will fail or give wrong results",
            style="bold red",
            highlight=False,
        )
    else:
        console.print("no problems", style="green")
