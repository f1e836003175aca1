"""Find the members for a path, in the shards of the same directory or of a directory above."""

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
os.register_at_fork(after_in_child=_known.clear)  # another thread may have held a mutex


def shards_of(directory: str | os.PathLike[str]) -> Shards:
    """Return the shards of a directory. The process keeps one object per directory."""
    key = os.path.abspath(directory)
    return _known.get(key) or _known.setdefault(key, Shards(key))


def _shards_above(path: Path) -> Iterator[tuple[Shards, str]]:
    """Yield the shards that may contain the file `path`, each with the name of the file there."""
    whole = directory = os.path.abspath(path)
    for _ in range(MAX_DEPTH + 1):
        directory, _, name = directory.rpartition("/")
        if not name:
            return
        # A directory whose members were listed is searched even if the mark is gone.
        if directory in _known or os.path.lexists(f"{directory}/{SHARDS_MARK}"):
            yield shards_of(directory or "/"), whole[len(directory) + 1 :]


def open_member(path: Path) -> Place | None:
    """Open the member that `path` names in a directory above it, or return None.

    Raises UnreadableIndexError if only an index that this user may not read can have the member,
    and OSError.
    """
    if (found := _find(path)) is not None:
        tar, line = found
        with suppress(FileNotFoundError):  # the shard was removed
            return Place(open_regular(tar), line.offset, line.size, line)
    return None


def is_named(path: Path) -> bool:
    """Return whether a directory or an index names a path, even if it cannot be opened.

    Raises like `open_member`.
    """
    return os.path.lexists(path) or _find(path) is not None


def _find(path: Path) -> tuple[Path, Member] | None:
    """Return the tar file and the line of the member `path`, or None. Raises like `open_member`.

    Servers may write in a directory and in a folder of it without seeing each other's members. If
    two members have one path, readers take the last published member.
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
    """Hide the members that `path` names, if any. Raises like `open_member`.

    `found` is True if `path` was a file. Then unreadable indexes are ignored.
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
    directory: str | os.PathLike[str],
    suffixes: tuple[str, ...],
    on_error: Callable[[OSError], None] | None = None,
) -> list[Path]:
    """Return the files below a directory with a suffix, and the members that have paths there.

    Like `load`, this searches the shards in the directory, below it, and above it. Hidden names are
    left out. Folders behind symbolic links are not searched.

    Args:
        directory: the directory to search.
        suffixes: suffixes of files. Members are returned with any suffix.
        on_error: called for each folder or index that cannot be read and is skipped; None to raise.
            Folders that are removed meanwhile are no errors.

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

    again_if_stale(os.scandir, directory).close()  # os.walk ignores a missing directory
    found: set[str] = set()  # Path objects sort three times slower
    for folder, inside, names in os.walk(directory, onerror=tell):
        inside[:] = [name for name in inside if not name.startswith(".")]
        found.update(
            os.path.join(folder, name)
            for name in (*inside, *names)
            if name.endswith(suffixes) and name[0] != "."
        )
        if SHARDS_MARK in names and folder != os.fspath(directory):
            found.update(os.path.join(folder, name) for name in members(shards_of(folder)))
    shards_of(directory)  # from now on it is searched even without the mark: a copy may lack it
    found.update(os.path.join(directory, name) for name in _members_above(Path(directory), members))
    return [Path(path) for path in sorted(found)]


def _raise(error: OSError) -> None:
    raise error


def members_in(directory: Path) -> list[str]:
    """Return the names of members directly in a directory, from shards there or above.

    Raises OSError.
    """
    return [name for name in _members_above(directory, Shards.members) if "/" not in name]


def _members_above(directory: Path, members: Callable[[Shards], Iterable[str]]) -> Iterator[str]:
    """Yield the paths below a directory of members from shards there or above."""
    for shards, name in _shards_above(directory / "_"):
        folder = name[:-1]
        yield from (
            each.removeprefix(folder) for each in members(shards) if each.startswith(folder)
        )
