"""The names of members in a directory's shards. No request may use them again."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field

from vllm_ascend_hsx.protocol.files import NotAFileError, opened, read_bytes
from vllm_ascend_hsx.protocol.names import INDEX, MANIFEST, REMOVED, parse_shard_name
from vllm_ascend_hsx.protocol.shard_index import INDEX_MAX, REMOVED_MAX

# Errors of an index that is gone, not a file, another user's, or leased by another process.
_UNREADABLE = (FileNotFoundError, NotAFileError, PermissionError, BlockingIOError)
# Lines as `encode` writes them. Names are compared as JSON text, without decoding lines.
_MEMBER = re.compile(rb'^\{"name":("(?:[^"\\]|\\.)+"),"offset":', re.MULTILINE)
_GONE = re.compile(rb'^\{"name":("(?:[^"\\]|\\.)+"),"stem":"([^"]+)"', re.MULTILINE)
_SLOW_S = 0.01  # a slower listing is reused
_USED_FOR = 20  # reuse it for this multiple of the listing time


@dataclass
class _Index:
    """The part of an index, or of the list of removed members, that was read.

    Attributes:
        size: bytes of the file when it was read.
        end: end of the last whole line.
        names: hashes of the members' names.
        is_final: True if the shard was sealed before the index was read.
    """

    size: int = 0
    end: int = 0
    names: set[int] = field(default_factory=set)
    is_final: bool = False


class MemberNames:
    """Knows the names of all members in a directory. Only `list_again` is thread-safe.

    `look` reads only new lines, and keeps a hash of each name: a directory may have millions. Lines
    that this package does not write, and indexes that this user may not open, do not count.

    Args:
        dir_fd: the directory. All methods raise OSError if the directory or an index cannot be
            read.
    """

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd
        self._indexes: dict[str, _Index] = {}  # by stem
        self._list_of_removed = _Index()
        self._removed: set[tuple[str, int]] = set()  # stem, and hash of the name
        self._list_at = 0.0  # time of the next listing
        self._created = 0  # shards that this server has created
        self._listed = 0  # the number of them before the last listing

    def has(self, name: str) -> bool:
        """Return whether a member has the name and was not removed."""
        self.look()
        key = hash(json.dumps(name).encode("ascii"))
        return any(
            key in index.names and (stem, key) not in self._removed
            for stem, index in self._indexes.items()
        )

    def look(self) -> None:
        """Read the new lines of the indexes."""
        sealed: set[str] = set()
        created = self._created
        if (began := time.monotonic()) >= self._list_at or created != self._listed:
            self._listed = created
            stems, sealed = self._list()
            self._indexes = {stem: self._indexes.get(stem) or _Index() for stem in stems}
            seconds = time.monotonic() - began
            self._list_at = began + _USED_FOR * seconds if seconds > _SLOW_S else 0.0
        for stem, index in self._indexes.items():
            if not index.is_final:
                index.names.update(
                    hash(match[1])
                    for match in _MEMBER.finditer(self._read(stem + INDEX, index, INDEX_MAX))
                )
                index.is_final = stem in sealed
        lines = self._read(REMOVED, self._list_of_removed, REMOVED_MAX)
        self._removed.update((match[2].decode(), hash(match[1])) for match in _GONE.finditer(lines))

    def list_again(self) -> None:
        """Let the next `look` list the directory again: this server has created a shard.

        The thread that creates shards may call this during `look`.
        """
        self._created += 1

    def _list(self) -> tuple[set[str], set[str]]:
        """Return the stems of all shards with an index, and of all shards with a manifest."""
        found = [
            parts
            for name in os.listdir(self._dir_fd)
            if (parts := parse_shard_name(name)) is not None
        ]
        return {stem for stem, _, suffix in found if suffix == INDEX}, {
            stem for stem, _, suffix in found if suffix == MANIFEST
        }

    def _read(self, name: str, index: _Index, most: int) -> bytes:
        """Return the new whole lines of an index. Skip an index of more than `most` bytes."""
        with (
            suppress(*_UNREADABLE),
            opened(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._dir_fd) as fd,
        ):
            before, index.size = index.size, os.fstat(fd).st_size
            if before < index.size <= most:
                added = read_bytes(fd, index.size - index.end, index.end)
                lines = added[: added.rfind(b"\n") + 1]
                index.end += len(lines)
                return lines
        return b""
