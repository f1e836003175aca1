"""Progress of the last run in some directories, out of the ledgers of all ranks.

Ledgers are read as they are, without their locks, so no run notices. A line that makes no sense
counts for nothing. A file that is no ledger costs itself alone.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.generate.ledger import (
    LONGEST_LINE,
    VERSION,
    State,
    Status,
    is_cut_short,
    ledger_name,
    ledgers_in,
    parse_line,
    row_line,
)
from vllm_ascend_hsx.generate.options import BOUNDS, RANK_ROWS, rows_of_rank
from vllm_ascend_hsx.generate.progress import duration
from vllm_ascend_hsx.protocol.files import describe, open_regular

# Of rates, and of a dead run's silence: a living one touches its ledger every 10 s.
WINDOW_S = 60.0
_LONGEST_REASON = 300  # characters
_MOST_ROWS = 1 << 28  # a byte for each is kept
# A row's state is the index of its last line's status. 0 is also that of rows without a line.
_STATUSES = (Status.CHANGED, Status.FOUND, Status.DONE, Status.FAILED, Status.INVALID)
# The state after a line of an earlier run: rows that failed there are tried again.
_EARLIER = np.array([0, 1, 1, 0, 0], np.uint8)


@dataclass
class Progress:
    """A run, or one rank of it.

    Attributes:
        name: of the directory, or of the rank's ledger.
        state: running, waiting, stopped or finished. For several ranks, how many of them.
        reason: of a rank's state.
        rows: that the run is about.
        done: those that have their file.
        made: those of `done` whose file this run has made, not found.
        failed, invalid: rows that this run has given up, and rows that cannot be sent.
        remaining: all others.
        rows_per_s: made in the last `WINDOW_S` seconds.
        ranks: of a run: those that have a ledger.
    """

    name: str
    state: str = State.RUNNING.value
    reason: str = ""
    rows: int = 0
    done: int = 0
    made: int = 0
    failed: int = 0
    invalid: int = 0
    remaining: int = 0
    rows_per_s: float = 0.0
    ranks: list[Progress] = field(default_factory=list)


class _LedgerError(Exception):
    """A file is not a ledger; the message says why."""


def read_status(directories: Sequence[Path], now: float) -> tuple[list[Progress], list[dict[str, str]]]:
    """Read the ledgers in some directories.

    Args:
        directories: values of --output.
        now: in Unix seconds.

    Returns:
        The last run of each directory. Directories and ledgers ("path") that cannot be read, with
        the reason ("problem").
    """
    runs: list[Progress] = []
    problems: list[dict[str, str]] = []
    for directory in directories:
        ledgers: list[_Ledger] = []
        with _noted(problems, directory):
            for path in ledgers_in(directory) or [directory / ledger_name(1, 0)]:  # the latter cannot be read
                with _noted(problems, path):
                    ledgers.append(_Ledger(path, now))
        if ledgers:
            runs.append(_last_run(str(directory), ledgers))
    return runs, problems


@contextmanager
def _noted(problems: list[dict[str, str]], path: Path) -> Iterator[None]:
    try:
        yield
    except StopIteration:  # of a ledger whose run was killed in the first line
        pass
    except (OSError, _LedgerError) as error:
        problem = describe("it cannot be read", error) if isinstance(error, OSError) else str(error)
        problems.append({"path": str(path), "problem": problem})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ledger, up to its present end. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and not is_cut_short(text := file.readline(min(LONGEST_LINE, left))):
            left -= len(text)
            yield parse_line(text)


class _Ledger:
    """One ledger.

    Args:
        path: of the file.
        now: in Unix seconds.

    Attributes:
        name: of the file.
        rank, size: of its runs, and the number of all ranks.
        rows, begun: of the last run: rows of all ranks together, and its time.
        state, reason: of the last run.
        lines: row, state and time of each line about a row.
        rate: rows made per second, of the last `WINDOW_S` seconds.

    Raises:
        OSError, _LedgerError: it cannot be read.
        StopIteration: it has no line.
    """

    def __init__(self, path: Path, now: float) -> None:
        lines = read_lines(path)
        header = next(lines)
        self.name, self.rank, self.size = path.name, header.get("rank", -1), header.get("world_size", 0)
        is_rank = type(self.rank) is type(self.size) is int and 0 <= self.rank < self.size <= BOUNDS["world_size"][1]
        if header.get("ledger") != VERSION or not is_rank:
            raise _LedgerError(f"its first line is not that of a ledger of version {VERSION}")
        self.rows, self.begun, self.state, self.reason, earlier, read = 0, 0.0, State.RUNNING.value, "", 0, array("d")
        for line in lines:
            run, at = line.get("run"), line.get("time", 0)
            at = min(at, now) if type(at) in (int, float) and at > 0 else 0.0
            if (known := row_line(line)) is not None:
                read.extend((known.row, _STATUSES.index(known.status), at))
            elif isinstance(run, dict) and type(rows := run.get("rows")) is int and 0 < rows <= _MOST_ROWS:
                self.rows, self.begun, self.state, self.reason, earlier = rows, at, State.RUNNING.value, "", len(read) // 3
            elif line.get("state") in list(State):
                self.state, self.reason = line["state"], str(line.get("reason", ""))[:_LONGEST_REASON]
        self.lines = np.array(read).reshape(-1, 3)
        self.lines[:earlier, 1] = _EARLIER[self.lines[:earlier, 1].astype(np.intp)]
        is_new = (self.lines[:, 1] == _STATUSES.index(Status.DONE)) & (self.lines[:, 2] > now - WINDOW_S)
        self.rate = np.count_nonzero(is_new) / max(min(now - self.begun, WINDOW_S), 1.0)
        if self.state in (State.RUNNING, State.WAITING) and (silence := now - os.stat(path).st_mtime) > WINDOW_S:
            self.state, self.reason = State.STOPPED.value, f"no sign of life for {duration(silence)}"


def _last_run(directory: str, ledgers: list[_Ledger]) -> Progress:
    """Return the last run of a directory, out of all its ledgers."""
    ledgers = sorted(ledgers, key=lambda each: (each.begun, each.rank))
    rows, size = ledgers[-1].rows, ledgers[-1].size
    states = np.zeros((-(-rows // (RANK_ROWS * size)), size, RANK_ROWS), np.uint8)
    for each in ledgers:  # in this order, so that a row's last line counts
        numbers, codes, _ = each.lines[each.lines[:, 0] < rows].T.astype(np.intp)
        states.reshape(-1)[numbers] = codes if each.size == size else _EARLIER[codes]
    ranks = [
        Progress(each.name, each.state, each.reason, *_counts(states[:, each.rank], rows_of_rank(rows, size, each.rank)), each.rate)
        for each in sorted(ledgers, key=lambda each: each.rank)
        if each.size == size
    ]
    numbers_of = Counter([each.state for each in ranks]) + Counter({"not begun": size - len(ranks)})
    state = ranks[0].state if size == 1 else ", ".join(f"{number:,} {name}" for name, number in numbers_of.items())
    return Progress(directory, state, "", *_counts(states, rows), sum(each.rows_per_s for each in ranks), ranks)


def _counts(states: npt.NDArray[np.uint8], rows: int) -> tuple[int, int, int, int, int, int]:
    """Return rows, and how many of them are done, made, failed, invalid and remaining."""
    _, found, made, failed, invalid = (int(np.count_nonzero(states == code)) for code in range(len(_STATUSES)))
    return rows, found + made, made, failed, invalid, rows - found - made - failed - invalid
