"""A dataset as a stream of rows: read once to check it and again to send it, never kept."""

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
    """A dataset cannot be used; the message names file, place, key and remedy."""


class BadRow(NamedTuple):
    """A record that cannot be sent: its number, where it is, and the problem with its remedy."""

    index: int  # type: ignore[assignment]
    where: str
    problem: str


class Checked(NamedTuple):
    """A dataset that was read.

    Attributes:
        identities: of the rows, the first 64 bits of each; 0 for one that cannot be sent.
        bad: the rows that cannot be sent.
        unsent: columns, and keys of messages as `messages[].key`, that have no influence and may be
            meant to; with the number of rows.
        tokens: number of known token ids.
        characters: number of characters of texts and chats, their keys included.
    """

    identities: array[int]
    bad: list[BadRow]
    unsent: Counter[str]
    tokens: int
    characters: int


class Dataset(ABC):
    """Rows from files.

    Args:
        options: of the run.
        files: in reading order.
        kept: is alive as long as this object.
    """

    def __init__(self, options: Options, files: Sequence[Path], kept: object = None) -> None:
        self.options, self._kept = options, kept
        self.files = {path: _stamp(path) for path in files}
        self.unsent: Counter[str] = Counter()

    @abstractmethod
    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield the place of each record, and an object, its JSON, or a function that returns it.

        A place may be "" if the record's number says it. Whatever this raises, the files cannot be
        read. A function may raise ValueError, for its record alone.
        """

    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | BadRow | None]:
        """Yield each record up to the limit in order, None for one that is not wanted.

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
            request: fields that all requests of the run have.
            report: called with the number of rows so far, every REPORT_EVERY rows.

        Raises:
            DatasetError: as `records`; or there is no record.
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
            raise DatasetError(f"{self.options.data}: it has no rows")
        return Checked(identities, bad, self.unsent.copy(), tokens, characters)

    def require_unchanged(self, *paths: Path) -> None:
        """Raise DatasetError if a file has changed since this object was created."""
        for path in paths:
            if _stamp(path) != self.files[path]:
                remedy = "put back what was checked, or call again when it is complete"
                raise DatasetError(f"{path}: it was changed while it was read; {remedy}")

    def _row(self, index: int, where: str, record: Any) -> Row | BadRow:
        try:
            record = parsed(
                "it", record() if callable(record) else record, dict, "one JSON object per line"
            )
            return read_row(index, record, self.options, self.unsent)
        except (ValueError, OverflowError) as error:
            return BadRow(index, where or f"{self.options.data}, row {index}", str(error))


def unreadable(options: Options, error: Exception, after: str = "") -> InputError:
    """Return the error for whatever keeps a dataset from being read."""
    if isinstance(error, InputError):
        return error
    reason = next(iter(str(error).splitlines()), repr(error))
    problem = (
        f"it cannot be read{after}: {reason}; give one that can be: a file, a folder, or the id "
        "of a dataset on a hub"
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
