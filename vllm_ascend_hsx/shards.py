"""Finds requests in the shards of a directory: by the lines of their indexes, of which only new ones are read again."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.sinks.names import MAX_DEPTH
from vllm_ascend_hsx.sinks.shard_index import (
    INDEX,
    MANIFEST,
    REMOVED,
    SHARDS_MARK,
    TAR,
    Gone,
    Member,
    decode,
    encode,
    parse_name,
    whole_lines,
)

_BLOCK = 16 << 20
# Names that appear within one tick of a filesystem's clock may leave a directory's time of change as it was.
_TICK_NS = 2_000_000_000


class Place(NamedTuple):
    """A safetensors file inside a larger one.

    Attributes:
        fd: what is open, for reading; the caller closes it.
        offset, size: the bytes that are the file.
    """

    fd: int
    offset: int
    size: int


@dataclass
class _Index:
    """What was read of one index."""

    identity: tuple[int, int]
    position: int = 0
    sealed: bool = False


class Shards:
    """The members of all shards in a directory; may be used by several threads.

    Members are found as soon as their server says that they are complete, whether their shard is sealed or not. Of several with one name
    the one that was published last counts.

    Args:
        directory: where the shards are.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._mutex = threading.Lock()
        self._forget()

    def find(self, name: str) -> Member | None:
        """The member of a name (a path below the directory), or None. Raises OSError: the directory or an index cannot be read."""
        with self._mutex:
            self._refresh()
            found = self._newest.get(name)
            return found[1] if found is not None and isinstance(found[1], Member) else None

    def members(self) -> dict[str, Member]:
        """All members by name, in the order of their names. Raises OSError: the directory or an index cannot be read."""
        with self._mutex:
            self._refresh()
            return {name: line for name, (_, line) in sorted(self._newest.items()) if isinstance(line, Member)}

    def open(self, name: str) -> Place | None:
        """Open a member for reading; None: there is none of this name. Raises OSError: its shard cannot be opened."""
        with self._mutex:
            self._refresh()
            stem, line = self._newest.get(name, ("", None))
        if not isinstance(line, Member):
            return None
        return Place(os.open(self.directory / f"{stem}{TAR}", os.O_RDONLY | os.O_CLOEXEC), line.offset, line.size)

    def remove(self, name: str) -> bool:
        """Have no reader see the member of this name any more; its bytes stay in the shard. Several processes may do so at a time.

        Returns:
            Whether there was one.

        Raises:
            OSError: it could not be noted.
        """
        member = self.find(name)
        if member is None:
            return False
        fd = os.open(self.directory / REMOVED, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # not every filesystem appends in one go
            # Its own time: whatever clocks say, it goes, and a later one of this name is seen.
            line = encode(Gone(name, member.time_ns))
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), REMOVED)
        finally:
            os.close(fd)
        return True

    def path_of(self, name: str) -> Path | None:
        """The shard that a member is in, as of the last look at the indexes."""
        with self._mutex:
            stem, line = self._newest.get(name, ("", None))
            return self.directory / f"{stem}{TAR}" if isinstance(line, Member) else None

    def _forget(self) -> None:
        self._indexes: dict[str, _Index] = {}
        self._newest: dict[str, tuple[str, Member | Gone]] = {}
        self._listed: tuple[int, int, int] | None = None
        self._checked = 0

    def _refresh(self) -> None:
        """Read what is new. An index that has gone or been replaced makes all others be read anew."""
        if not self._list() or not all(self._read(stem, index) for stem, index in self._indexes.items()):
            self._forget()
            self._list()
            for stem, index in list(self._indexes.items()):
                if not self._read(stem, index):
                    del self._indexes[stem]  # taken away at this moment

    def _list(self) -> bool:
        """Take note of new indexes and manifests. False: an index that was read has gone."""
        now = time.time_ns()
        status = os.stat(self.directory)
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if state == self._listed and self._checked - status.st_mtime_ns > _TICK_NS:
            return True
        found, sealed = set(), set()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                parts = parse_name(entry.name)
                if entry.name == REMOVED:
                    found.add(REMOVED.removesuffix(INDEX))
                elif parts is not None and parts[2] == INDEX:
                    found.add(parts[0])
                elif parts is not None and parts[2] == MANIFEST:
                    sealed.add(parts[0])
        self._listed, self._checked = state, now
        if not self._indexes.keys() <= found:
            return False
        for stem in sorted(found):
            # An index is whole when its manifest is there: what is read from now on is all of it.
            index = self._indexes.setdefault(stem, _Index((0, 0)))
            if stem in sealed and not index.sealed:
                index.sealed = self._read(stem, index)
        return True

    def _read(self, stem: str, index: _Index) -> bool:
        """Read what was added to an index. False: it is not there, or is another one than before."""
        if index.sealed:
            return True
        try:
            fd = os.open(self.directory / f"{stem}{INDEX}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(fd)
            identity = (status.st_dev, status.st_ino)
            if index.position == 0:
                index.identity = identity
            if identity != index.identity or status.st_size < index.position:
                return False
            while index.position < status.st_size:
                lines = whole_lines(os.pread(fd, _BLOCK, index.position))
                if not lines:  # the last one is being written
                    break
                index.position += len(lines)
                for line in map(decode, lines.splitlines()):
                    if line is not None:
                        self._take(stem, line)
        finally:
            os.close(fd)
        return True

    def _take(self, stem: str, line: Member | Gone) -> None:
        earlier = self._newest.get(line.name)
        if earlier is None or _age(earlier[1]) <= _age(line):
            self._newest[line.name] = (stem, line)


def _age(line: Member | Gone) -> tuple[int, bool]:
    """By which of two lines about a name the later one counts; what is removed has the time of the member."""
    return line.time_ns, isinstance(line, Gone)


_known: dict[str, Shards] = {}
_known_mutex = threading.Lock()


def shards_of(directory: str | Path) -> Shards:
    """The shards of a directory, as they were seen before in this process."""
    key = os.path.abspath(directory)
    with _known_mutex:
        return _known.setdefault(key, Shards(key))


def _forget_mutexes() -> None:
    """In a forked child: another thread may have held them."""
    global _known_mutex
    _known_mutex = threading.Lock()
    _known.clear()


os.register_at_fork(after_in_child=_forget_mutexes)


def _shards_above(path: Path) -> Iterator[tuple[Shards, str]]:
    """Shards in which the file `path` may be, with its name in them."""
    whole = directory = os.path.abspath(path)
    for _ in range(MAX_DEPTH + 1):
        directory, _, name = directory.rpartition("/")
        if not name:
            return
        if os.path.exists(f"{directory}/{SHARDS_MARK}"):
            yield shards_of(directory or "/"), whole[len(directory) + 1 :]


def open_member(path: Path) -> Place | None:
    """Open the member that a file `path` would be, if it is in a shard of a directory above it. Raises OSError: it cannot be read."""
    for shards, name in _shards_above(path):
        with suppress(FileNotFoundError):  # the shard was taken away
            if (place := shards.open(name)) is not None:
                return place
    return None


def remove_member(path: Path) -> bool:
    """Have no reader see the member that a file `path` would be; whether there was one. Raises OSError: it could not be noted."""
    return any([shards.remove(name) for shards, name in _shards_above(path)])


def shard_of(path: Path) -> Path | None:
    """The shard in which a file `path` is a member, or None. Raises OSError: it cannot be read."""
    for shards, name in _shards_above(path):
        if shards.find(name) is not None:
            return shards.path_of(name)
    return None
