"""Options of files: durability, direct I/O, reserved space."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sink_harness import listing
from tracing import Calls, trace

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks import directory, storage
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

FORMAT = RowFormat(
    layer_ids=(1, 2), hidden_size=512, dtype="BF16", model="tiny"
)  # 2,048 bytes a row


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) + 5


class Aligned:
    """Rows in memory that begins at a page, as the pinned ring does."""

    def __init__(self, row_format: RowFormat, count: int) -> None:
        self._pages = mmap.mmap(-1, max(PAGE, count * row_format.row_bytes))
        self.rows = np.frombuffer(self._pages, np.uint8)[: count * row_format.row_bytes].reshape(
            count, -1
        )
        self.rows[:] = np.random.default_rng(count).integers(
            0, 255, self.rows.shape, dtype=np.uint8
        )


def open_file(sink: FileSink, where: Path, expected: int = 0, name: str = "a") -> RequestFile:
    return sink.open(name, where / f"{name}.safetensors", expected)


def stored(path: Path) -> np.ndarray:
    """The rows of a file as bytes, [tokens, bytes]."""
    return load_file(path)["hidden_states"].flatten(1).view(torch.uint8).numpy()


# Durability


def test_durable_file_is_synced_before_its_name_and_the_name_before_unlocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    with FileSink(tmp_path, FORMAT, FileOptions(durability="fdatasync")) as sink:
        file = open_file(sink, tmp_path, 2)
        file.write(0, Aligned(FORMAT, 2).rows)
        trace(monkeypatch, calls)
        file.commit(tokens(2), 2)
        order = [
            call for call in calls.made if call in ("pwrite", "fdatasync", "link", "fsync", "flock")
        ]
    assert order == ["pwrite", "pwrite", "fdatasync", "link", "fsync", "flock"]


def test_file_whose_name_cannot_be_synced_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileSink(tmp_path, FORMAT, FileOptions(durability="fdatasync")) as sink:
        file = open_file(sink, tmp_path, 2)
        file.write(0, Aligned(FORMAT, 2).rows)
        trace(monkeypatch, Calls(errno.EIO, "fsync"))
        with pytest.raises(SinkError, match="EIO"):
            file.commit(tokens(2), 2)
    assert listing(tmp_path) == ["a.safetensors.error", "a.safetensors.lock"]


# Direct I/O


def test_aligned_rows_use_direct_io_and_other_rows_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are aligned to the 512 bytes of the filesystem, except rows in ordinary memory."""
    bypassed: list[bool] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        bypassed.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data, offset)

    aligned = Aligned(FORMAT, 8)
    elsewhere = np.empty(FORMAT.row_bytes + 1, np.uint8)[1:].reshape(1, -1)
    elsewhere[:] = 7
    monkeypatch.setattr(directory, "is_in_memory", lambda fd: False)
    with FileSink(tmp_path, FORMAT, FileOptions(io="direct")) as sink:
        assert sink.writes_side_by_side
        file = open_file(sink, tmp_path, 9)
        monkeypatch.setattr(os, "pwrite", pwrite)
        file.write(0, aligned.rows[:3])
        file.write(3, aligned.rows[3:])
        file.write(8, elsewhere)
        file.commit(tokens(9), 9)
    # The header's page, two spans; the row in ordinary memory, the token ids, the header.
    assert bypassed == [True, True, True, False, False, False]
    assert np.array_equal(stored(file.path), np.concatenate([aligned.rows, elsewhere]))


@settings(max_examples=60)
@given(order=st.permutations(range(6)), again=st.lists(st.integers(0, 5), max_size=3))
def test_direct_and_buffered_writes_of_one_page_keep_all_bytes(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], again: list[int]
) -> None:
    """Two rows of half a page share a page of the file: one written directly, one buffered."""
    where = tmp_path_factory.mktemp("mixed")
    expected = np.zeros((6, FORMAT.row_bytes), np.uint8)
    with FileSink(where, FORMAT, FileOptions(io="direct", durability="fdatasync")) as sink:
        file = open_file(sink, where, 6)
        for turn, position in enumerate([*order, *again]):
            aligned = Aligned(FORMAT, 1)
            aligned.rows[:] = turn * 11 + 1
            file.write(position, aligned.rows if turn % 2 else aligned.rows.copy()[:, :])
            expected[position] = turn * 11 + 1
        file.commit(tokens(6), 6)
    assert np.array_equal(stored(file.path), expected)


def _refuse_to_open(number: int) -> Callable[..., int]:
    real = os.open

    def open_(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **kwargs)

    return open_


def test_filesystem_without_direct_io_is_refused_with_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", _refuse_to_open(errno.EINVAL))
    check_directory(tmp_path)
    with pytest.raises(
        UserError, match=r'without O_DIRECT: Invalid argument\. Set io to "buffered"'
    ):
        FileSink(tmp_path, FORMAT, FileOptions(io="direct"))
    assert listing(tmp_path) == []


@pytest.mark.parametrize("wants", [512, 2048, 4096])
def test_alignment_of_direct_io_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wants: int
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and (offset | len(data)) % wants:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert check_directory(tmp_path, direct=True).alignment == wants


def test_filesystem_without_direct_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(UserError, match="does not accept direct writes"):
        check_directory(tmp_path, direct=True)
    assert listing(tmp_path) == []


def test_direct_writes_are_tested_from_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may map pinned memory where the disk cannot read it: EFAULT at start."""
    memory, real = memoryview(mmap.mmap(-1, 4 * PAGE)), os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if (
            fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            and isinstance(data, memoryview)
            and data.obj is memory.obj
        ):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    FileSink(tmp_path, FORMAT, FileOptions(), memory).close()
    with pytest.raises(
        UserError, match='does not accept direct writes: Bad address. Set io to "buffered"'
    ):
        FileSink(tmp_path, FORMAT, FileOptions(io="direct"), memory)
    assert listing(tmp_path) == []


# Reserved space


def test_first_rows_reserve_space_for_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "is_in_memory", lambda fd: False)
    with FileSink(tmp_path, FORMAT) as sink:
        file = open_file(sink, tmp_path, 1000)
        file.write(0, Aligned(FORMAT, 1).rows)
        (hidden,) = [name for name in listing(tmp_path) if name.startswith(".")]
        status = os.stat(tmp_path / hidden)
        assert status.st_size == PAGE + 1000 * (FORMAT.row_bytes + 8)
        assert status.st_blocks * 512 >= 1000 * FORMAT.row_bytes
        file.discard()


def test_without_fallocate_the_file_is_sized_without_writing_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, mode: int, offset: int, length: int) -> int:
        storage.ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(storage._libc, "fallocate", refuse)
    with open(tmp_path / "x", "wb") as file:
        storage.reserve(file.fileno(), 1 << 30)
    status = os.stat(tmp_path / "x")
    assert (status.st_size, status.st_blocks) == (1 << 30, 0)


def test_tmpfs_is_detected_and_reserves_no_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        assert not check_directory(Path(in_memory)).reserves
        calls = Calls()
        trace(monkeypatch, calls)
        with FileSink(Path(in_memory), FORMAT) as sink:
            file = open_file(sink, Path(in_memory), 2)
            file.write(0, Aligned(FORMAT, 2).rows)
            file.commit(tokens(2), 2)
        assert np.array_equal(stored(file.path), Aligned(FORMAT, 2).rows)
    assert "pwrite" in calls.made
    assert "reserve" not in calls.made


@pytest.mark.parametrize("extra", [0, 3])
def test_file_is_truncated_after_its_tail(tmp_path: Path, extra: int) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        file = open_file(sink, tmp_path, 2)
        file.write(0, Aligned(FORMAT, 2 + extra).rows)
        file.commit(tokens(2), 2)
    assert os.stat(file.path).st_size == PAGE + 2 * (FORMAT.row_bytes + 8)
