"""What a checksum covers: every bit of a file, wherever it is kept; and files of earlier versions are verified as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sink_harness import FORMAT, as_version_1, checksum_of, make_rows, token_ids
from test_shards import publish

from vllm_ascend_hsx import load
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


def a_file(where: Path, quantization: str | None = None, request_id: str = "x") -> Path:
    with FileSink(where, replace(FORMAT, quantization=quantization) if quantization else FORMAT) as sink:
        file = sink.open(request_id, where / "x.safetensors")
        file.write(0, make_rows(0, 2) & 0xBFFF)
        file.commit(token_ids(2), 1)
    file.path.with_name(f"{file.path.name}.lock").unlink()
    return file.path


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_flipped_bit_is_found_wherever_in_the_file_it_is(tmp_path: Path, quantization: str | None) -> None:
    path = a_file(tmp_path, quantization)
    good = path.read_bytes()
    assert load(path, 0, verify=True).layer_ids == [2, 0, 3]
    text = good.rindex(b"}", 0, good.index(b"    ")) + 1
    # All of the header's text, some of its padding, and what follows it.
    for place in (*range(text), *range(text, 4096, 97), *range(4096, len(good))):
        for bit in range(8) if place < text else (place % 8,):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
            with pytest.raises(HiddenStatesError):
                load(path, 0, verify=True)
            if bit == place % 8:
                assert examine(path).problem is not None, (place, bit)


@pytest.mark.parametrize("request_id", ['"checksum":"00000000"', '","checksum":"', "\\", "雪\0\ud800"], ids=ascii)
def test_what_a_request_is_called_does_not_disturb_its_checksum(tmp_path: Path, request_id: str) -> None:
    path = a_file(tmp_path, request_id=request_id)
    metadata = load(path, 0, verify=True).metadata
    assert metadata["checksum"] == checksum_of(path.read_bytes())
    assert metadata["format_version"] == "2"


def test_a_file_of_version_1_is_verified_by_its_data_as_before(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("grows", [False, True])
def test_the_checksum_of_a_member_is_that_of_its_file_and_stands_in_its_line(tmp_path: Path, grows: bool) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink:
        publish(sink, tmp_path, "before")
        file = sink.open("x", tmp_path / "x.safetensors", 3, may_grow=grows)
        file.write(0, make_rows(0, 3))
        file.commit(token_ids(3), 2)
    line = Shards(tmp_path).find("x.safetensors")
    assert line is not None
    content = next(tmp_path.glob("*.tar")).read_bytes()[line.offset : line.offset + line.size]
    assert line.checksum == checksum_of(content) == load(file.path, 0, verify=True).metadata["checksum"]
