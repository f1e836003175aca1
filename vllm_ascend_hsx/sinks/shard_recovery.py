"""The shards of a server that died, sealed by the next one. It can be stopped at any instant and begun again."""

from __future__ import annotations

import errno
import os

from vllm_ascend_hsx.protocol.files import read_all
from vllm_ascend_hsx.protocol.shard_index import Member, decode, end_of_members, split_lines
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, TAR, parse_name
from vllm_ascend_hsx.sinks.shard_file import Shard
from vllm_ascend_hsx.sinks.storage import Storage


def unsealed_shards(dir_fd: int, token: str) -> list[str]:
    """Return the stem of each shard of a server that has no manifest, in order.

    Raises:
        OSError: the directory cannot be read.
    """
    with os.scandir(dir_fd) as entries:
        found = [parts for entry in entries if (parts := parse_name(entry.name)) and parts[1] == token]
    sealed = {stem for stem, _, suffix in found if suffix == MANIFEST}
    return sorted({stem for stem, _, _ in found} - sealed)


def recover_shard(dir_fd: int, workspace_fd: int, stem: str) -> int:
    """Cut off what follows the last member that the index names, and seal the shard durably.

    The caller holds the lock of the hidden directory of the shard's server.

    Args:
        dir_fd: the directory.
        workspace_fd: the hidden directory of its server.
        stem: of the shard.

    Returns:
        The number of its requests.

    Raises:
        OSError: it could not be done. If the index is not there or contradicts the tar file, nothing
            was changed.
    """
    storage = Storage(dir_fd, 0o600)  # the caller closes both
    fds = []
    try:
        fds.append(storage.open(stem + INDEX, os.O_RDWR))
        content = read_all(fds[0])
        lines = content[: content.rfind(b"\n") + 1]
        try:
            fds.append(storage.open(stem + TAR, os.O_RDWR))
        except FileNotFoundError:  # it died between two calls when it made or removed the shard
            if lines:
                raise
            storage.unlink(stem + INDEX)
            return 0
        try:
            end = end_of_members(fds[1], lines)
        except ValueError as error:
            raise OSError(errno.EUCLEAN, str(error)) from error
        workspace = Storage(workspace_fd, os.fstat(fds[1]).st_mode & 0o777)
        shard = Shard(storage, stem, (fds[0], fds[1]), True, len(lines), end)
        fds.clear()
        shard.seal(workspace, "recovery")
        return sum(isinstance(decode(line), Member) for line in split_lines(lines))
    finally:
        for fd in fds:
            os.close(fd)
