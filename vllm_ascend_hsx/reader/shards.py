"""Find requests in the shards of a directory. Only new lines of their indexes are read."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.protocol.files import LEADS_NOWHERE, NotAFileError, open_regular
from vllm_ascend_hsx.protocol.format import TOKEN_IDS, Header, valid_unicode
from vllm_ascend_hsx.protocol.names import INDEX, MANIFEST, REMOVED, TAR, parse_shard_name
from vllm_ascend_hsx.protocol.shard_index import INDEX_MAX, Member, Tombstone, decode, encode, split_lines
from vllm_ascend_hsx.protocol.tar import is_headed

logger = logging.getLogger(__name__)

_BLOCK = 16 << 20
# A name that appears within one tick of the filesystem's clock may leave the directory's mtime.
_TICK_NS = 2_000_000_000
_REMOVED = REMOVED.removesuffix(INDEX)
_QUOTED = 100  # bytes of an invalid line
_LOCK_TIMEOUT_S = 10.0  # for the list of removed members, which others lock for microseconds
_LONGEST_PAUSE_S = 0.05


class Place(NamedTuple):
    """A safetensors file inside a larger one.

    Attributes:
        fd: the larger file, open for reading; the caller closes it.
        offset, size: the bytes of the safetensors file.
        line: its line in the index, if it is a member of a shard.
    """

    fd: int
    offset: int
    size: int
    line: Member | None = None


def member_problem(place: Place, header: Header, line: Member) -> str | None:
    """Return how a member contradicts its line of the index, or None. Raises OSError."""
    for what, said, found in (
        ("tokens", line.tokens, header.tensors[TOKEN_IDS].shape[0]),
        ("request_id", valid_unicode(line.request_id), header.metadata.get("request_id", "")),
        ("checksum", line.checksum, header.metadata.get("checksum", "")),
    ):
        if said != found:
            return f"its index leads to another request: there {what} is {said!r}, and {found!r} in the shard"
    if not is_headed(place.fd, place.offset, line.name, line.size):
        return "its index leads to another request: in the shard that has another name or size"
    return None


@dataclass
class _Index:
    """Progress of reading one index.

    Attributes:
        identity: device and inode.
        position: bytes that were read, all of them whole lines.
        sealed: True if all lines were read and none will follow.
    """

    identity: tuple[int, int] = (0, 0)
    position: int = 0
    sealed: bool = False


class Shards:
    """The members of all shards in a directory. Thread-safe.

    A member is found as soon as its line is in an index, whether the shard is sealed or not. Of
    several lines for one name the newest counts. All methods raise OSError if the directory or an
    index cannot be read.

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
        """Return the tar file and the line of a member, named by its path below the directory."""
        with self._mutex:
            self._refresh()
            stem, line = self._newest.get(name, ("", None))
        return (self.directory / f"{stem}{TAR}", line) if isinstance(line, Member) else None

    def open(self, name: str) -> Place | None:
        """Open a member for reading; return None if there is none of this name."""
        if (found := self.find(name)) is None:
            return None
        tar, line = found
        return Place(open_regular(tar), line.offset, line.size, line)

    def members(self) -> dict[str, Member]:
        """Return all members by name, sorted."""
        with self._mutex:
            self._refresh()
            newest = sorted(self._newest.items())
        found = {name: line for name, (_, line) in newest if isinstance(line, Member)}
        # Servers write through no link, and `load` and `remove` of such a name would leave the
        # directory.
        linked = {folder for folder in {os.path.dirname(name) for name in found} if self._is_linked(folder)}
        return {name: line for name, line in found.items() if os.path.dirname(name) not in linked} if linked else found

    def remove(self, name: str) -> None:
        """Hide a member from all readers, if there is one; its bytes stay in the shard.

        Several processes may do so at once. Raises OSError if the removal cannot be recorded, and
        TimeoutError if another process holds the lock of the list.
        """
        if (found := self.find(name)) is None:
            return
        fd = open_regular(self.directory / REMOVED, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            _lock(fd, self.directory / REMOVED)  # some filesystems do not append atomically
            # The member's own time hides it whatever clocks say, and no later member of this name.
            line = encode(Tombstone(name, found[1].time_ns))
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # end a torn line, which would spoil this one
                line = b"\n" + line
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), REMOVED)
        finally:
            os.close(fd)

    def _is_linked(self, folder: str) -> bool:
        """Return whether a symbolic link is on the way to a folder below the directory."""
        return any(os.path.islink(self.directory / part) for part in accumulate(Path(folder).parts, os.path.join))

    def _forget(self) -> None:
        self._indexes: dict[str, _Index] = {}
        self._newest: dict[str, tuple[str, Member | Tombstone]] = {}
        self._listed: tuple[int, int, int] | None = None
        self._checked = 0

    def _refresh(self) -> None:
        """Read new lines; read everything again if an index was removed, replaced or truncated."""
        if not self._update():
            self._forget()
            self._update()

    def _update(self) -> bool:
        return self._list() and all([self._read(stem, index) for stem, index in self._indexes.items()])

    def _list(self) -> bool:
        """Add new indexes and manifests; return False if an index that was read is missing."""
        now = time.time_ns()
        status = os.stat(self.directory)
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if state == self._listed and self._checked - status.st_mtime_ns > _TICK_NS:
            return True
        found, sealed = set(), set()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                stem, _, suffix = parse_shard_name(entry.name) or (_REMOVED, "", INDEX if entry.name == REMOVED else "")
                if suffix == INDEX:
                    found.add(stem)
                elif suffix == MANIFEST:
                    sealed.add(stem)
        self._listed, self._checked = state, now
        for stem in sorted(found):
            # With its manifest an index is final, so what is read from now on is all of it.
            index = self._indexes.setdefault(stem, _Index())
            if stem in sealed and not index.sealed:
                index.sealed = self._read(stem, index)
        return self._indexes.keys() <= found

    def _read(self, stem: str, index: _Index) -> bool:
        """Read the new lines of an index; return False if it was removed, replaced or truncated."""
        if index.sealed:
            return True
        path = self.directory / f"{stem}{INDEX}"
        try:
            fd = open_regular(path)
        except NotAFileError as error:
            self._report(stem, error.strerror, 0, error.reason)
            return True
        except OSError as error:
            if error.errno in LEADS_NOWHERE and os.path.islink(path):
                self._report(stem, error.errno, 0, f"{path.name} is a symbolic link that leads nowhere")
                return True
            if isinstance(error, FileNotFoundError):
                return False
            raise
        try:
            status = os.fstat(fd)
            identity = (status.st_dev, status.st_ino)
            if not index.position:
                index.identity = identity
            if index.identity != identity or status.st_size < index.position:
                return False
            if status.st_size > INDEX_MAX and stem != _REMOVED:
                problem = f"{path.name} has {status.st_size} bytes, more than any server writes"
                self._report(stem, identity, 0, problem)
                return True
            while index.position < status.st_size:
                block = os.pread(fd, _BLOCK, index.position)
                lines = block[: block.rfind(b"\n") + 1]
                if not lines and len(block) < _BLOCK:  # the last line is still being written
                    break
                # A line longer than a block is skipped, except for its end, which is invalid.
                self._take(stem, index, lines)
                index.position += len(lines or block)
        finally:
            os.close(fd)
        return True

    def _take(self, stem: str, index: _Index, lines: bytes) -> None:
        bad = []
        for text in split_lines(lines):
            line = decode(text)
            if line is None or (isinstance(line, Member) and stem == _REMOVED):
                bad.append(text)
                continue
            earlier = self._newest.get(line.name)
            if earlier is None or _age(earlier[1]) <= _age(line):
                self._newest[line.name] = (stem, line)
        if bad:
            first = ascii(bad[0][:_QUOTED].decode("utf-8", "replace"))
            problem = f"{stem}{INDEX}: {len(bad)} lines from byte {index.position} on cannot be used, first {first}"
            self._report(stem, index.identity, index.position, problem)

    def _report(self, stem: str, identity: object, position: int, problem: str) -> None:
        """Log a problem once, however often the index is read."""
        if self._reported.get((stem, identity), -1) < position:
            self._reported[stem, identity] = position
            logger.warning("%s: %s", self.directory, problem)


def _age(line: Member | Tombstone) -> tuple[int, bool]:
    """Return a sort key; a removal has its member's time and comes after it."""
    return line.time_ns, isinstance(line, Tombstone)


def _lock(fd: int, path: Path) -> None:
    """Lock a file that other processes lock for a moment only. Raises TimeoutError.

    It polls, because a flock that blocks has no timeout.
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
