"""FileSink beyond the contract of test_sink_contract.py: writes, and leftovers of faults."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from sink_harness import (
    FORMAT,
    bits,
    listing,
    make_rows,
    open_request,
    publish,
    put,
    reason_of,
    token_ids,
)
from tracing import trace

from vllm_ascend_hsx.cli import verify
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.sinks import request_file as request_file_module
from vllm_ascend_hsx.sinks.base import NAME_USED, SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink

NAME = "a-0123abcd.safetensors"


def test_rows_are_written_without_a_copy_and_short_writes_continue(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, real = make_rows(0, 4), os.pwrite  # with NaN among them
    written: list[int] = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        written.append(np.frombuffer(data, np.uint8).ctypes.data)
        return real(fd, data[:13], offset)

    file = open_request(sink, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        file.write(0, rows)
    file.commit(token_ids(4), 4)
    assert written == [rows.ctypes.data + done for done in range(0, rows.nbytes, 13)]
    assert np.array_equal(bits(load_file(file.path)["hidden_states"]), rows)
    assert os.stat(file.path).st_size == 4096 + 4 * (FORMAT.row_bytes + 8)


def test_mapped_rows_survive_removal_and_a_new_file(sink: FileSink, tmp_path: Path) -> None:
    path = publish(sink, tmp_path, tokens=6, version=1)
    earlier, rows = (
        load_file(path),
        bits(load_file(path)["hidden_states"]).copy(),
    )  # mapped by safetensors
    remove(path)
    publish(sink, tmp_path, tokens=3, version=2)
    assert len(load(path).token_ids) == 3
    assert np.array_equal(bits(earlier["hidden_states"]), rows)
    assert listing(tmp_path) == [NAME, f"{NAME}.lock"]


def test_error_file_names_the_request(sink: FileSink, tmp_path: Path) -> None:
    file = open_request(sink, tmp_path)
    file.fail("the device is on fire")
    error = json.loads(Path(f"{file.path}.error").read_text())
    assert (error["request_id"], error["reason"]) == ("a-0123abcd", "the device is on fire")


def test_without_locks_one_request_at_a_time_writes_a_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chosen.safetensors"
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)) as sink:
        file = sink.open("a", path)
        assert listing(tmp_path) == []
        with pytest.raises(SinkError, match="another request is writing"):
            sink.open("b", path)
        put(file, 2)
        assert listing(tmp_path) == [path.name]
        assert len(load(path).token_ids) == 2
        with pytest.raises(SinkError, match=NAME_USED):
            sink.open("b", path)
        path.unlink()
        sink.open("b", path).fail("x")
        assert listing(tmp_path) == [f"{path.name}.error"]
        put(sink.open("c", path), 2)
        assert listing(tmp_path) == [path.name]


def test_write_error_at_close_prevents_publication(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, closes = open_request(sink, tmp_path), []
    file.write(0, make_rows(0, 2))

    def checkpoint(call: str) -> None:
        if call == "close":
            closes.append(call)
            if len(closes) == 1:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    trace(monkeypatch, checkpoint)
    with pytest.raises(SinkError, match="EDQUOT"):
        file.commit(token_ids(2), 2)
    assert listing(tmp_path) == [f"{NAME}.error", f"{NAME}.lock"]


@pytest.mark.parametrize("written", [0, 7])
def test_full_disk_leaves_an_empty_error_file(
    sink: FileSink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: int,
) -> None:
    """Readers must not report that the server died."""
    file = open_request(sink, tmp_path)

    def full(fd: int, data: memoryview, offset: int) -> None:
        os.pwrite(fd, data[:written], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(request_file_module, "write_at", full)
        file.fail("no room for its rows")
    assert Path(f"{file.path}.error").stat().st_size == 0
    assert f"{file.path}.error has no reason: No space left on device (ENOSPC)" in caplog.text
    with pytest.raises(
        HiddenStatesError,
        match="the request failed, and the storage had no space for the reason: see the server's log",
    ):
        load(file.path, 1)
    assert verify.main([str(tmp_path)]) == 1
    open_request(sink, tmp_path).fail("later")
    assert reason_of(file.path) == "later"
