"""Find requests in the shards of a directory, reading only new lines of the indexes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.protocol.files import (
    LEADS_NOWHERE,
    Naming,
    NotAFileError,
    again_if_stale,
    open_regular,
    opened,
    read_bytes,
    read_regular,
    write_at,
)
from vllm_ascend_hsx.protocol.format import TOKEN_IDS, Header, valid_unicode
from vllm_ascend_hsx.protocol.names import (
    INDEX,
    MANIFEST,
    REMOVED,
    TAR,
    parse_shard_name,
    printable,
)
from vllm_ascend_hsx.protocol.shard_index import (
    INDEX_MAX,
    REMOVED_MAX,
    Member,
    Tombstone,
    decode,
    encode,
)
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.protocol.tar import is_headed

logger = logging.getLogger(__name__)

_BLOCK = 16 << 20
# A new name may not change the directory's mtime within one tick of the filesystem's clock.
_TICK_NS = 2_000_000_000
_REMOVED = REMOVED.removesuffix(INDEX)
_QUOTED = 100  # bytes of an invalid line
_LOCK_TIMEOUT_S = 10.0  # for the list of removed members; others lock it for microseconds
_LONGEST_PAUSE_S = 0.05


class UnreadableIndexError(PermissionError):
    """The requested rows may be in an index that this user may not read."""

    def __init__(self, path: Path) -> None:
        remedy = "let this user read it (the server's option file_mode), or run as its owner"
        problem = f"{os.strerror(errno.EACCES)}; rows may be in this index: {remedy}"
        super().__init__(errno.EACCES, problem, os.fspath(path))


class Place(NamedTuple):
    """A safetensors file inside a larger one.

    Attributes:
        fd: the larger file, open for reading; the caller closes it.
        offset, size: offset and size of the safetensors file, in bytes.
        line: line in the index of a member of a shard, else None.
    """

    fd: int
    offset: int
    size: int
    line: Member | None = None


def member_problem(place: Place, header: Header, line: Member) -> str | None:
    """Return how a member contradicts a line of the index, or None. Raises OSError."""
    for what, said, found in (
        ("tokens", line.tokens, header.tensors[TOKEN_IDS].shape[0]),
        ("request_id", valid_unicode(line.request_id), header.metadata.get("request_id", "")),
        ("checksum", line.checksum, header.metadata.get("checksum", "")),
    ):
        if said != found:
            return (
                f"its index describes another request: {what} is {said!r} in the index, and "
                f"{found!r} in the shard"
            )
    if not is_headed(place.fd, place.offset, line.name, line.size):
        return "its index describes another request: name or size differs in the shard"
    return None


@dataclass
class _Index:
    """Progress of reading one index.

    Attributes:
        identity: device and inode.
        position: number of bytes read.
        seen: size and time of the last change when the index was read.
        lines: number of lines read, including invalid lines.
        sealed: True if all lines were read and none will follow.
    """

    identity: tuple[int, int] = (0, 0)
    position: int = 0
    seen: tuple[int, int] = (0, 0)
    lines: int = 0
    sealed: bool = False


class Shards:
    """The members of all shards in a directory. Thread-safe.

    A member is found as soon as an index has the line, in sealed and unsealed shards. A server
    refuses a name that has a member, so two members have one name only if their servers could not
    see each other's members. Readers take the last published member by the servers' clocks, and
    `remove` hides both. An index that this user may not read is skipped, and is an error only if it
    may have a requested name. All methods raise OSError if the directory, or an index for another
    reason, cannot be read.

    Args:
        directory: the directory of the shards.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._mutex = threading.Lock()
        # By index and identity: the position up to which invalid lines were logged.
        self._reported: dict[tuple[str, object], int] = {}
        self._forget()

    def find(self, name: str) -> tuple[Path, Member] | None:
        """Return the tar file and the line of the member that has a name, or None.

        Raises UnreadableIndexError if no member ever had the name, and an index may not be read.
        """
        found = max(self._all_of(name), key=_age, default=None)
        return None if found is None else (self.directory / f"{found[0]}{TAR}", found[1])

    def members(self, on_unreadable: Callable[[OSError], None] | None = None) -> dict[str, Member]:
        """Return all members by name, sorted.

        `on_unreadable` is called for each index that may not be read. Without it the first of these
        indexes raises UnreadableIndexError.
        """
        with self._mutex:
            self._refresh()
            found = {
                name: max(all_, key=_age)[1]
                for name in sorted(self._members)
                if (all_ := self._present(name))
            }
            unreadable = list(self._unreadable.values())
        for each in unreadable:
            if on_unreadable is None:
                raise UnreadableIndexError(each)
            on_unreadable(UnreadableIndexError(each))
        # Servers write through no link. With a link, `load` and `remove` would leave the directory.
        linked = {
            folder
            for folder in {os.path.dirname(name) for name in found}
            if self._is_linked(folder)
        }
        return (
            {name: line for name, line in found.items() if os.path.dirname(name) not in linked}
            if linked
            else found
        )

    def remove(self, name: str) -> bool:
        """Hide the members of a name from all readers. Return whether there was a member.

        The bytes stay in the shards. Several processes may remove members at once. Raises OSError
        if the removal cannot be recorded, and TimeoutError if another process holds the lock of the
        list. Also raises like `find`.
        """
        lines = [
            encode(Tombstone(name, stem, member.offset)) for stem, member in self._all_of(name)
        ]
        if not lines:
            return False
        with opened(
            self.directory / REMOVED, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666
        ) as fd:
            _lock(fd, self.directory / REMOVED)  # some filesystems do not append atomically
            size = os.fstat(fd).st_size
            if size >= REMOVED_MAX:
                problem = (
                    f"the list of removed members has {size} bytes, and the limit is "
                    f"{REMOVED_MAX}; write to a new directory"
                )
                raise OSError(errno.EFBIG, problem)
            if size and os.pread(fd, 1, size - 1) != b"\n":  # end a torn line first
                lines.insert(0, b"\n")
            write_at(fd, memoryview(b"".join(lines)), size)
        return True

    def _all_of(self, name: str) -> list[tuple[str, Member]]:
        """Return the members of a name, each with the stem of its shard. Raises like `find`."""
        with self._mutex:
            self._refresh()
            if name not in self._members and self._unreadable:
                raise UnreadableIndexError(next(iter(self._unreadable.values())))
            return self._present(name)

    def _present(self, name: str) -> list[tuple[str, Member]]:
        """Return the members of a name that were not removed. The caller holds the mutex."""
        return [
            each
            for each in self._members.get(name, ())
            if (each[0], each[1].offset) not in self._removed
        ]

    def _is_linked(self, folder: str) -> bool:
        """Return whether the path of a folder below the directory has a symbolic link."""
        return any(
            os.path.islink(self.directory / part)
            for part in accumulate(Path(folder).parts, os.path.join)
        )

    def _forget(self) -> None:
        self._indexes: dict[str, _Index] = {}
        self._unreadable: dict[str, Path] = {}
        self._members: dict[str, tuple[tuple[str, Member], ...]] = {}  # by name, with their stems
        self._removed: set[tuple[str, int]] = set()  # stem and offset
        self._listed: tuple[int, int, int] | None = None
        self._checked = 0

    def _refresh(self) -> None:
        """Read new lines; read everything again if an index was removed, replaced or truncated."""
        if not self._update():
            self._forget()
            self._update()

    def _update(self) -> bool:
        return self._list() and all(
            [self._read(stem, index) for stem, index in self._indexes.items()]
        )

    def _list(self) -> bool:
        """Add new indexes and manifests; return False if an index that was read is missing."""
        now = time.time_ns()
        status = again_if_stale(os.stat, self.directory)
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if state == self._listed and self._checked - status.st_mtime_ns > _TICK_NS:
            return True
        found, sealed = set(), set()
        with again_if_stale(os.scandir, self.directory) as entries:
            for entry in entries:
                stem, _, suffix = parse_shard_name(entry.name) or (
                    _REMOVED,
                    "",
                    INDEX if entry.name == REMOVED else "",
                )
                if suffix == INDEX:
                    found.add(stem)
                elif suffix == MANIFEST:
                    sealed.add(stem)
        self._listed, self._checked = state, now
        for stem in sorted(found):
            # An index with a manifest is final, so a read from now on is complete.
            index = self._indexes.setdefault(stem, _Index())
            if stem in sealed and not index.sealed and self._read(stem, index):
                index.sealed = index.sealed or self._is_whole(stem, index)
        return self._indexes.keys() <= found

    def _is_whole(self, stem: str, index: _Index) -> bool:
        """Return whether all lines in the manifest were read: it may be copied before the index."""
        try:
            count = parse(read_regular(self.directory / f"{stem}{MANIFEST}"))["index_lines"]
            return isinstance(count, int) and index.lines >= count
        except (OSError, ValueError, TypeError, KeyError):  # `hsx verify` reports it
            return False

    def _read(self, stem: str, index: _Index) -> bool:
        """Read the new lines of an index; return False if it was removed, replaced or truncated."""
        if index.sealed:
            return True
        path = self.directory / f"{stem}{INDEX}"
        self._unreadable.pop(stem, None)
        try:
            fd = self._open(stem, path)
        except FileNotFoundError:
            return False
        if fd is None:
            return True
        try:
            with Naming(path):
                return self._read_lines(stem, index, path.name, fd)
        finally:
            os.close(fd)

    def _open(self, stem: str, path: Path) -> int | None:
        """Open an index. Return None if it cannot be read; the problem is recorded.

        Raises:
            FileNotFoundError: it was removed.
            OSError: the directory cannot be read.
        """
        try:
            return open_regular(path)
        except PermissionError:
            if stem == _REMOVED:  # without it, removed members would appear again
                raise
            self._unreadable[stem] = path
        except NotAFileError as error:
            self._report(stem, error.strerror, 0, error.reason)
        except OSError as error:
            if error.errno not in LEADS_NOWHERE or not os.path.islink(path):
                raise
            self._report(stem, error.errno, 0, f"{path.name} is a broken symbolic link")
        return None

    def _read_lines(self, stem: str, index: _Index, name: str, fd: int) -> bool:
        """Read the new lines of an open index; return False if it was replaced or truncated."""
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino)
        if not index.position:
            index.identity = identity
        if index.identity != identity or status.st_size < index.position:
            return False
        seen = (status.st_size, status.st_ctime_ns)
        if seen == index.seen:
            return True
        end, most = status.st_size, REMOVED_MAX if stem == _REMOVED else INDEX_MAX
        if end > most:
            problem = f"{name} has {end} bytes, more than the limit of {most}"
            self._report(stem, identity, 0, problem)
            if stem != _REMOVED:
                return True
            end = most  # the removals in these lines stay
        while index.position < end:
            block = read_bytes(fd, min(_BLOCK, end - index.position), index.position)
            lines = block[: block.rfind(b"\n") + 1]
            if not lines and len(block) < _BLOCK:  # the last line is still being written
                break
            # A line longer than a block is skipped; the end of the line is invalid.
            self._take(stem, index, lines)
            index.position += len(lines or block)
            index.lines += lines.count(b"\n")
        index.seen = seen
        return True

    def _take(self, stem: str, index: _Index, lines: bytes) -> None:
        """Record the members and tombstones of valid lines, and report invalid lines."""
        bad = []
        for text in lines.split(b"\n")[:-1]:
            line = decode(text)
            if line is None or isinstance(line, Tombstone) != (stem == _REMOVED):
                bad.append(text)
            elif isinstance(line, Tombstone):
                self._removed.add((line.stem, line.offset))
            else:
                self._members[line.name] = (*self._members.get(line.name, ()), (stem, line))
        if bad:
            problem = f"{stem}{INDEX}: {len(bad)} lines from byte {index.position} on are invalid"
            # Do not quote through a link: it may lead to a file that only this process may read.
            if not (self.directory / f"{stem}{INDEX}").is_symlink():
                problem += f", first {bad[0][:_QUOTED].decode('utf-8', 'replace')!a}"
            self._report(stem, index.identity, index.position, problem)

    def _report(self, stem: str, identity: object, position: int, problem: str) -> None:
        """Log a problem once, however often the index is read."""
        if self._reported.get((stem, identity), -1) < position:
            self._reported[stem, identity] = position
            logger.warning("%s: %s", printable(str(self.directory)), problem)


def _age(found: tuple[str, Member]) -> tuple[int, str]:
    """Return a sort key for a member and the stem of its shard: the newest member comes last."""
    return found[1].time_ns, found[0]


def _lock(fd: int, path: Path) -> None:
    """Lock a file that other processes lock only for a moment. Raises TimeoutError.

    Polls, because a blocking flock has no timeout.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    pause = 0.001
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                problem = f"another process has held its lock for {_LOCK_TIMEOUT_S:g} seconds"
                raise TimeoutError(errno.ETIMEDOUT, problem, os.fspath(path)) from None
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
