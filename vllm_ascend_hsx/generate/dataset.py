"""A dataset as a stream of rows: checked wholly before anything is sent, then read again for sending; never held in memory."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.rows import Row, RowError, choose_column, read_row

REPORT_EVERY = 1000  # rows, while they are checked
SHOWN_ERRORS = 20  # rows that cannot be sent
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class DatasetError(InputError):
    """A dataset cannot be used; the message names file, place, key and remedy."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")


class Checked(NamedTuple):
    """What a pass over a whole dataset found: how many rows it has, and a digest by which it is recognized."""

    rows: int
    digest: str


class Dataset(ABC):
    """Rows from files.

    Args:
        path: as the user named it.
        files: in the order in which they are read.
        column: what to send, or None for the first of `rows.COLUMNS` that is there.
    """

    def __init__(self, path: Path, files: list[Path], column: str | None) -> None:
        self.path = path
        self.files = files
        self.column = column
        self._stamp = self._stat()

    @abstractmethod
    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | DatasetError | None]:
        """One item per row, in order; None for a row that is not wanted, and an error for one that cannot be sent. Raises DatasetError."""

    def rows(self, wanted: Callable[[int], bool] = lambda index: True) -> Iterator[Row]:
        """The rows that are wanted, by their index.

        Raises:
            DatasetError: a row cannot be sent, or a file was changed since this object was made.
        """
        for row in self.records(wanted):
            if isinstance(row, DatasetError):
                raise row
            if row is not None:
                yield row
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises DatasetError: a file is not the one that was checked."""
        for path, before, now in zip(self.files, self._stamp, self._stat(), strict=True):
            if before != now:
                raise DatasetError(str(path), "it was changed while it was read; call again when it is complete")

    def check(self, report: Callable[[int], None] = lambda rows: None) -> Checked:
        """Read and check every row.

        Args:
            report: called with the number of rows so far, now and then.

        Raises:
            DatasetError: as for `rows`, with the first SHOWN_ERRORS rows that cannot be sent; or there is no row.
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
            raise DatasetError(str(self.path), "\n  ".join([f"it cannot be sent, for {len(bad)} reasons{or_more}", *map(str, bad)]))
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


class JsonLines(Dataset):
    """One JSON object a line; blank lines are no rows."""

    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | DatasetError | None]:
        (path,) = self.files
        index = -1
        try:
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.isspace():
                        continue
                    index += 1
                    yield self._row(index, f"{path}:{number}", line) if wanted(index) else None
        except OSError as error:
            raise DatasetError(str(path), f"it cannot be read: {error.strerror}") from error

    def _row(self, index: int, where: str, line: bytes) -> Row | DatasetError:
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = "; a list of all rows in one is not supported" if index == 0 and line[:1] == b"[" else ""
            return DatasetError(where, f"it is not JSON ({error}); give one JSON object per line{hint}")
        if not isinstance(record, dict):
            return DatasetError(where, f'it is not a JSON object; give one such as {{"prompt": "..."}} per line, not {line[:20]!r}')
        try:
            column = choose_column(record, self.column)
            return read_row(index, column, record[column])
        except RowError as error:
            return DatasetError(where, str(error))


def open_dataset(path: Path, column: str | None = None) -> Dataset:
    """The dataset at a path: JSON lines, Arrow or parquet files, a folder of parquet files, or one that `datasets` saved.

    Raises:
        DatasetError: there is none that can be read, or pyarrow is needed and not installed.
    """
    if not path.exists():
        raise DatasetError(str(path), "it does not exist; give a file of JSON lines, Arrow or parquet, or a folder of the two latter")
    if not path.is_dir():
        if path.suffix in _JSON_SUFFIXES:
            return JsonLines(path, [path], column)
        if path.suffix in (".arrow", ".parquet"):
            return _tables(path, [path], column)
        raise DatasetError(str(path), f"its name ends with none of {_listed((*_JSON_SUFFIXES, '.arrow', '.parquet'))}; rename it")
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = _names_in(splits, "splits")
        raise DatasetError(str(path), f"it holds the splits {_listed(names)}; name one of them, such as --data {path / names[0]}")
    state = path / "state.json"
    if state.is_file():
        return _tables(path, [path / name for name in _names_in(state, "_data_files", "filename")], column)
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("*.arrow"))
    if not files:
        raise DatasetError(str(path), "it has no state.json (from `save_to_disk`), no *.parquet and no *.arrow; name the folder that has")
    return _tables(path, files, column)


def _tables(path: Path, files: list[Path], column: str | None) -> Dataset:
    try:
        from vllm_ascend_hsx.generate.tables import Tables
    except ModuleNotFoundError as error:
        raise DatasetError(
            str(files[0]), f"reading it needs {error.name}: pip install 'vllm-ascend-hsx[data]', or convert it to JSON lines"
        ) from error
    return Tables(path, files, column)


def _names_in(path: Path, key: str, inner: str | None = None) -> list[str]:
    try:
        entries = json.loads(path.read_bytes())[key]
        return [str(entry[inner] if inner else entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(str(path), f"it is not what `datasets` writes: {error!r}") from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
