"""A name that is used again answers with its latest request's rows, whatever clocks say."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from depth import depth
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sink_harness import FORMAT, MIB, finite_rows, put, rows_of

from vllm_ascend_hsx.protocol.names import INDEX, MANIFEST, REMOVED, shard_stem
from vllm_ascend_hsx.protocol.shard_index import LATEST_NS, Member, Tombstone, decode, encode
from vllm_ascend_hsx.protocol.strict_json import LARGEST
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import shard_clock
from vllm_ascend_hsx.sinks.arrival import newest_member
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.shard import ShardSink
from vllm_ascend_hsx.sinks.shard_clock import ShardClock

HOUR = 3600 * 10**9
PLANTED = shard_stem("89abcdef", 0) + INDEX
NAMES = ("a", "b")

names = st.sampled_from(NAMES)
skews = st.sampled_from([-2 * HOUR, -1, 0, 1, HOUR, 1000 * HOUR])
moves = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([0, 1]), names),
        st.tuples(st.just("write"), st.sampled_from([0, 1]), names),
        st.tuples(st.just("set clock"), st.sampled_from([0, 1]), skews),
        st.tuples(st.just("restart"), st.sampled_from([0, 1]), st.none()),
        st.tuples(st.just("remove"), st.none(), names),
        st.tuples(st.just("plant"), names, skews),  # as a copy of an earlier shard would
        st.tuples(st.just("plant during the next write"), names, skews),
    ),
    max_size=14,
)


class Servers:
    """Two servers with clocks of their own in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._skews = [0, 0]
        self._written = 0
        self._meanwhile: tuple[str, int] | None = None
        self._sinks: list[ShardSink | None] = [None, None]

    def set_clock(self, server: int, skew: int) -> None:
        self._skews[server] = skew

    def write(self, server: int, name: str) -> int:
        """Let a server write a row under a name, and return what is in it."""
        self._written += 1
        # The directory is listed each time, however long that takes here.
        with patch.object(shard_clock, "time", self._clock(server)), patch.object(shard_clock, "_SLOW_S", 60.0):
            sink = self._sinks[server] = self._sinks[server] or ShardSink(self._directory, FORMAT, shard_bytes=MIB)
            file = sink.open(name, self._directory / f"{name}.safetensors", 1)
            assert Shards(self._directory).find(f"{name}.safetensors") is None, "from now on, until it is complete"
            if self._meanwhile is not None:
                self.plant(*self._meanwhile)
                self._meanwhile = None
            put(file, 1, self._written)
        return self._written

    def plant(self, name: str, skew: int) -> None:
        """Add the newest line of a name once more, at another time, or one that hides the name."""
        time_ns = time.time_ns() + skew
        found = Shards(self._directory).find(f"{name}.safetensors")
        line = Tombstone(f"{name}.safetensors", time_ns) if found is None else Member(**{**vars(found[1]), "time_ns": time_ns})
        with open(self._directory / PLANTED, "ab") as index:
            index.write(encode(line))

    def plant_meanwhile(self, name: str, skew: int) -> None:
        self._meanwhile = name, skew

    def restart(self, server: int, _: None = None) -> None:
        sink, self._sinks[server] = self._sinks[server], None
        if sink is not None:
            sink.close()

    def close(self) -> None:
        for server in (0, 1):
            self.restart(server)

    def _clock(self, server: int) -> object:
        class Clock:
            time_ns = staticmethod(lambda: time.time_ns() + self._skews[server])
            monotonic = staticmethod(time.monotonic)

        return Clock


@given(moves=moves)
@example([("set clock", 0, HOUR), ("write", 1, "b"), ("write", 0, "a"), ("write", 1, "a")])
@example([("write", 0, "a"), ("write", 1, "b"), ("plant", "a", HOUR), ("write", 1, "a"), ("write", 0, "a")])
@example([("write", 0, "a"), ("plant during the next write", "a", HOUR), ("write", 0, "a")])
@settings(max_examples=depth(100))
def test_a_line_of_a_name_is_later_than_all_that_are_there_whatever_the_clocks_of_two_servers(
    moves: list[tuple[str, int | str | None, int | str | None]],
) -> None:
    with TemporaryDirectory() as text:
        directory = Path(text)
        servers = Servers(directory)
        does: dict[str, Callable[..., object]] = {
            "set clock": servers.set_clock,
            "restart": servers.restart,
            "plant": servers.plant,
            "plant during the next write": servers.plant_meanwhile,
        }
        try:
            for what, first, second in moves:
                if what == "write":
                    version = servers.write(first, second)  # type: ignore[arg-type]
                    assert np.array_equal(rows_of(directory / f"{second}.safetensors"), finite_rows(0, 1, version))
                elif what == "remove":
                    Shards(directory).remove(f"{second}.safetensors")
                else:
                    does[what](first, second)
        finally:
            servers.close()


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def line_at(time_ns: int, name: str = "a.safetensors", request_id: str = "") -> bytes:
    return encode(Member(name, 512, 9, 1, request_id, "", time_ns))


def test_every_added_line_counts_and_of_older_indexes_the_last_one(tmp_path: Path, dir_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_clock, "_CHUNK", 512)
    now = time.time_ns()
    index = tmp_path / PLANTED
    index.write_bytes(line_at(now + HOUR))
    clock = ShardClock(dir_fd)
    assert clock.next_ns(may_have_others=True) == now + HOUR + 1
    long_one = line_at(now + 3 * HOUR, request_id="7" * 200)
    with open(index, "ab") as file:
        file.write(line_at(now + 2 * HOUR) + line_at(now) + long_one[:-9])
    assert clock.next_ns(may_have_others=False) == now + HOUR + 2
    assert clock.next_ns(may_have_others=True) == now + 2 * HOUR + 1, "it is not the last line"
    monkeypatch.undo()
    with open(index, "ab") as file:
        file.write(long_one[-9:])
    assert clock.next_ns(may_have_others=True) == now + 3 * HOUR + 1, "its end was written later"
    index.write_bytes(line_at(now + 4 * HOUR))
    assert clock.next_ns(may_have_others=True) == now + 4 * HOUR + 1, "the index was replaced by a smaller one"
    later = tmp_path / (shard_stem("89abcdef", 1) + INDEX)
    later.write_bytes(line_at(now + 5 * HOUR) + line_at(now) * 1000)
    assert clock.next_ns(may_have_others=True) == now + 5 * HOUR + 1, "of a new index every line counts"


def test_no_line_is_from_a_time_after_which_none_fits_and_the_last_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for time_ns in (LATEST_NS, LARGEST, LARGEST + 1):
        assert decode(line_at(time_ns)) is None, "readers pass over what servers pass over"
    (tmp_path / PLANTED).write_bytes(line_at(LARGEST) + line_at(LATEST_NS))
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        put(sink.open("a", path, 2), 2, 1)
        assert np.array_equal(rows_of(path), finite_rows(0, 2, 1))
        with open(tmp_path / PLANTED, "ab") as index:
            index.write(line_at(LATEST_NS - 1))
        with pytest.raises(SinkError, match=rf"{PLANTED} has a line from the distant future.*another directory") as failed:
            sink.open("a", path, 2)
        assert errno.errorcode[errno.EOVERFLOW] in failed.value.reason
        unique = "b-0123abcd"
        put(sink.open(unique, tmp_path / f"{unique}.safetensors", 2), 2, 3)
    assert np.array_equal(rows_of(tmp_path / f"{unique}.safetensors"), finite_rows(0, 2, 3)), "no other line has its name"


@pytest.mark.parametrize("end", [b"", b'{"name":"torn', b"junk\n" * 20_000], ids=["whole", "torn", "junk"])
def test_of_removals_every_line_counts_at_the_start_whatever_comes_last(tmp_path: Path, end: bytes) -> None:
    """They have the times of members, in the order in which these were removed."""
    path, ahead = tmp_path / "a.safetensors", time.time_ns() + HOUR
    removed = encode(Tombstone(path.name, ahead)) + encode(Tombstone("b.safetensors", 5)) * 2000
    (tmp_path / "hsx-removed.jsonl").write_bytes(removed + end)
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        put(sink.open("a", path, 2), 2, 1)
    assert np.array_equal(rows_of(path), finite_rows(0, 2, 1))


def test_the_status_of_a_sealed_index_is_looked_up_once(tmp_path: Path, dir_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories of data sets have hundreds, and each request that chose its name would wait."""
    looked_up: list[str] = []
    stat, open_regular = os.stat, shard_clock.open_regular
    monkeypatch.setattr(os, "stat", lambda name, **how: (looked_up.append(str(name)), stat(name, **how))[1])
    monkeypatch.setattr(shard_clock, "open_regular", lambda name, *_, **how: (looked_up.append(name), open_regular(name, *_, **how))[1])
    live, sealed = PLANTED, [shard_stem("01234567", number) + INDEX for number in range(3)]
    for index in (live, *sealed):
        (tmp_path / index).write_bytes(line_at(5))
    for index in sealed:
        (tmp_path / index.replace(INDEX, MANIFEST)).touch()
    clock, later = ShardClock(dir_fd), time.time_ns() + HOUR
    looked_up.clear()
    clock.next_ns(may_have_others=True)
    newest_member(dir_fd, "a.safetensors", later)
    assert set(looked_up) == {live, REMOVED}
    with open(tmp_path / live, "ab") as index:
        index.write(line_at(later))
    (tmp_path / live.replace(INDEX, MANIFEST)).touch()
    assert clock.next_ns(may_have_others=True) == later + 1, "it was sealed since"
    looked_up.clear()
    clock.next_ns(may_have_others=True)
    assert set(looked_up) == {REMOVED}


def test_threads_that_list_a_directory_at_the_same_time_have_positions_of_their_own(
    tmp_path: Path, dir_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three threads with one position, each missed names in a twentieth of its listings."""
    listdir, positions = os.listdir, []

    def meanwhile(fd: int) -> list[str]:
        os.lseek(dir_fd, 1, os.SEEK_SET)
        positions.append(os.lseek(fd, 0, os.SEEK_CUR))
        return listdir(fd)

    monkeypatch.setattr(os, "listdir", meanwhile)
    ShardClock(dir_fd)
    assert positions == [0]


def test_a_line_counts_however_its_json_is_written(tmp_path: Path, dir_fd: int) -> None:
    clock, later = ShardClock(dir_fd), time.time_ns() + HOUR
    (tmp_path / PLANTED).write_bytes(b'{"gone":true,"time\\u005fns" : \t%d ,"name":"a.safetensors"}\n' % later)
    assert Shards(tmp_path).newest("a.safetensors") == (tmp_path / PLANTED.replace(INDEX, ".tar"), Tombstone("a.safetensors", later))
    assert clock.next_ns(may_have_others=True) == later + 1


def test_a_line_full_of_late_numbers_is_decoded_once(tmp_path: Path, dir_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ShardClock(dir_fd)
    decoded: list[int] = []
    monkeypatch.setattr(shard_clock, "decode", lambda line: decoded.append(len(line)))
    junk = b'"name"' + b":".join([b"%d" % (LATEST_NS - 1)] * 1000)
    (tmp_path / PLANTED).write_bytes(junk + b"\n" + junk + b"\n")
    clock.next_ns(True)
    assert decoded == [len(junk)] * 2
