"""The checksum of a file: each write's is made while its bytes pass by, in any order, and they are put together at the end.

It covers the header, too, in which it stands: of that, all bytes but its own eight digits, for which zeros are taken.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, insort
from collections.abc import Mapping

from awscrt.checksums import combine_crc32c, crc32c

ALGORITHM = "crc32c"
BLANK = "0" * 8  # what stands in a header for the digits of the checksum while it is made
_BLOCK = 4 << 20
_DATA_ONLY = ("1", None)  # versions of the format in which the checksum does not cover the header


class Digest:
    """CRC-32C of bytes that come in order, or of parts that were put together.

    Args:
        value: of the bytes so far.
        size: how many there are.
    """

    def __init__(self, value: int = 0, size: int = 0) -> None:
        self._value = value
        self._size = size

    def update(self, data: memoryview | bytes) -> None:
        self._value = crc32c(data, self._value)
        self._size += len(data)

    def read(self, fd: int, begin: int, end: int) -> None:
        """Go on with a file's bytes [begin, end). Raises OSError: they cannot be read."""
        while begin < end:
            block = os.pread(fd, min(_BLOCK, end - begin), begin)
            if not block:
                raise OSError(f"the file ends at byte {begin}, before its rows do")
            self.update(block)
            begin += len(block)

    def combine(self, value: int, size: int) -> None:
        """Go on with `size` bytes that have the checksum `value`."""
        self._value = combine_crc32c(self._value, value, size)
        self._size += size

    def hexdigest(self) -> str:
        return f"{self._value:08x}"

    def stamp(self, header: bytes) -> tuple[bytes, str]:
        """Put the checksum of header and data into the header.

        Args:
            header: as a JSON encoder without spaces writes it, with the digits BLANK; the bytes that this is of follow it.

        Returns:
            The header with the checksum in it, and the checksum.
        """
        whole = Digest()
        whole.update(header)
        whole.combine(self._value, self._size)
        assert header.count(_field(BLANK)) == 1
        return header.replace(_field(BLANK), _field(whole.hexdigest())), whole.hexdigest()


def names_checksum(metadata: Mapping[str, str]) -> bool:
    """Whether one was made: metadata in which one of the two keys is spoilt have had both."""
    return not metadata.keys().isdisjoint(("checksum", "checksum_algorithm"))


def stated_checksum(header: bytes, metadata: Mapping[str, str]) -> tuple[str, Digest] | None:
    """The checksum that a header states, and the digest of what of the header it covers: the data are to be added.

    Args:
        header: its bytes as they stand in the file.
        metadata: what it says.

    Returns:
        None: it states none that is known here.
    """
    stated = metadata.get("checksum")
    if stated is None or metadata.get("checksum_algorithm") != ALGORITHM:
        return None
    digest = Digest()
    if metadata.get("format_version") not in _DATA_ONLY:
        # No other text in it looks so: inside a JSON string each quotation mark has a backslash before it.
        digest.update(header.replace(_field(stated), _field(BLANK)))
    return stated, digest


def _field(digits: str) -> bytes:
    return f'"checksum":"{digits}"'.encode()


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

    def finish(self, fd: int, end: int, rest: memoryview) -> Digest:
        """The digest of the file's bytes [begin, end) followed by `rest`. No write may be in flight.

        Args:
            fd: the file, for reading.
            end: where the bytes end that count; what was written behind it does not.
            rest: bytes that will stand there.

        Raises:
            OSError: a part had to be read and could not be.
        """
        digest, position = Digest(), self._begin
        for begin in self._begins:
            part_end, checksum = self._parts[begin]
            if part_end > end:
                break
            digest.read(fd, position, begin)  # nothing, unless parts overlapped
            digest.combine(checksum, part_end - begin)
            position = part_end
        digest.read(fd, position, end)
        digest.update(rest)
        return digest
