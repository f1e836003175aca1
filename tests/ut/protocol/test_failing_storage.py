"""An error of the storage names the file, whichever call it comes from."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written_files import rows_of, write, write_member

from vllm_ascend_hsx.cli import verify
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.reader.check import check
from vllm_ascend_hsx.reader.find import find
from vllm_ascend_hsx.reader.load import load, open_dir, remove

CALLS = {
    "pread": os, "preadv": os, "fstat": os, "flock": fcntl, "mmap": mmap,
}  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    "load": load,
    "load mapped": lambda path: load(path, mmap=True),
    "load verified": lambda path: load(path, verify=True),
    "check": check,
    "open_dir": lambda path: list(open_dir(path.parent)),
    "find": lambda path: find(path.parent, "cmpl-none"),
    "remove": remove,
}


def a_file(directory: Path) -> Path:
    return write(directory, "s", rows_of(3))


def fail(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the call fail from its `number`-th time on. Returns a count of the calls."""
    real, calls = getattr(CALLS[call], call), [0]

    def broken(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **options)

    monkeypatch.setattr(CALLS[call], call, broken)
    return calls


@pytest.mark.parametrize("make", [a_file, write_member], ids=lambda make: make.__name__)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("reader", READERS)
def test_an_error_of_storage_names_the_file(
    reader: str,
    call: str,
    make: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(20):
        path = make(tmp_path / str(number))
        with monkeypatch.context() as patched:
            calls = fail(call, number, patched)
            try:
                READERS[reader](path)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    assert reader == "find"
                    return
                assert error.filename is not None and str(path.parent) in str(error), (
                    f"call {number} of {call}"
                )
        if calls[0] <= number:
            return
    raise AssertionError("more calls than expected")


def test_verify_names_what_it_could_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_member(tmp_path / "shards")
    write(tmp_path, "a", rows_of(3))
    fail("pread", 0, monkeypatch)
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "None" not in said
    assert f"bad: {tmp_path}/a.safetensors: it cannot be read: Input/output error" in said
    assert f"bad: {tmp_path}/shards/hsx-" in said


@pytest.mark.parametrize("make", [a_file, write_member], ids=lambda make: make.__name__)
def test_what_is_read_and_written_in_pieces_is_whole(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, preadv, pwrite = os.pread, os.preadv, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 7), offset))
    monkeypatch.setattr(
        os, "preadv", lambda fd, into, offset: preadv(fd, [memoryview(into[0])[:7]], offset)
    )
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, offset: pwrite(fd, memoryview(data)[:7], offset)
    )
    path = make(tmp_path)
    assert torch.equal(
        load(path, verify=True).hidden_states.view(torch.uint8), rows_of(3).view(torch.uint8)
    )
    held = HeldLock.create(dir_fd := os.open(tmp_path, os.O_RDONLY), "held.lock", 0o600)
    held.append(b"a folder" * 100)
    assert held.content() == b"a folder" * 100
    held.release()
    os.close(dir_fd)
