"""The size of a run before it begins, and of its rows to come while it goes on."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from pathlib import Path

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

SAMPLE = 32  # rows that say how large the others are


def show_sizes(console: Console, options: Options, dataset: Dataset, checked: Checked) -> None:
    """Print rows, tokens, bytes and time of a run, all ranks together, and the free space.

    If texts have to be estimated and no ledger helps, some of them are sent to the first server to
    be rendered. Nothing is computed there, and nothing is written here.

    Args:
        console: to write to.
        options: of the run.
        dataset: of the run.
        checked: result of its check.

    Raises:
        OSError: the free space cannot be read.
    """
    ledgers, rows = read_ledgers(options.output, time.time(), []), len(checked.identities) - len(checked.bad)
    there, free = _rows_there(checked, ledgers), free_space(options.output)
    told = [(np.count_nonzero(each.tokens), each.tokens.sum(), each.bytes.sum()) for each in ledgers]
    files, stored, num_bytes = np.array(told).reshape(-1, 3).sum(axis=0).tolist()
    if files and (checked.characters or options.include_output):
        tokens, source = round(rows * stored / files), f"estimate: {stored / files:,.0f} a row, as in the {files:,.0f} files of ledgers"
    else:
        tokens, source = _tokens(options, dataset, checked, rows)
    left, per_token = tokens * (rows - there) / max(rows, 1), num_bytes / stored if stored else options.bytes_per_token
    last = [each for each in ledgers if each.size == ledgers[-1].size and each.times.size]
    rate = options.rate or sum(each.tokens[each.codes == MADE].sum() / max(each.times.max() - each.begun, 1.0) for each in last)
    size = f"{decimal(round(left * per_token))}, {per_token:,.0f} bytes a token" if per_token else "unknown; give --bytes-per-token"
    for line in (
        f"rows: {rows:,}, of which {there:,} are there",
        f"tokens: {tokens:,} ({source})",
        f"size of the rows to come: {size}",
        f"free space: {decimal(free)}{', too little' if left * (per_token or 0) > free else ''}",
        f"time for the rows to come: {f'{duration(left / rate)} at {rate:,.0f} tokens/s' if rate else 'unknown; give --rate'}",
    ):
        tell(console, line)


def space_problem(options: Options, outcome: Outcome) -> str | None:
    """Return a line for the user if the rows to come exceed the free space, else None.

    Args:
        options: of the run. Each rank is taken to need as much as this one.
        outcome: so far. Before `SAMPLE` rows are done there is no problem.
    """
    rows = (outcome.missing - outcome.failed) * options.world_size
    needed = outcome.bytes / max(outcome.done, 1) * rows
    with suppress(OSError):  # the servers may still see the storage
        if outcome.done >= SAMPLE and needed > (free := free_space(options.output)):
            sizes = f"{decimal(round(needed))}, and {options.output} has {decimal(free)} free"
            return f"the {rows:,} rows to come take about {sizes}; make room, or end the run and call it again later"
    return None


def free_space(directory: Path) -> int:
    """Return the free bytes for a directory that need not exist yet. Raises OSError."""
    return shutil.disk_usage(next(each for each in (directory, *directory.absolute().parents) if each.exists())).free


def _rows_there(checked: Checked, ledgers: list[LedgerLines]) -> int:
    """Return the number of rows of the dataset that ledgers name as done or found."""
    marks = np.zeros(len(checked.identities))
    for each in ledgers:
        inside = each.numbers < marks.size
        marks[each.numbers[inside].astype(np.intp)] = np.where(np.isin(each.codes, (FOUND, MADE)), each.marks, 0)[inside]
    return int(np.count_nonzero((marks == np.array(checked.identities, np.uint64) >> 16) & (marks > 0)))


def _tokens(options: Options, dataset: Dataset, checked: Checked, rows: int) -> tuple[int, str]:
    """Return the number of tokens of `rows` rows, and how it is known, without the ledgers."""
    ratio, source = 0.25, "estimate: a token for 4 characters, as no server renders the texts" if checked.characters else "of all token ids"
    if checked.characters:
        with suppress(InputError, RequestError, ZeroDivisionError):
            ratio, source = asyncio.run(_rendered(options, dataset, checked)), "estimate: as a server renders some of the texts"
    generated = rows * (options.max_tokens or 0)
    tokens = checked.tokens + round(ratio * checked.characters) + generated
    return tokens, f"{source}; at most, with --max-tokens generated tokens for each row" if generated else source


async def _rendered(options: Options, dataset: Dataset, checked: Checked) -> float:
    """Return the number of tokens for a character, as the first server renders some rows."""
    url, step = options.endpoints[0], -(-len(checked.identities) // SAMPLE)
    sample = [row for row in dataset.rows(lambda index: index % step == 0) if row.token_ids is None]
    async with Client(options) as client:
        requests = (render(client, url, options.model or "", row.endpoint, row.prompt()) for row in sample)
        answers = await asyncio.gather(*requests, return_exceptions=True)
    # Without rows that are too long, for example.
    told = [(len(ids), len(str(row.content))) for row, ids in zip(sample, answers, strict=True) if isinstance(ids, list)]
    return sum(tokens for tokens, _ in told) / sum(characters for _, characters in told)
