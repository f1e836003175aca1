"""A pool of memory chunks in which requests are assembled."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CHUNK = 256 << 10  # bytes; the unit of a request's memory


@dataclass(eq=False)
class BufferPoolFullError(Exception):
    """Of `size` bytes in the pool, `free` are free, and `wanted` were requested."""

    wanted: int
    free: int
    size: int


class BufferPool:
    """A block of memory at `address`, divided into chunks. No call waits for a chunk.

    Args:
        size: bytes, rounded down to whole chunks.
        chunk: bytes of a chunk.
    """

    def __init__(self, size: int, chunk: int = CHUNK) -> None:
        count = size // chunk
        if count < 1:
            raise ValueError(f"a buffer pool of {size} bytes does not hold a chunk of {chunk}")
        self.chunk = chunk
        self.size = count * chunk
        self._memory = mmap.mmap(-1, self.size)  # pages are allocated when first written
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._mutex = threading.Lock()
        # A heap returns low chunks first: a request gets neighbours, and few pages are used.
        self._free = list(range(count))

    @property
    def free(self) -> int:
        """Free bytes."""
        return len(self._free) * self.chunk

    def take(self, count: int) -> list[int]:
        """Take `count` chunks and return their numbers, ascending.

        Raises BufferPoolFullError, and takes none, if fewer are free.
        """
        with self._mutex:
            if count > len(self._free):
                raise BufferPoolFullError(count * self.chunk, self.free, self.size)
            return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, chunks: list[int]) -> None:
        """Return chunks that are no longer used."""
        with self._mutex:
            for each in chunks:
                heapq.heappush(self._free, each)


class PooledBuffer:
    """A buffer of one request that can grow.

    Several threads may call the methods at the same time, except `free`.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._mutex = threading.Lock()
        self._chunks: list[int] = []

    def reserve(self, size: int) -> None:
        """Grow to at least `size` bytes. Raises BufferPoolFullError: the buffer is unchanged."""
        with self._mutex:
            missing = -(-size // self._pool.chunk) - len(self._chunks)
            if missing > 0:
                self._chunks += self._pool.take(missing)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset for which space is reserved."""
        source = np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)
        done = 0
        for begin, end in self._runs(offset, offset + data.nbytes):
            # numpy releases the GIL here.
            self._pool.bytes[begin:end] = source[done : done + end - begin]
            done += end - begin

    def clear(self, begin: int, end: int) -> None:
        """Zero bytes [begin, end). The memory may hold bytes of an earlier request."""
        for first, last in self._runs(begin, end):
            self._pool.bytes[first:last] = 0

    def parts(self, size: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the runs of memory that hold bytes [0, size), in order."""
        return [(self._pool.address + begin, end - begin) for begin, end in self._runs(0, size)]

    def views(self, size: int) -> Iterator[memoryview]:
        """Yield the same runs as memoryviews."""
        return (self._pool.bytes[begin:end].data for begin, end in self._runs(0, size))

    def free(self) -> None:
        """Return the memory to the pool. A second call does nothing."""
        with self._mutex:
            chunks, self._chunks = self._chunks, []
        self._pool.give_back(chunks)

    def _runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the runs [first, last) of the pool that hold bytes [begin, end) of the buffer."""
        size, chunks = self._pool.chunk, self._chunks
        runs: list[tuple[int, int]] = []
        while begin < end:
            index, inside = divmod(begin, size)
            count = min(end - begin, size - inside)
            first = chunks[index] * size + inside
            if runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], first + count
            else:
                runs.append((first, first + count))
            begin += count
        return runs
