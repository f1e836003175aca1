"""Races of servers and readers at any system call: locks hold, and cleaning is harmless."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lock_readers import Stepped, speculators_reader
from orphan_harness import DATA, commit, everything, open_file
from sink_harness import FORMAT, dead_workspace, is_held, run_threads, token_ids
from tracing import trace

from vllm_ascend_hsx.protocol.lock import HeldLock, LockHeldError
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.file import FileSink


@pytest.mark.parametrize("earlier", [False, True], ids=["new name", "name used before"])
def test_request_holds_a_visible_lock_whatever_a_reader_does(tmp_path: Path, earlier: bool) -> None:
    """A reader of an earlier request may lock and remove the lock file before our flock."""
    met = set()
    for stop_at in range(12):
        for count in range(1, 9):
            directory = tmp_path / f"{stop_at}-{count}"
            with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
                path = directory / DATA
                if earlier:
                    sink.open("cmpl-1", path).fail("x")
                calls = 0
                stepped = Stepped(speculators_reader(path))

                def checkpoint(call: str) -> None:
                    nonlocal calls
                    if calls == stop_at:  # noqa: B023
                        stepped.step(count)  # noqa: B023
                        met.add(call)
                    calls += 1

                trace(patch, checkpoint)
                patch.setattr(time, "sleep", lambda seconds: stepped.step())  # noqa: B023 - called by others meanwhile
                file = sink.open("cmpl-1", path)
                assert is_held(Path(f"{path}.lock"))
                file.discard()
    assert met >= {"open", "flock", "stat"}


def test_briefly_held_lock_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    moment = HeldLock.acquire(dir_fd, "f.lock", 0o600, dir_fd)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            moment.remove()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        held = HeldLock.acquire(dir_fd, "f.lock", 0o600, dir_fd)
    assert len(slept) == 2
    assert is_held(tmp_path / "f.lock")
    del slept[:]
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(LockHeldError):
        HeldLock.acquire(dir_fd, "f.lock", 0o600, dir_fd)
    assert 0 < sum(slept) < 0.1
    held.remove()
    os.close(dir_fd)


def test_open_does_not_wait_for_a_request_of_the_same_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client that chooses names could delay the opening of all other files."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with FileSink(tmp_path, FORMAT) as sink:
        open_file(sink, tmp_path)
        with pytest.raises(SinkError, match="another request is writing this file"):
            open_file(sink, tmp_path)


def a_life(directory: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Run a sink with names whose locks a dead server may have left.

    `meanwhile` is called while a request is open.
    """
    with FileSink(directory, FORMAT) as sink:
        file = open_file(sink, directory)
        meanwhile()
        assert is_held(directory / f"{DATA}.lock")
        file.commit(token_ids(2), 2)
        open_file(sink, directory, "failed.safetensors").fail("this reason is replaced")
        open_file(sink, directory, "failed.safetensors").fail("x")
        open_file(sink, directory, "aborted.safetensors").discard()
    left = [DATA, f"{DATA}.lock", "failed.safetensors.error", "failed.safetensors.lock"]
    assert [name for name in everything(directory) if not name.startswith(".")] == left
    assert load(directory / DATA, 0, verify=True).token_ids.tolist() == token_ids(2).tolist()
    for name in left:
        (directory / name).unlink()


def leave(directory: Path, stale: bool) -> None:
    """Leave a hidden directory, and locks of the names that `a_life` uses."""
    directory.mkdir(exist_ok=True)
    dead_workspace(directory)
    for name in (DATA, "failed.safetensors", "aborted.safetensors") if stale else ():
        (directory / f"{name}.lock").touch()


@pytest.mark.parametrize("stale", [False, True], ids=["new names", "names with stale locks"])
def test_cleaning_by_another_server_at_any_system_call_is_harmless(
    tmp_path: Path, stale: bool
) -> None:
    stop_at = 0
    reached = True
    while reached:
        directory = tmp_path / str(stop_at)
        leave(directory, stale)
        calls, reached, inside = 0, False, False

        def checkpoint(call: str) -> None:
            nonlocal calls, reached, inside
            if inside:
                return
            if calls == stop_at:  # noqa: B023
                inside = reached = True
                FileSink(directory, FORMAT).close()  # noqa: B023
                inside = False
            calls += 1

        with pytest.MonkeyPatch.context() as patch:
            trace(patch, checkpoint, start=True)
            a_life(directory)
        assert everything(directory) == []
        stop_at += 1
    assert stop_at > 80


@pytest.mark.parametrize("goes_on", ["while a request of ours is under way", "afterwards"])
@pytest.mark.parametrize("stale", [False, True], ids=["new names", "names with stale locks"])
def test_cleaning_paused_at_any_system_call_does_not_harm_a_live_server(
    tmp_path: Path, stale: bool, goes_on: str
) -> None:
    """If the paused server holds a lock that the live server needs, the live server waits."""
    waited = 0
    stop_at = 0
    reached = True
    while reached:
        directory = tmp_path / str(stop_at)
        leave(directory, stale)
        standing, go_on = threading.Event(), threading.Event()
        calls, reached = 0, False

        def checkpoint(call: str) -> None:
            nonlocal calls, reached
            if threading.current_thread() is not other:  # noqa: B023
                return
            if calls == stop_at:  # noqa: B023
                reached = True
                standing.set()  # noqa: B023
                assert go_on.wait(30)  # noqa: B023
            calls += 1

        def start(directory: Path = directory) -> None:
            FileSink(directory, FORMAT).close()

        def let_it_go_on() -> None:
            go_on.set()  # noqa: B023
            other.join(30)  # noqa: B023

        def sleep(seconds: float) -> None:
            nonlocal waited
            waited += 1
            let_it_go_on()

        other = threading.Thread(target=start)
        with pytest.MonkeyPatch.context() as patch:
            trace(patch, checkpoint, start=True)
            patch.setattr(time, "sleep", sleep)
            other.start()
            while not standing.wait(0.001) and other.is_alive():
                pass
            a_life(directory, let_it_go_on if goes_on.startswith("while") else lambda: None)
            let_it_go_on()
        # The next server removes names that appeared after the listing.
        FileSink(directory, FORMAT).close()
        assert everything(directory) == []
        stop_at += 1
    assert stop_at > 30
    assert bool(waited) == stale


@pytest.mark.parametrize("round", range(3))
def test_servers_that_start_and_clean_at_the_same_time_all_start(
    tmp_path: Path, round: int
) -> None:
    def serve(number: int) -> None:
        for turn in range(12):
            with FileSink(tmp_path, FORMAT) as sink:
                commit(sink, tmp_path, f"{number}.safetensors")
                (tmp_path / f"{number}.safetensors").unlink()  # a consumer leaves a stale lock
            dead_workspace(tmp_path, f"{number:04x}{turn:04x}")

    run_threads(*(lambda number=number: serve(number) for number in range(8)))
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []
