"""The lock file `<path>.lock`: a writer holds an flock on it until there are data or an error.

After publishing data or an error, a writer releases the lock file but does not remove it. vLLM's
`load_hidden_states` opens the lock file without checking that it exists
(example_hidden_states_connector.py:59, vLLM 0.23.0), and the waiting reader of speculators removes
the lock file and fails if it is missing (hs_connectors/transfer.py:43 and 126, hs-connectors
0.9.0). Consumers remove the lock file.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import (
    OnError,
    again_if_stale,
    link,
    open_name,
    read_bytes,
    write_at,
)

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
# Seconds before each attempt. An attempt fails if another process changes the name between two
# system calls, or holds the lock for a moment (a server that cleans up, or the reader of
# speculators when it tries an exclusive lock). The kernel reports neither. A blocking flock has no
# timeout, and another writer may hold the lock for hours.
_PAUSES = (0.0, 0.0, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016)
_CONTENT_MAX = 16 << 20


class LockHeldError(Exception):
    """Another writer holds the lock of this file."""


class HeldLock:
    """An exclusive flock on the file `name` in the directory open at `dir_fd`.

    Call `release` or `remove` exactly once.

    Attributes:
        fd: the lock file.
    """

    def __init__(self, dir_fd: int, name: str, fd: int) -> None:
        self._dir_fd = dir_fd
        self._name = name
        self.fd = fd

    @classmethod
    def acquire(
        cls,
        dir_fd: int,
        name: str,
        mode: int,
        workspace_fd: int,
        gid: int = -1,
        by_link: bool = True,
    ) -> HeldLock:
        """Create and lock the lock file, or take over an existing one.

        Wait at most some milliseconds, and follow no symbolic link. A new file is locked before
        it gets the name, because readers conclude from a free lock file without data that the
        server has died.

        Args:
            dir_fd: the directory.
            name: name of the lock file.
            mode: permissions of a new lock file.
            workspace_fd: the caller's hidden directory, in which a new lock file is made.
            gid: group of a new lock file, or -1 for the default group in the hidden directory.
            by_link: False if locks do not follow links there; see `locks_follow_links`.

        Raises:
            LockHeldError: if another writer holds the lock.
            OSError: if the lock file cannot be created, or not moved out of the hidden directory
                (EXDEV).
        """
        hidden = cls._create_hidden(workspace_fd, f"{name}.new", mode, gid)
        held: HeldLock | None = None
        try:
            for pause in _PAUSES:
                if pause:
                    time.sleep(pause)
                held = hidden._link(dir_fd, name, mode, by_link) or hidden._take_over(dir_fd, name)
                if held is not None:
                    return held
            raise LockHeldError
        finally:
            if held is not hidden:
                with suppress(OSError):  # the next lock replaces a hidden file that stays
                    hidden.remove()

    @classmethod
    def create(cls, dir_fd: int, name: str, mode: int) -> HeldLock | None:
        """Create the lock file, then lock it. Readers may see the file before it is locked.

        Returns:
            None if another process locked or removed the file before it was locked here.

        Raises:
            FileExistsError: if the name exists.
            OSError: if the lock file cannot be created, or the filesystem has no flock.
        """
        fd = open_name(name, _CREATE, mode, dir_fd=dir_fd)
        held = cls(dir_fd, name, fd)
        with OnError(held.remove):
            if flock_now(fd, fcntl.LOCK_EX) and has_name(fd, name, dir_fd):
                os.fchmod(fd, mode)
                return held
        held.release()
        return None

    @classmethod
    def adopt(cls, dir_fd: int, name: str) -> HeldLock | None:
        """Lock an existing lock file without waiting.

        Return None if a writer or a reader holds the lock, or there is no regular file of that
        name. Raises OSError if the file cannot be opened.
        """
        try:
            fd = open_name(name, _OPEN, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        held = None
        try:
            if (
                stat.S_ISREG(os.fstat(fd).st_mode)
                and flock_now(fd, fcntl.LOCK_EX)
                and has_name(fd, name, dir_fd)
            ):
                held = cls(dir_fd, name, fd)
        finally:
            if held is None:
                unlock_and_close(fd)
        return held

    def is_named(self) -> bool:
        """Return whether the lock file still has its name. Raises OSError."""
        return has_name(self.fd, self._name, self._dir_fd)

    def append(self, line: bytes) -> None:
        """Append the whole line to the lock file, or nothing. Raises OSError."""
        size = os.fstat(self.fd).st_size
        with OnError(os.ftruncate, self.fd, size):
            write_at(self.fd, memoryview(line), size)

    def content(self) -> bytes:
        """Return the content, limited to 16 MiB. Raises OSError."""
        return read_bytes(self.fd, min(os.fstat(self.fd).st_size, _CONTENT_MAX), 0)

    def release(self) -> None:
        """Release the lock and keep the lock file. The readers wake up."""
        unlock_and_close(self.fd)

    def remove(self) -> None:
        """Remove the lock file if it still has the name, and wake the readers."""
        try:
            if self.is_named():
                with suppress(FileNotFoundError):  # a consumer may remove it between the two calls
                    os.unlink(self._name, dir_fd=self._dir_fd)
        finally:
            self.release()

    @classmethod
    def _create_hidden(cls, workspace_fd: int, name: str, mode: int, gid: int) -> HeldLock:
        try:
            fd = open_name(name, _CREATE, mode, dir_fd=workspace_fd)
        except FileExistsError:  # planted, or this server could not remove it
            os.unlink(name, dir_fd=workspace_fd)
            fd = open_name(name, _CREATE, mode, dir_fd=workspace_fd)
        hidden = cls(workspace_fd, name, fd)
        with OnError(hidden.remove):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if gid >= 0:
                os.fchown(fd, -1, gid)
            os.fchmod(fd, mode)
        return hidden

    def _link(self, dir_fd: int, name: str, mode: int, by_link: bool) -> HeldLock | None:
        """Publish this lock as `name`, or create it there. Return None if `name` exists."""
        with suppress(FileExistsError):
            if not by_link or not link(self._dir_fd, self._name, dir_fd, name):
                return HeldLock.create(dir_fd, name, mode)
            hidden_fd, hidden_name = self._dir_fd, self._name
            self._dir_fd, self._name = dir_fd, name
            os.unlink(hidden_name, dir_fd=hidden_fd)
            return self
        return None

    def _take_over(self, dir_fd: int, name: str) -> HeldLock | None:
        """Lock the file `name`, or replace it by this lock. Return None if it is held or gone."""
        try:
            fd = open_name(name, _OPEN, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        except OSError:  # a symbolic link, a socket, or no permission: replace it
            return self._rename(dir_fd, name)
        held = None
        try:
            if flock_now(fd, fcntl.LOCK_EX):
                if not has_name(fd, name, dir_fd):
                    return None
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    held = HeldLock(dir_fd, name, fd)  # keep the mode of another user
                    return held
            elif not flock_now(fd, fcntl.LOCK_SH):
                return None
            # Only readers hold it. They keep their locks on the old file, and a new file replaces
            # it. Also holding the old file keeps other writers from adopting it meanwhile.
            return self._rename(dir_fd, name)
        finally:
            if held is None:
                unlock_and_close(fd)

    def _rename(self, dir_fd: int, name: str) -> HeldLock:
        os.rename(self._name, name, src_dir_fd=self._dir_fd, dst_dir_fd=dir_fd)
        self._dir_fd, self._name = dir_fd, name
        return self


def locks_follow_links(dir_fd: int, name: str) -> bool:
    """Return whether a lock on a file is seen through a hard link to the file. Raises OSError.

    False on FUSE filesystems with a node per name (bindfs), and without hard links. There a lock
    file gets the name some microseconds before it is locked.

    Args:
        dir_fd: the directory. A link is created and removed there.
        name: a file in the directory that this process has locked.
    """
    other = f"{name}.link"
    if not link(dir_fd, name, dir_fd, other):
        return False
    fd = -1
    try:
        fd = open_name(other, _OPEN, dir_fd=dir_fd)
        return not flock_now(fd, fcntl.LOCK_SH)
    finally:
        if fd >= 0:
            unlock_and_close(fd)
        os.unlink(other, dir_fd=dir_fd)


def flock_now(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(fd: int) -> None:
    try:
        # Explicitly: a copy of the descriptor in a forked child would keep the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def has_name(
    fd: int, name: str | Path, dir_fd: int | None = None, *, follow_symlinks: bool = False
) -> bool:
    """Return whether `name` is still a name of the file open at `fd`."""
    try:
        named = again_if_stale(os.stat, name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))
