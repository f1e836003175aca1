"""Pinned ring: host memory for rows in transit, allocated in runs of any number of rows."""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_ascend_hsx.config import EXTRA_CONFIG
from vllm_ascend_hsx.drafter.shapes import pinned_size, ring_bytes, ring_shape
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.settings import ServerSettings

_PAGE = 4096  # alignment of memory that direct I/O may require


class FreeRows:
    """Track free rows. At first all `num_rows` rows are free.

    Attributes:
        intervals: free rows as ascending intervals [first, end) that do not touch.
        count: number of free rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.intervals = [(0, num_rows)]
        self.count = num_rows

    def take(self, wish: int, least: int = 1) -> tuple[int, int] | None:
        """Take rows from the first run that is long enough, else from the longest run.

        Args:
            wish: most rows to take.
            least: fewest rows to take, unless `wish` is smaller.

        Returns:
            (first row, rows), or None if every run is too short.
        """
        found, longest = -1, 0
        for index, (first, end) in enumerate(self.intervals):
            if end - first > longest:
                found, longest = index, end - first
                if longest >= wish:
                    break
        if longest < min(wish, least):
            return None
        (first, end), count = self.intervals[found], min(wish, longest)
        self.intervals[found : found + 1] = [(first + count, end)] if count < longest else []
        self.count -= count
        return first, count

    def give_back(self, first: int, count: int) -> None:
        """Free a run and join it with free neighbours.

        Raises:
            ValueError: if some of these rows are already free.
        """
        low = high = bisect_left(self.intervals, (first, first))
        end = first + count
        before = self.intervals[low - 1] if low else (-1, -1)
        after = self.intervals[high] if high < len(self.intervals) else (sys.maxsize, sys.maxsize)
        if before[1] > first or end > after[0]:
            raise ValueError(f"some of the rows {first} to {end} are free")
        if before[1] == first:
            first, low = before[0], low - 1
        if after[0] == end:
            end, high = after[1], high + 1
        self.intervals[low:high] = [(first, end)]
        self.count += count


class Run(NamedTuple):
    """Consecutive rows of the ring.

    Attributes:
        first: index of the first row.
        rows: pinned [rows, layers, hidden].
        data: bytes of `rows`.
    """

    first: int
    rows: torch.Tensor
    data: memoryview


class PinnedRing:
    """A fixed amount of pinned host memory, allocated in runs of rows.

    The rows begin at a page boundary, for direct I/O. aclrtMallocHost documents an alignment of
    only 64 bytes, so up to a page of the pinned memory is unused.

    Args:
        num_bytes: bytes to pin. torch rounds them up to a power of two; see shapes.ring_bytes.
        row_shape, dtype: shape and dtype of one row.

    Attributes:
        num_rows: rows in the ring.
        rows_per_chunk: most rows of a run.
        pinned_bytes: host memory that is pinned.
        data: the rows of the whole ring as bytes.

    Raises:
        ValueError: if fewer than two rows fit.
        UserError: if the memory cannot be allocated.
    """

    def __init__(self, num_bytes: int, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
        ring_shape(num_bytes, self.row_bytes)  # raises before memory is pinned
        whole = _pin(num_bytes)
        begin = -whole.data_ptr() % _PAGE
        self.num_rows, self.rows_per_chunk = ring_shape(num_bytes - begin, self.row_bytes)
        self.pinned_bytes = pinned_size(num_bytes)
        # Shorter runs are not taken until their neighbours are free. Otherwise a full ring would
        # split into ever smaller runs and writes.
        self._least = max(1, self.rows_per_chunk // 16)
        end = begin + self.num_rows * self.row_bytes
        self._memory = whole[begin:end].view(dtype).view(self.num_rows, *row_shape)
        self.data = whole.numpy().data[begin:end]
        self._changed = threading.Condition()  # guards the next two attributes
        self._free = FreeRows(self.num_rows)
        self._least_free = self.num_rows

    @property
    def free_rows(self) -> int:
        return self._free.count

    def take_peak_fill(self) -> float:
        """Return the largest share in use since the last call, from 0 to 1. For one thread only."""
        with self._changed:
            least, self._least_free = self._least_free, self._free.count
        return 1 - least / self.num_rows

    def take(self, wish: int) -> Run | None:
        """Take up to `wish` rows, at most `rows_per_chunk`. Return None if the ring is full."""
        with self._changed:
            return self._take(wish)

    def wait(self, wish: int, timeout: float | None = None) -> Run | None:
        """Take rows as `take` does, but block while the ring is full. For one thread only.

        Args:
            wish: most rows to take.
            timeout: most seconds to block, None for no limit. Return None after this time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._take(wish), timeout)

    def _take(self, wish: int) -> Run | None:
        taken = self._free.take(min(wish, self.rows_per_chunk), self._least)
        if taken is None:
            return None
        self._least_free = min(self._least_free, self._free.count)
        first, count = taken
        data = self.data[first * self.row_bytes : (first + count) * self.row_bytes]
        return Run(first, self._memory[first : first + count], data)

    def free(self, *runs: tuple[int, int]) -> None:
        """Free runs or parts of runs, given as (first row, rows). Thread-safe."""
        with self._changed:
            for first, count in runs:
                self._free.give_back(first, count)
            self._changed.notify()

    def as_rows(self, data: memoryview) -> torch.Tensor:
        """Return a copy of the bytes of rows as a tensor [rows, layers, hidden]."""
        return torch.frombuffer(bytearray(data), dtype=self._memory.dtype).view(
            -1, *self._memory.shape[1:]
        )


def _pin(num_bytes: int) -> torch.Tensor:
    """Return pinned memory, uint8 [num_bytes].

    torch_npu 2.10.0.post4 with a driver before 25.5 may return a null pointer instead of an error
    (csrc/core/npu/CachingHostAllocator.cpp:259).

    Raises:
        UserError: if the memory cannot be allocated.
    """
    reason = "the driver returned a null pointer without an error"
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
    else:
        if memory.data_ptr():
            return memory
    problem = f"cannot be allocated as pinned memory: {reason}"
    raise UserError(
        f"{EXTRA_CONFIG}.pinned_ring_bytes",
        num_bytes,
        problem,
        "Set a smaller value, such as 32MiB.",
    )


def ring_bytes_of(settings: ServerSettings) -> int:
    """Return the bytes that each worker of a server pins for the ring."""
    config, target = settings.config, settings.target
    return ring_bytes(
        config.pinned_ring_bytes,
        num_slots=config.staging_slots,
        max_tokens=target.max_tokens,
        tensor_parallel=target.tensor_parallel,
        row_bytes=settings.row_format.row_bytes,
    )
