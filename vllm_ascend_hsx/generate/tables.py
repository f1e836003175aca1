"""Arrow and parquet files as a dataset; the only module that needs pyarrow."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_ascend_hsx.generate.dataset import Dataset, DatasetError
from vllm_ascend_hsx.generate.rows import Row, RowError, choose_column, read_row

_BATCH = 256  # rows of a parquet file in memory at a time


class Tables(Dataset):
    """One column of Arrow (stream or file format) and parquet files."""

    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | DatasetError | None]:
        index = 0
        for path in self.files:
            number = 0  # of the row in this file
            try:
                for column, batch in self._batches(path):
                    for value in batch:
                        where = f"{path}, row {number}"
                        yield _row(where, index, column, value) if wanted(index) else None
                        index, number = index + 1, number + 1
            except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a column name is not UTF-8
                reason = next(iter(str(error).splitlines()), repr(error))
                raise DatasetError(str(path), f"it cannot be read: {reason}") from error

    def _batches(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield (column name, values) for each batch."""
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                column = self._column(path, file.schema_arrow.names)
                for batch in file.iter_batches(batch_size=_BATCH, columns=[column]):
                    yield column, batch.column(column)
            return
        with pa.OSFile(str(path)) as source:  # a mapped file that becomes shorter kills the process
            # `datasets` writes the stream format, `pyarrow.feather` and others the file format.
            if source.read(6) == b"ARROW1":
                file = pa.ipc.open_file(source)
                column = self._column(path, file.schema.names)
                for number in range(file.num_record_batches):
                    yield column, file.get_batch(number).column(column)
            else:
                source.seek(0)
                stream = pa.ipc.open_stream(source)
                column = self._column(path, stream.schema.names)
                for batch in stream:
                    yield column, batch.column(column)

    def _column(self, path: Path, names: list[str]) -> str:
        try:
            column = choose_column(names, self.column)
        except RowError as error:
            raise DatasetError(str(path), str(error)) from error
        if names.count(column) > 1:
            raise DatasetError(str(path), f"there are {names.count(column)} columns {column!r}; rename all but one")
        return column


def _row(where: str, index: int, column: str, value: Any) -> Row | DatasetError:
    try:
        return read_row(index, column, _python(column, value))
    except RowError as error:
        return DatasetError(where, str(error))


def _python(column: str, value: Any) -> Any:
    """Convert a value to JSON's types; token ids become an array, without an object for each."""
    items = value.values if isinstance(value, pa.ListScalar) else None
    if items is not None and pa.types.is_integer(items.type) and not items.null_count:
        try:
            return array("q", items.cast(pa.int64()).to_numpy().tobytes())
        except pa.ArrowInvalid:
            raise RowError(f"{column} holds a number above 2^63; token ids are numbers from 0 to the vocabulary's size") from None
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a time outside Python's range
        raise RowError(f"{column} cannot be read: {error}") from error
