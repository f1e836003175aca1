"""Indexes that no server wrote cost requests and readers little, however many there are."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sink_harness import FORMAT, MIB, put

from vllm_ascend_hsx.protocol.names import INDEX, shard_stem
from vllm_ascend_hsx.protocol.shard_index import Member, encode
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.shard import ShardSink

COUNT = 60
SIZE = 200 * MIB
NAME = "a.safetensors"
# Content is repeated after a hole, or, if it is to be long, from the beginning on.
CONTENTS = {
    "a hole": lambda now: b"",
    "a hole and an empty line": lambda now: b"\n",
    "lines of the future": lambda now: encode(Member("b.safetensors", 512, 9, 1, "", "", now + 10**12)) * 20_000,
    "junk": lambda now: (b'{"name":' + bytes(60) + b"\n") * 30_000,
}


def plant(directory: Path, content: bytes) -> list[Path]:
    """Make indexes with changes to come: their owner can choose the time."""
    planted = [directory / (shard_stem("89abcdef", number) + INDEX) for number in range(COUNT)]
    for path in planted:
        with path.open("wb") as file:
            file.truncate(SIZE)
            file.seek(0, os.SEEK_END)
            file.write(content)
        os.utime(path, (time.time() + 10**6,) * 2)
    return planted


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return the bytes that were read since the last call."""
    sizes: list[int] = []
    pread = os.pread

    def count(fd: int, size: int, offset: int) -> bytes:
        content = pread(fd, size, offset)
        sizes.append(len(content))
        return content

    def taken() -> int:
        total = sum(sizes)
        sizes.clear()
        return total

    monkeypatch.setattr(os, "pread", count)
    return taken


def named(caplog: pytest.LogCaptureFixture, planted: list[Path], logger: str) -> list[int]:
    """Return how often each index was named in a log."""
    lines = [record.getMessage() for record in caplog.records if record.name == f"vllm_ascend_hsx.{logger}"]
    return [sum(path.name in line for line in lines) for path in planted]


def test_an_index_with_the_largest_number_costs_requests_no_look_for_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / (shard_stem("89abcdef", 10**9 - 1) + INDEX)).touch()
    stat, looks = os.stat, []
    monkeypatch.setattr(os, "stat", lambda name, **how: (looks.append(name), stat(name, **how))[1])
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        put(sink.open("r", tmp_path / NAME, 2, time.time_ns()), 2)
    assert len([name for name in looks if "89abcdef" in str(name)]) < 100


@pytest.mark.parametrize("label", CONTENTS)
def test_requests_read_little_of_all_indexes_together_and_what_is_unchanged_not_again(
    tmp_path: Path, label: str, bytes_read: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    planted = plant(tmp_path, CONTENTS[label](time.time_ns()))
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink, ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as another:
        for look in range(3):
            now = time.time_ns()
            put(sink.open("r", tmp_path / NAME, 2, now), 2)
            with pytest.raises(SinkError, match="a later request"):
                another.open("q", tmp_path / NAME, 2, now - 1)
            assert bytes_read() < (4 * (64 + 16) + COUNT if look == 0 else 2) * MIB
        with planted[-1].open("ab") as file:
            file.write(b"\n" + encode(Member(NAME, 512, 9, 1, "", "", later := time.time_ns() + 10**12)))
        put(sink.open("r", tmp_path / NAME, 3, time.time_ns()), 3)
        assert bytes_read() < 2 * MIB, "only what was added"
        found = Shards(tmp_path).find(NAME)
        assert found is None or found[1].time_ns > later, "and it counts"
    assert max(named(caplog, planted, "sinks.shard_clock")) == 1
    if label == "a hole":
        assert min(named(caplog, planted, "sinks.shard_clock")) == 1


@pytest.mark.parametrize("label", ["a hole", "a hole and an empty line", "junk"])
def test_readers_read_little_of_what_is_no_index_and_what_is_unchanged_not_again(
    tmp_path: Path, label: str, bytes_read: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    planted = plant(tmp_path, CONTENTS[label](time.time_ns()))
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        put(sink.open("r", tmp_path / NAME, 2), 2)
        (ours,) = set(tmp_path.glob(f"*{INDEX}")) - set(planted)
        with ours.open("ab") as index:
            index.write(b"torn\n" * 100)
        shards = Shards(tmp_path)
        bytes_read()
        for tokens in (2, 3, 4):
            put(sink.open("r", tmp_path / NAME, tokens), tokens)
            bytes_read()
            found = shards.find(NAME)
            assert found is not None
            assert found[1].tokens == tokens
            assert bytes_read() < (32 + 2 * COUNT + 1 if tokens == 2 else 1) * MIB
    warned = [record for record in caplog.records if "too much that is no line" in record.getMessage()]
    assert sorted(path.name for path in planted if any(path.name in each.getMessage() for each in warned)) == [p.name for p in planted]
    assert len(warned) == COUNT


def test_of_a_line_that_is_still_being_written_only_what_is_added_is_read_again(
    tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    line = encode(Member(NAME, 512, 9, 1, "r" * MIB, "", time.time_ns()))
    index = tmp_path / (shard_stem("89abcdef", 0) + INDEX)
    index.write_bytes(line[:-20])
    shards = Shards(tmp_path)
    for added, read in ((b"", MIB), (b"", 0), (line[-20:-9], 11), (line[-9:-1], 8), (line[-1:], MIB), (b"", 0)):
        with index.open("ab") as file:
            file.write(added)
        bytes_read()
        assert (shards.find(NAME) is not None) == index.read_bytes().endswith(b"\n")
        assert read <= bytes_read() < read + 9000


def test_an_index_whose_reading_failed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / (shard_stem("89abcdef", 0) + INDEX)
    index.write_bytes(encode(Member(NAME, 512, 9, 1, "", "", time.time_ns())))
    shards = Shards(tmp_path)

    def fail(*arguments: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output error"):
        broken.setattr(os, "pread", fail)
        shards.find(NAME)
    assert shards.find(NAME) is not None


def test_an_index_that_lost_a_part_is_read_to_its_end_if_no_other_is_damaged(tmp_path: Path) -> None:
    index = tmp_path / (shard_stem("89abcdef", 0) + INDEX)
    line = encode(Member(NAME, 512, 9, 1, "", "", time.time_ns()))
    index.write_bytes(bytes(8 * MIB) + b"\n" + line)
    assert Shards(tmp_path).find(NAME) is not None
