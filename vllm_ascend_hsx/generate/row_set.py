"""A set of row numbers in a byte each: datasets have millions of rows."""

from __future__ import annotations

from collections.abc import Iterator


class RowSet:
    """Rows in [0, size); what lies outside is never in it.

    Args:
        size: rows of the dataset.
    """

    def __init__(self, size: int) -> None:
        self._is_in = bytearray(size)

    def add(self, row: int) -> None:
        if 0 <= row < len(self._is_in):
            self._is_in[row] = 1

    def discard(self, row: int) -> None:
        if 0 <= row < len(self._is_in):
            self._is_in[row] = 0

    def update(self, other: RowSet) -> None:
        """Add the rows of a set of the same size."""
        size = len(self._is_in)
        both = int.from_bytes(self._is_in, "little") | int.from_bytes(other._is_in, "little")
        self._is_in = bytearray(both.to_bytes(size, "little"))

    def __iter__(self) -> Iterator[int]:
        return (row for row, is_in in enumerate(self._is_in) if is_in)

    def __contains__(self, row: int) -> bool:
        return 0 <= row < len(self._is_in) and self._is_in[row] == 1

    def __len__(self) -> int:
        return self._is_in.count(1)
