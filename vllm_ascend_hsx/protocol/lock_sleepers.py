"""Wait for a lock file with a time limit, which flock() lacks."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Release: TypeAlias = Callable[[int], None]


class _Sleeper(threading.Thread):
    """A thread that sleeps in flock(), so that callers can stop waiting: flock() has no timeout."""

    def __init__(self, key: tuple[int, int], path: Path, fd: int, release: Release) -> None:
        super().__init__(name=f"hsx-lock-{path.name}", daemon=True)
        self._key = key
        self._fd = fd
        self._release = release
        self._woken = threading.Event()
        self._error: OSError | None = None

    def run(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        except OSError as error:
            self._error = error
        finally:
            # First, because callers wait for it. A caller that finds this thread in the table may
            # proceed while the shared lock is held.
            self._woken.set()
            with _sleepers_mutex:
                del _sleepers[self._key]
                self._release(self._fd)

    def join_until(self, deadline: float) -> bool:
        if not self._woken.wait(max(0.0, deadline - time.monotonic())):
            return False
        if self._error is not None:
            raise self._error
        return True


# One thread per lock file, however often a reader times out and retries: by (device, inode).
_sleepers: dict[tuple[int, int], _Sleeper] = {}
_sleepers_mutex = threading.Lock()


def sleep_on(path: Path, fd: int, deadline: float, release: Release) -> None:
    """Sleep until no writer holds the lock file that is open at `fd`.

    Args:
        path, fd: the lock file.
        deadline: latest time, by time.monotonic.
        release: unlocks and closes a descriptor.

    Raises:
        TimeoutError: if a writer still holds it.
        OSError: if its filesystem has no flock.
    """
    if time.monotonic() >= deadline or not _sleeper_of(path, fd, release).join_until(deadline):
        raise TimeoutError(f"{path}: still locked by its writer after the timeout")


def _sleeper_of(path: Path, fd: int, release: Release) -> _Sleeper:
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino)
    with _sleepers_mutex:
        sleeper = _sleepers.get(key)
        if sleeper is None:
            own = os.dup(fd)
            try:
                sleeper = _Sleeper(key, path, own, release)
                sleeper.start()
            except BaseException:
                os.close(own)
                raise
            _sleepers[key] = sleeper
        return sleeper


def _forget_sleepers() -> None:
    """Close the descriptors in a forked child, which has no such threads.

    Callers there start their own.
    """
    global _sleepers_mutex
    _sleepers_mutex = threading.Lock()
    for sleeper in _sleepers.values():
        os.close(sleeper._fd)
    _sleepers.clear()


os.register_at_fork(after_in_child=_forget_sleepers)
