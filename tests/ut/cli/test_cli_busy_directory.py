"""`hsx verify` and `hsx inspect` of a directory that servers and consumers use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written_files import FORMAT, rows_of, write, write_member

from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.sinks.file import FileSink

Change = Callable[[Path], object]


def a_failure(directory: Path) -> Path:
    with FileSink(directory, FORMAT) as sink:
        sink.open("f", directory / "f.safetensors").fail("the disk is full")
    return directory / "f.safetensors.error"


def take_shard(path: Path) -> None:
    for each in path.parent.glob("hsx-*-000*"):
        each.unlink()


def unlink(path: Path) -> None:
    path.unlink()


# Removals between the listing and the opening.
REMOVED: dict[str, tuple[Callable[[Path], Path], Change]] = {
    "a file": (lambda directory: write(directory, "a", rows_of(3)), remove),
    "a file whose lock stays": (lambda directory: write(directory, "a", rows_of(3)), unlink),
    "a file with its folder": (
        lambda directory: write(directory / "below", "a", rows_of(3)),
        lambda path: shutil.rmtree(path.parent),
    ),
    "a member of a shard": (write_member, remove),
    "a shard": (write_member, take_shard),
    "an error": (a_failure, unlink),
}


@pytest.fixture
def after_listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Call a function once the commands have listed the directory."""

    def arrange(change: Callable[[], object]) -> None:
        def listed(*arguments: Any) -> list[Path]:
            found = files_in(*arguments)
            change()
            return found

        for module in (inspect, verify):
            monkeypatch.setattr(module, "files_in", listed)

    return arrange


@pytest.mark.parametrize("name", REMOVED)
def test_file_removed_after_listing_is_not_bad(
    name: str,
    tmp_path: Path,
    after_listing: Callable[[Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, take = REMOVED[name]
    write(tmp_path, "stays", rows_of(5))
    for command in ([verify.main, "--json", "--jobs", "1"], [inspect.main]):
        path = make(tmp_path)
        after_listing(lambda path=path: take(path))
        assert command[0]([str(tmp_path), *command[1:]]) == 0
        said = capsys.readouterr().out
        if command[0] is verify.main:
            found = json.loads(said)
            gone = (
                []
                if path.suffix == ".error"
                else [{"path": str(path), "problem": "it was removed meanwhile"}]
            )
            assert (
                found["good"],
                found["bad"],
                found["failed"],
                found["absent"],
                found["unseen"],
            ) == (1, [], [], gone, 0)
        elif path.suffix != ".error":
            assert "it was removed meanwhile" in " ".join(said.split())


@pytest.mark.parametrize("spoil", ["a link that leads nowhere", "a shard without its tar file"])
def test_file_that_cannot_be_opened_is_bad(
    spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "stays", rows_of(5))
    if spoil.startswith("a link"):
        (tmp_path / "a.safetensors").symlink_to("nowhere")
    else:
        write_member(tmp_path)
        next(tmp_path.glob("*.tar")).unlink()
    assert verify.main([str(tmp_path), "--json", "--jobs", "1"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["bad"] and not found["absent"]
    assert inspect.main([str(tmp_path)]) == 1


def test_file_that_a_server_is_writing_is_not_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "stays", rows_of(5))
    with FileSink(tmp_path, FORMAT) as sink:
        path = write(tmp_path, "a", rows_of(3))
        path.unlink()
        under_way = sink.open("b", path)
        path.write_bytes(b"half")
        assert verify.main([str(tmp_path), "--jobs", "1"]) == 0
        said = capsys.readouterr().out
        assert f"not checked: {path}: a server is still writing it" in said
        assert "1 good, 0 bad, 0 failed requests, 1 not checked" in said
        assert inspect.main([str(tmp_path)]) == 0
        assert "a server is still writing it" in " ".join(capsys.readouterr().out.split())
        assert inspect.main([str(path)]) == 1  # given by name, it does not exist
        under_way.discard()


def test_verify_fails_if_all_files_are_absent(
    tmp_path: Path,
    after_listing: Callable[[Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, "a", rows_of(3))
    after_listing(lambda: remove(path))
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 2
    assert "0 good, 0 bad, 0 failed requests, 1 not checked" in capsys.readouterr().out


def test_folder_removed_while_listing_is_not_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "stays", rows_of(5))
    write(tmp_path / "below", "a", rows_of(3))
    scandir = os.scandir

    def take_first(path: Any) -> Any:
        if str(path).endswith("below"):
            shutil.rmtree(path, ignore_errors=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", take_first)
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 0
    assert "1 good, 0 bad" in capsys.readouterr().out


def test_missing_path_given_by_name_is_a_problem(tmp_path: Path) -> None:
    found = examine(tmp_path / "a.safetensors")
    assert found.is_there and "cannot be read" in str(found.problem)


def test_file_replaced_by_an_error_file_is_not_checked(
    tmp_path: Path,
    after_listing: Callable[[Callable[[], object]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path, "stays", rows_of(5))
    write(tmp_path, "f", rows_of(3))
    after_listing(lambda: (tmp_path / "f.safetensors").unlink() or a_failure(tmp_path))
    assert verify.main([str(tmp_path), "--json", "--jobs", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    absent = [{"path": str(tmp_path / "f.safetensors"), "problem": "it was removed meanwhile"}]
    assert (found["good"], found["bad"], found["failed"], found["absent"]) == (1, [], [], absent)
