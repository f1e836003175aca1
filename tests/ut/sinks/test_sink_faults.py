"""The contract of sinks in a directory: locks, modes, and storage that fails at any system call."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sink_cases import IN_A_DIRECTORY, FileCase, ShardCase
from sink_harness import ENDS, FORMAT, end, finite_rows, listing, make_rows, put, reason_of, token_ids, walked, write_in_flight
from tracing import Calls, trace

from vllm_ascend_hsx.connector.stats import failure_kind
from vllm_ascend_hsx.sinks.base import SinkError

pytestmark = pytest.mark.usefixtures("no_wait_for_the_disk")


@pytest.fixture(params=IN_A_DIRECTORY)
def in_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileCase]:
    """Every sink whose requests have a path: in folders, with locks, by calls that can fail."""
    case = IN_A_DIRECTORY[request.param](tmp_path / "storage")
    with case.serve():
        yield case
    assert case.held() == 0


# Locks


@pytest.mark.parametrize("how", ENDS)
def test_the_lock_is_held_until_the_request_is_decided_also_where_a_child_was_forked(in_directory: FileCase, how: str) -> None:
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


def test_another_server_cannot_write_a_request_that_is_under_way(in_directory: FileCase) -> None:
    file = in_directory.open("folder/a")
    with in_directory.make(FORMAT) as other:
        before = in_directory.held()
        with pytest.raises(SinkError, match="another request or server is writing this file"):
            other.open("second", file.path)
        assert in_directory.held() == before
    put(file, 2)
    assert in_directory.has("folder/a", finite_rows(0, 2))


# Storage that fails


def test_a_failure_overtakes_a_write_that_hangs_and_the_caller_closes_the_file(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = in_directory.held()
    file = in_directory.open("slow", 4)
    with write_in_flight(file, monkeypatch):
        file.fail("too slow", close=False)
        assert in_directory.outcome("slow") == "too slow"
        assert not in_directory.is_locked("slow")
        with pytest.raises(SinkError, match="the file has failed"):
            file.write(2, make_rows(2, 4))
        put(in_directory.open("next"), 4, version=3)
    file.close()
    assert in_directory.traces("slow") == in_directory.failed
    assert in_directory.has("next", finite_rows(0, 4, version=3)), "not those of the write that hung"
    assert in_directory.held() - before <= in_directory.spare_fds


def test_a_full_disk_fails_the_request_with_the_systems_reason(in_directory: FileCase, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = in_directory.open("full"), in_directory.open("other")
    file.write(0, finite_rows(0, 2))
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.ENOSPC, "pwrite"))
        with pytest.raises(SinkError, match=r"rows \[2, 4\) could not be written: No space left on device \(ENOSPC\)") as failure:
            file.write(2, finite_rows(2, 4))
    assert failure_kind(failure.value) == "ENOSPC"
    put(other, 4)
    file.fail("no room")
    assert in_directory.outcome("full") == "no room"
    assert in_directory.has("other", finite_rows(0, 4))


@pytest.mark.parametrize("freed", [0, 1])
@pytest.mark.parametrize("when", ["a consumer has removed the lock", "the lock is there", "the file is open", "no hidden directory"])
def test_a_name_that_is_used_again_where_no_inode_is_left_gives_no_earlier_rows(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch, when: str, freed: int
) -> None:
    """The reason needs one as well, which the earlier rows may have."""
    put(in_directory.open("used"), 3)
    if when == "a consumer has removed the lock":
        Path(f"{in_directory.path('used')}.lock").unlink(missing_ok=True)
    file = in_directory.open("used", 3) if when == "the file is open" else None
    if when == "no hidden directory":
        shutil.rmtree(next(in_directory.where.glob(".hsx-*")))
    inodes, real_open, real_unlink = 0, os.open, os.unlink

    def create(path: str, flags: int, *args: int, **kwargs: int) -> int:
        nonlocal inodes
        inodes -= bool(flags & os.O_CREAT)
        if inodes < 0:
            inodes = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(path, flags, *args, **kwargs)

    def unlink(*args: str, **kwargs: int) -> None:
        nonlocal inodes
        real_unlink(*args, **kwargs)
        inodes += freed

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", create)
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(SinkError, match="ENOSPC|cannot hold a file: No space left") as raised:
            if file is None:
                in_directory.open("used", 3)
            elif type(in_directory) is FileCase:
                file.write(0, finite_rows(0, 3))
            else:  # its rows are in a spare file, and a name is in a shard once
                put(file, 3)
        if file is not None and type(in_directory) is FileCase:
            file.fail(raised.value.reason)
        assert not in_directory.has_rows("used")
        if freed and type(in_directory) is FileCase:
            assert reason_of(in_directory.path("used")) == raised.value.reason
    put(in_directory.open("used"), 3, version=2)
    assert in_directory.has("used", finite_rows(0, 3, version=2))


def test_a_name_in_a_folder_that_is_used_again_after_a_restart_on_a_full_disk_gives_no_earlier_rows(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new server cannot record that the folder has locks."""
    with in_directory.serve():
        put(in_directory.open("folder/used"), 3)
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.ENOSPC, "pwrite"))
        with pytest.raises(SinkError, match="ENOSPC"):
            in_directory.open("folder/used", 3)
    assert in_directory.outcome("folder/used") is None or isinstance(in_directory.outcome("folder/used"), str)
    put(in_directory.open("folder/used"), 3, version=2)
    assert in_directory.has("folder/used", finite_rows(0, 3, version=2))


def test_a_name_that_is_used_again_without_a_free_descriptor_gives_no_earlier_rows(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even whether a later request has the name can be told then."""
    put(in_directory.open("used"), 3)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(SinkError, match="EMFILE"):
            in_directory.sink.open("used", in_directory.path("used"), 3, time.time_ns())
    assert not in_directory.has_rows("used")


def test_a_request_that_cannot_be_opened_removes_earlier_rows_also_where_it_leaves_its_reason(
    in_directory: FileCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is removed some day, and with it what hid them."""
    put(in_directory.open("used"), 3)
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.EIO, "flock"))
        with pytest.raises(SinkError, match="EIO"):
            in_directory.open("used", 3)
    assert not in_directory.has_rows("used")
    assert "EIO" in str(in_directory.outcome("used"))


def test_rows_that_could_not_be_written_can_be_written_again(in_directory: FileCase, monkeypatch: pytest.MonkeyPatch) -> None:
    file = in_directory.open("again")
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.EIO, "open", "pwrite"))
        with pytest.raises(SinkError, match="could not be created"):
            file.write(0, finite_rows(0, 4))
    put(file, 4)
    assert in_directory.has("again", finite_rows(0, 4))


def test_a_directory_removed_under_the_server_fails_requests_until_it_is_back(
    in_directory: FileCase, caplog: pytest.LogCaptureFixture
) -> None:
    put(in_directory.open("before"), 2)
    early, late = in_directory.open("early", 2), in_directory.open("late")
    early.write(0, finite_rows(0, 2))
    shutil.rmtree(in_directory.where)
    with pytest.raises(SinkError, match="ENOENT"):
        late.write(0, finite_rows(0, 2))
    for file in (early, late):
        with pytest.raises(SinkError, match="ENOENT"):
            file.commit(token_ids(2), 2)
    assert "could not publish the reason of the failure" in caplog.text
    with pytest.raises(SinkError, match="ENOENT"):
        in_directory.open("refused")
    assert not in_directory.where.exists(), "nobody asked the server to make it again"
    in_directory.where.mkdir()
    put(in_directory.open("after"), 3)
    assert in_directory.has("after", finite_rows(0, 3))


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("earlier", [False, True], ids=["new directories", "directories and a name used before"])
@pytest.mark.parametrize("label", IN_A_DIRECTORY)
def test_a_fault_at_any_system_call_in_a_subdirectory_fails_one_request_and_leaks_nothing(
    tmp_path: Path, label: str, earlier: bool, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is reported as published is there and right, nothing else is, and others go on."""
    for nth in itertools.count(1):
        case = IN_A_DIRECTORY[label](tmp_path / str(nth))
        name, calls = "folder/inner/a", Calls(errno.EIO, nth=nth)
        caplog.clear()
        with case.serve() as sink:
            others = f"{name}-before" if earlier else "before", "after"
            put(case.open(others[0]), 3, version=1)
            if earlier:
                put(case.open(name), 5, version=9)
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
                if file is not None or "a directory on the way" not in raised.reason:
                    assert reason_of(case.path(name)) == raised.reason, "a response that has left already names the path"
            elif ending < nth <= len(calls.made):
                assert "EIO" in caplog.text, "a fault that changes nothing is in the log"
            if committed:
                assert case.has(name, finite_rows(0, 4))
            else:  # where it could not even be opened, what an earlier request left may be there, beside the reason
                Path(f"{case.path(name)}.error").unlink(missing_ok=True)
                assert not case.has_rows(name) or (file is None and case.has(name, finite_rows(0, 5, version=9)))
            assert not sink._files  # type: ignore[attr-defined]
            assert case.held() - before <= case.spare_fds
            assert "lock" not in case.traces(name) or not case.is_locked(name)
            assert "hidden file" not in case.traces(name) or calls.failed == "unlink"
            put(case.open(others[1]), 3, version=2)
            case.open(name).discard()
        assert case.held() == 0
        assert all(case.has(other, finite_rows(0, 3, version)) for version, other in enumerate(others, 1))
        assert len(list(case.where.glob("hsx-*.json"))) == len(walked(case.where)), "what could not be sealed is sealed at the end"
        assert not list(case.where.glob(".*")), "no server may ever start there"
        if not calls.failed:
            break
    assert nth > 20
    assert {"mkdir", "fchmod"} <= set(calls.made) or earlier


# Options


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize(("mode", "lock_mode"), [(0o640, 0o660), (0o600, 0o600), (0o644, 0o666)])
@pytest.mark.parametrize("make", [FileCase, ShardCase])
def test_file_modes_are_as_asked_whatever_the_umask(tmp_path: Path, make: type[FileCase], mode: int, lock_mode: int, umask: int) -> None:
    """Readers of the data can open the lock for writing, as speculators does."""
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
def test_without_durability_nothing_waits_for_the_disk(tmp_path: Path, make: type[FileCase], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    trace(monkeypatch, calls)
    case = make(tmp_path)
    with case.serve():
        for index in range(5):
            put(case.open(f"r{index}", 2 * (index % 2)), 2)
    assert "pwrite" in calls.made
    assert not {"fsync", "fdatasync"} & set(calls.made)
