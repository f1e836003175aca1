"""The contract of sinks in a directory: locks, modes, and storage that fails at any system call."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from sink_cases import IN_A_DIRECTORY, FileCase, ShardCase
from sink_harness import (
    ENDS,
    FORMAT,
    end,
    finite_rows,
    listing,
    put,
    reason_of,
    token_ids,
    walked,
    write_in_flight,
)
from tracing import Calls, trace

from vllm_ascend_hsx.connector.stats import failure_kind
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.sinks.base import NAME_USED, SinkError
from vllm_ascend_hsx.sinks.request_file import MOVED

pytestmark = pytest.mark.usefixtures("no_wait_for_the_disk")


@pytest.fixture(params=IN_A_DIRECTORY)
def in_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileCase]:
    """Every sink whose requests have paths."""
    case = IN_A_DIRECTORY[request.param](tmp_path / "storage")
    with case.serve():
        yield case
    assert case.held() == 0


# Locks


@pytest.mark.parametrize("how", ENDS)
def test_lock_is_held_until_the_request_ends_despite_a_fork(
    in_directory: FileCase, how: str
) -> None:
    file = in_directory.open("locked")
    assert in_directory.is_locked("locked")
    file.write(0, finite_rows(0, 2))
    assert in_directory.is_locked("locked")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    end(file, how)
    assert "lock" not in in_directory.traces("locked") or not in_directory.is_locked("locked")
    os.close(write_end)
    os.waitpid(child, 0)


def test_another_server_cannot_write_an_open_request(in_directory: FileCase) -> None:
    file = in_directory.open("folder/a")
    with in_directory.make(FORMAT) as other:
        before = in_directory.held()
        with pytest.raises(SinkError, match="another request or server is writing this file"):
            other.open("second", file.path)
        assert in_directory.held() == before
    put(file, 2)
    assert in_directory.has("folder/a", finite_rows(0, 2))


# Storage that fails


def test_failure_is_published_while_a_write_hangs(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = in_directory.held()
    file = in_directory.open("slow", 4)
    with write_in_flight(file, monkeypatch):
        file.fail("too slow", close=False)
        assert in_directory.outcome("slow") == "too slow"
        assert not in_directory.is_locked("slow")
        put(in_directory.open("next"), 4, version=3)
    file.close()
    assert in_directory.traces("slow") == in_directory.failed
    assert in_directory.has("next", finite_rows(0, 4, version=3)), (
        "not those of the write that hung"
    )
    assert in_directory.held() - before <= in_directory.spare_fds


def test_full_disk_fails_the_request_with_errno(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = in_directory.open("full"), in_directory.open("other")
    file.write(0, finite_rows(0, 2))
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.ENOSPC, "pwrite"))
        with pytest.raises(
            SinkError,
            match=r"rows \[2, 4\) could not be written: No space left on device \(ENOSPC\)",
        ) as failure:
            file.write(2, finite_rows(2, 4))
    assert failure_kind(failure.value) == "ENOSPC"
    put(other, 4)
    file.fail("no room")
    assert in_directory.outcome("full") == "no room"
    assert in_directory.has("other", finite_rows(0, 4))


def test_fault_while_refusing_a_used_name_leaves_rows_and_no_reason(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the name may have rows, a reason would hide them."""
    put(in_directory.open("folder/used"), 3)
    traces = in_directory.traces("folder/used")
    for nth in itertools.count(1):
        calls = Calls(errno.EIO, nth=nth)
        with monkeypatch.context() as patch:
            trace(patch, calls)
            with pytest.raises(SinkError, match=f"EIO|{NAME_USED}"):
                in_directory.open("folder/used", 3)
        assert in_directory.has("folder/used", finite_rows(0, 3))
        assert in_directory.traces("folder/used") == traces
        if not calls.failed:
            break
    assert nth > 4
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.EIO, "open"))
        with pytest.raises(SinkError, match="EIO"):
            in_directory.open("folder/used", 3)
    assert in_directory.traces("folder/used") == traces


def test_rows_that_could_not_be_written_can_be_written_again(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = in_directory.open("again")
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.EIO, "open", "pwrite"))
        with pytest.raises(SinkError, match="could not be created"):
            file.write(0, finite_rows(0, 4))
    put(file, 4)
    assert in_directory.has("again", finite_rows(0, 4))


def test_removed_directory_fails_requests_until_it_is_restored(
    in_directory: FileCase, caplog: pytest.LogCaptureFixture
) -> None:
    put(in_directory.open("before"), 2)
    early, late = in_directory.open("early", 2), in_directory.open("late")
    early.write(0, finite_rows(0, 2))
    shutil.rmtree(in_directory.where)
    with pytest.raises(SinkError, match="ENOENT"):
        late.write(0, finite_rows(0, 2))
    for file in (early, late):
        with pytest.raises(SinkError, match=f"{MOVED}|ENOENT"):
            file.commit(token_ids(2), 2)
    assert "could not publish the reason of the failure" in caplog.text
    with pytest.raises(SinkError, match="ENOENT"):
        in_directory.open("refused")
    assert not in_directory.where.exists(), "nobody asked the server to make it again"
    in_directory.where.mkdir()
    put(in_directory.open("after"), 3)
    assert in_directory.has("after", finite_rows(0, 3))


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize(
    "earlier", [False, True], ids=["new directories", "directories and a name of a failed request"]
)
@pytest.mark.parametrize("label", IN_A_DIRECTORY)
def test_fault_at_any_system_call_fails_one_request_and_leaks_nothing(
    tmp_path: Path,
    label: str,
    earlier: bool,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A request reported as published is complete. Nothing else is visible. Others continue."""
    for nth in itertools.count(1):
        case = IN_A_DIRECTORY[label](tmp_path / str(nth))
        name, calls = "folder/inner/a", Calls(errno.EIO, nth=nth)
        caplog.clear()
        with case.serve() as sink:
            others = f"{name}-before" if earlier else "before", "after"
            put(case.open(others[0]), 3, version=1)
            if earlier:
                case.open(name).fail("earlier")
            before, file, raised, ending = case.held(), None, None, 0
            with monkeypatch.context() as patch:
                trace(patch, calls)
                try:
                    file = case.open(name, 4)
                    file.write(0, finite_rows(0, 4))
                    ending = len(calls.made)
                    end(file, how, 4)
                except SinkError as error:
                    raised = error
                    if file is not None and not ending:
                        file.fail(error.reason)
            committed = how == "commit" and raised is None
            if raised is not None:
                assert "EIO" in raised.reason
                if file is not None or "a folder in its path" not in raised.reason:
                    assert reason_of(case.path(name)) == raised.reason, (
                        "a response that has left already names the path"
                    )
            elif ending < nth <= len(calls.made):
                assert "EIO" in caplog.text, "a fault that changes nothing is in the log"
            if committed:
                assert case.has(name, finite_rows(0, 4))
            else:
                assert not case.has_rows(name)
            assert not sink._files  # type: ignore[attr-defined]
            assert case.held() - before <= case.spare_fds
            assert "lock" not in case.traces(name) or not case.is_locked(name)
            assert "hidden file" not in case.traces(name) or calls.failed == "unlink"
            put(case.open(others[1]), 3, version=2)
            remove(case.path(name))
            case.open(name).discard()
        assert case.held() == 0
        assert all(
            case.has(other, finite_rows(0, 3, version)) for version, other in enumerate(others, 1)
        )
        assert len(list(case.where.glob("hsx-*.json"))) == len(walked(case.where)), (
            "what could not be sealed is sealed at the end"
        )
        assert not list(case.where.glob(".*")), "no server may ever start there"
        if not calls.failed:
            break
    assert nth > 20
    assert {"mkdir", "fchmod"} <= set(calls.made) or earlier


# Options


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize(("mode", "lock_mode"), [(0o640, 0o660), (0o600, 0o600), (0o644, 0o666)])
@pytest.mark.parametrize("make", [FileCase, ShardCase])
def test_file_modes_do_not_depend_on_the_umask(
    tmp_path: Path, make: type[FileCase], mode: int, lock_mode: int, umask: int
) -> None:
    """Readers of the data can open the lock for writing, as speculators' reader does."""
    before = os.umask(umask)
    case = make(tmp_path, mode=mode)
    try:
        with case.serve():
            put(case.open("good"), 1)
            case.open("bad").fail("x")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in listing(tmp_path)}
    assert len(modes) >= 4
    assert modes == {name: lock_mode if name.endswith(".lock") else mode for name in modes}


@pytest.mark.parametrize("make", [FileCase, ShardCase])
def test_without_durability_nothing_is_synced(
    tmp_path: Path, make: type[FileCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    trace(monkeypatch, calls)
    case = make(tmp_path)
    with case.serve():
        for index in range(5):
            put(case.open(f"r{index}", 2 * (index % 2)), 2)
    assert "pwrite" in calls.made
    assert not {"fsync", "fdatasync"} & set(calls.made)
