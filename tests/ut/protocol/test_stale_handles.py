"""A name whose file was replaced on another machine is opened once more."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sink_harness import FORMAT

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.files import open_name, open_regular, read_regular, sync_directory
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.reader.find import files_in, find
from vllm_ascend_hsx.reader.lock_wait import wait_until_released
from vllm_ascend_hsx.reader.other_machines import OtherMachines
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.storage import DIRECTORY, Storage, open_folder


def stale(monkeypatch: pytest.MonkeyPatch, times: int, call: str = "open") -> list[object]:
    """Let this number of calls of a function of os fail with ESTALE. Return all names."""
    names: list[object] = []
    real = getattr(os, call)

    def call_stale(path: str, *args: Any, **options: Any) -> Any:
        names.append(path)
        if len(names) <= times:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, call_stale)
    return names


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
    "a directory is synced": lambda directory, fd: sync_directory(directory),
}
LOOKS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "stat of a file": ("stat", lambda directory: read_regular(directory / "lock")),
    "stat of a lock": ("stat", lambda directory: wait_until_released(directory / "lock", 0)),
    "stat of shards": ("stat", lambda directory: Shards(directory).members()),
    "listing of shards": ("scandir", lambda directory: Shards(directory).members()),
    "listing for find": ("scandir", lambda directory: find(directory, "cmpl-1")),
    "listing of files": ("scandir", lambda directory: files_in(directory)),
    "opening the storage directory": (
        "open",
        lambda directory: FileSink(directory, FORMAT).close(),
    ),
    "listing of servers": ("scandir", lambda directory: OtherMachines(directory / "x").living()),
}


@pytest.mark.parametrize("use", USES)
def test_stale_name_is_opened_once_more(
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


@pytest.mark.parametrize("look", LOOKS)
def test_stale_name_is_looked_up_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    (tmp_path / "lock").touch()
    call, use = LOOKS[look]
    with monkeypatch.context() as patch:
        names = stale(patch, 1, call)
        with suppress(FileNotFoundError):  # `find` finds nothing
            use(tmp_path)
        assert names[0] == names[1]
    with monkeypatch.context() as patch:
        names = stale(patch, 9, call)
        with suppress(OSError, UserError):
            use(tmp_path)
        assert names.count(names[0]) == 2


def test_other_errors_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    monkeypatch.chdir(tmp_path)
    opened = stale(monkeypatch, 0)
    with pytest.raises(FileNotFoundError):
        open_name("missing", os.O_RDONLY)
    assert opened == ["missing"]
