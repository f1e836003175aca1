"""The storage directory as a sink lives in it: checked, open, marked as inhabited, and free of what dead servers left."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import StorageDirectoryError, check_directory
from vllm_ascend_hsx.sinks.leftovers import remove_leftovers
from vllm_ascend_hsx.sinks.mark import ServerMark
from vllm_ascend_hsx.sinks.storage import Storage

_LEADS_ELSEWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

logger = logging.getLogger(__name__)


class Home:
    """One sink's life in a directory.

    Args:
        directory: its path; created if it does not exist.
        options: how files are written.
        memory: what direct writes will come from; see check_directory.

    Attributes:
        filesystem: what the sink has to know of it.
        storage: the directory, open.
        requests: how many have files that are not closed; its sink counts them.
        token: part of the names of this sink's hidden files: two servers in one directory never meet in them.
        tidy: whether every hidden file that was to be removed could be.

    Raises:
        StorageDirectoryError: files could not be published in the directory, or not in the way that is asked for.
    """

    def __init__(self, directory: Path, options: FileOptions, memory: memoryview | None = None) -> None:
        self._directory = directory
        self.filesystem = check_directory(directory, use_lock=options.use_lock, direct=options.io == "direct", memory=memory)
        # speculators opens the lock for writing: let those who may read the data do so.
        self.lock_mode = options.mode | (options.mode & 0o444) >> 1
        self.storage = Storage.at(directory, options.mode)
        self.tidy = True
        self.requests = 0
        self._mark: ServerMark | None = None
        if not options.use_lock:
            self.token = secrets.token_hex(4)
            return
        try:
            self._mark = ServerMark(self.storage.fd, self.lock_mode)
            self.token = self._mark.token
            remove_leftovers(self.storage.fd, os.fspath(directory))
        except BaseException as error:
            self.storage.close()
            if isinstance(error, OSError):
                problem = describe("cannot be used: this server's mark in it could not be made", error)
                raise StorageDirectoryError(directory, problem, "Try again.") from error
            raise

    def is_at_its_path(self, folder: str = "", storage: Storage | None = None) -> bool:
        """True if the directory's path leads to it, and from there `folder` to `storage`; somebody may have renamed or replaced them."""
        try:
            if not os.path.samestat(os.stat(self._directory), os.fstat(self.storage.fd)):
                return False
            return storage is None or not folder or self.storage.leads_to(folder, storage)
        except OSError as error:
            if error.errno in _LEADS_ELSEWHERE:
                return False
            logger.error("%s", describe(f"could not find out whether {self._directory} is still where it was", error))
            return True

    def note(self, folders: Sequence[str]) -> None:
        """There may be hidden files in the folder that these names lead to, from now on. Raises OSError: that cannot be noted."""
        if self._mark is not None:
            self._mark.enter(folders)

    def leave(self, storage: Storage) -> None:
        """Close a file's folder, unless it is the directory itself. Raises OSError."""
        if storage is not self.storage:
            storage.close()

    def close(self) -> None:
        """End of life: there are no files under way any more."""
        try:
            if self._mark is not None:
                (self._mark.remove if self.tidy else self._mark.leave)()
        except OSError as error:
            logger.error("%s: %s", self._directory, describe("the mark of this server could not be removed", error))
        finally:
            self.storage.close()
