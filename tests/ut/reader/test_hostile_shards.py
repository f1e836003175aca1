"""Changed indexes of shards: each line is a member of this directory, or is skipped."""

from __future__ import annotations

import fcntl
import json
import logging
import random
import re
import time
from pathlib import Path

import pytest
from hostile import DEEP, make_outside, snapshot
from shard_harness import index_of, line, member_name, unsealed_shard
from sink_harness import FORMAT, MIB, publish

from vllm_ascend_hsx import HiddenStatesDataset, find, open_dir
from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.generate.ledger import files_of_rows
from vllm_ascend_hsx.reader import shards as reader_shards
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return unsealed_shard(tmp_path / "storage")


# Names that lead outside


def escapes(outside: Path) -> list[str]:
    return [
        "../outside/a.safetensors",
        "../outside/folder/a.safetensors",
        str(outside / "a.safetensors"),
        f"//{outside}/a.safetensors",
        "./../outside/a.safetensors",
        "x/../../outside/a.safetensors",
        "link/a.safetensors",
        "link/inner/../a.safetensors",
        "deep/link/a.safetensors",
        "..",
        ".",
        "",
        "/",
        "a\0b.safetensors",
        "\ud800.safetensors",
        ".hidden.safetensors",
        "a.safetensors/../../../outside/a.safetensors",
        "x" * 300 + ".safetensors",
        "/".join(["d"] * 20) + "/a.safetensors",
        "a\nb.safetensors",
        "no-suffix",
    ]


def test_index_lines_never_leave_the_directory(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = make_outside(tmp_path / "outside")
    with FileSink(tmp_path / "elsewhere", FORMAT) as sink:
        good = publish(sink, tmp_path / "elsewhere", "precious").read_bytes()
    for path in ("a.safetensors", "folder/a.safetensors"):
        (outside / path).write_bytes(good)
        for suffix in ("error", "lock"):
            (outside / f"{path}.{suffix}").unlink(missing_ok=True)
    (outside / "a.safetensors.lock").touch()
    (storage / "link").symlink_to(outside)
    (storage / "deep").mkdir()
    (storage / "deep" / "link").symlink_to(outside)
    with open(index_of(storage), "ab") as file:
        file.write(b"".join(line(each) for each in escapes(outside)))
    with open(storage / "hsx-removed.jsonl", "ab") as file:
        file.write(
            b"".join(line(each, gone=True, stem="hsx-00000001-000000") for each in escapes(outside))
        )
    before = snapshot(outside)
    members = [storage / member_name(i) for i in range(6)]
    assert [path for path, _ in open_dir(storage)] == members
    assert files_in(storage) == members
    assert HiddenStatesDataset(storage).paths == members
    assert list(files_of_rows(storage)) == []
    assert find(storage, "r1") == members[1]
    verify.main([str(storage), "--json", "--jobs", "1"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["good"] == 6
    inspect.main([str(storage)])
    for path, _ in list(open_dir(storage)):
        remove(path)
    assert list(open_dir(storage)) == []
    assert snapshot(outside) == before


def test_sealing_a_hostile_shard_touches_nothing_outside(storage: Path, tmp_path: Path) -> None:
    outside = make_outside(tmp_path / "outside")
    before = snapshot(outside)
    with open(index_of(storage), "ab") as file:
        file.write(b"".join(line(each) for each in escapes(outside)))
    FileSink(storage, FORMAT).close()
    assert snapshot(outside) == before
    assert len(list(open_dir(storage, on_bad=lambda error: None))) == 6


# Invalid lines


BAD_LINES = {
    "an offset of 1e400": b'{"name":"x.safetensors","offset":1e400,"size":1,"tokens":1,"time_ns":1}',
    "an offset of many digits": b'{"name":"x.safetensors","offset":%s,"size":1,"tokens":1,"time_ns":1}'
    % (b"9" * 4000),
    "an offset that no file has": line("x.safetensors", offset=2**63 - 1)[:-1],
    "a fraction": line("x.safetensors", offset=1.5)[:-1],
    "a number as text": line("x.safetensors", size="4096")[:-1],
    "true": line("x.safetensors", tokens=True)[:-1],
    "a time of NaN": b'{"name":"x.safetensors","offset":1,"size":1,"tokens":1,"time_ns":NaN}',
    "deep nesting": b'{"name":' + DEEP.encode() + b"}",
    "deep nesting without an end": b"[" * 100_000,
    "no text": b"\xff\xfe",
    "half a surrogate pair": line("\ud800.safetensors")[:-1],
    "NUL": line("a\0.safetensors")[:-1],
    "a carriage return": b'{"name":\r"x"}',
    "nothing": b"",
    "a name twice": b'{"name":"x.safetensors","name":"y.safetensors","offset":1,"size":1,"tokens":1,"time_ns":1}',
    "a member that is gone a little": line("x.safetensors", gone="yes")[:-1],
    "a list": b"[1]",
    "a line longer than what is read at once": b"x" * 5000,
}


@pytest.mark.parametrize("label", BAD_LINES)
@pytest.mark.parametrize("where", ["index", "removed"])
def test_bad_line_is_skipped_and_reported_once(
    storage: Path,
    label: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        "vllm_ascend_hsx.reader.shards._BLOCK", 2000 if "longer" in label else 16 << 20
    )
    index = index_of(storage) if where == "index" else storage / "hsx-removed.jsonl"
    good = index.read_bytes().splitlines(keepends=True) if index.exists() else []
    index.write_bytes(b"".join([*good[:2], BAD_LINES[label] + b"\n", *good[2:]]))
    shards = Shards(storage)
    tar, member = Shards(storage).find(member_name(0)) or pytest.fail("it is there")
    place = {"stem": tar.stem, "offset": member.offset}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # a second read finds the same members
            assert list(shards.members()) == [member_name(i) for i in range(6)]
        with open(index, "ab") as file:  # and later lines are found
            file.write(line(member_name(0), **place, gone=True) if where == "removed" else b"")
        assert len(shards.members()) == (5 if where == "removed" else 6)
        remove(storage / member_name(1))
        assert member_name(1) not in shards.members()
        assert member_name(1) not in Shards(storage).members()
    ours = [record for record in caplog.records if record.name == "vllm_ascend_hsx.reader.shards"]
    assert [index.name in record.getMessage() for record in ours[:1]] == [True]
    assert len(ours) <= 3, "once for each of the three objects that read it"
    problems = list(shard_problems(storage))
    assert [path.stem for path, _ in problems] == [index.stem]
    assert re.search("lines? .*of its index (is|are) invalid", problems[0][1])


def test_members_between_bad_lines_are_always_found(tmp_path: Path) -> None:
    luck = random.Random(5)
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        for i in range(30):
            publish(sink, tmp_path, f"m{i:02}")
    index = index_of(tmp_path)
    lines = index.read_bytes().splitlines(keepends=True)
    for bad in BAD_LINES.values():
        lines.insert(luck.randrange(len(lines)), bad + b"\n")
    index.unlink()
    next(tmp_path.glob("hsx-*.json")).unlink()
    index.touch()
    shards = Shards(tmp_path)
    expected = 0
    for each in lines:
        with open(index, "ab") as file:
            file.write(each)
        expected += b'"m' in each
        assert len(shards.members()) == expected
    assert expected == 30
    assert len(list(open_dir(tmp_path))) == 30


def test_removal_after_a_torn_line_is_kept(storage: Path) -> None:
    (storage / "hsx-removed.jsonl").write_bytes(b'{"name":"torn')
    remove(storage / member_name(3))
    assert member_name(3) not in Shards(storage).members()
    assert len(list(open_dir(storage))) == 5


def test_member_line_in_the_list_of_removals_hides_nothing(storage: Path) -> None:
    (storage / "hsx-removed.jsonl").write_bytes(line(member_name(3)))
    assert len(list(open_dir(storage))) == 6


def test_removal_waits_for_other_processes_with_a_timeout(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = storage / "hsx-removed.jsonl"
    with open(removed, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(reader_shards, "_LOCK_TIMEOUT_S", 0.02)
        with pytest.raises(
            TimeoutError,
            match="another process has held its lock for 0.02 seconds.*hsx-removed.jsonl",
        ):
            remove(storage / member_name(3))
        assert len(list(open_dir(storage))) == 6
        monkeypatch.setattr(reader_shards, "_LOCK_TIMEOUT_S", 60.0)
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(other, fcntl.LOCK_UN))
        remove(storage / member_name(3))
    assert len(list(open_dir(storage))) == 5
