"""Wait until the writer of a request releases the lock, and detect locks without a writer."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.protocol.files import Naming, OnError, open_regular
from vllm_ascend_hsx.protocol.lock import flock_now, has_name, unlock_and_close


def is_left_over(path: Path, is_decided: Callable[[], bool]) -> bool:
    """Return whether the lock at `path` is free and the request was never finished.

    Either the server died, or a consumer kept the lock file. `is_decided` returns whether there are
    data or an error. No writer can take over the lock during that call.

    Raises:
        OSError: if the lock cannot be opened or is not a regular file, or the filesystem has no
            flock.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return False
    with Naming(path):
        try:
            return (
                flock_now(fd, fcntl.LOCK_SH)
                and not is_decided()
                and has_name(fd, path, follow_symlinks=True)
            )
        finally:
            unlock_and_close(fd)


def wait_until_released(path: Path, timeout: float | None) -> bool:
    """Wait until no writer holds the lock file at `path`. Return whether the file existed.

    `timeout` is in seconds; None or infinity waits forever.

    Raises:
        ValueError: if the timeout is not a number of seconds.
        TimeoutError: if a writer still holds the lock.
        OSError: if the lock cannot be opened or is not a regular file, or the filesystem has no
            flock.
    """
    deadline = deadline_after(timeout)
    seen = False
    while True:
        try:
            fd = open_regular(path)
        except FileNotFoundError:
            return seen
        with Naming(path):
            try:
                if not flock_now(fd, fcntl.LOCK_SH):
                    _sleep_until(deadline, path, fd)
                if has_name(fd, path, follow_symlinks=True):
                    return True
                seen = True  # the name was removed or now belongs to another request: look again
            finally:
                unlock_and_close(fd)


# flock() has no timeout, so threads sleep in it. There is one thread per lock file, even if readers
# time out and retry. Descriptor and result by (device, inode).
_sleepers: dict[tuple[int, int], tuple[int, futures.Future[None]]] = {}
_sleepers_mutex = threading.Lock()


def _sleep_until(deadline: float | None, path: Path, fd: int) -> None:
    status = os.fstat(fd)
    key = status.st_dev, status.st_ino
    left = None if deadline is None else deadline - time.monotonic()
    if left is None or left > 0:
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
                unlock_and_close(own)

    with OnError(os.close, own):
        threading.Thread(target=sleep, name=f"hsx-lock-{path.name}", daemon=True).start()
    return own, released


def _forget_sleepers() -> None:
    """Close the descriptors in a forked child: the threads do not exist there."""
    global _sleepers_mutex
    _sleepers_mutex = threading.Lock()
    for own, _ in _sleepers.values():
        os.close(own)
    _sleepers.clear()


os.register_at_fork(after_in_child=_forget_sleepers)
