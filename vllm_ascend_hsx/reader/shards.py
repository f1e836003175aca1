"""Finds requests in the shards of a directory by the lines of their indexes, of which only new ones are read."""

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
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, decode, encode, split_lines
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, REMOVED, SHARDS_MARK, TAR, parse_name
from vllm_ascend_hsx.protocol.tar import is_headed

logger = logging.getLogger(__name__)

_BLOCK = 16 << 20
# Names that appear within one tick of a filesystem's clock may leave a directory's time of change as it was.
_TICK_NS = 2_000_000_000
_REMOVED = REMOVED.removesuffix(INDEX)
_QUOTED = 100  # bytes of an invalid line


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
    """Return why a member, whose header this is, is not the one of its line; None if it is. Raises OSError."""
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

    identity: tuple[int, int] = (0, 0)
    position: int = 0
    sealed: bool = False


class Shards:
    """The members of all shards in a directory; may be used by several threads.

    A member is found as soon as its line is there, whether its shard is sealed or not. Of several lines
    for one name the newest counts.

    Args:
        directory: where the shards are.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._mutex = threading.Lock()
        self._reported: dict[tuple[str, object], int] = {}  # position up to which invalid lines were logged
        self._forget()

    def find(self, name: str) -> Member | None:
        """Return the member of a name, a path below the directory. Raises OSError: an index cannot be read."""
        return self._find(name)[1]

    def members(self) -> dict[str, Member]:
        """Return all members by name, in order. Raises OSError: the directory or an index cannot be read."""
        with self._mutex:
            self._refresh()
            found = {name: line for name, (_, line) in sorted(self._newest.items()) if isinstance(line, Member)}
        # No server writes through a link. `load` and `remove` of such a name would leave the directory.
        linked = {folder for folder in {name.rpartition("/")[0] for name in found} if self._is_linked(folder)}
        return {name: line for name, line in found.items() if name.rpartition("/")[0] not in linked} if linked else found

    def open(self, name: str) -> Place | None:
        """Open a member for reading; None: there is none of this name. Raises OSError: its shard cannot be opened."""
        tar, line = self._find(name)
        return None if line is None else Place(open_regular(tar), line.offset, line.size, line)

    def path_of(self, name: str) -> Path | None:
        """Return the tar file that a member is in. Raises OSError: an index cannot be read."""
        tar, line = self._find(name)
        return None if line is None else tar

    def remove(self, name: str) -> bool:
        """Hide the member of a name from all readers; its bytes stay in the shard. Processes may do so concurrently.

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
            # The member's own time hides it whatever clocks say, and no later one of this name.
            line = encode(Gone(name, member.time_ns))
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a torn line, which is not to spoil this one
                line = b"\n" + line
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), REMOVED)
        finally:
            os.close(fd)
        return True

    def _find(self, name: str) -> tuple[Path, Member | None]:
        with self._mutex:
            self._refresh()
            stem, line = self._newest.get(name, ("", None))
        return self.directory / f"{stem}{TAR}", line if isinstance(line, Member) else None

    def _is_linked(self, folder: str) -> bool:
        """Return whether a symbolic link is on the way to a folder below the directory."""
        parts = folder.split("/") if folder else []
        return any(os.path.islink(self.directory.joinpath(*parts[:count])) for count in range(1, len(parts) + 1))

    def _forget(self) -> None:
        self._indexes: dict[str, _Index] = {}
        self._newest: dict[str, tuple[str, Member | Gone]] = {}
        self._listed: tuple[int, int, int] | None = None
        self._checked = 0

    def _refresh(self) -> None:
        """Read new lines. If an index is gone or was replaced, read all of them anew."""
        if not self._list() or not all(self._read(stem, index) for stem, index in self._indexes.items()):
            self._forget()
            self._list()
            for stem, index in list(self._indexes.items()):
                if not self._read(stem, index):
                    del self._indexes[stem]  # taken away at this moment

    def _list(self) -> bool:
        """Note new indexes and manifests; return False if an index that was read is gone."""
        now = time.time_ns()
        status = os.stat(self.directory)
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if state == self._listed and self._checked - status.st_mtime_ns > _TICK_NS:
            return True
        found, sealed = set(), set()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                parts = parse_name(entry.name) or (_REMOVED, "", INDEX if entry.name == REMOVED else "")
                if parts[2] == INDEX:
                    found.add(parts[0])
                elif parts[2] == MANIFEST:
                    sealed.add(parts[0])
        self._listed, self._checked = state, now
        if not self._indexes.keys() <= found:
            return False
        for stem in sorted(found):
            # An index is final when its manifest is there: what is read from now on is all of it.
            index = self._indexes.setdefault(stem, _Index())
            if stem in sealed and not index.sealed:
                index.sealed = self._read(stem, index)
        return True

    def _read(self, stem: str, index: _Index) -> bool:
        """Read the new lines of an index; return False if it is gone, was replaced or was cut."""
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
            if not index.position:
                index.identity = (status.st_dev, status.st_ino)
            if index.identity != (status.st_dev, status.st_ino) or status.st_size < index.position:
                return False
            while index.position < status.st_size:
                block = os.pread(fd, _BLOCK, index.position)
                lines = block[: block.rfind(b"\n") + 1]
                if not lines and len(block) < _BLOCK:  # the last one is being written
                    break
                # Of a line that is longer than any of ours, only the end is taken for one, and is invalid.
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


def _age(line: Member | Gone) -> tuple[int, bool]:
    """Return the sort key by which the last line about a name counts; a removal has the time of its member."""
    return line.time_ns, isinstance(line, Gone)


_known: dict[str, Shards] = {}
_known_mutex = threading.Lock()


def shards_of(directory: str | os.PathLike[str]) -> Shards:
    """Return the shards of a directory, as they were read before in this process."""
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
    """Yield the shards in which the file `path` may be, with its name in them."""
    whole = directory = os.path.abspath(path)
    for _ in range(MAX_DEPTH + 1):
        directory, _, name = directory.rpartition("/")
        if not name:
            return
        # A directory whose members were listed is searched even if its mark is gone.
        if directory in _known or os.path.lexists(f"{directory}/{SHARDS_MARK}"):
            yield shards_of(directory or "/"), whole[len(directory) + 1 :]


def open_member(path: Path) -> Place | None:
    """Open the member that the file `path` would be, in a directory above it; None: there is none. Raises OSError."""
    for shards, name in _shards_above(path):
        with suppress(FileNotFoundError):  # the shard was taken away
            if (place := shards.open(name)) is not None:
                return place
    return None


def remove_member(path: Path) -> bool:
    """Hide the member that the file `path` would be; return whether there was one. Raises OSError."""
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
    """Return the tar file in which the file `path` is a member, or None. Raises OSError: an index cannot be read."""
    return next((found for shards, name in _shards_above(path) if (found := shards.path_of(name))), None)
