"""From options to an exit code: check the dataset, open the output directory, run, show."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from vllm_ascend_hsx.generate.client import check_url
from vllm_ascend_hsx.generate.dataset import Dataset
from vllm_ascend_hsx.generate.errors import InputError, Interrupted, RunError
from vllm_ascend_hsx.generate.generation import Generation
from vllm_ascend_hsx.generate.ledger import Identity, Ledger, files_of_rows, open_ledger, row_file, row_of_file
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import Outcome, Progress, show, tell
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.names import printable
from vllm_ascend_hsx.reader.load import is_decided

ALL_THERE, SOME_MISSING, BAD_INPUT = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def do_here(options: Options, dataset: Dataset, ledger: Ledger, outcome: Outcome, progress: Progress) -> None:
    """Do the rows in this process."""
    asyncio.run(_run_until_signal(Generation(options, dataset, ledger, outcome, progress)))


def generate(options: Options, console: Console, do: Callable[[Options, Dataset, Ledger, Outcome, Progress], None] = do_here) -> int:
    """Run `hsx generate`.

    Args:
        options: of the run.
        console: to write to.
        do: does the rows; the outcome says what stopped it.

    Returns:
        0 if all rows are there, 1 if some are not, 128 + the number of a signal that ended the run.

    Raises:
        InputError: dataset, options, output directory or server cannot be used.
    """
    for url in options.endpoints:
        check_url(url)
    if options.world_size > 1 or options.rank_source:
        source = f" ({options.rank_source})" if options.rank_source else ""
        tell(console, f"rank {options.rank} of {options.world_size}{source}")
    dataset = open_dataset(options.data, options.column)
    identity = _check(dataset, options, console)
    ledger = open_ledger(options.output, identity, options.world_size, options.rank)
    rows = min(identity.dataset["rows"], options.limit or identity.dataset["rows"])
    outcome = Outcome(options.count_ours(rows))
    try:
        ledger.note_run(rows)
        with Progress(console, outcome) as progress:
            do(options, dataset, ledger, outcome, progress)
        if outcome.stopped_by is None:
            ledger.require_in_place()
            outcome.removed = _removed_rows(options, ledger)
            for row in outcome.removed:
                ledger.append(row, "failed", error="its rows were removed during the run")
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
    return SOME_MISSING if outcome.missing or outcome.stopped_by is not None else ALL_THERE


def _removed_rows(options: Options, ledger: Ledger) -> list[int]:
    """Return the rows of this run that the ledger has, and its directory not. Raises RunError."""
    output = options.output
    try:
        there = {row_of_file(path.name) for path in files_of_rows(output)}
        # A listing of a network filesystem may be old.
        gone = [row for row, is_done in enumerate(ledger.logged) if is_done and row not in there and options.is_wanted(row)]
        return [row for row in gone if not is_decided(output / row_file(row))]
    except OSError as error:
        raise RunError(describe("whether all rows are still there could not be seen", error)) from error


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


def _check(dataset: Dataset, options: Options, console: Console) -> Identity:
    """Read the whole dataset, and return what this run's rows have in common."""
    data = printable(str(options.data))
    with console.status(Text(f"checking {data}")) as status:
        checked = dataset.check(lambda rows: status.update(Text(f"checking {data}: {rows:,} rows")))
    tell(console, f"{data}: {checked.rows:,} rows")
    return Identity(
        {"rows": checked.rows, "digest": checked.digest},
        {"include_output_tokens": options.include_output_tokens, "max_tokens": options.tokens_to_generate},
    )
