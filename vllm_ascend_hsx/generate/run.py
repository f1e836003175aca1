"""From options to an exit code: check the dataset, open the output directory, run, show."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from vllm_ascend_hsx.generate.client import check_url
from vllm_ascend_hsx.generate.dataset import Checked, Dataset
from vllm_ascend_hsx.generate.errors import InputError, Interrupted, RunError
from vllm_ascend_hsx.generate.files import RowFiles
from vllm_ascend_hsx.generate.generation import AnswerLog, Generation
from vllm_ascend_hsx.generate.ledger import REMEDY, Ledger, State, Status, files_of_rows, open_ledger, row_file, row_of_file
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import Outcome, Progress, show, tell
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.names import printable
from vllm_ascend_hsx.reader.load import is_decided

ALL_THERE, SOME_MISSING, BAD_INPUT = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOWN_INVALID = 20


class Job(NamedTuple):
    """The parts of one run.

    Attributes:
        options: of the run.
        rows: to do.
        ledger: locked.
        answers: of the target; None without generated tokens.
        outcome: filled in by the run.
        progress: shows messages.
    """

    options: Options
    rows: Iterator[Row]
    ledger: Ledger
    answers: AnswerLog | None
    outcome: Outcome
    progress: Progress


def do_here(job: Job) -> None:
    """Do the rows in this process."""
    asyncio.run(_run_until_signal(Generation(*job)))


def generate(options: Options, console: Console, do: Callable[[Job], None] = do_here) -> int:
    """Run `hsx generate`.

    Args:
        options: of the run.
        console: to write to.
        do: does the rows; the outcome says what stopped it.

    Returns:
        0 if all rows are there, or all but `allow_failures`; 1 if some are not; 128 + the number of
        a signal that ended the run.

    Raises:
        InputError: dataset, options, output directory or server cannot be used.
    """
    for url in options.endpoints:
        check_url(url)
    if options.world_size > 1 or options.rank_source:
        source = f" ({options.rank_source})" if options.rank_source else ""
        tell(console, f"rank {options.rank} of {options.world_size}{source}")
    dataset = open_dataset(options)
    checked = _check(dataset, options, console)
    ledger = open_ledger(options.output, options.request, options.world_size, options.rank)
    invalid = [each for each in checked.bad if options.is_ours(each.index)]
    outcome = Outcome(options.count_ours(len(checked.identities)) - len(invalid), len(invalid))
    try:
        _resume(options, ledger, checked, console)
        ledger.note_run(len(checked.identities), len(checked.bad))
        for each in invalid:
            ledger.append(each.index, Status.INVALID, "", error=each.problem)
        with Progress(console, outcome) as progress:
            do(Job(options, dataset.rows(options.is_wanted), ledger, None, outcome, progress))
        if outcome.stopped_by is None:
            _note_removed(options, ledger, outcome, checked)
        ledger.note_state(State.FINISHED if outcome.stopped_by is None else State.STOPPED, _reason(outcome.stopped_by))
    except RunError as error:
        outcome.stopped_by = error
    finally:
        ledger.close()
    if outcome.requests or not isinstance(outcome.stopped_by, InputError):
        show(console, outcome, ledger.path)
    if isinstance(outcome.stopped_by, InputError):
        raise outcome.stopped_by
    if isinstance(outcome.stopped_by, Interrupted):
        return 128 + outcome.stopped_by.number
    return SOME_MISSING if outcome.missing > options.allow_failures or outcome.stopped_by is not None else ALL_THERE


def _reason(stopped_by: Exception | None) -> str | None:
    if isinstance(stopped_by, Interrupted):
        return signal.Signals(stopped_by.number).name
    return None if stopped_by is None else str(stopped_by)


def _resume(options: Options, ledger: Ledger, checked: Checked, console: Console) -> None:
    """Compare the dataset with the finished rows; log the changed ones, and move the moved ones.

    Raises:
        InputError: the finished rows are of another dataset, or moved and other ranks may run.
        RunError: files cannot be moved.
    """
    now = np.array(checked.identities, np.uint64)
    before = np.array(ledger.finished.marks, np.uint64)
    if options.limit is not None:
        before = before[: len(now)]  # further rows of the dataset are not known
    places = np.zeros_like(before)
    places[: len(now)] = now[: len(before)]
    finished = before != 0
    lost = np.flatnonzero(finished & (before != places))
    if not lost.size:
        return
    free = {int(now[row]): int(row) for row in np.flatnonzero(now) if row >= len(before) or before[row] != now[row]}
    moved = {int(row): free[int(before[row])] for row in lost if int(before[row]) in free}
    kept = int(finished.sum()) - lost.size + len(moved)
    if 2 * kept < finished.sum():
        problem = f"only {kept:,} of its {int(finished.sum()):,} finished rows are rows of {options.data}"
        raise InputError(f"{options.output} holds rows of another dataset: {problem}; {REMEDY}")
    if moved and options.world_size > 1:
        problem = f"{len(moved):,} finished rows have another place in {options.data} now, and several ranks cannot rename their files"
        raise InputError(f"{problem}; call once with --world-size 1 --rank 0")
    for row in lost:
        if options.is_ours(int(row)):
            ledger.append(int(row), Status.CHANGED, "")
    try:
        RowFiles(options, ledger).move(moved)
    except OSError as error:
        raise RunError(describe(f"files in {options.output} could not be renamed", error)) from error
    tell(console, f"the dataset has changed: {lost.size - len(moved):,} finished rows are other ones now, {len(moved):,} were renamed")


def _note_removed(options: Options, ledger: Ledger, outcome: Outcome, checked: Checked) -> None:
    """Log the rows of this run that were removed while it went on. Raises RunError."""
    ledger.require_in_place()
    output = options.output
    try:
        there = {row_of_file(path.name) for path in files_of_rows(output)}
        # A listing of a network filesystem may be old.
        done = (row for row, mark in enumerate(ledger.finished.marks[: len(checked.identities)]) if mark and options.is_wanted(row))
        outcome.removed = [row for row in done if row not in there and not is_decided(output / row_file(row))]
    except OSError as error:
        raise RunError(describe("whether all rows are still there could not be seen", error)) from error
    for row in outcome.removed:
        ledger.append(row, Status.FAILED, "", error="its rows were removed during the run")


async def _run_until_signal(generation: Generation) -> None:
    loop = asyncio.get_running_loop()

    def interrupt(number: int) -> None:
        if isinstance(generation.outcome.stopped_by, Interrupted):
            os._exit(128 + number)  # the second signal: at once; the next run finds what is left
        generation.stop(Interrupted(number))
        generation.progress.say("stopping; a second signal ends the run at once")

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        await generation.run()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _check(dataset: Dataset, options: Options, console: Console) -> Checked:
    """Read the whole dataset, and say what cannot be sent. Raises InputError."""
    data = printable(options.data)
    with console.status(Text(f"checking {data}")) as status:
        checked = dataset.check(options.request, lambda rows: status.update(Text(f"checking {data}: {rows:,} rows")))
    problems = [f"{each.where}: {each.problem}" for each in checked.bad[:_SHOWN_INVALID]]
    if len(checked.bad) > _SHOWN_INVALID:
        problems.append(f"... and {len(checked.bad) - _SHOWN_INVALID:,} more")
    if problems and not options.skip_invalid:
        remedy = "mend them, or leave them out with --skip-invalid"
        summary = [f"{data}: {len(checked.bad):,} rows cannot be sent; {remedy}"] if len(problems) > 1 else []
        raise InputError(*summary, *problems)
    tell(console, f"{data}: {len(checked.identities):,} rows")
    if checked.unsent:
        names = ", ".join(f"{name} ({rows:,} rows)" for name, rows in checked.unsent.most_common())
        tell(console, f"columns that are not sent: {names}", "yellow")
    for problem in problems:
        tell(console, f"left out: {problem}", "yellow")
    return checked
