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
import threading
import time
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.sinks.names import partial_name
from vllm_ascend_hsx.sinks.opening import open_regular

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL
# Seconds before each attempt. An attempt is lost to somebody who changed the name between two of our calls, or who holds the lock for a
# moment: a server that cleans up, and the reader of speculators, which locks exclusively to see whether it can.
_PAUSES = (0.0, 0.0, 0.0, 0.001, 0.002, 0.004, 0.008, 0.016)
_CONTENT_MAX = 16 << 20


class LockHeldError(Exception):
    """Somebody else is writing this file."""


class HeldLock:
    """An exclusive flock on the file `name` in the directory open at `dir_fd`. Ended by `release` or `remove`, once."""

    def __init__(self, dir_fd: int, name: str, fd: int) -> None:
        self._dir_fd = dir_fd
        self._name = name
        self._fd = fd

    @classmethod
    def acquire(cls, dir_fd: int, name: str, mode: int, token: str) -> HeldLock:
        """Create the lock file and hold it; waits for some milliseconds at most, follows no symbolic link.

        A file that stands there already is taken over unless another writer holds it.

        Args:
            dir_fd: the directory.
            name: of the lock file.
            mode: of a lock file that is created.
            token: the server's, for a hidden name.

        Raises:
            LockHeldError: another writer holds it.
            OSError: it cannot be created.
        """
        for pause in _PAUSES:
            if pause:
                time.sleep(pause)
            try:
                held = cls.create(dir_fd, name, mode)
            except FileExistsError:
                held = _take_over(dir_fd, name, mode, token)
            if held is not None:
                return held
        raise LockHeldError

    @classmethod
    def create(cls, dir_fd: int, name: str, mode: int) -> HeldLock | None:
        """Create the lock file and hold it.

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


def _take_over(dir_fd: int, name: str, mode: int, token: str) -> HeldLock | None:
    """Hold the lock file `name`, which exists: an earlier request's, or planted. None if somebody holds it, or it has gone meanwhile."""
    try:
        fd = os.open(name, _OPEN, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError:  # a symbolic link, a socket, not ours to open: put ours in its place
        return _put_in_place(dir_fd, name, mode, token)
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
        return _put_in_place(dir_fd, name, mode, token)
    finally:
        if held is None:
            _unlock_and_close(fd)


def _put_in_place(dir_fd: int, name: str, mode: int, token: str) -> HeldLock:
    """Replace whatever is called `name` by a lock file that is held before it can be seen."""
    hidden = partial_name(name, token)
    fd = os.open(hidden, _CREATE, mode, dir_fd=dir_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, mode)
        os.rename(hidden, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        HeldLock(dir_fd, hidden, fd).remove()
        raise
    return HeldLock(dir_fd, name, fd)


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
        timeout: seconds to wait at most; None waits for ever.

    Returns:
        Whether there was a lock file.

    Raises:
        TimeoutError: a writer still holds it.
        OSError: it cannot be opened or is no regular file, or its filesystem has no flock.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
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
                    _sleep_on(path, fd, deadline)
            if _is_named(fd, path, follow_symlinks=True):
                return True
            # The name has gone, or belongs to another request now: look again.
        finally:
            _unlock_and_close(fd)


class _Sleeper(threading.Thread):
    """A thread asleep in flock(), for callers that must be able to give up: the call itself has no timeout."""

    def __init__(self, key: tuple[int, int], path: Path, fd: int) -> None:
        super().__init__(name=f"hsx-lock-{path.name}", daemon=True)
        self._key = key
        self._fd = fd
        self._woken = threading.Event()
        self._error: OSError | None = None

    def run(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        except OSError as error:
            self._error = error
        finally:
            # Before all else: somebody waits. Who finds this thread in the table is right to go on as long as the shared lock is held.
            self._woken.set()
            with _sleepers_mutex:
                del _sleepers[self._key]
                _unlock_and_close(self._fd)

    def join_until(self, deadline: float) -> bool:
        if not self._woken.wait(max(0.0, deadline - time.monotonic())):
            return False
        if self._error is not None:
            raise self._error
        return True


# One thread per lock file, however often a reader gives up and comes back: by (device, inode).
_sleepers: dict[tuple[int, int], _Sleeper] = {}
_sleepers_mutex = threading.Lock()


def _sleep_on(path: Path, fd: int, deadline: float) -> None:
    if time.monotonic() >= deadline or not _sleeper_of(path, fd).join_until(deadline):
        raise TimeoutError(f"{path}: still locked by its writer when the time to wait was over")


def _sleeper_of(path: Path, fd: int) -> _Sleeper:
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    with _sleepers_mutex:
        sleeper = _sleepers.get(key)
        if sleeper is None:
            own = os.dup(fd)
            try:
                sleeper = _Sleeper(key, path, own)
                sleeper.start()
            except BaseException:
                os.close(own)
                raise
            _sleepers[key] = sleeper
        return sleeper


def _forget_sleepers() -> None:
    """In a forked child: the threads are not there, so their descriptors go, and whoever waits starts its own."""
    global _sleepers_mutex
    _sleepers_mutex = threading.Lock()
    for sleeper in _sleepers.values():
        os.close(sleeper._fd)
    _sleepers.clear()


os.register_at_fork(after_in_child=_forget_sleepers)
