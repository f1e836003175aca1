"""The members that a path names: in the shards of its directory, or of a directory above."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import again_if_stale, open_regular
from vllm_ascend_hsx.protocol.names import MAX_DEPTH, SHARDS_MARK
from vllm_ascend_hsx.protocol.shard_index import Member
from vllm_ascend_hsx.reader.shards import Place, Shards, UnreadableIndexError

_known: dict[str, Shards] = {}
os.register_at_fork(after_in_child=_known.clear)  # another thread may have held a mutex of theirs


def shards_of(directory: str | os.PathLike[str]) -> Shards:
    """Return the shards of a directory, with what this process has read of them before."""
    key = os.path.abspath(directory)
    return _known.get(key) or _known.setdefault(key, Shards(key))


def _shards_above(path: Path) -> Iterator[tuple[Shards, str]]:
    """Yield the shards that may contain the file `path`, each with its name in them."""
    whole = directory = os.path.abspath(path)
    for _ in range(MAX_DEPTH + 1):
        directory, _, name = directory.rpartition("/")
        if not name:
            return
        # A directory whose members were listed is searched even if its mark is gone.
        if directory in _known or os.path.lexists(f"{directory}/{SHARDS_MARK}"):
            yield shards_of(directory or "/"), whole[len(directory) + 1 :]


def open_member(path: Path) -> Place | None:
    """Open the member that `path` names in a directory above it, or return None.

    Raises OSError, among them UnreadableIndexError if there is none that this user may read.
    """
    if (found := _find(path)) is not None:
        tar, line = found
        with suppress(FileNotFoundError):  # the shard was removed
            return Place(open_regular(tar), line.offset, line.size, line)
    return None


def is_named(path: Path) -> bool:
    """Return whether a directory or an index names a path, even if it cannot be opened.

    Raises as `open_member`.
    """
    return os.path.lexists(path) or _find(path) is not None


def _find(path: Path) -> tuple[Path, Member] | None:
    """Return the tar file and the line of the member `path`, or None. Raises as `open_member`.

    Servers may write in a directory and in a folder of it, and do not see each other's members. Of
    two for one path readers take the one that was published last.
    """
    found, unreadable = [], None
    for shards, name in _shards_above(path):
        try:
            with suppress(FileNotFoundError):  # the directory was removed
                if (member := shards.find(name)) is not None:
                    found.append(member)
        except UnreadableIndexError as error:
            unreadable = error
    if not found and unreadable is not None:
        raise unreadable
    return max(found, key=lambda each: each[1].time_ns, default=None)


def remove_member(path: Path, found: bool = False) -> None:
    """Hide the members that `path` names, if any. Raises as `open_member`.

    `found` tells that it was a file: then it does not matter what unreadable indexes have.
    """
    unreadable = None
    for shards, name in _shards_above(path):
        try:
            found = shards.remove(name) or found
        except UnreadableIndexError as error:
            unreadable = error
    if unreadable is not None and not found:
        raise unreadable


def paths_below(
    directory: str | os.PathLike[str], suffixes: tuple[str, ...], on_error: Callable[[OSError], None] | None = None
) -> list[Path]:
    """Return the files below a directory with a suffix, and the members that have paths there.

    These are members of shards in the directory, below it, and above it, where `load` also looks
    for them. Hidden names are left out. Folders behind symbolic links are not searched.

    Args:
        directory: where to look.
        suffixes: of files; members are returned whatever their names.
        on_error: called for each folder that cannot be read, and for an index, whose members are
            passed over; None to raise. Folders that are removed meanwhile are no errors.

    Raises:
        OSError: the directory, or, without `on_error`, an index or a folder cannot be read.
    """

    def tell(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # the folder was removed meanwhile
            (on_error or _raise)(error)

    def members(shards: Shards) -> Iterable[str]:
        try:
            return shards.members(on_error)
        except OSError as error:
            tell(error)
            return ()

    again_if_stale(os.scandir, directory).close()  # os.walk passes over one that is not there
    found: set[str] = set()  # Path objects sort three times slower
    for folder, inside, names in os.walk(directory, onerror=tell):
        inside[:] = [name for name in inside if not name.startswith(".")]
        found.update(os.path.join(folder, name) for name in (*inside, *names) if name.endswith(suffixes) and name[0] != ".")
        if SHARDS_MARK in names and folder != os.fspath(directory):
            found.update(os.path.join(folder, name) for name in members(shards_of(folder)))
    shards_of(directory)  # from now on it is searched even without its mark, which a copy may lack
    found.update(os.path.join(directory, name) for name in _members_above(Path(directory), members))
    return [Path(path) for path in sorted(found)]


def _raise(error: OSError) -> None:
    raise error


def members_in(directory: Path) -> list[str]:
    """Return the names of members directly in a directory, in its shards or those of one above.

    Raises OSError.
    """
    return [name for name in _members_above(directory, Shards.members) if "/" not in name]


def _members_above(directory: Path, members: Callable[[Shards], Iterable[str]]) -> Iterator[str]:
    """Yield the paths, below a directory, of members in its shards or those of one above."""
    for shards, name in _shards_above(directory / "_"):
        folder = name[:-1]
        yield from (each.removeprefix(folder) for each in members(shards) if each.startswith(folder))
