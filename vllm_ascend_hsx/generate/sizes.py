"""Estimate the size of a run before the start, and of the remaining rows during the run."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.filesize import decimal

from vllm_ascend_hsx.generate.client import Client
from vllm_ascend_hsx.generate.dataset import Checked, Dataset
from vllm_ascend_hsx.generate.errors import InputError, RequestError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import Outcome, duration, tell
from vllm_ascend_hsx.generate.show import render
from vllm_ascend_hsx.generate.status import FOUND, MADE, LedgerLines, read_ledgers

SAMPLE = 32  # rows from which an estimate is made


class Stored(NamedTuple):
    """Totals of the files in the ledgers of an output directory."""

    files: int
    tokens: int
    bytes: int


class Sizes(NamedTuple):
    """The size of a run, all ranks together.

    Attributes:
        rows, rows_there: number of valid rows, and how many of them are done or found by ledgers.
        tokens, tokens_from: number of tokens of all rows, and the source of the number.
        bytes_per_token, bytes_to_come: size of files per token, and of remaining files; None if
            unknown.
        free_bytes: free space of the output directory.
        tokens_per_s, seconds_to_come: None if unknown.
    """

    rows: int
    rows_there: int
    tokens: int
    tokens_from: str
    bytes_per_token: float | None
    bytes_to_come: int | None
    free_bytes: int
    tokens_per_s: float | None
    seconds_to_come: float | None


def sizes_of(options: Options, dataset: Dataset, checked: Checked) -> Sizes:
    """Return the size of a run.

    If texts have to be estimated and no ledger has finished rows, the first server renders a sample
    of them. Nothing is computed or written.

    Args:
        options: options of the run.
        dataset: dataset of the run.
        checked: result of the dataset's check.

    Raises:
        OSError: the free space cannot be read.
    """
    ledgers = read_ledgers(options.output, time.time(), [])
    stored, free = _stored(ledgers), free_space(options.output)
    rows = len(checked.identities) - len(checked.bad)
    present = _rows_present(checked, ledgers)
    tokens, source = _tokens(options, dataset, checked, rows, stored)
    tokens_left = tokens * (rows - present) / max(rows, 1)
    bytes_per_token = stored.bytes / stored.tokens if stored.tokens else options.bytes_per_token
    rate = options.rate or _last_rate(ledgers)
    bytes_left = round(tokens_left * bytes_per_token) if bytes_per_token else None
    seconds_left = tokens_left / rate if rate else None
    return Sizes(
        rows,
        present,
        tokens,
        source,
        bytes_per_token or None,
        bytes_left,
        free,
        rate or None,
        seconds_left,
    )


def show_sizes(console: Console, sizes: Sizes) -> None:
    """Print rows, tokens, bytes and time of a run, and the free space."""
    size, duration_left = "unknown; give --bytes-per-token", "unknown; give --rate"
    if sizes.bytes_to_come is not None:
        size = f"{decimal(sizes.bytes_to_come)}, {sizes.bytes_per_token:,.0f} bytes per token"
    if sizes.seconds_to_come is not None:
        duration_left = f"{duration(sizes.seconds_to_come)} at {sizes.tokens_per_s:,.0f} tokens/s"
    is_too_large = (sizes.bytes_to_come or 0) > sizes.free_bytes
    for line in (
        f"rows: {sizes.rows:,}, {sizes.rows_there:,} of them finished",
        f"tokens: {sizes.tokens:,} ({sizes.tokens_from})",
        f"size of remaining rows: {size}",
        f"free space: {decimal(sizes.free_bytes)}{', not enough' if is_too_large else ''}",
        f"time for remaining rows: {duration_left}",
    ):
        tell(console, line)


def space_problem(options: Options, outcome: Outcome) -> str | None:
    """Return a line for the user if the remaining rows need more than the free space, else None.

    Args:
        options: options of the run. All ranks are assumed to need the same space.
        outcome: result so far. None is returned before `SAMPLE` rows are done.
    """
    rows = (outcome.missing - outcome.failed) * options.world_size
    needed = outcome.bytes / max(outcome.done, 1) * rows
    with suppress(OSError):  # the servers may still see the storage
        if outcome.done >= SAMPLE and needed > (free := free_space(options.output)):
            sizes = f"{decimal(round(needed))}, but {options.output} has {decimal(free)} free"
            return (
                f"the {rows:,} remaining rows need about {sizes}; free some space, or stop the "
                "run and run again later"
            )
    return None


def free_space(directory: Path) -> int:
    """Return the free bytes of a directory, which may not exist yet. Raises OSError."""
    return shutil.disk_usage(
        next(each for each in (directory, *directory.absolute().parents) if each.exists())
    ).free


def _stored(ledgers: list[LedgerLines]) -> Stored:
    files = sum(int(np.count_nonzero(each.tokens)) for each in ledgers)
    return Stored(
        files,
        int(sum(each.tokens.sum() for each in ledgers)),
        int(sum(each.bytes.sum() for each in ledgers)),
    )


def _rows_present(checked: Checked, ledgers: list[LedgerLines]) -> int:
    """Return the number of rows of the dataset that are done or found by the ledgers."""
    marks = np.zeros(len(checked.identities))
    for each in ledgers:
        inside = each.numbers < marks.size
        marks[each.numbers[inside].astype(np.intp)] = np.where(
            np.isin(each.codes, (FOUND, MADE)), each.marks, 0
        )[inside]
    return int(
        np.count_nonzero((marks == np.array(checked.identities, np.uint64) >> 16) & (marks > 0))
    )


def _last_rate(ledgers: list[LedgerLines]) -> float:
    """Return the tokens per second of the last run over all ranks; 0 without a run."""
    rate = 0.0
    for each in ledgers:
        if each.size == ledgers[-1].size and each.times.size:
            tokens = each.tokens[each.codes == MADE].sum()
            rate += float(tokens) / max(each.times.max() - each.begun, 1.0)
    return rate


def _tokens(
    options: Options, dataset: Dataset, checked: Checked, rows: int, stored: Stored
) -> tuple[int, str]:
    """Return the number of tokens of `rows` rows, and the source of the number."""
    if stored.files and (checked.characters or options.include_output):
        per_row = stored.tokens / stored.files
        source = f"estimate: {per_row:,.0f} per row, from {stored.files:,} files of the ledgers"
        return round(rows * per_row), source
    tokens, source = checked.tokens, "exact: from token ids"
    if checked.characters:
        ratio, source = 0.25, "estimate: 4 characters per token, because no server rendered texts"
        with suppress(InputError, RequestError, ZeroDivisionError):
            ratio = asyncio.run(_rendered(options, dataset, checked))
            source = "estimate: from a sample of texts, rendered by a server"
        tokens += round(ratio * checked.characters)
    if generated := rows * (options.max_tokens or 0):
        source += "; upper bound, with --max-tokens generated tokens per row"
    return tokens + generated, source


async def _rendered(options: Options, dataset: Dataset, checked: Checked) -> float:
    """Return the number of tokens per character in a sample that the first server renders."""
    url, step = options.endpoints[0], -(-len(checked.identities) // SAMPLE)
    sample = [row for row in dataset.rows(lambda index: index % step == 0) if row.token_ids is None]
    async with Client(options) as client:
        requests = (
            render(client, url, options.model or "", row.endpoint, row.prompt()) for row in sample
        )
        answers = await asyncio.gather(*requests, return_exceptions=True)
    # Some requests may fail, for example for rows that are too long.
    rendered = [
        (len(ids), len(str(row.content)))
        for row, ids in zip(sample, answers, strict=True)
        if isinstance(ids, list)
    ]
    return sum(tokens for tokens, _ in rendered) / sum(characters for _, characters in rendered)
