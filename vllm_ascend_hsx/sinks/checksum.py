"""The checksum of a file's data: each write's is made while its bytes pass by, in any order, and they are put together at the end."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, insort

from awscrt.checksums import combine_crc32c, crc32c

ALGORITHM = "crc32c"
_BLOCK = 4 << 20


class Checksums:
    """CRC-32C of the bytes of a file from `begin` on, of which every part is written at its own time and by any thread.

    Bytes cost one pass while they are in the processor's cache. Only what is left of a part that was written over or cut off is read from
    the file when the digest is asked for.

    Args:
        begin: offset in the file of the first byte that counts.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._mutex = threading.Lock()
        self._begins: list[int] = []  # of the parts, which do not overlap, in ascending order
        self._parts: dict[int, tuple[int, int]] = {}  # offset: end and checksum

    def begin_write(self, offset: int, data: memoryview) -> int:
        """Forget what stood where `data` goes, and return its checksum. No write of the same bytes may be in flight."""
        end = offset + len(data)
        with self._mutex:
            begins = self._begins
            first = bisect_left(begins, offset)
            if first and self._parts[begins[first - 1]][0] > offset:
                first -= 1
            last = first
            while last < len(begins) and begins[last] < end:
                del self._parts[begins[last]]
                last += 1
            del begins[first:last]
        return crc32c(data)

    def end_write(self, offset: int, num_bytes: int, checksum: int) -> None:
        """The bytes are in the file: `checksum` is what begin_write returned."""
        if num_bytes:
            with self._mutex:
                insort(self._begins, offset)
                self._parts[offset] = (offset + num_bytes, checksum)

    def finish(self, fd: int, end: int, rest: memoryview) -> str:
        """The digest of the file's bytes [begin, end) followed by `rest`, in hexadecimal. No write may be in flight.

        Args:
            fd: the file, for reading.
            end: where the bytes end that count; what was written behind it does not.
            rest: bytes that will stand there.

        Raises:
            OSError: a part had to be read and could not be.
        """
        digest, position = 0, self._begin
        for begin in self._begins:
            part_end, checksum = self._parts[begin]
            if part_end > end:
                break
            digest = _read(fd, position, begin, digest)  # nothing, unless parts overlapped
            digest = combine_crc32c(digest, checksum, part_end - begin)
            position = part_end
        digest = _read(fd, position, end, digest)
        return _text(crc32c(rest, digest))


def _read(fd: int, begin: int, end: int, digest: int) -> int:
    """The digest of what it was of and the file's bytes [begin, end) behind that."""
    while begin < end:
        block = os.pread(fd, min(_BLOCK, end - begin), begin)
        if not block:
            raise OSError(f"the file ends at byte {begin}, before its rows do")
        digest = crc32c(block, digest)
        begin += len(block)
    return digest


def _text(digest: int) -> str:
    return f"{digest:08x}"


class Digest:
    """CRC-32C of bytes that come in order."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview | bytes) -> None:
        self._value = crc32c(data, self._value)

    def hexdigest(self) -> str:
        return _text(self._value)


def checksum_of(fd: int, begin: int, end: int) -> str:
    """The digest of a file's bytes [begin, end), as `Checksums` makes it. Raises OSError: it cannot be read."""
    return _text(_read(fd, begin, end, 0))
