"""Leftovers of dead servers are removed by the next one, and nothing of a server that lives, at whatever instant they meet."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sink_harness import (
    FORMAT,
    Stepped,
    Traced,
    dead_workspace,
    is_held,
    listing,
    make_rows,
    open_fds,
    speculators_reader,
    token_ids,
    trace,
)

from vllm_ascend_hsx.protocol import lock as lock_module
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.lock import HeldLock, LockHeldError
from vllm_ascend_hsx.protocol.names import token_of_workspace, workspace_name
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks import orphans
from vllm_ascend_hsx.sinks import workspace as workspace_module
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink
from vllm_ascend_hsx.sinks.workspace import LOCK

DATA = "cmpl-1.safetensors"


def killed(serve: Callable[[], object]) -> None:
    """Have a server of its own do something, and kill it."""
    child = os.fork()
    if child == 0:
        try:
            serve()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def open_file(sink: FileSink, directory: Path, name: str = DATA, rows: int = 2) -> RequestFile:
    file = sink.open("cmpl-1", directory / name)
    if rows:
        file.write(0, make_rows(0, rows))
    return file


def commit(sink: FileSink, directory: Path, name: str = DATA) -> None:
    open_file(sink, directory, name).commit(token_ids(2), 2)


def everything(directory: Path) -> list[str]:
    """All names, of living servers too."""
    return sorted(os.listdir(directory))


def dead_workspaces(directory: Path) -> list[str]:
    return [name for name in listing(directory) if token_of_workspace(name)]


def hidden(directory: Path) -> list[str]:
    """Files in workspaces, of living servers too."""
    workspaces = (path for path in directory.iterdir() if path.name.startswith("."))
    return [each.name for path in workspaces for each in path.iterdir() if each.name != LOCK]


# What is removed, and what stays


def test_a_server_that_lives_has_a_workspace_whose_lock_is_held_and_that_goes_with_it(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT) as one, FileSink(tmp_path, FORMAT) as other:
        assert everything(tmp_path) == sorted([workspace_name(one.token), workspace_name(other.token)])
        assert is_held(tmp_path / workspace_name(one.token) / LOCK)
        one.close()
        assert everything(tmp_path) == [workspace_name(other.token)]
    assert everything(tmp_path) == []


@pytest.mark.parametrize("at", ["open", "rows", "rows over an earlier file", "reason", "lock over a reader's"])
def test_what_a_server_leaves_that_is_killed_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        if at == "rows over an earlier file":
            commit(sink, tmp_path)
        if at == "lock over a reader's":
            sink.open("cmpl-1", tmp_path / DATA).fail("x")
            (tmp_path / f"{DATA}.error").unlink()
            fcntl.flock(os.open(tmp_path / f"{DATA}.lock", os.O_RDONLY), fcntl.LOCK_SH)
            os.rename = die
        file = open_file(sink, tmp_path, rows=0 if at == "open" else 2)
        if at == "reason":
            os.rename = die
            file.fail("x")

    killed(serve)
    assert len(everything(tmp_path)) == 2, "the workspace and a lock"
    assert len(hidden(tmp_path)) == {"open": 0, "rows": 1, "rows over an earlier file": 2, "reason": 1, "lock over a reader's": 1}[at]
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []


def test_one_line_of_the_log_says_what_was_recovered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def serve() -> None:
        sink = ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20)
        for name in ("a", "b"):
            file = sink.open(name, tmp_path / f"{name}.safetensors", 2, may_grow=False)
            file.write(0, make_rows(0, 2))
            file.commit(token_ids(2), 2)
        sink.open("c", tmp_path / "c.safetensors").write(0, make_rows(0, 2))

    killed(serve)
    FileSink(tmp_path, FORMAT).close()
    (line,) = [record for record in caplog.records if "sinks.orphans" in record.name]
    assert line.levelname == "WARNING", "what is below is not shown by vLLM's logging"
    assert line.getMessage() == (
        f"{tmp_path}: after a server that died: sealed 1 shard with 2 requests, removed 1 hidden file, 1 lock without data"
    )


def test_what_belongs_to_consumers_stays(tmp_path: Path) -> None:
    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        commit(sink, tmp_path, "complete.safetensors")
        commit(sink, tmp_path, "its-lock-is-gone.safetensors")
        (tmp_path / "its-lock-is-gone.safetensors.lock").unlink()
        open_file(sink, tmp_path, "failed.safetensors").fail("x")
        commit(sink, tmp_path, "taken-away.safetensors")
        (tmp_path / "taken-away.safetensors").unlink()

    killed(serve)
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == [
        "complete.safetensors",
        "complete.safetensors.lock",
        "failed.safetensors.error",
        "failed.safetensors.lock",
        "its-lock-is-gone.safetensors",
    ]


def test_what_belongs_to_a_server_that_lives_stays(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        commit(sink, tmp_path, "again.safetensors")
        files = [open_file(sink, tmp_path, name) for name in ("again.safetensors", "rows.safetensors")]
        files.append(open_file(sink, tmp_path, "no-rows.safetensors", rows=0))
        before = everything(tmp_path)
        killed(lambda: FileSink(tmp_path, FORMAT))
        FileSink(tmp_path, FORMAT).close()
        assert everything(tmp_path) == before
        for file in files[:2]:
            file.commit(token_ids(2), 2)


def test_what_is_not_a_servers_stays_whatever_it_is_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "storage"
    directory.mkdir()
    strangers = [".hidden", ".hsx-", ".hsx-0BADCAFE", "x.lock", ".x.partial", ".hsx-0badcafe5", "hsx-0badcafe", ".hsx-unlocked-0badcafe"]
    for name in strangers:
        (directory / name).mkdir()
        (directory / name / "lock").touch()
    (directory / workspace_name("deadbeef")).symlink_to(directory / ".hidden")
    (directory / workspace_name("00000000")).touch()
    os.mkfifo(directory / workspace_name("00000001"))
    (directory / "folder.safetensors.lock").mkdir()
    (directory / "link.safetensors.lock").symlink_to(victim)
    (dead_workspace(directory) / "folder").mkdir()
    dead_workspace(directory, "0badcaff").joinpath("link").symlink_to(victim)
    before = set(everything(directory))
    FileSink(directory, FORMAT).close()
    # The dead server's workspace stays for as long as something in it does.
    assert before - set(everything(directory)) == {workspace_name("0badcaff")}
    assert sorted(os.listdir(directory / workspace_name("0badcafe"))) == ["folder", "lock"]
    assert victim.read_text() == "precious"
    assert "(6 problems in all)" in caplog.text, "three workspaces and two locks that are none, and a folder in a workspace"


def test_folders_that_a_dead_server_wrote_into_are_cleaned_and_no_others(tmp_path: Path) -> None:
    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        for name in ("a/b/rows", "a/b/more", "a/stale", "é/rows", "removed/rows"):
            open_file(sink, tmp_path, f"{name}.safetensors", rows=0 if name == "a/stale" else 2)
        commit(sink, tmp_path, "a/complete.safetensors")

    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "x.safetensors.lock").touch()
    with FileSink(tmp_path, FORMAT) as sink:
        living = open_file(sink, tmp_path, "a/b/living.safetensors")
        killed(serve)
        shutil.rmtree(tmp_path / "removed")
        FileSink(tmp_path, FORMAT).close()
        assert dead_workspaces(tmp_path) == []
        assert everything(tmp_path / "a" / "b") == ["living.safetensors.lock"]
        assert everything(tmp_path / "é") == []
        assert everything(tmp_path / "a") == ["b", "complete.safetensors", "complete.safetensors.lock"]
        living.commit(token_ids(2), 2)
    assert everything(tmp_path / "strangers") == ["x.safetensors.lock"]
    assert everything(tmp_path) == ["a", "strangers", "é"]


@pytest.mark.parametrize("folder", ["../outside", "/", ".", ".hidden", "link", "a/../../outside", "\0", "file"])
def test_a_workspace_lock_that_was_tampered_with_leads_nowhere_outside(tmp_path: Path, folder: str) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "storage"
    for each in (outside, directory / "a", directory / ".hidden"):
        each.mkdir(parents=True)
        (each / "x.safetensors.lock").touch()
    (directory / "link").symlink_to(outside)
    (directory / "file").touch()
    dead_workspace(directory, folders=f"{folder}\na\n{outside}\n{folder}")
    FileSink(directory, FORMAT).close()
    assert everything(directory / "a") == []
    for each in (outside, directory / ".hidden"):
        assert everything(each) == ["x.safetensors.lock"]


def test_without_locks_nothing_is_removed_neither_by_a_server_nor_of_it(tmp_path: Path) -> None:
    killed(lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    before = everything(tmp_path)
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)) as sink:
        open_file(sink, tmp_path, "other.safetensors").discard()
        assert [name for name in everything(tmp_path) if name != f".hsx-unlocked-{sink.token}"] == before
    killed(lambda: open_file(FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)), tmp_path, "other.safetensors"))
    FileSink(tmp_path, FORMAT).close()
    assert len(hidden(tmp_path)) == 1, "who holds no lock may live"


def test_a_request_of_a_dead_server_is_not_there_for_its_reader(tmp_path: Path) -> None:
    killed(lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    FileSink(tmp_path, FORMAT).close()
    with pytest.raises(FileNotFoundError, match="was the request aborted, or did its server die"):
        load(tmp_path / DATA, 0)


def test_a_server_that_died_before_it_made_its_lock_is_cleaned_up_too(tmp_path: Path) -> None:
    (tmp_path / workspace_name("0badcafe")).mkdir()
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []


def test_a_server_whose_workspace_was_removed_makes_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        under_way = open_file(sink, tmp_path)
        shutil.rmtree(tmp_path / workspace_name(sink.token))
        with pytest.raises(SinkError, match="ENOENT"):
            under_way.commit(token_ids(2), 2)
        commit(sink, tmp_path, "next.safetensors")
        assert "somebody has removed the hidden directory" in caplog.text
    assert [name for name in everything(tmp_path) if not name.endswith(".lock")] == ["next.safetensors"]


def test_a_directory_of_complete_files_costs_one_pass_over_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[int, list[str]] = {}
    for files in (3, 300):
        directory = tmp_path / str(files)
        directory.mkdir()
        for index in range(files):
            for suffix in ("", ".lock"):
                (directory / f"{index}.safetensors{suffix}").touch()
            (directory / f"{index}.moved.safetensors").touch()
        calls: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(orphans, "os", Traced(os, calls.append))
            FileSink(directory, FORMAT).close()
        counted[files] = calls
    assert counted == {3: ["scandir"], 300: ["scandir"]}


# Faults


@pytest.mark.parametrize("failing", ["scandir", "unlink", "open", "stat"])
def test_a_fault_while_cleaning_is_logged_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        open_file(sink, tmp_path)
        open_file(sink, tmp_path, "other.safetensors")

    killed(serve)
    cleaning = False

    def checkpoint(call: str) -> None:
        if cleaning and call == failing:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    clean = orphans.remove_orphans

    def remove_orphans(*args: object) -> None:
        nonlocal cleaning
        cleaning = True
        clean(*args)  # type: ignore[arg-type]
        cleaning = False

    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr("vllm_ascend_hsx.sinks.session.remove_orphans", remove_orphans)
        for module in (orphans, lock_module, workspace_module):
            patch.setattr(module, "os", Traced(os, checkpoint))
        with FileSink(tmp_path, FORMAT) as sink:
            assert "EACCES" in caplog.text
            if failing != "scandir":
                assert "problems in all" in caplog.text
            commit(sink, tmp_path, "mine.safetensors")
    assert open_fds() == before
    assert len(everything(tmp_path)) > 2
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == ["mine.safetensors", "mine.safetensors.lock"]


def test_a_hidden_file_that_could_not_be_removed_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        file = open_file(sink, tmp_path)

        def checkpoint(call: str) -> None:
            if call == "unlink":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        with monkeypatch.context() as patch:
            trace(patch, checkpoint)
            file.discard()
    assert len(dead_workspaces(tmp_path)) == 1
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []


def test_a_start_whose_workspace_cannot_be_made_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr(HeldLock, "create", classmethod(lambda cls, *args: None))
        with pytest.raises(UserError, match="cannot be written: every hidden directory was locked or removed"):
            FileSink(tmp_path, FORMAT)
    assert open_fds() == before


# Readers and servers that meet


@pytest.mark.parametrize("earlier", [False, True], ids=["new name", "name used before"])
def test_a_request_holds_a_lock_that_can_be_seen_whatever_a_reader_does_meanwhile(tmp_path: Path, earlier: bool) -> None:
    """A reader of an earlier request of this name may lock and remove a lock file between its creation and our flock."""
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
                patch.setattr(time, "sleep", lambda seconds: stepped.step())  # noqa: B023 - what others do in that time
                file = sink.open("cmpl-1", path)
                assert is_held(Path(f"{path}.lock"))
                file.discard()
    assert met >= {"open", "flock", "stat"}


def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_request_of_the_same_server_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may choose names could otherwise hold up the opening of all other files."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with FileSink(tmp_path, FORMAT) as sink:
        open_file(sink, tmp_path)
        with pytest.raises(SinkError, match="another request is writing this file"):
            open_file(sink, tmp_path)


def a_life(directory: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """What a server does, beginning to end, with names whose locks a dead one may have left; `meanwhile`, a request is under way."""
    with FileSink(directory, FORMAT) as sink:
        file = open_file(sink, directory)
        meanwhile()
        assert is_held(directory / f"{DATA}.lock")
        file.commit(token_ids(2), 2)
        commit(sink, directory)
        open_file(sink, directory, "failed.safetensors").fail("x")
        open_file(sink, directory, "aborted.safetensors").discard()
    left = [DATA, f"{DATA}.lock", "failed.safetensors.error", "failed.safetensors.lock"]
    assert [name for name in everything(directory) if not name.startswith(".")] == left
    assert load(directory / DATA, 0, verify=True).token_ids.tolist() == token_ids(2).tolist()
    for name in left:
        (directory / name).unlink()


def leave(directory: Path, stale: bool) -> None:
    """What dead servers may leave: a workspace with a file and, if asked for, locks of the names that `a_life` uses."""
    directory.mkdir(exist_ok=True)
    dead_workspace(directory)
    for name in (DATA, "failed.safetensors", "aborted.safetensors") if stale else ():
        (directory / f"{name}.lock").touch()


def trace_all(patch: pytest.MonkeyPatch, checkpoint: Callable[[str], None]) -> None:
    """System calls of the start and of cleaning too."""
    trace(patch, checkpoint)
    for module in ("directory", "orphans"):
        patch.setattr(f"vllm_ascend_hsx.sinks.{module}.os", Traced(os, checkpoint))


@pytest.mark.parametrize("stale", [False, True], ids=["new names", "names with stale locks"])
def test_another_server_that_starts_and_cleans_at_any_system_call_of_ours_harms_nothing(tmp_path: Path, stale: bool) -> None:
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
            trace_all(patch, checkpoint)
            a_life(directory)
        assert everything(directory) == []
        stop_at += 1
    assert stop_at > 80


@pytest.mark.parametrize("goes_on", ["while a request of ours is under way", "afterwards"])
@pytest.mark.parametrize("stale", [False, True], ids=["new names", "names with stale locks"])
def test_a_server_that_lives_while_another_one_stands_at_any_system_call_of_its_cleaning_is_not_harmed(
    tmp_path: Path, stale: bool, goes_on: str
) -> None:
    """Where the other one stands with a lock that ours wants, ours waits, and the other one goes on."""
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
            trace_all(patch, checkpoint)
            patch.setattr(time, "sleep", sleep)
            other.start()
            while not standing.wait(0.001) and other.is_alive():
                pass
            a_life(directory, let_it_go_on if goes_on.startswith("while") else lambda: None)
            let_it_go_on()
        # What it did not see when it read the names is for the next one.
        FileSink(directory, FORMAT).close()
        assert everything(directory) == []
        stop_at += 1
    assert stop_at > 30
    assert bool(waited) == stale


@pytest.mark.parametrize("round", range(3))
def test_servers_that_start_and_clean_at_the_same_time_all_start(tmp_path: Path, round: int) -> None:
    errors: list[BaseException] = []
    begin = threading.Barrier(8)

    def serve(number: int) -> None:
        try:
            begin.wait()
            for turn in range(12):
                with FileSink(tmp_path, FORMAT) as sink:
                    commit(sink, tmp_path, f"{number}.safetensors")
                    (tmp_path / f"{number}.safetensors").unlink()  # a consumer: what it leaves is a stale lock
                dead_workspace(tmp_path, f"{number:04x}{turn:04x}")
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []
