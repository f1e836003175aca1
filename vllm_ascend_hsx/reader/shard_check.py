"""Compare the shards of a directory with their indexes and manifests.

This does not read the rows of the members; `check` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import NotAFileError, opened, read_regular
from vllm_ascend_hsx.protocol.names import INDEX, MANIFEST, REMOVED, TAR, parse_shard_name
from vllm_ascend_hsx.protocol.shard_index import (
    INDEX_MAX,
    REMOVED_MAX,
    Member,
    Tombstone,
    check_end,
    decode,
    end_of_members,
    read_index,
    shard_manifest,
    split_lines,
)
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.protocol.tar import END

_COUNTED = ("members", "tokens", "bytes", "index_lines", "index_checksum")


def shard_problems(directory: str | Path) -> Iterator[tuple[Path, str]]:
    """Yield each tar file below a directory that contradicts index or manifest, with the problem.

    The index of removals comes last in each folder. Folders that cannot be read are skipped,
    because `files_in` reports them.
    """
    for folder, inside, files in os.walk(directory):
        inside.sort()
        yield from _problems_in(Path(folder), {*inside, *files})
        inside[:] = [name for name in inside if not name.startswith(".")]


def _problems_in(directory: Path, names: set[str]) -> Iterator[tuple[Path, str]]:
    stems = {parts[0] for name in names if (parts := parse_shard_name(name)) is not None}
    paths = [directory / f"{stem}{TAR}" for stem in sorted(stems)]
    for path in [*paths, directory / REMOVED] if REMOVED in names else paths:
        try:
            problem = (
                _removals_problem(path)
                if path.name == REMOVED
                else _problem(path, f"{path.stem}{MANIFEST}" in names)
            )
        except OSError as error:
            problem = _unreadable(path, error)
        if problem is not None:
            yield path, problem


def _unreadable(path: Path, error: OSError) -> str | None:
    """Return the reason why a shard cannot be compared.

    Return None if a server is creating or removing the shard, or if nothing was ever removed from
    the directory.
    """
    index, missing = path.with_suffix(INDEX), Path(error.filename or path)
    if isinstance(error, NotAFileError):
        return error.reason
    if missing.is_symlink() and not os.path.exists(missing):
        return f"{missing.name} is a broken symbolic link"
    if not isinstance(error, FileNotFoundError):
        return f"it cannot be read: {error.strerror or error}"
    if missing == index:
        return f"it has no *{INDEX}" if path.exists() and path != index else None
    with suppress(FileNotFoundError):  # the server removes both files
        if index.stat().st_size:
            return "it is missing, but its index has lines"
    return None


def _removals_problem(path: Path) -> str | None:
    lines = [decode(line) for line in split_lines(_content(path, REMOVED_MAX))]
    bad = [number for number, line in enumerate(lines, 1) if not isinstance(line, Tombstone)]
    return (
        f"{len(bad)} of the {len(lines)} lines of its index are invalid, first line {bad[0]}"
        if bad
        else None
    )


def _content(path: Path, most: int = INDEX_MAX) -> bytes:
    with opened(path) as fd:
        return read_index(fd, most)


def _problem(path: Path, sealed: bool) -> str | None:
    index = _content(path.with_suffix(INDEX))  # first: the server may be appending
    try:
        with opened(path) as fd:
            end = end_of_members(fd, index)
            if not sealed:
                size = os.fstat(fd).st_size
                index = _content(path.with_suffix(INDEX))
                check_end(fd, size, end_of_members(fd, index), index)
                return None
            if os.fstat(fd).st_size != end + len(END) or any(os.pread(fd, len(END), end)):
                return (
                    f"the tar file does not end after the last member of its index, at byte {end}"
                )
            for member in map(decode, split_lines(index)):
                if isinstance(member, Member) and any(
                    os.pread(fd, member.end - (at := member.offset + member.size), at)
                ):
                    return (
                        f"the tar file has bytes after {member.name!r} that belong to no member, "
                        f"at byte {at}"
                    )
            expected = shard_manifest(fd, index, "")
    except ValueError as error:
        return str(error)
    try:
        stated = parse(read_regular(path.with_suffix(MANIFEST)))
        wrong = [key for key in _COUNTED if stated[key] != expected[key]]
    except (ValueError, TypeError, KeyError) as error:
        return f"its manifest is invalid: {error!r}"
    return (
        f"its manifest states {wrong[0]}={stated[wrong[0]]!r}, but it has {expected[wrong[0]]!r}"
        if wrong
        else None
    )
