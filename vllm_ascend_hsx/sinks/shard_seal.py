"""The end of a shard: the blocks that end its tar file, and the manifest that says what is in it."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import vllm_ascend_hsx
from vllm_ascend_hsx.sinks.checksum import Digest
from vllm_ascend_hsx.sinks.data_file import write_at
from vllm_ascend_hsx.sinks.format import HIDDEN_STATES, PRODUCER, FormatError, layer_ids_of, read_header
from vllm_ascend_hsx.sinks.names import partial_name
from vllm_ascend_hsx.sinks.shard_index import INDEX, MANIFEST, TAR, Member, decode, split_lines
from vllm_ascend_hsx.sinks.storage import Storage
from vllm_ascend_hsx.sinks.tar import END, HOLE, walk

SHARD_FORMAT_VERSION = "1"
# What of a member's metadata is its own.
_OF_ONE = ("format_version", "producer", "producer_version", "num_prompt_tokens", "num_output_tokens", "request_id", "checksum")


def seal(
    storage: Storage, token: str, stem: str, fd: int, index_fd: int, end: int, durable: bool, sealed_by: Literal["server", "recovery"]
) -> None:
    """End a shard in which nothing is undecided; one that holds nothing at all is removed.

    Args:
        storage: the directory.
        token: for a hidden name.
        stem: of the shard's names.
        fd, index_fd: its tar file and its index, whose lines are whole.
        end: of its last member or hole.
        durable: have it survive a loss of power.
        sealed_by: for the manifest.

    Raises:
        OSError: it could not be done.
    """
    content = read_all(index_fd)
    if not content:
        storage.unlink(stem + TAR)  # first: an index without a tar file holds nothing, a tar file without an index might
        storage.unlink(stem + INDEX)
        return
    os.ftruncate(fd, end)
    os.ftruncate(fd, end + len(END))
    if durable:
        os.fdatasync(fd)
        os.fdatasync(index_fd)
    name = stem + MANIFEST
    hidden = partial_name(name, token)
    text = json.dumps(manifest(fd, content, sealed_by), indent=1) + "\n"
    storage.unlink(hidden)  # of a server that died while it sealed this one
    manifest_fd = storage.create(hidden)
    try:
        try:
            write_at(manifest_fd, memoryview(text.encode("ascii")), 0)
            if durable:
                os.fdatasync(manifest_fd)
        finally:
            os.close(manifest_fd)
        storage.rename(hidden, name)
    except BaseException:
        storage.unlink(hidden)
        raise
    if durable:
        storage.sync()


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
        "producer_version": vllm_ascend_hsx.__version__,
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


def read_all(fd: int) -> bytes:
    """The content of a file. Raises OSError."""
    size = os.fstat(fd).st_size
    blocks = []
    position = 0
    while position < size and (block := os.pread(fd, min(size - position, 1 << 30), position)):
        blocks.append(block)
        position += len(block)
    return b"".join(blocks)
