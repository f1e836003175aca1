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
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.protocol.files import OnError, open_regular

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
# Seconds before each attempt. An attempt fails if another process changes the name between two
# system calls, or holds the lock for a moment: a server that cleans up, or the reader of
# speculators, which tries an exclusive lock. The kernel reports neither; a flock that blocks has no
# timeout, and another writer may hold the lock for hours.
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
    def acquire(cls, dir_fd: int, name: str, mode: int, workspace_fd: int, gid: int = -1) -> HeldLock:
        """Create and lock the lock file, or take over an existing one.

        Waits for at most some milliseconds; follows no symbolic link. A new file is locked before
        it gets its name: a lock file that is free and has no data tells readers that its server
        has died.

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
        hidden = cls._create_hidden(workspace_fd, f"{name}.new", mode, gid)
        held: HeldLock | None = None
        try:
            for pause in _PAUSES:
                if pause:
                    time.sleep(pause)
                held = hidden._link(dir_fd, name, mode) or hidden._take_over(dir_fd, name)
                if held is not None:
                    return held
            raise LockHeldError
        finally:
            if held is not hidden:
                with suppress(OSError):  # a hidden file that stays is replaced by the next one
                    hidden.remove()

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
        with OnError(held.remove):
            if _flock_now(fd, fcntl.LOCK_EX) and _is_named(fd, name, dir_fd):
                os.fchmod(fd, mode)
                return held
        held.release()
        return None

    @classmethod
    def adopt(cls, dir_fd: int, name: str) -> HeldLock | None:
        """Lock an existing lock file without waiting.

        Return None if a writer or a reader holds it, or there is no regular file of that name.
        Raises OSError if it cannot be opened.
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

    def is_named(self) -> bool:
        """Return whether the lock file still has its name. Raises OSError."""
        return _is_named(self._fd, self._name, self._dir_fd)

    def append(self, line: bytes) -> None:
        """Append to the lock file. Raises OSError."""
        os.lseek(self._fd, 0, os.SEEK_END)
        if os.write(self._fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._name)

    def content(self) -> bytes:
        """Return the content, limited to what a server would write. Raises OSError."""
        return os.pread(self._fd, min(os.fstat(self._fd).st_size, _CONTENT_MAX), 0)

    def release(self) -> None:
        """Wake the readers. The lock file is kept."""
        _unlock_and_close(self._fd)

    def remove(self) -> None:
        """Remove the lock file if it still has its name, and wake the readers."""
        try:
            if self.is_named():
                with suppress(FileNotFoundError):  # a consumer may remove it between the two calls
                    os.unlink(self._name, dir_fd=self._dir_fd)
        finally:
            self.release()

    @classmethod
    def _create_hidden(cls, workspace_fd: int, name: str, mode: int, gid: int) -> HeldLock:
        try:
            fd = os.open(name, _CREATE, mode, dir_fd=workspace_fd)
        except FileExistsError:  # planted, or left by this server when it could not be removed
            os.unlink(name, dir_fd=workspace_fd)
            fd = os.open(name, _CREATE, mode, dir_fd=workspace_fd)
        hidden = cls(workspace_fd, name, fd)
        with OnError(hidden.remove):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if gid >= 0:
                os.fchown(fd, -1, gid)
            os.fchmod(fd, mode)
        return hidden

    def _link(self, dir_fd: int, name: str, mode: int) -> HeldLock | None:
        """Give this hidden lock its name. None: the name exists."""
        hidden_fd, hidden_name = self._dir_fd, self._name
        try:
            os.link(hidden_name, name, src_dir_fd=hidden_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        except FileExistsError:
            return None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with suppress(FileExistsError):
                return HeldLock.create(dir_fd, name, mode)
            return None
        self._dir_fd, self._name = dir_fd, name
        os.unlink(hidden_name, dir_fd=hidden_fd)
        return self

    def _take_over(self, dir_fd: int, name: str) -> HeldLock | None:
        """Lock the file `name`, or replace it by this hidden lock. None: it is held or has gone."""
        try:
            fd = os.open(name, _OPEN, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        except OSError:  # a symbolic link, a socket, or no permission: replace it
            return self._rename(dir_fd, name)
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
            return self._rename(dir_fd, name)
        finally:
            if held is None:
                _unlock_and_close(fd)

    def _rename(self, dir_fd: int, name: str) -> HeldLock:
        os.rename(self._name, name, src_dir_fd=self._dir_fd, dst_dir_fd=dir_fd)
        self._dir_fd, self._name = dir_fd, name
        return self


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


def _is_named(fd: int, name: str | Path, dir_fd: int | None = None, *, follow_symlinks: bool = False) -> bool:
    """Return whether `name` is still a name of the file open at `fd`."""
    try:
        named = os.stat(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def is_left_over(path: Path, is_decided: Callable[[], bool]) -> bool:
    """Return whether the lock at `path` is free and its request was never finished.

    Either its server died, or a consumer kept the lock file. `is_decided` returns whether there
    are data or an error; no writer can take the lock over meanwhile.

    Raises:
        OSError: if it cannot be opened, is not a regular file, or its filesystem has no flock.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return False
    try:
        return _flock_now(fd, fcntl.LOCK_SH) and not is_decided() and _is_named(fd, path, follow_symlinks=True)
    finally:
        _unlock_and_close(fd)


def wait_until_released(path: Path, timeout: float | None) -> bool:
    """Wait until no writer holds the lock file at `path`; return whether there was one.

    A `timeout` of None or infinity waits forever; others are in seconds.

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
        try:
            if not _flock_now(fd, fcntl.LOCK_SH):
                if deadline is None:
                    fcntl.flock(fd, fcntl.LOCK_SH)
                else:
                    _sleep_until(deadline, path, fd)
            if _is_named(fd, path, follow_symlinks=True):
                return True
            seen = True  # the name was removed or now belongs to another request: look again
        finally:
            _unlock_and_close(fd)


# flock() has no timeout, so threads sleep in it. One per lock file, however often a reader times
# out and retries: descriptor and result, by (device, inode).
_sleepers: dict[tuple[int, int], tuple[int, futures.Future[None]]] = {}
_sleepers_mutex = threading.Lock()


def _sleep_until(deadline: float, path: Path, fd: int) -> None:
    status = os.fstat(fd)
    key = status.st_dev, status.st_ino
    if (left := deadline - time.monotonic()) > 0:
        with _sleepers_mutex:
            if key not in _sleepers:
                _sleepers[key] = _start_sleeper(key, path, fd)
            _, released = _sleepers[key]
        with suppress(futures.TimeoutError):
            return released.result(left)
    raise TimeoutError(f"{path}: still locked by its writer after the timeout")


def _start_sleeper(key: tuple[int, int], path: Path, fd: int) -> tuple[int, futures.Future[None]]:
    own, released = os.dup(fd), futures.Future[None]()

    def sleep() -> None:
        # The result comes first, because callers wait for it. A caller that finds this thread in
        # the table may proceed while the shared lock is held.
        try:
            fcntl.flock(own, fcntl.LOCK_SH)
            released.set_result(None)
        except OSError as error:
            released.set_exception(error)
        finally:
            with _sleepers_mutex:
                del _sleepers[key]
                _unlock_and_close(own)

    with OnError(os.close, own):
        threading.Thread(target=sleep, name=f"hsx-lock-{path.name}", daemon=True).start()
    return own, released


def _forget_sleepers() -> None:
    """Close the descriptors in a forked child, which has no such threads."""
    global _sleepers_mutex
    _sleepers_mutex = threading.Lock()
    for own, _ in _sleepers.values():
        os.close(own)
    _sleepers.clear()


os.register_at_fork(after_in_child=_forget_sleepers)
