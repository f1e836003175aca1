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
_ATTEMPTS = 8  # to make one; one is lost if a cleaning process takes it before it is locked


class Workspace:
    """A hidden directory in which files are made, to be renamed to their place.

    The kernel releases the lock however the server dies: a directory whose lock is free is an
    orphan. A server on another machine, which the lock may not reach, must also have had no
    heartbeat for some minutes. The lock file names the machine, and then the folders in which the
    server has made locks of requests, one per line.

    Attributes:
        token: part of its name.
        fd: the directory.
        locks_follow_links: whether a lock is seen through a hard link; False without a lock.
    """

    def __init__(self, parent_fd: int, name: str, token: str, fd: int, lock: HeldLock | None) -> None:
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
        """Make a new one with the permissions of its parent, so the same users may remove files.

        Without a lock it is never taken for an orphan. Raises OSError if it cannot be made, or the
        filesystem has no flock.

        Args:
            parent_fd: the storage directory, which must stay open.
            use_lock, lock_mode: hold a lock, and permissions of its file.
        """
        for _ in range(_ATTEMPTS):
            token = secrets.token_hex(4)
            # The name may exist; or a cleaning process may have removed the new directory.
            with suppress(FileExistsError, FileNotFoundError):
                made = cls._make(parent_fd, token, use_lock, lock_mode)
                if made is not None:
                    return made
        problem = "every hidden directory was locked or removed by another process at once"
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
        """Take the lock of an orphan, or return None if its server lives or it does not exist.

        `remove_empty` removes an empty directory without a lock: its server died before it made
        one, or is about to make another directory.

        Raises:
            OSError: if the directory cannot be opened, or has files and no lock. Somebody has
                removed the lock, so nothing shows whether the server lives. Also if the server may
                live on a machine that its lock does not reach.
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
                    problem = "its lock was removed, so its server may be alive; if not, remove the directory"
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
        """Return False if somebody has removed or replaced its lock, or removed the directory.

        Raises OSError.
        """
        return os.fstat(self.fd).st_nlink > 0 if self._lock is None else self._lock.is_named()

    def note(self, folder: str) -> None:
        """Record that a folder, or "" for none, may contain locks. Raises OSError."""
        if self._lock is not None and folder and folder not in self._folders:
            self._lock.append(os.fsencode(folder) + b"\n")
            self._folders.add(folder)

    def folders(self) -> Iterator[str]:
        """Yield the folders that its server has recorded.

        Other users may have written into the lock file: paths that lead out of the storage
        directory are left out.
        """
        if self._lock is not None:
            for folder in {os.fsdecode(line) for line in self._lock.content().split(b"\n")}:
                if folder and path_refusal(f"{folder}/x{DATA_SUFFIX}") is None:
                    yield folder

    def files(self) -> list[str]:
        """Return the names of its files except the lock. Raises OSError."""
        return sorted(set(os.listdir(self.fd)) - {LOCK})

    def remove(self) -> None:
        """Remove the directory with all its files, and close it. Raises OSError: it stays."""
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
                with suppress(OSError):  # storage that fails
                    os.utime(lock.fd)

        with suppress(OSError):  # no space: without the name, the lock alone decides
            lock.append(host_line(lock.fd))
        self._heart = threading.Thread(target=beat, name="hsx-heartbeat", daemon=True)
        self._heart.start()

    def _stop_heartbeat(self) -> None:
        self._left.set()
        if self._heart is not None:
            self._heart.join()  # it must not touch a descriptor that is closed


def _require_no_heartbeat(lock: HeldLock, workspace: str, dir_fd: int) -> None:
    """Raise OSError if the server of a free lock may live on another machine."""
    beat = beat_elsewhere(lock.fd)
    if beat is not None and is_recent(beat, workspace, dir_fd):
        problem = (
            f"its lock is free here, but its server had a heartbeat on {beat.machine} a few "
            "minutes ago: it has just died, or locks do not reach this machine"
        )
        raise OSError(errno.ENOLCK, problem)


def _remove_empty(name: str, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        # Its server has made the lock, or removed the directory, in between.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
