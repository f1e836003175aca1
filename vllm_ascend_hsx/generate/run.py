"""From options to an exit code: the dataset is checked, the output directory opened, and then the run begins."""

from __future__ import annotations

import asyncio
import os
import signal

from rich.console import Console
from rich.text import Text

from vllm_ascend_hsx.generate.client import check_url
from vllm_ascend_hsx.generate.dataset import Dataset
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.generation import Generation
from vllm_ascend_hsx.generate.ledger import Entry, Identity
from vllm_ascend_hsx.generate.names import row_file
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.outcome import Interrupted, Outcome
from vllm_ascend_hsx.generate.output import Output, open_output
from vllm_ascend_hsx.generate.progress import progress_on
from vllm_ascend_hsx.generate.summary import show_summary
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.names import printable

ALL_THERE, SOME_MISSING, BAD_INPUT = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def generate(options: Options, console: Console) -> int:
    """Run, and say what comes of it.

    Returns:
        0 if all rows are there, 1 if some are not, 128 + the signal's number (130 for Ctrl-C) if a signal ended the run.

    Raises:
        InputError: nothing was generated, because something is not what it must be.
    """
    for url in options.endpoints:
        check_url(url)
    dataset = open_dataset(options.data, options.column)
    identity = _check(dataset, options, console)
    output = open_output(options.output, identity, options.world_size, options.rank, options.overwrite)
    try:
        try:
            outcome, unfinished = _begin(options, identity.dataset["rows"], output)
        except OSError as error:
            raise InputError(describe(f"{output.ledger.path} cannot be written", error) + "; make room for it") from error
        with progress_on(console, outcome.total, outcome.before) as progress:
            generation = Generation(options, dataset, output, outcome, unfinished, progress)
            asyncio.run(_run_until_signal(generation))
        if outcome.requests or not isinstance(outcome.stopped_by, InputError):
            show_summary(console, outcome, output.ledger)
    finally:
        output.ledger.close()
    if isinstance(outcome.stopped_by, InputError):
        raise outcome.stopped_by
    if isinstance(outcome.stopped_by, Interrupted):
        return 128 + outcome.stopped_by.number
    return SOME_MISSING if outcome.missing else ALL_THERE


async def _run_until_signal(generation: Generation) -> None:
    loop = asyncio.get_running_loop()

    def interrupt(number: int) -> None:
        if isinstance(generation.outcome.stopped_by, Interrupted):
            os._exit(128 + number)  # a second time: at once. Whatever is left half done, the next run finds.
        generation.stop(Interrupted(number))

    for number in SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        await generation.run()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _check(dataset: Dataset, options: Options, console: Console) -> Identity:
    """Reads all of the dataset, and says what makes this run's files what they are."""
    data = printable(str(options.data))
    with console.status(Text(f"checking {data}")) as status:
        checked = dataset.check(lambda rows: status.update(Text(f"checking {data}: {rows:,} rows")))
    console.print(f"{data}: {checked.rows:,} rows", markup=False, highlight=False, soft_wrap=True)
    return Identity(
        {"rows": checked.rows, "digest": checked.digest},
        {"include_output_tokens": options.include_output_tokens, "max_tokens": options.tokens_to_generate},
    )


def _begin(options: Options, rows: int, output: Output) -> tuple[Outcome, int]:
    """The rows of this run counted, and finished ones noted of which the ledger says nothing."""
    mine = range(options.rank, min(rows, options.limit or rows), options.world_size)
    finished = 0
    for row in mine:
        if row in output.finished:
            finished += 1
            if row not in output.ledger.content.rows:
                output.ledger.append(Entry(row, "found", row_file(row)))
    return Outcome(len(mine), 0 if options.validate else finished), len(mine) - finished
