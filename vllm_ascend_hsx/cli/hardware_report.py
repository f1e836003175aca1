"""`hsx hardware-report`: run the hardware checklist on this machine, and write a report."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_ascend_hsx.cli.arguments import Parser, non_empty_path, seconds, whole
from vllm_ascend_hsx.cli.output import INTERRUPTED, OneConsole, Output, ended_by_sigterm, say
from vllm_ascend_hsx.doctor.software import count_npus, npu_is_emulated
from vllm_ascend_hsx.plan.shape import read_config
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.report import document
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN, Result
from vllm_ascend_hsx.report.steps import STEPS, Step

NO_NPUS = (
    "this machine has no NPUs (/dev/davinci0 or the like); to see the report without: hsx "
    "emulate -- hsx hardware-report"
)
_STYLES = {HELD: "green", MEASURED: "green", BROKE: "bold red", NOT_RUN: "yellow"}
_NAMES = tuple(step.name for step in STEPS)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options. Exits with code 2 and one line for an invalid one."""
    parser = Parser(
        prog="hsx hardware-report",
        description="Runs the hardware checklist on this machine's NPUs, as far as their number "
        "allows. Writes the results and measured costs to a Markdown and a JSON file for an issue. "
        "Downloads nothing. Exit code 0: nothing failed; 1: something did not hold; 2: invalid "
        "options, or no NPUs.",
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="DIR",
        help="directory of the target (default: a tiny MiniMax-M2 with random weights)",
    )
    output = "new or empty directory for report, logs and files (default: %(default)s)"
    add(
        "--output",
        type=non_empty_path,
        default=Path("hsx-hardware-report"),
        metavar="DIR",
        help=output,
    )
    add(
        "--tensor-parallel-size",
        type=whole(1, 4096),
        metavar="N",
        help="default: the smallest that fits, and at least 2 if there are several NPUs",
    )
    add(
        "--data-parallel-size",
        type=whole(1, 4096),
        metavar="N",
        help="default: 2 if enough NPUs remain, else 1",
    )
    add(
        "--steps",
        type=_steps,
        default=_NAMES,
        metavar="NAMES",
        help=f"comma-separated steps to run: {', '.join(_NAMES)} (default: all)",
    )
    add(
        "--step-timeout",
        type=seconds,
        metavar="S",
        help="seconds per step (default: 1 to 90 minutes, by step)",
    )
    add(
        "serve_options",
        nargs="*",
        metavar="-- VLLM_OPTION",
        help="more options for each `vllm serve`, after --",
    )
    parser.add_output("whether nothing failed, the report's files, and the results")
    return parser.parse_args(argv)


def _steps(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in _NAMES]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a step; choose from {', '.join(_NAMES)}"
        )
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsx hardware-report` and return the exit code."""
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    out = Output(options)
    emulated = npu_is_emulated()
    if not emulated and not count_npus():
        say(f"hsx hardware-report: {NO_NPUS}", error=True)
        return 2
    try:
        context = _context(options, emulated)
    except UserError as error:
        say(f"hsx hardware-report: {error}", error=True)
        return 2
    try:
        with ended_by_sigterm("hsx hardware-report"):
            return _run(options, context, out)
    except KeyboardInterrupt:
        out.errors.tell(
            f"hsx hardware-report: interrupted; {context.output / document.NAME}.md has the "
            "results so far"
        )
        return INTERRUPTED


def _context(options: argparse.Namespace, emulated: bool) -> Context:
    """Check the options, and create the report's directory and the tiny model. Raises UserError."""
    output: Path = options.output.absolute()
    if options.model is not None:
        model = Path(options.model).expanduser().absolute()
        if not (model / "config.json").is_file():
            raise UserError(
                "--model",
                options.model,
                "has no config.json",
                "Give the directory of a downloaded model.",
            )
        read_config(str(model))
    try:
        output.mkdir(parents=True, exist_ok=True)
        used = any(output.iterdir())
    except OSError as error:
        problem = f"cannot be a directory: {error.strerror}"
        raise UserError(
            "--output",
            str(options.output),
            problem,
            "Give a new or existing writable directory.",
        ) from error
    if used:
        raise UserError(
            "--output",
            str(options.output),
            "is not empty",
            "Give a new directory, or remove the earlier report.",
        )
    if options.model is None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
        from vllm_ascend_hsx.demo.tiny_models import cached_minimax_m2

        model = cached_minimax_m2()
    sizes = (options.tensor_parallel_size, options.data_parallel_size)
    return Context(model, output, emulated, *sizes, serve_options=tuple(options.serve_options))


def _run(options: argparse.Namespace, context: Context, out: Output) -> int:
    from vllm_ascend_hsx.report.run import run_all, run_process  # imports the openai client

    def begin(step: Step) -> None:
        limit = options.step_timeout or step.limit_s
        most = f" (at most {limit / 60:.0f} min)" if limit >= 60 else ""
        out.progress.tell(f"{step.name}: {step.title}{most} ...")

    def show(step: Step, results: Sequence[Result]) -> None:
        for result in results:
            out.progress.tell(
                f"  {document.LINES[result.line].what}: {result.outcome}: {result.found}",
                _STYLES[result.outcome],
            )

    def run(step: Step, context: Context) -> list[Result]:
        return run_process(step, context, options.step_timeout)

    results = run_all(context, options.steps, begin, show, run)
    count = Counter(result.outcome for result in results)
    path = context.output / document.NAME
    files = {"markdown": f"{path}.md", "json": f"{path}.json"}
    facts = {"ok": not count[BROKE], **files, "results": [asdict(each) for each in results]}

    def show_counts(console: OneConsole) -> None:
        console.tell(
            ", ".join(f"{count[outcome]} {outcome}" for outcome in (HELD, MEASURED, BROKE, NOT_RUN))
        )
        console.tell(f"wrote {path}.md and .json; paste the first into an issue")

    out.give(facts, show_counts)
    return 1 if count[BROKE] else 0
