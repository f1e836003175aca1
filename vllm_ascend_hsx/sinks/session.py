"""One sink's stay in a storage directory: checked, open, free of orphans, with a workspace."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_workspace, make_workspace
from vllm_ascend_hsx.sinks.orphans import remove_orphans
from vllm_ascend_hsx.sinks.storage import Storage

_LEADS_ELSEWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

logger = logging.getLogger(__name__)


class Session:
    """One sink's stay in a directory.

    Args:
        directory: its path; created if it does not exist.
        options: how files are written.
        memory: what direct writes will come from; see check_directory.

    Attributes:
        filesystem: what the sink has to know about it.
        storage: the directory, open.
        workspace: the hidden directory below it that files are made in, open.
        requests: how many have files that are not closed; its sink counts them.
        token: part of the workspace's name, and of the names of shards.
        tidy: False if a lock or a shard is left for the next server.

    Raises:
        UserError: files could not be published in the directory, or not with these options.
    """

    def __init__(
        self, directory: Path, options: FileOptions, memory: memoryview | None = None
    ) -> None:
        self._directory = directory
        # speculators opens the lock for writing: let those who may read the data do so.
        self.lock_mode = options.mode | (options.mode & 0o444) >> 1
        self.tidy = True
        self.requests = 0
        self._numbers = itertools.count()
        self.storage = Storage.at(directory, options.mode)
        try:
            self._workspace = make_workspace(
                directory, self.storage.fd, options.use_lock, self.lock_mode
            )
            try:
                self.filesystem = check_workspace(
                    directory, self._workspace, options.io == "direct", memory
                )
            except BaseException:
                self._workspace.remove()
                raise
        except BaseException:
            self.storage.close()
            raise
        self.token = self._workspace.token
        self.workspace = Storage(self._workspace.fd, options.mode)
        if options.use_lock:
            remove_orphans(self.storage.fd, os.fspath(directory))

    def new_name(self, name: str) -> str:
        """A name in the workspace, that no file has had, for what is to become `name`."""
        return f"{name}.{next(self._numbers)}"

    def is_at_its_path(self, folder: str = "", storage: Storage | None = None) -> bool:
        """True if the directory's path leads to it, and from there `folder` to `storage`.

        Somebody may have renamed or replaced them.
        """
        try:
            if not os.path.samestat(os.stat(self._directory), os.fstat(self.storage.fd)):
                return False
            return storage is None or not folder or self.storage.leads_to(folder, storage)
        except OSError as error:
            if error.errno in _LEADS_ELSEWHERE:
                return False
            problem = f"could not find out whether {self._directory} is still where it was"
            logger.error("%s", describe(problem, error))
            return True

    @property
    def has_workspace(self) -> bool:
        """False if somebody has removed the hidden directory: no more files can be made here."""
        try:
            return os.fstat(self.workspace.fd).st_nlink > 0
        except OSError as error:
            problem = f"could not find out whether the hidden directory in {self._directory} is there"
            logger.error("%s", describe(problem, error))
            return True

    def enter(self, folders: Sequence[str], durable: bool) -> Storage:
        """The folder that these names lead to, made if it does not exist; see Storage.enter.

        Raises:
            OSError: it cannot be entered, or is on another filesystem (EXDEV).
        """
        storage = self.storage.enter(folders, durable=durable)
        try:
            if folders and os.fstat(storage.fd).st_dev != os.fstat(self.workspace.fd).st_dev:
                # No file can be renamed to there.
                raise OSError(errno.EXDEV, "it is on another filesystem than the storage directory")
            self._workspace.note(folders)
        except BaseException:
            self.leave(storage)
            raise
        return storage

    def leave(self, storage: Storage) -> None:
        """Close a file's folder, unless it is the directory itself. Raises OSError."""
        if storage is not self.storage:
            storage.close()

    def close(self) -> None:
        """End of the stay: no file is open any more."""
        try:
            (self._workspace.remove if self.tidy else self._workspace.leave)()
        except OSError as error:
            problem = "the hidden directory of this server could not be removed"
            logger.error("%s: %s", self._directory, describe(problem, error))
        finally:
            self.storage.close()
