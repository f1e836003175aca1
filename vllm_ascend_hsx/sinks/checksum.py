"""The checksum of a file's data: made while rows pass by in order, and read back from the file where they did not."""

from __future__ import annotations

import os
import threading

import xxhash

ALGORITHM = "xxh3_64"
_BLOCK = 4 << 20


class RunningChecksum:
    """xxh3 (64 bits) of the bytes of a file from `begin` on.

    Bytes that arrive where the last ones ended cost one pass while they are in the processor's cache. Bytes that arrive in another
    order, or again (a preempted request computes its rows anew), leave it stale: then the file is read once when the digest is asked for.

    Args:
        begin: offset in the file of the first byte that counts.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._mutex = threading.Lock()
        self._hash = xxhash.xxh3_64()
        self._end = begin
        # The state before the last bytes: asynchronous scheduling computes one row more than the request turns out to have.
        self._previous = (begin, self._hash.copy())
        self._stale = False

    def add(self, offset: int, data: memoryview) -> None:
        """Bytes that are about to be written at `offset`."""
        with self._mutex:
            if self._stale or offset != self._end:
                self._stale = True
                return
            self._previous = (self._end, self._hash.copy())
            self._hash.update(data)
            self._end += len(data)

    def spoil(self) -> None:
        """What is in the file is not known: a write failed half-way."""
        with self._mutex:
            self._stale = True

    def finish(self, fd: int, end: int, rest: memoryview) -> str:
        """The digest of the file's bytes [begin, end) followed by `rest`, in hexadecimal.

        Args:
            fd: the file, for reading.
            end: where the bytes end that count; what was added behind it does not.
            rest: bytes that will stand there.

        Raises:
            OSError: the file had to be read and could not be.
        """
        with self._mutex:
            if not self._stale and self._end == end:
                digest = self._hash.copy()
            elif not self._stale and self._previous[0] == end:
                digest = self._previous[1].copy()
            else:
                digest = _read_back(fd, self._begin, end)
        digest.update(rest)
        return digest.hexdigest()


def _read_back(fd: int, begin: int, end: int) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64()
    while begin < end:
        block = os.pread(fd, min(_BLOCK, end - begin), begin)
        if not block:
            raise OSError(f"the file ends at byte {begin}, before its rows do")
        digest.update(block)
        begin += len(block)
    return digest


def checksum_of(fd: int, begin: int, end: int) -> str:
    """The digest of a file's bytes [begin, end), as `RunningChecksum` makes it. Raises OSError: it cannot be read."""
    return _read_back(fd, begin, end).hexdigest()
