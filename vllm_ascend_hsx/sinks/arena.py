"""Memory in which requests are put together: one block that is made once, of which they take chunks and give them back."""

from __future__ import annotations

import ctypes
import heapq
import mmap
import threading
from collections.abc import Iterator

import numpy as np

CHUNK = 256 << 10  # bytes; what a request takes is rounded up to this


class ArenaFullError(Exception):
    """There is not so much memory left.

    Attributes:
        wanted: bytes that were asked for.
        free: bytes that are free.
        size: bytes of the arena.
    """

    def __init__(self, wanted: int, free: int, size: int) -> None:
        super().__init__(f"{wanted} bytes are wanted, and {free} of {size} are free")
        self.wanted = wanted
        self.free = free
        self.size = size


class Arena:
    """A block of memory of which whole chunks are taken. Nobody ever waits for one.

    Args:
        size: bytes, rounded down to whole chunks.
        chunk: bytes of one.

    Attributes:
        address: of the first byte.
        size: bytes.
    """

    def __init__(self, size: int, chunk: int = CHUNK) -> None:
        count = size // chunk
        if count < 1:
            raise ValueError(f"an arena of {size} bytes does not hold a chunk of {chunk}")
        self.chunk = chunk
        self.size = count * chunk
        self._memory = mmap.mmap(-1, self.size)  # pages come into being when they are first written
        self.bytes = np.frombuffer(self._memory, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._mutex = threading.Lock()
        self._free = list(range(count))  # a heap: low chunks first, so that those of a request are neighbours, and few pages are used

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return len(self._free) * self.chunk

    def take(self, count: int) -> list[int]:
        """Take `count` chunks and return their numbers, ascending.

        Raises ArenaFullError, and takes none, if fewer are free.
        """
        with self._mutex:
            if count > len(self._free):
                raise ArenaFullError(count * self.chunk, self.free, self.size)
            return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, chunks: list[int]) -> None:
        """Let others have chunks that nobody uses any more."""
        with self._mutex:
            for each in chunks:
                heapq.heappush(self._free, each)


class Gathering:
    """The bytes of one request, which may grow. `write` may be called from several threads at once, with any of the others but `free`.

    Args:
        arena: where they are.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._mutex = threading.Lock()
        self._chunks: list[int] = []

    def reserve(self, size: int) -> None:
        """Have room for bytes [0, size). Raises ArenaFullError: there is none for those that are missing; what it has stays."""
        with self._mutex:
            missing = -(-size // self._arena.chunk) - len(self._chunks)
            if missing > 0:
                self._chunks += self._arena.take(missing)

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at their place, for which there must be room."""
        source = np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)
        done = 0
        for begin, end in self._runs(offset, offset + data.nbytes):
            self._arena.bytes[begin:end] = source[done : done + end - begin]  # numpy lets other threads run meanwhile
            done += end - begin

    def clear(self, begin: int, end: int) -> None:
        """Make bytes [begin, end) zeros: the memory still has what an earlier request left."""
        for first, last in self._runs(begin, end):
            self._arena.bytes[first:last] = 0

    def parts(self, size: int) -> list[tuple[int, int]]:
        """(address, bytes) of the pieces of memory that bytes [0, size) are in, in their order; neighbours are one."""
        return [(self._arena.address + begin, end - begin) for begin, end in self._runs(0, size)]

    def views(self, size: int) -> Iterator[memoryview]:
        """The same pieces, to be read."""
        return (self._arena.bytes[begin:end].data for begin, end in self._runs(0, size))

    def free(self) -> None:
        """Give the memory back. A second call does nothing."""
        with self._mutex:
            chunks, self._chunks = self._chunks, []
        self._arena.give_back(chunks)

    def _runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Where in the arena bytes [begin, end) of the request are: [first, last) of each run of neighbouring chunks."""
        size, chunks = self._arena.chunk, self._chunks
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
