"""What consumers see of shards: `load` and its relatives, datasets, the commands, and what is left by a server that died."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sink_harness
import torch
from sink_harness import (
    FORMAT,
    Traced,
    dead_workspace,
    is_held,
    lines_of,
    listing,
    member_bytes,
    token_ids,
    trace,
    wait_for_sleepers,
    walked,
)
from torch.utils.data import DataLoader

import vllm_ascend_hsx
from vllm_ascend_hsx import HiddenStatesDataset, collate, load, open_dir
from vllm_ascend_hsx.cli import inspect, serve, verify
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.integrations.speculators import HsxTransfer
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, decode, encode
from vllm_ascend_hsx.protocol.tar import headers
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

MIB = 1 << 20


def make_rows(first: int, last: int, version: int = 0) -> np.ndarray:
    """Rows without NaN and infinity."""
    return sink_harness.make_rows(first, last, version) & np.uint16(0xBFFF)


def publish(sink: ShardSink | FileSink, where: Path, name: str, tokens: int = 3, version: int = 0) -> Path:
    file = sink.open(f"{Path(name).name}-0123abcd", where / f"{name}-0123abcd.safetensors", tokens, may_grow=False)
    file.write(0, make_rows(0, tokens, version))
    file.commit(token_ids(tokens), max(0, tokens - 1))
    return file.path


def rows_of(path: Path, **options: bool) -> np.ndarray:
    return load(path, 0, **options).hidden_states.view(torch.uint16).numpy()


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Two sealed shards, one of them with folders, and a plain file beside them."""
    where = tmp_path / "storage"
    with ShardSink(where, FORMAT, shard_bytes=20_000) as sink:
        for i in range(5):
            publish(sink, where, f"r{i}", 3 + i, version=i)
        publish(sink, where, "folder/in/r5", 8, version=5)
    with FileSink(where, FORMAT) as files:
        publish(files, where, "s", 2, version=9)
    return where


# load


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_load_takes_the_path_of_a_response_whether_rows_are_in_a_file_or_in_a_shard(storage: Path, mmap: bool, verify: bool) -> None:
    for i in range(5):
        states = load(storage / f"r{i}-0123abcd.safetensors", mmap=mmap, verify=verify)
        assert np.array_equal(states.hidden_states.view(torch.uint16).numpy(), make_rows(0, 3 + i, i))
        assert np.array_equal(states.token_ids.numpy(), token_ids(3 + i))
        assert (states.layer_ids, states.num_prompt_tokens) == ([2, 0, 3], 2 + i)
    assert np.array_equal(rows_of(storage / "folder/in/r5-0123abcd.safetensors", mmap=mmap), make_rows(0, 8, 5))
    assert np.array_equal(rows_of(storage / "s-0123abcd.safetensors", mmap=mmap), make_rows(0, 2, 9))
    with pytest.raises(FileNotFoundError, match="was the request aborted"):
        load(storage / "never.safetensors", 0)


def test_changes_to_mapped_tensors_stay_private(storage: Path) -> None:
    path = storage / "r1-0123abcd.safetensors"
    load(path, mmap=True).hidden_states.zero_()
    assert np.array_equal(rows_of(path, verify=True), make_rows(0, 4, 1))


def test_a_member_that_was_changed_is_found_by_its_checksum(storage: Path) -> None:
    shards = Shards(storage)
    member = shards.find("r2-0123abcd.safetensors")
    assert member is not None
    tar = shards.path_of(member.name)
    assert tar is not None
    with open(tar, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", member.offset + member.size - 50)
    load(storage / member.name)
    with pytest.raises(HiddenStatesError, match="not as it was written"):
        load(storage / member.name, verify=True)
    os.truncate(tar, member.offset + 100)
    with pytest.raises(HiddenStatesError, match="of its .* bytes are there"):
        load(storage / member.name)


def test_a_reader_sleeps_until_its_request_is_published_and_is_told_of_failures(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        for end in ("commit", "fail", "discard"):
            path = tmp_path / f"{end}.safetensors"
            file = sink.open(end, path, 3, may_grow=False)
            file.write(0, make_rows(0, 3))
            with pytest.raises(TimeoutError):
                load(path, 0)
            found: list[object] = []

            def read(path: Path = path, found: list[object] = found) -> None:
                try:
                    found.append(load(path, 30).hidden_states.view(torch.uint16).numpy())
                except (HiddenStatesError, FileNotFoundError) as error:
                    found.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            wait_for_sleepers(Path(f"{path}.lock"))
            {"commit": lambda: file.commit(token_ids(3), 3), "fail": lambda: file.fail("no luck"), "discard": file.discard}[end]()  # noqa: B023
            reader.join(30)
            (what,) = found
            if end == "commit":
                assert np.array_equal(what, make_rows(0, 3))  # type: ignore[arg-type]
            elif end == "fail":
                assert isinstance(what, HiddenStatesError)
                assert what.reason == "no luck"
            else:
                assert isinstance(what, FileNotFoundError)


def test_new_members_are_found_while_the_server_writes_and_only_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards(tmp_path)
    assert shards.members() == {}
    read: list[int] = []
    real = os.pread
    with ShardSink(tmp_path, FORMAT, shard_bytes=30_000) as sink:
        monkeypatch.setattr(os, "pread", lambda fd, size, offset: (read.append(offset), real(fd, size, offset))[1])
        for i in range(30):
            path = publish(sink, tmp_path, f"r{i}", 5)
            read.clear()
            assert shards.find(path.name) is not None
            assert len(read) <= 2, "the index that grew, or the new one and the end of the one before"
            assert len(shards.members()) == i + 1
        assert len(walked(tmp_path)) > 3
    assert len(shards.members()) == 30


def test_lines_that_are_torn_or_no_lines_are_passed_over(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "a")
    (index,) = tmp_path.glob("*.jsonl")
    good = index.read_bytes()
    with open(index, "ab") as file:
        file.write(b'not a line\n[1]\n{"name":3,"time_ns":1}\n{"name":"x","time_ns":1,"offset":-4,"size":1,"tokens":1}\n')
        file.write(good.replace(b'"a-', b'"b-')[:40])
    shards = Shards(tmp_path)
    assert list(shards.members()) == [path.name]
    with open(index, "ab") as file:
        file.write(good.replace(b'"a-', b'"b-')[40:])
    # The manifest says that the index is whole, so this one is not looked at again; another look is.
    assert list(Shards(tmp_path).members()) == [path.name, path.name.replace("a-", "b-")]


def test_of_several_lines_the_last_one_counts_in_whatever_shard(tmp_path: Path) -> None:
    name = "x.safetensors"

    def line(kind: type, at: int, offset: int = 0) -> bytes:
        return encode(Gone(name, at) if kind is Gone else Member(name, offset, 1, 1, "", "", at))

    (tmp_path / "hsx-00000001-000000.jsonl").write_bytes(line(Member, 10, 1) + line(Gone, 30))
    (tmp_path / "hsx-00000002-000000.jsonl").write_bytes(line(Member, 40, 2))
    (tmp_path / "hsx-00000000-000000.jsonl").write_bytes(line(Member, 20, 3))
    found = Shards(tmp_path).find(name)
    assert found is not None
    assert found.offset == 2
    (tmp_path / "hsx-00000001-000001.jsonl").write_bytes(line(Gone, 41))
    assert Shards(tmp_path).find(name) is None
    assert decode(line(Gone, 5)) == Gone(name, 5)


def test_shards_that_were_moved_or_taken_away_are_seen_so(storage: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shards = Shards(storage)
    before = shards.members()
    stem = sorted(walked(storage))[0]
    elsewhere.mkdir()
    for path in [*storage.glob(f"{stem}.*"), storage / "hsx-shards"]:
        (shutil.copy if path.name == "hsx-shards" else shutil.move)(path, elsewhere)
    moved = {line.name for line in lines_of(elsewhere, stem) if isinstance(line, Member)}
    assert shards.members().keys() == before.keys() - moved
    for name in moved:
        with pytest.raises(FileNotFoundError):
            load(storage / name, 0)
        assert load(elsewhere / name, verify=True).token_ids.numel() == before[name].tokens


def test_a_directory_of_files_is_not_searched_for_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.safetensors").touch()
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("all names were read"))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.safetensors", 0)


# The rest of the reader


def test_open_dir_gives_files_and_members(storage: Path) -> None:
    found = {path.relative_to(storage).as_posix(): len(states.token_ids) for path, states in open_dir(storage, mmap=True)}
    assert found == {
        **{f"r{i}-0123abcd.safetensors": 3 + i for i in range(5)},
        "folder/in/r5-0123abcd.safetensors": 8,
        "s-0123abcd.safetensors": 2,
    }
    assert list(found) == sorted(found)


def test_a_member_that_is_removed_is_seen_by_nobody_and_the_others_are(storage: Path) -> None:
    path, other = storage / "r0-0123abcd.safetensors", storage / "r1-0123abcd.safetensors"
    elsewhere = Shards(storage)  # as another process has it
    assert elsewhere.find(path.name) is not None
    remove(path, keep_data=True)
    load(path, verify=True)
    remove(path)
    with pytest.raises(FileNotFoundError):
        load(path, 0)
    assert elsewhere.find(path.name) is None
    assert Shards(storage).find(path.name) is None
    load(other, verify=True)
    assert path not in [each for each, _ in open_dir(storage)]
    assert not list(shard_problems(storage)), "its bytes are where they were"
    HsxTransfer(storage).delete(str(other))
    assert elsewhere.find(other.name) is None
    remove(path)  # again, and what was never there
    remove(storage / "never-there.safetensors")
    assert len((storage / "hsx-removed.jsonl").read_text().splitlines()) == 2


def test_a_member_that_is_made_anew_after_its_removal_is_seen_whatever_the_consumers_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hs_0.safetensors"
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        for tokens in (4, 5):
            file = sink.open("x", path, tokens, may_grow=False)
            file.write(0, make_rows(0, tokens))
            file.commit(token_ids(tokens), tokens)
            assert len(load(path, 0).token_ids) == tokens
            if tokens == 4:
                with monkeypatch.context() as patch:
                    patch.setattr("time.time_ns", lambda: 1 << 62)
                    remove(path)
                with pytest.raises(FileNotFoundError):
                    load(path, 0)


def test_the_backend_of_speculators_reads_members(storage: Path, tmp_path: Path) -> None:
    with ShardSink(tmp_path / "cache", FORMAT, shard_bytes=MIB) as sink:
        file = sink.open("x", tmp_path / "cache" / "hs_7.safetensors", 4, may_grow=False)
        file.write(0, make_rows(0, 4))
        file.commit(token_ids(4), 4)
    transfer = HsxTransfer(tmp_path / "cache")
    assert transfer.get_cached(6) is None
    sample = transfer.get_cached(7)
    assert sample is not None
    assert np.array_equal(sample["hidden_states"].view(torch.uint16).numpy(), make_rows(0, 4))
    generated = HsxTransfer(storage).get_generated({"hidden_states_path": str(storage / "r1-0123abcd.safetensors")})
    assert len(generated["token_ids"]) == 4


def test_find_leads_from_a_response_to_its_member(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "cmpl-abc-1")
        publish(sink, tmp_path, "cmpl-abc-0")
    path = vllm_ascend_hsx.find(tmp_path, "cmpl-abc", prompt=1)
    assert path.name == "cmpl-abc-1-0123abcd.safetensors"
    load(path)
    with pytest.raises(FileNotFoundError):
        vllm_ascend_hsx.find(tmp_path, "cmpl-abc", prompt=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_has_members_and_files_in_the_workers_of_a_loader_too(storage: Path, workers: int) -> None:
    dataset = HiddenStatesDataset(storage, verify=True)
    assert len(dataset) == 7
    loader = DataLoader(
        dataset, batch_size=7, collate_fn=collate, num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    (batch,) = list(loader)
    assert [Path(path).name[:2] for path in batch["paths"]] == ["r5", "r0", "r1", "r2", "r3", "r4", "s-"]
    assert batch["lengths"].tolist() == [8, 3, 4, 5, 6, 7, 2]
    for index, (tokens, version) in enumerate([(8, 5), (3, 0), (4, 1), (5, 2), (6, 3), (7, 4), (2, 9)]):
        assert np.array_equal(batch["hidden_states"][index, :tokens].view(torch.uint16).numpy(), make_rows(0, tokens, version))


def test_a_dataset_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shards with members"):
        HiddenStatesDataset(tmp_path)


# The commands


def test_inspect_and_verify_look_at_members(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(files_in(storage)) == 7
    assert examine(storage / "r3-0123abcd.safetensors").verdict == "verified"
    assert inspect.main([str(storage / "r3-0123abcd.safetensors")]) == 0
    assert "5 of the prompt" in capsys.readouterr().out
    assert inspect.main([str(storage)]) == 0
    assert verify.main([str(storage), "--json", "--jobs", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["good"], found["bad"], found["tokens"]) == (7, [], 35)


def test_verify_finds_a_member_that_was_changed(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = Shards(storage)
    member = shards.members()["r2-0123abcd.safetensors"]
    tar = shards.path_of(member.name)
    assert tar is not None
    with open(tar, "r+b") as file:
        os.pwrite(file.fileno(), b"\x01", member.offset + member.size - 1)
    assert verify.main([str(storage), "--json", "--jobs", "1"]) == 1
    (bad,) = json.loads(capsys.readouterr().out.splitlines()[-1])["bad"]
    assert bad["path"].endswith("r2-0123abcd.safetensors")


DAMAGE = {
    "a line is missing": ("jsonl", lambda data: data[: data.rindex(b"{")], "does not end after the last member of its index"),
    "a line names another": ("jsonl", lambda data: data.replace(b'"name":"r0', b'"name":"q0'), "and the tar file has not"),
    "a line too many": ("jsonl", lambda data: data + data.replace(b'"offset":', b'"offset":9'), "and the tar file has not"),
    "another count": ("json", lambda data: data.replace(b'"members": ', b'"members": 1'), "its manifest says members="),
    "no manifest": ("json", lambda data: b"[]", "its manifest cannot be understood"),
    "another checksum": ("jsonl", lambda data: data.replace(b'"request_id":"r0', b'"request_id":"q0'), "its manifest says index_checksum="),
    "bytes after its end": ("tar", lambda data: data[:-4] + b"more", "does not end after the last member of its index"),
    "cut off": ("tar", lambda data: data[:-600], "does not end after the last member of its index"),
    "an empty index": ("jsonl", lambda data: b"", "does not end after the last member of its index"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_compares_manifest_index_and_tar_file(storage: Path, damage: str) -> None:
    assert list(shard_problems(storage)) == []
    stem = sorted(walked(storage), key=lambda stem: "r0" in str(lines_of(storage, stem)))[-1]
    suffix, change, words = DAMAGE[damage]
    path = storage / f"{stem}.{suffix}"
    path.write_bytes(change(path.read_bytes()))
    ((where, problem),) = shard_problems(storage)
    assert where == storage / f"{stem}.tar"
    assert words in problem


@pytest.mark.parametrize(("gone", "words"), [("tar", "it is not there, and its index has lines"), ("jsonl", "it has no *.jsonl")])
def test_verify_misses_a_file_of_a_shard(storage: Path, gone: str, words: str) -> None:
    stem = sorted(walked(storage))[0]
    (storage / f"{stem}.{gone}").unlink()
    assert [problem for _, problem in shard_problems(storage)] == [words]


# A server that died


def leave_as_a_dead_server_would(where: Path) -> tuple[str, list[Path]]:
    """A shard with two members, a request that was being written, and one that was appended but for its line.

    Returns:
        Its stem, and the paths of its members.
    """
    sink = ShardSink(where, FORMAT, FileOptions(), shard_bytes=MIB)
    paths = [publish(sink, where, name, tokens) for name, tokens in (("a", 3), ("b", 5))]
    file = sink.open("never-0123abcd", where / "never-0123abcd.safetensors", 200, may_grow=False)
    file.write(0, make_rows(0, 200))
    shard = sink._shards[sink._session]._shard
    assert shard is not None
    with open(where / f"{shard._stem}.tar", "ab") as tar:
        tar.write(headers(shard.end, "unsaid.safetensors", 50_000, 0o640, 0) + bytes(30_000))
    with open(where / f"{shard._stem}.jsonl", "ab") as index:
        index.write(b'{"name":"unsaid.safetensors","off')
    # What the kernel does when a process dies: descriptors go, and with them the locks.
    for each in sink._files.values():
        assert each._lock is not None
        each._lock.release()
    sink._session._workspace.leave()
    return shard._stem, paths


def test_the_next_server_seals_what_a_dead_one_left_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    stem, paths = leave_as_a_dead_server_would(tmp_path)
    for path, tokens in zip(paths, (3, 5), strict=True):  # before anybody seals it
        assert np.array_equal(rows_of(path, verify=True), make_rows(0, tokens))
    with pytest.raises(HiddenStatesError, match="the server died"):
        load(tmp_path / "never-0123abcd.safetensors", 0)
    before = os.stat(tmp_path / f"{stem}.tar").st_blocks
    FileSink(tmp_path, FORMAT).close()  # any sink does it
    said = json.loads((tmp_path / f"{stem}.json").read_text())
    assert (said["sealed_by"], said["members"], said["tokens"]) == ("recovery", 2, 8)
    assert os.stat(tmp_path / f"{stem}.tar").st_blocks < before, "what was never published is cut off"
    assert [entry.name for entry in walked(tmp_path)[stem]] == [path.name for path in paths]
    assert list(shard_problems(tmp_path)) == []
    assert listing(tmp_path) == ["hsx-" + name for name in (f"{stem[4:]}.json", f"{stem[4:]}.jsonl", f"{stem[4:]}.tar", "shards")]
    for path, tokens in zip(paths, (3, 5), strict=True):
        assert np.array_equal(rows_of(path, verify=True), make_rows(0, tokens))
    state = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
    # As if the server that sealed it had died before the manifest was there.
    (tmp_path / f"{stem}.json").unlink()
    dead_workspace(tmp_path, stem.split("-")[1])
    ShardSink(tmp_path, FORMAT, shard_bytes=MIB).close()
    assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == state


def test_a_server_that_is_killed_while_it_seals_leaves_the_rest_to_the_next_one(tmp_path: Path) -> None:
    """At each of its system calls."""
    template = tmp_path / "template"
    stem, paths = leave_as_a_dead_server_would(template)
    for kill_at in itertools.count(1):
        where = tmp_path / str(kill_at)
        shutil.copytree(template, where)
        child = os.fork()
        if child == 0:
            try:
                _start_and_die(where, kill_at)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        survived = not os.WIFSIGNALED(status)
        assert [rows_of(where / path.name, verify=True).shape[0] for path in paths] == [3, 5], "readers need no sealing"
        ShardSink(where, FORMAT, shard_bytes=MIB).close()
        assert list(shard_problems(where)) == []
        assert [entry.name for entry in walked(where)[stem]] == [path.name for path in paths]
        assert json.loads((where / f"{stem}.json").read_text())["members"] == 2
        assert listing(where) == [f"{stem}.json", f"{stem}.jsonl", f"{stem}.tar", "hsx-shards"]
        if survived:
            break
        shutil.rmtree(where)
    assert kill_at > 40


def _start_and_die(where: Path, kill_at: int) -> None:
    calls = 0

    def checkpoint(call: str) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    patch = pytest.MonkeyPatch()
    trace(patch, checkpoint)
    for module in ("directory", "orphans", "shard_recovery"):
        patch.setattr(f"vllm_ascend_hsx.sinks.{module}.os", Traced(os, checkpoint))
    FileSink(where, FORMAT).close()


def test_shards_of_a_server_that_lives_are_left_alone(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as living:
        publish(living, tmp_path, "a")
        slow = living.open("slow", tmp_path / "slow.safetensors", 5, may_grow=False)
        slow.write(0, make_rows(0, 2))
        before = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
        with ShardSink(tmp_path, FORMAT, shard_bytes=MIB):
            assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == before
        assert is_held(tmp_path / "slow.safetensors.lock")
        slow.write(2, make_rows(2, 5))
        slow.commit(token_ids(5), 5)
        assert np.array_equal(rows_of(slow.path, verify=True), make_rows(0, 5))


def test_a_shard_that_contradicts_its_index_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a loss of power without durability, say: what cannot be understood is for people to look at."""
    stem, _ = leave_as_a_dead_server_would(tmp_path)
    with open(tmp_path / f"{stem}.tar", "r+b") as file:
        os.pwrite(file.fileno(), bytes(4096), 0)
    size = os.stat(tmp_path / f"{stem}.tar").st_size
    for _ in range(2):
        caplog.clear()
        ShardSink(tmp_path, FORMAT, shard_bytes=MIB).close()
        assert f"could not seal {stem}" in caplog.text
        assert os.stat(tmp_path / f"{stem}.tar").st_size == size
    assert member_bytes(tmp_path, "b-0123abcd.safetensors") is not None


@pytest.mark.parametrize("kept", ["jsonl", "both"])
def test_a_shard_that_was_just_being_made_is_removed(tmp_path: Path, kept: str) -> None:
    for suffix in ("tar", "jsonl") if kept == "both" else (kept,):
        (tmp_path / f"hsx-0badcafe-000000.{suffix}").touch()
    dead_workspace(tmp_path)
    FileSink(tmp_path, FORMAT).close()
    assert listing(tmp_path) == []


def test_a_link_in_the_place_of_a_shard_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious" * 100)
    where = tmp_path / "storage"
    where.mkdir()
    for suffix in ("tar", "jsonl"):
        (where / f"hsx-0badcafe-000000.{suffix}").symlink_to(outside)
    dead_workspace(where)
    FileSink(where, FORMAT).close()
    assert outside.read_bytes() == b"precious" * 100
    assert "could not seal" in caplog.text


# The page about them

PAGE_TEXT = (Path(__file__).parents[2] / "docs" / "shards.md").read_text()


def keys(label: str) -> set[str]:
    table = PAGE_TEXT.partition(f"<!-- {label} -->\n")[2].partition("\n\n")[0]
    return {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def code(label: str) -> str:
    (found,) = re.findall(rf"<!-- {label} -->\n```\w+\n(.*?)```", PAGE_TEXT, re.DOTALL)
    return str(found)


def test_the_page_names_the_keys_that_are_written(tmp_path: Path) -> None:
    with ShardSink(tmp_path, replace(FORMAT, quantization="fp8"), shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a")
        sink.open("chosen", tmp_path / "b.safetensors").discard()
    (index,), (manifest,) = tmp_path.glob("*.jsonl"), tmp_path.glob("*.json")
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    assert {key for line in lines for key in line} == keys("index")
    assert lines[1].keys() == {"name", "time_ns", "gone"}
    assert json.loads(manifest.read_text()).keys() == keys("manifest")


@pytest.mark.parametrize("label", ["read", "slice"])
def test_the_code_of_the_page_reads_a_shard_without_this_package(tmp_path: Path, label: str) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "a", 4)
    names: dict[str, Any] = {"shard": next(tmp_path.glob("*.tar")), "index": next(tmp_path.glob("*.jsonl"))}
    exec(code(label), names)
    assert np.array_equal(names["tensors"]["hidden_states"].view(torch.uint16).numpy(), make_rows(0, 4))
    assert np.array_equal(names["tensors"]["token_ids"].numpy(), token_ids(4))


def test_the_command_of_the_page_is_one() -> None:
    program, sub, *arguments = shlex.split(code("serve"))
    assert (program, sub) == ("hsx", "serve")
    options = serve.parse_arguments(arguments)
    config = HsxConfig.parse({"shared_storage_path": str(options.out), **dict(options.option)})
    assert (config.sink, config.shard_bytes) == ("shard", 8 << 30)
