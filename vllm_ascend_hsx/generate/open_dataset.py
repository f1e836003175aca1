"""Open a dataset: JSON and CSV directly, other forms with `datasets`."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import re
import shutil
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.generate.columns import COLUMNS
from vllm_ascend_hsx.generate.dataset import Dataset, DatasetError, unreadable
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import repeated_key

STANDARD_INPUT = "-"
_BATCH = 256  # rows of Parquet in memory at a time
_BOM = b"\xef\xbb\xbf"
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+))?")
_TEXT = re.compile(r"\.(jsonl?|ndjson|csv|tsv)(\.gz|\.zst)?$")
_TABLE = re.compile(r"\.(parquet|arrow)$")
_FORMS = (
    "JSON (.json, .jsonl or .ndjson), .csv or .tsv, any of them compressed (.gz or .zst), "
    ".parquet or .arrow"
)


class Texts(Dataset):
    """JSON lines, JSON lists, CSV and TSV.

    Not read with `datasets`: an Arrow column has one type, but keys of messages and arguments of
    tools have a type per row. Texts of CSV such as null would become missing values.
    """

    def read(self) -> Iterator[tuple[str, Any]]:
        for path in self.files:
            name = "standard input" if self.options.data == STANDARD_INPUT else path
            with _opened(path) as file:
                for place, record in _records(path, file):
                    self.require_unchanged(path)
                    yield f"{name}{place}", record


class Tables(Dataset):
    """Arrow and Parquet."""

    def read(self) -> Iterator[tuple[str, Any]]:
        import datasets

        form = next(iter(self.files)).suffix[1:]
        more = {"batch_size": _BATCH} if form == "parquet" else {}
        table = datasets.load_dataset(
            form, data_files=list(map(str, self.files)), split="train", streaming=True, **more
        )
        for batch in table.with_format("arrow").iter(_BATCH):
            self.require_unchanged(*self.files)
            yield from (
                ("", partial(_record, batch, at, self.options.column))
                for at in range(batch.num_rows)
            )


def open_dataset(options: Options) -> Dataset:
    """Open the dataset of `--data`.

    Raises:
        DatasetError: there is no such dataset, `--split` is missing for a dataset with several
            splits, or a required package is not installed.
    """
    path = Path(options.data)
    try:
        if options.data == STANDARD_INPUT:
            spool = tempfile.NamedTemporaryFile(prefix="hsx-generate-")  # noqa: SIM115 (as long as the dataset)
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.flush()
            return Texts(options, [Path(spool.name)], spool)
        files = [path] if path.is_file() else _files(path, options)
        if all(_TEXT.search(each.name) for each in files):
            return Texts(options, files)
        if (
            len({each.suffix for each in files} & {".parquet", ".arrow"})
            == len({each.suffix for each in files})
            == 1
        ):
            return Tables(options, files)
    except Exception as error:
        raise unreadable(options, error) from error
    raise DatasetError(
        f"{path}: give a file of one of these forms, or a folder with files of one of them: "
        f"{_FORMS}"
    )


def _files(path: Path, options: Options) -> list[Path]:
    """Return the files of a folder or of a dataset on a hub, of one split. Raises DatasetError."""
    hub = _HUB_ID.fullmatch(options.data)
    if path.exists() and not path.is_dir():
        raise DatasetError(
            f"{path}: not a regular file, and the dataset is read twice; copy it to a file, or "
            "pass it as standard input with --data -"
        )
    if not path.is_dir() and (hub is None or _TEXT.search(path.name) or _TABLE.search(path.name)):
        raise DatasetError(
            f"{path}: no such file or folder, and not the id of a dataset on a hub, which is "
            "OWNER/NAME or OWNER/NAME:CONFIG"
        )
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if path.is_dir() and not any(
        (path / name).exists() for name in ("state.json", "dataset_dict.json")
    ):
        splits = datasets.load_dataset_builder(str(path)).config.data_files
    else:
        loaded = (
            datasets.load_from_disk(str(path))
            if hub is None or path.is_dir()
            else datasets.load_dataset(*hub.groups())
        )
        parts = loaded if isinstance(loaded, dict) else {options.split or "train": loaded}
        splits = {
            name: [each["filename"] for each in part.cache_files] for name, part in parts.items()
        }
    split = options.split or (next(iter(splits)) if len(splits) == 1 else None)
    if split not in splits:
        raise DatasetError(
            f"{path}: the dataset has the splits {', '.join(map(str, splits))}; choose one with "
            "--split"
        )
    # `datasets` caches the results of map and filter in the folder of their dataset.
    return [Path(name) for name in splits[split] if not Path(name).name.startswith("cache-")]


def _opened(path: Path) -> Any:
    """Open a file in binary mode with `peek`. The first bytes identify compressed files."""
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(path)
    if magic == b"\x28\xb5\x2f\xfd":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _records(path: Path, file: Any) -> Iterator[tuple[str, Any]]:
    """Yield the position of each record in a file, and the record."""
    if file.peek(3)[:3] == _BOM:
        file.read(3)
    start = file.peek(64).lstrip()[:2]
    if separated := re.search(r"\.([ct])sv", path.name):
        csv.field_size_limit(2**31 - 1)  # characters per cell
        text = io.TextIOWrapper(file, "utf-8", newline="")
        reader = csv.DictReader(
            text,
            restkey="cells beyond the header",
            delimiter={"c": ",", "t": "\t"}[separated[1]],
            strict=True,
        )
        columns = Counter(filter(None, reader.fieldnames or ()))  # spreadsheets leave empty columns
        if twice := [name for name, count in columns.items() if count > 1]:
            raise DatasetError(
                f"{path}: the header has the column {twice[0]!r:.100} twice; give each column once"
            )
        yield from ((f":{reader.line_num}", row) for row in reader)
    elif start[:1] == b"[":
        yield from ((f", row {number}", row) for number, row in enumerate(_items(file)))
    elif start in (b"{\n", b"{\r"):
        raise DatasetError(
            f"{path}: the first row has several lines; write one JSON object per line, or one list "
            "of all objects"
        )
    else:
        yield from (
            (f":{number}", line) for number, line in enumerate(file, start=1) if not line.isspace()
        )


def _items(file: Any) -> Iterator[Any]:
    """Yield the items of a JSON list. After a repeated key, yield functions that check the item."""
    import ijson

    any_twice = False

    class Object(dict[str, Any]):
        twice: str | None = None

        def __setitem__(self, key: str, value: Any) -> None:
            if key in self:
                nonlocal any_twice
                any_twice, self.twice = True, key
            super().__setitem__(key, value)

    for item in ijson.items(file, "item", use_float=True, map_type=Object):
        yield partial(_without_repeated_keys, item) if any_twice else item


def _without_repeated_keys(item: Any) -> Any:
    """Return an item of a JSON list. Raise RowError if an object in it had a key twice."""
    pending = [item]
    while pending:
        value = pending.pop()
        if (key := getattr(value, "twice", None)) is not None:
            raise repeated_key("the row", key)
        pending += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
    return item


def _record(batch: Any, at: int, column: str | None) -> dict[str, Any]:
    cells = {name: batch.column(name)[at] for name in batch.column_names}
    read = {
        name
        for name in cells
        if name == column or (name in COLUMNS and COLUMNS[name].fate != "quiet")
    }
    return {
        name: _python(cell) if name in read else True
        for name, cell in cells.items()
        if cell.is_valid
    }


def _python(cell: Any) -> Any:
    """Convert a cell to the value that JSON would have. Token ids become an array (less memory)."""
    import pyarrow as pa

    items = cell.values if isinstance(cell, pa.ListScalar) else None
    if items is not None and pa.types.is_integer(items.type) and not items.null_count:
        return array("q", items.cast(pa.int64()).to_numpy().tobytes())
    return _without_nones(cell.as_py())


def _without_nones(value: Any) -> Any:
    """Drop keys without a value: objects of an Arrow column all have the same keys."""
    if isinstance(value, dict):
        return {key: _without_nones(each) for key, each in value.items() if each is not None}
    return [_without_nones(each) for each in value] if isinstance(value, list) else value
