"""Acknowledge files that consumers no longer need. `hsx clean` may remove them."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.acknowledgement import acknowledges, encode_acknowledgement
from vllm_ascend_hsx.protocol.arguments import require_path
from vllm_ascend_hsx.protocol.files import (
    NotAFileError,
    OnError,
    again_if_stale,
    open_name,
    read_regular,
    write_at,
)
from vllm_ascend_hsx.protocol.names import (
    ACKNOWLEDGED_SUFFIX,
    MANIFEST,
    TAR,
    parse_shard_name,
    partial_name,
)
from vllm_ascend_hsx.reader.load import PATH_REMEDY
from vllm_ascend_hsx.reader.members import open_member


def acknowledge(path: str | os.PathLike[str]) -> None:
    """Mark a file as used. `hsx clean --older-than` or `--keep-bytes` may then remove it.

    Readers see no difference. `remove` also removes the mark.

    Args:
        path: a complete file as for `load`, or the tar file of a sealed shard, but not a member.

    Raises:
        FileNotFoundError: if there is no complete file.
        ValueError: if `path` is no path, a member of a shard, or a shard that is not sealed.
        OSError: if the mark cannot be written.
    """
    path = require_path("path", path, PATH_REMEDY, named=True)
    status = again_if_stale(os.stat, path) if os.path.lexists(path) else None
    if status is None:
        if (place := open_member(path)) is not None:
            os.close(place.fd)
            raise ValueError(
                f"{path} is a member of a shard; acknowledge the tar file when all of its "
                "members have been used"
            )
        raise FileNotFoundError(errno.ENOENT, "there is no complete file to acknowledge", str(path))
    if not os.path.isfile(path):
        raise NotAFileError(path, status.st_mode)
    shard = parse_shard_name(path.name)
    if (
        shard is not None
        and shard[2] == TAR
        and not os.path.lexists(path.with_name(shard[0] + MANIFEST))
    ):
        raise ValueError(
            f"{path} is not sealed: a server may be writing it; acknowledge it when "
            f"{shard[0]}{MANIFEST} is there"
        )
    marker = path.with_name(path.name + ACKNOWLEDGED_SUFFIX)
    with suppress(FileNotFoundError):
        if acknowledges(read_regular(marker), status):
            return
    _write(marker, encode_acknowledgement(status))


def _write(marker: Path, content: bytes) -> None:
    """Create or replace a marker at once. Raises OSError."""
    hidden = marker.with_name(partial_name(marker.name, secrets.token_hex(4)))
    fd = open_name(
        hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    with OnError(os.unlink, hidden):
        try:
            write_at(fd, memoryview(content), 0)
        finally:
            os.close(fd)
        os.rename(hidden, marker)
