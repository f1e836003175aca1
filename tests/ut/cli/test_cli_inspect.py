"""`hsx inspect` and `hsx verify` report all problems of files, and no others."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from written_files import FORMAT, rows_of, write

from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.protocol.names import INDEX
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.weights import Origin, WeightVersion
from vllm_ascend_hsx.reader.find import files_in
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink


def a_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    for tokens in (3, 30, 7):
        write(directory, f"r{tokens}", rows_of(tokens))
    return directory


def test_verify_accepts_good_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = a_directory(tmp_path)
    write(directory / "below", "deep", rows_of(4), options=FileOptions(checksum="none"))
    (directory / ".hidden").mkdir()
    (directory / ".hidden" / "x.safetensors").write_bytes(b"")
    assert main(["verify", str(directory), "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "4 files of 2 layers [2, 4] x 8 bfloat16" in said
    assert "4 good (1 of them without checksum), 0 bad, 0 failed requests; 44 tokens" in said


def test_verify_in_several_processes_finds_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_directory(tmp_path)
    (directory / "bad.safetensors").write_bytes(b"x")
    results = []
    for jobs in ("1", "2"):
        assert verify.main([str(directory), "--jobs", jobs, "--json"]) == 1
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]
    assert (results[0]["good"], len(results[0]["bad"]), results[0]["tokens"]) == (3, 1, 40)


def test_verify_reports_failed_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = a_directory(tmp_path)
    with FileSink(directory, FORMAT) as sink:
        sink.open("f", directory / "f.safetensors").fail("the disk is full")
    assert verify.main([str(directory), "--jobs", "1"]) == 1
    assert "f.safetensors.error: the disk is full" in capsys.readouterr().out
    assert verify.main([str(directory), "--jobs", "1", "--allow-errors"]) == 0


def test_verify_reports_an_unreadable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_directory(tmp_path)
    write(directory / "closed", "a", rows_of(3))
    scandir = os.scandir

    def refuse(path: str) -> Any:  # root ignores permissions
        if os.fspath(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert verify.main([str(directory), "--jobs", "1"]) == 1
    assert f"bad: {directory}/closed: cannot be read: Permission denied" in capsys.readouterr().out
    assert verify.main([str(directory / "closed")]) == 2
    assert capsys.readouterr().err.endswith("Run it as a user with read permission.\n")


@pytest.mark.parametrize("folder", ["shards", "."])
def test_verify_reports_an_unreadable_index_and_continues(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_directory(tmp_path)
    with ShardSink(directory / folder, FORMAT, FileOptions(), shard_bytes=1 << 20) as sink:
        file = sink.open("s", directory / folder / "s.safetensors")
        file.write(0, rows_of(3).view(torch.uint8).numpy())
        file.commit(np.arange(3), 3)
    real_open = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if os.fspath(path).endswith(INDEX):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert verify.main([str(directory), "--jobs", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (bad,) = found["bad"]
    assert bad["path"].startswith(str(directory)) and bad["path"].endswith(INDEX)
    assert bad["problem"].startswith(
        "cannot be read: Permission denied; rows may be in this index: let this user read it"
    )
    assert found["good"] == 3


def test_verify_refuses_rows_of_different_rotation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for basis in ("", "model", "rotated"):
        with FileSink(tmp_path, replace(FORMAT, basis=basis)) as sink:  # type: ignore[arg-type]
            file = sink.open(f"of-{basis}", tmp_path / f"of-{basis}.safetensors")
            file.write(0, rows_of(3).view(torch.uint8).numpy())
            file.commit(np.arange(3), 3)
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert (
        "2 files of" in printed
        and re.search("1 files of .*, rotated", printed)
        and "different kinds" in printed
    )


def test_verify_refuses_files_of_different_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_directory(tmp_path)
    write(directory, "other", torch.zeros(3, 4, 8, dtype=torch.bfloat16))
    assert verify.main([str(directory), "--jobs", "1"]) == 1
    assert "the files are of different kinds" in capsys.readouterr().out


def test_verify_notes_weights_of_two_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, weights in (("a", "0a" * 16), ("b", ""), ("c", "0a" * 16), ("d", "b1" * 16)):
        with FileSink(tmp_path, RowFormat((1,), 4, "BF16", "tiny")) as sink:
            file = sink.open(name, tmp_path / f"{name}.safetensors")
            file.origin = Origin([WeightVersion(fingerprint=weights)])
            file.write(0, torch.ones(1, 1, 4, dtype=torch.bfloat16).view(torch.uint16).numpy())
            file.commit(np.arange(1), 1)
    assert inspect.main([str(tmp_path / "a.safetensors")]) == 0
    assert "0a" * 16 in capsys.readouterr().out
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"note: the files are from 2 checkpoints, by weights: 2 of {'0a' * 16}, 1 of {'b1' * 16}"
    ) in printed
    (tmp_path / "d.safetensors").unlink()
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 0
    assert "checkpoints" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [True, False])
def test_verify_of_an_empty_directory_fails(
    tmp_path: Path, make: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if make:
        (tmp_path / "none").mkdir()
    assert verify.main([str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err.replace("\n", "")


def test_further_problems_are_only_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(25):
        (tmp_path / f"{index}.safetensors").write_bytes(b"x")
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 1
    assert "... and 5 more bad" in capsys.readouterr().out


def test_inspect_shows_the_rows_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        "images",
        rows_of(5),
        images=[Placeholder("image", 1, 2), Placeholder("image", 4, 1)],
    )
    assert inspect.main([str(path)]) == 0
    assert '[["image",1,2],["image",4,1]]' in capsys.readouterr().out


def test_inspect_shows_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a", rows_of(50), prompt=40)
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "verified",
        "50 (40 of the prompt)",
        "2 layers x 8 bfloat16",
        "layer 2",
        "layer 4",
        "mean norm",
        "producer",
        "tiny",
    ):
        assert words in said


@pytest.mark.parametrize("plot", [False, True])
def test_inspect_shows_positions_if_layer_ids_are_missing(
    tmp_path: Path, plot: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if plot:
        pytest.importorskip("matplotlib", reason="drawing needs matplotlib, which is an extra")
    path = tmp_path / "x.safetensors"
    save_file(
        {"hidden_states": rows_of(3), "token_ids": torch.arange(3)}, path, {"layer_ids": "[7]"}
    )
    assert main(["inspect", str(path), *(["--plot", str(tmp_path / "x.png")] if plot else [])]) == 1
    said = capsys.readouterr().out
    for words in ("it names 1 layer ids, but has 2 layers", "layer #0", "layer #1"):
        assert words in said


@pytest.mark.parametrize("suffix", ["", ".error"])
def test_inspect_shows_the_reason_of_a_failed_request(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        sink.open("a", tmp_path / "a.safetensors").fail("no luck")
    assert main(["inspect", str(tmp_path / f"a.safetensors{suffix}")]) == 1
    assert "no luck" in capsys.readouterr().out


def test_inspect_explains_a_lock_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.safetensors.lock").touch()
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 1
    assert "the server died" in capsys.readouterr().out


def test_verify_lists_free_locks_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Locks without data do not change the exit code: a consumer may have removed the data."""
    write(tmp_path, "a", rows_of(3))
    write(tmp_path, "folder/taken", rows_of(3)).unlink()
    with FileSink(tmp_path, FORMAT) as sink:
        under_way = sink.open("b", tmp_path / "b.safetensors")
        assert main(["verify", str(tmp_path), "--jobs", "1"]) == 0
        under_way.discard()
    output = capsys.readouterr().out
    assert f"lock without data: {tmp_path}/folder/taken.safetensors.lock" in output
    assert "b.safetensors.lock" not in output
    assert f"hsx clean {tmp_path} removes them" in output
    assert main(["verify", str(tmp_path), "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["orphaned_locks"] == [
        f"{tmp_path}/folder/taken.safetensors.lock"
    ]


def test_inspect_shows_a_directory_with_its_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = a_directory(tmp_path)
    assert inspect.main([str(directory)]) == 0
    (directory / "a-bad.safetensors").write_bytes(b"x")
    capsys.readouterr()
    assert inspect.main([str(directory), "--limit", "2"]) == 1
    said = capsys.readouterr().out
    assert "... and 2 more" in said
    assert "bad: this is not a file" in " ".join(said.split())


def test_inspect_shows_subfolders_and_reports_an_unreadable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    for folder in ("one", "two", "closed"):
        write(tmp_path / folder, "same", rows_of(5))
    monkeypatch.setattr(os, "scandir", refuse)
    assert inspect.main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "one/same.safetensors" in said.out and "two/same.safetensors" in said.out
    assert said.err == f"hsx inspect: {tmp_path}/closed cannot be read: Permission denied\n"


def test_inspect_plots_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib, which is an extra")
    path = write(tmp_path, "a", rows_of(50))
    assert inspect.main([str(path), "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["a", "$\\frac$"])
def test_inspect_plots_zero_norms_and_any_file_name(
    tmp_path: Path, value: float, name: str
) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib, which is an extra")
    path = tmp_path / f"{name}.safetensors"
    save_file({"hidden_states": torch.full((3, 2, 8), value), "token_ids": torch.arange(3)}, path)
    assert main(["inspect", str(path), "--plot", str(tmp_path / "a.PNG")]) == (
        0 if value == 0 else 1
    )
    assert (tmp_path / "a.PNG").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", ["x.foo", "x", ".png", "folder.png"])
def test_plot_of_unknown_format_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib, which is an extra")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit) as ended:
        inspect.main([str(write(tmp_path, "a", rows_of(5))), "--plot", str(tmp_path / name)])
    assert ended.value.code == 2
    assert f"--plot {tmp_path / name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{directory}", "--plot", "x.png"], "is a directory: give a file in it"),
        (
            ["{directory}", "--limit", "0"],
            "argument --limit: '0' is not a whole number from 1 to 1000000000",
        ),
    ],
)
def test_invalid_options_of_inspect_are_refused(
    tmp_path: Path,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inspect, "find_spec", lambda name: True)
    with pytest.raises(SystemExit) as ended:
        inspect.main([each.format(directory=tmp_path) for each in arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        inspect.main(["x.safetensors", "--plot", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    directory = a_directory(tmp_path)
    (directory / ".x.safetensors").write_bytes(b"")
    assert [path.name for path in files_in(directory)] == [
        "r3.safetensors",
        "r30.safetensors",
        "r7.safetensors",
    ]
