"""`hsx clean` removes leftovers, but nothing that a server or a reader may need."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sink_harness import FORMAT, is_held, make_rows, token_ids

from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

DAY = 24 * 3600


def killed(serve: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            serve()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def publish(sink: FileSink | ShardSink, directory: Path, name: str, end: str = "commit") -> Path:
    file = sink.open(name, directory / f"{name}.safetensors", 3)
    file.write(0, make_rows(0, 3))
    file.commit(token_ids(3), 3) if end == "commit" else file.fail("no luck")
    return file.path


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Create files, empty locks, errors of 10 days and 1 day, and leftovers of a dead server."""
    with FileSink(tmp_path, FORMAT) as sink:
        for folder in ("", "day/"):
            publish(sink, tmp_path, f"{folder}complete")
            age(Path(f"{publish(sink, tmp_path, f'{folder}old', 'fail')}.error"), 10)
            age(Path(f"{publish(sink, tmp_path, f'{folder}new', 'fail')}.error"), 1)

    def die() -> None:
        file = FileSink(tmp_path, FORMAT).open("dead", tmp_path / "day/dead.safetensors")
        file.write(0, make_rows(0, 2))

    killed(die)
    for folder in ("", "day/"):
        (tmp_path / f"{folder}taken.safetensors.lock").touch()
    return tmp_path


KEPT = {
    f"{folder}{name}"
    for folder in ("", "day/")
    for name in ("complete.safetensors", "complete.safetensors.lock")
}
NEW = {
    f"{folder}new.safetensors{suffix}" for folder in ("", "day/") for suffix in (".lock", ".error")
}
OLD = {
    f"{folder}old.safetensors{suffix}" for folder in ("", "day/") for suffix in (".lock", ".error")
}


def test_locks_without_data_and_leftovers_of_dead_servers_are_removed(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", str(storage)]) == 0
    assert names(storage) == KEPT | NEW | OLD
    output = capsys.readouterr().out
    assert f"removed {storage}/taken.safetensors.lock" in output
    assert f"removed {storage}/day/taken.safetensors.lock" in output
    assert "removed: 1 hidden file, 3 locks without data\n" in output
    assert main(["clean", str(storage)]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_old_errors_are_removed_with_their_locks(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", str(storage), "--errors-older-than", "7d"]) == 0
    assert names(storage) == KEPT | NEW
    assert "removed: 1 hidden file, 3 locks without data, 2 errors\n" in capsys.readouterr().out
    (storage / "new.safetensors.lock").unlink()  # as the reader of speculators does
    assert main(["clean", str(storage), "--errors-older-than", "2h"]) == 0
    assert names(storage) == KEPT


def test_dry_run_lists_removals_and_changes_nothing(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: (storage / name).stat().st_mtime_ns for name in names(storage)}
    assert main(["clean", str(storage), "--dry-run", "--errors-older-than", "7d"]) == 0
    assert {name: (storage / name).stat().st_mtime_ns for name in names(storage)} == before
    output = capsys.readouterr().out
    assert f"would remove {storage}/old.safetensors.error" in output
    assert "would be removed: 1 hidden file, 3 locks without data, 2 errors\n" in output


def test_files_of_live_servers_and_readers_are_not_touched(storage: Path) -> None:
    with FileSink(storage, FORMAT) as sink:
        under_way = sink.open("r", storage / "r.safetensors")
        under_way.write(0, make_rows(0, 2))
        again = sink.open("old", storage / "old.safetensors")
        again.write(0, make_rows(0, 2))
        with (
            open(storage / "day/old.safetensors.lock") as reader,
            open(storage / "day/taken.safetensors.lock", "w") as other,
        ):
            fcntl.flock(reader, fcntl.LOCK_SH)
            fcntl.flock(other, fcntl.LOCK_SH)
            assert main(["clean", str(storage), "--errors-older-than", "0s"]) == 0
            assert {
                "day/old.safetensors.error",
                "day/old.safetensors.lock",
                "day/taken.safetensors.lock",
            } <= names(storage)
        assert is_held(storage / "r.safetensors.lock")
        for file in (under_way, again):
            file.commit(token_ids(2), 2)
            assert load(file.path, 0).token_ids.shape == (2,)


def test_shards_of_a_dead_server_are_sealed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(
        lambda: publish(ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20), tmp_path, "a-0123abcd")
    )
    assert main(["clean", str(tmp_path), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "would be sealed: 1 shard, would be removed: 1 hidden file\n" in output
    assert f"would seal {tmp_path}/hsx-" in output
    assert not list(tmp_path.glob("hsx-*.json"))
    assert main(["clean", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("hsx-*.json"))) == 1
    output = capsys.readouterr().out
    assert "sealed: 1 shard with 1 request, removed: 1 hidden file\n" in output
    assert f"sealed {next(tmp_path.glob('*.tar'))}\n" in output
    assert load(tmp_path / "a-0123abcd.safetensors", 0).token_ids.shape == (3,)


def test_leftovers_in_subfolders_are_removed_from_the_parent(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = storage / "day" / "inner"
    inner.mkdir()
    killed(lambda: publish(ShardSink(inner, FORMAT, shard_bytes=1 << 20), inner, "a-0123abcd"))
    for options, words in (
        (["--dry-run"], "would be sealed: 1 shard, would be removed"),
        ([], "sealed: 1 shard with 1 request, removed"),
    ):
        assert main(["clean", str(storage), *options]) == 0
        output = capsys.readouterr().out
        assert f"{words}: 2 hidden files, 3 locks without data\n" in output
        assert f"seal{'ed' * (not options)} {next(inner.glob('*.tar'))}\n" in output
    assert not list(storage.rglob(".hsx-*"))
    assert load(inner / "a-0123abcd.safetensors", 0).token_ids.shape == (3,)


def test_concurrently_removed_error_is_not_a_problem(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_and_lose(dir_fd: int) -> list[str]:
        names = [name for name in os.listdir(dir_fd) if name.endswith(".error")]
        for name in names:
            os.unlink(name, dir_fd=dir_fd)
        return names

    monkeypatch.setattr("vllm_ascend_hsx.sinks.orphans._errors", list_and_lose)
    assert main(["clean", str(storage), "--errors-older-than", "0s"]) == 0


def test_everything_that_cannot_be_removed_is_reported(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unlink(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", unlink)
    assert main(["clean", str(storage), "--errors-older-than", "7d"]) == 1
    output = capsys.readouterr()
    for name in ("taken.safetensors.lock", "old.safetensors.error"):
        for folder in ("", "day/"):
            assert (
                f"hsx clean: could not remove '{folder}{name}': Permission denied (EACCES)\n"
                in output.err
            )
            assert f"removed {storage}/{folder}{name}" not in output.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/no/such"], "hsx clean: /no/such cannot be opened: No such file or directory"),
        (["/dev/null"], "hsx clean: /dev/null cannot be opened: Not a directory"),
        ([".", "--errors-older-than", "7"], "--errors-older-than 7: give a number and a unit"),
        ([".", "--errors-older-than", "-1d"], "--errors-older-than"),
        (
            [".", "--errors-older-than", "99999999d"],
            "--errors-older-than 99999999d: give a number and a unit",
        ),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["clean", *arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert told in capsys.readouterr().err
