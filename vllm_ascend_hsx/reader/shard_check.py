"""Whether the shards of a directory are what their manifests and indexes say: without looking at the members' own bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_all, read_regular
from vllm_ascend_hsx.protocol.shard_index import Gone, decode, members_by_offset, split_lines, whole_lines
from vllm_ascend_hsx.protocol.shard_manifest import manifest
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, REMOVED, TAR, parse_name
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.protocol.tar import END, HOLE, walk

_COUNTED = ("members", "tokens", "bytes", "index_lines", "index_checksum")


def shard_problems(directory: str | Path) -> Iterator[tuple[Path, str]]:
    """The shards of a directory that are not what they should be, each with one thing that is wrong with it; and so with what consumers
    say that they removed.

    Of a shard that is not sealed yet its server may be writing, so it is only looked for the members that its index has.

    Raises:
        OSError: the directory cannot be read.
    """
    directory = Path(directory)
    suffixes: dict[str, set[str]] = {}
    for name in os.listdir(directory):
        parts = parse_name(name)
        if parts is not None:
            suffixes.setdefault(parts[0], set()).add(parts[2])
    for stem, found in sorted(suffixes.items()):
        path = directory / f"{stem}{TAR}"
        try:
            problem = _link_to_nothing(path.with_suffix(INDEX)) or _problem(path, MANIFEST in found)
        except FileNotFoundError:
            problem = _half(path)
        except OSError as error:
            problem = _unreadable(error)
        if problem is not None:
            yield path, problem
    path = directory / REMOVED
    try:
        problem = _bad_lines(_content(path), removals=True)
    except FileNotFoundError:
        return
    except OSError as error:
        problem = _unreadable(error)
    if problem is not None:
        yield path, problem


def _unreadable(error: OSError) -> str:
    return error.reason if isinstance(error, NotAFileError) else f"it cannot be read: {error.strerror or error}"


def _bad_lines(content: bytes, removals: bool = False) -> str | None:
    """Which lines of an index readers pass over."""
    lines = [decode(line) for line in split_lines(content)]
    bad = [number for number, line in enumerate(lines, 1) if line is None or (removals and not isinstance(line, Gone))]
    return f"{len(bad)} of the {len(lines)} lines of its index cannot be used, first line {bad[0]}" if bad else None


def _link_to_nothing(path: Path) -> str | None:
    return "its index is a symbolic link that leads nowhere" if path.is_symlink() and not os.path.exists(path) else None


def _half(path: Path) -> str | None:
    """What is wrong with a shard of which a file is missing; a server makes the tar file first, and removes it first if it stays empty."""
    with suppress(FileNotFoundError):
        if path.stat().st_size:
            return None if path.with_suffix(INDEX).exists() else f"it has no *{INDEX}"
    with suppress(FileNotFoundError):
        if path.with_suffix(INDEX).stat().st_size:
            return "it is not there, and its index has lines"
    return None


def _content(path: Path) -> bytes:
    """The whole lines of an index."""
    fd = open_regular(path)
    try:
        return whole_lines(read_all(fd))
    finally:
        os.close(fd)


def _problem(path: Path, sealed: bool) -> str | None:
    tar = open_regular(path)
    try:
        content = _content(path.with_suffix(INDEX))
        return _bad_lines(content) or _compare(path, tar, content, sealed)
    finally:
        os.close(tar)


def _compare(path: Path, tar: int, content: bytes, sealed: bool) -> str | None:
    """What of tar file, index and manifest does not agree."""
    members, gone = members_by_offset(content)
    end = 0
    for entry in walk(tar):
        member = members.get(entry.offset)
        if member is not None and (entry.name, entry.size) == (member.name, member.size):
            del members[entry.offset]
        elif sealed and entry.name != HOLE:
            return f"its member {entry.name!r} at byte {entry.offset} is not in the index"
        end = entry.end
    for member in members.values():
        if member.offset not in gone:
            return f"the index has {member.name!r} at byte {member.offset}, and the tar file has not"
    if not sealed:
        return None
    if os.fstat(tar).st_size < end + len(END) or any(os.pread(tar, len(END), end)):
        return f"the tar file does not end behind its last member, at byte {end}"
    try:
        said = parse(read_regular(path.with_suffix(MANIFEST)))
        expected = manifest(tar, content, "")
        wrong = [key for key in _COUNTED if said[key] != expected[key]]
    except (ValueError, TypeError, KeyError) as error:
        return f"its manifest cannot be understood: {error!r}"
    if wrong:
        return f"its manifest says {wrong[0]}={said[wrong[0]]!r}, and it has {expected[wrong[0]]!r}"
    return None
