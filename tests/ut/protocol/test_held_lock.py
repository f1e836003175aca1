"""HeldLock: locked before it has the name, taken over from earlier requests, and released."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from sink_harness import FORMAT, is_held, listing, put, wait_for_sleepers

from vllm_ascend_hsx.protocol import lock as lock_module
from vllm_ascend_hsx.protocol.lock import HeldLock, LockHeldError
from vllm_ascend_hsx.reader.lock_wait import is_left_over, wait_until_released
from vllm_ascend_hsx.sinks.file import FileSink


def acquire(directory: Path) -> HeldLock:
    dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    return HeldLock.acquire(dir_fd, "f.lock", 0o600, dir_fd)


def without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: object, **options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)


def test_lock_is_created_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_hard_links(monkeypatch)
    held = acquire(tmp_path)
    assert is_held(tmp_path / "f.lock")
    assert listing(tmp_path) == ["f.lock"]
    with pytest.raises(LockHeldError):
        acquire(tmp_path)
    held.remove()


def test_lock_is_visible_where_locks_do_not_follow_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bindfs creates a node for each name, and the kernel keeps locks by node."""

    def link(
        source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool
    ) -> None:
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dst_dir_fd)
        os.close(made)

    monkeypatch.setattr(os, "link", link)
    with FileSink(tmp_path, FORMAT) as sink:
        path = tmp_path / "a.safetensors"
        file = sink.open("a", path, 3)
        assert is_held(tmp_path / "a.safetensors.lock")
        put(file, 3)
        assert not is_held(tmp_path / "a.safetensors.lock")
    assert listing(tmp_path) == ["a.safetensors", "a.safetensors.lock"]


def test_locks_follow_links_on_this_filesystem_and_the_probe_leaves_nothing(tmp_path: Path) -> None:
    dir_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    held = HeldLock.create(dir_fd, "lock", 0o600)
    assert held is not None
    assert lock_module.locks_follow_links(dir_fd, "lock")
    assert listing(tmp_path) == ["lock"]
    held.release()
    os.close(dir_fd)


def test_lock_file_left_by_an_earlier_request_is_taken_over(tmp_path: Path) -> None:
    acquire(tmp_path).release()
    inode = os.stat(tmp_path / "f.lock").st_ino
    held = acquire(tmp_path)
    assert os.stat(tmp_path / "f.lock").st_ino == inode
    assert is_held(tmp_path / "f.lock")
    held.release()


def test_reader_of_an_earlier_file_does_not_block_a_new_request(
    tmp_path: Path,
) -> None:
    acquire(tmp_path).release()
    with open(tmp_path / "f.lock") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        held = acquire(tmp_path)
        assert is_held(tmp_path / "f.lock"), (
            "the new lock is held under the name, and the reader keeps the old one"
        )
        held.release()
    assert listing(tmp_path) == ["f.lock"]


def test_lock_held_by_a_writer_is_refused(tmp_path: Path) -> None:
    held = acquire(tmp_path)
    with pytest.raises(LockHeldError):
        acquire(tmp_path)
    held.release()


def test_lock_file_removed_during_takeover_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(tmp_path).release()
    real, seen = lock_module.flock_now, []

    def flock_now(fd: int, kind: int) -> bool:
        if not seen:
            os.unlink(tmp_path / "f.lock")  # speculators' reader, having taken the earlier file
        seen.append(kind)
        return real(fd, kind)

    monkeypatch.setattr(lock_module, "flock_now", flock_now)
    held = acquire(tmp_path)
    monkeypatch.undo()
    assert is_held(tmp_path / "f.lock")
    held.release()


def test_reader_that_locks_a_new_lock_file_first_does_not_block_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_hard_links(monkeypatch)
    real = lock_module.flock_now
    readers: list[int] = []

    def flock_now(fd: int, kind: int) -> bool:
        if not readers:
            readers.append(os.open(tmp_path / "f.lock", os.O_RDONLY))
            fcntl.flock(readers[0], fcntl.LOCK_SH)
        return real(fd, kind)

    monkeypatch.setattr(lock_module, "flock_now", flock_now)
    held = acquire(tmp_path)
    monkeypatch.undo()
    assert is_held(tmp_path / "f.lock")
    os.close(readers[0])
    held.release()


def test_lease_on_the_lock_file_does_not_block_the_worker(tmp_path: Path) -> None:
    """A user who may write the file can make open() wait for 45 s (fs/lease-break-time)."""
    acquire(tmp_path).release()
    lessee = os.open(tmp_path / "f.lock", os.O_RDWR)
    ignored = signal.signal(
        signal.SIGIO, signal.SIG_IGN
    )  # the kernel asks for the lease by this signal
    fcntl.fcntl(lessee, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        started = time.monotonic()
        held = acquire(tmp_path)
        assert time.monotonic() - started < 20
        assert is_held(tmp_path / "f.lock")
        held.release()
    finally:
        os.close(lessee)
        signal.signal(signal.SIGIO, ignored)


def test_reader_continues_with_the_lock_that_replaced_its_lock(tmp_path: Path) -> None:
    name = tmp_path / "f.lock"
    first = acquire(tmp_path)
    woken = threading.Event()
    reader = threading.Thread(
        target=lambda: (wait_until_released(name, 30), woken.set()), daemon=True
    )
    reader.start()
    wait_for_sleepers(name)
    name.unlink()
    second = acquire(tmp_path)
    first.release()
    wait_for_sleepers(name)
    assert not woken.is_set()
    second.release()
    assert woken.wait(30)


def test_removing_a_lock_keeps_its_replacement(tmp_path: Path) -> None:
    first = acquire(tmp_path)
    os.unlink(tmp_path / "f.lock")
    second = acquire(tmp_path)
    first.remove()
    assert is_held(tmp_path / "f.lock")
    second.remove()
    assert listing(tmp_path) == []


@pytest.mark.parametrize("decided", [False, True])
def test_free_lock_is_left_over_only_if_its_request_did_not_end(
    tmp_path: Path, decided: bool
) -> None:
    """The request may be published between listing the directory and trying the lock."""
    lock = tmp_path / "a.safetensors.lock"
    lock.touch()
    assert is_left_over(lock, lambda: decided) is not decided


def test_incomplete_line_on_a_full_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next line would be appended to it, and the folder in that line be lost."""
    dir_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    lock = HeldLock.create(dir_fd, "lock", 0o644)
    assert lock is not None
    lock.append(b"first\n")
    pwrite = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if len(data) < 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[:4], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            lock.append(b"second\n")
    lock.append(b"third\n")
    assert lock.content() == b"first\nthird\n"
    lock.release()
    os.close(dir_fd)
