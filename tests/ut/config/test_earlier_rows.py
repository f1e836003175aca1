"""No sink ever answers a request with the rows of an earlier one of the same name."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from sink_harness import FORMAT, make_rows, token_ids
from test_startup import serve

from vllm_ascend_hsx.cli.verify import main as verify
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.settings import read_settings
from vllm_ascend_hsx.sinks import shard_clock
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink
from vllm_ascend_hsx.sinks.storage import Storage

Sink: TypeAlias = "FileSink | ShardSink"
CHOSEN = "folder/chosen.safetensors"
SECOND = 10**9


def shard_sink(directory: Path, **options: bool) -> ShardSink:
    return ShardSink(directory, FORMAT, shard_bytes=1 << 20, **options)


def file_sink(directory: Path, **options: bool) -> FileSink:
    return FileSink(directory, FORMAT, **options)


SINKS: dict[str, Callable[..., Sink]] = {"files": file_sink, "shards": shard_sink}
EVERY_SINK = pytest.mark.parametrize("make", SINKS.values(), ids=SINKS)


def begin(
    sink: Sink,
    directory: Path,
    name: str = CHOSEN,
    request_id: str = "cmpl-1-0-0123abcd",
    tokens: int = 2,
    arrived_ns: int | None = None,
) -> RequestFile:
    file = sink.open(request_id, directory / name, tokens, arrived_ns)
    file.write(0, make_rows(0, tokens))
    return file


def tokens_at(path: Path) -> int:
    return len(load(path, 0, verify=True).token_ids)


@pytest.mark.parametrize("end", ["commit", "fail", "discard", "server dies"])
@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
def test_a_server_with_files_hides_the_member_that_a_server_with_shards_wrote(tmp_path: Path, end: str, at_once: bool) -> None:
    shards = shard_sink(tmp_path)
    begin(shards, tmp_path, tokens=5).commit(token_ids(5), 5)
    assert tokens_at(tmp_path / CHOSEN) == 5
    if not at_once:
        shards.close()
    files = file_sink(tmp_path)
    file = begin(files, tmp_path)
    assert Shards(tmp_path).members() == {}, "from now on"
    match end:
        case "commit":
            file.commit(token_ids(2), 2)
            assert tokens_at(file.path) == 2
        case "fail":
            file.fail("no luck")
            with pytest.raises(HiddenStatesError, match="no luck"):
                load(file.path, 0)
        case "discard":
            file.discard()
            with pytest.raises(FileNotFoundError):
                load(file.path, 0)
        case "server dies":
            return
    files.close()
    assert Shards(tmp_path).members() == {}
    begin(shards if at_once else (shards := shard_sink(tmp_path)), tmp_path, tokens=7).commit(token_ids(7), 7)
    shards.close()
    assert tokens_at(file.path) == 7, "a later member counts again"
    assert verify([str(tmp_path)]) == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_line_of_a_server_with_files_is_durable_if_its_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard_sink(tmp_path).close()
    (tmp_path / "hsx-shards").touch()
    synced: list[int] = []
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard_file.os.fdatasync", synced.append)
    for durability, count in (("none", 0), ("fdatasync", 1)):
        with FileSink(tmp_path, FORMAT, FileOptions(durability=durability)) as sink:  # type: ignore[arg-type]
            sink.open("a", tmp_path / CHOSEN).discard()
            assert len(synced) == count


@pytest.mark.parametrize("has_shards", [False, True])
def test_a_server_with_files_writes_lines_only_for_chosen_names_and_where_shards_are(tmp_path: Path, has_shards: bool) -> None:
    if has_shards:
        (tmp_path / "hsx-shards").touch()
    with file_sink(tmp_path) as sink:
        begin(sink, tmp_path, "cmpl-1-0-0123abcd.safetensors").commit(token_ids(2), 2)
        assert not list(tmp_path.glob("hsx-*.*"))
        for _ in range(2):
            begin(sink, tmp_path).commit(token_ids(2), 2)
        lines = [json.loads(line) for path in tmp_path.glob("hsx-*.jsonl") for line in path.read_text().splitlines()]
        assert [line["name"] for line in lines] == [CHOSEN, CHOSEN] * has_shards
        assert all(line["gone"] for line in lines)


@EVERY_SINK
@pytest.mark.parametrize("end", ["fail", "discard"])
def test_an_id_that_only_looks_random_may_have_been_used_before(tmp_path: Path, make: Callable[..., Sink], end: str) -> None:
    """A date, where vLLM appends no digits: the client may send the id again."""
    request_id = "cmpl-run-20240101"
    name = f"{request_id}.safetensors"
    with shard_sink(tmp_path, random_ids=False) as earlier:
        begin(earlier, tmp_path, name, request_id, 5).commit(token_ids(5), 5)
    with make(tmp_path, random_ids=False) as sink:
        file = begin(sink, tmp_path, name, request_id)
        file.fail("no luck") if end == "fail" else file.discard()
    Path(f"{tmp_path / name}.error").unlink(missing_ok=True)
    Path(f"{tmp_path / name}.lock").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / name, 0)


@pytest.mark.parametrize("sink", ["file", "shard"])
@pytest.mark.parametrize(("value", "random"), [("0", True), ("1", False), (None, True)])
def test_a_server_asks_vllm_whether_ids_are_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, value: str | None, random: bool
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    else:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
    settings = read_settings(serve(tmp_path, sink=sink))
    (tmp_path / "hsx-shards").touch()
    with settings.destination.make_sink(settings.row_format, memoryview(b"")) as made:
        made.open("cmpl-run-20240101", tmp_path / "cmpl-run-20240101.safetensors").discard()
        assert bool(list(tmp_path.glob("hsx-*.jsonl"))) is not random


def test_an_earlier_file_that_a_consumer_removes_meanwhile_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove_and_move(storage: Storage, name: str, target: Storage, new_name: str) -> None:
        monkeypatch.undo()
        (tmp_path / CHOSEN).unlink()
        storage.move(name, target, new_name)

    with file_sink(tmp_path) as sink:
        begin(sink, tmp_path).commit(token_ids(2), 2)
        monkeypatch.setattr(Storage, "move", remove_and_move)
        begin(sink, tmp_path, tokens=3).commit(token_ids(3), 3)
        assert tokens_at(tmp_path / CHOSEN) == 3


def test_an_earlier_file_goes_also_where_the_hidden_directory_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a server that dies now would leave it as the answer."""

    def lose_the_hidden_directory(storage: Storage, name: str, target: Storage, new_name: str) -> None:
        monkeypatch.undo()
        (hidden,) = tmp_path.glob(".hsx-*")
        shutil.rmtree(hidden)
        storage.move(name, target, new_name)

    with file_sink(tmp_path) as sink:
        begin(sink, tmp_path).commit(token_ids(2), 2)
        monkeypatch.setattr(Storage, "move", lose_the_hidden_directory)
        with pytest.raises(SinkError, match="somebody has removed the hidden directory of this server: .*ENOENT"):
            begin(sink, tmp_path, tokens=3)
        assert not (tmp_path / CHOSEN).exists()


@EVERY_SINK
@pytest.mark.parametrize("later", [False, True], ids=["earlier rows", "later rows"])
@pytest.mark.parametrize("name", [CHOSEN, "gr\u00fcn/\u5c42.safetensors"])
def test_a_reason_that_comes_late_hides_only_rows_of_a_request_that_arrived_earlier(
    tmp_path: Path, make: Callable[..., Sink], later: bool, name: str
) -> None:
    with make(tmp_path) as sink:
        begin(sink, tmp_path, name, arrived_ns=SECOND).commit(token_ids(2), 2)
        sink.leave_reason("cmpl-2-0-0123abcd", tmp_path / name, "why", SECOND - 1 if later else SECOND + 1)
    if later:
        assert tokens_at(tmp_path / name) == 2
    else:
        with pytest.raises(HiddenStatesError, match="why"):
            load(tmp_path / name, 0)


@EVERY_SINK
@pytest.mark.parametrize("name", [CHOSEN, "gr\u00fcn/\u5c42.safetensors"])
def test_of_two_requests_of_one_name_the_rows_of_the_one_that_arrived_later_stay(
    tmp_path: Path, make: Callable[..., Sink], name: str
) -> None:
    """The client of the first one gave up, and ranks do not begin requests in one order."""
    with make(tmp_path) as sink, make(tmp_path) as another:
        begin(sink, tmp_path, name, tokens=5, arrived_ns=SECOND).commit(token_ids(5), 5)
        with pytest.raises(SinkError, match="a later request has published this file, or has failed"):
            another.open("cmpl-2-0-0123abcd", tmp_path / name, arrived_ns=SECOND - 1)
        assert tokens_at(tmp_path / name) == 5
        begin(another, tmp_path, name, tokens=3, arrived_ns=SECOND + 1).commit(token_ids(3), 3)
        assert tokens_at(tmp_path / name) == 3
        begin(sink, tmp_path, name).commit(token_ids(2), 2)  # it is not known when it arrived
    assert tokens_at(tmp_path / name) == 2


@EVERY_SINK
def test_rows_that_were_removed_refuse_nobody(tmp_path: Path, make: Callable[..., Sink]) -> None:
    with make(tmp_path) as sink:
        begin(sink, tmp_path, arrived_ns=SECOND).commit(token_ids(2), 2)
        remove(tmp_path / CHOSEN)
        begin(sink, tmp_path, tokens=3, arrived_ns=SECOND - 1).commit(token_ids(3), 3)
    assert tokens_at(tmp_path / CHOSEN) == 3


@EVERY_SINK
def test_what_does_not_tell_when_it_arrived_is_replaced(tmp_path: Path, make: Callable[..., Sink]) -> None:
    (tmp_path / CHOSEN).parent.mkdir()
    save_file({"hidden_states": torch.ones(4, 1, 4), "token_ids": torch.arange(4)}, tmp_path / CHOSEN)
    with make(tmp_path) as sink:
        begin(sink, tmp_path, arrived_ns=0).commit(token_ids(2), 2)
        assert tokens_at(tmp_path / CHOSEN) == 2
        (tmp_path / "no-rows.safetensors").write_bytes(b"no rows")
        begin(sink, tmp_path, "no-rows.safetensors", arrived_ns=0).commit(token_ids(2), 2)
        (tmp_path / "link.safetensors").symlink_to("elsewhere")
        begin(sink, tmp_path, "link.safetensors", arrived_ns=0).commit(token_ids(2), 2)
    assert tokens_at(tmp_path / "no-rows.safetensors") == tokens_at(tmp_path / "link.safetensors") == 2


@EVERY_SINK
def test_a_reason_of_a_gibibyte_is_not_read_whole(tmp_path: Path, make: Callable[..., Sink]) -> None:
    with (tmp_path / "big.safetensors.error").open("wb") as file:
        file.truncate(1 << 30)
    with make(tmp_path) as sink:
        tracemalloc.start()
        begin(sink, tmp_path, "big.safetensors", arrived_ns=0).commit(token_ids(2), 2)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert tokens_at(tmp_path / "big.safetensors") == 2
    assert most < 64 << 20


@pytest.mark.parametrize("chunk", [64, 1 << 16])
def test_a_later_member_is_found_at_whatever_place_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Indexes are read from their ends, in chunks of any size."""
    monkeypatch.setattr(shard_clock, "_CHUNK", chunk)
    with ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink:
        for number in range(20):
            begin(sink, tmp_path, f"{number}.safetensors", arrived_ns=SECOND).commit(token_ids(2), 2)
        for number in range(20):
            with pytest.raises(SinkError, match="a later request"):
                sink.open("late-0-0123abcd", tmp_path / f"{number}.safetensors", arrived_ns=SECOND - 1)


def test_lines_from_before_a_request_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(shard_clock, "_CHUNK", 512)
    with ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink:
        with monkeypatch.context() as earlier:
            earlier.setattr(time, "time_ns", lambda: SECOND)
            for number in range(50):
                begin(sink, tmp_path, f"{number}.safetensors", arrived_ns=SECOND).commit(token_ids(2), 2)
        begin(sink, tmp_path, "newest.safetensors", arrived_ns=100 * SECOND).commit(token_ids(2), 2)
        monkeypatch.setattr(os, "pread", lambda fd, size, at: read.append(size) or pread(fd, size, at))
        begin(sink, tmp_path, "another.safetensors", arrived_ns=101 * SECOND).commit(token_ids(2), 2)
        assert 0 < sum(read) <= 1024



@EVERY_SINK
@pytest.mark.parametrize("ends", ["fails", "is not opened"])
def test_the_reason_of_a_request_that_arrived_later_stays(tmp_path: Path, make: Callable[..., Sink], ends: str) -> None:
    with make(tmp_path) as sink, make(tmp_path) as another:
        if ends == "fails":
            begin(sink, tmp_path, arrived_ns=SECOND).fail("the disk is full")
        else:
            sink.leave_reason("cmpl-1-0-0123abcd", tmp_path / CHOSEN, "the disk is full", SECOND)
        with pytest.raises(SinkError, match="a later request has published this file, or has failed"):
            another.open("cmpl-2-0-0123abcd", tmp_path / CHOSEN, arrived_ns=SECOND - 1)
        with pytest.raises(HiddenStatesError, match="the disk is full"):
            load(tmp_path / CHOSEN, 0)
        begin(another, tmp_path, arrived_ns=SECOND + 1).commit(token_ids(2), 2)
    assert tokens_at(tmp_path / CHOSEN) == 2


@EVERY_SINK
@pytest.mark.parametrize("ends", ["ends", "fails"])
def test_where_its_folder_was_replaced_a_later_requests_rows_stay(tmp_path: Path, make: Callable[..., Sink], ends: str) -> None:
    with make(tmp_path) as sink, make(tmp_path) as another:
        earlier = begin(sink, tmp_path, arrived_ns=SECOND)
        folder = (tmp_path / CHOSEN).parent
        folder.rename(tmp_path / "rotated")
        folder.mkdir()
        begin(another, tmp_path, tokens=3, arrived_ns=SECOND + 1).commit(token_ids(3), 3)
        if ends == "ends":
            with pytest.raises(SinkError, match="a later request has published this file, or has failed"):
                earlier.commit(token_ids(2), 2)
        else:
            earlier.fail("why")
    assert tokens_at(tmp_path / CHOSEN) == 3
    with pytest.raises(HiddenStatesError):
        load(tmp_path / "rotated" / "chosen.safetensors", 0)


@EVERY_SINK
def test_an_arrival_in_the_future_is_that_of_a_clock_that_was_set_back(tmp_path: Path, make: Callable[..., Sink]) -> None:
    with make(tmp_path) as sink:
        begin(sink, tmp_path, tokens=3, arrived_ns=time.time_ns() + 3600 * SECOND).commit(token_ids(3), 3)
        begin(sink, tmp_path, arrived_ns=time.time_ns()).commit(token_ids(2), 2)
    assert tokens_at(tmp_path / CHOSEN) == 2
