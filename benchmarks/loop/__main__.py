"""`python -m benchmarks.loop`: from a target to drafts that a server accepts, on emulated NPUs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ascend_npu_emulator.launch import environment
from vllm_ascend_hsx.cli.arguments import Parser, seconds, whole
from vllm_ascend_hsx.cli.output import INTERRUPTED, Output, ended_by_sigterm
from vllm_ascend_hsx.demo import DemoError

if TYPE_CHECKING:
    import argparse

NAME = "benchmarks.loop"
NEEDED = ("speculators", "hs_connectors", "datasets")
HBM_BYTES = 2 << 30  # memory of one emulated NPU


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options. Exit with code 2 and one line for an invalid one."""
    parser = Parser(
        prog=f"python -m {NAME}",
        description="Trains a target, extracts rows, trains drafts on them, serves the drafts and "
        "counts accepted tokens. Exit code 0 only if right rows make better drafts than wrong ones.",
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="directory of all results; another call continues there (default: a temporary one)",
    )
    add(
        "--seeds",
        type=whole(1, 10),
        default=1,
        metavar="N",
        help="drafts for each kind of rows; several seeds add kinds (default: 1)",
    )
    add(
        "--start-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for the start of a server (default: 600)",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds for one request (default: 120)",
    )
    parser.add_output("the acceptance length of each draft, and the problems")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop and return the exit code.

    It is 0 if right rows make better drafts, 1 for a difference or failure, 130 if interrupted.
    """
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    out = Output(options)
    try:
        with ended_by_sigterm(NAME):
            return run(options, out)
    except DemoError as error:
        for line in f"{NAME}: {error}".splitlines():
            out.errors.tell(line, "red")
        return 1
    except KeyboardInterrupt:
        out.errors.tell(f"{NAME}: interrupted; all processes have been stopped")
        return INTERRUPTED


def run(options: argparse.Namespace, out: Output) -> int:
    """Run all steps that have no result yet, and print the table.

    Raises:
        DemoError: if a package is missing or a step failed.
    """
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise DemoError(
            f"not installed here: {', '.join(missing)}, which trains the drafts; `make setup` "
            "installs it"
        )
    from httpx import HTTPError
    from openai import OpenAIError

    from benchmarks.loop.results import table
    from benchmarks.loop.run import Loop, plan_of

    work = (options.output or Path(tempfile.mkdtemp(prefix="hsx-loop-"))).absolute()
    console = out.progress
    console.print(
        f"everything is in {work}; call again with --output {work} to continue there",
        highlight=False,
        soft_wrap=True,
    )
    loop = Loop(
        work,
        console,
        emulated=lambda npus: environment(npus=npus, hbm_bytes=HBM_BYTES),
        start_timeout=options.start_timeout,
        request_timeout=options.request_timeout,
        plan=plan_of(options.seeds),
    )
    try:
        results = loop.run()
    except (OpenAIError, HTTPError, OSError) as error:
        raise DemoError(f"a step of the loop failed: {error}") from error
    problems = results.problems()

    def show(console: Console) -> None:
        console.print(table(results))
        for problem in problems:
            console.print(problem, style="red", markup=False, highlight=False)
        if not problems:
            console.print(
                "rows of hsx generate make as good a draft as those of transformers, and wrong "
                "rows a worse one",
                style="green",
            )

    out.give({"ok": not problems, "problems": problems, **asdict(results)}, show)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
