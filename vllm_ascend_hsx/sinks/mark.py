"""The mark of a server that lives: a hidden file that it holds an flock on for as long as there may be hidden files with its token."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence

from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import mark_name

_ATTEMPTS = 8  # each is lost only to somebody who cleans up and saw the mark before it was held


class ServerMark:
    """Says that the server whose hidden files have `token` in their names lives. Ended by `remove` or `leave`, once.

    Its file names the folders below the directory in which there may be such files, a line each.

    Args:
        dir_fd: the directory, open for as long as this object is used.
        mode: of the mark's file.

    Raises:
        OSError: it cannot be created or held.
    """

    def __init__(self, dir_fd: int, mode: int) -> None:
        self._folders: set[str] = set()
        for _ in range(_ATTEMPTS):
            self.token = secrets.token_hex(4)
            try:
                held = HeldLock.create(dir_fd, mark_name(self.token), mode)
            except FileExistsError:  # another server's token
                continue
            if held is not None:
                self._held = held
                return
        raise OSError(errno.EAGAIN, "every mark was locked or removed by somebody else at once")

    def enter(self, folders: Sequence[str]) -> None:
        """There may be hidden files in the folder that these names lead to, from now on. Raises OSError: that cannot be noted."""
        folder = "/".join(folders)
        if folder and folder not in self._folders:
            self._held.append(os.fsencode(folder) + b"\n")
            self._folders.add(folder)

    def remove(self) -> None:
        """There are no hidden files any more."""
        self._held.remove()

    def leave(self) -> None:
        """There may be some, which the next server is to remove."""
        self._held.release()
