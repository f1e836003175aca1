"""Check the storage directory at start with one clear error, and open it for a sink's session."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.files import (
    LEADS_NOWHERE,
    OnError,
    again_if_stale,
    describe,
    open_name,
)
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.sinks.data_file import FileOptions, Filesystem
from vllm_ascend_hsx.sinks.member_names import MemberNames
from vllm_ascend_hsx.sinks.mounts import mounted_locks
from vllm_ascend_hsx.sinks.storage import (
    SpareDescriptors,
    Storage,
    is_in_memory,
    open_folder,
    reserve,
)
from vllm_ascend_hsx.sinks.workspace import Workspace

OPTION = "shared_storage_path"
LOCK_OPTION = "use_synchronization_lock"
IO_OPTION = "io"
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SECTORS = (512, 1024, 2048, PAGE)  # alignments that a filesystem may require of direct I/O
_PROBE = "probe"

logger = logging.getLogger(__name__)


class Session:
    """The use of a storage directory by one sink, with a private hidden directory.

    Args:
        directory: path of the directory, created if it does not exist. A symbolic link is
            followed, because the administrator chose it.
        options: how files are written.
        memory: source of direct writes, for a test write: a device driver may map pinned memory in
            a way that the disk cannot read. It begins at a page and is not changed. If it has less
            than two pages, ordinary memory is used.

    Attributes:
        filesystem: properties of the filesystem.
        storage, workspace: the directory, and the hidden directory for new files.
        members: the names of members in the directory.
        spares: descriptors for the reasons of failed requests.
        token: part of the names of the hidden directory and of shards.
        users: number of users: the sink, and each request with an open file. The sink counts them.
        tidy: False if a lock or a shard may be left.

    Raises:
        UserError: if files cannot be created in the directory, or not with these options.
    """

    def __init__(
        self, directory: Path, options: FileOptions, memory: memoryview | None = None
    ) -> None:
        self._directory = directory
        # speculators opens the lock for writing, so readers of the data need write permission.
        self._lock_mode = options.mode | (options.mode & 0o444) >> 1
        self.tidy = True
        self.users = 1
        self._numbers = itertools.count()
        self.storage = Storage(_open_directory(directory), options.mode)
        with OnError(self.storage.close):
            self._workspace = self._make_workspace(options.use_lock)
        with OnError(self.close):  # raises nothing, so the error of the block stays
            # From the last check of the path; device and inode do not change.
            self._directory_status = os.fstat(self.storage.fd)
            self.members = MemberNames(self.storage.fd)
            self.spares = SpareDescriptors(self.storage.fd)
            self.token = self._workspace.token
            self.workspace = Storage(self._workspace.fd, options.mode)
            self.filesystem = self._probe(options.io == "direct", memory)

    def try_file(self) -> None:
        """Write, rename and remove a file. Raises UserError."""
        try:
            fd = self.workspace.create(_PROBE)
            try:
                os.pwrite(fd, b"x", 0)
                os.rename(
                    _PROBE, "renamed", src_dir_fd=self.workspace.fd, dst_dir_fd=self.workspace.fd
                )
            finally:
                os.close(fd)
            self.workspace.unlink("renamed")
        except OSError as error:
            raise self._no_file(error) from error

    def new_name(self, name: str) -> str:
        """Return an unused name in the workspace for a file to publish as `name`."""
        return f"{name}.{next(self._numbers)}"

    def is_at_its_path(self, folder: str = "", storage: Storage | None = None) -> bool:
        """Return whether the directory, and `folder` below it, are still at their paths.

        Another process may have renamed or replaced them. `storage` is the open folder.
        """
        try:
            status = again_if_stale(os.stat, self._directory)
            if not os.path.samestat(status, self._directory_status):
                return False
            self._directory_status = status
            if storage is None or not folder:
                return True
            with open_folder(self.storage.fd, folder) as fd:
                return fd >= 0 and os.path.sameopenfile(fd, storage.fd)
        except OSError as error:
            if error.errno in LEADS_NOWHERE:
                return False
            problem = f"could not determine whether {self._directory} was moved or replaced"
            logger.error("%s", describe(problem, error))
            return True

    @property
    def has_workspace(self) -> bool:
        """False if the hidden directory was removed: no more files can be created in it."""
        try:
            return os.fstat(self.workspace.fd).st_nlink > 0
        except OSError as error:
            problem = (
                f"could not determine whether {self._directory} still has the hidden directory"
            )
            logger.error("%s", describe(problem, error))
            return True

    @property
    def has_lock(self) -> bool:
        """False if the lock or the whole hidden directory was removed.

        Without the lock, nobody would clean up after a crash.
        """
        try:
            return self._workspace.is_locked()
        except OSError as error:
            problem = (
                f"could not determine whether {self._directory} still has the lock of this server"
            )
            logger.error("%s", describe(problem, error))
            return True

    def hold_lock(self, storage: Storage, name: str, gid: int, folder: str) -> HeldLock:
        """Lock the file `name` in a folder that `enter` returned; see HeldLock.acquire.

        Record the path `folder` first, for a later server that cleans up.
        """
        workspace = self._workspace
        workspace.note(folder)
        return HeldLock.acquire(
            storage.fd, name, self._lock_mode, workspace.fd, gid, workspace.locks_follow_links
        )

    def enter(self, folders: Sequence[str], durable: bool) -> Storage:
        """Open the folder at the path `folders`; see Storage.enter. `leave` closes it.

        Raises:
            OSError: if it cannot be opened, or is on another filesystem (EXDEV).
        """
        storage = self.storage.enter(folders, durable=durable)
        with OnError(self.leave, storage):
            if folders and os.fstat(storage.fd).st_dev != os.fstat(self.workspace.fd).st_dev:
                # No file can be renamed into it.
                raise OSError(errno.EXDEV, "it is on another filesystem than the storage directory")
        return storage

    def group_in(self, storage: Storage) -> int:
        """Return the group of new files in a folder from `enter`; see Storage.group_in."""
        status = self._directory_status if storage is self.storage else os.fstat(storage.fd)
        return self.workspace.group_in(status)

    def leave(self, storage: Storage) -> None:
        """Close a folder unless it is the directory itself. Raises OSError."""
        if storage is not self.storage:
            storage.close()

    def close(self, clean_up: Callable[[int], None] | None = None) -> None:
        """End the session. No file may be open.

        Args:
            clean_up: called with the directory if leftovers are possible, because no server may
                ever start there again. None if servers do not clean up after others.
        """
        try:
            try:
                if self.tidy or clean_up is None:
                    self._workspace.remove()
                else:
                    self._workspace.leave()
                    clean_up(self.storage.fd)
            finally:
                self.spares.give_up()
                self.storage.close()
        except OSError as error:
            problem = "the hidden directory of this server could not be removed"
            logger.error("%s: %s", self._directory, describe(problem, error))

    def _make_workspace(self, use_lock: bool) -> Workspace:
        try:
            return Workspace.make(self.storage.fd, use_lock, self._lock_mode)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise self._no_file(error) from error
            if error.errno in _NO_FLOCK:
                problem = f"is on a filesystem without flock: {error.strerror}"
                remedy = (
                    f"Mount it with flock, choose another directory, or set {LOCK_OPTION} to "
                    "false and let readers wait for the file to appear."
                )
            else:
                problem = f"cannot be written: {error.strerror}"
                user = f"the user that runs the server (uid {os.geteuid()})"
                remedy = f"Make it writable for {user}, or choose another directory."
            raise _unusable(self._directory, problem, remedy) from error

    def _probe(self, direct: bool, memory: memoryview | None) -> Filesystem:
        try:
            alignment = self._direct_alignment(memory) if direct else 1
            return Filesystem(alignment, not is_in_memory(self.workspace.fd))
        except OSError as error:
            raise self._no_file(error) from error

    def _direct_alignment(self, memory: memoryview | None) -> int:
        """Find the alignment of direct writes by trying.

        statx lacks the alignment on older kernels, and is wrong on some network filesystems.
        """
        remedy = f'Set {IO_OPTION} to "buffered", or choose a directory on a local disk.'
        with ExitStack() as undo:
            fd = self.workspace.create(_PROBE)
            undo.callback(os.close, fd)
            undo.callback(self.workspace.unlink, _PROBE)
            try:
                direct_fd = self.workspace.open_direct(_PROBE, fd)
            except OSError as error:
                problem = f"is on a filesystem without O_DIRECT: {error.strerror}"
                raise _unusable(self._directory, problem, remedy) from error
            undo.callback(os.close, direct_fd)
            reserve(fd, 2 * PAGE)
            if memory is None or len(memory) < 2 * PAGE:
                memory = memoryview(mmap.mmap(-1, 2 * PAGE))
            for alignment in _SECTORS:
                try:
                    os.pwrite(direct_fd, memory[alignment : 2 * alignment], alignment)
                    return alignment
                except OSError as error:
                    if error.errno in _NO_SPACE:
                        raise
                    refused = error
            problem = f"does not accept direct writes: {refused.strerror}"
            raise _unusable(self._directory, problem, remedy) from refused

    def _no_file(self, error: OSError) -> UserError:
        problem = f"cannot store a file: {error.strerror}"
        remedy = "Free space or raise the quota there, or choose another directory."
        return _unusable(self._directory, problem, remedy)


def check_directory(path: Path, *, use_lock: bool = True, direct: bool = False) -> Filesystem:
    """Create the directory if necessary, and try the operations that requests need.

    Logs a warning if locks may not reach other machines.

    Args:
        path: the directory, as for Session.
        use_lock: refuse a filesystem without flock.
        direct: refuse a filesystem without O_DIRECT.

    Raises:
        UserError: if a file cannot be published there.
    """
    io: Literal["direct", "buffered"] = "direct" if direct else "buffered"
    session = Session(path, FileOptions(use_lock=use_lock, io=io))
    try:
        if use_lock and (local := mounted_locks(path)):
            logger.warning("%s: %s. %s", path, local.problem, local.remedy)
        session.try_file()
        return session.filesystem
    finally:
        session.close()


def _open_directory(path: Path) -> int:
    try:
        os.makedirs(path, exist_ok=True)
        return open_name(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError) as error:
        problem = f"cannot be used: {error.filename} is not a directory"
        raise _unusable(path, problem, "Choose a directory, or remove that file.") from error
    except OSError as error:
        problem = f"cannot be created or opened: {error.strerror}"
        remedy = (
            "Create it, writable for the user that runs the server, or choose another directory."
        )
        raise _unusable(path, problem, remedy) from error
    except ValueError as error:
        raise _unusable(path, f"is not a path: {error}", "Give the path of a directory.") from error


def _unusable(path: Path, problem: str, remedy: str) -> UserError:
    return UserError(OPTION, os.fspath(path), problem, remedy)
