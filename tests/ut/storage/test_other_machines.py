"""Servers on another machine. Their locks look free, because the filesystem keeps locks local."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orphan_harness import DATA, commit, everything, open_file
from sink_harness import FORMAT, MIB, killed, publish

from vllm_ascend_hsx.cli.clean import main as clean
from vllm_ascend_hsx.config import LONGEST_WAIT_S
from vllm_ascend_hsx.generate.files import RowFiles
from vllm_ascend_hsx.generate.ledger import row_file
from vllm_ascend_hsx.protocol import heartbeat
from vllm_ascend_hsx.protocol.names import workspace_name
from vllm_ascend_hsx.reader.find import orphaned_locks
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.sinks import workspace
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink
from vllm_ascend_hsx.sinks.workspace import LOCK

ROOT = Path(__file__).parents[3]
NO_FLOCK = """
int flock(int fd, int operation) { return 0; }
"""
# Sends heartbeats of another machine, every 50 ms.
SERVER = """
import sys
from pathlib import Path
from vllm_ascend_hsx.protocol import heartbeat
heartbeat.boot_id = lambda: "another"
from vllm_ascend_hsx.sinks import workspace
workspace.BEAT_S = 0.05
import numpy as np
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.shard import ShardSink
directory = Path(sys.argv[1])
sink = ShardSink(directory, RowFormat((1,), 8, "BF16"), shard_bytes=1 << 20)
for name in ("complete", "day/complete"):
    file = sink.open(name, directory / f"{name}.safetensors")
    file.write(0, np.ones((2, 1, 8), np.uint16))
    file.commit(np.arange(2), 2)
file = sink.open("cmpl-1", directory / "day/cmpl-1.safetensors")
file.write(0, np.ones((2, 1, 8), np.uint16))
print("written", flush=True)
sys.stdin.readline()
file.commit(np.arange(2), 2)
sink.close()
"""
CLEANER = """
import sys
from pathlib import Path
from vllm_ascend_hsx.cli.clean import main as clean
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink
FileSink(Path(sys.argv[1]), RowFormat((1,), 8, "BF16")).close()
sys.exit([clean([sys.argv[1]]), clean([sys.argv[1] + "/day"])] != [1, 0])
"""
READER = """
import sys, time
from vllm_ascend_hsx.reader import other_machines
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
other_machines.RECENT_S = float(sys.argv[2])
sleep = time.sleep
def announce(seconds):
    print("waiting", flush=True)
    time.sleep = sleep
    sleep(seconds)
time.sleep = announce
try:
    print(len(load(sys.argv[1] + "/day/cmpl-1.safetensors", float(sys.argv[3])).token_ids))
except (HiddenStatesError, TimeoutError) as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def no_flock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose flock always succeeds and locks nothing."""
    directory = tmp_path_factory.mktemp("no_flock")
    (directory / "no_flock.c").write_text(NO_FLOCK)
    library = directory / "no_flock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, directory / "no_flock.c"], check=True)
    return library


def run(code: str, *arguments: object, **environ: object) -> subprocess.Popen[str]:
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **{name: str(value) for name, value in environ.items()},
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=variables, text=True, **pipes
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A live server on another machine, with an open file in a folder."""
    with run(SERVER, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


def finish(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.write("\n")
    server.stdin.flush()


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def elsewhere(monkeypatch: pytest.MonkeyPatch, serve: Callable[[], object]) -> None:
    """Run `serve` as a server on another machine, and kill it. The locks are then free."""
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "boot_id", lambda: "another")
        killed(serve)


def no_heartbeat(directory: Path, seconds: float = heartbeat.RECENT_S + 1) -> None:
    """Set the age of the last heartbeat of all servers."""
    for lock in directory.glob(f"{workspace_name('*')}/{LOCK}"):
        os.utime(lock, (time.time() - seconds,) * 2)


def test_files_of_a_live_server_on_another_machine_stay(
    server: subprocess.Popen[str], tmp_path: Path, no_flock: Path
) -> None:
    before = names(tmp_path)
    with run(CLEANER, tmp_path, LD_PRELOAD=no_flock) as cleaner:
        output = cleaner.communicate()[0]
    assert cleaner.returncode == 0, output
    assert names(tmp_path) == before
    assert output.count("locks do not reach this machine") == 2, "the server's log and hsx clean"
    finish(server)
    assert server.wait(60) == 0
    assert len(load(tmp_path / "day/cmpl-1.safetensors", 0).token_ids) == 2


def test_load_waits_for_a_server_on_another_machine(
    server: subprocess.Popen[str], tmp_path: Path, no_flock: Path
) -> None:
    with run(READER, tmp_path, heartbeat.RECENT_S, 60, LD_PRELOAD=no_flock) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "waiting\n"
        finish(server)
        assert reader.communicate()[0] == "2\n"


def test_timeout_explains_that_locks_do_not_reach_the_server(
    server: subprocess.Popen[str], tmp_path: Path, no_flock: Path
) -> None:
    with run(READER, tmp_path, 1, 3, LD_PRELOAD=no_flock) as reader:  # longer than RECENT_S
        output = reader.communicate()[0]
    assert "TimeoutError" in output
    assert f"server on {socket.gethostname()}: locks do not reach the server's machine" in output
    server.kill()
    server.wait()
    with run(READER, tmp_path, 1, 60, LD_PRELOAD=no_flock) as reader:
        assert (
            "HiddenStatesError" in (output := reader.communicate()[0])
            and "the server died" in output
        )


REMOVER = """
import sys
from vllm_ascend_hsx.reader.load import remove
remove(sys.argv[1] + "/day/complete.safetensors")
try:
    remove(sys.argv[1] + "/day/cmpl-1.safetensors")
except TimeoutError as error:
    print(error)
"""


def test_remove_takes_only_complete_files_of_a_server_on_another_machine(
    server: subprocess.Popen[str], tmp_path: Path, no_flock: Path
) -> None:
    with run(REMOVER, tmp_path, LD_PRELOAD=no_flock) as remover:
        output = remover.communicate()[0]
    assert "a server on another machine may still be writing it" in output
    assert (tmp_path / "day/cmpl-1.safetensors.lock").exists()
    finish(server)
    assert server.wait(60) == 0
    assert len(load(tmp_path / "day/cmpl-1.safetensors", 0).token_ids) == 2
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "day/complete.safetensors", 0)


def leave_rows(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Row 0 is complete, row 1 has failed, and row 2 is being written."""

    def serve() -> None:
        sink = FileSink(directory, FORMAT)
        commit(sink, directory, row_file(0))
        open_file(sink, directory, row_file(1)).fail("a reason")
        open_file(sink, directory, row_file(2))

    elsewhere(monkeypatch, serve)


def test_open_file_of_another_machine_can_be_removed_after_the_last_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_rows(monkeypatch, tmp_path)
    for row in (0, 1):
        remove(tmp_path / row_file(row))
    with pytest.raises(TimeoutError):
        remove(tmp_path / row_file(2))
    assert everything(tmp_path)[1:] == [f"{row_file(2)}.lock"]
    no_heartbeat(tmp_path)
    remove(tmp_path / row_file(2))
    assert len(everything(tmp_path)) == 1


def test_run_keeps_the_lock_of_a_row_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_rows(monkeypatch, tmp_path)
    options: Any = SimpleNamespace(output=tmp_path, server_path=str, is_ours=lambda row: True)
    ledger: Any = None
    assert RowFiles(options, ledger).remove_companions() == [tmp_path / row_file(2)]
    assert everything(tmp_path)[1:] == [row_file(0), f"{row_file(2)}.lock"]


def test_locks_without_data_stay_while_a_server_may_live_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    elsewhere(
        monkeypatch, lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path, f"folder/{DATA}")
    )
    for directory in (tmp_path, folder):
        assert orphaned_locks(directory) == []
    for directory in (tmp_path, folder):
        no_heartbeat(tmp_path)
        assert orphaned_locks(directory) == [folder / f"{DATA}.lock"]


def test_server_counts_as_alive_if_its_heartbeat_cannot_be_dated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    elsewhere(monkeypatch, lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    no_heartbeat(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refuse)
        assert orphaned_locks(tmp_path) == []
    assert orphaned_locks(tmp_path) == [tmp_path / f"{DATA}.lock"]


def test_server_of_another_machine_is_cleaned_up_after_some_minutes_without_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch, lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    before = everything(tmp_path)
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == before
    no_heartbeat(tmp_path)
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []


def test_server_of_this_machine_is_cleaned_up_beside_a_server_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> None:
        sink = ShardSink(tmp_path, FORMAT, shard_bytes=MIB)
        publish(sink, tmp_path)
        open_file(sink, tmp_path, "b.safetensors")

    elsewhere(monkeypatch, lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    before = everything(tmp_path)
    killed(serve)
    FileSink(tmp_path, FORMAT).close()
    left = set(everything(tmp_path)) - set(before)
    assert {name for name in left if not name.startswith("hsx-")} == {"b.safetensors.lock"}
    assert any(name.endswith(".json") for name in left), "the shard is sealed"


def test_held_lock_of_another_machine_does_not_prevent_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "boot_id", lambda: "another")
        sink = FileSink(tmp_path, FORMAT)
    with sink:
        before = everything(tmp_path)
        killed(lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
        with pytest.raises(HiddenStatesError, match="the server died"):
            load(tmp_path / DATA, 0)
        assert clean([str(tmp_path)]) == 0
        assert everything(tmp_path) == before


def test_server_on_another_mount_counts_as_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(lambda: open_file(FileSink(tmp_path, FORMAT), tmp_path))
    (lock,) = tmp_path.glob(f"{workspace_name('*')}/{LOCK}")
    line, _, rest = lock.read_bytes().partition(b"\n")
    assert line.startswith(f".host={heartbeat.boot_id()}:{os.stat(lock).st_dev} ".encode())
    lock.write_bytes(line.replace(b" ", b"1 ") + b"\n" + rest)
    before = everything(tmp_path)
    assert clean([str(tmp_path)]) == 1
    assert everything(tmp_path) == before


def test_heartbeat_touches_the_lock_until_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, utime = threading.Event(), os.utime

    def note(path: int | Path, *times: object) -> None:
        utime(path, *times)  # type: ignore[arg-type]
        if isinstance(path, int):
            beat.set()

    monkeypatch.setattr(workspace, "BEAT_S", 0.01)
    monkeypatch.setattr(os, "utime", note)
    others = set(threading.enumerate())  # of sinks that other tests have left open
    with FileSink(tmp_path, FORMAT) as sink:
        lock = tmp_path / workspace_name(sink.token) / LOCK
        no_heartbeat(tmp_path)
        for _ in range(2):  # the first one may have begun before
            beat.clear()
            assert beat.wait(30)
        assert time.time() - lock.stat().st_mtime < heartbeat.RECENT_S
    mine = set(threading.enumerate()) - others
    assert not [thread for thread in mine if thread.name == "hsx-heartbeat"]
    no_heartbeat(tmp_path)


def test_heartbeat_delayed_by_storage_timeout_is_recent() -> None:
    assert heartbeat.RECENT_S > LONGEST_WAIT_S + heartbeat.BEAT_S


def test_server_starts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_ascend_hsx.protocol.lock.write_at", is_full)
    killed(lambda: FileSink(tmp_path, FORMAT))
    assert len(everything(tmp_path)) == 1
    FileSink(tmp_path, FORMAT).close()
    assert everything(tmp_path) == []
