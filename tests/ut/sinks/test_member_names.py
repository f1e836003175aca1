"""Servers know which names have members, and read each line of an index once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.protocol import files
from vllm_ascend_hsx.protocol.names import INDEX, MANIFEST, REMOVED, shard_stem
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, encode
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import member_names
from vllm_ascend_hsx.sinks.member_names import MemberNames

STEMS = [shard_stem("01234567", number) for number in range(3)]
NAMES = ["a.safetensors", "folder/b.safetensors", 'grün "1"\\.safetensors']
MOVES = ["publish", "remove", "remove early", "look", "seal"]


def member(name: str, offset: int = 512) -> Member:
    return Member(name, offset, 9, 1, "r", "", 1)


def add(directory: Path, stem: str, *lines: Member | Tombstone) -> None:
    with (directory / (stem + INDEX)).open("ab") as index:
        index.write(b"".join(map(encode, lines)))


@pytest.fixture
def names(tmp_path: Path) -> Iterator[MemberNames]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield MemberNames(fd)
    os.close(fd)


@pytest.fixture(autouse=True)
def list_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_names, "_SLOW_S", 60.0)  # on any machine


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.sampled_from(NAMES), st.sampled_from(STEMS))
    )
)
def test_server_and_reader_agree_on_the_names_that_have_members(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, str, str]]
) -> None:
    directory = tmp_path_factory.mktemp("shards")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        known, present = MemberNames(fd), set()
        for move, name, stem in moves:
            if (
                move == "publish"
                and (stem, name) not in present
                and not (directory / (stem + MANIFEST)).exists()
            ):
                present.add((stem, name))
                add(directory, stem, member(name, 512 * STEMS.index(stem) + NAMES.index(name)))
            elif move == "remove":
                Shards(directory).remove(name)
            elif move == "remove early":  # the list is read after the indexes
                line = Tombstone(name, stem, 512 * STEMS.index(stem) + NAMES.index(name))
                (directory / REMOVED).open("ab").write(encode(line))
            elif move == "look":
                known.look()
            elif move == "seal" and (directory / (stem + INDEX)).exists():
                (directory / (stem + MANIFEST)).write_text("{}")
        readable = Shards(directory).members()
        assert [known.has(name) for name in NAMES] == [name in readable for name in NAMES]
        assert [MemberNames(fd).has(name) for name in NAMES] == [name in readable for name in NAMES]
    finally:
        os.close(fd)


def test_incomplete_line_does_not_count(tmp_path: Path, names: MemberNames) -> None:
    line = encode(member(NAMES[0]))
    (tmp_path / (STEMS[0] + INDEX)).write_bytes(line[:-1])
    assert not names.has(NAMES[0])
    (tmp_path / (STEMS[0] + INDEX)).write_bytes(line)
    assert names.has(NAMES[0])


def test_members_of_a_shard_that_was_removed_do_not_count(
    tmp_path: Path, names: MemberNames
) -> None:
    add(tmp_path, STEMS[0], member(NAMES[0]))
    assert names.has(NAMES[0])
    (tmp_path / (STEMS[0] + INDEX)).unlink()
    assert not names.has(NAMES[0])


def test_lines_and_sealed_indexes_are_read_once(
    tmp_path: Path, names: MemberNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, STEMS[0], *(member(f"{number}.safetensors", number) for number in range(1000)))
    add(tmp_path, STEMS[1], member(NAMES[0]))
    (tmp_path / (STEMS[0] + MANIFEST)).touch()
    assert names.has("7.safetensors")
    read, opened = [], []
    pread, open_regular = os.pread, files.open_regular
    monkeypatch.setattr(
        os, "pread", lambda fd, size, at: (read.append(size), pread(fd, size, at))[1]
    )

    def open_and_note(name: str, *flags: int, **where: int) -> int:
        opened.append(name)
        return open_regular(name, *flags, **where)

    monkeypatch.setattr(files, "open_regular", open_and_note)
    add(tmp_path, STEMS[1], member(NAMES[1], 1024))
    assert names.has(NAMES[1])
    assert sum(read) == len(encode(member(NAMES[1], 1024)))
    assert opened == [STEMS[1] + INDEX, REMOVED]


def test_index_that_cannot_be_opened_does_not_count(tmp_path: Path, names: MemberNames) -> None:
    os.mkfifo(tmp_path / (STEMS[0] + INDEX))
    (tmp_path / (STEMS[1] + INDEX)).symlink_to("elsewhere")
    add(tmp_path, STEMS[2], member(NAMES[0]))
    assert names.has(NAMES[0])
    assert not names.has(NAMES[1])


def test_index_above_the_size_limit_is_not_read(
    tmp_path: Path, names: MemberNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / (STEMS[0] + INDEX)).open("wb") as index:
        index.truncate(1 << 40)
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda fd, size, at: (read.append(size), pread(fd, size, at))[1]
    )
    assert not names.has(NAMES[0])
    assert sum(read) == 0


def test_slow_listing_is_reused_until_this_server_creates_a_shard(
    tmp_path: Path, names: MemberNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of 200,000 names takes half a second."""
    listed, now = [], [0.0]
    listdir = os.listdir

    def slow(where: int) -> list[str]:
        listed.append(where)
        now[0] += 0.5
        return listdir(where)

    monkeypatch.setattr(member_names, "_SLOW_S", 0.01)
    monkeypatch.setattr(os, "listdir", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    add(tmp_path, STEMS[0], member(NAMES[0]))
    assert names.has(NAMES[0])
    add(tmp_path, STEMS[0], member(NAMES[1]))
    add(tmp_path, STEMS[1], member(NAMES[2]))
    assert names.has(NAMES[1])
    assert not names.has(NAMES[2])
    assert len(listed) == 1
    names.list_again()
    assert names.has(NAMES[2])
    add(tmp_path, STEMS[2], member("other.safetensors"))
    now[0] += 20.0
    assert names.has("other.safetensors")
    assert len(listed) == 3


def test_shard_created_during_a_slow_listing_is_in_the_next_listing(
    tmp_path: Path, names: MemberNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer creates the shard while the opening thread lists the directory."""
    now = [0.0]
    listdir = os.listdir

    def slow(where: int) -> list[str]:
        listed = listdir(where)
        now[0] += 0.5
        if not (tmp_path / (STEMS[0] + INDEX)).exists():
            add(tmp_path, STEMS[0], member(NAMES[0]))
            names.list_again()
        return listed

    monkeypatch.setattr(member_names, "_SLOW_S", 0.01)
    monkeypatch.setattr(os, "listdir", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert not names.has(NAMES[0])
    assert names.has(NAMES[0])
