"""Headers of tar members whose data begin at a page: made so that any reader of tar walks from one member to the next, and read again."""

from __future__ import annotations

import os
import struct
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.strict_json import is_count

BLOCK = 512
# A member that is none: webdataset passes over names that begin and end so.
HOLE = "__hsx_hole__"
END = bytes(2 * BLOCK)
_LARGEST = 8**11 - 1  # bytes of a member that ustar's field for its size can say
_PAX = "././@PaxHeader"
# name, mode, uid, gid, size, mtime, checksum, type, linkname, magic and version, uname, gname, devmajor, devminor, prefix, padding
_FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s12s")
_CHECKSUM = slice(148, 156)
_OF_MEMBER = (slice(0, 100), slice(124, 136), slice(345, 500))  # name, size, prefix
_NAME_BYTES = 100
_PREFIX_BYTES = 155
_LONGEST_HEADERS = 16 * PAGE  # more than any that we write
_SHORTEST = 16  # bytes of a pax record that says nothing


class Entry(NamedTuple):
    """A member or a hole of a tar file: its headers are bytes [start, offset), its data [offset, offset + size)."""

    name: str
    start: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Where the next one's headers start."""
        return round_up(self.offset + self.size, BLOCK)


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def data_offset(start: int, name: str, size: int) -> int:
    """Where the data of a member stand whose headers start at `start`: at a page, with room for the headers before it."""
    records = len(_records(name, size))
    offset = round_up(start + BLOCK + (BLOCK + round_up(records, BLOCK) if records else 0), PAGE)
    # A single block between two members would be a header of its own.
    return offset + PAGE if offset - start == 2 * BLOCK else offset


def headers(name: str, size: int, room: int, mode: int, mtime: int) -> bytes:
    """The `room` bytes that stand before a member's data: ustar's header in the last block, and a pax header that fills what is before it.

    Args:
        name: path of the member in the archive.
        size: bytes of its data.
        room: bytes up to the data, as data_offset gives it for a member with this name and size or more.
        mode: its permissions.
        mtime: when it was made, in seconds.
    """
    ustar = _ustar(name, size, mode, mtime)
    if room == BLOCK:
        return ustar
    records = _records(name, size)
    length = room - 2 * BLOCK
    if length - len(records) >= _SHORTEST:
        records += _comment(length - len(records))
    return _header(_PAX, len(records), mode, mtime, tarfile.XHDTYPE) + records.ljust(length, b"\0") + ustar


def walk(fd: int) -> Iterator[Entry]:
    """The members and holes of a tar file, in order, up to the first thing that is not one. Raises OSError: it cannot be read."""
    start = 0
    while (entry := _read_entry(fd, start)) is not None:
        yield entry
        start = entry.end


def is_headed(fd: int, offset: int, name: str, size: int) -> bool:
    """Whether the data at `offset` are those of a member with this name and size, by the block before them. Raises OSError."""
    if offset < BLOCK:
        return False
    there, expected = os.pread(fd, BLOCK, offset - BLOCK), _ustar(name, size, 0, 0)
    return all(there[part] == expected[part] for part in _OF_MEMBER)


def _read_entry(fd: int, start: int) -> Entry | None:
    records: dict[str, str] = {}
    position = start
    try:
        info = _read_info(fd, position)
        if info.type == tarfile.XHDTYPE:
            if not 0 <= info.size <= _LONGEST_HEADERS:
                return None
            records = _parse(os.pread(fd, info.size, position + BLOCK))
            position += BLOCK + round_up(info.size, BLOCK)
            info = _read_info(fd, position)
        size = int(records.get("size", info.size))
        # One that did not end behind its start would have the walk go in a circle.
        if info.type != tarfile.REGTYPE or not is_count(size) or not is_count(start + size):
            return None
        return Entry(records.get("path", info.name), start, position + BLOCK, size)
    except (tarfile.HeaderError, ValueError):  # its end, or nothing that was written whole
        return None


def _read_info(fd: int, position: int) -> tarfile.TarInfo:
    return tarfile.TarInfo.frombuf(os.pread(fd, BLOCK, position), "utf-8", "strict")


def _parse(records: bytes) -> dict[str, str]:
    found = {}
    while records:
        length = int(records.split(b" ", 1)[0])
        if not 0 < length <= len(records):
            raise ValueError(f"a pax record of {length} bytes")
        key, _, value = records[:length].decode().partition(" ")[2].rstrip("\n").partition("=")
        found[key] = value
        records = records[length:]
    return found


def _header(name: str, size: int, mode: int, mtime: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The block that tarfile's TarInfo.tobuf makes in ustar's format, in a tenth of the time: four are made of each request."""
    parts = _split(name)
    assert parts is not None, name
    prefix, last = parts
    block = bytearray(_FIELDS.pack(
        last, b"%07o" % mode, b"%07o" % 0, b"%07o" % 0, b"%011o" % size, b"%011o" % mtime, b" " * 8, kind, b"", b"ustar\x0000", b"", b"",
        b"", b"", prefix, b"",
    ))  # fmt: skip
    block[_CHECKSUM] = b"%06o\0 " % sum(block)
    return bytes(block)


@lru_cache(maxsize=64)
def _split(name: str) -> tuple[bytes, bytes] | None:
    """What stands in ustar's fields `prefix` and `name`; None: they have no room for it."""
    try:
        whole = name.encode("ascii")
    except UnicodeEncodeError:
        return None
    if len(whole) <= _NAME_BYTES:
        return b"", whole
    cut = whole.find(b"/", len(whole) - _NAME_BYTES - 1)
    prefix, last = whole[: max(0, cut)], whole[cut + 1 :]
    return (prefix, last) if 0 < len(prefix) <= _PREFIX_BYTES and last else None


def _ustar(name: str, size: int, mode: int, mtime: int) -> bytes:
    if _split(name) is None:  # a pax record has it whole
        name = name.encode("ascii", "replace")[-_NAME_BYTES:].decode().lstrip("/")
    return _header(name, 0 if size > _LARGEST else size, mode, mtime)


def _records(name: str, size: int) -> bytes:
    """What ustar's header has no room for."""
    path = b"" if _split(name) is not None else _record("path", name)
    return path + (_record("size", str(size)) if size > _LARGEST else b"")


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while len(str(length)) + len(rest) > length:
        length += 1
    return str(length).encode() + rest


def _comment(length: int) -> bytes:
    """A record of so many bytes."""
    start = f"{length} comment=".encode()
    return start + b" " * (length - len(start) - 1) + b"\n"
