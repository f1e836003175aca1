"""Compares the shards of a directory with their indexes and manifests, without the members' own bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_all, read_regular
from vllm_ascend_hsx.protocol.shard_index import Gone, decode, end_of_members, split_lines
from vllm_ascend_hsx.protocol.shard_manifest import manifest
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, REMOVED, TAR, parse_name
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.protocol.tar import END

_COUNTED = ("members", "tokens", "bytes", "index_lines", "index_checksum")


def shard_problems(directory: str | Path) -> Iterator[tuple[Path, str]]:
    """Yield each shard that is not what its index and manifest say, with the first problem; then the removals.

    Raises:
        OSError: the directory cannot be read.
    """
    directory = Path(directory)
    names = set(os.listdir(directory))
    stems = {parts[0] for name in names if (parts := parse_name(name)) is not None}
    for path in [*(directory / f"{stem}{TAR}" for stem in sorted(stems)), directory / REMOVED]:
        try:
            if path.name == REMOVED:
                problem = _removals_problem(path)
            else:
                problem = _problem(path, f"{path.stem}{MANIFEST}" in names)
        except OSError as error:
            problem = _unreadable(path, error)
        if problem is not None:
            yield path, problem


def _unreadable(path: Path, error: OSError) -> str | None:
    """Return why a shard cannot be compared; None if it is being made or removed, or nothing was removed."""
    index, missing = path.with_suffix(INDEX), Path(error.filename or path)
    if isinstance(error, NotAFileError):
        return error.reason
    if missing.is_symlink() and not os.path.exists(missing):
        return f"{missing.name} is a symbolic link that leads nowhere"
    if not isinstance(error, FileNotFoundError):
        return f"it cannot be read: {error.strerror or error}"
    if missing == index:
        return f"it has no *{INDEX}" if path.exists() and path != index else None
    return "it is not there, and its index has lines" if index.exists() and index.stat().st_size else None


def _removals_problem(path: Path) -> str | None:
    lines = [decode(line) for line in split_lines(_content(path))]
    bad = [number for number, line in enumerate(lines, 1) if not isinstance(line, Gone)]
    return f"{len(bad)} of the {len(lines)} lines of its index cannot be used, first line {bad[0]}" if bad else None


def _content(path: Path) -> bytes:
    fd = open_regular(path)
    try:
        return read_all(fd)
    finally:
        os.close(fd)


def _problem(path: Path, sealed: bool) -> str | None:
    index = _content(path.with_suffix(INDEX))  # first: its server may be appending
    fd = open_regular(path)
    try:
        end = end_of_members(fd, index)
        if not sealed:
            return None
        if os.fstat(fd).st_size != end + len(END) or any(os.pread(fd, len(END), end)):
            return f"the tar file does not end after the last member of its index, at byte {end}"
        expected = manifest(fd, index, "")
    except ValueError as error:
        return str(error)
    finally:
        os.close(fd)
    try:
        said = parse(read_regular(path.with_suffix(MANIFEST)))
        wrong = [key for key in _COUNTED if said[key] != expected[key]]
    except (ValueError, TypeError, KeyError) as error:
        return f"its manifest cannot be understood: {error!r}"
    return f"its manifest says {wrong[0]}={said[wrong[0]]!r}, and it has {expected[wrong[0]]!r}" if wrong else None
