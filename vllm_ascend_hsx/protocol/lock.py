"""The companion lock of a file: a writer holds an flock on `<path>.lock`, and readers sleep in the kernel until it lets go.

A writer leaves the lock file behind, released, when it has published data or an error. It must: vLLM's `load_hidden_states` opens the
lock file without asking whether it exists (example_hidden_states_connector.py:59, vLLM 0.23.0), and the waiting reader of speculators
removes it itself and fails if it is gone (hs_connectors/transfer.py:43 and 126, hs-connectors 0.9.0). Consumers remove it.
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
# Seconds before each attempt. An attempt is lost to somebody who changed the name between two of our calls, or who holds the lock for a
# moment: a server that cleans up, and the reader of speculators, which locks exclusively to see whether it can.
_PAUSES = (0.0, 0.0, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016)
_CONTENT_MAX = 16 << 20
# Of link(2) on a filesystem without hard links. There the lock has its name some microseconds before it is held.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class LockHeldError(Exception):
    """Somebody else is writing this file."""


class HeldLock:
    """An exclusive flock on the file `name` in the directory open at `dir_fd`. Ended by `release` or `remove`, once."""

    def __init__(self, dir_fd: int, name: str, fd: int) -> None:
        self._dir_fd = dir_fd
        self._name = name
        self._fd = fd

    @classmethod
    def acquire(cls, dir_fd: int, name: str, mode: int, workspace_fd: int, gid: int = -1) -> HeldLock:
        """Create the lock file and hold it; waits for some milliseconds at most, follows no symbolic link.

        A file of that name is taken over unless another writer holds it.

        Args:
            dir_fd: the directory.
            name: of the lock file.
            mode: of a lock file that is created.
            workspace_fd: a directory of the caller alone, in which it is made before it has its name.
            gid: its group; -1: the one that files in the workspace have.

        Raises:
            LockHeldError: another writer holds it.
            OSError: it cannot be created, or not be moved from the workspace (EXDEV).
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
        """Create the lock file under its name, then hold it: for a name that no reader waits for.

        Returns:
            None: somebody who saw it before it was held has locked or removed it.

        Raises:
            FileExistsError: something is called so.
            OSError: it cannot be created, or its filesystem has no flock.
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
        """Hold a lock file that is there, at once.

        Returns:
            None: a writer or a reader holds it, or there is no regular file of that name.

        Raises:
            OSError: it cannot be opened.
        """
        try:
            fd = os.open(name, _OPEN, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        held = None
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode) and _flock_now(fd, fcntl.LOCK_EX) and _is_named(fd, name, dir_fd):
                held = cls(dir_fd, name, fd)
        finally:
            if held is None:
                _unlock_and_close(fd)
        return held

    def append(self, line: bytes) -> None:
        """Write at the end of the lock file. Raises OSError."""
        os.lseek(self._fd, 0, os.SEEK_END)
        if os.write(self._fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)

    def content(self) -> bytes:
        """What was written into the lock file, and no more than a server would write: somebody else may have made it. Raises OSError."""
        return os.pread(self._fd, min(os.fstat(self._fd).st_size, _CONTENT_MAX), 0)

    def release(self) -> None:
        """Wake the readers; the lock file stays."""
        _unlock_and_close(self._fd)

    def remove(self) -> None:
        """Remove the lock file, if it is still ours, and wake the readers."""
        try:
            if _is_named(self._fd, self._name, self._dir_fd):
                with suppress(FileNotFoundError):  # a consumer may remove it between the two calls
                    os.unlink(self._name, dir_fd=self._dir_fd)
        finally:
            self.release()


def hold_new(dir_fd: int, name: str, fd: int) -> bool:
    """Hold the file `name`, which the caller has just created.

    Returns:
        False: somebody who saw it before it was held has locked or removed it.

    Raises:
        OSError: the filesystem has no flock.
    """
    return _flock_now(fd, fcntl.LOCK_EX) and _is_named(fd, name, dir_fd)


def _make(dir_fd: int, name: str, mode: int, hidden: HeldLock) -> HeldLock | None:
    """Give a lock file that is held its name: a free lock without data tells readers that its server died.

    Returns:
        None: something is called so.

    Raises:
        OSError: it cannot be done, or its filesystem has no flock.
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
    """A new lock file that has no name yet but in the workspace. Raises OSError."""
    try:
        fd = os.open(hidden, _CREATE, mode, dir_fd=workspace_fd)
    except FileExistsError:  # planted, or ours, if it could not be removed before
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
    """Hold the lock file `name`, which exists: an earlier request's, or planted. None if somebody holds it, or it has gone meanwhile."""
    try:
        fd = os.open(name, _OPEN, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError:  # a symbolic link, a socket, not ours to open: put ours in its place
        return _put_in_place(dir_fd, name, make())
    held = None
    try:
        if _flock_now(fd, fcntl.LOCK_EX):
            if not _is_named(fd, name, dir_fd):
                return None
            if stat.S_ISREG(os.fstat(fd).st_mode):
                held = HeldLock(dir_fd, name, fd)  # with the mode it has: it may belong to another user
                return held
        elif not _flock_now(fd, fcntl.LOCK_SH):
            return None
        # Only readers hold it, of what stood here before, and they keep it; a new one takes its name. Our own lock on the old one
        # keeps other writers from adopting it meanwhile.
        return _put_in_place(dir_fd, name, make())
    finally:
        if held is None:
            _unlock_and_close(fd)


def _put_in_place(dir_fd: int, name: str, hidden: HeldLock) -> HeldLock:
    """Replace whatever is called `name` by a lock file that is held before it can be seen."""
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
        # Not left to close(): a child forked meanwhile would keep the lock with its copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _is_named(fd: int, name: str | Path, dir_fd: int | None = None, *, follow_symlinks: bool = False) -> bool:
    """Whether `name` is still a name of the file open at `fd`."""
    try:
        named = os.stat(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def wait_until_released(path: Path, timeout: float | None) -> bool:
    """Sleep until no writer holds the lock file at `path`.

    Args:
        path: the lock file.
        timeout: seconds to wait at most; None or infinity waits for ever.

    Returns:
        Whether there was a lock file.

    Raises:
        ValueError: the timeout is not a number of seconds.
        TimeoutError: a writer still holds it.
        OSError: it cannot be opened or is no regular file, or its filesystem has no flock.
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
            # The name has gone, or belongs to another request now: look again.
        finally:
            _unlock_and_close(fd)


def is_left_over(path: Path, is_decided: Callable[[], bool]) -> bool:
    """True if nobody writes the file of the lock at `path` and its request was never decided: a server died, or a consumer left the lock.

    Args:
        path: the lock file.
        is_decided: asked while writers cannot take the lock over: is there data or an error?

    Raises:
        OSError: the lock file cannot be opened or is no regular file, or its filesystem has no flock.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return False
    try:
        return _flock_now(fd, fcntl.LOCK_SH) and not is_decided() and _is_named(fd, path, follow_symlinks=True)
    finally:
        _unlock_and_close(fd)
