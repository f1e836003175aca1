"""Open a dataset by its path: JSON lines here, Arrow and parquet in `tables`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.generate.dataset import Dataset, DatasetError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row, RowError, choose_column, read_row
from vllm_ascend_hsx.protocol.files import read_regular
from vllm_ascend_hsx.protocol.strict_json import parse

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class JsonLines(Dataset):
    """One JSON object per line. Blank lines are skipped."""

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


def open_dataset(options: Options) -> Dataset:
    dataset = _open_dataset(Path(options.data), options.column)
    dataset.limit = options.limit
    return dataset


def _open_dataset(path: Path, column: str | None = None) -> Dataset:
    """Open a file of JSON lines, Arrow or parquet, or a folder of tables or saved by `datasets`.

    Raises:
        DatasetError: there is no readable dataset, or it needs pyarrow, which is not installed.
    """
    try:
        there = path.exists()
    except OSError as error:
        raise DatasetError(str(path), f"it cannot be read: {error.strerror}; name a file or a folder") from error
    if not there:
        raise DatasetError(str(path), "it does not exist; give a file of JSON lines, Arrow or parquet, or a folder of the two latter")
    if not path.is_dir():
        if not path.is_file():
            raise DatasetError(str(path), "it is not a regular file; copy it to one, because it is read more than once")
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
    parquet = sorted(path.glob("*.parquet"))
    # `datasets` keeps the results of map and filter beside the dataset they were made of.
    arrow = sorted(each for each in path.glob("*.arrow") if not each.name.startswith("cache-"))
    if parquet and arrow:
        raise DatasetError(str(path), f"it has {parquet[0].name} and {arrow[0].name}; name a folder with one kind of files, or one file")
    if not parquet and not arrow:
        problem = "it has no state.json (from `save_to_disk`), no *.parquet and no *.arrow"
        raise DatasetError(str(path), f"{problem}; name the folder that has, or one file of JSON lines")
    return _tables(path, parquet or arrow, column)


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
        entries = parse(read_regular(path))[key]
        names = [entry[inner] if inner else entry for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(str(path), f"it is not what `datasets` writes: {error!r}; save the dataset again") from error
    if not names or not all(map(_is_path, names)):
        raise DatasetError(str(path), f"it is not what `datasets` writes: no names of files or folders in {key}; save the dataset again")
    return names


def _is_path(value: object) -> bool:
    """Return True for text that the system accepts as a path."""
    try:
        return isinstance(value, str) and value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
