"""Shards that a reader sees only in part: of another user, of two directories, of any size."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_harness import index_of, member_name, unsealed_shard
from sink_harness import FORMAT, MIB, publish, put

from vllm_ascend_hsx import HiddenStatesDataset, find, load, open_dir
from vllm_ascend_hsx.protocol.shard_index import Tombstone, encode
from vllm_ascend_hsx.reader import shards as reader_shards
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


@pytest.fixture
def close_to_readers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Let this user not open a file. Permissions do not apply to root."""
    closed = set()
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if os.fspath(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    return lambda path: closed.add(str(path))


# Files of another user


@pytest.mark.parametrize("sealed", [False, True])
def test_unreadable_index_hides_only_its_own_rows(
    tmp_path: Path, close_to_readers: Callable[[Path], None], sealed: bool
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as theirs:
        publish(theirs, tmp_path, "theirs")
    index = index_of(tmp_path)
    if not sealed:
        index.with_suffix(".json").unlink()
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as ours, FileSink(tmp_path, FORMAT) as files:
        path = publish(ours, tmp_path, "ours")
        file = publish(files, tmp_path, "file")
    close_to_readers(index)
    shards = Shards(tmp_path)
    for _ in range(2):
        assert len(load(path, 0, verify=True).token_ids) == 3
        assert find(tmp_path, "ours") == path
        for name in ("theirs", "never"):  # either of the two is possible
            with pytest.raises(
                PermissionError,
                match=f"rows may be in this index: let this user read it.*{index.name}",
            ):
                load(tmp_path / f"{name}-0123abcd.safetensors", 0)
            with pytest.raises(PermissionError, match="rows may be in this index"):
                find(tmp_path, name)
            with pytest.raises(PermissionError, match="rows may be in this index"):
                shards.find(f"{name}-0123abcd.safetensors")
    for listed in (
        lambda: list(open_dir(tmp_path)),
        lambda: HiddenStatesDataset(tmp_path),
        shards.members,
    ):
        # Otherwise a user could train on a part of the data without noticing.
        with pytest.raises(PermissionError, match="rows may be in this index"):
            listed()
    problems: list[OSError] = []
    assert files_in(tmp_path, problems.append) == [file, path]
    assert {problem.filename for problem in problems} == {str(index)}
    for each in (path, file, path):  # `path` twice
        remove(each)
    with pytest.raises(FileNotFoundError):
        load(path, 0)
    with pytest.raises(PermissionError):
        remove(tmp_path / "never.safetensors")


def test_index_that_becomes_readable_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close_to_readers: Callable[[Path], None]
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "a")
    close_to_readers(index_of(tmp_path))
    with pytest.raises(PermissionError):
        load(path, 0)
    monkeypatch.undo()
    assert len(load(path, 0).token_ids) == 3


def test_unreadable_list_of_removals_is_an_error(
    tmp_path: Path, close_to_readers: Callable[[Path], None]
) -> None:
    """Otherwise removed rows would reappear."""
    unsealed_shard(tmp_path)
    remove(tmp_path / member_name(0))
    close_to_readers(tmp_path / "hsx-removed.jsonl")
    for number in range(2):
        with pytest.raises(PermissionError, match=r"hsx-removed\.jsonl"):
            load(tmp_path / member_name(number), 0)


# A directory and a subfolder


@pytest.mark.parametrize("order", ["top first", "top last"])
def test_newest_rows_of_nested_servers_are_read(tmp_path: Path, order: str) -> None:
    path = tmp_path / "sub" / "x.safetensors"
    with (
        ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as top,
        ShardSink(tmp_path / "sub", FORMAT, shard_bytes=MIB) as sub,
    ):
        for tokens, sink in enumerate([top, sub] if order == "top first" else [sub, top], 3):
            put(sink.open(f"r{tokens}", path, tokens), tokens)
            assert len(load(path, 0, verify=True).token_ids) == tokens
    for directory in (tmp_path, tmp_path / "sub"):
        assert [(each, len(states.token_ids)) for each, states in open_dir(directory)] == [
            (path, 4)
        ]
    remove(path)
    with pytest.raises(FileNotFoundError):
        load(path, 0)


def test_missing_mark_is_an_error_that_names_it(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "folder/a")
    (tmp_path / "hsx-shards").unlink()
    with pytest.raises(FileNotFoundError, match="or were shards copied without hsx-shards"):
        load(path, 0)
    with pytest.raises(ValueError, match="has no .*, and no shards with members.*hsx-shards"):
        HiddenStatesDataset(path.parent)
    (tmp_path / "hsx-shards").touch()
    load(path, 0)


# Any size


def test_list_of_removals_is_read_up_to_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unsealed_shard(tmp_path)
    remove(tmp_path / member_name(0))
    os.truncate(tmp_path / "hsx-removed.jsonl", 1 << 30)  # a hole costs no disk
    read: list[int] = []
    real = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, size, offset: (read.append(size), real(fd, size, offset))[1]
    )
    with caplog.at_level(logging.WARNING):
        assert list(Shards(tmp_path).members()) == [member_name(i) for i in range(1, 6)]
    assert sum(read) <= (513 << 20) + 16 * MIB
    assert "hsx-removed.jsonl has 1073741824 bytes, more than the limit of 536870912" in caplog.text
    assert [problem for _, problem in shard_problems(tmp_path)] == [
        "it cannot be read: its index has 1073741824 bytes, more than any server writes"
    ]


def test_removals_beyond_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsealed_shard(tmp_path)
    remove(tmp_path / member_name(0))
    removed = tmp_path / "hsx-removed.jsonl"
    monkeypatch.setattr(reader_shards, "REMOVED_MAX", removed.stat().st_size)
    with pytest.raises(
        OSError,
        match=r"the list of removed members has \d+ bytes, and the limit is .*write to a new directory",
    ) as caught:
        remove(tmp_path / member_name(1))
    assert caught.value.errno == errno.EFBIG
    with removed.open("ab") as file:
        tar, member = Shards(tmp_path).find(member_name(2)) or pytest.fail("it is there")
        file.write(encode(Tombstone(member_name(2), tar.stem, member.offset)))
    assert list(Shards(tmp_path).members()) == [member_name(i) for i in range(1, 6)]
