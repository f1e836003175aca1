"""A name whose file was replaced on another machine is opened once more."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ascend_hsx.protocol.files import open_name, open_regular, read_regular
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.sinks.storage import DIRECTORY, Storage, open_folder


def stale(monkeypatch: pytest.MonkeyPatch, times: int) -> list[object]:
    """Let so many calls of os.open find a stale name, and return the names that were opened."""
    opened: list[object] = []
    real = os.open

    def open_stale(path: str, *args: int, **options: int) -> int:
        opened.append(path)
        if len(opened) <= times:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", open_stale)
    return opened


def enter(directory: Path, fd: int) -> None:
    Storage(fd, 0o640).enter(["folder"]).close()


def look(directory: Path, fd: int) -> None:
    with open_folder(fd, "folder") as inside:
        assert inside >= 0


def adopt(directory: Path, fd: int) -> None:
    held = HeldLock.adopt(fd, "lock")
    assert held is not None
    held.release()


USES: dict[str, Callable[[Path, int], object]] = {
    "a reader opens a file": lambda directory, fd: os.close(open_regular(directory / "lock")),
    "a reader reads a file": lambda directory, fd: read_regular(directory / "lock"),
    "a server opens a file": lambda directory, fd: os.close(
        open_name("lock", os.O_RDONLY, dir_fd=fd)
    ),
    "a server makes a file": lambda directory, fd: os.close(Storage(fd, 0o640).create("new")),
    "a server enters a folder": enter,
    "a server looks into a folder": look,
    "a server takes a lock": adopt,
}


@pytest.mark.parametrize("use", USES)
def test_a_stale_name_is_opened_once_more_and_no_further_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "lock").touch()
    fd = os.open(tmp_path, DIRECTORY)
    try:
        with monkeypatch.context() as patch:
            opened = stale(patch, 1)
            USES[use](tmp_path, fd)
            assert len(opened) == 2 and opened[0] == opened[1]
        with monkeypatch.context() as patch:
            opened = stale(patch, 9)
            with pytest.raises(OSError, match="Stale file handle"):
                USES[use](tmp_path, fd)
            assert len(opened) == 2
    finally:
        os.close(fd)


def test_other_errors_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    opened = stale(monkeypatch, 0)
    with pytest.raises(FileNotFoundError):
        open_name("missing", os.O_RDONLY)
    assert opened == ["missing"]
