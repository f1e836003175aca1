"""Directories: their complete files one at a time, and files that consumers remove."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sink_harness import listing
from test_reader_load import assert_rows, committed, written

from vllm_ascend_hsx.reader.load import HiddenStatesError, open_dir, remove
from vllm_ascend_hsx.sinks.file import FileSink


def test_open_dir_yields_complete_files_one_at_a_time(sink: FileSink, tmp_path: Path) -> None:
    for number in range(4):
        committed(sink, tmp_path, f"r{number}", tokens=number + 1)
    sink.open("failed", tmp_path / "failed.safetensors").fail("x")
    open_one = written(sink, tmp_path, "open")
    (tmp_path / "notes.txt").write_text("not ours")
    opened = open_dir(tmp_path)
    path, states = next(opened)
    assert path == tmp_path / "r0.safetensors"
    assert_rows(states, 1)
    remove(tmp_path / "r1.safetensors")
    assert [path.name for path, _ in opened] == ["r2.safetensors", "r3.safetensors"]
    open_one.discard()


@pytest.mark.parametrize("name", ["missing", "dangling"])
def test_missing_directory_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        list(open_dir(name))


def test_open_file_of_another_producer_is_skipped(tmp_path: Path) -> None:
    save_file(
        {"hidden_states": torch.ones(1, 1, 4), "token_ids": torch.arange(1)},
        tmp_path / "f.safetensors",
    )
    with open(tmp_path / "f.safetensors.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert list(open_dir(tmp_path)) == []
    assert len(list(open_dir(tmp_path))) == 1


def test_broken_file_in_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"12345")
    with pytest.raises(HiddenStatesError, match=r"broken\.safetensors"):
        list(open_dir(tmp_path))


@pytest.mark.parametrize(("keep_data", "left"), [(False, []), (True, ["cmpl-1.safetensors"])])
def test_remove_deletes_the_file_and_its_companions(
    sink: FileSink, tmp_path: Path, keep_data: bool, left: list[str]
) -> None:
    path = committed(sink, tmp_path)
    remove(path, keep_data=keep_data)
    remove(path, keep_data=keep_data)
    assert listing(tmp_path) == left


def test_remove_never_leaves_a_lock_without_data(
    sink: FileSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader would conclude from a lock without data that the server died."""
    path, unlink = committed(sink, tmp_path), os.unlink
    seen: list[list[str]] = []

    def observed(name: Path) -> None:
        unlink(name)
        seen.append(listing(tmp_path))

    monkeypatch.setattr(os, "unlink", observed)
    remove(path)
    assert seen == [[path.name], []]
