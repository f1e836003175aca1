"""A dataset as a stream of rows: read once to check it and again to send it, never kept."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.rows import Row

REPORT_EVERY = 1000  # rows
SHOWN_ERRORS = 20  # invalid rows


class DatasetError(InputError):
    """A dataset cannot be used; the message names file, place, key and remedy."""

    def __init__(self, where: str, problem: str, *more: str) -> None:
        super().__init__(f"{where}: {problem}", *more)


class BadRow(NamedTuple):
    index: int  # type: ignore[assignment]
    where: str
    problem: str


class Checked(NamedTuple):
    identities: array[int]
    bad: list[BadRow]
    unsent: Counter[str]
    tokens: int
    characters: int


class Dataset(ABC):
    """Rows from files.

    Args:
        path: as the user named it.
        files: in reading order.
        column: to send; None for the first of `rows.COLUMNS` that exists.
    """

    def __init__(self, path: Path, files: list[Path], column: str | None) -> None:
        self.path = path
        self.files = files
        self.column = column
        self.limit: int | None = None
        self._stamp = self._stat()

    @abstractmethod
    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | DatasetError | None]:
        """Yield each row in order, None for one that is not wanted, an error for an invalid one.

        Raises:
            DatasetError: a file cannot be read.
        """

    def rows(self, wanted: Callable[[int], bool] = lambda index: True) -> Iterator[Row]:
        """Yield the rows whose index is wanted.

        Raises:
            DatasetError: a row is invalid, or a file has changed since this object was created.
        """
        for row in self.records(wanted):
            if isinstance(row, Row):
                # Before each row: another row's states would be stored under this row's number.
                self.check_unchanged("put back what was checked and call again, or give what it is now an --output of its own")
                yield row

    def check_unchanged(self, remedy: str = "call again when it is complete") -> None:
        """Raise DatasetError if a file has changed since this object was created."""
        for path, before, now in zip(self.files, self._stamp, self._stat(), strict=True):
            if before != now:
                raise DatasetError(str(path), f"it was changed while it was read; {remedy}")

    def check(self, request: Mapping[str, Any], report: Callable[[int], None] = lambda rows: None) -> Checked:
        """Read and check every row.

        Args:
            report: called with the number of rows so far, every REPORT_EVERY rows.

        Raises:
            DatasetError: as for `rows`, with up to SHOWN_ERRORS invalid rows; or there is no row.
        """
        identities = array("Q")
        bad: list[BadRow] = []
        for index, row in enumerate(self.records(lambda index: True)):
            if self.limit is not None and index >= self.limit:
                break
            if isinstance(row, Row):
                identities.append(int(row.identity(request)[:16], 16))
            elif row is not None:
                where, _, problem = str(row).partition(": ")
                bad.append(BadRow(index, where, problem))
                identities.append(0)
            if (index + 1) % REPORT_EVERY == 0:
                report(index + 1)
        self.check_unchanged()
        if not identities:
            raise DatasetError(str(self.files[0]), "it has no rows")
        return Checked(identities, bad, Counter(), 0, 0)

    def _stat(self) -> list[tuple[int, int, int, int]]:
        found = []
        for path in self.files:
            try:
                status = os.stat(path)
            except OSError as error:
                raise DatasetError(str(path), f"it cannot be read: {error.strerror}") from error
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return found
