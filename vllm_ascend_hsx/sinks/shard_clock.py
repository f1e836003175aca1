"""What a server reads of the indexes in a directory, and the times of the lines that it adds."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_bytes
from vllm_ascend_hsx.protocol.names import INDEX, MANIFEST, REMOVED, parse_shard_name, shard_stem, token_of_workspace
from vllm_ascend_hsx.protocol.shard_index import LATEST_NS, LONGEST_LINE, decode

logger = logging.getLogger(__name__)

# Of opening an index: it is gone, no file, another user's, or leased by another process.
_UNREADABLE = (FileNotFoundError, NotAFileError, PermissionError, BlockingIOError)
_CHUNK = 1 << 16
_LOOK_MAX = 64 << 20  # bytes of all indexes of a directory, beside an end of each, that are read at a time
REST = "%s has more to read than a server writes in that time: what is in it now may be left out, and what is added will be read"
_warned: set[tuple[tuple[int, int], str, str]] = set()  # directory, index and problem
_DIGITS = len(str(LATEST_NS))  # of all times after 2001


class ShardClock:
    """Dates the lines that a server adds. Not thread-safe.

    Clocks of machines differ, and may be set back, so a line that must be later than others is
    later than all that can be seen: the end of each index that was there at first, all of the
    list of removed members, which has no order, and every line since. An index that cannot be
    opened is left out.

    Args:
        dir_fd: the directory. All methods raise OSError if it, or an index, cannot be read.
    """

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd
        self._latest = time.time_ns()
        self._latest_index = ""
        self._read: dict[str, tuple[int, int]] = {}  # by index: inode, and bytes of lines that were read
        self._sizes: dict[str, tuple[int, int]] = {}  # by index: inode and size at that time
        self._look(ends=True)

    def next_ns(self, may_have_others: bool) -> int:
        """Return a time after that of all earlier lines of this server.

        Args:
            may_have_others: whether others may have added a line of the same name, which it must
                be later than, too.
        """
        self._latest = max(self._latest, time.time_ns() - 1)
        if may_have_others:
            self._look()
            if self._latest + 1 >= LATEST_NS:
                reason = f"{self._latest_index} has a line from the distant future, none fits after it; servers need another directory"
                raise OSError(errno.EOVERFLOW, reason)
        self._latest = min(self._latest + 1, LATEST_NS - 1)
        return self._latest

    def _look(self, ends: bool = False) -> None:
        """Read what was added to the indexes. `ends`: only the end of each."""

        def unread(index: str, status: os.stat_result) -> int:
            if self._sizes.get(index) == (status.st_ino, status.st_size):
                return 0
            return status.st_size - read_before(self._read.get(index), status)

        allowance = Allowance()
        for index, fd, status in open_indexes(self._dir_fd, unread):
            at, floor = status.st_size, read_before(self._read.get(index), status)
            position = None  # where the line begins that is still being written
            for at, piece in pieces_backwards(fd, status.st_size, floor, allowance):
                lines = piece[: piece.rfind(b"\n") + 1]
                position = at + len(lines) if position is None else position
                if (latest := _latest_in(lines, self._latest)) > self._latest:
                    self._latest, self._latest_index = latest, index
                if ends and index != REMOVED:
                    break
            else:
                if at > floor:
                    warn_once(self._dir_fd, index, REST)
            self._sizes[index] = status.st_ino, status.st_size
            self._read[index] = status.st_ino, status.st_size if position is None else position


def _latest_in(lines: bytes, latest: int) -> int:
    """Return the latest time in some lines of an index, or `latest` if none is after it.

    A line is decoded only if a key's number is after `latest`. From the end, because servers add
    lines in order of their time.
    """
    digits = b"%d" % latest
    pattern = re.compile(rb":[ \t\r]*(\d{%d,})" % len(digits))  # it begins with a fixed byte, so it is fast
    if len(digits) == _DIGITS and max(pattern.findall(lines), default=b"") <= digits:
        return latest  # as nearly always, so it is found out without a loop
    numbers = list(pattern.finditer(lines))
    begin = len(lines)  # of the line that was decoded last: one may have any number of numbers
    for number in reversed(numbers):
        if number.start() >= begin or len(number[1]) > _DIGITS or int(number[1]) <= latest:
            continue
        begin = lines.rfind(b"\n", 0, number.start()) + 1
        line = decode(lines[begin : lines.find(b"\n", begin)])
        if line is not None:
            latest = max(latest, line.time_ns)
    return latest


def open_indexes(dir_fd: int, unread: Callable[[str, os.stat_result], int]) -> Iterator[tuple[str, int, os.stat_result]]:
    """Open those of a directory's indexes of which something is to be read, one after the other.

    Those with little come first: they are servers', and what no server wrote may be large. An index
    that is sealed is final, so its status is looked up once.

    Args:
        dir_fd: the directory.
        unread: returns the bytes of an index that are to be read.

    Yields:
        Its name, its descriptor, which is closed when the next one is opened, and its status.
    """
    sizes: list[tuple[int, str]] = []
    indexes, final = _indexes(dir_fd)
    for index in [*indexes, REMOVED]:
        with suppress(*_UNREADABLE):
            status = final.get(index)
            size = unread(index, status or os.stat(index, dir_fd=dir_fd, follow_symlinks=False))
            if size > 0 or (status is None and index in final):
                sizes.append((size, index))
    for _, index in sorted(sizes):
        with suppress(*_UNREADABLE):
            fd = open_regular(index, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
            try:
                status = os.fstat(fd)
                if index in final:
                    final[index] = status  # of what is open: NFS may have told an older one of the name
                if unread(index, status) > 0:
                    yield index, fd, status
            finally:
                os.close(fd)


def warn_once(dir_fd: int, index: str, problem: str) -> None:
    """Log a problem of an index, however often it is met."""
    if (key := (identity(dir_fd), index, problem)) not in _warned:
        _warned.add(key)
        logger.warning(problem, index)


def read_before(read: tuple[int, int] | None, status: os.stat_result) -> int:
    """Return how much of an index was read when it had an inode and a size: 0 if it is another."""
    return read[1] if read is not None and read[0] == status.st_ino and read[1] <= status.st_size else 0


def identity(dir_fd: int) -> tuple[int, int]:
    """Return device and inode of a directory."""
    status = os.fstat(dir_fd)
    return status.st_dev, status.st_ino


class _Listing(NamedTuple):
    """A directory's indexes.

    Attributes:
        indexes: their names.
        final: the status of those that are sealed, or None before it was looked up.
        last: each server's last number, or -1.
        until: when this is old.
    """

    indexes: list[str]
    final: dict[str, os.stat_result | None]
    last: dict[str, int]
    until: float


# By device and inode: what was found last, to be used again if that took so long that a request
# must not wait for it each time.
_listings: dict[tuple[int, int], _Listing] = {}
_SLOW_S = 0.01
_USED_FOR = 20  # times as long as the listing took
_LONGEST_S = 10.0
_MADE_MEANWHILE = 32  # most shards that a server makes during a listing


def _indexes(dir_fd: int) -> tuple[list[str], dict[str, os.stat_result | None]]:
    """Return a directory's indexes, and what is known of those that are sealed. Raises OSError.

    Directories of many names are listed rarely. In between, a new shard of a server that was seen
    is found by its number. That of a server which has started since may be missed for some seconds.
    """
    directory = identity(dir_fd)
    listing, now = _listings.get(directory), time.monotonic()
    if listing is None or now >= listing.until:
        before = listing or _Listing([], {}, {}, 0.0)
        found, sealed, last = _list(dir_fd)
        # What was made meanwhile may be missing, although what was made after it is not.
        for token, latest in last.items():
            numbers = range(max(before.last.get(token, -1) + 1, latest - _MADE_MEANWHILE), latest)
            missing = {shard_stem(token, number) + INDEX for number in numbers}.difference(found)
            found += [index for index in missing if _exists(dir_fd, index)]
        seconds = time.monotonic() - now
        until = 0.0 if seconds < _SLOW_S else now + min(_LONGEST_S, _USED_FOR * seconds)
        listing = _listings[directory] = _Listing(found, {index: before.final.get(index) for index in sealed}, last, until)
        return listing.indexes, listing.final
    found, last = list(listing.indexes), dict(listing.last)
    for token in listing.last:
        while _exists(dir_fd, name := shard_stem(token, last[token] + 1) + INDEX):
            found.append(name)
            last[token] += 1
    _listings[directory] = listing._replace(indexes=found, last=last)
    return found, listing.final


def _list(dir_fd: int) -> tuple[list[str], set[str], dict[str, int]]:
    """Return a directory's indexes, those that are sealed, and each server's last number, or -1."""
    found: list[str] = []
    sealed: set[str] = set()
    last: dict[str, int] = {}
    # Threads that list a directory through one descriptor, or a duplicate, share its position in it
    # and miss names.
    own_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        names = {name for name in os.listdir(own_fd) if name.startswith(("hsx-", ".hsx-"))}
    finally:
        os.close(own_fd)
    for name in names:
        if name.endswith(INDEX) and (parts := parse_shard_name(name)) is not None:
            stem, token, _ = parts
            found.append(name)
            if stem + MANIFEST in names:
                sealed.add(name)
            last[token] = max(last.get(token, -1), int(stem.rpartition("-")[2]))
        elif (token_of := token_of_workspace(name)) is not None:
            last.setdefault(token_of, -1)
    return found, sealed, last


def _exists(dir_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@dataclass
class Allowance:
    """Bytes that one look at a directory may read of its indexes, beside an end of each."""

    left: int = _LOOK_MAX


def pieces_backwards(fd: int, end: int, floor: int, allowance: Allowance) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines of an index, between two positions, in pieces and where each begins.

    The last piece comes first, and may end with a line that is still being written. Ends early at
    what no server writes: too long a line, or more than is allowed. Raises OSError.
    """
    begin, content = end, b""
    while begin > floor and (begin == end or allowance.left > 0) and len(content) <= LONGEST_LINE:
        # As much again as was left over, so that a line of any length is copied a few times only.
        begin, until = max(floor, begin - max(_CHUNK, len(content))), begin
        allowance.left -= until - begin if until < end else 0
        content = read_bytes(fd, until - begin, begin) + content
        first = content.find(b"\n") + 1 or len(content) if begin > floor else 0  # of the first whole line
        whole, content = content[first:], content[:first]
        if whole:
            yield begin + first, whole
