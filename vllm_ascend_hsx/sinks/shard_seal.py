"""The end of a shard: the blocks that end its tar file, and its manifest."""

from __future__ import annotations

import json
import os
from typing import Literal

from vllm_ascend_hsx.protocol.files import read_all, write_at
from vllm_ascend_hsx.protocol.names import partial_name
from vllm_ascend_hsx.protocol.shard_manifest import manifest
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, TAR
from vllm_ascend_hsx.protocol.tar import END
from vllm_ascend_hsx.sinks.storage import Storage


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
        storage.move(hidden, storage, name)
    except BaseException:
        storage.unlink(hidden)
        raise
    if durable:
        storage.sync()
