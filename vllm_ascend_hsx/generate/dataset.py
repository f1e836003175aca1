"""A dataset as a stream of rows: read once to check it and again to send it, never kept."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.rows import Row

REPORT_EVERY = 1000  # rows
SHOWN_ERRORS = 20  # invalid rows


class DatasetError(InputError):
    """A dataset cannot be used; the message names file, place, key and remedy."""

    def __init__(self, where: str, problem: str, *more: str) -> None:
        super().__init__(f"{where}: {problem}", *more)


class Checked(NamedTuple):
    """The number of rows of a dataset, and the digest that identifies it."""

    rows: int
    digest: str


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
            if isinstance(row, DatasetError):
                raise row
            if row is not None:
                # Before each row: another row's states would be stored under this row's number.
                self.check_unchanged("put back what was checked and call again, or give what it is now an --output of its own")
                yield row

    def check_unchanged(self, remedy: str = "call again when it is complete") -> None:
        """Raise DatasetError if a file has changed since this object was created."""
        for path, before, now in zip(self.files, self._stamp, self._stat(), strict=True):
            if before != now:
                raise DatasetError(str(path), f"it was changed while it was read; {remedy}")

    def check(self, report: Callable[[int], None] = lambda rows: None) -> Checked:
        """Read and check every row.

        Args:
            report: called with the number of rows so far, every REPORT_EVERY rows.

        Raises:
            DatasetError: as for `rows`, with up to SHOWN_ERRORS invalid rows; or there is no row.
        """
        digest = hashlib.sha256()
        count = 0
        bad: list[DatasetError] = []
        try:
            for row in self.records(lambda index: True):
                if isinstance(row, Row):
                    digest.update(row.identity())
                elif row is not None:
                    bad.append(row)
                    if len(bad) == SHOWN_ERRORS:
                        break
                count += 1
                if count % REPORT_EVERY == 0:
                    report(count)
            self.check_unchanged()
        except DatasetError as error:
            bad.append(error)
        if len(bad) == 1:
            raise bad[0]
        if bad:
            or_more = " or more" if len(bad) == SHOWN_ERRORS else ""
            raise DatasetError(str(self.path), f"it cannot be sent, for {len(bad)} reasons{or_more}", *map(str, bad))
        if not count:
            raise DatasetError(str(self.files[0]), "it has no rows")
        return Checked(count, digest.hexdigest())

    def _stat(self) -> list[tuple[int, int, int, int]]:
        found = []
        for path in self.files:
            try:
                status = os.stat(path)
            except OSError as error:
                raise DatasetError(str(path), f"it cannot be read: {error.strerror}") from error
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        return found
