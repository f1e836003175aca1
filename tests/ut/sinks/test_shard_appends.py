"""Appends to a shard, member before line, on a disk that fails, fills up or loses writes."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sink_harness import (
    FORMAT,
    MIB,
    finite_rows,
    open_request,
    publish,
    put,
    rows_of,
    token_ids,
    walked,
)
from test_sink_shard import manifests, members
from tracing import Calls, Traced, trace

from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import storage
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.shard import ShardSink

SHARD_FILE = "vllm_ascend_hsx.sinks.shard_file"


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[ShardSink]:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        yield sink


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "open", "rename", "fdatasync", "fsync"])
def test_shard_that_cannot_be_sealed_is_sealed_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    sink = ShardSink(tmp_path, FORMAT, FileOptions(durability="fdatasync"), shard_bytes=MIB)
    path = publish(sink, tmp_path)
    with monkeypatch.context() as patch:
        trace(patch, Calls(errno.ENOSPC, call))
        sink.close()
    assert "could not be sealed" in caplog.text
    assert np.array_equal(rows_of(path), finite_rows(0, 3))
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB):
        assert len(manifests(tmp_path)) == 1
    assert np.array_equal(rows_of(path), finite_rows(0, 3))


@pytest.mark.parametrize("tokens", [0, 2], ids=["grows", "known"])
def test_durable_member_is_synced_before_its_line_and_the_line_before_unlocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    calls: list[tuple[str, str]] = []
    flocks: list[int] = []

    def noted(name: str, call: str = "", at: int = 0) -> None:
        real = getattr(os, name)

        def note(*args: object) -> object:
            calls.append((call or name, Path(os.readlink(f"/proc/self/fd/{args[at]}")).suffix))
            return real(*args)

        monkeypatch.setattr(os, name, note)

    with ShardSink(tmp_path, FORMAT, FileOptions(durability="fdatasync"), shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "first")
        file = open_request(sink, tmp_path, "a", tokens)
        file.write(0, finite_rows(0, 2))
        noted("pwrite")
        noted("fdatasync")
        noted("copy_file_range", "pwrite", at=1)
        unlock = fcntl.flock
        monkeypatch.setattr(
            fcntl, "flock", lambda fd, how: (flocks.append(len(calls)), unlock(fd, how))[1]
        )
        file.commit(token_ids(2), 2)
        monkeypatch.undo()
    assert [each for each in calls if not each[1][1:].isdigit()][-4:] == [
        ("pwrite", ".tar"), ("fdatasync", ".tar"), ("pwrite", ".jsonl"), ("fdatasync", ".jsonl")
    ]  # fmt: skip
    assert flocks == [len(calls)]


@pytest.mark.parametrize("truncates", [True, False], ids=["the append is cut off", "it cannot be"])
def test_full_disk_during_an_append_fails_one_request(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    before = publish(sink, tmp_path, "before", version=1)
    file = open_request(sink, tmp_path, "a", 300)

    def copy_a_part(source: int, size: int, target: int, offset: int) -> None:
        os.pwrite(target, os.pread(source, 9000, 0), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(f"{SHARD_FILE}.copy_into", copy_a_part)
        patch.setattr(
            f"{SHARD_FILE}.os",
            Traced(os, Calls(errno.EIO, "ftruncate", when=lambda: not truncates)),
        )
        with pytest.raises(SinkError, match="ENOSPC"):
            put(file, 300)
    if truncates:
        assert members(tmp_path) == [before.name]
    after = publish(sink, tmp_path, "after", version=2)
    ((_, entries),) = walked(tmp_path).items()
    assert [entry.name for entry in entries] == [before.name, after.name], "in the same shard"
    assert np.array_equal(rows_of(after), finite_rows(0, 3, version=2))


def test_line_whose_sync_failed_is_taken_back_from_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Shards(tmp_path)
    seen: list[bool] = []

    def refuse(call: str) -> None:
        if call == "fdatasync" and not seen and reader.find("a-0123abcd.safetensors") is not None:
            seen.append(True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ShardSink(tmp_path, FORMAT, FileOptions(durability="fdatasync"), shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "0")
        with monkeypatch.context() as patch:
            patch.setattr(f"{SHARD_FILE}.os", Traced(os, refuse))
            with pytest.raises(SinkError, match="EIO"):
                publish(sink, tmp_path, "a")
        publish(sink, tmp_path, "b")
        assert seen
        assert sorted(name[0] for name in reader.members()) == ["0", "b"]
    assert sorted(name[0] for name in members(tmp_path)) == ["0", "b"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_rows_are_copied_without_copy_file_range(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(storage, "_BLOCK", 1000)
    path = publish(sink, tmp_path, tokens=100)
    assert np.array_equal(rows_of(path), finite_rows(0, 100))
    assert members(tmp_path) == [path.name]


def test_shard_is_sealed_after_the_hidden_directory_was_removed(
    sink: ShardSink, tmp_path: Path
) -> None:
    before = publish(sink, tmp_path, "before")
    shutil.rmtree(next(tmp_path.glob(".hsx-*")))
    after = publish(sink, tmp_path, "after")
    assert [said["members"] for said in manifests(tmp_path)] == [1]
    sink.close()
    assert [said["members"] for said in manifests(tmp_path)] == [1, 1]
    assert sorted(members(tmp_path)) == [after.name, before.name]
    assert not list(tmp_path.glob(".hsx-*"))


def _moved(path: Path) -> None:
    path.parent.joinpath("elsewhere").mkdir(exist_ok=True)
    path.rename(path.parent / "elsewhere" / path.name)


def _replaced(path: Path) -> None:
    """Replaces a file like `sed -i`. A hard link, such as a backup, keeps the former file."""
    path.with_suffix(".copy").write_bytes(path.read_bytes())
    os.link(path, path.with_suffix(".link"))
    path.with_suffix(".copy").rename(path)
    path.with_suffix(".link").rename(path.with_suffix(f".link{path.stat().st_ino}"))


def _cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("suffix", "how"),
    [*itertools.product(("tar", "jsonl"), (Path.unlink, _moved, _replaced)), ("jsonl", _cut_off)],
)
def test_requests_fail_when_their_shard_was_removed(
    sink: ShardSink,
    tmp_path: Path,
    suffix: str,
    how: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def remove() -> None:
        for path in tmp_path.glob(f"*.{suffix}"):
            if not path.with_suffix(".json").exists():
                how(path)

    for name in "ab":  # before the append, in a shard, and in an index line
        publish(sink, tmp_path, f"before-{name}")
        chosen = (
            sink.open(name, tmp_path / f"{name}.safetensors", 1)
            if name == "b"
            else open_request(sink, tmp_path, name)
        )
        remove()
        put(chosen, 1)
        assert np.array_equal(rows_of(chosen.path), finite_rows(0, 1))
    real = storage.copy_into
    monkeypatch.setattr(f"{SHARD_FILE}.copy_into", lambda *args: (real(*args), remove()))
    with pytest.raises(SinkError, match=r"the shard was removed \(ENOENT\)"):
        publish(sink, tmp_path, "c")
    assert "was removed or truncated" in caplog.text


def test_remains_of_failed_appends_are_in_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a")
        with monkeypatch.context() as patch:

            def refuse(*_: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(f"{SHARD_FILE}.os.ftruncate", refuse)
            with pytest.raises(SinkError):
                publish(sink, tmp_path, "b", 50)
        publish(sink, tmp_path, "c", 1)
    assert list(shard_problems(tmp_path)) == []
    assert [member.tokens for member in Shards(tmp_path).members().values()] == [3, 1]


def test_shard_is_sealed_before_its_index_exceeds_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SHARD_FILE}.SEAL_AT", 500)  # a line has some 200 bytes
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        for number in range(9):
            publish(sink, tmp_path, f"r{number}", 1)
    assert len(manifests(tmp_path)) >= 3
    assert all(path.stat().st_size <= 1000 for path in tmp_path.glob("*.jsonl"))
    assert len(Shards(tmp_path).members()) == 9
