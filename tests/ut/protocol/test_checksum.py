"""A checksum covers every bit of a file. Files of earlier versions are still verified."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_harness import FORMAT, as_version_1, checksum_of, publish, put, token_ids
from tracing import Calls, trace

from vllm_ascend_hsx import load
from vllm_ascend_hsx.protocol.checksum import Checksums, Digest
from vllm_ascend_hsx.protocol.format import read_header
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import data_file
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

SMALL = RowFormat(layer_ids=(1,), hidden_size=4, dtype="BF16")


def metadata(path: Path) -> dict[str, str]:
    with open(path, "rb") as file:
        return read_header(file.fileno()).metadata


def a_file(where: Path, quantization: str | None = None, request_id: str = "x") -> Path:
    with FileSink(
        where, replace(FORMAT, quantization=quantization) if quantization else FORMAT
    ) as sink:
        file = sink.open(request_id, where / "x.safetensors")
        put(file, 2)
    file.path.with_name(f"{file.path.name}.lock").unlink()
    return file.path


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_flipped_bit_is_found_anywhere_in_the_file(
    tmp_path: Path, quantization: str | None
) -> None:
    path = a_file(tmp_path, quantization)
    good = path.read_bytes()
    assert load(path, 0, verify=True).layer_ids == [2, 0, 3]
    text = good.rindex(b"}", 0, good.index(b"    ")) + 1
    # All of the text and some padding of the header, and the bytes after it.
    for place in (*range(text), *range(text, 4096, 97), *range(4096, len(good))):
        for bit in (place % 8, (place + 3) % 8) if place < text else (place % 8,):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            with pytest.raises(HiddenStatesError):
                load(path, 0, verify=True)
            if bit == place % 8:
                assert examine(path).problem is not None, (place, bit)


@pytest.mark.parametrize(
    "request_id", ['"checksum":"00000000"', '","checksum":"', "\\", "雪\0\ud800"], ids=ascii
)
def test_checksum_is_right_for_any_request_id(tmp_path: Path, request_id: str) -> None:
    path = a_file(tmp_path, request_id=request_id)
    metadata = load(path, 0, verify=True).metadata
    assert metadata["checksum"] == checksum_of(path.read_bytes())
    assert metadata["format_version"] == "2"


def test_file_of_version_1_is_verified_by_its_data(tmp_path: Path) -> None:
    path = a_file(tmp_path)
    old = as_version_1(path.read_bytes())
    path.write_bytes(old)
    assert load(path, 0, verify=True).metadata["format_version"] == "1"
    assert examine(path).verdict == "verified"
    for place in (4096, len(old) - 1):
        path.write_bytes(old[:place] + bytes([old[place] ^ 1]) + old[place + 1 :])
        with pytest.raises(HiddenStatesError, match="its checksum is"):
            load(path, 0, verify=True)
        assert examine(path).problem is not None


def test_member_has_the_checksum_of_its_file_in_the_index(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink:
        publish(sink, tmp_path, "before")
        file = sink.open("x", tmp_path / "x.safetensors", 3)
        put(file, 3)
    line = Shards(tmp_path).members().get("x.safetensors")
    assert line is not None
    content = next(tmp_path.glob("*.tar")).read_bytes()[line.offset : line.offset + line.size]
    assert (
        line.checksum
        == checksum_of(content)
        == load(file.path, 0, verify=True).metadata["checksum"]
    )


# Computation


@settings(max_examples=depth(300))
@given(
    spans=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=8),
    luck=st.randoms(use_true_random=False),
    extra=st.integers(0, 2),
)
def test_checksum_does_not_depend_on_the_order_of_writes(
    tmp_path_factory: pytest.TempPathFactory,
    spans: list[tuple[int, int]],
    luck: random.Random,
    extra: int,
) -> None:
    where = tmp_path_factory.mktemp("sum")
    generator = np.random.default_rng(1)
    written = {position for first, count in spans for position in range(first, first + count)}
    rest = [(position, 1) for position in range(12 + extra) if position not in written]
    writes = spans + rest
    luck.shuffle(writes)
    with FileSink(where, SMALL) as sink:
        file = sink.open("a", where / "a.safetensors", 12)
        for first, count in writes:
            file.write(first, generator.integers(0, 255, (count, SMALL.row_bytes), dtype=np.uint8))
        file.commit(token_ids(12), 12)
    said = metadata(file.path)
    data = file.path.read_bytes()
    assert said["checksum_algorithm"] == "crc32c"
    assert said["checksum"] == checksum_of(data)


def test_checksum_is_the_crc_32c_of_rfc_3720(tmp_path: Path) -> None:
    # RFC 3720, B.4: 32 bytes of zeros, of ones, and counting up.
    for data, expected in (
        (bytes(32), "8a9136aa"),
        (b"\xff" * 32, "62a8ab43"),
        (bytes(range(32)), "46dd794e"),
    ):
        (tmp_path / "x").write_bytes(data)
        with open(tmp_path / "x", "rb") as file:
            digest = Digest()
            digest.read(file.fileno(), 0, 32)
            assert digest.hexdigest() == expected


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        ([(0, 4), (4, 8), (8, 12)], False),
        ([(0, 4), (4, 12), (12, 13)], False),  # a row more than the request turns out to have
        ([(0, 4), (0, 4), (4, 12)], False),  # preempted and computed again
        ([(4, 12), (0, 4)], False),
        ([(0, 4), (2, 12)], True),  # preempted, with other spans
        ([(0, 4), (4, 13)], True),
    ],
    ids=[
        "in order",
        "one row too many",
        "recomputed",
        "out of order",
        "recomputed in other pieces",
        "a row too many in the last piece",
    ],
)
def test_only_remnants_of_overwritten_parts_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[tuple[int, int]], reads: bool
) -> None:
    calls = Calls()
    with FileSink(tmp_path, SMALL) as sink:
        file = sink.open("a", tmp_path / "a.safetensors", 12)
        for first, last in writes:
            file.write(first, np.full((last - first, SMALL.row_bytes), first, np.uint8))
        trace(monkeypatch, calls)
        file.commit(token_ids(12), 12)
    assert ("pread" in calls.made) == reads


def test_failed_write_is_not_in_the_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileSink(tmp_path, SMALL) as sink:
        file = sink.open("a", tmp_path / "a.safetensors", 2)
        with monkeypatch.context() as patch:

            def half(fd: int, data: memoryview, offset: int) -> None:
                os.pwrite(fd, bytes(8), offset)
                raise OSError(errno.EIO, "x")

            patch.setattr(data_file, "write_at", half)
            with pytest.raises(SinkError):
                file.write(0, np.ones((2, SMALL.row_bytes), np.uint8))
        file.write(0, np.ones((2, SMALL.row_bytes), np.uint8))
        file.commit(token_ids(2), 2)
    assert metadata(file.path)["checksum"] == checksum_of(file.path.read_bytes())


def test_file_without_a_checksum_names_none(tmp_path: Path) -> None:
    with FileSink(tmp_path, SMALL, FileOptions(checksum="none")) as sink:
        assert not sink.writes_side_by_side
        file = sink.open("a", tmp_path / "a.safetensors")
        file.commit(token_ids(0), 0)
    assert not [key for key in metadata(file.path) if key.startswith("checksum")]


def test_truncated_file_gets_no_checksum(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(10))
    checksum = Checksums(0)
    with open(tmp_path / "x", "rb") as file, pytest.raises(OSError, match="ends at byte 10"):
        checksum.finish(file.fileno(), 20, memoryview(b""))
