"""The hidden directory of one server, with a lock that the server holds while it lives."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress

from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, path_refusal, workspace_name

LOCK = "lock"
_ATTEMPTS = 8  # each is lost only to somebody who cleans up and comes before the lock is held
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Workspace:
    """Files are made here and renamed to their place.

    The kernel releases the lock when the server dies, however that happens: a directory whose lock
    nobody holds is an orphan. The lock file names the folders that the server has made the locks of
    requests in, a line each.

    Attributes:
        token: part of its name.
        fd: the directory.
    """

    def __init__(self, parent_fd: int, name: str, token: str, fd: int, lock: HeldLock | None) -> None:
        self.token = token
        self.fd = fd
        self._name = name
        self._parent_fd = parent_fd
        self._lock = lock
        self._folders: set[str] = set()

    @classmethod
    def make(cls, parent_fd: int, use_lock: bool, lock_mode: int) -> Workspace:
        """Make a new one, with the permissions of its parent, so that the same users may remove files.

        Args:
            parent_fd: the storage directory, open for as long as this object is used.
            use_lock: hold a lock. Nobody ever takes a directory without one for an orphan.
            lock_mode: permissions of the lock file.

        Raises:
            OSError: it cannot be made, or the filesystem has no flock.
        """
        mode = stat.S_IMODE(os.fstat(parent_fd).st_mode) | stat.S_IRWXU
        for _ in range(_ATTEMPTS):
            token = secrets.token_hex(4)
            name = workspace_name(token, use_lock)
            try:
                os.mkdir(name, mode, dir_fd=parent_fd)
                made = cls._lock_new(parent_fd, name, token, mode, lock_mode if use_lock else None)
            except (FileExistsError, FileNotFoundError):  # of another server, or removed by one
                continue
            if made is not None:
                return made
        problem = "every hidden directory was locked or removed by somebody else at once"
        raise OSError(errno.EAGAIN, problem)

    @classmethod
    def _lock_new(
        cls, parent_fd: int, name: str, token: str, mode: int, lock_mode: int | None
    ) -> Workspace | None:
        """Hold a directory that was just made. None: somebody who cleans up has it."""
        fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
        made = None
        try:
            if (os.fstat(fd).st_mode ^ mode) & 0o777:  # the umask
                os.fchmod(fd, mode)
            lock = None if lock_mode is None else HeldLock.create(fd, LOCK, lock_mode)
            if lock is not None or lock_mode is None:
                made = cls(parent_fd, name, token, fd, lock)
            return made
        except FileExistsError:
            raise
        except OSError:
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent_fd)
            raise
        finally:
            if made is None:
                os.close(fd)

    @classmethod
    def adopt(cls, parent_fd: int, token: str, make_lock: bool) -> Workspace | None:
        """Hold the lock of an orphan.

        Args:
            parent_fd: the storage directory.
            token: of the hidden directory.
            make_lock: make the lock file first if there is none; its server may have died before.

        Returns:
            None: its server lives, or it is not there any more.

        Raises:
            OSError: it cannot be opened.
        """
        name = workspace_name(token)
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
        except FileNotFoundError:
            return None
        lock = None
        try:
            lock = HeldLock.adopt(fd, LOCK)
            if lock is None and make_lock and LOCK not in os.listdir(fd):
                with suppress(FileExistsError, FileNotFoundError):
                    lock = HeldLock.create(fd, LOCK, 0o600)
            return None if lock is None else cls(parent_fd, name, token, fd, lock)
        finally:
            if lock is None:
                os.close(fd)

    def note(self, folders: Sequence[str]) -> None:
        """Note that there may be locks in the folder that these names lead to. Raises OSError."""
        folder = "/".join(folders)
        if self._lock is not None and folder and folder not in self._folders:
            self._lock.append(os.fsencode(folder) + b"\n")
            self._folders.add(folder)

    def folders(self) -> Iterator[str]:
        """The folders that its server has noted.

        Others may have written into the lock file too: none leads out of the storage directory.
        """
        if self._lock is not None:
            for folder in {os.fsdecode(line) for line in self._lock.content().split(b"\n")}:
                if folder and path_refusal(f"{folder}/x{DATA_SUFFIX}") is None:
                    yield folder

    def files(self) -> list[str]:
        """What is in it beside the lock. Raises OSError."""
        return sorted(set(os.listdir(self.fd)) - {LOCK})

    def remove(self) -> None:
        """Remove the directory with all files in it, and close it. Raises OSError: it stays."""
        try:
            for name in self.files():
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.fd)
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.remove()
            with suppress(FileNotFoundError):
                os.rmdir(self._name, dir_fd=self._parent_fd)
        except OSError as error:
            somebody_cleans_up = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and self._lock is None
            if not somebody_cleans_up:
                raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the directory, and leave it to the next server."""
        if self._lock is not None:
            self._lock.release()
        os.close(self.fd)

