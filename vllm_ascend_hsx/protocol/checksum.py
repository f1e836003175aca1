"""The checksum of a file, combined from checksums of writes in any order.

It also covers the header that contains the checksum, with zeros in place of the eight digits.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from awscrt.checksums import combine_crc32c, crc32c

ALGORITHM = "crc32c"
BLANK = "0" * 8  # placeholder for the checksum's digits
_BLOCK = 4 << 20
_APART = 1 << 20  # least bytes between two recorded sums of a file's beginning
_DATA_ONLY = ("1", None)  # format versions whose checksum does not cover the header


class Digest:
    """CRC-32C of consecutive bytes, or of parts that were combined.

    Attributes:
        value, size: the checksum, and the number of bytes.
    """

    def __init__(self, value: int = 0, size: int = 0) -> None:
        self.value = value
        self.size = size

    def update(self, data: memoryview | bytes) -> None:
        self.value = crc32c(data, self.value)
        self.size += len(data)

    def read(self, fd: int, begin: int, end: int) -> None:
        """Add a file's bytes [begin, end). Raises OSError if they cannot be read."""
        while begin < end:
            block = os.pread(fd, min(_BLOCK, end - begin), begin)
            if not block:
                raise OSError(
                    errno.EUCLEAN,
                    f"the file was truncated: it ends at byte {begin}, before its last row",
                )
            self.update(block)
            begin += len(block)

    def combine(self, value: int, size: int) -> None:
        """Add `size` bytes with the checksum `value`."""
        self.value = combine_crc32c(self.value, value, size)
        self.size += size

    def hexdigest(self) -> str:
        return f"{self.value:08x}"

    def stamp(self, header: bytes) -> tuple[bytes, str]:
        """Put the checksum of header and data into the header.

        Args:
            header: as written by a JSON encoder without spaces, with the digits BLANK. The bytes of
                this digest follow the header.

        Returns:
            The header with the checksum, and the checksum.
        """
        whole = Digest()
        whole.update(header)
        whole.combine(self.value, self.size)
        assert header.count(_field(BLANK)) == 1
        return header.replace(_field(BLANK), _field(whole.hexdigest())), whole.hexdigest()


def names_checksum(metadata: Mapping[str, str]) -> bool:
    """Return whether a checksum was made, even if one of the two keys is damaged."""
    return not metadata.keys().isdisjoint(("checksum", "checksum_algorithm"))


def stated_checksum(header: bytes, metadata: Mapping[str, str]) -> tuple[str, Digest] | None:
    """Return the checksum that a header states, and a digest of the header to update with the data.

    Return None if the header states no checksum of a known algorithm.

    Args:
        header: bytes of the header in the file.
        metadata: metadata of the header.
    """
    stated = metadata.get("checksum")
    if stated is None or metadata.get("checksum_algorithm") != ALGORITHM:
        return None
    digest = Digest()
    if metadata.get("format_version") not in _DATA_ONLY:
        # No other text in the header can match: inside a JSON string each quotation mark is
        # escaped.
        digest.update(header.replace(_field(stated), _field(BLANK)))
    return stated, digest


def _field(digits: str) -> bytes:
    return f'"checksum":"{digits}"'.encode()


class Checksums:
    """CRC-32C of a file's bytes from `begin` on. Any thread may write parts at any time.

    Checksums are computed while the bytes are in the processor's cache. Only remnants of parts that
    were overwritten or truncated are read from the file when the digest is requested.

    Args:
        begin: file offset of the first byte that counts.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._mutex = threading.Lock()
        self._begins: list[int] = []  # of the parts, ascending; parts do not overlap
        self._parts: dict[int, tuple[int, int]] = {}  # end and checksum by offset
        self.sums: list[tuple[int, int]] = []  # set by `finish`: length and checksum of each prefix

    def begin_write(self, offset: int, num_bytes: int) -> None:
        """Drop the checksums of bytes that are about to be written.

        No other write of these bytes may be in flight.
        """
        end = offset + num_bytes
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

    def end_write(self, offset: int, digest: Digest) -> None:
        """Record that bytes with this digest are in the file."""
        if digest.size:
            with self._mutex:
                insort(self._begins, offset)
                self._parts[offset] = (offset + digest.size, digest.value)

    def finish(self, fd: int, end: int, rest: memoryview) -> Digest:
        """Return the digest of the file's bytes [begin, end) followed by `rest`.

        No write may be in flight. Raises OSError if a part had to be read and could not be.
        """
        digest, position = Digest(), self._begin
        for begin in self._begins:
            part_end, checksum = self._parts[begin]
            if part_end > end:
                break
            digest.read(fd, position, begin)  # empty, unless parts overlapped
            digest.combine(checksum, part_end - begin)
            position = part_end
            if position - self._begin >= (self.sums[-1][0] if self.sums else 0) + _APART:
                self.sums.append((digest.size, digest.value))
        digest.read(fd, position, end)
        self.sums.append((digest.size, digest.value))
        digest.update(rest)
        return digest


def digest_of_beginning(fd: int, offset: int, size: int, sums: Sequence[tuple[int, int]]) -> Digest:
    """Read `size` bytes of a file from `offset` on, and return their digest.

    Args:
        sums: sums of prefixes of the bytes from `offset` on, as in Checksums, ascending. The last
            prefix has `size` bytes or more.

    Raises:
        OSError: if the bytes cannot be read, or were changed after the sums were made.
    """
    digest = Digest()
    for end, value in sums:
        digest.read(fd, offset + digest.size, offset + min(end, size))
        known = Digest(digest.value, digest.size)
        known.read(fd, offset + known.size, offset + end)
        if known.value != value:
            raise OSError(errno.EUCLEAN, "the file was changed after it had been published")
        if end >= size:
            return digest
    raise AssertionError(f"no sum of {size} bytes")


def unverifiable(metadata: Mapping[str, str]) -> str:
    """Return the reason why the checksum of a file cannot be compared."""
    algorithm = metadata.get("checksum_algorithm")
    return (
        f"it cannot be verified: its metadata has no {ALGORITHM} checksum (checksum_algorithm is "
        f"{algorithm})"
    )
