"""`python -m benchmarks.loop`: extract rows, train drafts on them and count accepted tokens.

All servers and trainers run on emulated NPUs.
"""

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
    """Parse the options. Exit with code 2 and one line for an invalid option."""
    parser = Parser(
        prog=f"python -m {NAME}",
        description="Train a target, extract rows, train drafts on the rows, serve the drafts and "
        "count accepted tokens. The exit code is 0 only if correct rows make better drafts than "
        "wrong rows.",
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="directory for all results; another call continues there (default: a temporary directory)",
    )
    add(
        "--seeds",
        type=whole(1, 10),
        default=1,
        metavar="N",
        help="number of drafts for each kind of rows; more than one seed adds kinds (default: 1)",
    )
    add(
        "--start-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="timeout for the start of a server, in seconds (default: 600)",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="timeout for one request, in seconds (default: 120)",
    )
    parser.add_output("the acceptance length of each draft, and the problems")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loop and return the exit code.

    The code is 0 if correct rows make better drafts, 1 after a problem or a failure, and 130 if
    interrupted.
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
    """Run the steps that have no result yet, and print the table.

    Raises:
        DemoError: if a package is missing or a step failed.
    """
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise DemoError(
            f"missing packages: {', '.join(missing)}; they train the drafts. Install them with "
            "`make setup`"
        )
    from httpx import HTTPError
    from openai import OpenAIError

    from benchmarks.loop.results import table
    from benchmarks.loop.run import Loop, plan_of

    work = (options.output or Path(tempfile.mkdtemp(prefix="hsx-loop-"))).absolute()
    console = out.progress
    console.print(
        f"results are in {work}; continue with --output {work}",
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
                "rows of hsx generate make as good a draft as rows of transformers, and wrong rows "
                "make a worse draft",
                style="green",
            )

    out.give({"ok": not problems, "problems": problems, **asdict(results)}, show)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
