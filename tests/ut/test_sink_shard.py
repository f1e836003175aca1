"""ShardSink: the same rows as FileSink would publish, as members of tar files that can be walked at every instant."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import mmap
import os
import random
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_harness import FORMAT, Traced, is_held, lines_of, listing, make_rows, member_bytes, open_fds, token_ids, trace, walked

from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.shard_index import Gone, Member
from vllm_ascend_hsx.protocol.tar import BLOCK, headers, is_headed
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import directory as sink_directory
from vllm_ascend_hsx.sinks import system
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

PAGES = RowFormat(layer_ids=(1, 2), hidden_size=512, dtype="BF16", model="tiny")  # 2,048 bytes a row
MIB = 1 << 20


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[ShardSink]:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        yield sink


def open_file(sink: ShardSink | FileSink, where: Path, name: str = "a", expected: int = 0) -> RequestFile:
    """A request whose rows are known in number if `expected` is given."""
    return sink.open(f"{name}-0123abcd", where / f"{name}-0123abcd.safetensors", expected, may_grow=not expected)


def publish(sink: ShardSink | FileSink, where: Path, name: str, tokens: int = 2, version: int = 0, *, grows: bool = False) -> Path:
    file = open_file(sink, where, name, 0 if grows else tokens)
    file.write(0, make_rows(0, tokens, version))
    file.commit(token_ids(tokens), tokens)
    return file.path


def members(where: Path) -> list[str]:
    """Names of the members of all shards, as tarfile sees them."""
    return [entry.name for entries in walked(where).values() for entry in entries]


def rows_of(path: Path) -> np.ndarray:
    return load(path, 0, verify=True).hidden_states.view(torch.uint16).numpy()


def manifests(where: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(where.glob("hsx-*.json"))]


ENDS: dict[str, Callable[[RequestFile], None]] = {
    "commit": lambda file: file.commit(token_ids(4), 4),
    "fail": lambda file: file.fail("first reason"),
    "discard": lambda file: file.discard(),
}


# Headers


@settings(max_examples=depth(300), deadline=None)
@given(
    name=st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=300).filter(
        lambda name: not name.startswith("/") and not name.endswith("/")
    ),
    size=st.integers(0, 3 * 8**11),
    start=st.integers(0, 40).map(lambda blocks: blocks * BLOCK),
)
def test_headers_fill_the_room_up_to_a_page_and_are_what_tarfile_understands(name: str, size: int, start: int) -> None:
    made = headers(start, name, size, 0o640, 1234)
    offset = start + len(made)
    assert offset % PAGE == 0
    assert len(made) < 3 * PAGE
    with tempfile.TemporaryFile() as file:
        file.truncate(offset + size + 3 * BLOCK)
        os.pwrite(file.fileno(), made, start)
        file.seek(start)
        with tarfile.open(fileobj=file) as tar:
            (info,) = tar
        assert (info.name, info.size, info.mode, info.mtime) == (name, size, 0o640, 1234)
        assert info.offset_data == offset
        assert is_headed(file.fileno(), offset, name, size)
        assert is_headed(file.fileno(), offset, name, size, start)
        assert not is_headed(file.fileno(), offset, name + "x", size, start)
        assert not is_headed(file.fileno(), offset, name, size + 1, start)
        assert not is_headed(file.fileno(), offset, name, size, start + BLOCK)


# What is published


@settings(max_examples=depth(120), deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_written_in_whatever_order_each_member_is_the_file_that_the_file_sink_publishes(luck: random.Random) -> None:
    """The same is done to both sinks. Requests run at the same time, shards are small, names are used again, rows may be quantised."""
    with tempfile.TemporaryDirectory() as directory:
        shard_dir, file_dir = Path(directory, "shards"), Path(directory, "files")
        options = FileOptions(checksum=luck.choice(["crc32c", "none"]), durability=luck.choice(["none", "none", "fdatasync"]))
        row_format = replace(FORMAT, quantization=luck.choice(["none", "none", "fp8"]))
        names = [luck.choice(["", "", "x/", "folder/" + "y" * 150 + "/"]) + f"r{i}.safetensors" for i in range(luck.randint(1, 6))]
        with (
            ShardSink(shard_dir, row_format, options, shard_bytes=luck.choice([1, 20_000, 60_000])) as shards,
            FileSink(file_dir, row_format, options) as files,
        ):
            running: list[Iterator[None]] = []
            for serial in range(luck.randint(1, 14)):
                name = names[serial % len(names)] if luck.random() < 0.7 else f"n{serial}.safetensors"
                running.append(life(luck, [(shards, shard_dir), (files, file_dir)], f"{serial}", name))
                while running and luck.random() < 0.8:
                    step(luck, running)
                if luck.random() < 0.2:
                    walked(shard_dir)
            while running:
                step(luck, running)
            check_same(shard_dir, file_dir, sealed=False)
        check_same(shard_dir, file_dir, sealed=True)


def step(luck: random.Random, running: list[Iterator[None]]) -> None:
    one = luck.choice(running)
    if next(one, "ended") == "ended":
        running.remove(one)


def life(luck: random.Random, sinks: list[tuple[ShardSink | FileSink, Path]], request_id: str, name: str) -> Iterator[None]:
    """A request, done to each of the sinks a step at a time."""
    tokens = luck.choice([0, 1, luck.randint(2, 30), luck.randint(2, 600)])
    grows = luck.random() < 0.4
    expected = luck.randint(0, tokens) if grows else tokens + luck.choice([0, 0, 1, 90])
    try:
        opened = [sink.open(request_id, where / name, expected, may_grow=grows) for sink, where in sinks]
    except SinkError as error:
        assert "another request is writing" in error.reason  # noqa: PT017
        return
    cuts = sorted({0, tokens, *(luck.randint(0, tokens) for _ in range(luck.randrange(4)))})
    spans = [(first, last, 1) for first, last in itertools.pairwise(cuts)]
    luck.shuffle(spans)
    if tokens and luck.random() < 0.4:  # computed twice, and differently cut
        first = luck.randrange(tokens)
        spans.insert(0, (first, tokens + luck.randrange(3), 7))
    if luck.random() < 0.3:
        spans.append((tokens, tokens + 2, 3))  # behind the last token
    for first, last, version in spans:
        for file in opened:
            file.write(first, make_rows(first, last, version))
        yield
    end = luck.choice(["commit"] * 5 + ["fail", "discard"])
    for file in opened:
        if end == "commit":
            file.commit(token_ids(tokens), tokens // 2)
        elif end == "fail":
            file.fail("as it was to")
        else:
            file.discard()


def check_same(shard_dir: Path, file_dir: Path, *, sealed: bool) -> None:
    expected = {path.relative_to(file_dir).as_posix(): path.read_bytes() for path in file_dir.rglob("*.safetensors")}
    stems = walked(shard_dir)
    lines = {stem: lines_of(shard_dir, stem) for stem in stems}
    newest: dict[str, Member | Gone] = {}
    for line in sorted((line for each in lines.values() for line in each), key=lambda line: line.time_ns):
        newest[line.name] = line
    assert {name for name, line in newest.items() if isinstance(line, Member)} == expected.keys()
    for name, data in expected.items():
        assert member_bytes(shard_dir, name) == data
        assert not (shard_dir / name).exists()
    companions = {d: {p.relative_to(d).as_posix() for p in d.rglob("*.error")} for d in (shard_dir, file_dir)}
    assert companions[shard_dir] == companions[file_dir]
    assert {p.relative_to(shard_dir).as_posix() for p in shard_dir.rglob("*.lock")} == {
        name.removesuffix(".error") + ".lock" for name in companions[shard_dir]
    }
    if sealed:
        assert [path.stem for path in sorted(shard_dir.glob("*.json"))] == sorted(stems)
        for said, stem in zip(manifests(shard_dir), sorted(stems), strict=True):
            check_manifest(shard_dir, stem, said)
        assert not [name for name in os.listdir(shard_dir) if name.startswith(".")]


def check_manifest(where: Path, stem: str, said: dict[str, object]) -> None:
    lines = lines_of(where, stem)
    published = [line for line in lines if isinstance(line, Member)]
    digest = Digest()
    digest.update((where / f"{stem}.jsonl").read_bytes())
    assert {key: said[key] for key in ("members", "tokens", "bytes", "index_lines", "index_checksum")} == {
        "members": len(published),
        "tokens": sum(line.tokens for line in published),
        "bytes": sum(line.size for line in published),
        "index_lines": len(lines),
        "index_checksum": digest.hexdigest(),
    }
    assert said["sealed_by"] == "server"
    if published:
        assert (said["model"], said["layer_ids"], said["dtype"], said["row_shape"]) == ("tiny", [2, 0, 3], "BF16", [3, 8])


def test_a_line_of_the_index_says_what_the_member_is(sink: ShardSink, tmp_path: Path) -> None:
    path = publish(sink, tmp_path, "a", 5)
    ((stem, (entry,)),) = walked(tmp_path).items()
    (line,) = [json.loads(text) for text in (tmp_path / f"{stem}.jsonl").read_text().splitlines()]
    assert line.pop("time_ns") > 1.7e18
    assert line == {
        "name": path.name, "offset": PAGE, "size": entry.size, "tokens": 5, "request_id": "a-0123abcd",
        "checksum": load(path).metadata["checksum"],
    }  # fmt: skip


# Locks and ends


@pytest.mark.parametrize("end", ["commit", "fail", "discard"])
def test_a_lock_is_held_until_the_end_and_stays_only_beside_an_error(sink: ShardSink, tmp_path: Path, end: str) -> None:
    publish(sink, tmp_path, "other")
    file = open_file(sink, tmp_path, "a")
    lock = Path(f"{file.path}.lock")
    file.write(0, make_rows(0, 4))
    assert is_held(lock)
    ENDS[end](file)
    kept = {"commit": [], "fail": [f"{file.name}.error", f"{file.name}.lock"], "discard": []}[end]
    assert [name for name in listing(tmp_path) if not name.startswith(("hsx-", ".hsx-"))] == kept
    assert members(tmp_path) == ["other-0123abcd.safetensors", *([file.name] if end == "commit" else [])]


def test_a_request_that_fails_or_is_aborted_takes_no_space_in_a_shard(tmp_path: Path) -> None:
    with ShardSink(tmp_path, PAGES, shard_bytes=1 << 30) as sink:
        for end in ("fail", "discard"):
            doomed = open_file(sink, tmp_path, end, 2000)
            doomed.write(0, np.ones((2000, PAGES.row_bytes), np.uint8))
            ENDS[end](doomed)
            Path(f"{doomed.path}.error").unlink(missing_ok=True)
            Path(f"{doomed.path}.lock").unlink(missing_ok=True)
            assert listing(tmp_path) == []


def test_hidden_files_serve_one_request_after_the_other_but_large_ones_are_removed(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden() -> list[str]:
        return [name for name in listing(tmp_path) if name.startswith(".")]

    for tokens in (50, 3, 0, 80):  # shorter ones keep nothing of the longer ones
        publish(sink, tmp_path, f"r{tokens}", tokens, version=tokens, grows=tokens == 3)
        assert np.array_equal(rows_of(tmp_path / f"r{tokens}-0123abcd.safetensors"), make_rows(0, tokens, tokens))
        assert len(hidden()) == 1
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard._LARGEST_SPARE", 10_000)
    publish(sink, tmp_path, "large", 300)
    assert hidden() == []
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard._SPARES", 2)
    files = [open_file(sink, tmp_path, f"f{i}", 2) for i in range(5)]
    for file in files:
        file.write(0, make_rows(0, 2))
    for file in files:
        file.commit(token_ids(2), 2)
    assert len(hidden()) == 2


def test_a_failure_does_not_wait_for_a_slow_disk_and_its_hidden_file_is_nobody_elses_meanwhile(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(sink, tmp_path, "slow")
    with write_in_flight(file, monkeypatch):
        file.fail("too slow", close=False)
        assert not is_held(Path(f"{file.path}.lock"))
        paths = [publish(sink, tmp_path, f"next{i}", 4, version=i) for i in range(4)]
    file.close()
    for i, path in enumerate(paths):
        assert np.array_equal(rows_of(path), make_rows(0, 4, version=i))
    assert [name.split("-")[0] for name in members(tmp_path)] == [f"next{i}" for i in range(4)]


@contextmanager
def write_in_flight(file: RequestFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The disk takes rows of the request only after the block."""
    file.write(0, make_rows(0, 1))
    writing, go_on = threading.Event(), threading.Event()

    def checkpoint(call: str) -> None:
        if call == "pwrite" and threading.current_thread() is writer:
            writing.set()
            assert go_on.wait(10)

    writer = threading.Thread(target=lambda: file.write(0, make_rows(0, 4, version=8)))
    with monkeypatch.context() as patch:
        trace(patch, checkpoint)
        writer.start()
        assert writing.wait(10)
        yield
        go_on.set()
        writer.join()


def test_closing_the_sink_fails_what_is_open_and_seals_the_rest(tmp_path: Path) -> None:
    before = open_fds()
    sink = ShardSink(tmp_path, FORMAT, shard_bytes=MIB)
    publish(sink, tmp_path, "done")
    rows, grown, none = open_file(sink, tmp_path, "rows", 2), open_file(sink, tmp_path, "grown"), open_file(sink, tmp_path, "none", 3)
    rows.write(0, make_rows(0, 1))
    grown.write(0, make_rows(0, 1))
    sink.close()
    sink.close()
    for file in (rows, grown, none):
        assert json.loads(Path(f"{file.path}.error").read_text())["reason"] == SERVER_STOPPED
    assert members(tmp_path) == ["done-0123abcd.safetensors"]
    assert [said["members"] for said in manifests(tmp_path)] == [1]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], "no hidden directory"
    assert not open_fds() - before
    with pytest.raises(SinkError, match="closed"):
        open_file(sink, tmp_path)


def test_a_write_that_outlives_its_sink_does_no_harm_and_its_shard_is_sealed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    sink = ShardSink(tmp_path, FORMAT, shard_bytes=MIB)
    publish(sink, tmp_path, "done")
    file = open_file(sink, tmp_path, "slow", 4)
    with write_in_flight(file, monkeypatch):
        file.fail("too slow", close=False)
        sink.close()
        assert manifests(tmp_path) == []
    file.close()
    assert [said["sealed_by"] for said in manifests(tmp_path)] == ["server"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert members(tmp_path) == ["done-0123abcd.safetensors"]
    assert not open_fds() - before


@pytest.mark.parametrize("options", [FileOptions(), FileOptions(io="direct", durability="fdatasync")], ids=["default", "direct, durable"])
@pytest.mark.parametrize("end", ["commit", "fail", "discard"])
def test_a_fault_at_any_system_call_of_a_request_neither_lies_nor_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, options: FileOptions
) -> None:
    """Whatever fails between the first rows and the end: what is said to be published is there and right, nothing else is, the other
    requests of the shard are, and the shard can be walked and sealed."""
    calls = 0
    fail_at = -1

    def checkpoint(call: str) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    for fail_at in itertools.count(1):
        where = tmp_path / str(fail_at)
        before = open_fds()
        with ShardSink(where, FORMAT, options, shard_bytes=MIB) as sink:
            publish(sink, where, "before", 3, version=1)
            inside = open_fds()
            file = open_file(sink, where, "a", 4)
            calls = 0
            committed = False
            with monkeypatch.context() as patch:
                trace(patch, checkpoint)
                try:
                    file.write(0, make_rows(0, 4))
                except SinkError:
                    file.fail("the write failed")
                else:
                    with suppress(SinkError):
                        ENDS[end](file)
                        committed = end == "commit"
                reached = calls >= fail_at
            assert len(open_fds() - inside) <= 6, "those of a new shard, and of a spare hidden file"
            assert (member_bytes(where, file.name) is not None) == committed
            if committed:
                assert np.array_equal(rows_of(file.path), make_rows(0, 4))
            publish(sink, where, "after", 3, version=2)
        assert not open_fds() - before
        ShardSink(where, FORMAT, shard_bytes=MIB).close()  # seals what could not be sealed
        expected_members = ["before-0123abcd.safetensors", *([file.name] if committed else []), "after-0123abcd.safetensors"]
        assert members(where) == expected_members
        assert len(manifests(where)) == len(walked(where))
        for name, version in (("before", 1), ("after", 2)):
            assert np.array_equal(rows_of(where / f"{name}-0123abcd.safetensors"), make_rows(0, 3, version))
        if not reached:
            break
    assert fail_at > 3


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "create", "rename", "fdatasync", "fsync"])
def test_a_shard_that_cannot_be_sealed_is_sealed_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def checkpoint(name: str) -> None:
        if name == ("open" if call == "create" else call):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = ShardSink(tmp_path, FORMAT, FileOptions(durability="fdatasync"), shard_bytes=MIB)
    path = publish(sink, tmp_path, "a", 3)
    with monkeypatch.context() as patch:
        trace(patch, checkpoint)
        sink.close()
    assert "could not be sealed" in caplog.text
    assert np.array_equal(rows_of(path), make_rows(0, 3))
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB):
        assert len(manifests(tmp_path)) == 1
    assert np.array_equal(rows_of(path), make_rows(0, 3))


# Rollover


def test_a_shard_is_sealed_with_the_request_that_fills_it(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=30_000) as sink:
        for i in range(20):
            publish(sink, tmp_path, f"r{i}", 10)
            sealed = [path.with_suffix(".json").exists() for path in sorted(tmp_path.glob("hsx-*.tar"))]
            assert all(sealed[:-1])
        stems = sorted(walked(tmp_path))
        assert [stem[-6:] for stem in stems] == [f"{i:06d}" for i in range(len(stems))]
        assert len(stems) > 3
        assert all(os.stat(tmp_path / f"{stem}.tar").st_size < 30_000 + 3 * PAGE for stem in stems)
    assert len(manifests(tmp_path)) == len(stems)
    assert sum(said["members"] for said in manifests(tmp_path)) == 20  # type: ignore[misc]


def test_a_request_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    with ShardSink(tmp_path, PAGES, shard_bytes=MIB) as sink:
        for name in "ab":
            file = open_file(sink, tmp_path, name, 1000)
            file.write(0, np.full((1000, PAGES.row_bytes), ord(name), np.uint8))
            file.commit(token_ids(1000), 1000)
    assert [said["members"] for said in manifests(tmp_path)] == [1, 1]


# Threads and servers


@pytest.mark.parametrize("options", [FileOptions(), FileOptions(io="direct")], ids=["buffered", "direct"])
def test_many_threads_write_many_requests(tmp_path: Path, options: FileOptions) -> None:
    threads, each = 8, 25
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        luck = random.Random(rank)
        try:
            for i in range(each):
                tokens = luck.randint(1, 60)
                file = open_file(sink, tmp_path, f"r{rank}.{i}", luck.choice([0, tokens]))
                rows = np.frombuffer(mmap.mmap(-1, tokens * PAGES.row_bytes), np.uint8).reshape(tokens, -1)
                rows[:] = np.random.default_rng([rank, i]).integers(0, 255, rows.shape, dtype=np.uint8)
                for first in luck.sample(range(0, tokens, 7), len(range(0, tokens, 7))):
                    file.write(first, rows[first : first + 7])
                if luck.random() < 0.2:
                    file.discard()
                else:
                    file.commit(token_ids(tokens), tokens)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    with ShardSink(tmp_path, PAGES, options, shard_bytes=MIB) as sink:
        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not errors
    found = members(tmp_path)
    assert len(found) > threads * each // 2
    assert len(manifests(tmp_path)) == len(walked(tmp_path)) > 3
    for name in found:
        rank, i = map(int, name[1:].split("-")[0].split("."))
        states = load(tmp_path / name, 0, verify=True)
        tokens = len(states.token_ids)
        rows = np.random.default_rng([rank, i]).integers(0, 255, (tokens, PAGES.row_bytes), dtype=np.uint8)
        assert np.array_equal(states.hidden_states.view(torch.uint8).reshape(tokens, -1).numpy(), rows)


def test_two_servers_in_one_directory_have_shards_of_their_own(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as one, ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as two:
        for i in range(5):
            publish(one, tmp_path, f"one{i}", 3, version=1)
            publish(two, tmp_path, f"two{i}", 3, version=2)
        assert len(walked(tmp_path)) == 2
        with pytest.raises(SinkError, match="another request or server"):
            held = open_file(one, tmp_path, "same")
            open_file(two, tmp_path, "same")
        held.discard()
        two.close()
        assert [said["members"] for said in manifests(tmp_path)] == [5]
        publish(one, tmp_path, "one5", 3, version=1)
    assert sorted(said["members"] for said in manifests(tmp_path)) == [5, 6]  # type: ignore[type-var]
    assert np.array_equal(rows_of(tmp_path / "one5-0123abcd.safetensors"), make_rows(0, 3, version=1))


# Names


@pytest.mark.parametrize("end", ["commit", "fail", "discard", "server dies"])
@pytest.mark.parametrize("kind", ["a member", "a file"])
@pytest.mark.parametrize("request_id", ["cmpl-1", "another-0123abcd"])
def test_an_earlier_requests_rows_are_never_the_answer_to_a_later_one(tmp_path: Path, end: str, kind: str, request_id: str) -> None:
    """Neither for a name that a client chose, nor for an id that it chose where ids are not made unique."""
    path = tmp_path / "cmpl-1.safetensors"
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) if kind == "a member" else FileSink(tmp_path, FORMAT) as earlier:
        file = earlier.open("cmpl-1", path, 2, may_grow=False)
        file.write(0, make_rows(0, 2))
        file.commit(token_ids(2), 2)
    assert np.array_equal(rows_of(path), make_rows(0, 2))
    Path(f"{path}.lock").unlink(missing_ok=True)
    sink = ShardSink(tmp_path, FORMAT, shard_bytes=MIB)
    file = sink.open(request_id, path, 3, may_grow=False)
    assert member_bytes(tmp_path, path.name) is None, "from now on, until it is complete"
    assert not path.exists()
    if end == "server dies":
        return
    file.write(0, make_rows(0, 3, version=4))
    {"commit": lambda: file.commit(token_ids(3), 3), "fail": lambda: file.fail("x"), "discard": file.discard}[end]()
    assert (member_bytes(tmp_path, path.name) is not None) == (end == "commit")
    if end == "commit":
        assert np.array_equal(rows_of(path), make_rows(0, 3, version=4))
    sink.close()
    assert (member_bytes(tmp_path, path.name) is not None) == (end == "commit")


def test_an_earlier_requests_rows_are_not_the_answer_either_when_the_clock_was_set_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        file = sink.open("x", path, 2, may_grow=False)
        file.write(0, make_rows(0, 2))
        file.commit(token_ids(2), 2)
    (index,) = tmp_path.glob("*.jsonl")
    ahead = time.time_ns() + 3600 * 10**9  # the first server's clock
    index.write_bytes(re.sub(rb'"time_ns":\d+', b'"time_ns":%d' % ahead, index.read_bytes().splitlines(keepends=True)[-1]))
    os.utime(index, ns=(ahead, ahead))
    assert np.array_equal(rows_of(path), make_rows(0, 2))
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        file = sink.open("y", path, 3, may_grow=False)
        assert member_bytes(tmp_path, path.name) is None
        file.write(0, make_rows(0, 3, version=1))
        file.commit(token_ids(3), 3)
    assert np.array_equal(rows_of(path), make_rows(0, 3, version=1))


def test_the_rows_of_the_later_request_are_the_answer_whichever_server_started_later(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def store(sink: ShardSink, version: int) -> None:
        file = sink.open("x", path, 2, may_grow=False)
        file.write(0, make_rows(0, 2, version))
        file.commit(token_ids(2), 2)
        assert np.array_equal(rows_of(path), make_rows(0, 2, version))

    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as older:
        store(older, 0)
        with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as newer:
            store(newer, 1)
            store(older, 2)


def test_names_that_the_server_makes_cost_no_line(sink: ShardSink, tmp_path: Path) -> None:
    publish(sink, tmp_path, "a")
    ((stem, _),) = walked(tmp_path).items()
    assert [type(line) for line in lines_of(tmp_path, stem)] == [Member]


def test_a_shards_name_that_is_taken_is_passed_over(sink: ShardSink, tmp_path: Path) -> None:
    (tmp_path / f"hsx-{sink.token}-000000.tar").mkdir()
    (tmp_path / f"hsx-{sink.token}-000001.jsonl").symlink_to("/etc/passwd")
    publish(sink, tmp_path, "a")
    assert (tmp_path / f"hsx-{sink.token}-000002.tar").exists()
    assert not (tmp_path / f"hsx-{sink.token}-000001.tar").exists()


# Options


@pytest.mark.parametrize("grows", [False, True])
def test_a_durable_member_is_on_the_disk_before_its_line_and_that_before_the_lock_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    calls: list[tuple[str, str]] = []
    with ShardSink(tmp_path, PAGES, FileOptions(durability="fdatasync"), shard_bytes=MIB) as sink:
        publish_pages(sink, tmp_path, "first")
        file = open_file(sink, tmp_path, "a", 0 if grows else 2)
        file.write(0, np.ones((2, PAGES.row_bytes), np.uint8))
        real = {name: getattr(os, name) for name in ("pwrite", "fdatasync", "copy_file_range")}

        def note(call: str, fd: int) -> None:
            calls.append((call, Path(os.readlink(f"/proc/self/fd/{fd}")).suffix))

        monkeypatch.setattr(os, "pwrite", lambda fd, *rest: (note("pwrite", fd), real["pwrite"](fd, *rest))[1])
        monkeypatch.setattr(os, "fdatasync", lambda fd: (note("fdatasync", fd), real["fdatasync"](fd))[1])
        monkeypatch.setattr(os, "copy_file_range", lambda s, t, *rest: (note("pwrite", t), real["copy_file_range"](s, t, *rest))[1])
        flocks: list[int] = []
        unlock = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", lambda fd, how: (flocks.append(len(calls)), unlock(fd, how))[1])
        file.commit(token_ids(2), 2)
        monkeypatch.undo()
    assert [each for each in calls if not each[1][1:].isdigit()][-4:] == [
        ("pwrite", ".tar"), ("fdatasync", ".tar"), ("pwrite", ".jsonl"), ("fdatasync", ".jsonl")
    ]  # fmt: skip
    assert flocks == [len(calls)]


def publish_pages(sink: ShardSink, where: Path, name: str, tokens: int = 2) -> Path:
    file = open_file(sink, where, name, tokens)
    file.write(0, np.ones((tokens, PAGES.row_bytes), np.uint8))
    file.commit(token_ids(tokens), tokens)
    return file.path


def test_without_durability_nothing_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    trace(monkeypatch, calls.append)
    with ShardSink(tmp_path, FORMAT, shard_bytes=10_000) as sink:
        for i in range(5):
            publish(sink, tmp_path, f"r{i}", grows=i % 2 == 0)
    assert not {"fsync", "fdatasync"} & set(calls)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_shards_have_the_mode_that_is_asked_for(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with ShardSink(tmp_path, FORMAT, FileOptions(mode=mode), shard_bytes=MIB) as sink:
            publish(sink, tmp_path, "a")
    finally:
        os.umask(before)
    for name in listing(tmp_path):
        assert os.stat(tmp_path / name).st_mode & 0o777 == mode, name
    with tarfile.open(next(tmp_path.glob("*.tar"))) as tar:
        assert {info.mode for info in tar} == {mode}


@pytest.mark.parametrize("truncates", [True, False], ids=["the append is cut off", "it cannot be"])
def test_a_disk_that_is_full_in_the_middle_of_an_append_fails_that_request_alone(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    publish(sink, tmp_path, "before", 3, version=1)
    file = open_file(sink, tmp_path, "a", 300)
    file.write(0, make_rows(0, 300))

    def copy_a_part(source: int, size: int, target: int, offset: int) -> None:
        os.pwrite(target, os.pread(source, 9000, 0), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(call: str) -> None:
        if call == "ftruncate" and not truncates:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("vllm_ascend_hsx.sinks.shard_file.copy_into", copy_a_part)
        patch.setattr("vllm_ascend_hsx.sinks.shard_file.os", Traced(os, refuse))
        with pytest.raises(SinkError, match="ENOSPC"):
            file.commit(token_ids(300), 300)
    if truncates:
        assert members(tmp_path) == ["before-0123abcd.safetensors"]
    path = publish(sink, tmp_path, "after", 3, version=2)
    ((_, entries),) = walked(tmp_path).items()
    assert [entry.name[:5] for entry in entries] == ["befor", "after"], "in the same shard"
    assert np.array_equal(rows_of(path), make_rows(0, 3, version=2))


def test_a_line_that_is_not_durable_is_taken_back_also_from_a_reader_who_has_seen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Shards(tmp_path)
    seen: list[bool] = []

    def refuse(call: str) -> None:
        if call == "fdatasync" and not seen and reader.find("a-0123abcd.safetensors") is not None:
            seen.append(True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ShardSink(tmp_path, FORMAT, FileOptions(durability="fdatasync"), shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "0", 3)
        with monkeypatch.context() as patch:
            patch.setattr("vllm_ascend_hsx.sinks.shard_file.os", Traced(os, refuse))
            with pytest.raises(SinkError, match="EIO"):
                publish(sink, tmp_path, "a", 3)
        publish(sink, tmp_path, "b", 3)
        assert seen
        assert sorted(name[0] for name in reader.members()) == ["0", "b"]
    assert sorted(name[0] for name in members(tmp_path)) == ["0", "b"]


def test_a_disk_without_room_fails_the_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_directory, "is_in_memory", lambda fd: False)
    with ShardSink(tmp_path, PAGES, shard_bytes=MIB) as sink:
        file = open_file(sink, tmp_path, "large", 1 << 45)
        with pytest.raises(SinkError, match=r"ENOSPC|EFBIG"):
            file.write(0, np.ones((1, PAGES.row_bytes), np.uint8))
        publish_pages(sink, tmp_path, "small")
        file.fail("no room")
    assert members(tmp_path) == ["small-0123abcd.safetensors"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_where_the_kernel_cannot_copy_rows_are_copied_all_the_same(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(system, "_BLOCK", 1000)
    path = publish(sink, tmp_path, "a", 100)
    assert np.array_equal(rows_of(path), make_rows(0, 100))
    assert members(tmp_path) == [path.name]


def test_gnu_tar_lists_and_extracts_a_sealed_shard(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        paths = [publish(sink, tmp_path, f"r{i}", i + 1) for i in range(3)]
    (tar,) = tmp_path.glob("*.tar")
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(["tar", "-xf", tar, "-C", out], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert listing(out) == [path.name for path in paths]
    assert (out / paths[1].name).read_bytes() == member_bytes(tmp_path, paths[1].name)


def test_webdataset_reads_a_sealed_shard(tmp_path: Path) -> None:
    import webdataset

    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        paths = [publish(sink, tmp_path, f"r{i}", i + 1) for i in range(3)]
    (tar,) = tmp_path.glob("*.tar")
    samples = list(webdataset.WebDataset(str(tar), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [path.stem for path in paths]
    assert [sample["safetensors"] for sample in samples] == [member_bytes(tmp_path, path.name) for path in paths]


def test_a_directory_removed_under_the_server_fails_requests_and_nothing_else(tmp_path: Path) -> None:
    where = tmp_path / "storage"
    before = open_fds()
    with ShardSink(where, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, where, "a")
        early, known, growing = open_file(sink, where, "early", 2), open_file(sink, where, "known", 2), open_file(sink, where, "growing")
        early.write(0, make_rows(0, 2))
        shutil.rmtree(where)
        for file in (early, known, growing):
            with pytest.raises(SinkError, match="ENOENT"):
                file.write(0, make_rows(0, 2))
                file.commit(token_ids(2), 2)
        os.mkdir(where)
        path = publish(sink, where, "b")
        assert np.array_equal(rows_of(path), make_rows(0, 2))
    assert members(where) == [path.name]
    assert not open_fds() - before


def test_a_shard_is_sealed_although_somebody_has_removed_the_hidden_directory(sink: ShardSink, tmp_path: Path) -> None:
    before = publish(sink, tmp_path, "before")
    shutil.rmtree(next(tmp_path.glob(".hsx-*")))
    after = publish(sink, tmp_path, "after")
    assert [said["members"] for said in manifests(tmp_path)] == [1]
    sink.close()
    assert [said["members"] for said in manifests(tmp_path)] == [1, 1]
    assert sorted(members(tmp_path)) == [after.name, before.name]
    assert not list(tmp_path.glob(".hsx-*"))


@pytest.mark.parametrize("suffix", ["tar", "jsonl"])
def test_a_shard_that_somebody_removes_under_the_server_loses_no_request_in_silence(
    sink: ShardSink, tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove() -> None:
        for path in tmp_path.glob(f"*.{suffix}"):
            path.unlink()

    for name in "ab":  # before a request is appended, in a shard and in a line about its name
        publish(sink, tmp_path, f"before-{name}")
        chosen = sink.open(name, tmp_path / f"{name}.safetensors", 1, may_grow=False) if name == "b" else open_file(sink, tmp_path, name)
        remove()
        chosen.write(0, make_rows(0, 1))
        chosen.commit(token_ids(1), 1)
        assert np.array_equal(rows_of(chosen.path), make_rows(0, 1))
    real = system.copy_into
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard_file.copy_into", lambda *args: (real(*args), remove()))
    with pytest.raises(SinkError, match=r"somebody has removed the shard \(ENOENT\)"):
        publish(sink, tmp_path, "c")
    assert "was removed by somebody" in caplog.text
