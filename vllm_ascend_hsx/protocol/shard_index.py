"""The index of a shard, line by line, and the manifest that is derived from both."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_all
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, PRODUCER, FormatError, layer_ids_of, read_header
from vllm_ascend_hsx.protocol.names import INDEX, REMOVED, parse_shard_name, path_refusal
from vllm_ascend_hsx.protocol.placeholders import PLACEHOLDERS
from vllm_ascend_hsx.protocol.strict_json import LARGEST, is_count, parse
from vllm_ascend_hsx.protocol.tar import BLOCK, is_headed, round_up

# Most names; the others are examined in path_refusal.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]{0,200}\.safetensors")
SHARD_FORMAT_VERSION = "1"
# A server seals a shard long before its index has as many bytes; what has more is not read.
INDEX_MAX = 256 << 20
# Metadata of a member that differ between the members of a shard.
_OF_ONE = (
    "format_version", "producer", "producer_version", "num_prompt_tokens", "num_output_tokens", "request_id", "arrived_ns",
    "lora", "lora_weights", "checksum", PLACEHOLDERS,
)  # fmt: skip
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_TICK_NS = 50_000_000  # largest lag of a filesystem's clock against the system's
_SKEW_NS = 10 * 10**9  # by which the clocks of two machines may differ
_CHUNK = 1 << 16
# Later file times, within three years of the latest possible line, are no server's. Ignore them.
_LATEST_NS = LARGEST - 10**17


@dataclass(frozen=True)
class Member:
    """A request in a shard, as its line in the index describes it.

    Attributes:
        name: path below the storage directory, as if it were a file of its own.
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
class Tombstone:
    """A line that hides the earlier members of a name."""

    name: str
    time_ns: int


def encode(line: Member | Tombstone) -> bytes:
    """Return a line of an index."""
    values: dict[str, Any] = vars(line)
    if isinstance(line, Tombstone):
        values = {**values, "gone": True}
    return _ENCODER.encode(values).encode("ascii") + b"\n"


def decode(line: bytes) -> Member | Tombstone | None:
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
        return Tombstone(name, time_ns)
    offset, size, tokens = (values.get(key) for key in ("offset", "size", "tokens"))
    request_id, checksum = (values.get(key, "") for key in ("request_id", "checksum"))
    if not is_count(offset) or not is_count(size) or not is_count(tokens):
        return None
    if not isinstance(request_id, str) or not isinstance(checksum, str):
        return None
    return Member(name, offset, size, tokens, request_id, checksum, time_ns)


def read_index(fd: int) -> bytes:
    """Return the content of an index. Raises OSError, with EFBIG if no server has written it."""
    if (size := os.fstat(fd).st_size) > INDEX_MAX:
        raise OSError(errno.EFBIG, f"its index has {size} bytes, more than any server writes")
    return read_all(fd)


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of an index without their newlines; a last line without one is left out."""
    return content.split(b"\n")[:-1]


def end_of_members(fd: int, index: bytes) -> int:
    """Return where the last member of the tar file `fd` ends, after checking it with its index.

    Raises:
        ValueError: if a line is invalid, or the members do not follow one another as the index
            says.
        OSError: if the tar file cannot be read.
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

    Otherwise 0, because a lead over the clock would date this server's lines after later ones of
    other servers. Raises OSError if the directory cannot be read.
    """
    latest = 0
    with os.scandir(dir_fd) as entries:
        for entry in entries:
            parts = parse_shard_name(entry.name)
            if parts is not None and parts[2] == INDEX:
                with suppress(FileNotFoundError):
                    changed = os.stat(entry.name, dir_fd=dir_fd, follow_symlinks=False).st_mtime_ns
                    latest = max(latest, changed if changed < _LATEST_NS else 0)
    return latest + _TICK_NS if latest > time.time_ns() else 0


def newest_member(dir_fd: int, name: str, since_ns: int) -> tuple[str, Member] | None:
    """Return the newest line of `name` in a directory's indexes since then, and its shard's stem.

    None if there is none, or it hides the members before it. Reads only the ends of indexes that
    have changed since. Raises OSError if the directory or one of them cannot be read.
    """
    since_ns -= _SKEW_NS
    with os.scandir(dir_fd) as entries:
        names = [entry.name for entry in entries]
    stems = {each: parts[0] for each in names if (parts := parse_shard_name(each)) is not None and parts[2] == INDEX}
    found: list[tuple[str, Member | Tombstone]] = []
    for index, stem in {**stems, REMOVED: ""}.items():
        with suppress(FileNotFoundError, NotAFileError):
            if os.stat(index, dir_fd=dir_fd, follow_symlinks=False).st_mtime_ns < since_ns:
                continue
            fd = open_regular(index, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
            try:
                found += [(stem, line) for line in _lines_since(fd, name, since_ns)]
            finally:
                os.close(fd)
    if not found:
        return None
    stem, newest = max(found, key=lambda each: (each[1].time_ns, isinstance(each[1], Tombstone)))
    return None if isinstance(newest, Tombstone) else (stem, newest)


def _lines_since(fd: int, name: str, since_ns: int) -> list[Member | Tombstone]:
    """Return the lines of `name` at the end of an index, as far back as its lines are that new."""
    text = _ENCODER.encode(name).encode("ascii")
    begin, content, found = os.fstat(fd).st_size, b"", []
    while begin > 0:
        # As much again as was left over, so that a line of any length is copied a few times only.
        begin, end = max(0, begin - max(_CHUNK, len(content))), begin
        content = os.pread(fd, end - begin, begin) + content
        first = content.find(b"\n") + 1 if begin else 0  # of the first whole line
        whole, content = content[first:], content[:first]
        lines = split_lines(whole)
        if text in whole:
            found += [line for line in map(decode, lines) if line is not None and line.name == name]
        oldest = decode(lines[0]) if lines else None
        if oldest is not None and oldest.time_ns < since_ns:
            break
    return [line for line in found if line.time_ns >= since_ns]


def shard_manifest(fd: int, index: bytes, sealed_by: str) -> dict[str, Any]:
    """Return the manifest of a shard.

    Args:
        fd: its tar file.
        index: the content of its index.
        sealed_by: "server" or "recovery".

    Raises:
        OSError: if the tar file cannot be read, or its first member is damaged.
    """
    lines = split_lines(index)
    members = [line for line in map(decode, lines) if isinstance(line, Member)]
    digest = Digest()
    digest.update(index)
    return {
        "format_version": SHARD_FORMAT_VERSION,
        "producer": PRODUCER,
        "producer_version": __version__,
        **(_common_metadata(fd, members[0]) if members else {}),
        "members": len(members),
        "tokens": sum(member.tokens for member in members),
        "bytes": sum(member.size for member in members),
        "index_lines": len(lines),
        "index_checksum": digest.hexdigest(),
        "sealed_by": sealed_by,
    }


def _common_metadata(fd: int, member: Member) -> dict[str, Any]:
    """Return the part of a member's header that all members of its server share."""
    try:
        header = read_header(fd, member.offset, member.size)
        states = header.tensors[HIDDEN_STATES]
    except (FormatError, KeyError) as error:
        raise OSError(f"the member {member.name!r} is not what its line says: {error!r}") from error
    common: dict[str, Any] = {key: value for key, value in header.metadata.items() if key not in _OF_ONE}
    if "layer_ids" in common:
        common["layer_ids"] = layer_ids_of(header.metadata)
    return {**common, "stored_dtype": states.dtype, "row_shape": list(states.shape[1:])}
