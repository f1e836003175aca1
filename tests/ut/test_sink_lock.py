"""The lock protocol against every reader it must serve, in every order of their steps and ours."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from depth import depth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sink_harness import (
    FORMAT,
    Reader,
    Stepped,
    Traced,
    is_held,
    listing,
    make_rows,
    speculators_reader,
    token_ids,
    trace,
    vllm_reader,
    wait_for_sleepers,
)

from vllm_ascend_hsx.protocol import lock as lock_module
from vllm_ascend_hsx.protocol.lock import HeldLock, LockHeldError, is_left_over, wait_until_released
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

READERS = {"speculators": speculators_reader, "vLLM": vllm_reader}


def our_reader(path: Path) -> Reader:
    """`load` with no time to wait, until it need not wait."""
    while True:
        yield
        try:
            return load(path, 0)._asdict()
        except TimeoutError:
            continue


ALL_READERS = READERS | {"ours": our_reader}


def run_interleaved(directory: Path, reader: Callable[[Path], Reader], steps: Callable[[int], int]) -> tuple[Stepped, int]:
    """Open, write and commit three rows while a reader of the path runs; `steps(i)` of its steps run before our i-th system call.

    The reader starts when `open` has returned, which is before the response can leave. Returns it and how many calls we made.
    """
    calls = 0
    with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
        path = directory / "cmpl-1.safetensors"
        file = sink.open("cmpl-1", path)
        stepped = Stepped(reader(path))

        def checkpoint(call: str) -> None:
            nonlocal calls
            if stepped.running:  # a call of our own reader, which shares the module
                return
            stepped.step(steps(calls))
            calls += 1

        trace(patch, checkpoint)
        file.write(1, make_rows(1, 3))
        file.write(0, make_rows(0, 1))
        file.commit(token_ids(3), 2)
    return stepped, calls


def assert_complete(result: dict[str, torch.Tensor] | None) -> None:
    assert result is not None, "the reader took the file for missing"
    assert np.array_equal(result["hidden_states"].view(torch.uint16).numpy(), make_rows(0, 3))
    assert np.array_equal(result["token_ids"].numpy(), token_ids(3))


@pytest.mark.parametrize("reader", ALL_READERS)
def test_a_reader_stopped_between_any_two_of_its_steps_at_any_of_ours_gets_the_whole_file(tmp_path: Path, reader: str) -> None:
    """Every place in our commit, every number of steps the reader has made by then; it makes the rest when we are done."""
    _, calls = run_interleaved(tmp_path / "count", ALL_READERS[reader], lambda call: 0)
    assert calls > 8
    for stop_at in range(calls):
        for count in range(1, 9):
            directory = tmp_path / f"{stop_at}-{count}"
            stepped, _ = run_interleaved(directory, ALL_READERS[reader], lambda call: count if call == stop_at else 0)  # noqa: B023
            assert_complete(stepped.finish())


@settings(max_examples=depth(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=st.lists(st.integers(0, 3), min_size=30, max_size=30), reader=st.sampled_from(sorted(ALL_READERS)))
def test_any_interleaving_of_a_reader_with_a_commit_gives_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, schedule: list[int], reader: str
) -> None:
    directory = tmp_path_factory.mktemp("any")
    stepped, _ = run_interleaved(directory, ALL_READERS[reader], lambda call: schedule[call % len(schedule)])
    assert_complete(stepped.finish())


@pytest.mark.parametrize("reader", READERS)
def test_a_commit_that_removed_the_lock_file_would_break_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    """Why the lock file stays: the same interleavings, with the removal that a tidier protocol would do."""
    monkeypatch.setattr(HeldLock, "release", _remove_and_release)
    broken = 0
    for stop_at in range(25):
        stepped, _ = run_interleaved(tmp_path / str(stop_at), READERS[reader], lambda call: call == stop_at)  # noqa: B023
        try:
            stepped.finish()
        except FileNotFoundError:
            broken += 1
    assert broken


def _remove_and_release(held: HeldLock) -> None:
    os.unlink(held._name, dir_fd=held._dir_fd)
    lock_module._unlock_and_close(held._fd)


@pytest.mark.parametrize("end", ["fail", "discard"])
@pytest.mark.parametrize("reader", ALL_READERS)
def test_a_reader_of_a_request_that_failed_or_was_aborted_is_let_go_and_sees_no_rows(tmp_path: Path, end: str, reader: str) -> None:
    for before in range(4):
        directory = tmp_path / str(before)
        with FileSink(directory, FORMAT) as sink:
            file = sink.open("cmpl-1", directory / "cmpl-1.safetensors")
            stepped = Stepped(ALL_READERS[reader](file.path))
            stepped.step(before)
            file.write(0, make_rows(0, 3))
            {"fail": lambda: file.fail("no luck"), "discard": file.discard}[end]()  # noqa: B023
        try:
            assert stepped.finish() is None
        except FileNotFoundError:
            assert reader != "ours" or end == "discard"
        except HiddenStatesError as error:
            assert end == "fail"
            assert error.reason == "no luck"


@pytest.mark.parametrize("event", ["commit", "fail", "discard", "another consumer takes the file"])
def test_our_reader_understands_whatever_happens_between_two_of_its_system_calls(tmp_path: Path, event: str) -> None:
    outcomes = set()
    for happens_at in range(40):
        directory = tmp_path / str(happens_at)
        with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
            file = sink.open("cmpl-1", directory / "cmpl-1.safetensors")
            file.write(0, make_rows(0, 3))
            if event.startswith("another"):
                file.commit(token_ids(3), 3)
            events = {"commit": lambda: file.commit(token_ids(3), 3), "fail": lambda: file.fail("no luck"), "discard": file.discard}  # noqa: B023
            calls, happening = 0, False

            def checkpoint(call: str) -> None:
                nonlocal calls, happening
                if happening:
                    return
                if calls == happens_at:  # noqa: B023
                    happening = True
                    events.get(event, lambda: remove(file.path))()  # noqa: B023
                    happening = False
                calls += 1

            trace(patch, checkpoint)
            patch.setattr("vllm_ascend_hsx.reader.load.os", Traced(os, checkpoint))
            try:
                assert_complete(load(file.path, 0)._asdict())
                outcomes.add("complete")
            except (TimeoutError, FileNotFoundError, HiddenStatesError) as error:
                outcomes.add(str(error.reason) if isinstance(error, HiddenStatesError) else type(error).__name__)
        if calls <= happens_at:
            break
    assert (
        outcomes
        == {
            "commit": {"TimeoutError", "complete"},
            "fail": {"TimeoutError", "no luck"},
            "discard": {"TimeoutError", "FileNotFoundError"},
            "another consumer takes the file": {"FileNotFoundError", "complete"},
        }[event]
    )


def test_a_reader_that_comes_while_a_file_is_opened_is_never_told_that_the_server_died(tmp_path: Path) -> None:
    """It may know the name before the response does: `find`, or a client that chose it. At each of our system calls it looks once."""
    seen = set()
    with FileSink(tmp_path, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
        path = tmp_path / "cmpl-1.safetensors"
        looking = False

        def checkpoint(call: str) -> None:
            nonlocal looking
            if looking:  # a call of the reader, which shares the module
                return
            looking = True
            try:
                load(path, 0)
            except (FileNotFoundError, TimeoutError, HiddenStatesError) as error:
                seen.add(str(error) if isinstance(error, HiddenStatesError) else type(error).__name__)
            finally:
                looking = False

        trace(patch, checkpoint)
        sink.open("cmpl-1", path)
    assert seen == {"FileNotFoundError", "TimeoutError"}


@pytest.mark.parametrize("earlier", [False, True], ids=["new name", "a stale lock is there"])
def test_a_request_that_begins_between_two_system_calls_of_a_reader_is_waited_for(tmp_path: Path, earlier: bool) -> None:
    """No lock when the reader looks for one, and a lock without data when it looks again: a server has begun, none has died."""
    outcomes = set()
    for happens_at in range(40):
        directory = tmp_path / str(happens_at)
        with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
            path = directory / "cmpl-1.safetensors"
            calls, happening = 0, False
            if earlier:
                Path(f"{path}.lock").touch()

            def checkpoint(call: str) -> None:
                nonlocal calls, happening
                if happening:
                    return
                if calls == happens_at:  # noqa: B023
                    happening = True
                    sink.open("cmpl-1", path)  # noqa: B023
                    happening = False
                calls += 1

            trace(patch, checkpoint)
            patch.setattr("vllm_ascend_hsx.reader.load.os", Traced(os, checkpoint))
            patch.setattr(Path, "exists", lambda self: (checkpoint("exists"), os.path.exists(self))[1])
            try:
                load(path, 0)
            except (TimeoutError, FileNotFoundError, HiddenStatesError) as error:
                # What the reader only gives back comes after its verdict, which was true.
                began = os.path.exists(f"{path}.lock") and is_held(Path(f"{path}.lock")) and happens_at < calls - 3
                outcomes.add(f"{type(error).__name__}{', a server had begun' if began else ''}")
        if calls <= happens_at:
            break
    waits = "TimeoutError, a server had begun"
    assert outcomes - {"TimeoutError"} == ({waits, "HiddenStatesError"} if earlier else {waits, "FileNotFoundError"})


def without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: object, **options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)


def test_on_a_filesystem_without_hard_links_a_lock_is_made_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_hard_links(monkeypatch)
    held = acquire(tmp_path)
    assert is_held(tmp_path / "f.lock")
    assert listing(tmp_path) == ["f.lock"]
    with pytest.raises(LockHeldError):
        acquire(tmp_path)
    held.remove()


# Taking over what stands there


def acquire(directory: Path) -> HeldLock:
    dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    return HeldLock.acquire(dir_fd, "f.lock", 0o600, dir_fd)


def test_a_lock_file_left_by_an_earlier_request_is_taken_over(tmp_path: Path) -> None:
    acquire(tmp_path).release()
    inode = os.stat(tmp_path / "f.lock").st_ino
    held = acquire(tmp_path)
    assert os.stat(tmp_path / "f.lock").st_ino == inode
    assert is_held(tmp_path / "f.lock")
    held.release()


def test_a_reader_still_busy_with_an_earlier_file_does_not_stop_a_new_request(tmp_path: Path) -> None:
    acquire(tmp_path).release()
    with open(tmp_path / "f.lock") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        held = acquire(tmp_path)
        assert is_held(tmp_path / "f.lock"), "the new lock is held under the name, and the reader keeps the old one"
        held.release()
    assert listing(tmp_path) == ["f.lock"]


def test_a_lock_held_by_a_writer_is_refused(tmp_path: Path) -> None:
    held = acquire(tmp_path)
    with pytest.raises(LockHeldError):
        acquire(tmp_path)
    held.release()


def test_a_lock_file_that_vanishes_while_it_is_taken_over_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire(tmp_path).release()
    real, seen = lock_module._flock_now, []

    def flock_now(fd: int, kind: int) -> bool:
        if not seen:
            os.unlink(tmp_path / "f.lock")  # speculators' reader, having taken the earlier file
        seen.append(kind)
        return real(fd, kind)

    monkeypatch.setattr(lock_module, "_flock_now", flock_now)
    held = acquire(tmp_path)
    monkeypatch.undo()
    assert is_held(tmp_path / "f.lock")
    held.release()


def test_a_reader_faster_than_the_writer_of_a_new_lock_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_hard_links(monkeypatch)
    real = lock_module._flock_now
    readers: list[int] = []

    def flock_now(fd: int, kind: int) -> bool:
        if not readers:
            readers.append(os.open(tmp_path / "f.lock", os.O_RDONLY))
            fcntl.flock(readers[0], fcntl.LOCK_SH)
        return real(fd, kind)

    monkeypatch.setattr(lock_module, "_flock_now", flock_now)
    held = acquire(tmp_path)
    monkeypatch.undo()
    assert is_held(tmp_path / "f.lock")
    os.close(readers[0])
    held.release()


def test_a_lease_on_the_lock_file_does_not_hold_up_the_worker(tmp_path: Path) -> None:
    """Whoever may write the file can make open() wait for 45 s (/proc/sys/fs/lease-break-time)."""
    acquire(tmp_path).release()
    lessee = os.open(tmp_path / "f.lock", os.O_RDWR)
    ignored = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease by this signal
    fcntl.fcntl(lessee, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        started = time.monotonic()
        held = acquire(tmp_path)
        assert time.monotonic() - started < 20
        assert is_held(tmp_path / "f.lock")
        held.release()
    finally:
        os.close(lessee)
        signal.signal(signal.SIGIO, ignored)


def test_a_reader_goes_on_to_the_lock_that_took_the_name_while_it_slept(tmp_path: Path) -> None:
    name = tmp_path / "f.lock"
    first = acquire(tmp_path)
    woken = threading.Event()
    reader = threading.Thread(target=lambda: (wait_until_released(name, 30), woken.set()), daemon=True)
    reader.start()
    wait_for_sleepers(name)
    name.unlink()
    second = acquire(tmp_path)
    first.release()
    wait_for_sleepers(name)
    assert not woken.is_set()
    second.release()
    assert woken.wait(30)


def test_removing_a_lock_spares_the_one_that_took_its_name(tmp_path: Path) -> None:
    first = acquire(tmp_path)
    os.unlink(tmp_path / "f.lock")
    second = acquire(tmp_path)
    first.remove()
    assert is_held(tmp_path / "f.lock")
    second.remove()
    assert listing(tmp_path) == []


@pytest.mark.parametrize("planted", ["symlink", "dangling symlink", "fifo", "socket"])
def test_what_is_planted_under_the_locks_name_is_replaced_not_followed(tmp_path: Path, planted: str) -> None:
    target = tmp_path / "target"
    directory = tmp_path / "storage"
    directory.mkdir()
    name = directory / "cmpl-1.safetensors.lock"
    if planted == "fifo":
        os.mkfifo(name)
    elif planted == "socket":
        os.mknod(name, 0o140600)
    else:
        if planted == "symlink":
            target.write_text("precious")
        name.symlink_to(target)
    with FileSink(directory, FORMAT) as sink:
        file: RequestFile = sink.open("cmpl-1", directory / "cmpl-1.safetensors")
        assert is_held(name)
        file.write(0, make_rows(0, 3))
        file.commit(token_ids(3), 3)
    assert load(file.path, 0).hidden_states.shape == (3, 3, 8)
    assert listing(directory) == ["cmpl-1.safetensors", "cmpl-1.safetensors.lock"]
    assert not target.exists() or target.read_text() == "precious"


@pytest.mark.parametrize("decided", [False, True])
def test_a_free_lock_is_left_over_only_if_its_request_is_not_decided(tmp_path: Path, decided: bool) -> None:
    """The request may be published between the listing of a directory and the look at its lock."""
    lock = tmp_path / "a.safetensors.lock"
    lock.touch()
    assert is_left_over(lock, lambda: decided) is not decided
