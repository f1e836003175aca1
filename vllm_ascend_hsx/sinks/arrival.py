"""When the request arrived whose rows, or whose reason, are published under a name."""

from __future__ import annotations

import os
from contextlib import suppress

from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_regular
from vllm_ascend_hsx.protocol.format import ARRIVED, FormatError, arrived_ns_of, read_header
from vllm_ascend_hsx.protocol.names import TAR
from vllm_ascend_hsx.protocol.shard_index import newest_member
from vllm_ascend_hsx.protocol.strict_json import is_count, parse


def arrival_of_file(dir_fd: int, name: str, offset: int = 0, size: int | None = None) -> int | None:
    """Return when the request of a file in a directory arrived, in nanoseconds since the epoch.

    None if there is no file, or it does not tell. Raises OSError if it cannot be read.

    Args:
        dir_fd: the directory.
        name: of the file.
        offset, size: of the rows in it; see read_header.
    """
    with suppress(FileNotFoundError, NotAFileError, FormatError):
        fd = open_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            return arrived_ns_of(read_header(fd, offset, size).metadata)
        finally:
            os.close(fd)
    return None


def arrival_of_error(dir_fd: int, name: str) -> int | None:
    """Return the same for the file of a reason."""
    with suppress(FileNotFoundError, NotAFileError, ValueError):
        said = parse(read_regular(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd))
        arrived_ns = said.get(ARRIVED) if isinstance(said, dict) else None
        return arrived_ns if is_count(arrived_ns) else None
    return None


def arrival_of_member(dir_fd: int, name: str, since_ns: int) -> int | None:
    """Return the same for the newest member of a name in the directory's shards.

    Members from before `since_ns` are not looked for.
    """
    found = newest_member(dir_fd, name, since_ns)
    return None if found is None else arrival_of_file(dir_fd, found[0] + TAR, found[1].offset, found[1].size)
