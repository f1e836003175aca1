"""A dataset as a stream of rows, read once for the check and again to send the rows."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.generate.columns import read_row
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row, parsed

REPORT_EVERY = 1000  # rows


class DatasetError(InputError):
    """A dataset cannot be used. The message names file, line, key and remedy."""


class BadRow(NamedTuple):
    """A record that cannot be sent: index, position in the files, and problem with remedy."""

    index: int  # type: ignore[assignment]
    where: str
    problem: str


class Checked(NamedTuple):
    """Result of reading a whole dataset.

    Attributes:
        identities: first 64 bits of each row's identity; 0 for a row that cannot be sent.
        bad: rows that cannot be sent.
        unsent: columns, and keys of messages as `messages[].key`, that are not sent although they
            might matter; with the number of rows.
        tokens: number of known token ids.
        characters: number of characters of texts and chats, including keys.
    """

    identities: array[int]
    bad: list[BadRow]
    unsent: Counter[str]
    tokens: int
    characters: int


class Dataset(ABC):
    """Rows from files.

    Args:
        options: options of the run.
        files: files in reading order.
        kept: object to keep alive, such as a temporary file.
    """

    def __init__(self, options: Options, files: Sequence[Path], kept: object = None) -> None:
        self.options, self._kept = options, kept
        self.files = {path: _stamp(path) for path in files}
        self.unsent: Counter[str] = Counter()

    @abstractmethod
    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield the position of each record, and an object, JSON text, or a function returning one.

        A position may be "" where the record's index is enough. Any exception means that the files
        cannot be read. A function may raise ValueError: only that record is bad.
        """

    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | BadRow | None]:
        """Yield the records up to the limit in order, with None for each unwanted record.

        Raises:
            DatasetError: a file cannot be read, or has changed since this object was created.
        """
        index = -1
        try:
            for index, (where, record) in enumerate(islice(self.read(), self.options.limit)):
                yield self._row(index, where, record) if wanted(index) else None
        except Exception as error:
            raise unreadable(self.options, error, f" after {index + 1} rows") from error

    def rows(self, wanted: Callable[[int], bool] = lambda index: True) -> Iterator[Row]:
        """Yield the rows that are wanted and can be sent. Raises DatasetError, as `records`."""
        return (row for row in self.records(wanted) if isinstance(row, Row))

    def check(
        self, request: Mapping[str, Any], report: Callable[[int], None] = lambda rows: None
    ) -> Checked:
        """Read every record.

        Args:
            request: fields of all requests of the run.
            report: called every REPORT_EVERY rows with the number of rows so far.

        Raises:
            DatasetError: as for `records`, or the dataset is empty.
        """
        self.unsent.clear()
        identities, bad, tokens, characters = array("Q"), [], 0, 0
        for count, row in enumerate(self.records(lambda index: True), start=1):
            if isinstance(row, Row):
                tokens += len(row.token_ids or ())
                characters += 0 if row.token_ids else len(str(row.content))
            elif row is not None:
                bad.append(row)
            identities.append(int(row.identity(request)[:16], 16) if isinstance(row, Row) else 0)
            if count % REPORT_EVERY == 0:
                report(count)
        if not identities:
            raise DatasetError(f"{self.options.data}: the dataset has no rows")
        return Checked(identities, bad, self.unsent.copy(), tokens, characters)

    def require_unchanged(self, *paths: Path) -> None:
        """Raise DatasetError if a file has changed since this object was created."""
        for path in paths:
            if _stamp(path) != self.files[path]:
                remedy = "restore the checked version, or run again when the file is complete"
                raise DatasetError(f"{path}: the file changed while it was read; {remedy}")

    def _row(self, index: int, where: str, record: Any) -> Row | BadRow:
        try:
            record = parsed(
                "the row",
                record() if callable(record) else record,
                dict,
                "one JSON object per line",
            )
            return read_row(index, record, self.options, self.unsent)
        except (ValueError, OverflowError) as error:
            return BadRow(index, where or f"{self.options.data}, row {index}", str(error))


def unreadable(options: Options, error: Exception, after: str = "") -> InputError:
    """Return the error for a dataset that cannot be read."""
    if isinstance(error, InputError):
        return error
    reason = next(iter(str(error).splitlines()), repr(error))
    problem = (
        f"cannot be read{after}: {reason}; give a readable file or folder, or the id of a dataset "
        "on a hub"
    )
    if isinstance(error, ModuleNotFoundError):
        problem = (
            f"reading it needs {error.name}: pip install 'vllm-ascend-hsx[data]', or convert it "
            "to JSON lines"
        )
    return DatasetError(f"{options.data}: {problem}")


def _stamp(path: Path) -> tuple[int, int, int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
