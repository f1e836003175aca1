"""How many rows the pinned ring holds. On its own, so that `hsx plan` reckons with it where there is no torch."""

from __future__ import annotations

_MIN_CHUNKS = 8  # rows of a step are written while the rest of them are copied
_MAX_CHUNK_BYTES = 4 << 20


def ring_shape(num_bytes: int, row_bytes: int) -> tuple[int, int]:
    """How many rows, and how many of them a chunk has at most. Raises ValueError: fewer than two rows fit."""
    rows = num_bytes // row_bytes
    if rows < 2:
        raise ValueError(f"a row has {row_bytes} bytes and two must fit: give at least {2 * row_bytes} bytes")
    return rows, max(1, min(rows // _MIN_CHUNKS, _MAX_CHUNK_BYTES // row_bytes))
