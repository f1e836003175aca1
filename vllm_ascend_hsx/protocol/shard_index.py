"""The lines of a shard's index: what the sink writes and readers understand."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx.protocol.names import path_refusal
from vllm_ascend_hsx.protocol.shard_names import INDEX, parse_name
from vllm_ascend_hsx.protocol.strict_json import LARGEST, is_count, parse
from vllm_ascend_hsx.protocol.tar import BLOCK, is_headed, round_up

# Most names; the others are examined in path_refusal.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]{0,200}\.safetensors")
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_TICK_NS = 50_000_000  # largest lag of a filesystem's clock against the system's
# A file that was changed later, some three years before the last time that a line can have, was
# touched by somebody with another aim.
_LATEST_NS = LARGEST - 10**17


@dataclass(frozen=True)
class Member:
    """A request in a shard, as its line in the index describes it.

    Attributes:
        name: path that a file of it would have below the storage directory.
        offset, size: of its safetensors file, in bytes of the shard.
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

    @property
    def end(self) -> int:
        """Offset of the next member's headers."""
        return round_up(self.offset + self.size, BLOCK)


@dataclass(frozen=True)
class Gone:
    """Hides the earlier members of a name."""

    name: str
    time_ns: int


def encode(line: Member | Gone) -> bytes:
    """Return a line of an index."""
    values: dict[str, Any] = vars(line)
    if isinstance(line, Gone):
        values = {**values, "gone": True}
    return _ENCODER.encode(values).encode("ascii") + b"\n"


def decode(line: bytes) -> Member | Gone | None:
    """Read a line of an index; None if it is invalid, or its name cannot be that of a data file."""
    try:
        values = parse(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("gone", True) is not True:
        return None
    name, time_ns = values.get("name"), values.get("time_ns")
    if not isinstance(name, str) or not is_count(time_ns):
        return None
    if not _PLAIN_NAME.fullmatch(name) and path_refusal(name) is not None:
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
    """Return the lines of an index without their newlines; a last line without one is left out."""
    return content.split(b"\n")[:-1]


def end_of_members(fd: int, index: bytes) -> int:
    """Return where the last member ends in a tar file that must hold the members of its index.

    Args:
        fd: the tar file.
        index: the content of the index.

    Raises:
        ValueError: a line is invalid, or the members do not follow one another as the index says.
        OSError: the tar file cannot be read.
    """
    lines = [decode(line) for line in split_lines(index)]
    if bad := [number for number, line in enumerate(lines, 1) if line is None]:
        raise ValueError(f"{len(bad)} of the {len(lines)} lines of its index cannot be used, first line {bad[0]}")
    end = 0
    for line in lines:
        if isinstance(line, Member):
            if not is_headed(fd, line.offset, line.name, line.size, end):
                raise ValueError(f"its index has {line.name!r} at byte {line.offset}, and the tar file has not")
            end = line.end
    if (size := os.fstat(fd).st_size) < end:
        raise ValueError(f"its index has members up to byte {end}, and the tar file has {size} bytes")
    return end


def latest_ns(dir_fd: int) -> int:
    """Return a time that no line of the indexes in a directory exceeds, if the clock was set back.

    Otherwise 0: a lead over the clock would put this server's lines before later ones of others.
    Raises OSError if the directory cannot be read.
    """
    latest = 0
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            parts = parse_name(entry.name)
            if parts is not None and parts[2] == INDEX:
                with suppress(FileNotFoundError):
                    changed = os.stat(entry.name, dir_fd=dir_fd, follow_symlinks=False).st_mtime_ns
                    latest = max(latest, changed if changed < _LATEST_NS else 0)
    return latest + _TICK_NS if latest > time.time_ns() else 0
