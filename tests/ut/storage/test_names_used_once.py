"""A name is used once: no request replaces, hides or returns the rows of another request."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from sink_harness import FORMAT, finite_rows, listing, put, reason_of, rows_of, token_ids

from vllm_ascend_hsx.cli.verify import main as verify
from vllm_ascend_hsx.protocol import files
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import load, remove
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import member_names
from vllm_ascend_hsx.sinks.base import NAME_USED, REFUSED, SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.member_names import MemberNames
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

Sink: TypeAlias = "FileSink | ShardSink"
CHOSEN = 'folder/grün "1".safetensors'
REQUEST = "cmpl-1-0-0123abcd"


def file_sink(directory: Path, **options: bool) -> FileSink:
    return FileSink(directory, FORMAT, **options)


def shard_sink(directory: Path, **options: bool) -> ShardSink:
    return ShardSink(directory, FORMAT, shard_bytes=1 << 20, **options)


def small_shard_sink(directory: Path, **options: bool) -> ShardSink:
    """A sink that seals a shard after each request."""
    return ShardSink(directory, FORMAT, shard_bytes=1, **options)


@pytest.fixture(autouse=True)
def list_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_names, "_SLOW_S", 60.0)  # on any machine


SINKS: dict[str, Callable[..., Sink]] = {
    "files": file_sink,
    "shards": shard_sink,
    "small shards": small_shard_sink,
}
EVERY_SINK = pytest.mark.parametrize("make", SINKS.values(), ids=SINKS)
EVERY_LATER_SINK = pytest.mark.parametrize(
    "make_later", SINKS.values(), ids=[f"then {name}" for name in SINKS]
)


def begin(
    sink: Sink, directory: Path, tokens: int = 2, name: str = CHOSEN, request_id: str = REQUEST
) -> RequestFile:
    file = sink.open(request_id, directory / name, tokens)
    file.write(0, finite_rows(0, tokens))
    return file


def tokens_at(path: Path) -> int:
    return len(load(path, 0, verify=True).token_ids)


def without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object, **where: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuse)


LINKS = pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])


# A name that has rows


@EVERY_SINK
@EVERY_LATER_SINK
@pytest.mark.parametrize("at_once", [True, False], ids=["two servers", "one after the other"])
def test_name_with_rows_is_refused_at_open_and_free_after_remove(
    tmp_path: Path, make: Callable[..., Sink], make_later: Callable[..., Sink], at_once: bool
) -> None:
    later = make_later(tmp_path) if at_once else None
    with make(tmp_path) as sink:
        put(sink.open(REQUEST, tmp_path / CHOSEN), 5)
        if later is not None:
            before = listing(tmp_path)
            with pytest.raises(SinkError, match=NAME_USED):
                later.open("other", tmp_path / CHOSEN)
            assert listing(tmp_path) == before, "no lock and no reason"
    with later or make_later(tmp_path) as later:
        with pytest.raises(SinkError, match=NAME_USED) as refused:
            later.open("other", tmp_path / CHOSEN)
        assert refused.value.kind == REFUSED
        assert tokens_at(tmp_path / CHOSEN) == 5
        remove(tmp_path / CHOSEN)
        put(later.open("other", tmp_path / CHOSEN), 3)
        assert tokens_at(tmp_path / CHOSEN) == 3
    assert verify([str(tmp_path)]) == 0


@EVERY_SINK
def test_name_with_rows_is_refused_although_its_lock_was_removed(
    tmp_path: Path, make: Callable[..., Sink]
) -> None:
    with make(tmp_path) as sink:
        remove(put(sink.open(REQUEST, tmp_path / CHOSEN), 2), keep_data=True)
        with pytest.raises(SinkError, match=NAME_USED):
            sink.open("other", tmp_path / CHOSEN)
        assert not Path(f"{tmp_path / CHOSEN}{LOCK_SUFFIX}").exists()


@EVERY_SINK
def test_name_that_another_server_publishes_while_its_lock_is_awaited_is_refused(
    tmp_path: Path, make: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as sink, make(tmp_path) as other:
        hold, session = other._session.hold_lock, other._session

        def publish_and_hold(*place: object) -> object:
            put(sink.open(REQUEST, tmp_path / CHOSEN), 5)
            return hold(*place)  # type: ignore[arg-type]

        monkeypatch.setattr(session, "hold_lock", publish_and_hold)
        with pytest.raises(SinkError, match=NAME_USED):
            other.open("other", tmp_path / CHOSEN)
        assert tokens_at(tmp_path / CHOSEN) == 5
        remove(tmp_path / CHOSEN)
        monkeypatch.undo()
        put(other.open("other", tmp_path / CHOSEN), 3)


@LINKS
@pytest.mark.parametrize("durability", ["none", "fdatasync"])
def test_publishing_never_replaces_a_file_that_appeared_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, durability: str
) -> None:
    if not links:
        without_hard_links(monkeypatch)
    with FileSink(tmp_path, FORMAT, FileOptions(durability=durability)) as sink:  # type: ignore[arg-type]
        file = begin(sink, tmp_path)
        (tmp_path / CHOSEN).write_bytes(b"copied here by somebody")
        with pytest.raises(SinkError, match=NAME_USED) as refused:
            file.commit(token_ids(2), 2)
        assert refused.value.kind == REFUSED
        assert (tmp_path / CHOSEN).read_bytes() == b"copied here by somebody"
        assert not Path(f"{tmp_path / CHOSEN}.error").exists(), "it would hide the rows"


@LINKS
def test_file_is_published_with_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        without_hard_links(monkeypatch)
    with file_sink(tmp_path) as sink:
        put(sink.open(REQUEST, tmp_path / CHOSEN), 2)
        assert tokens_at(tmp_path / CHOSEN) == 2
        assert (tmp_path / CHOSEN).stat().st_nlink == 1
        with pytest.raises(SinkError, match=NAME_USED):
            sink.open("other", tmp_path / CHOSEN)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("number", files._NO_LINKS)
def test_link_reports_a_filesystem_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*names: object, **where: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    assert files.link(-1, "a", -1, "b") is False


def test_file_whose_hidden_name_cannot_be_removed_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refuse(name: str, **where: int) -> None:
        if name.startswith("rows") or ".safetensors." in name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(name, **where)

    with file_sink(tmp_path) as sink:
        file = begin(sink, tmp_path)
        with monkeypatch.context() as failing:
            failing.setattr(os, "unlink", refuse)
            file.commit(token_ids(2), 2)
        assert tokens_at(tmp_path / CHOSEN) == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("planted", ["link", "directory"])
def test_planted_name_is_refused_and_stays(tmp_path: Path, planted: str) -> None:
    path = tmp_path / "planted.safetensors"
    path.symlink_to("elsewhere") if planted == "link" else path.mkdir()
    with file_sink(tmp_path) as sink:
        with pytest.raises(SinkError, match=NAME_USED):
            sink.open(REQUEST, path)
        assert os.path.lexists(path)
        assert sorted(os.listdir(tmp_path))[1:] == [path.name]


# A name that has a reason


@EVERY_SINK
@EVERY_LATER_SINK
def test_stale_reason_is_replaced(
    tmp_path: Path, make: Callable[..., Sink], make_later: Callable[..., Sink]
) -> None:
    with make(tmp_path) as sink:
        begin(sink, tmp_path).fail("no luck")
    assert reason_of(tmp_path / CHOSEN) == "no luck"
    with make_later(tmp_path) as later:
        begin(later, tmp_path).fail("no luck again")
        assert reason_of(tmp_path / CHOSEN) == "no luck again"
        file = begin(later, tmp_path)
        assert not Path(f"{tmp_path / CHOSEN}.error").exists(), "from open on"
        file.commit(token_ids(2), 2)
    assert tokens_at(tmp_path / CHOSEN) == 2


def test_reason_is_not_left_beside_rows_that_appeared_meanwhile(tmp_path: Path) -> None:
    with file_sink(tmp_path) as sink:
        file = begin(sink, tmp_path)
        (tmp_path / CHOSEN).write_bytes(b"copied here by somebody")
        file.fail("no luck")
    assert not Path(f"{tmp_path / CHOSEN}.error").exists()


def test_name_that_cannot_be_checked_gets_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(names: MemberNames, name: str) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with shard_sink(tmp_path) as sink:
        put(sink.open(REQUEST, tmp_path / CHOSEN), 2)
        with monkeypatch.context() as failing:
            failing.setattr(MemberNames, "has", fail)
            with pytest.raises(SinkError, match="EIO"):
                sink.open("other", tmp_path / CHOSEN)
        assert tokens_at(tmp_path / CHOSEN) == 2, "a reason would hide the rows"
        assert os.listdir(tmp_path / "folder") == []


# Names that the server makes


@EVERY_SINK
def test_unique_names_are_not_checked(
    tmp_path: Path, make: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hsx-shards").touch()
    with make(tmp_path) as sink:
        monkeypatch.setattr(MemberNames, "look", lambda self: pytest.fail("an index was read"))
        put(sink.open(REQUEST, tmp_path / f"{REQUEST}.safetensors"), 2)
        with pytest.raises(pytest.fail.Exception):
            sink.open(REQUEST, tmp_path / "chosen.safetensors")


@EVERY_SINK
def test_id_that_only_looks_random_may_have_rows(tmp_path: Path, make: Callable[..., Sink]) -> None:
    """The suffix is a date and vLLM appends no digits: the client may send the id again."""
    request_id = "cmpl-run-20240101"
    path = tmp_path / f"{request_id}.safetensors"
    with shard_sink(tmp_path, random_ids=False) as earlier:
        put(earlier.open(request_id, path), 5)
    with make(tmp_path, random_ids=False) as sink, pytest.raises(SinkError, match=NAME_USED):
        sink.open(request_id, path)
    assert tokens_at(path) == 5


# Members of shards


def test_removal_hides_only_its_member_whatever_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(tmp_path)
    with small_shard_sink(tmp_path) as sink:
        for tokens, now in ((5, 3 * 10**18), (4, 2 * 10**18), (3, 10**18)):
            with monkeypatch.context() as clock:
                clock.setattr(time, "time_ns", lambda now=now: now)
                path = put(sink.open(REQUEST, tmp_path / CHOSEN), tokens)
            assert tokens_at(path) == tokens
            assert (
                shards.members()[CHOSEN].tokens
                == Shards(tmp_path).members()[CHOSEN].tokens
                == tokens
            )
            remove(path)
            assert (
                shards.find(CHOSEN) is None and shards.members() == Shards(tmp_path).members() == {}
            )
        put(sink.open(REQUEST, tmp_path / CHOSEN), 2)
    assert tokens_at(tmp_path / CHOSEN) == 2
    assert Shards(tmp_path).members()[CHOSEN].tokens == 2


def test_removal_names_shard_and_offset(tmp_path: Path) -> None:
    with shard_sink(tmp_path) as sink:
        put(sink.open(REQUEST, tmp_path / CHOSEN), 2)
    tar, member = Shards(tmp_path).find(CHOSEN) or pytest.fail("no member")
    remove(tmp_path / CHOSEN)
    assert json.loads((tmp_path / "hsx-removed.jsonl").read_text()) == {
        "name": CHOSEN, "stem": tar.stem, "offset": member.offset, "gone": True,
    }  # fmt: skip


@pytest.mark.parametrize("in_order", [True, False])
def test_newest_of_two_equal_members_is_read_and_both_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    with monkeypatch.context() as blind:
        blind.setattr(MemberNames, "has", lambda self, name: False)
        for tokens in (2, 3):
            now = 10**18 * (tokens if in_order else 5 - tokens)
            with shard_sink(tmp_path) as sink:
                blind.setattr(time, "time_ns", lambda now=now: now)
                put(sink.open(REQUEST, tmp_path / CHOSEN), tokens)
    assert tokens_at(tmp_path / CHOSEN) == (3 if in_order else 2)
    remove(tmp_path / CHOSEN)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / CHOSEN, 0)
    with shard_sink(tmp_path) as sink:
        put(sink.open(REQUEST, tmp_path / CHOSEN), 4)
    assert rows_of(tmp_path / CHOSEN).shape[0] == 4
