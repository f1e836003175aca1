"""FileSink: all rows or none, whatever the order of the writes, and nothing left behind."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from sink_harness import FORMAT, listing, make_rows, open_fds, token_ids, trace

from vllm_ascend_hsx.cli import verify
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.sinks import request_file as request_file_module
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[FileSink]:
    with FileSink(tmp_path, FORMAT) as sink:
        yield sink


def open_file(sink: FileSink, directory: Path, request_id: str = "cmpl-1"):
    return sink.open(request_id, directory / file_name(request_id))


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def reason_of(path: Path) -> str:
    return json.loads(Path(f"{path}.error").read_text())["reason"]


# What is written


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_committed_file_loads_with_safetensors_in_the_models_dtype(tmp_path: Path, dtype: str) -> None:
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    expected = torch.randn(5, 3, 8).to(torch_dtype)
    with FileSink(tmp_path, RowFormat((2, 0, 3), 8, dtype)) as sink:
        file = open_file(sink, tmp_path)
        file.write(0, expected.view(torch.uint8).numpy())
        file.commit(token_ids(5), 4)
    loaded = load_file(file.path)
    assert loaded["hidden_states"].dtype == torch_dtype
    assert torch.equal(loaded["hidden_states"], expected)
    assert torch.equal(loaded["token_ids"], torch.from_numpy(token_ids(5)))
    with safe_open(file.path, "pt") as opened:
        assert opened.metadata()["num_prompt_tokens"] == "4"
        assert opened.metadata()["num_output_tokens"] == "1"


@settings(max_examples=depth(150), deadline=None)
@given(st.data())
def test_any_order_of_spans_with_repeats_and_recomputation_equals_the_expected_rows(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 24), "tokens")
    span = st.tuples(st.integers(0, 28), st.integers(0, 9), st.integers(0, 3))
    writes = [(a, a + n, version) for a, n, version in data.draw(st.lists(span, max_size=12), "spans")]
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts")})
    covering = [(a, b, data.draw(st.integers(0, 3))) for a, b in itertools.pairwise(cuts)]
    writes = data.draw(st.permutations(writes + covering), "order")
    as_memoryview = data.draw(st.booleans(), "memoryview")
    expected = np.zeros((40, *FORMAT.row_shape), np.uint16)
    with tempfile.TemporaryDirectory() as directory, FileSink(Path(directory), FORMAT) as sink:
        file = open_file(sink, Path(directory))
        for first, last, version in writes:
            rows = make_rows(first, last, version)
            expected[first:last] = rows
            file.write(first, memoryview(rows) if as_memoryview and rows.size else rows)
        file.commit(token_ids(tokens), tokens)
        loaded = load_file(file.path)
        assert np.array_equal(bits(loaded["hidden_states"]), expected[:tokens])
        assert np.array_equal(loaded["token_ids"].numpy(), token_ids(tokens))
        assert os.stat(file.path).st_size == 4096 + tokens * (FORMAT.row_bytes + 8)


def test_many_threads_write_one_file(sink: FileSink, tmp_path: Path) -> None:
    file = open_file(sink, tmp_path)
    tokens, threads = 4000, 8
    start = threading.Barrier(threads)

    def write(rank: int) -> None:
        start.wait()
        for first in range(rank * 5, tokens, threads * 5):
            file.write(first, make_rows(first, first + 5))

    workers = [threading.Thread(target=write, args=(rank,)) for rank in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    file.commit(token_ids(tokens), tokens)
    assert np.array_equal(bits(load_file(file.path)["hidden_states"]), make_rows(0, tokens))


def test_many_files_at_once_do_not_mix(sink: FileSink, tmp_path: Path) -> None:
    files = [open_file(sink, tmp_path, f"cmpl-{i}") for i in range(40)]
    for position in range(6):
        for version, file in enumerate(files):
            file.write(position, make_rows(position, position + 1, version))
    for file in files:
        file.commit(token_ids(6), 6)
    for version, file in enumerate(files):
        assert np.array_equal(bits(load_file(file.path)["hidden_states"]), make_rows(0, 6, version))


def test_rows_are_written_from_the_callers_memory(sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(0, 4)
    written: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        written.append(np.frombuffer(data, np.uint8).ctypes.data)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    open_file(sink, tmp_path).write(0, rows)
    assert written == [rows.ctypes.data]


def test_a_system_that_takes_a_few_bytes_at_a_time_gets_them_all(sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:13], offset))
    file = open_file(sink, tmp_path)
    file.write(0, make_rows(0, 3))
    file.commit(token_ids(3), 3)
    assert np.array_equal(bits(load_file(file.path)["hidden_states"]), make_rows(0, 3))


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        (0, make_rows(0, 4)[::2]),
        (0, make_rows(0, 4)[:, :2]),
        (0, memoryview(make_rows(0, 4))[::2]),
        (0, np.zeros(FORMAT.row_bytes + 1, np.uint8)),
        (-1, make_rows(0, 1)),
    ],
    ids=["every second row", "some layers", "every second row, memoryview", "a byte too many", "negative position"],
)
def test_rows_that_are_no_rows_are_refused(sink: FileSink, tmp_path: Path, first: int, rows: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous|are not rows"):
        open_file(sink, tmp_path).write(first, rows)


# Commit


def test_until_commit_only_the_lock_and_a_hidden_file_are_there(sink: FileSink, tmp_path: Path) -> None:
    file = open_file(sink, tmp_path)
    assert listing(tmp_path) == ["cmpl-1.safetensors.lock"]
    file.write(0, make_rows(0, 2))
    hidden, lock = listing(tmp_path)
    assert hidden.startswith(f".hsx-{sink.token}/")
    file.commit(token_ids(2), 2)
    assert listing(tmp_path) == ["cmpl-1.safetensors", lock]


def test_a_file_of_the_same_name_is_replaced_and_its_reader_keeps_the_old_one(sink: FileSink, tmp_path: Path) -> None:
    first = open_file(sink, tmp_path)
    first.write(0, make_rows(0, 6, version=1))
    first.commit(token_ids(6), 6)
    earlier = load_file(first.path)  # mapped by safetensors
    second = open_file(sink, tmp_path)
    second.write(0, make_rows(0, 3, version=2))
    second.commit(token_ids(3), 3)
    assert np.array_equal(bits(load_file(second.path)["hidden_states"]), make_rows(0, 3, version=2))
    assert np.array_equal(bits(earlier["hidden_states"]), make_rows(0, 6, version=1))
    assert listing(tmp_path) == ["cmpl-1.safetensors", "cmpl-1.safetensors.lock"]


@pytest.mark.parametrize("end", ["commit", "fail", "discard", "server dies"])
def test_an_earlier_requests_rows_are_never_the_answer_to_a_later_one(tmp_path: Path, end: str) -> None:
    sink = FileSink(tmp_path, FORMAT)
    earlier = open_file(sink, tmp_path)
    earlier.write(0, make_rows(0, 2))
    earlier.commit(token_ids(2), 2)
    file = open_file(sink, tmp_path)
    assert not file.path.exists(), "from now on, until the file is complete"
    if end == "server dies":
        return
    file.write(0, make_rows(0, 3))
    {"commit": lambda: file.commit(token_ids(3), 3), "fail": lambda: file.fail("x"), "discard": file.discard}[end]()
    expected = {
        "commit": ["cmpl-1.safetensors", "cmpl-1.safetensors.lock"],
        "fail": ["cmpl-1.safetensors.error", "cmpl-1.safetensors.lock"],
        "discard": [],
    }
    assert listing(tmp_path) == expected[end]
    sink.close()


def test_an_earlier_requests_error_does_not_stand_beside_new_rows(sink: FileSink, tmp_path: Path) -> None:
    open_file(sink, tmp_path).fail("out of luck")
    file = open_file(sink, tmp_path)
    file.write(0, make_rows(0, 1))
    file.commit(token_ids(1), 1)
    assert listing(tmp_path) == ["cmpl-1.safetensors", "cmpl-1.safetensors.lock"]


# The other ends


def test_a_failed_file_leaves_its_reason_and_no_rows(sink: FileSink, tmp_path: Path) -> None:
    file = open_file(sink, tmp_path)
    file.write(0, make_rows(0, 2))
    file.fail("the device is on fire")
    assert listing(tmp_path) == ["cmpl-1.safetensors.error", "cmpl-1.safetensors.lock"]
    error = json.loads(Path(f"{file.path}.error").read_text())
    assert error["request_id"] == "cmpl-1"
    assert error["reason"] == "the device is on fire"


@pytest.mark.parametrize("rows", [0, 2])
def test_an_aborted_request_leaves_nothing(sink: FileSink, tmp_path: Path, rows: int) -> None:
    file = open_file(sink, tmp_path)
    file.write(0, make_rows(0, rows))
    file.discard()
    assert listing(tmp_path) == []


def test_a_failure_overtakes_a_write_that_hangs_and_the_caller_closes_after_it(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    file = open_file(sink, tmp_path)
    writing, go_on = threading.Event(), threading.Event()

    def checkpoint(call: str) -> None:
        if call == "pwrite" and threading.current_thread() is writer:
            writing.set()
            assert go_on.wait(10)

    trace(monkeypatch, checkpoint)
    writer = threading.Thread(target=lambda: file.write(0, make_rows(0, 2)))
    writer.start()
    assert writing.wait(10)
    file.fail("too slow", close=False)
    assert reason_of(file.path) == "too slow"
    assert not is_locked(file.path)
    with pytest.raises(SinkError, match="the file has failed"):
        file.write(2, make_rows(2, 4))
    go_on.set()
    writer.join()
    file.close()
    assert listing(tmp_path) == ["cmpl-1.safetensors.error", "cmpl-1.safetensors.lock"]
    assert not open_fds() - before


ENDS: dict[str, Callable] = {
    "commit": lambda file: file.commit(token_ids(2), 2),
    "fail": lambda file: file.fail("first reason"),
    "discard": lambda file: file.discard(),
}


def test_closing_the_sink_fails_what_is_open_and_nothing_else(tmp_path: Path) -> None:
    before = open_fds()
    sink = FileSink(tmp_path, FORMAT)
    done, rows, no_rows, hangs = (open_file(sink, tmp_path, name) for name in ("done", "rows", "no-rows", "hangs"))
    done.write(0, make_rows(0, 1))
    done.commit(token_ids(1), 1)
    rows.write(0, make_rows(0, 1))
    hangs.fail("too slow", close=False)
    sink.close()
    sink.close()
    assert [name for name in listing(tmp_path) if not name.endswith(".lock")] == [
        "done.safetensors",
        "hangs.safetensors.error",
        "no-rows.safetensors.error",
        "rows.safetensors.error",
    ]
    assert reason_of(rows.path) == reason_of(no_rows.path) == SERVER_STOPPED
    with pytest.raises(SinkError, match="closed"):
        open_file(sink, tmp_path)
    hangs.close()
    assert not open_fds() - before
    assert listing(tmp_path) == sorted(os.listdir(tmp_path)), "nothing of a server that lives"


# Locks and descriptors


def is_locked(path: Path) -> bool:
    """Asked of another process, as a reader would."""
    return subprocess.run(["flock", "--nonblock", "--shared", f"{path}.lock", "true"]).returncode != 0


def test_the_lock_is_held_from_open_to_the_end(sink: FileSink, tmp_path: Path) -> None:
    for end in ("commit", "fail"):
        file = open_file(sink, tmp_path, end)
        assert is_locked(file.path)
        file.write(0, make_rows(0, 2))
        assert is_locked(file.path)
        ENDS[end](file)
        assert not is_locked(file.path)


def test_a_forked_child_does_not_keep_the_lock(sink: FileSink, tmp_path: Path) -> None:
    file = open_file(sink, tmp_path)
    file.write(0, make_rows(0, 2))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    file.commit(token_ids(2), 2)
    assert not is_locked(file.path)
    os.close(write_end)
    os.waitpid(child, 0)


def test_a_file_that_is_being_written_cannot_be_opened_again(sink: FileSink, tmp_path: Path) -> None:
    file = open_file(sink, tmp_path)
    with pytest.raises(SinkError, match="another request is writing this file"):
        open_file(sink, tmp_path)
    with FileSink(tmp_path, FORMAT) as other, pytest.raises(SinkError, match="another request or server"):
        open_file(other, tmp_path)
    file.write(0, make_rows(0, 2))
    file.commit(token_ids(2), 2)
    open_file(sink, tmp_path).discard()


def test_without_a_lock_there_is_none_and_one_request_at_a_time_writes_a_file(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)) as sink:
        file = open_file(sink, tmp_path)
        assert listing(tmp_path) == []
        with pytest.raises(SinkError, match="another request is writing"):
            open_file(sink, tmp_path)
        file.write(0, make_rows(0, 2))
        file.commit(token_ids(2), 2)
        assert listing(tmp_path) == ["cmpl-1.safetensors"]
        assert np.array_equal(bits(load_file(file.path)["hidden_states"]), make_rows(0, 2))
        open_file(sink, tmp_path).fail("x")
        assert listing(tmp_path) == ["cmpl-1.safetensors.error"]


def test_no_end_leaks_a_descriptor(tmp_path: Path) -> None:
    before = open_fds()
    with FileSink(tmp_path, FORMAT) as sink:
        inside = len(open_fds())
        for turn in range(90):
            file = open_file(sink, tmp_path, f"cmpl-{turn}")
            end = list(ENDS)[turn % 3]
            if turn % 2 or end == "commit":
                file.write(0, make_rows(0, 2))
            ENDS[end](file)
            with pytest.raises(SinkError):
                sink.open("x", tmp_path / "no-suffix")
            assert len(open_fds()) == inside
    assert not open_fds() - before


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize(("mode", "lock_mode"), [(0o640, 0o660), (0o600, 0o600), (0o644, 0o666)])
def test_file_modes_are_as_asked_whatever_the_umask(tmp_path: Path, umask: int, mode: int, lock_mode: int) -> None:
    """The lock can be opened for writing by whoever may read the data: speculators does."""
    before = os.umask(umask)
    try:
        with FileSink(tmp_path, FORMAT, FileOptions(mode=mode)) as sink:
            good, bad = open_file(sink, tmp_path, "good"), open_file(sink, tmp_path, "bad")
            good.write(0, make_rows(0, 1))
            good.commit(token_ids(1), 1)
            bad.fail("x")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in listing(tmp_path)}
    assert modes == {
        "good.safetensors": mode,
        "good.safetensors.lock": lock_mode,
        "bad.safetensors.error": mode,
        "bad.safetensors.lock": lock_mode,
    }


# Faults of the system


def test_a_full_disk_fails_the_request_with_the_systems_reason(sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = open_file(sink, tmp_path), open_file(sink, tmp_path, "other")
    file.write(0, make_rows(0, 2))
    full = True

    def checkpoint(call: str) -> None:
        if call == "pwrite" and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trace(monkeypatch, checkpoint)
    with pytest.raises(SinkError, match=r"rows \[2, 4\) could not be written: No space left on device \(ENOSPC\)"):
        file.write(2, make_rows(2, 4))
    full = False
    other.write(0, make_rows(0, 4))
    other.commit(token_ids(4), 4)
    file.fail("no room")
    assert reason_of(file.path) == "no room"
    assert np.array_equal(bits(load_file(other.path)["hidden_states"]), make_rows(0, 4))


def test_rows_that_could_not_be_written_can_be_written_again(sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(sink, tmp_path)
    failing = True

    def checkpoint(call: str) -> None:
        if call in ("open", "pwrite") and failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    trace(monkeypatch, checkpoint)
    with pytest.raises(SinkError, match="could not be created"):
        file.write(0, make_rows(0, 4))
    failing = False
    file.write(0, make_rows(0, 4))
    file.commit(token_ids(4), 4)
    assert np.array_equal(bits(load_file(file.path)["hidden_states"]), make_rows(0, 4))


def test_a_write_that_a_network_filesystem_reports_at_close_is_not_published(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(sink, tmp_path)
    file.write(0, make_rows(0, 2))
    closes = 0

    def checkpoint(call: str) -> None:
        nonlocal closes
        if call == "close":
            closes += 1
            if closes == 1:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    trace(monkeypatch, checkpoint)
    with pytest.raises(SinkError, match="EDQUOT"):
        file.commit(token_ids(2), 2)
    assert listing(tmp_path) == ["cmpl-1.safetensors.error", "cmpl-1.safetensors.lock"]


@pytest.mark.parametrize("end", ["commit", "fail", "discard"])
@pytest.mark.parametrize("earlier", [False, True], ids=["new name", "name used before"])
@pytest.mark.parametrize("options", [FileOptions(), FileOptions(io="direct", durability="fdatasync")], ids=["default", "direct, durable"])
def test_a_fault_at_any_system_call_of_an_end_neither_lies_nor_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, earlier: bool, options: FileOptions, caplog: pytest.LogCaptureFixture
) -> None:
    calls_made = 0
    fail_at = -1
    failed_call = ""

    def checkpoint(call: str) -> None:
        nonlocal calls_made, failed_call
        calls_made += 1
        if calls_made == fail_at:
            failed_call = call
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for fail_at in itertools.count(1):
        directory = tmp_path / str(fail_at)
        with FileSink(directory, FORMAT, options) as sink:
            inside = open_fds()
            if earlier:
                before = open_file(sink, directory)
                before.write(0, make_rows(0, 5, version=9))
                before.commit(token_ids(5), 5)
            file = open_file(sink, directory)
            file.write(0, make_rows(0, 2))
            calls_made = 0
            caplog.clear()
            with monkeypatch.context() as patch:
                trace(patch, checkpoint)
                try:
                    ENDS[end](file)
                    raised = False
                except SinkError:
                    raised = True
                reached = calls_made >= fail_at
            committed = end == "commit" and not raised
            assert file.path.exists() == committed
            if committed:
                assert np.array_equal(bits(load_file(file.path)["hidden_states"]), make_rows(0, 2))
            assert not Path(f"{file.path}.lock").exists() or not is_locked(file.path)
            assert not open_fds() - inside
            assert failed_call == "unlink" or not any(name.startswith(".") for name in listing(directory))
            if raised:
                assert "EIO" in reason_of(file.path)
            elif reached:
                assert "EIO" in caplog.text, "a fault that changes nothing is in the log"
        if not reached:
            break
    assert fail_at > 3


@pytest.mark.parametrize("earlier", [False, True], ids=["new name", "name used before"])
def test_a_fault_at_any_system_call_of_open_leaves_its_reason_and_no_lock_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    calls_made = 0
    fail_at = -1

    def checkpoint(call: str) -> None:
        nonlocal calls_made
        calls_made += 1
        if calls_made == fail_at:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for fail_at in itertools.count(1):
        with FileSink(tmp_path / str(fail_at), FORMAT) as sink:
            if earlier:
                open_file(sink, tmp_path / str(fail_at)).fail("x")
            inside = open_fds()
            calls_made = 0
            with monkeypatch.context() as patch:
                trace(patch, checkpoint)
                try:
                    open_file(sink, tmp_path / str(fail_at)).discard()
                except SinkError as error:
                    assert "EMFILE" in error.reason
                    # A response that has left already names the path: the reason stands there.
                    assert reason_of(error.path) == error.reason
            assert not open_fds() - inside
            assert not any(name.startswith(".") and not name.endswith(".new") for name in listing(tmp_path / str(fail_at)))
            open_file(sink, tmp_path / str(fail_at)).discard()
        if calls_made < fail_at:
            break
    assert fail_at > 3


@pytest.mark.parametrize("written", [0, 7])
def test_a_disk_without_room_for_the_reason_still_has_readers_told_that_the_request_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: int
) -> None:
    """Not that the server died, which is alive."""
    with FileSink(tmp_path, FORMAT) as sink:
        file = open_file(sink, tmp_path)

        def full(fd: int, data: memoryview, offset: int) -> None:
            os.pwrite(fd, data[:written], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(request_file_module, "write_at", full)
            file.fail("no room for its rows")
        assert Path(f"{file.path}.error").stat().st_size == 0
        assert f"{file.path}.error stays empty: No space left on device (ENOSPC)" in caplog.text
        with pytest.raises(HiddenStatesError, match="the request failed, and the storage had no room for the reason: see the server's log"):
            load(file.path, 1)
        assert verify.main([str(tmp_path)]) == 1
        open_file(sink, tmp_path).fail("later")
        assert reason_of(file.path) == "later"


def test_a_directory_removed_under_the_server_fails_requests_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "storage"
    before = open_fds()
    with FileSink(directory, FORMAT) as sink:
        file = open_file(sink, directory)
        shutil.rmtree(directory)
        with pytest.raises(SinkError, match="ENOENT"):
            file.write(0, make_rows(0, 1))
        with pytest.raises(SinkError, match="ENOENT"):
            file.commit(token_ids(1), 1)
        assert "could not publish the reason of the failure" in caplog.text
        with pytest.raises(SinkError, match="ENOENT"):
            open_file(sink, directory, "next")
    assert not open_fds() - before
