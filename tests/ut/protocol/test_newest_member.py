"""The ends of a directory's indexes name the newest member of a name."""

from __future__ import annotations

import os
import tempfile
import time
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.protocol.names import INDEX, REMOVED, shard_stem, workspace_name
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, encode
from vllm_ascend_hsx.sinks import shard_clock
from vllm_ascend_hsx.sinks.arrival import newest_member
from vllm_ascend_hsx.sinks.shard_clock import ShardClock

SECOND = 10**9
STEM = shard_stem("01234567", 0)
NAMES = ["a.safetensors", "b.safetensors", "ab.safetensors"]


def newest(directory: Path, name: str, since_ns: int) -> Member | None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = newest_member(fd, name, since_ns)
    finally:
        os.close(fd)
    return None if found is None else found[1]


@st.composite
def lines(draw: st.DrawFn) -> list[Member | Tombstone]:
    made: list[Member | Tombstone] = []
    for time_ns in sorted(draw(st.lists(st.integers(100 * SECOND, 140 * SECOND), max_size=20, unique=True))):
        name = draw(st.sampled_from(NAMES))
        request_id = "r" * draw(st.integers(0, 300))
        made.append(draw(st.sampled_from([Tombstone(name, time_ns), Member(name, 512, 9, 1, request_id, "", time_ns)])))
    return made


@given(index=lines(), name=st.sampled_from(NAMES), since_s=st.integers(100, 140), torn=st.binary(max_size=90))
def test_the_newest_line_since_a_time_is_found_however_long_the_lines_are(
    index: list[Member | Tombstone], name: str, since_s: int, torn: bytes
) -> None:
    known = [line for line in index if line.name == name and line.time_ns >= (since_s - 10) * SECOND]
    expected = known[-1] if known and isinstance(known[-1], Member) else None
    with tempfile.TemporaryDirectory() as text, patch.object(shard_clock, "_CHUNK", 64):
        Path(text, STEM + INDEX).write_bytes(b"".join(map(encode, index)) + torn.replace(b"\n", b""))
        assert newest(Path(text), name, since_s * SECOND) == expected


def test_a_line_of_megabytes_is_read_in_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / (STEM + INDEX)).write_bytes(encode(Member(NAMES[0], 512, 9, 1, "", "", 9)) + bytes(8 << 20) + b"\n")
    pread, sizes = os.pread, []
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (sizes.append(size), pread(fd, size, at))[1])
    assert newest(tmp_path, NAMES[0], 5) is not None
    assert sum(sizes) <= 9 << 20
    assert len(sizes) < 12


@pytest.mark.parametrize("content", [b"", b"\n" * (1 << 16)], ids=["one line", "empty lines at its end"])
def test_of_an_index_that_no_server_has_written_little_is_read(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request that chose its name looks for earlier rows, and would wait."""
    for name in (STEM + INDEX, REMOVED):
        with open(tmp_path / name, "wb") as file:
            file.truncate(1 << 40)
            file.seek(0, os.SEEK_END)
            file.write(content)
    (tmp_path / (shard_stem("01234567", 1) + INDEX)).write_bytes(encode(Member(NAMES[0], 512, 9, 1, "", "", 9)))
    pread, sizes = os.pread, []
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (sizes.append(size), pread(fd, size, at))[1])
    assert newest(tmp_path, NAMES[0], 5) is not None
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    ShardClock(fd)
    os.close(fd)
    assert sum(sizes) <= 256 << 20


def test_a_directory_of_many_names_is_not_listed_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of 200,000 names takes half a second."""
    listed, now = [], [0.0]
    real = os.listdir

    def slow(where: int) -> list[str]:
        listed.append(where)
        now[0] += 0.5
        return real(where)

    def publish(token: str, number: int, offset: int) -> None:
        (tmp_path / (shard_stem(token, number) + INDEX)).write_bytes(encode(Member(NAMES[0], offset, 9, 1, "", "", 10 + offset)))

    monkeypatch.setattr(os, "listdir", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (tmp_path / workspace_name("89abcdef")).mkdir()  # of a server that has no shard yet
    numbers = {"01234567": count(), "89abcdef": count()}
    for offset, token in enumerate(["01234567", "01234567", "89abcdef"] * 6):
        publish(token, next(numbers[token]), offset)
        found = newest(tmp_path, NAMES[0], 5)
        assert found is not None
        assert found.offset == offset
    assert len(listed) == 1
    publish("ffffffff", 0, 50)  # a server that has started since
    now[0] += 10
    found = newest(tmp_path, NAMES[0], 5)
    assert found is not None
    assert (found.offset, len(listed)) == (50, 2)


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["used once", "used again"])
def test_what_is_made_during_a_listing_is_found_although_the_listing_misses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A listing has all names from before it, and any of those that are made meanwhile."""
    listdir, now = os.listdir, [0.0]

    def publish(number: int, offset: int) -> str:
        index = tmp_path / (shard_stem("01234567", number) + INDEX)
        index.write_bytes(encode(Member(NAMES[0], offset, 9, 1, "", "", 10 + offset)) if offset else b"")
        return index.name

    def slow(where: int) -> list[str]:
        now[0] += seconds
        return [name for name in listdir(where) if name not in missed]

    missed: set[str] = set()
    monkeypatch.setattr(os, "listdir", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    publish(0, 1)
    assert newest(tmp_path, NAMES[0], 5) is not None
    now[0] += 100.0
    missed.add(publish(1, 2))
    publish(2, 0)  # the server has sealed the one before
    for _ in range(2):
        found = newest(tmp_path, NAMES[0], 5)
        assert found is not None
        assert found.offset == 2
        missed.clear()  # by then it was there before the listing


def test_a_small_directory_is_always_listed(tmp_path: Path) -> None:
    for number, token in enumerate(("01234567", "89abcdef", "ffffffff")):
        (tmp_path / (shard_stem(token, 0) + INDEX)).write_bytes(encode(Member(NAMES[0], number, 9, 1, "", "", 10 + number)))
        found = newest(tmp_path, NAMES[0], 5)
        assert found is not None
        assert found.offset == number
