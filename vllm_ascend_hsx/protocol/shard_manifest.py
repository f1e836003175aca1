"""The manifest of a shard, derived from its tar file and index."""

from __future__ import annotations

from typing import Any

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.format import (
    HIDDEN_STATES,
    PRODUCER,
    FormatError,
    layer_ids_of,
    read_header,
)
from vllm_ascend_hsx.protocol.shard_index import Member, decode, split_lines

SHARD_FORMAT_VERSION = "1"
# Metadata of a member that differ between the members of a shard.
_OF_ONE = (
    "format_version", "producer", "producer_version", "num_prompt_tokens", "num_output_tokens", "request_id", "checksum",
)  # fmt: skip


def manifest(fd: int, index: bytes, sealed_by: str) -> dict[str, Any]:
    """Return the manifest of a shard.

    Args:
        fd: its tar file.
        index: the content of its index.
        sealed_by: "server" or "recovery".

    Raises:
        OSError: the tar file cannot be read, or its first member is damaged.
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
        "index_lines": len(lines),
        "index_checksum": digest.hexdigest(),
        "sealed_by": sealed_by,
    }


def _in_common(fd: int, member: Member) -> dict[str, Any]:
    """Return what the header of a member says of all members of its server."""
    try:
        header = read_header(fd, member.offset, member.size)
        states = header.tensors[HIDDEN_STATES]
    except (FormatError, KeyError) as error:
        raise OSError(f"the member {member.name!r} is not what its line says: {error!r}") from error
    common: dict[str, Any] = {key: value for key, value in header.metadata.items() if key not in _OF_ONE}
    if "layer_ids" in common:
        common["layer_ids"] = layer_ids_of(header.metadata)
    return {**common, "stored_dtype": states.dtype, "row_shape": list(states.shape[1:])}
