"""Rows copied from the file of an earlier request, with checksum and scales."""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_harness import FORMAT, bits, finite_rows, open_request, put, reason_of, rows_of, token_ids

from vllm_ascend_hsx import open_dir
from vllm_ascend_hsx.protocol.checksum import Checksums, Digest, digest_of_beginning
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.sinks import data_file, storage
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions, RowSource
from vllm_ascend_hsx.sinks.file import DirectorySink, FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

FP8 = replace(FORMAT, quantization="fp8")


def files(directory: Path, row_format: RowFormat = FORMAT, **options: Any) -> DirectorySink:
    return FileSink(directory, row_format, FileOptions(**options))


def shards(directory: Path, row_format: RowFormat = FORMAT, **options: Any) -> DirectorySink:
    return ShardSink(directory, row_format, FileOptions(**options), shard_bytes=1 << 30)


SINKS = {
    "files": files,
    "shards": shards,
    "fp8": lambda directory, **options: files(directory, FP8, **options),
    "fp8 shards": lambda directory, **options: shards(directory, FP8, **options),
    "without checksum": lambda directory, **options: files(directory, checksum="none", **options),
    "durable": lambda directory, **options: files(directory, durability="fdatasync", **options),
}


def make_source(sink: DirectorySink, where: Path, tokens: int, name: str = "source") -> RowSource:
    """Publish a request, and return the source of the rows."""
    file = open_request(sink, where, name, tokens)
    file.keeps_source = True
    put(file, tokens)
    assert file.source is not None
    return file.source


def continue_from(
    sink: DirectorySink,
    where: Path,
    source: RowSource,
    num_rows: int,
    tokens: int,
    name: str = "next",
) -> RequestFile:
    """Publish a request whose first rows are copied."""
    file = sink.open(
        "x" * 5000, where / f"{name}-0123abcd.safetensors", tokens
    )  # a header of another size
    file.keeps_source = True
    file.copy(source, num_rows)
    file.write(num_rows, finite_rows(num_rows, tokens, version=1))
    file.commit(token_ids(tokens), tokens)
    return file


@pytest.mark.parametrize("kind", SINKS)
def test_copied_rows_equal_the_source_and_later_rows_are_its_own(kind: str, tmp_path: Path) -> None:
    with SINKS[kind](tmp_path) as sink:
        put(
            open_request(sink, tmp_path, "before"), 4, version=2
        )  # a source in a shard has an offset
        source = make_source(sink, tmp_path, 6)
        file = continue_from(sink, tmp_path, source, 4, 7)
        second = file.source
        assert second is not None
        continue_from(
            sink, tmp_path, second, 7, 9, "last"
        )  # 4 rows of the first, 3 of the second, 2 of its own
        expected = {
            "next": np.concatenate([finite_rows(0, 4), finite_rows(4, 7, version=1)]),
            "last": np.concatenate([finite_rows(0, 4), finite_rows(4, 9, version=1)]),
        }
        for name, rows in expected.items():
            own = open_request(sink, tmp_path, f"{name}-computed", len(rows))
            own.write(0, rows)
            own.commit(token_ids(len(rows)), len(rows))
    source.release()
    second.release()
    verify = kind != "without checksum"
    found = {
        Path(path).name.removesuffix("-0123abcd.safetensors"): load(path, 0, verify=verify)
        for path, _ in open_dir(tmp_path)
    }
    for name in expected:
        copied, computed = found[name], found[f"{name}-computed"]
        assert (bits(copied.hidden_states) == bits(computed.hidden_states)).all(), name


def test_wrong_byte_in_a_copy_is_found_by_the_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum covers the computed rows, not the copied bytes."""

    def copy(source: int, size: int, target: int, offset: int, begin: int = 0) -> None:
        storage.copy_into(source, size, target, offset, begin)
        last = offset + size - 1
        os.pwrite(target, bytes([os.pread(target, 1, last)[0] ^ 1]), last)

    with files(tmp_path) as sink:
        source = make_source(sink, tmp_path, 6)
        monkeypatch.setattr(data_file, "copy_into", copy)
        continue_from(sink, tmp_path, source, 4, 7)
    source.release()
    with pytest.raises(HiddenStatesError, match="checksum"):
        load(tmp_path / "next-0123abcd.safetensors", 0, verify=True)


@settings(deadline=None)
@given(st.data())
def test_digest_of_a_prefix_is_right_and_detects_changes(
    data: st.DataObject,
) -> None:
    content = data.draw(st.binary(min_size=1, max_size=300))
    ends = sorted({*data.draw(st.sets(st.integers(1, len(content)))), len(content)})
    size = data.draw(st.integers(1, len(content)))
    sums = [(end, _sum(content[:end])) for end in ends]
    changed = data.draw(st.integers(0, size - 1))
    fd = os.memfd_create("content")
    os.write(fd, b"before" + content)
    try:
        assert digest_of_beginning(fd, 6, size, sums).value == _sum(content[:size])
        os.pwrite(fd, bytes([content[changed] ^ 1]), 6 + changed)
        with pytest.raises(OSError, match="was changed after it had been published"):
            digest_of_beginning(fd, 6, size, sums)
    finally:
        os.close(fd)


def _sum(content: bytes) -> int:
    digest = Digest()
    digest.update(content)
    return digest.value


def test_last_sum_of_a_file_covers_all_rows(tmp_path: Path) -> None:
    part = bytes(range(256)) * 4096
    sums = Checksums(8)
    for index in (2, 0, 1):
        digest = Digest()
        digest.update(part)
        sums.begin_write(8 + index * len(part), len(part))
        sums.end_write(8 + index * len(part), digest)
    sums.finish(-1, 8 + 3 * len(part), memoryview(b"token ids"))
    assert sums.sums[-1] == (3 * len(part), _sum(3 * part))


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 + 2 * FORMAT.row_bytes)
        file.write(bytes(FORMAT.row_bytes))


def cut_and_grow(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_the_last_row(path: Path) -> None:
    os.truncate(path, 4096 + 299 * FORMAT.row_bytes)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("change", [overwrite, cut_and_grow, cut_in_half, cut_the_last_row, empty])
def test_source_that_was_changed_in_place_fails_the_request(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    with files(tmp_path) as sink:
        source = make_source(sink, tmp_path, 300)
        change(tmp_path / "source-0123abcd.safetensors")
        file = open_request(sink, tmp_path, "next", 300)
        with pytest.raises(
            SinkError,
            match=r"could not be copied from the file of an earlier request: the file was (changed|truncated).*EUCLEAN",
        ) as failed:
            file.copy(source, 299)
        assert "rows [0, 299)" in failed.value.reason
        file.fail("as a test")
    source.release()


def test_truncated_shard_gets_no_further_members(tmp_path: Path) -> None:
    with shards(tmp_path) as sink:
        put(open_request(sink, tmp_path, "first"), 300)
        (cut,) = tmp_path.glob("*.tar")
        os.truncate(cut, 5000)
        second = put(open_request(sink, tmp_path, "second"), 4)
        assert (rows_of(second) == finite_rows(0, 4)).all()
        assert len(list(tmp_path.glob("*.tar"))) == 2


def test_rows_are_copied_from_a_removed_or_sealed_source(tmp_path: Path) -> None:
    with shards(tmp_path) as sink:
        source = make_source(sink, tmp_path, 6)
    for path in tmp_path.iterdir():
        if path.suffix == ".tar":
            assert tarfile.is_tarfile(path)
            path.unlink()
    with files(tmp_path / "other") as sink:
        path = continue_from(sink, tmp_path / "other", source, 5, 6).path
    source.release()
    assert (rows_of(path)[:5] == finite_rows(0, 5)).all()


def truncate(source: RowSource, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(f"/proc/self/fd/{source._fd}", 5000)


def break_copies(source: RowSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage.os, "copy_file_range", fail)


@pytest.mark.parametrize("break_it", [truncate, break_copies])
@pytest.mark.parametrize("kind", ["files", "fp8"])
def test_source_that_cannot_be_read_fails_the_request_with_the_reason(
    kind: str, break_it: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SINKS[kind](tmp_path) as sink:
        source = make_source(sink, tmp_path, 300)
        file = open_request(sink, tmp_path, "next", 300)
        with monkeypatch.context() as patch:
            break_it(source, patch)
            with pytest.raises(
                SinkError,
                match=r"rows \[0, 299\) could not be copied from the file of an earlier request",
            ):
                file.copy(source, 299)
        file.fail("as a test")
    source.release()
    assert reason_of(file.path) == "as a test"


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_unkept_and_failed_requests_leave_no_descriptor(kind: str, tmp_path: Path) -> None:
    with SINKS[kind](tmp_path) as sink:
        put(open_request(sink, tmp_path, "first"), 3)
        before = sorted(os.listdir("/proc/self/fd"))
        file = open_request(sink, tmp_path, "not-kept", 3)
        put(file, 3)
        assert file.source is None
        failed = open_request(sink, tmp_path, "failed", 3)
        failed.keeps_source = True
        failed.write(0, finite_rows(0, 3))
        tmp_path.rename(tmp_path.with_name(f"moved-{kind}"))
        with pytest.raises(SinkError, match="was moved"):
            failed.commit(token_ids(3), 3)
        assert failed.source is None
        assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_recomputed_rows_replace_copied_rows(tmp_path: Path) -> None:
    """Happens after a preemption, if the prefix cache has lost some of the rows."""
    with files(tmp_path) as sink:
        source = make_source(sink, tmp_path, 6)
        file = open_request(sink, tmp_path, "next", 6)
        file.copy(source, 4)
        file.write(2, finite_rows(2, 6, version=1))
        file.commit(token_ids(6), 6)
    source.release()
    assert (
        rows_of(file.path) == np.concatenate([finite_rows(0, 2), finite_rows(2, 6, version=1)])
    ).all()
    assert load(file.path, verify=True).metadata["checksum"]
