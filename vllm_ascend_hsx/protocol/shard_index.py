"""The lines of a shard's index: what the sink writes and readers understand."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx.protocol.names import path_refusal
from vllm_ascend_hsx.protocol.shard_names import INDEX, parse_name
from vllm_ascend_hsx.protocol.strict_json import LARGEST, is_count, parse

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]{0,200}\.safetensors")  # most names; the others are looked at for longer


@dataclass(frozen=True)
class Member:
    """A request in a shard, as its line in the index says.

    Attributes:
        name: path that a file of it would have below the storage directory.
        offset, size: of the safetensors file that it is, in bytes of the shard.
        tokens: its rows.
        request_id: as in the file's metadata.
        checksum: as in the file's metadata; empty if that has none.
        time_ns: when it was published, since the epoch.
    """

    name: str
    offset: int
    size: int
    tokens: int
    request_id: str
    checksum: str
    time_ns: int


@dataclass(frozen=True)
class Gone:
    """Says that an earlier member of this name is not to be seen any more."""

    name: str
    time_ns: int


def encode(line: Member | Gone) -> bytes:
    """A line of an index."""
    values: dict[str, Any] = vars(line)
    if isinstance(line, Gone):
        values = {**values, "gone": True}
    return json.dumps(values, separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> Member | Gone | None:
    """What a line of an index says; None if it makes no sense, or names what no file below the directory could be called."""
    try:
        values = parse(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("gone", True) is not True:
        return None
    name, time_ns = values.get("name"), values.get("time_ns")
    if not isinstance(name, str) or not is_count(time_ns) or not (_PLAIN_NAME.fullmatch(name) or path_refusal(name) is None):
        return None
    if "gone" in values:
        return Gone(name, time_ns)
    offset, size, tokens = (values.get(key) for key in ("offset", "size", "tokens"))
    request_id, checksum = (values.get(key, "") for key in ("request_id", "checksum"))
    if not is_count(offset) or not is_count(size) or not is_count(tokens):
        return None
    if not isinstance(request_id, str) or not isinstance(checksum, str):
        return None
    return Member(name, offset, size, tokens, request_id, checksum, time_ns)


def split_lines(content: bytes) -> list[bytes]:
    """The lines of an index, all of which are whole."""
    return content.split(b"\n")[:-1]


def whole_lines(content: bytes) -> bytes:
    """Without a last line whose end was not written."""
    return content[: content.rfind(b"\n") + 1]


def members_by_offset(lines: bytes) -> tuple[dict[int, Member], set[int]]:
    """The members that the lines of an index say are in its tar file, by their offset, and the offsets of those that a later line says are
    gone: such a member may have become a hole. A name that is used again is said to be gone before its next member's line."""
    members: dict[int, Member] = {}
    gone: set[int] = set()
    offsets: dict[str, list[int]] = {}
    for line in map(decode, split_lines(lines)):
        if isinstance(line, Member):
            members[line.offset] = line
            gone.discard(line.offset)  # the place of one that became a hole may be given out again
            offsets.setdefault(line.name, []).append(line.offset)
        elif line is not None:
            gone.update(offset for offset in offsets.pop(line.name, ()) if members[offset].name == line.name)
    return members, gone


def bad_lines(lines: bytes) -> list[int]:
    """The numbers of the lines of an index that make no sense, from 1."""
    return [number for number, line in enumerate(split_lines(lines), 1) if decode(line) is None]


_TICK_NS = 50_000_000  # a filesystem's clock may be so much behind the system's
# A file that was changed later, some three years before the last time that a line can have, was touched by somebody with another aim.
_LATEST_NS = LARGEST - 10**17


class _Clock:
    """Nanoseconds since the epoch that are never the same twice, nor fewer than before, in one process."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._last = 0

    def not_before(self, time_ns: int) -> None:
        """Say nothing earlier from now on: the system's clock may have been set back."""
        with self._mutex:
            self._last = max(self._last, time_ns)

    def now(self) -> int:
        with self._mutex:
            self._last = max(self._last + 1, time.time_ns())
            return self._last


_clock = _Clock()
now_ns = _clock.now


def follow(dir_fd: int) -> None:
    """Have `now_ns` be later than the lines of all indexes in a directory. Raises OSError: it cannot be read."""
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            parts = parse_name(entry.name)
            if parts is not None and parts[2] == INDEX:
                with suppress(FileNotFoundError):
                    changed = os.stat(entry.name, dir_fd=dir_fd, follow_symlinks=False).st_mtime_ns
                    if changed < _LATEST_NS:
                        _clock.not_before(changed + _TICK_NS)
