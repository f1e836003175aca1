"""Run `hsx generate`: check the dataset, open the output directory, send rows, return a code."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from vllm_ascend_hsx.generate.answers import DATASET, Answers, write_dataset
from vllm_ascend_hsx.generate.client import check_url, words
from vllm_ascend_hsx.generate.dataset import Checked, Dataset
from vllm_ascend_hsx.generate.errors import InputError, Interrupted, RunError, UnreachedError
from vllm_ascend_hsx.generate.generation import Generation
from vllm_ascend_hsx.generate.ledger import (
    Ledger,
    State,
    Status,
    files_of_rows,
    open_ledger,
    row_file,
    row_of_file,
)
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import Outcome, Progress, tell
from vllm_ascend_hsx.generate.resume import resume
from vllm_ascend_hsx.generate.show import show_rows
from vllm_ascend_hsx.generate.sizes import Sizes, sizes_of, space_problem
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.names import printable
from vllm_ascend_hsx.reader.load import is_decided

ALL_THERE, SOME_MISSING, BAD_INPUT = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOWN_INVALID = 20


class Plan(NamedTuple):
    """A run that is ready to start.

    Attributes:
        options: options of the run.
        dataset: the dataset, after the check.
        checked: result of the check.
        console: output for progress and warnings.
    """

    options: Options
    dataset: Dataset
    checked: Checked
    console: Console


def do_here(plan: Plan, signals: Sequence[int] = SIGNALS) -> Outcome:
    """Do the rows of one rank in this process. `Outcome.stopped_by` has the reason of an early end.

    Args:
        plan: the run.
        signals: signals that end the run.

    Raises:
        InputError: the output directory cannot be used.
    """
    options, dataset, checked, console = plan
    ledger = open_ledger(
        options.output, options.request, options.world_size, options.rank, options.waits_for_lock
    )
    answers = None
    invalid = [each for each in checked.bad if options.is_ours(each.index)]
    outcome = Outcome(options.count_ours(len(checked.identities)) - len(invalid), len(invalid))
    problems: list[str] = []

    def beat() -> None:
        ledger.beat()
        if not problems and (problem := space_problem(options, outcome)) is not None:
            problems.append(problem)
            tell(console, problem, "yellow")

    try:
        resume(options, ledger, checked, console)
        ledger.note_run(len(checked.identities), len(checked.bad))
        for each in invalid:
            ledger.append(each.index, Status.INVALID, "", error=each.problem)
        answers = (
            Answers(options.output, options.world_size, options.rank)
            if options.include_output
            else None
        )
        with Progress(console, outcome, beat) as progress:
            rows = dataset.rows(options.is_wanted)
            asyncio.run(
                _run_until_signal(
                    Generation(options, rows, ledger, answers, outcome, progress), signals
                )
            )
        if outcome.stopped_by is None:
            _note_removed(options, ledger, outcome, checked)
        ledger.note_state(
            State.FINISHED if outcome.stopped_by is None else State.STOPPED,
            _reason(outcome.stopped_by),
        )
    except RunError as error:
        outcome.stopped_by = error
    except InputError as error:
        outcome.stopped_by = error
        raise
    finally:
        if answers is not None:
            answers.close()
        if outcome.is_refused:
            ledger.withdraw()
        ledger.close()
    return outcome


def generate(
    options: Options,
    console: Console,
    give: Callable[[Outcome | Sizes], None],
    do: Callable[[Plan], Outcome] = do_here,
) -> int:
    """Run `hsx generate`.

    Args:
        options: options of the run.
        console: output for progress and warnings.
        give: prints the result.
        do: does the rows of the plan.

    Returns:
        0 if at most `allow_failures` rows are missing, 1 if more are, 128 + the number of a signal
        that ended the run.

    Raises:
        InputError: dataset, options, output directory or server cannot be used.
        UnreachedError: no server answers.
    """
    for url in options.endpoints:
        check_url(url)
    if options.world_size > 1 or options.rank_source:
        source = f" ({options.rank_source})" if options.rank_source else ""
        tell(console, f"rank {options.rank} of {options.world_size}{source}")
    dataset = open_dataset(options)
    plan = Plan(options, dataset, _check(dataset, options, console), console)
    if options.dry_run:
        give(sizes_of(options, dataset, plan.checked))
        return ALL_THERE
    shown = (
        options.show
        if options.show is not None
        else int(options.rank == 0 and not options.output.exists())
    )
    if shown:
        asyncio.run(show_rows(console, options, islice(dataset.rows(), shown)))
    outcome = do(plan)
    if options.include_output and outcome.stopped_by is None:
        _write_answers(plan)
    if outcome.requests or not isinstance(outcome.stopped_by, (InputError, UnreachedError)):
        give(outcome)
    if isinstance(outcome.stopped_by, (InputError, UnreachedError)):
        raise outcome.stopped_by
    if isinstance(outcome.stopped_by, Interrupted):
        return 128 + outcome.stopped_by.number
    return (
        SOME_MISSING
        if outcome.missing > options.allow_failures or outcome.stopped_by is not None
        else ALL_THERE
    )


def _write_answers(plan: Plan) -> None:
    """Write the answers as a training dataset, if this run has only one rank."""
    options, _, checked, console = plan
    remedy = ""
    if options.world_size > 1:
        remedy = "after all ranks have ended, run again with --world-size 1 --rank 0"
    else:
        try:
            path = write_dataset(options.output, checked.identities)
            tell(console, f"{path}: training dataset with the answers of all rows")
        except ModuleNotFoundError as error:
            remedy = (
                f"{error.name} is not installed; pip install 'vllm-ascend-hsx[data]' and run again"
            )
        except Exception as error:  # noqa: BLE001 (`datasets` wraps the OSError of a full disk)
            remedy = f"{words(error)}; fix it and run again"
    if remedy:
        tell(console, f"{options.output / DATASET} was not written: {remedy}", "yellow")


def _reason(stopped_by: Exception | None) -> str | None:
    if isinstance(stopped_by, Interrupted):
        return signal.Signals(stopped_by.number).name
    return None if stopped_by is None else str(stopped_by)


def _note_removed(options: Options, ledger: Ledger, outcome: Outcome, checked: Checked) -> None:
    """Log rows whose files were removed during the run. Raises RunError."""
    ledger.require_in_place()
    output = options.output
    try:
        existing = {row_of_file(path.name) for path in files_of_rows(output)}
        # A network filesystem may return an old listing, so each missing name is looked up again.
        done = (
            row
            for row, mark in enumerate(ledger.finished.marks[: len(checked.identities)])
            if mark and options.is_wanted(row)
        )
        outcome.removed = [
            row for row in done if row not in existing and not is_decided(output / row_file(row))
        ]
    except OSError as error:
        raise RunError(describe("cannot check whether all files still exist", error)) from error
    for row in outcome.removed:
        ledger.append(row, Status.FAILED, "", error="the file was removed during the run")


async def _run_until_signal(generation: Generation, signals: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()

    def interrupt(number: int) -> None:
        if isinstance(generation.outcome.stopped_by, Interrupted):
            os._exit(128 + number)  # second signal; the next run handles leftover files
        generation.stop(Interrupted(number))
        generation.progress.say("stopping; a second signal ends the run immediately")

    for number in signals:
        loop.add_signal_handler(number, interrupt, number)
    try:
        await generation.run()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _check(dataset: Dataset, options: Options, console: Console) -> Checked:
    """Read the whole dataset and report rows that cannot be sent. Raises InputError."""
    data = printable(options.data)
    with console.status(Text(f"checking {data}")) as status:
        checked = dataset.check(
            options.request, lambda rows: status.update(Text(f"checking {data}: {rows:,} rows"))
        )
    problems = [f"{each.where}: {each.problem}" for each in checked.bad[:_SHOWN_INVALID]]
    if len(checked.bad) > _SHOWN_INVALID:
        problems.append(f"... and {len(checked.bad) - _SHOWN_INVALID:,} more")
    if problems and not options.skip_invalid:
        remedy = "fix them, or skip them with --skip-invalid"
        summary = (
            [f"{data}: {len(checked.bad):,} rows cannot be sent; {remedy}"]
            if len(problems) > 1
            else []
        )
        raise InputError(*summary, *problems)
    tell(console, f"{data}: {len(checked.identities):,} rows")
    if checked.unsent:
        names = ", ".join(f"{name} ({rows:,} rows)" for name, rows in checked.unsent.most_common())
        tell(console, f"columns that are not sent: {names}", "yellow")
    for problem in problems:
        tell(console, f"skipped: {problem}", "yellow")
    return checked
