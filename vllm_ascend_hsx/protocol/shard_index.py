"""The lines of a shard's index, and the manifest derived from index and tar file."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.files import read_all
from vllm_ascend_hsx.protocol.format import (
    HIDDEN_STATES,
    PRODUCER,
    FormatError,
    layer_ids_of,
    read_header,
)
from vllm_ascend_hsx.protocol.names import INDEX, parse_shard_name, path_refusal
from vllm_ascend_hsx.protocol.placeholders import PLACEHOLDERS
from vllm_ascend_hsx.protocol.strict_json import is_count, parse
from vllm_ascend_hsx.protocol.tar import BLOCK, end_of_member, is_headed, round_up
from vllm_ascend_hsx.protocol.weights import WEIGHT_VERSIONS, WEIGHTS

# Matches most names. path_refusal examines the others.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]{0,200}\.safetensors")
SHARD_FORMAT_VERSION = "1"
# Larger indexes are not read. A server seals a shard long before.
INDEX_MAX = 256 << 20
REMOVED_MAX = 512 << 20  # bytes of the list of removed members: some five million
# Metadata of a member that differ between the members of a shard.
_OF_ONE = (
    "format_version", "producer", "producer_version", "num_prompt_tokens", "num_output_tokens", "request_id", "arrived_ns",
    "lora", "lora_weights", "checksum", PLACEHOLDERS, WEIGHTS, WEIGHT_VERSIONS, "aborted",
)  # fmt: skip
_ENCODER = json.JSONEncoder(separators=(",", ":"))
LONGEST_LINE = 16 << 20  # bytes; a server writes no longer line
SEAL_AT = INDEX_MAX // 4  # bytes of an index at which the server seals the shard
INDEX_LARGEST = SEAL_AT + LONGEST_LINE  # most bytes of an index that a server has written


@dataclass(frozen=True)
class Member:
    """A request in a shard, as a line of the index describes it.

    Attributes:
        name: path below the storage directory, like the path of a separate file.
        offset, size: offset in the tar file and size of the safetensors file, in bytes.
        tokens: number of rows.
        request_id: as in the file's metadata.
        checksum: as in the file's metadata; empty if there is none.
        time_ns: time of publication in nanoseconds since the epoch, by the server's clock.
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
    """A line in the list of removed members. It hides one member, in any order of lines.

    Attributes:
        name: name of the member.
        stem: stem of the shard's names.
        offset: offset of the member in the shard.
    """

    name: str
    stem: str
    offset: int


def encode(line: Member | Tombstone) -> bytes:
    """Return a line of an index."""
    values: dict[str, Any] = vars(line)
    if isinstance(line, Tombstone):
        values = {**values, "gone": True}
    return _ENCODER.encode(values).encode("ascii") + b"\n"


def decode(line: bytes) -> Member | Tombstone | None:
    """Decode a line of an index. Return None if it is invalid, or the name is not a data file's."""
    try:
        values = parse(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or values.get("gone", True) is not True:
        return None
    name, offset = values.get("name"), values.get("offset")
    if not isinstance(name, str) or not is_count(offset):
        return None
    if not _PLAIN_NAME.fullmatch(name) and path_refusal(name) is not None:
        return None
    if "gone" in values:
        stem = values.get("stem")
        if not isinstance(stem, str) or parse_shard_name(f"{stem}{INDEX}") is None:
            return None
        return Tombstone(name, stem, offset)
    size, tokens, time_ns = (values.get(key) for key in ("size", "tokens", "time_ns"))
    request_id, checksum = (values.get(key, "") for key in ("request_id", "checksum"))
    if not is_count(size) or not is_count(tokens) or not is_count(time_ns):
        return None
    if not isinstance(request_id, str) or not isinstance(checksum, str):
        return None
    return Member(name, offset, size, tokens, request_id, checksum, time_ns)


def read_index(fd: int, most: int = INDEX_MAX) -> bytes:
    """Return the content of an index. Raises OSError, with EFBIG for more than `most` bytes."""
    if (size := os.fstat(fd).st_size) > most:
        raise OSError(errno.EFBIG, f"its index has {size} bytes, more than any server writes")
    return read_all(fd)


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines of an index without newlines. An incomplete last line is left out."""
    return content.split(b"\n")[:-1]


def end_of_members(fd: int, index: bytes) -> int:
    """Check the tar file `fd` against the index, and return the end of the last member.

    Lines after the first problem are not decoded.

    Raises:
        ValueError: if a line is invalid, or the members do not follow one another as the index
            says.
        OSError: if the tar file cannot be read.
    """
    end = 0
    for number, line in enumerate(map(decode, split_lines(index)), 1):
        if not isinstance(line, Member):
            raise ValueError(f"line {number} of its index is invalid")
        if not is_headed(fd, line.offset, line.name, line.size, end):
            raise ValueError(
                f"its index has {line.name!r} at byte {line.offset}, but the tar file does not"
            )
        end = line.end
    if (size := os.fstat(fd).st_size) < end:
        raise ValueError(
            f"its index has members up to byte {end}, but the tar file has {size} bytes"
        )
    return end


def check_end(fd: int, size: int, end: int, index: bytes) -> None:
    """Refuse a shard without a manifest if the end of the index was lost.

    A server that dies leaves at most one append without a line, and the beginning of that line.

    Args:
        fd, size: the tar file, and the size of the tar file before the index was read.
        end: end of the last member in the index.
        index: content of the index.

    Raises:
        ValueError: if the end of the index was lost.
        OSError: if the tar file cannot be read.
    """
    if b"\0" in index[index.rfind(b"\n") + 1 :]:
        raise ValueError("its index ends in zeros")
    append = end_of_member(fd, end)
    if append is not None and size > append:
        raise ValueError(f"the tar file has members after byte {append} that are not in its index")


def shard_manifest(fd: int, index: bytes, sealed_by: str) -> dict[str, Any]:
    """Return the manifest of a shard.

    Args:
        fd: the tar file.
        index: content of the index.
        sealed_by: "server" or "recovery".

    Raises:
        OSError: if the tar file cannot be read, or the first member is damaged.
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
    """Return the metadata of a member that all members of the server share."""
    try:
        header = read_header(fd, member.offset, member.size)
        states = header.tensors[HIDDEN_STATES]
    except (FormatError, KeyError) as error:
        raise OSError(f"the member {member.name!r} does not match its line: {error!r}") from error
    common: dict[str, Any] = {
        key: value for key, value in header.metadata.items() if key not in _OF_ONE
    }
    if "layer_ids" in common:
        common["layer_ids"] = layer_ids_of(header.metadata)
    return {**common, "stored_dtype": states.dtype, "row_shape": list(states.shape[1:])}
