"""How large buffers are. A module of its own, because `hsx plan` runs without torch."""

from __future__ import annotations

_MIN_CHUNKS = 8  # so that some rows of a step are written while others are copied
_MAX_CHUNK_BYTES = 4 << 20
_TURNED_AT_ONCE = 1024  # rows of a rotated target


def ring_shape(num_bytes: int, row_bytes: int) -> tuple[int, int]:
    """Return the number of rows of the ring, and the most rows of a chunk.

    Raises:
        ValueError: if fewer than two rows fit.
    """
    rows = num_bytes // row_bytes
    if rows < 2:
        raise ValueError(f"a row has {row_bytes} bytes and two must fit: give at least {2 * row_bytes} bytes")
    return rows, max(1, min(rows // _MIN_CHUNKS, _MAX_CHUNK_BYTES // row_bytes))


def turned_rows(max_tokens: int) -> int:
    """Return how many rows of a layer are turned back at once."""
    return min(max_tokens, _TURNED_AT_ONCE)


def turn_back_bytes(hidden_size: int, max_tokens: int) -> int:
    """Return the bytes of a rotation and of the two float32 buffers; see TurnBack."""
    return 4 * hidden_size * (hidden_size + 2 * turned_rows(max_tokens))
