"""The next server seals shards of a dead server, and does not change invalid shards."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from depth import is_long
from hostile import change, snapshot
from sink_harness import (
    FORMAT,
    MIB,
    Entry,
    dead_workspace,
    finite_rows,
    is_held,
    listing,
    publish,
    put,
    rows_of,
    token_ids,
    walked,
)
from tracing import trace

from vllm_ascend_hsx.protocol import shard_index
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, decode, encode
from vllm_ascend_hsx.protocol.tar import BLOCK, END, headers
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.reader.shard_check import shard_problems
from vllm_ascend_hsx.sinks import shard_file
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


def leave_as_a_dead_server_would(where: Path) -> tuple[str, list[Path]]:
    """Leave two members, an open request, and a third member without an index line.

    Returns the stem of the shard and the paths of the two members.
    """
    sink = ShardSink(where, FORMAT, shard_bytes=MIB)
    paths = [publish(sink, where, name, tokens) for name, tokens in (("a", 3), ("b", 5))]
    file = sink.open("never-0123abcd", where / "never-0123abcd.safetensors", 200)
    file.write(0, finite_rows(0, 200))
    shard = sink._shards[sink._session]._shard
    assert shard is not None
    with open(where / f"{shard._stem}.tar", "ab") as tar:
        tar.write(headers(shard.end, "unsaid.safetensors", 50_000, 0o640, 0) + bytes(30_000))
    with open(where / f"{shard._stem}.jsonl", "ab") as index:
        index.write(b'{"name":"unsaid.safetensors","off')
    # Like the kernel after the death of a process: close descriptors, and thereby release locks.
    for each in sink._files.values():
        assert each.lock is not None
        each.lock.release()
    sink._session._workspace.leave()
    return shard._stem, paths


def test_next_server_seals_shards_of_a_dead_server_once(
    tmp_path: Path,
) -> None:
    stem, paths = leave_as_a_dead_server_would(tmp_path)
    for path, tokens in zip(paths, (3, 5), strict=True):  # before anybody seals it
        assert np.array_equal(rows_of(path), finite_rows(0, tokens))
    with pytest.raises(HiddenStatesError, match="the server died"):
        load(tmp_path / "never-0123abcd.safetensors", 0)
    before = os.stat(tmp_path / f"{stem}.tar").st_blocks
    FileSink(tmp_path, FORMAT).close()  # any sink does it
    said = json.loads((tmp_path / f"{stem}.json").read_text())
    assert (said["sealed_by"], said["members"], said["tokens"]) == ("recovery", 2, 8)
    assert os.stat(tmp_path / f"{stem}.tar").st_blocks < before, (
        "what was never published is cut off"
    )
    assert [entry.name for entry in walked(tmp_path)[stem]] == [path.name for path in paths]
    assert list(shard_problems(tmp_path)) == []
    assert listing(tmp_path) == [
        "hsx-" + name
        for name in (f"{stem[4:]}.json", f"{stem[4:]}.jsonl", f"{stem[4:]}.tar", "shards")
    ]
    for path, tokens in zip(paths, (3, 5), strict=True):
        assert np.array_equal(rows_of(path), finite_rows(0, tokens))
    state = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
    # As if the sealing server had died before it wrote the manifest.
    (tmp_path / f"{stem}.json").unlink()
    dead_workspace(tmp_path, stem.split("-")[1])
    ShardSink(tmp_path, FORMAT, shard_bytes=MIB).close()
    assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == state


@pytest.mark.usefixtures("no_wait_for_the_disk")
def test_next_server_completes_an_interrupted_sealing(
    tmp_path: Path,
) -> None:
    """Kills at each system call; without --long at each third."""
    template = tmp_path / "template"
    stem, paths = leave_as_a_dead_server_would(template)
    for kill_at in itertools.count(1, 1 if is_long() else 3):
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
        assert [rows_of(where / path.name).shape[0] for path in paths] == [3, 5], (
            "readers need no sealing"
        )
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

    trace(pytest.MonkeyPatch(), checkpoint, start=True)
    FileSink(where, FORMAT).close()


def test_shards_of_a_live_server_are_not_sealed(tmp_path: Path) -> None:
    with ShardSink(tmp_path, FORMAT, shard_bytes=MIB) as living:
        publish(living, tmp_path, "a")
        slow = living.open("slow", tmp_path / "slow.safetensors", 5)
        slow.write(0, finite_rows(0, 2))
        before = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
        with ShardSink(tmp_path, FORMAT, shard_bytes=MIB):
            assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == before
        assert is_held(tmp_path / "slow.safetensors.lock")
        slow.write(2, finite_rows(2, 5))
        slow.commit(token_ids(5), 5)
        assert np.array_equal(rows_of(slow.path), finite_rows(0, 5))


@pytest.mark.parametrize("kept", ["jsonl", "both"])
def test_incompletely_created_shard_is_removed(tmp_path: Path, kept: str) -> None:
    for suffix in ("tar", "jsonl") if kept == "both" else (kept,):
        (tmp_path / f"hsx-0badcafe-000000.{suffix}").touch()
    dead_workspace(tmp_path)
    FileSink(tmp_path, FORMAT).close()
    assert listing(tmp_path) == []


def test_link_in_place_of_a_shard_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


# Tar files that contradict their indexes


def flip_a_header(tar: Path, entry: Entry) -> None:
    change(tar, entry.offset - 300, lambda data: bytes([data[0] ^ 1]))


def lose_the_first_page(tar: Path, entry: Entry) -> None:
    """Happens after a loss of power without durability."""
    change(tar, 0, lambda data: bytes(len(data)), PAGE)


def flip_the_comment(tar: Path, entry: Entry) -> None:
    change(tar, entry.offset - 600, lambda data: bytes([data[0] ^ 1]))


def claim_another_size(tar: Path, entry: Entry) -> None:
    """Of the member, in a header that is valid for tar readers."""

    def claim(block: bytes) -> bytes:
        block = (
            block[:124] + b"%011o\0" % (entry.size + 4096) + block[136:148] + b" " * 8 + block[156:]
        )
        return block[:148] + b"%06o\0 " % sum(block) + block[156:]

    change(tar, entry.offset - BLOCK, claim, BLOCK)


def end_within_the_last_member(tar: Path, entry: Entry) -> None:
    os.truncate(tar, tar.stat().st_size - 700)


def flip_a_line(tar: Path, entry: Entry) -> None:
    index = tar.with_suffix(".jsonl")
    change(index, index.read_bytes().index(b'"offset":') - 1, lambda data: bytes([data[0] ^ 1]))


def change_lines(tar: Path, how: Callable[[list[bytes]], list[bytes]]) -> None:
    index = tar.with_suffix(".jsonl")
    index.write_bytes(b"".join(how(index.read_bytes().splitlines(keepends=True))))


def lose_a_line(tar: Path, entry: Entry) -> None:
    change_lines(tar, lambda lines: lines[2:])


def lose_all_lines(tar: Path, entry: Entry) -> None:
    change_lines(tar, lambda lines: [])


def lose_the_last_two_members(tar: Path, entry: Entry) -> None:
    change_lines(tar, lambda lines: lines[:-4])  # and what hides earlier ones


def zero_the_last_line(tar: Path, entry: Entry) -> None:
    change_lines(tar, lambda lines: [*lines[:-1], bytes(len(lines[-1]))])


def name_what_is_far_away(tar: Path, entry: Entry) -> None:
    with open(tar.with_suffix(".jsonl"), "ab") as index:
        index.write(encode(Member("far.safetensors", 2**61, 2**61, 1, "", "", 2**61)))


def lose_the_index(tar: Path, entry: Entry) -> None:
    tar.with_suffix(".jsonl").unlink()


DAMAGE = (
    flip_a_header, lose_the_first_page, flip_the_comment, claim_another_size, end_within_the_last_member, flip_a_line, lose_a_line,
    lose_all_lines, lose_the_last_two_members, zero_the_last_line, name_what_is_far_away, lose_the_index,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_shard_that_contradicts_its_index_is_left_unchanged(
    tmp_path: Path, damage: Callable[[Path, Entry], None], caplog: pytest.LogCaptureFixture
) -> None:
    tar = leave_dead(tmp_path, [f"hs_{i}" for i in range(6)])
    damage(tar, walked(tmp_path)[tar.stem][2])
    before = snapshot(tmp_path)
    assert list(shard_problems(tmp_path))
    for _ in range(2):
        caplog.clear()
        FileSink(tmp_path, FORMAT).close()
        assert {**snapshot(tmp_path), ".": before["."]} == before
        assert f"could not seal {tar.stem}" in caplog.text
        assert "removed" not in caplog.text


def test_server_starts_with_an_index_of_any_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tar = leave_dead(tmp_path, ["hs_0"])
    os.truncate(tar.with_suffix(".jsonl"), 1 << 40)
    FileSink(tmp_path, FORMAT).close()
    assert f"could not seal {tar.stem}" in caplog.text
    assert "1099511627776 bytes, more than any server writes" in caplog.text
    assert tar.exists()
    (problem,) = shard_problems(tmp_path)
    assert "more than any server writes" in str(problem)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "hs_0.safetensors", timeout=1)


JUNK = {
    "no line": b"\n",
    "no name": b'{"name":3}\n',
    "a member that the tar file lacks": encode(
        Member("far.safetensors", 2**40, 2**40, 1, "", "", 2**60)
    ),
}


@pytest.mark.parametrize("label", JUNK)
def test_junk_index_is_read_up_to_its_first_bad_line(
    tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tar = leave_dead(tmp_path, ["hs_0"])
    with open(tar.with_suffix(".jsonl"), "ab") as index:
        index.write(JUNK[label] * 1000)
    decoded: list[bytes] = []
    monkeypatch.setattr(shard_index, "decode", lambda line: (decoded.append(line), decode(line))[1])
    monkeypatch.setattr(
        shard_file, "decode", lambda line: pytest.fail("what is not sealed was counted")
    )
    FileSink(tmp_path, FORMAT).close()
    assert f"could not seal {tar.stem}" in caplog.text
    assert sum(line == JUNK[label][:-1] for line in decoded) == 1


def test_recovery_skips_an_index_larger_than_any_server_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tar = leave_dead(tmp_path, ["hs_0"])
    index = tar.with_suffix(".jsonl")
    with index.open("ab") as file:
        file.write(encode(Tombstone("x.safetensors", tar.stem, 1)) * 100)
    monkeypatch.setattr(shard_file, "INDEX_LARGEST", index.stat().st_size - 1)
    monkeypatch.setattr(shard_file, "end_of_members", lambda *_: pytest.fail("it was read"))
    FileSink(tmp_path, FORMAT).close()
    assert f"its index has {index.stat().st_size} bytes, more than any server writes" in caplog.text


@pytest.mark.parametrize("left", [1, 600, 5000])
def test_recovery_truncates_after_the_last_member(tmp_path: Path, left: int) -> None:
    tar = leave_dead(tmp_path, ["hs_0", "hs_1"])
    whole = tar.read_bytes()
    tar.write_bytes(whole + (whole * 3)[:left])
    with open(tar.with_suffix(".jsonl"), "ab") as index:
        index.write(b"torn")
    FileSink(tmp_path, FORMAT).close()
    assert tar.read_bytes() == whole + END
    assert list(shard_problems(tmp_path)) == []


def leave_dead(storage: Path, ids: list[str]) -> Path:
    """Return the tar file of an unsealed shard of these requests."""
    with ShardSink(storage, FORMAT, shard_bytes=MIB) as sink:
        for number, chosen in enumerate(ids):
            put(sink.open(f"x{number}", storage / f"{chosen}.safetensors", 3), 3, number)
    tar = next(storage.glob("hsx-*.tar"))
    tar.with_suffix(".json").unlink()
    os.truncate(tar, tar.stat().st_size - len(END))
    dead_workspace(storage, tar.stem.split("-")[1])
    return tar
