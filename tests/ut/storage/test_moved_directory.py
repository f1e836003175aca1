"""A directory is moved or replaced: open requests fail, later requests use the new directory."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from sink_harness import FORMAT, is_held, listing, make_rows, open_fds, token_ids, wait_for_sleepers
from tracing import trace

from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import MOVED, RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

Sink: TypeAlias = "FileSink | ShardSink"
SINKS: dict[str, Callable[..., Sink]] = {
    "files": FileSink,
    "shards": lambda *args: ShardSink(*args, shard_bytes=1 << 20),
}
EVERY_SINK = pytest.mark.parametrize("make", SINKS.values(), ids=SINKS)
NAME = "a-0123abcd"


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another filesystem than the directories of pytest."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def begin(sink: Sink, directory: Path, name: str = NAME, tokens: int = 3) -> RequestFile:
    file = sink.open(name.rpartition("/")[2], directory / f"{name}.safetensors", tokens)
    file.write(0, make_rows(0, tokens))
    return file


def assert_found(path: Path, tokens: int = 3) -> None:
    assert np.array_equal(
        load(path, 0, verify=True).hidden_states.view(torch.uint16).numpy(), make_rows(0, tokens)
    )


def reason_at(path: Path) -> str:
    with pytest.raises(HiddenStatesError) as raised:
        load(path, 0)
    return raised.value.reason


class FailingFrom:
    """A checkpoint from which on all calls fail; `made` counts the calls."""

    def __init__(self, first: int) -> None:
        self.made = 0
        self._first = first

    def __call__(self, name: str) -> None:
        self.made += 1
        if self.made >= self._first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def rotate(directory: Path) -> Path:
    moved = directory.rename(directory.with_name("moved"))
    directory.mkdir()
    return moved


@EVERY_SINK
def test_missing_directory_fails_requests_and_leaves_the_renamed_directory_alone(
    tmp_path: Path, make: Callable[..., Sink]
) -> None:
    directory = tmp_path / "out"
    with make(directory, FORMAT) as sink:
        under_way = begin(sink, directory)
        moved = directory.rename(tmp_path / "moved")
        before = listing(moved)
        with pytest.raises(SinkError, match=f"{directory} no longer exists.*ENOENT"):
            sink.open("b", directory / "b.safetensors")
        assert listing(moved) == before
        with pytest.raises(SinkError, match=MOVED):
            under_way.commit(token_ids(3), 3)
        assert not directory.exists(), "it may be where something was mounted"
        assert reason_at(moved / under_way.path.name) == MOVED
        Path(f"{moved / under_way.path.name}.error").unlink()
        assert Shards(moved).members() == {}, (
            "a failed request is no member, whatever becomes of its error"
        )
        assert not (moved / under_way.path.name).exists()


@EVERY_SINK
@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_requests_end_and_later_requests_work_after_a_fault_in_the_new_directory(
    tmp_path: Path, make: Callable[..., Sink], io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in itertools.count(1):
        directory = tmp_path / str(first) / "out"
        before, calls = open_fds(), FailingFrom(first)
        with make(directory, FORMAT, FileOptions(io=io)) as sink:  # type: ignore[arg-type]
            under_way = [begin(sink, directory, f"{name}-0123abcd") for name in "ab"]
            moved = rotate(directory)
            with monkeypatch.context() as patch:
                trace(patch, calls, start=True)
                with suppress(SinkError):
                    under_way[0].commit(token_ids(3), 3)
                under_way[1].fail("because")
            assert not any(is_held(lock) for lock in moved.glob("*.lock"))
            for name in ("c", "a-0123abcd"):
                begin(sink, directory, name).commit(token_ids(3), 3)
                assert_found(directory / f"{name}.safetensors")
        assert open_fds() == before
        if calls.made < first:
            break
    assert first > 10


def test_file_in_place_of_the_directory_fails_requests(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    with FileSink(directory, FORMAT) as sink:
        directory.rename(tmp_path / "moved")
        directory.touch()
        with pytest.raises(SinkError, match="is not a directory"):
            sink.open("b", directory / "b.safetensors")


@EVERY_SINK
@pytest.mark.parametrize(
    "later", ["none", "under way", "published"], ids=lambda later: f"later request {later}"
)
def test_open_request_fails_and_later_requests_use_the_new_directory(
    tmp_path: Path, make: Callable[..., Sink], later: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "out"
    with make(directory, FORMAT) as sink:
        under_way = begin(sink, directory)
        moved = rotate(directory)
        new = begin(sink, directory, "b") if later != "none" else None
        if later == "published":
            new.commit(token_ids(3), 3)
        with pytest.raises(SinkError, match=MOVED):
            under_way.commit(token_ids(3), 3)
        assert reason_at(moved / under_way.path.name) == MOVED
        with pytest.raises(FileNotFoundError):
            load(under_way.path, 0)
        if later == "under way":
            new.commit(token_ids(3), 3)
        if new is not None:
            assert "was replaced by another directory" in caplog.text
            assert_found(new.path)
        begin(sink, directory).commit(token_ids(3), 3)
        assert_found(under_way.path)
    assert not [name for name in listing(moved) if not name.endswith((".error", ".lock"))]


def test_symbolic_link_to_the_directory_may_be_changed(tmp_path: Path, elsewhere: Path) -> None:
    current = tmp_path / "current"
    (tmp_path / "day1").mkdir()
    current.symlink_to(tmp_path / "day1")
    with FileSink(current, FORMAT) as sink:
        under_way = begin(sink, current)
        (tmp_path / "next").symlink_to(elsewhere)
        (tmp_path / "next").rename(current)
        with pytest.raises(SinkError, match=MOVED):
            under_way.commit(token_ids(3), 3)
        begin(sink, current).commit(token_ids(3), 3)
        assert_found(elsewhere / under_way.path.name)


@EVERY_SINK
def test_request_that_fails_leaves_its_reason_where_its_lock_is(
    tmp_path: Path, make: Callable[..., Sink]
) -> None:
    directory = tmp_path / "out"
    with make(directory, FORMAT) as sink:
        under_way = begin(sink, directory)
        moved = rotate(directory)
        under_way.fail("no luck")
        assert reason_at(moved / under_way.path.name) == "no luck"
        assert listing(directory) == []


@EVERY_SINK
def test_discarded_request_leaves_nothing(tmp_path: Path, make: Callable[..., Sink]) -> None:
    directory = tmp_path / "out"
    with make(directory, FORMAT) as sink:
        under_way = begin(sink, directory)
        moved = rotate(directory)
        under_way.discard()
    assert [name for name in listing(moved) if "safetensors" in name] == listing(directory) == []


@EVERY_SINK
@pytest.mark.parametrize("there", [False, True], ids=["renamed", "replaced"])
def test_chosen_folder_may_be_renamed_too(
    tmp_path: Path, make: Callable[..., Sink], there: bool
) -> None:
    with make(tmp_path, FORMAT) as sink:
        under_way, victim = begin(sink, tmp_path, f"day/{NAME}"), begin(sink, tmp_path, "day/b")
        moved = (tmp_path / "day").rename(tmp_path / "yesterday")
        if there:
            (tmp_path / "day").mkdir()
        with pytest.raises(SinkError, match=MOVED):
            under_way.commit(token_ids(3), 3)
        victim.fail("no luck")
        assert reason_at(moved / under_way.path.name) == MOVED
        assert reason_at(moved / victim.path.name) == "no luck"
        begin(sink, tmp_path, f"day/{NAME}").commit(token_ids(3), 3)
        assert_found(under_way.path)


def test_reader_waiting_in_the_former_directory_wakes(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    with FileSink(directory, FORMAT) as sink:
        under_way = begin(sink, directory)
        found: list[object] = []

        def read() -> None:
            with pytest.raises(FileNotFoundError):
                load(under_way.path, 60)
            found.append("nothing")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        wait_for_sleepers(Path(f"{under_way.path}.lock"))
        rotate(directory)
        with pytest.raises(SinkError, match=MOVED):
            under_way.commit(token_ids(3), 3)
        reader.join(60)
        assert found


@EVERY_SINK
def test_rename_during_a_commit_fails_it_or_moves_the_rows(
    tmp_path: Path, make: Callable[..., Sink]
) -> None:
    for happens_at in range(40):
        directory = tmp_path / str(happens_at) / "out"
        with make(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
            under_way = begin(sink, directory)
            calls: list[str] = []

            def checkpoint(call: str) -> None:
                calls.append(call)  # noqa: B023
                if len(calls) == happens_at + 1:  # noqa: B023
                    rotate(directory)  # noqa: B023

            trace(patch, checkpoint)
            try:
                under_way.commit(token_ids(3), 3)
            except SinkError as error:
                failed = error.reason
            else:
                failed = ""
            patch.undo()
            if happens_at >= len(calls):
                return
            moved = directory.with_name("moved") / under_way.path.name
            if happens_at <= calls.index("stat"):  # where the path leads, when the file is complete
                assert failed == reason_at(moved) == MOVED
            else:
                assert_found(moved)
    pytest.fail("a commit makes more calls than that")


@EVERY_SINK
def test_former_directory_is_released_after_its_last_request(
    tmp_path: Path, make: Callable[..., Sink]
) -> None:
    """The shard is sealed and the hidden directory removed."""
    directory = tmp_path / "out"
    with make(directory, FORMAT) as sink:
        begin(sink, directory, "before-0123abcd").commit(token_ids(3), 3)
        moved = rotate(directory)
        begin(sink, directory, "now-0123abcd").discard()
        assert not [name for name in os.listdir(moved) if name.startswith(".")]
        assert_found(moved / "before-0123abcd.safetensors")
        under_way = begin(sink, directory, "under-way-0123abcd")
        fds = len(open_fds())
        directory.rename(tmp_path / "again")
        directory.mkdir()
        begin(sink, directory, "now-0123abcd").discard()
        assert [name for name in os.listdir(tmp_path / "again") if name.startswith(".hsx-")]
        under_way.fail("no luck")
        assert not [name for name in os.listdir(tmp_path / "again") if name.startswith(".")]
        assert len(open_fds()) <= fds
        if make is not FileSink:
            assert len(list(moved.glob("hsx-*.json"))) == 1, "sealed"
