"""Folders that clients choose: permissions and durability."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from sink_harness import FORMAT, finite_rows, put, rows_of, token_ids

from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", [0o700, 0o750, 0o2770, 0o1777])
def test_new_folder_has_the_permissions_of_its_parent(
    tmp_path: Path, mode: int, umask: int
) -> None:
    tmp_path.chmod(mode)
    before = os.umask(umask)
    try:
        with FileSink(tmp_path, FORMAT) as sink:
            (tmp_path / "kept").mkdir(0o711)
            kept = stat.S_IMODE((tmp_path / "kept").stat().st_mode)
            for name in ("new/inner/a", "kept/a"):
                sink.open("r", tmp_path / f"{name}.safetensors").fail("x")
    finally:
        os.umask(before)
    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "new/inner", "kept")
    ]
    assert modes == [mode, mode, kept], "what was there before keeps its mode"


def test_names_of_new_folders_are_synced_before_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for durability, expected in (
        ("none", []),
        ("fdatasync", [".", "a", "a/b"]),
        ("fdatasync", [".", "a", "a/b"]),
    ):
        with FileSink(tmp_path, FORMAT, FileOptions(durability=durability)) as sink:
            synced.clear()
            path = put(sink.open("r", tmp_path / "a" / "b" / "r.safetensors"), 2)
            assert [each for each in synced if each in (".", "a", "a/b")] == expected
            path.unlink()


def test_equal_names_in_different_folders_are_different_files(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT, FileOptions(use_lock=False)) as sink:
        paths = [tmp_path / folder / "r.safetensors" for folder in ("", "a", "b", "a/b")]
        files = [sink.open(f"r{index}", path) for index, path in enumerate(paths)]
        for version, file in enumerate(files):
            file.write(0, finite_rows(0, 2, version))
        with pytest.raises(SinkError, match="another request is writing this file"):
            sink.open("second", paths[3])
        for file in files:
            file.commit(token_ids(2), 2)
        for version, path in enumerate(paths):
            assert np.array_equal(rows_of(path), finite_rows(0, 2, version))


def test_repeatedly_removed_folder_fails_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir
    made = 0

    def mkdir(name: str, mode: int, *, dir_fd: int) -> None:
        nonlocal made
        made += 1
        real(name, mode, dir_fd=dir_fd)
        if made < limit:
            os.rmdir(name, dir_fd=dir_fd)

    with FileSink(tmp_path, FORMAT) as sink:
        monkeypatch.setattr(os, "mkdir", mkdir)
        limit = 4
        sink.open("patient", tmp_path / "a" / "r.safetensors").discard()
        limit = 10_000
        with pytest.raises(SinkError, match=r"a folder in its path cannot be opened: .*\(ENOENT\)"):
            sink.open("unlucky", tmp_path / "b" / "r.safetensors")
        assert made < 30
