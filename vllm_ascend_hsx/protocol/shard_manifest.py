"""The manifest of a shard: what it says, derived from the shard's tar file and index."""

from __future__ import annotations

from typing import Any

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, PRODUCER, FormatError, layer_ids_of, read_header
from vllm_ascend_hsx.protocol.shard_index import Member, decode, split_lines
from vllm_ascend_hsx.protocol.tar import HOLE, walk

SHARD_FORMAT_VERSION = "1"
# What of a member's metadata is its own.
_OF_ONE = ("format_version", "producer", "producer_version", "num_prompt_tokens", "num_output_tokens", "request_id", "checksum")


def manifest(fd: int, index: bytes, sealed_by: str) -> dict[str, Any]:
    """What the manifest of a shard says.

    Args:
        fd: its tar file.
        index: the content of its index.
        sealed_by: who ended it.

    Raises:
        OSError: it cannot be read.
    """
    lines = split_lines(index)
    members = [line for line in map(decode, lines) if isinstance(line, Member)]
    digest = Digest()
    digest.update(index)
    return {
        "format_version": SHARD_FORMAT_VERSION,
        "producer": PRODUCER,
        "producer_version": __version__,
        **(_in_common(fd, members[0]) if members else {}),
        "members": len(members),
        "tokens": sum(member.tokens for member in members),
        "bytes": sum(member.size for member in members),
        "hole_bytes": sum(entry.size for entry in walk(fd) if entry.name == HOLE),
        "index_lines": len(lines),
        "index_checksum": digest.hexdigest(),
        "sealed_by": sealed_by,
    }


def _in_common(fd: int, member: Member) -> dict[str, Any]:
    """What is the same for all members of a server, from the header of one of them."""
    try:
        header = read_header(fd, member.offset, member.size)
    except FormatError as error:
        raise OSError(f"the member {member.name!r} is not what its line says: {error}") from error
    states = header.tensors.get(HIDDEN_STATES)
    if states is None:
        raise OSError(f"the member {member.name!r} has no {HIDDEN_STATES}")
    common: dict[str, Any] = {key: value for key, value in header.metadata.items() if key not in _OF_ONE}
    if "layer_ids" in common:
        common["layer_ids"] = layer_ids_of(header.metadata)
    return {**common, "stored_dtype": states.dtype, "row_shape": list(states.shape[1:])}
