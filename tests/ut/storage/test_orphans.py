"""The next server removes leftovers of dead servers, and no files of live servers or consumers."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from orphan_harness import DATA, commit, dead_workspaces, everything, hidden, open_file
from sink_harness import (
    FORMAT,
    MIB,
    dead_workspace,
    finite_rows,
    is_held,
    killed,
    make_rows,
    open_fds,
    publish,
    token_ids,
)
from tracing import Calls, Traced, trace

from vllm_ascend_hsx.cli.clean import main as clean
from vllm_ascend_hsx.protocol import files as files_module
from vllm_ascend_hsx.protocol import lock as lock_module
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import workspace_name
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.sinks import orphans
from vllm_ascend_hsx.sinks import workspace as workspace_module
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink
from vllm_ascend_hsx.sinks.workspace import LOCK

# Removed files and kept files


def test_live_server_holds_a_locked_workspace_and_removes_it_at_the_end(
    tmp_path: Path,
) -> None:
    with FileSink(tmp_path, FORMAT) as one, FileSink(tmp_path, FORMAT) as other:
        assert everything(tmp_path) == sorted(
            [workspace_name(one.token), workspace_name(other.token)]
        )
        assert is_held(tmp_path / workspace_name(one.token) / LOCK)
        one.close()
        assert everything(tmp_path) == [workspace_name(other.token)]
    assert everything(tmp_path) == []


@pytest.mark.parametrize("at", ["open", "rows", "published", "reason", "lock over a reader's"])
def test_next_start_removes_leftovers_of_a_killed_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        if at == "lock over a reader's":
            sink.open("cmpl-1", tmp_path / DATA).fail("x")
            (tmp_path / f"{DATA}.error").unlink()
            fcntl.flock(os.open(tmp_path / f"{DATA}.lock", os.O_RDONLY), fcntl.LOCK_SH)
            os.rename = die
        file = open_file(sink, tmp_path, rows=0 if at == "open" else 2)
        if at == "reason":
            os.rename = die
            file.fail("x")
        if at == "published":  # and its hidden name not yet removed
            os.unlink = die
            file.commit(token_ids(2), 2)

    killed(serve)
    published = [DATA, f"{DATA}.lock"] if at == "published" else []
    assert len(everything(tmp_path)) == 2 + (at == "published"), (
        "the workspace, a lock, and what was published"
    )
    assert len(hidden(tmp_path)) == (at != "open")
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == published


def test_one_line_of_the_log_says_what_was_recovered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        sink = ShardSink(tmp_path, FORMAT, shard_bytes=MIB)
        for name in ("a", "b"):
            publish(sink, tmp_path, name)
        sink.open("c", tmp_path / "c.safetensors").write(0, finite_rows(0, 2))

    killed(serve)
    FileSink(tmp_path, FORMAT).close()
    (line,) = [record for record in caplog.records if "sinks.orphans" in record.name]
    assert line.levelname == "WARNING", "what is below is not shown by vLLM's logging"
    assert line.getMessage() == (
        f"{tmp_path}: leftovers of a server that died or could not clean up: "
        "sealed 1 shard with 2 requests, removed 1 hidden file, 1 lock without data"
    )


def test_files_of_consumers_stay(tmp_path: Path) -> None:
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


def test_files_of_a_live_server_stay(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        open_file(sink, tmp_path, "again.safetensors").fail("x")
        files = [
            open_file(sink, tmp_path, name) for name in ("again.safetensors", "rows.safetensors")
        ]
        files.append(open_file(sink, tmp_path, "no-rows.safetensors", rows=0))
        before = everything(tmp_path)
        killed(lambda: FileSink(tmp_path, FORMAT))
        FileSink(tmp_path, FORMAT).close()
        assert everything(tmp_path) == before
        for file in files[:2]:
            file.commit(token_ids(2), 2)


def test_foreign_files_stay_whatever_their_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "storage"
    directory.mkdir()
    strangers = [
        ".hidden",
        ".hsx-",
        ".hsx-0BADCAFE",
        "x.lock",
        ".x.partial",
        ".hsx-0badcafe5",
        "hsx-0badcafe",
        ".hsx-unlocked-0badcafe",
    ]
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
    # The workspace of the dead server stays until it is empty.
    assert before - set(everything(directory)) == {workspace_name("0badcaff")}
    assert sorted(os.listdir(directory / workspace_name("0badcafe"))) == ["folder", "lock"]
    assert victim.read_text() == "precious"
    assert "(6 problems in all)" in caplog.text, (
        "three workspaces and two locks that are none, and a folder in a workspace"
    )


def test_only_folders_of_the_dead_server_are_cleaned(tmp_path: Path) -> None:
    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        for name in ("a/b/rows", "a/b/more", "a/stale", "é/rows", "removed/rows", "linked/rows"):
            open_file(sink, tmp_path, f"{name}.safetensors", rows=0 if name == "a/stale" else 2)
        commit(sink, tmp_path, "a/complete.safetensors")

    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "x.safetensors.lock").touch()
    with FileSink(tmp_path, FORMAT) as sink:
        living = open_file(sink, tmp_path, "a/b/living.safetensors")
        killed(serve)
        shutil.rmtree(tmp_path / "removed")
        (tmp_path / "linked").rename(tmp_path / "moved").with_name("linked").symlink_to(
            tmp_path / "moved"
        )
        FileSink(tmp_path, FORMAT).close()
        assert dead_workspaces(tmp_path) == []
        assert everything(tmp_path / "a" / "b") == ["living.safetensors.lock"]
        assert everything(tmp_path / "a") == [
            "b",
            "complete.safetensors",
            "complete.safetensors.lock",
        ]
        living.commit(token_ids(2), 2)
    assert [everything(tmp_path / each) for each in ("é", "moved", "strangers")] == [
        [],
        ["rows.safetensors.lock"],
        ["x.safetensors.lock"],
    ]
    assert everything(tmp_path) == ["a", "linked", "moved", "strangers", "é"]


@pytest.mark.parametrize(
    "folder", ["../outside", "/", ".", ".hidden", "link", "a/../../outside", "\0", "file"]
)
def test_changed_workspace_lock_does_not_lead_outside(tmp_path: Path, folder: str) -> None:
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


def test_without_locks_nothing_is_cleaned_up(tmp_path: Path) -> None:
    killed(lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    before = everything(tmp_path)
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)) as sink:
        open_file(sink, tmp_path, "other.safetensors").discard()
        assert [
            name for name in everything(tmp_path) if name != f".hsx-unlocked-{sink.token}"
        ] == before
    killed(
        lambda: open_file(
            FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)), tmp_path, "other.safetensors"
        )
    )
    FileSink(tmp_path, FORMAT).close()
    assert len(hidden(tmp_path)) == 1, "who holds no lock may live"


def test_request_of_a_dead_server_is_missing_for_its_reader(tmp_path: Path) -> None:
    killed(lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    FileSink(tmp_path, FORMAT).close()
    with pytest.raises(
        FileNotFoundError,
        match=r"hidden_states_error in its response\) or aborted, did its server die",
    ):
        load(tmp_path / DATA, 0)


def test_server_that_died_before_locking_is_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / workspace_name("0badcafe")).mkdir()
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []


def test_removed_workspace_is_recreated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        under_way = open_file(sink, tmp_path)
        not_begun = open_file(sink, tmp_path, "folder/not-begun.safetensors", rows=0)
        shutil.rmtree(tmp_path / workspace_name(sink.token))
        why = "could not be {}, because the hidden directory of this server.*ENOENT"
        with pytest.raises(SinkError, match=why.format("published")) as raised:
            under_way.commit(token_ids(2), 2)
        with pytest.raises(HiddenStatesError) as told:
            load(under_way.path, 0)
        assert told.value.reason == raised.value.reason
        with pytest.raises(SinkError, match=why.format("created")):
            not_begun.write(0, make_rows(0, 2))
        not_begun.fail("no luck")
        with pytest.raises(HiddenStatesError, match="no luck"):
            load(not_begun.path, 0)
        commit(sink, tmp_path, "next.safetensors")
        assert "the hidden directory of this server was removed" in caplog.text
    assert [name for name in everything(tmp_path) if not name.endswith(".lock")] == [
        f"{DATA}.error",
        "folder",
        "next.safetensors",
    ]


@pytest.mark.parametrize("kind", ["files", "shards"])
@pytest.mark.parametrize("removed", ["its lock", "all files in it"])
def test_files_of_a_live_server_stay_after_its_lock_was_removed(
    tmp_path: Path, kind: str, removed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A purge of old files may remove the lock. Sealing a shard in use would lose members."""
    paths = [tmp_path / f"{name}.safetensors" for name in ("before", "under-way", "after")]
    with (
        FileSink(tmp_path, FORMAT)
        if kind == "files"
        else ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink
    ):
        commit(sink, tmp_path, paths[0].name)
        if removed == "its lock":
            under_way = open_file(sink, tmp_path, paths[1].name)
        workspace = tmp_path / workspace_name(sink.token)
        for name in [LOCK] if removed == "its lock" else os.listdir(workspace):
            (workspace / name).unlink()
        FileSink(tmp_path, FORMAT).close()
        assert not list(tmp_path.glob("hsx-*.json")), "sealed"
        if removed == "its lock":
            assert (
                f"could not clean {workspace.name!r}: its lock was removed, so its server may be "
                "alive"
            ) in caplog.text
            assert clean([str(tmp_path), "--dry-run"]) == clean([str(tmp_path)]) == 1
            under_way.commit(token_ids(2), 2)
        else:
            assert not workspace.exists()
            commit(sink, tmp_path, paths[1].name)
        commit(sink, tmp_path, paths[2].name)
        what = "lock" if removed == "its lock" else "hidden directory"
        assert f"the {what} of this server was removed; creating a new" in caplog.text
        assert is_held(tmp_path / workspace_name(sink.token) / LOCK)
        assert not workspace.exists(), "the former one is removed with its last request"
        for path in paths:
            assert load(path, 0, verify=True).token_ids.tolist() == token_ids(2).tolist()
    assert {json.loads(path.read_text())["sealed_by"] for path in tmp_path.glob("hsx-*.json")} <= {
        "server"
    }
    assert not [name for name in everything(tmp_path) if name.startswith(".")]


def test_directory_of_complete_files_costs_one_pass_over_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_cleaning_fault_is_logged_and_the_next_start_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    def serve() -> None:
        sink = FileSink(tmp_path, FORMAT)
        open_file(sink, tmp_path)
        open_file(sink, tmp_path, "other.safetensors")

    killed(serve)
    cleaning = False
    clean = orphans.remove_orphans

    def remove_orphans(*args: object) -> None:
        nonlocal cleaning
        cleaning = True
        clean(*args)  # type: ignore[arg-type]
        cleaning = False

    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr("vllm_ascend_hsx.sinks.file.remove_orphans", remove_orphans)
        for module in (orphans, files_module, lock_module, workspace_module):
            patch.setattr(
                module, "os", Traced(os, Calls(errno.EACCES, failing, when=lambda: cleaning))
            )
        with FileSink(tmp_path, FORMAT) as sink:
            assert "EACCES" in caplog.text
            if failing != "scandir":
                assert "problems in all" in caplog.text
            commit(sink, tmp_path, "mine.safetensors")
    assert open_fds() == before
    assert len(everything(tmp_path)) > 2
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == ["mine.safetensors", "mine.safetensors.lock"]


def test_next_start_removes_a_hidden_file_that_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, FileSink(tmp_path, FORMAT) as sink:
        file = open_file(sink, tmp_path)
        trace(patch, Calls(errno.EROFS, "unlink"))
        file.discard()
    assert len(dead_workspaces(tmp_path)) == 1
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []


@pytest.mark.parametrize("use_lock", [True, False])
def test_leaving_the_directory_removes_a_hidden_file_that_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_lock: bool
) -> None:
    directory, former = tmp_path / "out", tmp_path / "former"
    with FileSink(directory, FORMAT, FileOptions(use_lock=use_lock)) as sink:
        file = open_file(sink, directory)
        with monkeypatch.context() as patch:
            trace(patch, Calls(errno.EROFS, "unlink"))
            file.discard()
        directory.rename(former)
        directory.mkdir()
        commit(sink, directory, "next.safetensors")
        assert everything(former) == []


def test_failed_workspace_is_one_clear_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    with monkeypatch.context() as patch:
        patch.setattr(HeldLock, "create", classmethod(lambda cls, *args: None))
        with pytest.raises(UserError, match="cannot be written: other processes locked or removed"):
            FileSink(tmp_path, FORMAT)
    assert open_fds() == before
