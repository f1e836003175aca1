"""Progress of the last run in each directory, from the ledgers of all ranks.

Ledgers are read without their locks, so runs are not disturbed. Invalid lines are ignored. A file
that is not a ledger is reported; the other ledgers are still read.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.generate.ledger import (
    VERSION,
    State,
    Status,
    ledgers_in,
    read_lines,
    row_line,
)
from vllm_ascend_hsx.generate.options import BOUNDS, RANK_ROWS, rows_of_rank
from vllm_ascend_hsx.generate.progress import duration
from vllm_ascend_hsx.protocol.files import describe

# For rates. Also the time without an update after which a run is dead: a running rank touches the
# ledger every 10 s.
WINDOW_S = 60.0
_LONGEST_REASON = 300  # characters
_MOST_ROWS = 1 << 28  # one byte of memory per row
# The code of a row is the index of the last line's status, and 0 for a row without a line.
_STATUSES = (Status.CHANGED, Status.FOUND, Status.DONE, Status.FAILED, Status.INVALID)
FOUND, MADE = 1, 2
# Codes of lines of earlier runs: failed rows of earlier runs are tried again.
_EARLIER = np.array([0, FOUND, FOUND, 0, 0], np.uint8)


@dataclass
class Progress:
    """Progress of a run or a rank.

    Attributes:
        name: the directory, or the name of the rank's ledger.
        state: running, waiting, stopped or finished. For several ranks, the number in each state.
        reason: reason of a rank's state.
        rows: number of rows.
        done: rows with a file.
        made: rows whose file this run has made; included in `done`.
        failed, invalid: rows that this run has given up, and rows that cannot be sent.
        remaining: all other rows.
        rows_per_s: rows made per second, in the last `WINDOW_S` seconds.
        ranks: ranks of a run that have a ledger.
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
    """A file is not a ledger."""


def read_status(
    directories: Sequence[Path], now: float
) -> tuple[list[Progress], list[dict[str, str]]]:
    """Read the ledgers in output directories.

    Args:
        directories: values of --output.
        now: current time in Unix seconds.

    Returns:
        The last run of each directory, and the unreadable directories and ledgers ("path") with the
        reason ("problem").
    """
    problems: list[dict[str, str]] = []
    found = [(directory, read_ledgers(directory, now, problems)) for directory in directories]
    return [_last_run(str(directory), ledgers) for directory, ledgers in found if ledgers], problems


def read_ledgers(directory: Path, now: float, problems: list[dict[str, str]]) -> list[LedgerLines]:
    """Return the ledgers in a directory by time of the last run. Append to `problems`."""
    ledgers: list[LedgerLines] = []
    with _noted(problems, directory):
        paths = ledgers_in(directory)
        if not paths:
            raise _LedgerError(
                "no ledger there; give a directory that was --output of `hsx generate`"
            )
        for path in paths:
            with _noted(problems, path):
                ledgers.append(LedgerLines(path, now))
    return sorted(ledgers, key=lambda each: (each.begun, each.rank))


@contextmanager
def _noted(problems: list[dict[str, str]], path: Path) -> Iterator[None]:
    try:
        yield
    except StopIteration:  # the first line is incomplete, from a killed run
        pass
    except (OSError, _LedgerError) as error:
        problem = describe("cannot be read", error) if isinstance(error, OSError) else str(error)
        problems.append({"path": str(path), "problem": problem})


class LedgerLines:
    """The contents of one ledger.

    Args:
        path: path of the ledger.
        now: current time in Unix seconds.

    Attributes:
        name: name of the ledger.
        rank, size: rank and world size.
        rows, begun: number of rows of all ranks in the last run, and start of the run.
        state, reason: state of the last run, and the reason.
        numbers, codes, marks, times: per line about a row: the row, the code of the status, the
            first 48 bits of the identity, and the time.
        tokens, bytes: per line about a row: size of the file; 0 if unknown.
        rate: rows made per second, in the last `WINDOW_S` seconds.

    Raises:
        OSError, _LedgerError: the ledger cannot be read.
        StopIteration: the ledger has no line.
    """

    def __init__(self, path: Path, now: float) -> None:
        lines = read_lines(path)
        header = next(lines)
        self.name, self.rank, self.size = (
            path.name,
            header.get("rank", -1),
            header.get("world_size", 0),
        )
        is_rank = (
            type(self.rank) is type(self.size) is int
            and 0 <= self.rank < self.size <= BOUNDS["world_size"][1]
        )
        if header.get("ledger") != VERSION or not is_rank:
            raise _LedgerError(f"the first line is not the header of a ledger of version {VERSION}")
        self.rows, self.begun, self.state, self.reason, earlier, read = (
            0,
            0.0,
            State.RUNNING.value,
            "",
            0,
            array("d"),
        )
        for line in lines:
            run, at = line.get("run"), line.get("time", 0)
            at = min(at, now) if type(at) in (int, float) and at > 0 else 0.0
            if (known := row_line(line)) is not None:
                sizes = [
                    each if type(each) is int and 0 < each < 1 << 53 else 0
                    for each in (line.get("tokens"), line.get("bytes"))
                ]
                row, status, identity = known
                read.extend(
                    (row, _STATUSES.index(status), int(identity[:12] or "0", 16), at, *sizes)
                )
            elif (
                isinstance(run, dict)
                and type(rows := run.get("rows")) is int
                and 0 < rows <= _MOST_ROWS
            ):
                self.rows, self.begun, self.state, self.reason, earlier = (
                    rows,
                    at,
                    State.RUNNING.value,
                    "",
                    len(read) // 6,
                )
            elif line.get("state") in list(State):
                self.state, self.reason = (
                    line["state"],
                    str(line.get("reason", ""))[:_LONGEST_REASON],
                )
        self.numbers, self.codes, self.marks, self.times, self.tokens, self.bytes = (
            np.array(read).reshape(-1, 6).T
        )
        self.codes[:earlier] = _EARLIER[self.codes[:earlier].astype(np.intp)]
        self.rate = np.count_nonzero(self.times[self.codes == MADE] > now - WINDOW_S) / max(
            min(now - self.begun, WINDOW_S), 1.0
        )
        if (
            self.state in (State.RUNNING, State.WAITING)
            and (seconds := now - os.stat(path).st_mtime) > WINDOW_S
        ):
            self.state, self.reason = (
                State.STOPPED.value,
                f"no update for {duration(seconds)}",
            )


def _last_run(directory: str, ledgers: list[LedgerLines]) -> Progress:
    """Return the last run of a directory from all ledgers."""
    rows, size = ledgers[-1].rows, ledgers[-1].size
    states = np.zeros((-(-rows // (RANK_ROWS * size)), size, RANK_ROWS), np.uint8)
    for each in ledgers:  # by time, so the last line about a row counts
        numbers, codes = np.array((each.numbers, each.codes), np.intp)[:, each.numbers < rows]
        states.reshape(-1)[numbers] = codes if each.size == size else _EARLIER[codes]
    ranks = [
        Progress(
            each.name,
            each.state,
            each.reason,
            *_counts(states[:, each.rank], rows_of_rank(rows, size, each.rank)),
            each.rate,
        )
        for each in sorted(ledgers, key=lambda each: each.rank)
        if each.size == size
    ]
    numbers_of = Counter([each.state for each in ranks]) + Counter({"not begun": size - len(ranks)})
    state = (
        ranks[0].state
        if size == 1
        else ", ".join(f"{number:,} {name}" for name, number in numbers_of.items())
    )
    return Progress(
        directory, state, "", *_counts(states, rows), sum(each.rows_per_s for each in ranks), ranks
    )


def _counts(states: npt.NDArray[np.uint8], rows: int) -> tuple[int, int, int, int, int, int]:
    """Return the numbers of all, done, made, failed, invalid and remaining rows."""
    _, found, made, failed, invalid = (
        int(np.count_nonzero(states == code)) for code in range(len(_STATUSES))
    )
    return rows, found + made, made, failed, invalid, rows - found - made - failed - invalid
