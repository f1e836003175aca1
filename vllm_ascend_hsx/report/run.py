"""Run the steps one after the other, and write the report after each."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.document import write
from vllm_ascend_hsx.report.result import HELD, MEASURED, NOT_RUN, Result
from vllm_ascend_hsx.report.runner import run_step, subreaper
from vllm_ascend_hsx.report.steps import STEPS, Step

Run = Callable[[Step, Context], Sequence[Result]]


def run_all(
    context: Context,
    chosen: Sequence[str],
    begin: Callable[[Step], None],
    show: Callable[[Step, Sequence[Result]], None],
    run: Run | None = None,
    steps: Sequence[Step] = STEPS,
) -> list[Result]:
    """Run the chosen steps and return a result for each line, in the table's order.

    The report is written after each step. If the run is interrupted, the report has the results so
    far, and marks the other lines as not run.

    Args:
        chosen: names of steps.
        begin, show: called before and after each step.
        run: runs a step; by default in a separate process, with the step's time limit.
        steps: the table.
    """
    results: dict[str, Result] = {}
    with subreaper():
        for step in steps:
            write(context, _all(steps, results))
            if (
                reason := "excluded by --steps"
                if step.name not in chosen
                else _missing(step, results)
            ):
                found: Sequence[Result] = [Result(line.key, NOT_RUN, reason) for line in step.lines]
            else:
                begin(step)
                found = (run or run_process)(step, context)
            results |= {result.line: result for result in found}
            context = replace(
                context, found={key: each.data for key, each in results.items() if each.data}
            )
            show(step, found)
    write(context, _all(steps, results))
    return _all(steps, results)


def run_process(step: Step, context: Context, limit_s: float | None = None) -> list[Result]:
    """Run a step in a separate process; files are in the output directory `logs`.

    Rows can take much space, so they are always removed afterwards.
    """
    logs = context.output / "logs"
    logs.mkdir(exist_ok=True)
    told, asked = logs / f"{step.name}.jsonl", logs / f"{step.name}.context.json"
    told.unlink(missing_ok=True)
    context.write(asked)
    command = [sys.executable, "-m", "vllm_ascend_hsx.report", step.name, str(asked), str(told)]
    try:
        return run_step(step, command, told, logs / f"{step.name}.log", limit_s)
    finally:
        shutil.rmtree(context.files, ignore_errors=True)


def _missing(step: Step, results: dict[str, Result]) -> str:
    """Return a reason that names the first missing line that the step needs, or ""."""
    for key in step.needs:
        if results[key].outcome not in (HELD, MEASURED):
            return f"needs '{key}': {results[key].found}"
    return ""


def _all(steps: Sequence[Step], results: dict[str, Result]) -> list[Result]:
    lines = [line for step in steps for line in step.lines]
    return [
        results.get(line.key) or Result(line.key, NOT_RUN, "the command ended before this step")
        for line in lines
    ]
