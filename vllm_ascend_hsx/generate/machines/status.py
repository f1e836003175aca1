"""Progress of a run, or of many that share directories, out of all ranks' ledgers.

Ledgers are read as they are, without their locks, so that no run notices. A line that makes no
sense counts for nothing, and a file that is no ledger costs itself alone.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.generate.ledger import LONGEST_LINE, is_cut_short, ledgers_in, parse_line
from vllm_ascend_hsx.generate.options import BOUNDS, rows_of_rank
from vllm_ascend_hsx.protocol.files import describe, open_regular

WINDOW_S = 60.0
# A byte for each row is kept; a ledger that has more rows than this has tens of gigabytes.
_MOST_ROWS = 1 << 28
_FAILED, _DONE = 1, 2


@dataclass
class Counts:
    """How far rows have come.

    Attributes:
        done, failed: rows that have their file, and rows that were given up.
        remaining: rows with neither.
        rows_per_s: of the last `WINDOW_S` seconds; None if ledgers have no time stamps.
    """

    done: int = 0
    failed: int = 0
    remaining: int = 0
    rows_per_s: float | None = None

    @property
    def rows(self) -> int:
        return self.done + self.failed + self.remaining


@dataclass
class Rank(Counts):
    """One ledger.

    Attributes:
        ledger: name of the file.
        rank, world_size: of its runs.
        last: when its last row was logged, in Unix seconds; None if it does not say.
    """

    ledger: str = ""
    rank: int = 0
    world_size: int = 1
    last: float | None = None


@dataclass
class Progress(Counts):
    """All ledgers of one dataset in one directory. A row that two of them name counts once.

    Attributes:
        directory: the output directory.
        digest: of the dataset.
        ranks: by ledger.
    """

    directory: str = ""
    digest: str = ""
    ranks: list[Rank] = field(default_factory=list)


@dataclass
class Status:
    """What is known of some directories, in the form of --json.

    Attributes:
        runs: by directory and dataset.
        problems: directories and ledgers that cannot be read, with the reason.
    """

    runs: list[Progress] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)

    @property
    def total(self) -> Counts:
        return Counts(
            sum(each.done for each in self.runs),
            sum(each.failed for each in self.runs),
            sum(each.remaining for each in self.runs),
            _sum(each.rows_per_s for each in self.runs),
        )


class _LedgerError(Exception):
    """A file is not a ledger; the message says why."""


def read_status(directories: Sequence[Path], now: float | None = None) -> Status:
    """Read the ledgers in some directories.

    Args:
        directories: values of --output.
        now: in Unix seconds; None for the clock.
    """
    status, now = Status(), time.time() if now is None else now
    for directory in directories:
        try:
            paths = ledgers_in(directory)
        except OSError as error:
            status.problems.append({"path": str(directory), "problem": describe("it cannot be read", error)})
            continue
        if not paths:
            problem = "it has no ledger; name a directory that was --output of `hsx generate`"
            status.problems.append({"path": str(directory), "problem": problem})
        runs: dict[tuple[int, str], _Run] = {}
        for path in paths:
            try:
                ledger = _Ledger(path, now)
            except (OSError, _LedgerError, MemoryError) as error:
                problem = describe("it cannot be read", error) if isinstance(error, OSError) else str(error) or "it is too large"
                status.problems.append({"path": str(path), "problem": problem})
                continue
            if ledger.is_begun:
                runs.setdefault((ledger.dataset_rows, ledger.digest), _Run(ledger.dataset_rows)).add(ledger)
        status.runs += [run.progress(str(directory), digest) for (_, digest), run in runs.items()]
    return status


class _Ledger:
    """One ledger, read to where it ended when it was opened. Raises OSError, _LedgerError."""

    def __init__(self, path: Path, now: float) -> None:
        fd = open_regular(path)
        with open(fd, "rb") as file:
            size = os.fstat(fd).st_size
            first = file.readline(LONGEST_LINE)
            self.is_begun = not is_cut_short(first)
            if not self.is_begun:
                return
            header = parse_line(first)
            dataset = header.get("dataset")
            dataset = dataset if isinstance(dataset, dict) else {}
            self.name = path.name
            self.dataset_rows = _whole(dataset, "rows", 1, _MOST_ROWS)
            self.digest = dataset["digest"] if isinstance(dataset.get("digest"), str) else ""
            self.world_size = _whole(header, "world_size", *BOUNDS["world_size"])
            self.rank = _whole(header, "rank", 0, self.world_size - 1)
            self.states = np.zeros(self.dataset_rows, np.uint8)
            self.rows: int | None = None  # that the last run was about
            self.last: float | None = None
            self._begun: float | None = None
            self._now = now
            self._times: deque[float] = deque()
            for line in _lines(file, size - len(first)):
                self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        at: Any = line.get("time")
        at = min(at, self._now) if type(at) in (int, float) and at > 0 else None
        run, row, status = line.get("run"), line.get("row"), line.get("status")
        if isinstance(run, dict):
            rows = run.get("rows")
            self.rows = rows if type(rows) is int and 0 < rows <= self.dataset_rows else None
            self._begun = at
        elif type(row) is int and 0 <= row < self.dataset_rows and isinstance(status, str):
            self.states[row] = _FAILED if status == "failed" else _DONE
            if at is not None:
                self.last = at
                if status == "done" and at > self._now - WINDOW_S:
                    self._times.append(at)

    def summary(self) -> Rank:
        done, failed = _count(self.states)
        wanted = rows_of_rank(self.rows or self.dataset_rows, self.world_size, self.rank)
        rate = None
        if self.last is not None or self._begun is not None:
            begun = max(self._now - WINDOW_S, self._begun or 0.0)
            rate = len(self._times) / max(self._now - begun, 1.0)
        return Rank(done, failed, max(wanted - done - failed, 0), rate, self.name, self.rank, self.world_size, self.last)


class _Run:
    """The ledgers of one dataset."""

    def __init__(self, dataset_rows: int) -> None:
        self._states: npt.NDArray[np.uint8] = np.zeros(dataset_rows, np.uint8)
        self._rows = 0
        self._ranks: list[Rank] = []

    def add(self, ledger: _Ledger) -> None:
        np.maximum(self._states, ledger.states, out=self._states)
        self._rows = max(self._rows, ledger.rows or ledger.dataset_rows)
        self._ranks.append(ledger.summary())

    def progress(self, directory: str, digest: str) -> Progress:
        done, failed = _count(self._states)
        rate = _sum(each.rows_per_s for each in self._ranks)
        ranks = sorted(self._ranks, key=lambda each: (each.world_size, each.rank))
        return Progress(done, failed, max(self._rows - done - failed, 0), rate, directory, digest, ranks)


def _lines(file: Any, left: int) -> Iterator[dict[str, Any]]:
    while left > 0 and (text := file.readline(min(LONGEST_LINE, left))):
        left -= len(text)
        yield parse_line(text)


def _count(states: npt.NDArray[np.uint8]) -> tuple[int, int]:
    return int(np.count_nonzero(states == _DONE)), int(np.count_nonzero(states == _FAILED))


def _whole(record: dict[str, Any], key: str, least: int, most: int) -> int:
    value = record.get(key)
    if type(value) is not int or not least <= value <= most:
        raise _LedgerError(f"its first line is not that of a ledger: {key} is no number from {least} to {most}")
    return value


def _sum(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
