"""The lock file `<path>.lock`: a writer holds an flock on it, and readers wait for its release.

A writer releases the lock file but does not remove it when it has published data or an error.
vLLM's `load_hidden_states` opens the lock file without checking that it exists
(example_hidden_states_connector.py:59, vLLM 0.23.0), and the waiting reader of speculators removes
it itself and fails if it is missing (hs_connectors/transfer.py:43 and 126, hs-connectors 0.9.0).
Consumers remove it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.protocol.files import open_regular
from vllm_ascend_hsx.protocol.lock_sleepers import sleep_on

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
# Seconds before each attempt. An attempt fails if another process changes the name between two
# system calls, or holds the lock for a moment: a server that cleans up, or the reader of
# speculators, which tries an exclusive lock.
_PAUSES = (0.0, 0.0, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016)
_CONTENT_MAX = 16 << 20
# Errors of link(2) on a filesystem without hard links. There the lock file gets its name some
# microseconds before it is locked.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class LockHeldError(Exception):
    """Another writer holds the lock of this file."""


class HeldLock:
    """An exclusive flock on the file `name` in the directory open at `dir_fd`.

    Call `release` or `remove` exactly once.
    """

    def __init__(self, dir_fd: int, name: str, fd: int) -> None:
        self._dir_fd = dir_fd
        self._name = name
        self._fd = fd

    @classmethod
    def acquire(
        cls, dir_fd: int, name: str, mode: int, workspace_fd: int, gid: int = -1
    ) -> HeldLock:
        """Create and lock the lock file.

        Waits for at most some milliseconds; follows no symbolic link. Takes over an existing file
        unless another writer holds it.

        Args:
            dir_fd: the directory.
            name: name of the lock file.
            mode: permissions of a new lock file.
            workspace_fd: the caller's hidden directory, in which a new lock file is made.
            gid: group of a new lock file, or -1 for that of files made in the hidden directory.

        Raises:
            LockHeldError: if another writer holds it.
            OSError: if it cannot be created, or not moved out of the hidden directory (EXDEV).
        """

        def make() -> HeldLock:
            return _make_hidden(workspace_fd, f"{name}.new", mode, gid)

        for pause in _PAUSES:
            if pause:
                time.sleep(pause)
            held = _make(dir_fd, name, mode, make()) or _take_over(dir_fd, name, make)
            if held is not None:
                return held
        raise LockHeldError

    @classmethod
    def create(cls, dir_fd: int, name: str, mode: int) -> HeldLock | None:
        """Create the lock file under its name, then lock it. For names that no reader waits for.

        Returns:
            None if another process locked or removed the file before it was locked here.

        Raises:
            FileExistsError: if the name exists.
            OSError: if it cannot be created, or its filesystem has no flock.
        """
        fd = os.open(name, _CREATE, mode, dir_fd=dir_fd)
        held = cls(dir_fd, name, fd)
        try:
            if hold_new(dir_fd, name, fd):
                os.fchmod(fd, mode)
                return held
        except BaseException:
            held.remove()
            raise
        held.release()
        return None

    @classmethod
    def adopt(cls, dir_fd: int, name: str) -> HeldLock | None:
        """Lock an existing lock file without waiting.

        Returns:
            None if a writer or a reader holds it, or there is no regular file of that name.

        Raises:
            OSError: if it cannot be opened.
        """
        try:
            fd = os.open(name, _OPEN, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        held = None
        try:
            if (
                stat.S_ISREG(os.fstat(fd).st_mode)
                and _flock_now(fd, fcntl.LOCK_EX)
                and _is_named(fd, name, dir_fd)
            ):
                held = cls(dir_fd, name, fd)
        finally:
            if held is None:
                _unlock_and_close(fd)
        return held

    def append(self, line: bytes) -> None:
        """Append to the lock file. Raises OSError."""
        os.lseek(self._fd, 0, os.SEEK_END)
        if os.write(self._fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)

    def content(self) -> bytes:
        """Return the content of the lock file, limited to what a server would write.

        Raises OSError.
        """
        return os.pread(self._fd, min(os.fstat(self._fd).st_size, _CONTENT_MAX), 0)

    def release(self) -> None:
        """Wake the readers. The lock file is kept."""
        _unlock_and_close(self._fd)

    def remove(self) -> None:
        """Remove the lock file if it still has its name, and wake the readers."""
        try:
            if _is_named(self._fd, self._name, self._dir_fd):
                with suppress(FileNotFoundError):  # a consumer may remove it between the two calls
                    os.unlink(self._name, dir_fd=self._dir_fd)
        finally:
            self.release()


def hold_new(dir_fd: int, name: str, fd: int) -> bool:
    """Lock the file `name`, which the caller has just created.

    Returns:
        False if another process locked or removed the file before it was locked here.

    Raises:
        OSError: if the filesystem has no flock.
    """
    return _flock_now(fd, fcntl.LOCK_EX) and _is_named(fd, name, dir_fd)


def _make(dir_fd: int, name: str, mode: int, hidden: HeldLock) -> HeldLock | None:
    """Give a locked file its name.

    A lock file that is not locked and has no data tells readers that its server has died.

    Returns:
        None if the name exists.

    Raises:
        OSError: if it cannot be done, or its filesystem has no flock.
    """
    try:
        os.link(hidden._name, name, src_dir_fd=hidden._dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except FileExistsError:
        hidden.remove()
        return None
    except OSError as error:
        hidden.remove()
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileExistsError):
            return HeldLock.create(dir_fd, name, mode)
        return None
    held = HeldLock(dir_fd, name, hidden._fd)
    try:
        os.unlink(hidden._name, dir_fd=hidden._dir_fd)
    except OSError:
        held.remove()
        raise
    return held


def _make_hidden(workspace_fd: int, hidden: str, mode: int, gid: int) -> HeldLock:
    """Create a locked file in the hidden directory, to get its name later. Raises OSError."""
    try:
        fd = os.open(hidden, _CREATE, mode, dir_fd=workspace_fd)
    except FileExistsError:  # planted, or left by this server when it could not be removed
        os.unlink(hidden, dir_fd=workspace_fd)
        fd = os.open(hidden, _CREATE, mode, dir_fd=workspace_fd)
    held = HeldLock(workspace_fd, hidden, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if gid >= 0:
            os.fchown(fd, -1, gid)
        os.fchmod(fd, mode)
    except BaseException:
        held.remove()
        raise
    return held


def _take_over(dir_fd: int, name: str, make: Callable[[], HeldLock]) -> HeldLock | None:
    """Lock the file `name`, or replace it by what `make` returns. None: it is held or has gone."""
    try:
        fd = os.open(name, _OPEN, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError:  # a symbolic link, a socket, or no permission: replace it
        return _put_in_place(dir_fd, name, make())
    held = None
    try:
        if _flock_now(fd, fcntl.LOCK_EX):
            if not _is_named(fd, name, dir_fd):
                return None
            if stat.S_ISREG(os.fstat(fd).st_mode):
                held = HeldLock(dir_fd, name, fd)  # keep its mode: it may belong to another user
                return held
        elif not _flock_now(fd, fcntl.LOCK_SH):
            return None
        # Only readers hold it. They keep their locks on the old file, and a new file takes its
        # name. Holding the old one as well keeps other writers from adopting it meanwhile.
        return _put_in_place(dir_fd, name, make())
    finally:
        if held is None:
            _unlock_and_close(fd)


def _put_in_place(dir_fd: int, name: str, hidden: HeldLock) -> HeldLock:
    """Replace the file `name` by a lock file that is locked before it is visible."""
    try:
        os.rename(hidden._name, name, src_dir_fd=hidden._dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        hidden.remove()
        raise
    return HeldLock(dir_fd, name, hidden._fd)


def _flock_now(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock_and_close(fd: int) -> None:
    try:
        # Explicitly: a forked child would keep the lock with its copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _is_named(
    fd: int, name: str | Path, dir_fd: int | None = None, *, follow_symlinks: bool = False
) -> bool:
    """Return whether `name` is still a name of the file open at `fd`."""
    try:
        named = os.stat(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def wait_until_released(path: Path, timeout: float | None) -> bool:
    """Sleep until no writer holds the lock file at `path`.

    Args:
        path: the lock file.
        timeout: most seconds to wait. None or infinity waits forever.

    Returns:
        Whether there was a lock file.

    Raises:
        ValueError: if the timeout is not a number of seconds.
        TimeoutError: if a writer still holds it.
        OSError: if it cannot be opened, is not a regular file, or its filesystem has no flock.
    """
    deadline = deadline_after(timeout)
    seen = False
    while True:
        try:
            fd = open_regular(path)
        except FileNotFoundError:
            return seen
        seen = True
        try:
            if not _flock_now(fd, fcntl.LOCK_SH):
                if deadline is None:
                    fcntl.flock(fd, fcntl.LOCK_SH)
                else:
                    sleep_on(path, fd, deadline, _unlock_and_close)
            if _is_named(fd, path, follow_symlinks=True):
                return True
            # The name was removed or now belongs to another request: look again.
        finally:
            _unlock_and_close(fd)


def is_left_over(path: Path, is_decided: Callable[[], bool]) -> bool:
    """Return whether the lock at `path` is not held and its request was never finished.

    Either its server died, or a consumer kept the lock file.

    Args:
        path: the lock file.
        is_decided: returns whether there are data or an error. Called while no writer can take the
            lock over.

    Raises:
        OSError: if the lock file cannot be opened, is not a regular file, or its filesystem has no
            flock.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return False
    try:
        return (
            _flock_now(fd, fcntl.LOCK_SH)
            and not is_decided()
            and _is_named(fd, path, follow_symlinks=True)
        )
    finally:
        _unlock_and_close(fd)
