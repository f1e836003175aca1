"""When the request arrived whose rows, or whose reason, are published under a name."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_regular
from vllm_ascend_hsx.protocol.format import ARRIVED, FormatError, arrived_ns_of, read_header
from vllm_ascend_hsx.protocol.names import INDEX, TAR
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, age, decode, split_lines
from vllm_ascend_hsx.protocol.strict_json import is_count, parse
from vllm_ascend_hsx.sinks.shard_clock import REST, Allowance, identity, open_indexes, pieces_backwards, read_before, warn_once

_SKEW_NS = 10 * 10**9  # by which the clocks of two machines may differ
# By directory and index: inode and size of one that had more to read than is allowed.
_left_out: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}


def arrival_of_file(dir_fd: int, name: str, offset: int = 0, size: int | None = None) -> int | None:
    """Return when the request of a file in a directory arrived, in nanoseconds since the epoch.

    None if there is no file, or it does not tell. Raises OSError if it cannot be read.

    Args:
        dir_fd: the directory.
        name: of the file.
        offset, size: of the rows in it; see read_header.
    """
    with suppress(FileNotFoundError, NotAFileError, FormatError):
        fd = open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            return arrived_ns_of(read_header(fd, offset, size).metadata)
        finally:
            os.close(fd)
    return None


def arrival_of_error(dir_fd: int, name: str) -> int | None:
    """Return the same for the file of a reason."""
    with suppress(FileNotFoundError, NotAFileError, ValueError):
        said = parse(read_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd))
        arrived_ns = said.get(ARRIVED) if isinstance(said, dict) else None
        return arrived_ns if is_count(arrived_ns) else None
    return None


def arrival_of_member(dir_fd: int, name: str, since_ns: int) -> int | None:
    """Return the same for the newest member of a name in the directory's shards.

    Members from before `since_ns` are not looked for.
    """
    found = newest_member(dir_fd, name, since_ns)
    return None if found is None else arrival_of_file(dir_fd, found[0] + TAR, found[1].offset, found[1].size)


def newest_member(dir_fd: int, name: str, since_ns: int) -> tuple[str, Member] | None:
    """Return the newest line of `name` in a directory's indexes since then, and its shard's stem.

    None if there is none, or it hides the members before it. Reads only the ends of indexes that
    have changed since. Raises OSError if the directory or one of them cannot be read.
    """
    since_ns -= _SKEW_NS
    left_out = _left_out.setdefault(identity(dir_fd), {})

    def unread(index: str, status: os.stat_result) -> int:
        # Its owner can choose mtime, and a new mode changes ctime, which not every filesystem has.
        is_new = min(status.st_mtime_ns, status.st_ctime_ns or status.st_mtime_ns) >= since_ns
        return status.st_size - read_before(left_out.get(index), status) if is_new else 0

    text = json.dumps(name).encode("ascii")
    found: list[tuple[str, Member | Tombstone]] = []
    allowance = Allowance()
    for index, fd, status in open_indexes(dir_fd, unread):
        at, floor = status.st_size, read_before(left_out.get(index), status)
        for begin, piece in pieces_backwards(fd, at, floor, allowance):
            at = begin
            if text in piece:
                lines = [line for line in map(decode, split_lines(piece)) if line is not None and line.name == name]
                found += [(index.removesuffix(INDEX), line) for line in lines if line.time_ns >= since_ns]
            oldest = decode(piece[: piece.find(b"\n")])
            if oldest is not None and oldest.time_ns < since_ns:
                break
        else:
            if at > floor:
                warn_once(dir_fd, index, REST)
                left_out[index] = status.st_ino, status.st_size
    if not found:
        return None
    stem, newest = max(found, key=lambda each: age(each[1]))
    return None if isinstance(newest, Tombstone) else (stem, newest)
