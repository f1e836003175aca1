"""The shards of a server that died, sealed by the next one: lines of the index decide what is a member, all else becomes a hole.

What is done here can be stopped at any instant and begun again: until the manifest is there, everything is looked at anew.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection
from contextlib import suppress

from vllm_ascend_hsx.protocol.files import read_all, write_at
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.shard_index import Member, bad_lines, members_by_offset, whole_lines
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, TAR, parse_name
from vllm_ascend_hsx.protocol.tar import HOLE, Entry, data_offset, headers, round_up, walk
from vllm_ascend_hsx.sinks.shard_seal import seal
from vllm_ascend_hsx.sinks.storage import Storage
from vllm_ascend_hsx.sinks.system import punch_hole


def unsealed_shards(dir_fd: int, token: str) -> list[str]:
    """The stem of each shard of a server that has no manifest, in order. Raises OSError: the directory cannot be read."""
    found: set[str] = set()
    sealed: set[str] = set()
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            parts = parse_name(entry.name)
            if parts is not None and parts[1] == token:
                (sealed if parts[2] == MANIFEST else found).add(parts[0])
    return sorted(found - sealed)


def recover_shard(dir_fd: int, token: str, stem: str) -> int:
    """Seal a shard whose server is dead, durably. The caller holds the lock of its workspace.

    Args:
        dir_fd: the directory.
        token, stem: of the shard.

    Returns:
        How many requests it holds.

    Raises:
        OSError: it could not be done, or its index is not there or cannot be understood, or says that there is more in the tar file than
            can be found in it; then nothing is taken away.
    """
    storage = Storage(dir_fd, 0o600)  # the caller closes it; files that are there keep their mode
    try:
        fd = storage.open(stem + TAR, os.O_RDWR)
    except FileNotFoundError:  # it died between two calls when it made or removed the shard
        _remove_if_empty(storage, stem)
        return 0
    index_fd = -1
    try:
        with suppress(FileNotFoundError):
            index_fd = storage.open(stem + INDEX, os.O_RDWR)
        if index_fd < 0:
            if os.fstat(fd).st_size:  # a server writes nothing before the index is there
                raise OSError(errno.EUCLEAN, "it has no index, which says what of it counts")
            storage.unlink(stem + TAR)
            return 0
        storage.file_mode = os.fstat(fd).st_mode & 0o777
        content = read_all(index_fd)
        lines = whole_lines(content)
        if bad := bad_lines(lines):  # each may be of a member, which must not become a hole
            raise OSError(errno.EUCLEAN, f"{len(bad)} lines of its index cannot be understood, first line {bad[0]}")
        members, gone = members_by_offset(lines)
        end, others = _compare(fd, members, gone)
        if len(lines) < len(content):
            os.ftruncate(index_fd, len(lines))
        for entry in others:
            _make_hole(fd, entry, storage.file_mode)
        seal(storage, token, stem, fd, index_fd, end, True, "recovery")
        return len(members)
    finally:
        os.close(fd)
        if index_fd >= 0:
            os.close(index_fd)


def _compare(fd: int, members: dict[int, Member], gone: Collection[int]) -> tuple[int, list[Entry]]:
    """Where the last member or hole ends, and what is to become a hole; changes nothing.

    Raises:
        OSError: the tar file does not lead to all members that the index names, or has no room for the headers of a hole.
    """
    size = os.fstat(fd).st_size
    missed = {offset: member for offset, member in members.items() if offset not in gone}
    end, others = 0, []
    for entry in walk(fd):
        member = members.get(entry.offset)
        if member is None or (entry.name, entry.size) != (member.name, member.size):
            if entry.offset in missed:
                raise OSError(errno.EUCLEAN, f"its index has {missed[entry.offset].name!r} at byte {entry.offset}, where {entry.name!r} is")
            if entry.end > size:  # it died between the headers and the space for what they announce
                break
            if entry.name != HOLE and entry.offset < data_offset(entry.start, HOLE, entry.end - entry.offset):
                raise OSError(errno.EUCLEAN, f"{entry.name!r} at byte {entry.offset} has no room for the headers of a hole")
            others.append(entry)
        elif entry.offset + entry.size <= size:
            missed.pop(entry.offset, None)
        end = entry.end
    if missed:
        first = next(iter(missed.values()))
        problem = f"{first.name!r} and {len(missed) - 1} others are in its index, and the tar file does not lead to them"
        raise OSError(errno.EUCLEAN, problem)
    return end, others


def _make_hole(fd: int, entry: Entry, mode: int) -> None:
    """Have an entry that is no member be a hole, with its space given back to the disk."""
    if entry.name != HOLE:  # its server died before the line
        data = headers(HOLE, entry.end - entry.offset, entry.offset - entry.start, mode, int(time.time()))
        write_at(fd, memoryview(data), entry.start)
    begin, last = round_up(entry.offset, PAGE), entry.end // PAGE * PAGE
    if begin < last:
        punch_hole(fd, begin, last - begin)


def _remove_if_empty(storage: Storage, stem: str) -> None:
    """An index without a tar file."""
    with suppress(FileNotFoundError):
        fd = storage.open(stem + INDEX)
        try:
            empty = not whole_lines(read_all(fd))
        finally:
            os.close(fd)
        if not empty:
            raise OSError(errno.EUCLEAN, "its index has lines, and there is no tar file")
        storage.unlink(stem + INDEX)
