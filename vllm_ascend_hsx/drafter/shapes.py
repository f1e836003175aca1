"""Sizes of buffers. `hsx plan` imports this module without torch."""

from __future__ import annotations

_RING_BYTES = 256 << 20  # two prompts of some thousand tokens, so files are written in parallel
_SLACK_BYTES = 32 << 20
_MIN_CHUNKS = 8  # per ring, so rows are written while other rows of the step are copied
_MAX_CHUNK_BYTES = 4 << 20
_TURNED_AT_ONCE = 1024  # rows of a rotated target


def slot_rows(max_tokens: int, tensor_parallel: int) -> int:
    """Return the rows of a staging slot: an equal share of a step for each tensor-parallel rank.

    Each request has one owner, so a rank may own any part of a step. If it owns more than a slot
    holds, it uses several slots; see StagingCache.
    """
    return -(-max_tokens // tensor_parallel)


def ring_bytes(
    given: int | None, *, num_slots: int, max_tokens: int, tensor_parallel: int, row_bytes: int
) -> int:
    """Return the pinned bytes of the ring: the given size, or the default.

    By default, slots and ring together hold more than `num_slots` full steps. So one prompt that
    fills these steps does not wait for storage.

    The size is rounded up to a power of two, because torch pins no other size. The ring uses all
    bytes.

    Args:
        given: `pinned_ring_bytes`, or None.
        num_slots, max_tokens, tensor_parallel: as for the slots; see slot_rows.
        row_bytes: bytes of one token's rows.
    """
    if given is not None:
        return pinned_size(given)
    lacking = num_slots * (max_tokens - slot_rows(max_tokens, tensor_parallel))
    return pinned_size(max(_RING_BYTES, _SLACK_BYTES + lacking * row_bytes, 2 * row_bytes))


def pinned_size(num_bytes: int) -> int:
    """Return the bytes that torch pins for a tensor of `num_bytes`: the next power of two.

    Source: ATen/core/CachingHostAllocator.h, CachingHostAllocatorImpl::allocate (torch 2.10.0).
    """
    return 1 << (num_bytes - 1).bit_length()


def ring_shape(num_bytes: int, row_bytes: int) -> tuple[int, int]:
    """Return the number of rows of the ring, and the maximum number of rows of a chunk.

    Raises:
        ValueError: if fewer than two rows fit.
    """
    rows = num_bytes // row_bytes
    if rows < 2:
        raise ValueError(
            f"a row has {row_bytes} bytes and two must fit: give at least {2 * row_bytes} bytes"
        )
    return rows, max(1, min(rows // _MIN_CHUNKS, _MAX_CHUNK_BYTES // row_bytes))


def turned_rows(slot_rows: int) -> int:
    """Return the number of rows of a layer that are turned back at once."""
    return min(slot_rows, _TURNED_AT_ONCE)


def turn_back_bytes(hidden_size: int, slot_rows: int) -> int:
    """Return the device bytes of a rotation and the two float32 buffers; see TurnBack."""
    return 4 * hidden_size * (hidden_size + 2 * turned_rows(slot_rows))
