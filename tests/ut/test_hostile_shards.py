"""Readers meet shards whose indexes somebody has changed: a line is of one member of this directory, or it is nothing."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import make_outside, snapshot
from sink_harness import FORMAT, Entry, as_version_1, dead_workspace, lines_of, token_ids, walked
from test_shards import make_rows, publish

from vllm_ascend_hsx import HiddenStatesDataset, find, load, open_dir
from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.generate.ledger import files_of_rows
from vllm_ascend_hsx.protocol.shard_index import Member, encode
from vllm_ascend_hsx.protocol.tar import BLOCK, END
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

MIB = 1 << 20
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Six members of a shard that is still written, of unlike lengths."""
    where = tmp_path / "storage"
    with ShardSink(where, FORMAT, shard_bytes=MIB) as sink:
        for i in range(6):
            publish(sink, where, f"r{i}", 3 + i, version=i)
    next(where.glob("hsx-*.json")).unlink()
    return where


def index_of(storage: Path) -> Path:
    return next(storage.glob("hsx-*-*.jsonl"))


def line(name: str, **changes: Any) -> bytes:
    values = {"name": name, "offset": 4096, "size": 4096, "tokens": 1, "request_id": "", "checksum": "", "time_ns": 2**61, **changes}
    return json.dumps(values).encode() + b"\n"


def name(number: int) -> str:
    return f"r{number}-0123abcd.safetensors"


# Names that lead somewhere else


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


def test_no_line_leads_out_of_the_directory(storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        file.write(b"".join(line(each, gone=True, time_ns=1) for each in escapes(outside)))
    before = snapshot(outside)
    members = [storage / name(i) for i in range(6)]
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


def test_a_server_that_seals_such_a_shard_touches_nothing_outside(storage: Path, tmp_path: Path) -> None:
    outside = make_outside(tmp_path / "outside")
    before = snapshot(outside)
    with open(index_of(storage), "ab") as file:
        file.write(b"".join(line(each) for each in escapes(outside)))
    FileSink(storage, FORMAT).close()
    assert snapshot(outside) == before
    assert len(list(open_dir(storage, on_bad=lambda error: None))) == 6


# Lines that make no sense


BAD_LINES = {
    "an offset of 1e400": b'{"name":"x.safetensors","offset":1e400,"size":1,"tokens":1,"time_ns":1}',
    "an offset of many digits": b'{"name":"x.safetensors","offset":%s,"size":1,"tokens":1,"time_ns":1}' % (b"9" * 4000),
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
def test_a_bad_line_costs_itself_alone_and_is_reported_once(
    storage: Path, label: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_ascend_hsx.reader.shards._BLOCK", 2000 if "longer" in label else 16 << 20)
    index = index_of(storage) if where == "index" else storage / "hsx-removed.jsonl"
    good = index.read_bytes().splitlines(keepends=True) if index.exists() else []
    index.write_bytes(b"".join([*good[:2], BAD_LINES[label] + b"\n", *good[2:]]))
    shards = Shards(storage)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # a second look misses nothing that the first one has seen
            assert list(shards.members()) == [name(i) for i in range(6)]
        with open(index, "ab") as file:  # nor is what follows missed
            file.write(line(name(0), gone=True) if where == "removed" else b"")
        assert len(shards.members()) == (5 if where == "removed" else 6)
        remove(storage / name(1))
        assert name(1) not in shards.members()
        assert name(1) not in Shards(storage).members()
    ours = [record for record in caplog.records if record.name == "vllm_ascend_hsx.reader.shards"]
    assert [index.name in record.getMessage() for record in ours[:1]] == [True]
    assert len(ours) <= 3, "once for each of the three objects that read it"
    problems = list(shard_problems(storage))
    assert [path.stem for path, _ in problems] == [index.stem]
    assert "lines of its index cannot be used, first line" in problems[0][1]


def test_of_thirty_members_between_bad_lines_none_is_missed_at_any_look(tmp_path: Path) -> None:
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


def test_a_removal_after_a_torn_line_is_not_lost(storage: Path) -> None:
    (storage / "hsx-removed.jsonl").write_bytes(b'{"name":"torn')
    remove(storage / name(3))
    assert name(3) not in Shards(storage).members()
    assert len(list(open_dir(storage))) == 5


def test_a_member_among_the_removals_hides_nothing(storage: Path) -> None:
    (storage / "hsx-removed.jsonl").write_bytes(line(name(3)))
    assert len(list(open_dir(storage))) == 6


# Tar files that are not what their indexes say


def flip_a_header(tar: Path, entry: Entry) -> None:
    change(tar, entry.offset - 300, lambda data: bytes([data[0] ^ 1]))


def flip_the_comment(tar: Path, entry: Entry) -> None:
    change(tar, entry.offset - 600, lambda data: bytes([data[0] ^ 1]))


def claim_another_size(tar: Path, entry: Entry) -> None:
    """Of the member, in a header that is valid for tar readers."""

    def claim(block: bytes) -> bytes:
        block = block[:124] + b"%011o\0" % (entry.size + 4096) + block[136:148] + b" " * 8 + block[156:]
        return block[:148] + b"%06o\0 " % sum(block) + block[156:]

    change(tar, entry.offset - BLOCK, claim, BLOCK)


def end_within_the_last_member(tar: Path, entry: Entry) -> None:
    os.truncate(tar, tar.stat().st_size - 700)


def flip_a_line(tar: Path, entry: Entry) -> None:
    index = tar.with_suffix(".jsonl")
    change(index, index.read_bytes().index(b'"offset":') - 1, lambda data: bytes([data[0] ^ 1]))


def lose_a_line(tar: Path, entry: Entry) -> None:
    index = tar.with_suffix(".jsonl")
    index.write_bytes(b"".join(index.read_bytes().splitlines(keepends=True)[2:]))


def name_what_is_far_away(tar: Path, entry: Entry) -> None:
    with open(tar.with_suffix(".jsonl"), "ab") as index:
        index.write(line("far.safetensors", offset=2**61, size=2**61))


def lose_the_index(tar: Path, entry: Entry) -> None:
    tar.with_suffix(".jsonl").unlink()


def change(path: Path, offset: int, how: Callable[[bytes], bytes], size: int = 1) -> None:
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), how(os.pread(file.fileno(), size, offset)), offset)


DAMAGE = (
    flip_a_header, flip_the_comment, claim_another_size, end_within_the_last_member, flip_a_line, lose_a_line, name_what_is_far_away,
    lose_the_index,
)  # fmt: skip
CHOSEN = {"once": [0, 1, 2, 3, 4, 5], "again": [0, 1, 0, 2, 3, 1]}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("label", CHOSEN)
def test_the_next_server_takes_nothing_away_from_a_shard_that_is_not_what_its_index_says(
    tmp_path: Path, label: str, damage: Callable[[Path, Entry], None], caplog: pytest.LogCaptureFixture
) -> None:
    tar = leave_dead(tmp_path, [f"hs_{i}" for i in CHOSEN[label]])
    damage(tar, walked(tmp_path)[tar.stem][2])
    before = snapshot(tmp_path)
    assert list(shard_problems(tmp_path))
    FileSink(tmp_path, FORMAT).close()
    assert {**snapshot(tmp_path), ".": before["."]} == before
    assert f"could not seal {tar.stem}" in caplog.text


def test_names_that_were_used_again_are_sealed(tmp_path: Path) -> None:
    tar = leave_dead(tmp_path, ["hs_0", "hs_1", "hs_0"])
    FileSink(tmp_path, FORMAT).close()
    assert json.loads(tar.with_suffix(".json").read_text())["members"] == 3
    assert list(shard_problems(tmp_path)) == []


@pytest.mark.parametrize("left", [1, 600, 5000, 70_000])
def test_what_follows_the_last_member_of_the_index_is_cut_off(tmp_path: Path, left: int) -> None:
    tar = leave_dead(tmp_path, ["hs_0", "hs_1"])
    whole = tar.read_bytes()
    tar.write_bytes(whole + (whole * 3)[:left])
    with open(tar.with_suffix(".jsonl"), "ab") as index:
        index.write(b"torn")
    FileSink(tmp_path, FORMAT).close()
    assert tar.read_bytes() == whole + END
    assert list(shard_problems(tmp_path)) == []


def leave_dead(storage: Path, ids: list[str]) -> Path:
    """The tar file of a shard of these requests, which chose their names, as a server leaves it that is killed."""
    with ShardSink(storage, FORMAT, shard_bytes=MIB) as sink:
        for number, chosen in enumerate(ids):
            file = sink.open(f"x{number}", storage / f"{chosen}.safetensors", 3)
            file.write(0, make_rows(0, 3, number))
            file.commit(token_ids(3), 3)
    tar = next(storage.glob("hsx-*.tar"))
    tar.with_suffix(".json").unlink()
    os.truncate(tar, tar.stat().st_size - len(END))
    dead_workspace(storage, tar.stem.split("-")[1])
    return tar


# Lines that lead to another request


def exchanged(storage: Path, *keys: str) -> tuple[int, int]:
    """Give each of two members of one length what the other has under some keys."""
    with ShardSink(storage, FORMAT, shard_bytes=MIB) as sink:
        for i in (6, 7):
            publish(sink, storage, f"r{i}", 4, version=i)
    index = next(path for path in storage.glob("hsx-*-*.jsonl") if b"r7-" in path.read_bytes())
    one, two = (json.loads(text) for text in index.read_bytes().splitlines() if b"gone" not in text)
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
def test_rows_of_another_request_are_never_returned(storage: Path, label: str, options: dict[str, bool]) -> None:
    for number in exchanged(storage, *KEYS[label]):
        with pytest.raises(HiddenStatesError, match="its index leads to another request"):
            load(storage / name(number), 0, **options)
        assert "another request" in str(examine(storage / name(number)).problem)
    for number in range(6):
        assert np.array_equal(load(storage / name(number), 0).hidden_states.view(torch.uint16).numpy(), make_rows(0, 3 + number, number))


@pytest.mark.parametrize("change", [dict(offset=100), dict(offset=0), dict(tokens=4), dict(size=10**6), dict(offset=2**61), dict(size=0)])
def test_a_line_that_leads_to_no_member_is_one_error(storage: Path, change: dict[str, int]) -> None:
    index = index_of(storage)
    lines = [json.loads(text) for text in index.read_bytes().splitlines()]
    index.write_bytes(b"".join(json.dumps({**each, **change}).encode() + b"\n" for each in lines[:1]))
    for options in ({}, {"verify": True}, {"mmap": True}):
        with pytest.raises(HiddenStatesError):
            load(storage / name(0), 0, **options)


@pytest.mark.parametrize(
    ("request_id", "path"),
    [("\ud800", "a.safetensors"), ('"雪\0', "b.safetensors"), ("x", f"{'d' * 200}/{'e' * 200}.safetensors"), ("y", "雪/雪.safetensors")],
    ids=ascii,
)
def test_members_of_any_request_and_any_name_are_their_lines(tmp_path: Path, request_id: str, path: str) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        file = sink.open(request_id, tmp_path / path, 3, may_grow=False)
        file.write(0, make_rows(0, 3))
        file.commit(token_ids(3), 2)
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
        stated = json.loads(old[8 : 8 + int.from_bytes(old[:8], "little")])["__metadata__"]["checksum"]
        changed.append(encode(replace(each, checksum=stated)))
    tar.write_bytes(content[: -len(END)])
    index.write_bytes(b"".join(changed))
    for i in range(6):
        assert np.array_equal(load(storage / name(i), 0, verify=True).hidden_states.view(torch.uint16).numpy(), make_rows(0, 3 + i, i))


Change = Callable[[Path], None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_text("[" * 100_000), "cannot be understood"),
        (lambda path: path.write_text('{"members":1e400}'), "cannot be understood"),
        (lambda path: path.write_bytes(b"\xff"), "cannot be understood"),
        (lambda path: path.write_text('"members"'), "cannot be understood"),
        (lambda path: path.write_text('{"members":' + DEEP + "}"), "cannot be understood"),
    ],
    ids=range(5),
)
def test_a_manifest_that_makes_no_sense_is_one_problem(tmp_path: Path, change: Change, words: str) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a")
    change(next(tmp_path.glob("hsx-*.json")))
    ((_, problem),) = shard_problems(tmp_path)
    assert words in problem
    assert len(list(open_dir(tmp_path))) == 1


def test_an_index_from_the_far_future_hides_nothing_that_is_written_after_it(tmp_path: Path) -> None:
    index = tmp_path / "hsx-deadbeef-000000.jsonl"
    index.touch()
    os.utime(index, (7.3e9, 7.3e9))  # 2201: no line can have this time
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "a", 3)
    assert np.array_equal(load(path, 0).token_ids.numpy(), token_ids(3))


@pytest.mark.parametrize("target", ["hsx-deadbeef-000000.jsonl", "nowhere", "hsx-shards/x", "x" * 256])
def test_an_index_that_is_a_link_to_nothing_is_told_and_stops_nobody(
    storage: Path, target: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (storage / "hsx-deadbeef-000000.jsonl").symlink_to(target)
    shards = Shards(storage)
    assert len(shards.members()) == len(shards.members()) == 6
    assert caplog.text.count("leads nowhere") == 1
    assert len(list(open_dir(storage))) == 6
    assert verify.main([str(storage), "--json", "--jobs", "1"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["good"] == 6 and "leads nowhere" in said["bad"][0]["problem"]


@pytest.mark.parametrize("mark", [None, "nowhere"])
def test_members_that_are_listed_are_found_whatever_has_become_of_the_mark(storage: Path, mark: str | None) -> None:
    (storage / "hsx-shards").unlink()
    if mark is not None:
        (storage / "hsx-shards").symlink_to(mark)
    assert len(list(open_dir(storage))) == 6
