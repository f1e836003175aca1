"""The hidden directory of one server, with a lock that the server holds while it lives."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress

from vllm_ascend_hsx.protocol.files import OnError, open_name
from vllm_ascend_hsx.protocol.heartbeat import BEAT_S, beat_elsewhere, host_line, is_recent
from vllm_ascend_hsx.protocol.lock import HeldLock, locks_follow_links
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, SERVER_LOCK, path_refusal, workspace_name
from vllm_ascend_hsx.sinks.storage import DIRECTORY

LOCK = SERVER_LOCK
_ATTEMPTS = 8  # to create a workspace: a cleaning process may take it before it is locked


class Workspace:
    """A hidden directory for files that are renamed when they are complete.

    The kernel releases the lock when the server dies: a directory with a free lock is an orphan.
    Locks may not reach a server on another machine: for this server, the last heartbeat must also
    be some minutes old. The lock file names the machine, and then the folders in which the server
    has created locks of requests, one per line.

    Attributes:
        token: part of the directory's name.
        fd: the directory.
        locks_follow_links: whether a lock is seen through a hard link; False without a lock.
    """

    def __init__(
        self, parent_fd: int, name: str, token: str, fd: int, lock: HeldLock | None
    ) -> None:
        self.token = token
        self.fd = fd
        self._name = name
        self._parent_fd = parent_fd
        self._lock = lock
        self._folders: set[str] = set()
        self._heart: threading.Thread | None = None
        self._left = threading.Event()
        self.locks_follow_links = False

    @classmethod
    def make(cls, parent_fd: int, use_lock: bool, lock_mode: int) -> Workspace:
        """Create a workspace with the parent's permissions, so the same users may remove files.

        A workspace without a lock is never treated as an orphan. Raises OSError if the workspace
        cannot be created, or the filesystem has no flock.

        Args:
            parent_fd: the storage directory. It must stay open.
            use_lock, lock_mode: whether to hold a lock, and permissions of the lock file.
        """
        for _ in range(_ATTEMPTS):
            token = secrets.token_hex(4)
            # The name may exist; or a cleaning process may have removed the new directory.
            with suppress(FileExistsError, FileNotFoundError):
                made = cls._make(parent_fd, token, use_lock, lock_mode)
                if made is not None:
                    return made
        problem = "other processes locked or removed each new hidden directory"
        raise OSError(errno.EAGAIN, problem)

    @classmethod
    def _make(cls, parent_fd: int, token: str, use_lock: bool, lock_mode: int) -> Workspace | None:
        name = workspace_name(token, use_lock)
        mode = stat.S_IMODE(os.fstat(parent_fd).st_mode) | stat.S_IRWXU
        os.mkdir(name, mode, dir_fd=parent_fd)
        fd = open_name(name, DIRECTORY, dir_fd=parent_fd)
        made = None
        try:
            if (os.fstat(fd).st_mode ^ mode) & 0o777:  # the umask
                os.fchmod(fd, mode)
            lock = HeldLock.create(fd, LOCK, lock_mode) if use_lock else None
            if lock is not None or not use_lock:
                made = cls(parent_fd, name, token, fd, lock)
                made.locks_follow_links = use_lock and locks_follow_links(fd, LOCK)
                if lock is not None:
                    made._start_heartbeat(lock)
            return made
        except OSError:
            with suppress(OSError):
                if made is None:
                    os.rmdir(name, dir_fd=parent_fd)
                else:
                    made.remove()
            raise
        finally:
            if made is None:
                os.close(fd)

    @classmethod
    def adopt(cls, parent_fd: int, token: str, remove_empty: bool) -> Workspace | None:
        """Lock an orphan. Return None if the server lives or the workspace does not exist.

        With `remove_empty`, also remove an empty directory without a lock: the server died before
        it created the lock, or is about to create another directory.

        Raises:
            OSError: if the directory cannot be opened, or has files and no lock. Somebody has
                removed the lock, so nothing shows whether the server lives. Also if the server may
                live on a machine that locks do not reach.
        """
        name = workspace_name(token)
        try:
            fd = open_name(name, DIRECTORY, dir_fd=parent_fd)
        except FileNotFoundError:
            return None
        adopted = None
        try:
            lock = HeldLock.adopt(fd, LOCK)
            if lock is None and LOCK not in (files := os.listdir(fd)):
                if files:
                    problem = (
                        "its lock was removed, so its server may be alive; if not, remove the "
                        "directory"
                    )
                    raise OSError(errno.ENOLCK, problem)
                if remove_empty:
                    _remove_empty(name, parent_fd)
            if lock is not None:
                with OnError(lock.release):
                    _require_no_heartbeat(lock, name, parent_fd)
                adopted = cls(parent_fd, name, token, fd, lock)
            return adopted
        finally:
            if adopted is None:
                os.close(fd)

    def is_locked(self) -> bool:
        """Return False if somebody has removed or replaced the lock, or removed the directory.

        Raises OSError.
        """
        return os.fstat(self.fd).st_nlink > 0 if self._lock is None else self._lock.is_named()

    def note(self, folder: str) -> None:
        """Record a folder that may contain locks; "" records nothing. Raises OSError."""
        if self._lock is not None and folder and folder not in self._folders:
            self._lock.append(os.fsencode(folder) + b"\n")
            self._folders.add(folder)

    def folders(self) -> Iterator[str]:
        """Yield the folders that the server has recorded.

        Other users may have written into the lock file, so paths that lead out of the storage
        directory are skipped.
        """
        if self._lock is not None:
            for folder in {os.fsdecode(line) for line in self._lock.content().split(b"\n")}:
                if folder and path_refusal(f"{folder}/x{DATA_SUFFIX}") is None:
                    yield folder

    def files(self) -> list[str]:
        """Return the names of all files except the lock. Raises OSError."""
        return sorted(set(os.listdir(self.fd)) - {LOCK})

    def remove(self) -> None:
        """Remove the directory with all files, and close it. Raises OSError if it stays."""
        self._stop_heartbeat()
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
            # Without a lock, another process may already be cleaning the directory up.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or self._lock is not None:
                raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Close the directory and leave its files to the next server."""
        self._stop_heartbeat()
        try:
            if self._lock is not None:
                self._lock.release()
        finally:
            os.close(self.fd)

    def _start_heartbeat(self, lock: HeldLock) -> None:
        """Name this machine in the lock file, and touch the file every BEAT_S seconds."""

        def beat() -> None:
            while not self._left.wait(BEAT_S):
                with suppress(OSError):  # failing storage
                    os.utime(lock.fd)

        with suppress(OSError):  # no space: without this line, the lock alone decides
            lock.append(host_line(lock.fd))
        self._heart = threading.Thread(target=beat, name="hsx-heartbeat", daemon=True)
        self._heart.start()

    def _stop_heartbeat(self) -> None:
        self._left.set()
        if self._heart is not None:
            self._heart.join()  # the thread must not touch a closed descriptor


def _require_no_heartbeat(lock: HeldLock, workspace: str, dir_fd: int) -> None:
    """Raise OSError if the server of a free lock may live on another machine."""
    beat = beat_elsewhere(lock.fd)
    if beat is not None and is_recent(beat, workspace, dir_fd):
        problem = (
            f"its lock is free here, but its server had a heartbeat on {beat.machine} a few "
            "minutes ago: the server has just died, or locks do not reach this machine"
        )
        raise OSError(errno.ENOLCK, problem)


def _remove_empty(name: str, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        # The server has created the lock or removed the directory in between.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
