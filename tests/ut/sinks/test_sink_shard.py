"""ShardSink beyond the contract: rollover, hidden files, several servers, reused names."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sink_harness import (
    FORMAT,
    MIB,
    end,
    finite_rows,
    listing,
    member_bytes,
    open_fds,
    open_request,
    publish,
    put,
    rows_of,
    run_threads,
    token_ids,
    walked,
    write_in_flight,
)

from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import load, remove
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.shard import ShardSink

PAGES = RowFormat(
    layer_ids=(1, 2), hidden_size=512, dtype="BF16", model="tiny"
)  # 2,048 bytes a row


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[ShardSink]:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        yield sink


def members(where: Path) -> list[str]:
    """Return the names of the members of all shards, as tarfile sees them."""
    return [entry.name for entries in walked(where).values() for entry in entries]


def manifests(where: Path) -> list[dict[str, int]]:
    return [json.loads(path.read_text()) for path in sorted(where.glob("hsx-*.json"))]


def test_placeholders_are_in_the_member_and_not_in_the_manifest(
    tmp_path: Path,
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        file = open_request(sink, tmp_path, "images", 3)
        file.placeholders = [Placeholder("image", 0, 2)]
        put(file, 3)
    assert "placeholders" not in manifests(tmp_path)[0]
    assert load(file.path).placeholders == [("image", 0, 2)]


@pytest.mark.parametrize("how", ["fail", "discard"])
def test_failed_and_aborted_requests_take_no_space_in_a_shard(tmp_path: Path, how: str) -> None:
    with ShardSink(tmp_path, PAGES, shard_bytes=1 << 30) as sink:
        doomed = open_request(sink, tmp_path, "a", 2000)
        doomed.write(0, np.ones((2000, PAGES.row_bytes), np.uint8))
        end(doomed, how)
        assert [name for name in listing(tmp_path) if not name.startswith(doomed.name)] == []


def test_hidden_files_are_reused_unless_they_are_large(
    sink: ShardSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden() -> list[str]:
        return [name for name in listing(tmp_path) if name.startswith(".")]

    for tokens in (50, 3, 0, 80):  # shorter ones keep nothing of the longer ones
        path = put(
            open_request(sink, tmp_path, f"r{tokens}", tokens * (tokens != 3)),
            tokens,
            version=tokens,
        )
        assert np.array_equal(rows_of(path), finite_rows(0, tokens, tokens))
        assert len(hidden()) == 1
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard._LARGEST_SPARE", 10_000)
    publish(sink, tmp_path, "large", 300)
    assert hidden() == []
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard._SPARES", 2)
    files = [open_request(sink, tmp_path, f"f{i}", 2) for i in range(5)]
    for file in files:
        file.write(0, finite_rows(0, 2))
    for file in files:
        file.commit(token_ids(2), 2)
    assert len(hidden()) == 2


def test_write_that_outlives_its_sink_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_fds()
    sink = ShardSink(tmp_path, FORMAT, shard_bytes=MIB)
    done = publish(sink, tmp_path, "done")
    file = open_request(sink, tmp_path, "slow", 4)
    with write_in_flight(file, monkeypatch):
        file.fail("too slow", close=False)
        sink.close()
        assert manifests(tmp_path) == []
    file.close()
    assert [said["sealed_by"] for said in manifests(tmp_path)] == ["server"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert members(tmp_path) == [done.name]
    assert not open_fds() - before


# Rollover


def test_shard_is_sealed_by_the_request_that_fills_it(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=30_000) as sink:
        for i in range(20):
            publish(sink, tmp_path, f"r{i}", 10)
            sealed = [
                path.with_suffix(".json").exists() for path in sorted(tmp_path.glob("hsx-*.tar"))
            ]
            assert all(sealed[:-1])
        stems = sorted(walked(tmp_path))
        assert [stem[-6:] for stem in stems] == [f"{i:06d}" for i in range(len(stems))]
        assert len(stems) > 3
        assert all(os.stat(tmp_path / f"{stem}.tar").st_size < 30_000 + 3 * PAGE for stem in stems)
    assert len(manifests(tmp_path)) == len(stems)
    assert sum(said["members"] for said in manifests(tmp_path)) == 20


def test_request_larger_than_a_shard_gets_its_own_shard(tmp_path: Path) -> None:
    with ShardSink(tmp_path, PAGES, shard_bytes=MIB) as sink:
        for name in "ab":
            file = open_request(sink, tmp_path, name, 1000)
            file.write(0, np.full((1000, PAGES.row_bytes), ord(name), np.uint8))
            file.commit(token_ids(1000), 1000)
    assert [said["members"] for said in manifests(tmp_path)] == [1, 1]


# Threads and servers


@pytest.mark.parametrize(
    "options", [FileOptions(), FileOptions(io="direct")], ids=["buffered", "direct"]
)
def test_many_threads_write_many_requests(tmp_path: Path, options: FileOptions) -> None:
    threads, each = 8, 25

    def work(rank: int) -> None:
        luck = random.Random(rank)
        for i in range(each):
            tokens = luck.randint(1, 60)
            file = open_request(sink, tmp_path, f"r{rank}.{i}", luck.choice([0, tokens]))
            rows = np.frombuffer(mmap.mmap(-1, tokens * PAGES.row_bytes), np.uint8).reshape(
                tokens, -1
            )
            rows[:] = np.random.default_rng([rank, i]).integers(0, 255, rows.shape, dtype=np.uint8)
            for first in luck.sample(range(0, tokens, 7), len(range(0, tokens, 7))):
                file.write(first, rows[first : first + 7])
            end(file, "discard" if luck.random() < 0.2 else "commit", tokens)

    with ShardSink(tmp_path, PAGES, options, shard_bytes=MIB) as sink:
        run_threads(*(lambda rank=rank: work(rank) for rank in range(threads)))
    found = members(tmp_path)
    assert len(found) > threads * each // 2
    assert len(manifests(tmp_path)) == len(walked(tmp_path)) > 3
    for name in found:
        rank, i = map(int, name[1:].split("-")[0].split("."))
        states = load(tmp_path / name, 0, verify=True)
        tokens = len(states.token_ids)
        rows = np.random.default_rng([rank, i]).integers(
            0, 255, (tokens, PAGES.row_bytes), dtype=np.uint8
        )
        assert np.array_equal(
            states.hidden_states.view(torch.uint8).reshape(tokens, -1).numpy(), rows
        )


def test_two_servers_in_one_directory_write_separate_shards(tmp_path: Path) -> None:
    with (
        ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as one,
        ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as two,
    ):
        for i in range(5):
            publish(one, tmp_path, f"one{i}", version=1)
            publish(two, tmp_path, f"two{i}", version=2)
        assert len(walked(tmp_path)) == 2
        two.close()
        assert [said["members"] for said in manifests(tmp_path)] == [5]
        path = publish(one, tmp_path, "one5", version=1)
    assert sorted(said["members"] for said in manifests(tmp_path)) == [5, 6]
    assert np.array_equal(rows_of(path), finite_rows(0, 3, version=1))


# Names


def test_existing_shard_name_fails_one_request(sink: ShardSink, tmp_path: Path) -> None:
    (tmp_path / f"hsx-{sink.token}-000000.tar").mkdir()
    (tmp_path / f"hsx-{sink.token}-000001.jsonl").symlink_to("/etc/passwd")
    for name in ("b", "c"):
        with pytest.raises(SinkError, match="EEXIST"):
            publish(sink, tmp_path, name)
    publish(sink, tmp_path)
    assert (tmp_path / f"hsx-{sink.token}-000002.tar").exists()
    assert not (tmp_path / f"hsx-{sink.token}-000001.tar").exists()


# Other readers


def test_gnu_tar_and_webdataset_read_a_sealed_shard(tmp_path: Path) -> None:
    import webdataset

    with ShardSink(tmp_path, FORMAT, FileOptions(mode=0o600), shard_bytes=MIB) as sink:
        paths = [publish(sink, tmp_path, f"r{i}", i + 1) for i in range(3)]
    (tar,) = tmp_path.glob("*.tar")
    expected = [member_bytes(tmp_path, path.name) for path in paths]
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        ["tar", "-xf", tar, "-C", out], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert listing(out) == [path.name for path in paths]
    assert [(out / path.name).read_bytes() for path in paths] == expected
    with tarfile.open(tar) as opened:
        assert {info.mode for info in opened} == {0o600}
    samples = list(webdataset.WebDataset(str(tar), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [path.stem for path in paths]
    assert [sample["safetensors"] for sample in samples] == expected


def test_reused_name_goes_to_another_shard_for_webdataset(
    tmp_path: Path,
) -> None:
    import webdataset

    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        for name, tokens in (("a", 1), ("b", 2), ("a", 3), ("c", 4), ("a", 5)):
            remove(tmp_path / f"{name}-0123abcd.safetensors")
            publish(sink, tmp_path, name, tokens)
    tars = sorted(str(path) for path in tmp_path.glob("*.tar"))
    keys = [
        [sample["__key__"] for sample in webdataset.WebDataset(tar, shardshuffle=False)]
        for tar in tars
    ]
    assert [[key.partition("-")[0] for key in each] for each in keys] == [
        ["a", "b"],
        ["a", "c"],
        ["a"],
    ]
    assert sorted(member.tokens for member in Shards(tmp_path).members().values()) == [2, 4, 5]
