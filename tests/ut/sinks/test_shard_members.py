"""A member of a shard is, byte for byte, the file that FileSink would publish."""

from __future__ import annotations

import itertools
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st
from sink_harness import FORMAT, MIB, end, finite_rows, lines_of, member_bytes, publish, walked
from test_sink_shard import manifests

from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.shard_index import Member
from vllm_ascend_hsx.protocol.tar import BLOCK, headers, is_headed
from vllm_ascend_hsx.reader.load import load, remove
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks.base import NAME_USED, SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


@settings(max_examples=depth(300))
@given(
    name=st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=300).filter(
        lambda name: not name.startswith("/") and not name.endswith("/")
    ),
    size=st.integers(0, 3 * 8**11),
    start=st.integers(0, 40).map(lambda blocks: blocks * BLOCK),
)
def test_headers_fill_a_page_and_are_valid_for_tarfile(name: str, size: int, start: int) -> None:
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


@settings(max_examples=depth(120))
@given(st.randoms(use_true_random=False))
def test_members_equal_the_files_of_the_file_sink(
    luck: random.Random,
) -> None:
    """Requests run concurrently, shards are small, rows are removed, and rows may be fp8."""
    with tempfile.TemporaryDirectory() as directory:
        shard_dir, file_dir = Path(directory, "shards"), Path(directory, "files")
        options = FileOptions(
            checksum=luck.choice(["crc32c", "none"]),
            durability=luck.choice(["none", "none", "fdatasync"]),
        )
        row_format = replace(FORMAT, quantization=luck.choice(["none", "none", "fp8"]))
        names = [
            luck.choice(["", "", "x/", "folder/" + "y" * 150 + "/"]) + f"r{i}.safetensors"
            for i in range(luck.randint(1, 6))
        ]
        with (
            ShardSink(
                shard_dir, row_format, options, shard_bytes=luck.choice([1, 20_000, 60_000])
            ) as shards,
            FileSink(file_dir, row_format, options) as files,
        ):
            running: list[Iterator[None]] = []
            for serial in range(luck.randint(1, 14)):
                name = (
                    names[serial % len(names)] if luck.random() < 0.7 else f"n{serial}.safetensors"
                )
                running.append(
                    life(luck, [(shards, shard_dir), (files, file_dir)], f"{serial}", name)
                )
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


def life(
    luck: random.Random, sinks: list[tuple[ShardSink | FileSink, Path]], request_id: str, name: str
) -> Iterator[None]:
    """Serve a request with both sinks, one step at a time."""
    tokens = luck.choice([0, 1, luck.randint(2, 30), luck.randint(2, 600)])
    grows = luck.random() < 0.4
    expected = luck.randint(0, tokens) if grows else tokens + luck.choice([0, 0, 1, 90])
    try:
        opened = [sink.open(request_id, where / name, expected) for sink, where in sinks]
    except SinkError as error:
        if error.reason == NAME_USED:
            for _, where in sinks:
                remove(where / name)
        else:
            assert "another request is writing" in error.reason
        return
    cuts = sorted({0, tokens, *(luck.randint(0, tokens) for _ in range(luck.randrange(4)))})
    spans = [(first, last, 1) for first, last in itertools.pairwise(cuts)]
    luck.shuffle(spans)
    if tokens and luck.random() < 0.4:  # computed twice, in different spans
        first = luck.randrange(tokens)
        spans.insert(0, (first, tokens + luck.randrange(3), 7))
    if luck.random() < 0.3:
        spans.append((tokens, tokens + 2, 3))  # after the last token
    for first, last, version in spans:
        for file in opened:
            file.write(first, finite_rows(first, last, version))
        yield
    how = luck.choice(["commit"] * 5 + ["fail", "discard"])
    for file in opened:
        end(file, how, tokens)


def check_same(shard_dir: Path, file_dir: Path, *, sealed: bool) -> None:
    expected = {
        path.relative_to(file_dir).as_posix(): path.read_bytes()
        for path in file_dir.rglob("*.safetensors")
    }
    stems = walked(shard_dir)
    assert list(Shards(shard_dir).members()) == sorted(expected)
    for name, data in expected.items():
        assert member_bytes(shard_dir, name) == data
        assert not (shard_dir / name).exists()
    companions = {
        d: {p.relative_to(d).as_posix() for p in d.rglob("*.error")} for d in (shard_dir, file_dir)
    }
    assert companions[shard_dir] == companions[file_dir]
    assert {p.relative_to(shard_dir).as_posix() for p in shard_dir.rglob("*.lock")} == {
        name.removesuffix(".error") + ".lock" for name in companions[shard_dir]
    }
    if sealed:
        assert [path.stem for path in sorted(shard_dir.glob("*.json"))] == sorted(stems)
        for said, stem in zip(manifests(shard_dir), sorted(stems), strict=True):
            check_manifest(shard_dir, stem, said)
        assert not [name for name in os.listdir(shard_dir) if name.startswith(".")]


def check_manifest(where: Path, stem: str, said: dict[str, int]) -> None:
    lines = lines_of(where, stem)
    published = [line for line in lines if isinstance(line, Member)]
    digest = Digest()
    digest.update((where / f"{stem}.jsonl").read_bytes())
    assert {
        key: said[key] for key in ("members", "tokens", "bytes", "index_lines", "index_checksum")
    } == {
        "members": len(published),
        "tokens": sum(line.tokens for line in published),
        "bytes": sum(line.size for line in published),
        "index_lines": len(lines),
        "index_checksum": digest.hexdigest(),
    }
    assert said["sealed_by"] == "server"
    if published:
        assert (said["model"], said["layer_ids"], said["dtype"], said["row_shape"]) == (
            "tiny",
            [2, 0, 3],
            "BF16",
            [3, 8],
        )


def test_index_line_describes_its_member_and_unique_names_add_no_line(
    tmp_path: Path,
) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as sink:
        path = publish(sink, tmp_path, "a", 5)
    ((stem, (entry,)),) = walked(tmp_path).items()
    (line,) = [json.loads(text) for text in (tmp_path / f"{stem}.jsonl").read_text().splitlines()]
    assert line.pop("time_ns") > 1.7e18
    assert line == {
        "name": path.name, "offset": PAGE, "size": entry.size, "tokens": 5, "request_id": "a-0123abcd",
        "checksum": load(path).metadata["checksum"],
    }  # fmt: skip
