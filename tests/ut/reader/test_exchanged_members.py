"""Index lines and manifests that describe other rows, or none."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile import DEEP
from shard_harness import index_of, member_name, unsealed_shard
from sink_harness import (
    FORMAT,
    MIB,
    as_version_1,
    finite_rows,
    lines_of,
    publish,
    put,
    rows_of,
    token_ids,
)

from vllm_ascend_hsx import load, open_dir
from vllm_ascend_hsx.cli import verify
from vllm_ascend_hsx.protocol.shard_index import Member, encode
from vllm_ascend_hsx.protocol.tar import END
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.shard import ShardSink


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return unsealed_shard(tmp_path / "storage")


def exchanged(storage: Path, *keys: str) -> tuple[int, int]:
    """Exchange the values of some keys between two members of equal length."""
    with ShardSink(storage, FORMAT, shard_bytes=MIB) as sink:
        for i in (6, 7):
            publish(sink, storage, f"r{i}", 4, version=i)
    index = next(path for path in storage.glob("hsx-*-*.jsonl") if b"r7-" in path.read_bytes())
    one, two = (json.loads(text) for text in index.read_bytes().splitlines())
    for key in keys:
        one[key], two[key] = two[key], one[key]
    index.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in (one, two)))
    return 6, 7


KEYS = {
    "offset and size": ("offset", "size"),
    "all but name and time": ("offset", "size", "tokens", "request_id", "checksum"),
    "name": ("name",),
    "request id": ("request_id",),
    "checksum": ("checksum",),
}


@pytest.mark.parametrize("label", KEYS)
@pytest.mark.parametrize("options", [{}, {"verify": True}, {"mmap": True}], ids=str)
def test_rows_of_another_request_are_never_returned(
    storage: Path, label: str, options: dict[str, bool]
) -> None:
    for number in exchanged(storage, *KEYS[label]):
        with pytest.raises(HiddenStatesError, match="its index describes another request"):
            load(storage / member_name(number), 0, **options)
        assert "another request" in str(examine(storage / member_name(number)).problem)
    for number in range(6):
        assert np.array_equal(
            rows_of(storage / member_name(number)), finite_rows(0, 3 + number, number)
        )


@pytest.mark.parametrize(
    "change",
    [
        dict(offset=100),
        dict(offset=0),
        dict(tokens=4),
        dict(size=10**6),
        dict(offset=2**61),
        dict(size=0),
    ],
)
def test_line_without_a_member_is_one_error(storage: Path, change: dict[str, int]) -> None:
    index = index_of(storage)
    lines = [json.loads(text) for text in index.read_bytes().splitlines()]
    index.write_bytes(
        b"".join(json.dumps({**each, **change}).encode() + b"\n" for each in lines[:1])
    )
    for options in ({}, {"verify": True}, {"mmap": True}):
        with pytest.raises(HiddenStatesError):
            load(storage / member_name(0), 0, **options)


@pytest.mark.parametrize(
    ("request_id", "path"),
    [
        ("\ud800", "a.safetensors"),
        ('"雪\0', "b.safetensors"),
        ("x", f"{'d' * 200}/{'e' * 200}.safetensors"),
        ("y", "雪/雪.safetensors"),
    ],
    ids=ascii,
)
def test_members_of_any_request_and_name_match_their_lines(
    tmp_path: Path, request_id: str, path: str
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        put(sink.open(request_id, tmp_path / path, 3), 3)
    assert len(load(tmp_path / path, 0, verify=True).token_ids) == 3
    assert list(shard_problems(tmp_path)) == []


def test_members_of_version_1_are_read_and_verified(storage: Path) -> None:
    index, tar = index_of(storage), next(storage.glob("*.tar"))
    lines, content = lines_of(storage, index.stem), bytearray(tar.read_bytes())
    changed = []
    for each in lines:
        assert isinstance(each, Member)
        old = as_version_1(bytes(content[each.offset : each.offset + each.size]))
        content[each.offset : each.offset + each.size] = old
        stated = json.loads(old[8 : 8 + int.from_bytes(old[:8], "little")])["__metadata__"][
            "checksum"
        ]
        changed.append(encode(replace(each, checksum=stated)))
    tar.write_bytes(content[: -len(END)])
    index.write_bytes(b"".join(changed))
    for i in range(6):
        assert np.array_equal(rows_of(storage / member_name(i)), finite_rows(0, 3 + i, i))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"members":1e400}',
        b"\xff",
        b'"members"',
        b'{"members":' + DEEP.encode() + b"}",
    ],
    ids=range(5),
)
def test_invalid_manifest_is_one_problem(tmp_path: Path, text: bytes) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a")
    next(tmp_path.glob("hsx-*.json")).write_bytes(text)
    ((_, problem),) = shard_problems(tmp_path)
    assert "its manifest is invalid" in problem
    assert len(list(open_dir(tmp_path))) == 1


def test_index_with_a_future_mtime_hides_no_later_members(
    tmp_path: Path,
) -> None:
    index = tmp_path / "hsx-deadbeef-000000.jsonl"
    index.touch()
    os.utime(index, (7.3e9, 7.3e9))  # 2201: no line can have this time
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "a", 3)
    assert np.array_equal(load(path, 0).token_ids.numpy(), token_ids(3))


@pytest.mark.parametrize(
    "target", ["hsx-deadbeef-000000.jsonl", "nowhere", "hsx-shards/x", "x" * 256]
)
def test_broken_link_in_place_of_an_index_is_reported_and_skipped(
    storage: Path, target: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (storage / "hsx-deadbeef-000000.jsonl").symlink_to(target)
    shards = Shards(storage)
    assert len(shards.members()) == len(shards.members()) == 6
    assert caplog.text.count("broken symbolic link") == 1
    assert len(list(open_dir(storage))) == 6
    assert verify.main([str(storage), "--json", "--jobs", "1"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["good"] == 6 and "broken symbolic link" in said["bad"][0]["problem"]


def test_linked_shards_are_read_and_link_targets_are_not_quoted(
    storage: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Caches of downloads consist of links to files with other names."""
    links, secret = tmp_path / "links", tmp_path / "secret"
    links.mkdir()
    for path in storage.glob("hsx-*"):
        (links / path.name).symlink_to(path)
    secret.write_text("the password\n")
    (links / "hsx-deadbeef-000000.jsonl").symlink_to(secret)
    assert len(list(open_dir(links))) == 6
    assert "hsx-deadbeef-000000.jsonl: 1 lines from byte 0 on are invalid" in caplog.text
    assert "password" not in caplog.text


@pytest.mark.parametrize("mark", [None, "nowhere"])
def test_listed_members_are_found_without_the_mark(storage: Path, mark: str | None) -> None:
    (storage / "hsx-shards").unlink()
    if mark is not None:
        (storage / "hsx-shards").symlink_to(mark)
    assert len(list(open_dir(storage))) == 6


@pytest.mark.parametrize("late", ["the rest of the index", "the target of a link"])
def test_manifest_copied_before_its_index_hides_no_members(tmp_path: Path, late: str) -> None:
    """Copies a directory in any order, while a reader lists it."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    with ShardSink(source, FORMAT, shard_bytes=MIB) as sink:
        names = [publish(sink, source, name).name for name in ("a", "b")]
    (index,) = source.glob("*.jsonl")
    content = index.read_bytes()
    if late == "the target of a link":
        (copy / index.name).symlink_to(tmp_path / "away")
    else:
        (copy / index.name).write_bytes(content[: content.index(b"\n") + 9])
    shutil.copy(index.with_suffix(".json"), copy)
    shards = Shards(copy)
    os.utime(copy, (1, 1))  # later changes do not change the directory's mtime
    seen = list(shards.members())
    assert seen == ([] if late == "the target of a link" else names[:1])
    with open(
        tmp_path / "away" if late == "the target of a link" else copy / index.name, "wb"
    ) as file:
        file.write(content)
    os.utime(copy, (1, 1))
    assert list(shards.members()) == names
