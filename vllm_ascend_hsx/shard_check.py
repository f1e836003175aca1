"""Whether the shards of a directory are what their manifests and indexes say: without looking at the members' own bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.sinks.shard_index import INDEX, MANIFEST, TAR, members_by_offset, parse_name, whole_lines
from vllm_ascend_hsx.sinks.shard_seal import manifest, read_all
from vllm_ascend_hsx.sinks.tar import END, HOLE, walk

_COUNTED = ("members", "tokens", "bytes", "index_lines", "index_checksum")


def shard_problems(directory: str | Path) -> Iterator[tuple[Path, str]]:
    """The shards of a directory that are not what they should be, each with one thing that is wrong with it.

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
            problem = _problem(path, MANIFEST in found)
        except FileNotFoundError:
            problem = _half(path)
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
        if problem is not None:
            yield path, problem


def _half(path: Path) -> str | None:
    """What is wrong with a shard of which a file is missing; a server makes the tar file first, and removes it first if it stays empty."""
    with suppress(FileNotFoundError):
        if path.stat().st_size:
            return None if path.with_suffix(INDEX).exists() else f"it has no *{INDEX}"
    with suppress(FileNotFoundError):
        if path.with_suffix(INDEX).stat().st_size:
            return "it is not there, and its index has lines"
    return None


def _problem(path: Path, sealed: bool) -> str | None:
    index = path.with_suffix(INDEX)
    with open(path, "rb", buffering=0) as tar, open(index, "rb", buffering=0) as lines:
        content = whole_lines(read_all(lines.fileno()))
        members, gone = members_by_offset(content)
        end = 0
        for entry in walk(tar.fileno()):
            member = members.get(entry.offset)
            if member is not None and (entry.name, entry.size) == (member.name, member.size):
                del members[entry.offset]
            elif sealed and entry.name != HOLE:
                return f"its member {entry.name!r} at byte {entry.offset} is not in the index"
            end = entry.end
        for member in members.values():
            if member.name not in gone:
                return f"the index has {member.name!r} at byte {member.offset}, and the tar file has not"
        if not sealed:
            return None
        if os.fstat(tar.fileno()).st_size < end + len(END) or any(os.pread(tar.fileno(), len(END), end)):
            return f"the tar file does not end behind its last member, at byte {end}"
        try:
            said = json.loads(path.with_suffix(MANIFEST).read_bytes())
            expected = manifest(tar.fileno(), content, "")
            wrong = [key for key in _COUNTED if said[key] != expected[key]]
        except (ValueError, TypeError, KeyError) as error:
            return f"its manifest cannot be understood: {error!r}"
        if wrong:
            return f"its manifest says {wrong[0]}={said[wrong[0]]!r}, and it has {expected[wrong[0]]!r}"
        return None
