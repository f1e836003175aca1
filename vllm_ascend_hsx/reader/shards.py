"""Finds requests in the shards of a directory: by the lines of their indexes, of which only new ones are read again."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.protocol.files import LEADS_NOWHERE, NotAFileError, open_regular
from vllm_ascend_hsx.protocol.format import TOKEN_IDS, Header, valid_unicode
from vllm_ascend_hsx.protocol.names import MAX_DEPTH
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, decode, encode, split_lines, whole_lines
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, REMOVED, SHARDS_MARK, TAR, parse_name
from vllm_ascend_hsx.protocol.tar import is_headed

logger = logging.getLogger(__name__)

_BLOCK = 16 << 20
# Names that appear within one tick of a filesystem's clock may leave a directory's time of change as it was.
_TICK_NS = 2_000_000_000
_REMOVED = REMOVED.removesuffix(INDEX)
_QUOTED = 100  # bytes of a line that makes no sense


class Place(NamedTuple):
    """A safetensors file inside a larger one.

    Attributes:
        fd: what is open, for reading; the caller closes it.
        offset, size: the bytes that are the file.
        line: of the index, if it is a member of a shard.
    """

    fd: int
    offset: int
    size: int
    line: Member | None = None


def member_problem(place: Place, header: Header) -> str | None:
    """Why a line of an index is not of the member that it leads to, whose header this is; None: it is. Raises OSError."""
    line = place.line
    if line is None:
        return None
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
    """What was read of one index."""

    identity: tuple[int, int]
    position: int = 0
    sealed: bool = False
    inside_line: bool = False  # one that is longer than any of ours


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
        self._reported: dict[tuple[str, object], int] = {}  # up to which position bad lines of an index were
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
            found = {name: line for name, (_, line) in sorted(self._newest.items()) if isinstance(line, Member)}
        # No server writes through a link. Who follows such a name with `load` or `remove` would leave the directory.
        linked = {folder for folder in {name.rpartition("/")[0] for name in found} if self._is_linked(folder)}
        return {name: line for name, line in found.items() if name.rpartition("/")[0] not in linked} if linked else found

    def open(self, name: str) -> Place | None:
        """Open a member for reading; None: there is none of this name. Raises OSError: its shard cannot be opened."""
        with self._mutex:
            self._refresh()
            stem, line = self._newest.get(name, ("", None))
        if not isinstance(line, Member):
            return None
        return Place(open_regular(self.directory / f"{stem}{TAR}"), line.offset, line.size, line)

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
        fd = open_regular(self.directory / REMOVED, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # not every filesystem appends in one go
            # Its own time: whatever clocks say, it goes, and a later one of this name is seen.
            line = encode(Gone(name, member.time_ns))
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # somebody died within a line, which is not to spoil this one
                line = b"\n" + line
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

    def _is_linked(self, folder: str) -> bool:
        """Whether a symbolic link is on the way to a folder below the directory."""
        parts = folder.split("/") if folder else []
        return any(os.path.islink(self.directory.joinpath(*parts[:count])) for count in range(1, len(parts) + 1))

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
                    found.add(_REMOVED)
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
            if index.position == 0:
                index.identity = identity
            if identity != index.identity or status.st_size < index.position:
                return False
            while index.position < status.st_size:
                block = os.pread(fd, _BLOCK, index.position)
                lines = whole_lines(block)
                if lines:
                    self._take_all(stem, index, lines)
                elif len(block) < _BLOCK:  # the last one is being written
                    break
                else:
                    index.inside_line = True
                # Not before the lines were understood: what goes wrong with one must not hide those after it.
                index.position += len(lines or block)
        finally:
            os.close(fd)
        return True

    def _take_all(self, stem: str, index: _Index, lines: bytes) -> None:
        bad = []
        for text in split_lines(lines):
            line = None if index.inside_line else decode(text)
            index.inside_line = False
            if line is None or (isinstance(line, Member) and stem == _REMOVED):
                bad.append(text)
            else:
                self._take(stem, line)
        if bad:
            first = ascii(bad[0][:_QUOTED].decode("utf-8", "replace"))
            problem = f"{stem}{INDEX}: {len(bad)} lines from byte {index.position} on cannot be used, first {first}"
            self._report(stem, index.identity, index.position, problem)

    def _report(self, stem: str, identity: object, position: int, problem: str) -> None:
        """Say once what is wrong, however often it is read."""
        if self._reported.get((stem, identity), -1) < position:
            self._reported[stem, identity] = position
            logger.warning("%s: %s", self.directory, problem)

    def _take(self, stem: str, line: Member | Gone) -> None:
        earlier = self._newest.get(line.name)
        if earlier is None or _age(earlier[1]) <= _age(line):
            self._newest[line.name] = (stem, line)


def _age(line: Member | Gone) -> tuple[int, bool]:
    """By which of two lines about a name the later one counts; what is removed has the time of the member."""
    return line.time_ns, isinstance(line, Gone)


_known: dict[str, Shards] = {}
_known_mutex = threading.Lock()


def shards_of(directory: str | os.PathLike[str]) -> Shards:
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
        # Whoever has listed the members of a directory finds them, whatever has become of the mark.
        if directory in _known or os.path.lexists(f"{directory}/{SHARDS_MARK}"):
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


def members_in(directory: Path) -> list[str]:
    """Return the names of the members directly in a directory, in shards of it or of one above.

    Raises:
        OSError: the shards cannot be read.
    """
    found = []
    for shards, name in _shards_above(directory / "_"):
        folder = name[:-1]
        names = [each.removeprefix(folder) for each in shards.members() if each.startswith(folder)]
        found += [each for each in names if "/" not in each]
    return found


def shard_of(path: Path) -> Path | None:
    """The shard in which a file `path` is a member, or None. Raises OSError: it cannot be read."""
    for shards, name in _shards_above(path):
        if shards.find(name) is not None:
            return shards.path_of(name)
    return None
