"""Shards read with `load`, `find`, `open_dir`, datasets and the commands."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_harness import sealed_shards
from sink_harness import (
    FORMAT,
    MIB,
    bits,
    finite_rows,
    lines_of,
    publish,
    put,
    rows_of,
    token_ids,
    walked,
)
from torch.utils.data import DataLoader

import vllm_ascend_hsx
from vllm_ascend_hsx import HiddenStatesDataset, collate, load, open_dir
from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.integrations.speculators import HsxTransfer
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, decode, encode
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import HiddenStatesError, remove
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return sealed_shards(tmp_path / "storage")


# load


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_load_accepts_paths_of_files_and_members(storage: Path, mmap: bool, verify: bool) -> None:
    for i in range(5):
        states = load(storage / f"r{i}-0123abcd.safetensors", mmap=mmap, verify=verify)
        assert np.array_equal(bits(states.hidden_states), finite_rows(0, 3 + i, i))
        assert np.array_equal(states.token_ids.numpy(), token_ids(3 + i))
        assert (states.layer_ids, states.num_prompt_tokens) == ([2, 0, 3], 2 + i)
    assert np.array_equal(
        rows_of(storage / "folder/in/r5-0123abcd.safetensors", mmap=mmap), finite_rows(0, 8, 5)
    )
    assert np.array_equal(
        rows_of(storage / "s-0123abcd.safetensors", mmap=mmap), finite_rows(0, 2, 9)
    )
    with pytest.raises(FileNotFoundError, match="no hidden states, lock or error"):
        load(storage / "never.safetensors", 0)


def test_changes_to_mapped_tensors_stay_private(storage: Path) -> None:
    path = storage / "r1-0123abcd.safetensors"
    load(path, mmap=True).hidden_states.zero_()
    assert np.array_equal(rows_of(path, verify=True), finite_rows(0, 4, 1))


def test_changed_member_is_found_by_its_checksum(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Shards(storage).find("r2-0123abcd.safetensors")
    assert found is not None
    tar, member = found
    with open(tar, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00\xff", member.offset + member.size - 50)
    load(storage / member.name)
    with pytest.raises(HiddenStatesError, match="changed since it was written"):
        load(storage / member.name, verify=True)
    assert verify.main([str(storage), "--json", "--jobs", "1"]) == 1
    (bad,) = json.loads(capsys.readouterr().out.splitlines()[-1])["bad"]
    assert bad["path"].endswith(member.name)
    os.truncate(tar, member.offset + 100)
    with pytest.raises(HiddenStatesError, match="it has .* of .* bytes"):
        load(storage / member.name)


def test_new_members_are_found_by_reading_only_new_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(tmp_path)
    assert shards.members() == {}
    read: list[int] = []
    real = os.pread
    with ShardSink(tmp_path, FORMAT, shard_bytes=30_000) as sink:
        monkeypatch.setattr(
            os, "pread", lambda fd, size, offset: (read.append(offset), real(fd, size, offset))[1]
        )
        for i in range(30):
            path = publish(sink, tmp_path, f"r{i}", 5)
            read.clear()
            assert shards.find(path.name) is not None
            assert len(read) <= 2, (
                "the index that grew, or the new one and the end of the one before"
            )
            assert len(shards.members()) == i + 1
        assert len(walked(tmp_path)) > 3
    assert len(shards.members()) == 30


def test_torn_and_invalid_lines_are_skipped(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "a")
    (index,) = tmp_path.glob("*.jsonl")
    good = index.read_bytes()
    with open(index, "ab") as file:
        file.write(
            b"not a "
            b'line\n[1]\n{"name":3,"time_ns":1}\n{"name":"x","time_ns":1,"offset":-4,"size":1,"tokens":1}\n'
        )
        file.write(good.replace(b'"a-', b'"b-')[:40])
    shards = Shards(tmp_path)
    assert list(shards.members()) == [path.name]
    with open(index, "ab") as file:
        file.write(good.replace(b'"a-', b'"b-')[40:])
    # The manifest says that the index is complete: only a new object reads it again.
    assert list(Shards(tmp_path).members()) == [path.name, path.name.replace("a-", "b-")]


def test_removal_hides_its_member_in_any_order_of_lines(
    tmp_path: Path,
) -> None:
    name, stems = "x.safetensors", [f"hsx-0000000{number}-000000" for number in range(3)]
    members = [
        Member(name, 512 * (number + 1), 1, 1, "", "", time)
        for number, time in enumerate((10, 30, 20))
    ]
    shards = Shards(tmp_path)

    def found() -> int | None:
        for each in (shards, Shards(tmp_path)):
            place = each.find(name)
        return None if place is None else place[1].offset

    (tmp_path / f"{stems[0]}.jsonl").write_bytes(encode(members[0]))
    assert found() == 512
    removed = tmp_path / "hsx-removed.jsonl"
    removed.write_bytes(encode(Tombstone(name, stems[0], 512)))
    assert found() is None
    (tmp_path / f"{stems[1]}.jsonl").write_bytes(encode(members[1]))
    (tmp_path / f"{stems[2]}.jsonl").write_bytes(encode(members[2]))
    assert found() == 1024, "the newest"
    for stem, offset, left in (
        (stems[0], 1024, 1024),
        (stems[1], 512, 1024),
        (stems[1], 1024, 1536),
        (stems[2], 1536, None),
    ):
        with removed.open("ab") as file:
            file.write(encode(Tombstone(name, stem, offset)))
        assert found() == left
    assert Shards(tmp_path).members() == shards.members() == {}


@pytest.mark.parametrize(
    "changes",
    [{"stem": "../x"}, {"stem": 3}, {"offset": -1}, {"gone": False}, {"name": "../x.safetensors"}],
)
def test_removal_without_a_member_is_invalid(changes: dict[str, Any]) -> None:
    values = {"name": "x.safetensors", "stem": "hsx-00000001-000000", "offset": 1, "gone": True}
    assert decode(json.dumps(values).encode()) == Tombstone(
        "x.safetensors", "hsx-00000001-000000", 1
    )
    assert decode(json.dumps(values | changes).encode()) is None


def test_members_and_removals_are_not_accepted_in_each_others_lists(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stem = "hsx-00000001-000000"
    removal = encode(Tombstone("x.safetensors", stem, 1))
    (tmp_path / f"{stem}.jsonl").write_bytes(
        encode(Member("x.safetensors", 1, 1, 1, "", "", 1)) + removal
    )
    (tmp_path / "hsx-removed.jsonl").write_bytes(
        encode(Member("y.safetensors", 1, 1, 1, "", "", 1))
    )
    assert list(Shards(tmp_path).members()) == ["x.safetensors"]
    assert caplog.text.count("1 lines from byte 0 on are invalid") == 2


def test_moved_and_removed_shards_are_noticed(storage: Path, tmp_path: Path) -> None:
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


def test_directory_of_files_is_not_searched_for_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.safetensors").touch()
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("all names were read"))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing.safetensors", 0)


# The rest of the reader


def test_open_dir_gives_files_and_members(storage: Path) -> None:
    found = {
        path.relative_to(storage).as_posix(): len(states.token_ids)
        for path, states in open_dir(storage, mmap=True)
    }
    assert found == {
        **{f"r{i}-0123abcd.safetensors": 3 + i for i in range(5)},
        "folder/in/r5-0123abcd.safetensors": 8,
        "s-0123abcd.safetensors": 2,
    }
    assert list(found) == sorted(found)


def test_files_and_shards_in_folders_are_read(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileSink(storage, FORMAT) as files:
        publish(files, storage, "folder/in/f", 3)
    with ShardSink(storage / "run", FORMAT, shard_bytes=20_000) as sink:
        publish(sink, storage / "run", "m", 4)
    names = [
        f"{name}-0123abcd.safetensors"
        for name in ("folder/in/f", "folder/in/r5", "r0", "r1", "r2", "r3", "r4", "run/m", "s")
    ]
    assert [path.relative_to(storage).as_posix() for path, _ in open_dir(storage)] == names
    assert [
        path.relative_to(storage).as_posix() for path in HiddenStatesDataset(storage).paths
    ] == names
    assert [path.relative_to(storage).as_posix() for path in files_in(storage)] == names
    (tar,) = (storage / "run").glob("*.tar")
    os.truncate(tar, tar.stat().st_size - 1)
    assert verify.main([str(storage), "--jobs", "1"]) == 1
    assert f"bad: {tar}: " in capsys.readouterr().out


def test_folder_has_the_members_of_the_server_above(storage: Path) -> None:
    folder = storage / "folder"
    with (
        ShardSink(storage, FORMAT, shard_bytes=20_000) as shards,
        FileSink(storage, FORMAT) as files,
    ):
        publish(shards, storage, "folderless/m", 4)
        publish(shards, storage, "folder/m", 4)
        publish(files, storage, "folder/f", 3)
        names = [f"{name}-0123abcd.safetensors" for name in ("f", "in/r5", "m")]
        for listed in (
            [path for path, _ in open_dir(folder)],
            HiddenStatesDataset(folder).paths,
            files_in(folder),
        ):
            assert [path.relative_to(folder).as_posix() for path in listed] == names
    assert [path.name for path, _ in open_dir(folder / "in")] == ["r5-0123abcd.safetensors"]
    assert verify.main([str(folder), "--jobs", "1"]) == 0
    path = storage / "folder/in/r5-0123abcd.safetensors"
    found = Shards(storage).find("folder/in/r5-0123abcd.safetensors")
    assert found is not None
    tar, line = found
    with tar.open("r+b") as file:
        file.seek(line.offset + line.size - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    assert (
        verify.main([str(folder), "--jobs", "1"]),
        verify.main([str(storage), "--jobs", "1"]),
    ) == (1, 1)
    remove(path)
    assert not list(open_dir(folder / "in"))


def test_unreadable_folder_is_an_error_of_open_dir_and_datasets(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    (storage / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        list(open_dir(storage))
    with pytest.raises(PermissionError):
        HiddenStatesDataset(storage)


def test_removed_member_is_hidden_and_other_members_stay(storage: Path) -> None:
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
    assert not list(shard_problems(storage)), "the bytes of a removed member stay"
    HsxTransfer(storage).delete(str(other))
    assert elsewhere.find(other.name) is None
    remove(path)  # again, and a member that never existed
    remove(storage / "never-there.safetensors")
    assert len((storage / "hsx-removed.jsonl").read_text().splitlines()) == 2


def test_speculators_backend_reads_members(storage: Path, tmp_path: Path) -> None:
    with ShardSink(tmp_path / "cache", FORMAT, shard_bytes=MIB) as sink:
        put(sink.open("x", tmp_path / "cache" / "hs_7.safetensors", 4), 4)
    transfer = HsxTransfer(tmp_path / "cache")
    assert transfer.get_cached(6) is None
    sample = transfer.get_cached(7)
    assert sample is not None
    assert np.array_equal(bits(sample["hidden_states"]), finite_rows(0, 4))
    generated = HsxTransfer(storage).get_generated(
        {"hidden_states_path": str(storage / "r1-0123abcd.safetensors")}
    )
    assert len(generated["token_ids"]) == 4


def test_find_returns_the_member_of_a_response(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        publish(sink, tmp_path, "cmpl-abc-1")
        publish(sink, tmp_path, "cmpl-abc-0")
    path = vllm_ascend_hsx.find(tmp_path, "cmpl-abc", prompt=1)
    assert path.name == "cmpl-abc-1-0123abcd.safetensors"
    load(path)
    with pytest.raises(FileNotFoundError):
        vllm_ascend_hsx.find(tmp_path, "cmpl-abc", prompt=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_has_members_and_files_in_loader_workers(storage: Path, workers: int) -> None:
    dataset = HiddenStatesDataset(storage, verify=True)
    assert len(dataset) == 7
    context = "spawn" if workers else None
    (batch,) = DataLoader(
        dataset,
        batch_size=7,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context=context,
    )
    assert [Path(path).name[:2] for path in batch["paths"]] == [
        "r5",
        "r0",
        "r1",
        "r2",
        "r3",
        "r4",
        "s-",
    ]
    assert batch["lengths"].tolist() == [8, 3, 4, 5, 6, 7, 2]
    for index, (tokens, version) in enumerate(
        [(8, 5), (3, 0), (4, 1), (5, 2), (6, 3), (7, 4), (2, 9)]
    ):
        assert np.array_equal(
            bits(batch["hidden_states"][index, :tokens]), finite_rows(0, tokens, version)
        )


def test_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shards with members"):
        HiddenStatesDataset(tmp_path)


# The commands


def test_inspect_and_verify_read_members(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(files_in(storage)) == 7
    assert examine(storage / "r3-0123abcd.safetensors").verdict == "verified"
    assert inspect.main([str(storage / "r3-0123abcd.safetensors")]) == 0
    assert "5 of the prompt" in capsys.readouterr().out
    assert inspect.main([str(storage)]) == 0
    assert verify.main([str(storage), "--json", "--jobs", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["good"], found["bad"], found["tokens"]) == (7, [], 35)


DAMAGE = {
    "a line is missing": (
        "jsonl",
        lambda data: data[: data.rindex(b"{")],
        "does not end after the last member of its index",
    ),
    "a line names another": (
        "jsonl",
        lambda data: data.replace(b'"name":"r0', b'"name":"q0'),
        "but the tar file does not",
    ),
    "a line too many": (
        "jsonl",
        lambda data: data + data.replace(b'"offset":', b'"offset":9'),
        "but the tar file does not",
    ),
    "another count": (
        "json",
        lambda data: data.replace(b'"members": ', b'"members": 1'),
        "its manifest states members=",
    ),
    "no manifest": ("json", lambda data: b"[]", "its manifest is invalid"),
    "another checksum": (
        "jsonl",
        lambda data: data.replace(b'"request_id":"r0', b'"request_id":"q0'),
        "its manifest states index_checksum=",
    ),
    "bytes after the end": (
        "tar",
        lambda data: data + b"more",
        "does not end after the last member of its index",
    ),
    "zeros after the end": (
        "tar",
        lambda data: data + bytes(1024),
        "does not end after the last member of its index",
    ),
    "bytes after the last member": (
        "tar",
        lambda data: data[:-1025] + b"!" + data[-1024:],
        "that belong to no member, at byte",
    ),
    "bytes in the end": (
        "tar",
        lambda data: data[:-4] + b"more",
        "does not end after the last member of its index",
    ),
    "cut off": ("tar", lambda data: data[:-600], "does not end after the last member of its index"),
    "an empty index": (
        "jsonl",
        lambda data: b"",
        "does not end after the last member of its index",
    ),
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


@pytest.mark.parametrize(
    ("gone", "words"),
    [("tar", "it is missing, but its index has lines"), ("jsonl", "it has no *.jsonl")],
)
def test_verify_reports_a_missing_file_of_a_shard(storage: Path, gone: str, words: str) -> None:
    stem = sorted(walked(storage))[0]
    (storage / f"{stem}.{gone}").unlink()
    assert [problem for _, problem in shard_problems(storage)] == [words]
