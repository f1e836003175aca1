"""Create and compare headers of tar members whose data begin at a page."""

from __future__ import annotations

import struct

from vllm_ascend_hsx.protocol.files import read_bytes
from vllm_ascend_hsx.protocol.format import PAGE

BLOCK = 512
END = bytes(2 * BLOCK)
_LARGEST = 8**11 - 1  # the largest size that a ustar header can hold
# name, mode, uid, gid, size, mtime, checksum, type, linkname, magic and version; the rest is zeros
_FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s8s247x")
_MODE, _SIZE, _MTIME, _CHECKSUM = slice(100, 107), slice(124, 135), slice(136, 147), slice(148, 156)
_NAME_BYTES = 100
_SHORTEST_COMMENT = 16  # bytes of a record; the record begins with the length


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def headers(start: int, name: str, size: int, mode: int, mtime: int) -> bytes:
    """Return a pax header and a ustar header. A pax comment fills the space up to a page.

    Args:
        start: offset of the headers in the tar file, a multiple of 512.
        name: path of the member.
        size: bytes of the data. They begin at `start` plus the length of the headers.
        mode: permissions of the member.
        mtime: seconds since the epoch.
    """
    records = _record("path", name) + _record("size", str(size))
    room = 2 * BLOCK + len(records) + _SHORTEST_COMMENT
    length = round_up(start + room, PAGE) - start - 2 * BLOCK
    comment = f"{length - len(records)} comment=".encode()
    records += comment.ljust(length - len(records) - 1) + b"\n"
    return (
        _block("././@PaxHeader", length, mode, mtime, b"x")
        + records
        + _block(name, size, mode, mtime)
    )


def is_headed(fd: int, offset: int, name: str, size: int, start: int | None = None) -> bool:
    """Return whether the member whose data begin at `offset` has this name and size.

    Args:
        fd: the tar file.
        offset: offset of the member's data.
        name, size: as for `headers`.
        start: required offset of the headers; None compares the ustar header alone.

    Raises:
        OSError: if the file cannot be read.
    """
    block = read_bytes(fd, BLOCK, max(0, offset - BLOCK))
    try:
        mode, mtime = int(block[_MODE], 8), int(block[_MTIME], 8)
    except ValueError:
        return False
    if start is None:
        return block == _block(name, size, mode, mtime)
    expected = headers(start, name, size, mode, mtime)
    return start + len(expected) == offset and read_bytes(fd, len(expected), start) == expected


def end_of_member(fd: int, start: int) -> int | None:
    """Return the end of the member with headers at `start`, even if the data are incomplete.

    Return None if the headers are incomplete, or the member is too large for a ustar header. Raises
    OSError if the file cannot be read.
    """
    try:
        data = start + 2 * BLOCK + int(read_bytes(fd, BLOCK, start)[_SIZE], 8)
        size = int(read_bytes(fd, BLOCK, data - BLOCK)[_SIZE], 8)
    except ValueError:
        return None
    return data + round_up(size, BLOCK) if size and not data % PAGE else None


def _block(name: str, size: int, mode: int, mtime: int, kind: bytes = b"0") -> bytes:
    """Return a ustar header. Values that do not fit are in the pax header before it."""
    block = bytearray(
        _FIELDS.pack(
            name.encode("ascii", "replace")[-_NAME_BYTES:].lstrip(b"/"), b"%07o" % mode, b"%07o" % 0, b"%07o" % 0,
            b"%011o" % (size if size <= _LARGEST else 0), b"%011o" % mtime, b" " * 8, kind, b"", b"ustar\x0000",
        )
    )  # fmt: skip
    block[_CHECKSUM] = b"%06o\0 " % sum(block)
    return bytes(block)


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while len(str(length)) + len(rest) > length:
        length += 1
    return str(length).encode() + rest
