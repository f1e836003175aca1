"""acknowledge marks one file as used. Readers are not affected, and later files have no mark."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from shard_harness import member_name, sealed_shards, unsealed_shard
from sink_harness import FORMAT, publish

import vllm_ascend_hsx
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.protocol.acknowledgement import acknowledges
from vllm_ascend_hsx.protocol.files import NotAFileError
from vllm_ascend_hsx.protocol.names import COMPANION_ROOM, NAME_MAX, file_name, path_refusal
from vllm_ascend_hsx.sinks.file import FileSink

A = "a"  # sink_harness.publish appends the digits that vLLM would


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with FileSink(tmp_path, FORMAT) as sink:
        return publish(sink, tmp_path, A)


def marker_of(path: Path) -> Path:
    return path.with_name(path.name + ".acknowledged")


def is_acknowledged(path: Path) -> bool:
    marker = marker_of(path)
    return marker.exists() and acknowledges(marker.read_bytes(), path.stat())


def test_acknowledged_file_is_read_found_and_checked(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, seen = path.parent, []
    for acknowledge in (False, True):
        if acknowledge:
            vllm_ascend_hsx.acknowledge(path)
            assert is_acknowledged(path)
        found = (
            vllm_ascend_hsx.find(directory, "a"),
            [each for each, _ in vllm_ascend_hsx.open_dir(directory)],
        )
        codes = [main([command, str(directory)]) for command in ("verify", "inspect", "clean")]
        seen.append(
            (found, vllm_ascend_hsx.load(path).token_ids.tolist(), codes, capsys.readouterr())
        )
    assert seen[0] == seen[1]
    assert is_acknowledged(path)


def test_second_acknowledgement_changes_nothing(path: Path) -> None:
    vllm_ascend_hsx.acknowledge(path)
    os.utime(marker_of(path), (1, 1))
    vllm_ascend_hsx.acknowledge(path)
    assert marker_of(path).stat().st_mtime == 1
    assert sorted(os.listdir(path.parent)) == sorted(
        [path.name, f"{path.name}.lock", f"{path.name}.acknowledged"]
    )


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"size": 1}', b"\xff" * 100], ids=repr)
def test_marker_of_another_file_is_replaced(path: Path, content: bytes) -> None:
    marker_of(path).write_bytes(content)
    assert not is_acknowledged(path)
    vllm_ascend_hsx.acknowledge(path)
    assert is_acknowledged(path)


def test_later_file_of_the_name_is_not_acknowledged(path: Path) -> None:
    vllm_ascend_hsx.acknowledge(path)
    path.unlink()  # without `remove`
    with FileSink(path.parent, FORMAT) as sink:
        assert publish(sink, path.parent, A) == path
    assert marker_of(path).exists()
    assert not is_acknowledged(path)


def test_moved_file_keeps_its_acknowledgement_and_a_copy_has_none(
    path: Path, tmp_path: Path
) -> None:
    vllm_ascend_hsx.acknowledge(path)
    (tmp_path / "day").mkdir()
    moved = tmp_path / "day" / path.name
    for each in (path, marker_of(path)):
        os.rename(each, moved.with_name(each.name))
    assert is_acknowledged(moved)
    shutil.copyfile(moved, path)
    shutil.copyfile(marker_of(moved), marker_of(path))
    assert not is_acknowledged(path)


def test_remove_removes_the_acknowledgement_too(path: Path) -> None:
    vllm_ascend_hsx.acknowledge(path)
    vllm_ascend_hsx.remove(path, keep_data=True)
    assert is_acknowledged(path)
    vllm_ascend_hsx.remove(path)
    assert os.listdir(path.parent) == []


def test_only_a_complete_file_can_be_acknowledged(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        under_way = sink.open("r", tmp_path / "r.safetensors")
        failed = sink.open("f", tmp_path / "f.safetensors")
        failed.fail("no luck")
        for name in ("r", "f", "nothing"):
            with pytest.raises(FileNotFoundError, match="no complete file to acknowledge"):
                vllm_ascend_hsx.acknowledge(tmp_path / f"{name}.safetensors")
        under_way.discard()
    with pytest.raises(NotAFileError):
        vllm_ascend_hsx.acknowledge(tmp_path)
    assert not list(tmp_path.glob("*.acknowledged"))


def test_only_whole_sealed_shards_are_acknowledged(tmp_path: Path) -> None:
    shards = sealed_shards(tmp_path / "sealed")
    tars = sorted(shards.glob("*.tar"))
    with pytest.raises(
        ValueError, match="is a member of a shard; acknowledge the tar file when all of its members"
    ):
        vllm_ascend_hsx.acknowledge(shards / member_name(0))
    assert not is_acknowledged(tars[0])
    for tar in tars:
        vllm_ascend_hsx.acknowledge(tar)
        assert is_acknowledged(tar)
    assert main(["verify", str(shards)]) == 0
    (open_tar,) = unsealed_shard(tmp_path / "unsealed").glob("*.tar")
    with pytest.raises(ValueError, match="is not sealed"):
        vllm_ascend_hsx.acknowledge(open_tar)


def test_failed_marker_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(os.listdir(path.parent))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="No space left"):
            vllm_ascend_hsx.acknowledge(path)
    assert sorted(os.listdir(path.parent)) == before


def test_longest_name_leaves_space_for_the_marker(tmp_path: Path) -> None:
    name = file_name("x" * 400)
    assert len(name) == NAME_MAX - COMPANION_ROOM
    (tmp_path / name).write_bytes(b"x")
    vllm_ascend_hsx.acknowledge(tmp_path / name)
    assert is_acknowledged(tmp_path / name)


def test_folder_named_like_a_marker_is_refused() -> None:
    assert path_refusal("a.safetensors.acknowledged/b.safetensors") is not None
