"""`hsx clean` removes only files that consumers have acknowledged, by age or size."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_harness import sealed_shards
from sink_harness import FORMAT, make_rows, token_ids
from test_cli_clean import killed, names, publish

import vllm_ascend_hsx
from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

HOUR = 3600.0


def acknowledge(path: Path, hours_ago: float) -> None:
    vllm_ascend_hsx.acknowledge(path)
    then = time.time() - hours_ago * HOUR
    os.utime(path.with_name(path.name + ".acknowledged"), (then, then))


def data_in(directory: Path) -> set[str]:
    return {
        name.removesuffix(".safetensors")
        for name in names(directory)
        if name.endswith(".safetensors")
    }


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Write five files. The names of four have the hours since the acknowledgement."""
    with FileSink(tmp_path, FORMAT) as sink:
        for name in ("ack-1", "ack-2", "day/ack-3", "ack-4", "kept"):
            publish(sink, tmp_path, name)
            if name != "kept":
                acknowledge(tmp_path / f"{name}.safetensors", float(name[-1]))
    return tmp_path


def test_files_acknowledged_long_ago_are_removed_completely(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(storage)
    assert main(["clean", str(storage)]) == 0
    assert main(["clean", str(storage), "--older-than", "150m", "--dry-run"]) == 0
    assert names(storage) == before
    assert "would be removed: 2 acknowledged files\n" in capsys.readouterr().out
    assert main(["clean", str(storage), "--older-than", "150m"]) == 0
    output = capsys.readouterr().out
    assert output.index(f"removed {storage}/ack-4.safetensors\n") < output.index(
        f"removed {storage}/day/ack-3.safetensors\n"
    )
    assert "removed: 2 acknowledged files\n" in output
    assert names(storage) == {
        name for name in before if "ack-4" not in name and "ack-3" not in name
    }


def test_oldest_acknowledged_files_are_removed_down_to_the_size(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = (storage / "kept.safetensors").stat().st_size
    assert main(["clean", str(storage), "--keep-bytes", str(5 * size)]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert main(["clean", str(storage), "--keep-bytes", str(4 * size - 1), "--dry-run"]) == 0
    assert "would be removed: 2 acknowledged files\n" in capsys.readouterr().out
    assert main(["clean", str(storage), "--keep-bytes", str(4 * size - 1)]) == 0
    assert data_in(storage) == {"ack-1", "ack-2", "kept"}
    capsys.readouterr()
    assert main(["clean", str(storage), "--keep-bytes", "0"]) == 0
    assert data_in(storage) == {"kept"}
    assert (
        f"{size} bytes remain, more than --keep-bytes: they are in use or not acknowledged\n"
        in capsys.readouterr().out
    )


def test_file_held_by_a_reader_or_being_rewritten_is_kept(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = storage / "ack-1.safetensors"
    again.unlink()
    with open(storage / "ack-2.safetensors.lock") as reader, FileSink(storage, FORMAT) as sink:
        fcntl.flock(reader, fcntl.LOCK_SH)
        file = sink.open("ack-1", again)
        file.write(0, make_rows(0, 3))
        for options in (["--dry-run"], []):
            assert main(["clean", str(storage), "--keep-bytes", "0", *options]) == 0
            assert "removed: 2 acknowledged files\n" in capsys.readouterr().out
        assert data_in(storage) - {name for name in data_in(storage) if name.startswith(".")} == {
            "ack-2",
            "kept",
        }
        file.commit(token_ids(3), 3)
        assert main(["clean", str(storage), "--older-than", "0s", "--keep-bytes", "0"]) == 0
        assert {"ack-1", "ack-2", "kept"} <= data_in(storage)
    assert main(["clean", str(storage), "--older-than", "0s"]) == 0
    assert data_in(storage) == {"ack-1", "kept"}
    assert not list(storage.glob("*.acknowledged"))


def test_acknowledged_file_without_a_lock_is_removed(storage: Path) -> None:
    (storage / "ack-1.safetensors.lock").unlink()
    assert main(["clean", str(storage), "--older-than", "0s"]) == 0
    assert names(storage) == {"kept.safetensors", "kept.safetensors.lock"}


def test_file_changed_before_the_removal_is_kept(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = storage / "ack-4.safetensors"
    from vllm_ascend_hsx.sinks.acknowledged import Acknowledged

    def replace_then(self: Acknowledged, before: float | None, keep_bytes: int | None) -> None:
        os.utime(path, (5, 5))
        original(self, before, keep_bytes)

    original = Acknowledged.remove
    monkeypatch.setattr(Acknowledged, "remove", replace_then)
    assert main(["clean", str(storage), "--older-than", "0s"]) == 0
    assert data_in(storage) == {"ack-4", "kept"}


def test_only_completely_acknowledged_shards_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = sealed_shards(tmp_path)
    first, second = sorted(storage.glob("*.tar"))
    vllm_ascend_hsx.acknowledge(first)
    assert main(["clean", str(storage), "--keep-bytes", "0"]) == 0
    assert "removed: 1 acknowledged file\n" in capsys.readouterr().out
    assert not list(storage.glob(f"{first.stem}*"))
    assert sorted(path.suffix for path in storage.glob(f"{second.stem}*")) == [
        ".json",
        ".jsonl",
        ".tar",
    ]
    assert main(["verify", str(storage)]) == 0


@pytest.mark.parametrize("after", range(4))
def test_an_interrupted_removal_of_a_shard_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    storage, unlink, calls = sealed_shards(tmp_path), os.unlink, iter(range(4))
    first = min(storage.glob("*.tar"))
    vllm_ascend_hsx.acknowledge(first)

    def interrupted(*args: object, **options: object) -> None:
        if next(calls) == after:
            raise KeyboardInterrupt
        unlink(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", interrupted)
        from vllm_ascend_hsx.cli.clean import main as clean

        clean([str(storage), "--older-than", "0s"])
    assert main(["clean", str(storage), "--older-than", "0s"]) == 0
    assert not list(storage.glob(f"{first.stem}*"))
    assert main(["verify", str(storage)]) == 0


def kill_shard_server(storage: Path) -> Path:
    killed(lambda: publish(ShardSink(storage, FORMAT, shard_bytes=1 << 20), storage, "a-0123abcd"))
    (tar,) = storage.glob("*.tar")
    return tar


def test_lost_shard_of_a_dead_server_is_reported_with_remedy_and_removed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = kill_shard_server(tmp_path)
    tar.unlink()
    before = names(tmp_path)
    assert main(["clean", str(tmp_path)]) == 1
    assert (
        f"could not seal {tar.stem}: its tar file was removed: restore it, or drop its requests "
        "with"
    ) in capsys.readouterr().err
    assert main(["clean", str(tmp_path), "--lost-shards", "--dry-run"]) == 0
    assert names(tmp_path) == before
    capsys.readouterr()
    assert main(["clean", str(tmp_path), "--lost-shards"]) == 0
    assert "removed: 1 hidden file, 1 lost shard\n" in capsys.readouterr().out
    assert names(tmp_path) == {"hsx-shards"}
    assert main(["clean", str(tmp_path)]) == 0


def test_shards_of_live_servers_and_shards_with_a_tar_are_kept(tmp_path: Path) -> None:
    storage = sealed_shards(tmp_path)
    first, second = sorted(storage.glob("*.tar"))
    first.unlink()
    with ShardSink(storage, FORMAT, shard_bytes=1 << 20) as sink:
        publish(sink, storage, "living-0123abcd")
        (living,) = set(storage.glob("*.tar")) - {second}
        living.unlink()
        assert main(["clean", str(storage), "--lost-shards"]) == 0
        assert {path.stem for path in storage.glob("hsx-*-*.jsonl")} == {second.stem, living.stem}
    assert not list(storage.glob(f"{first.stem}*"))
    assert main(["clean", str(storage), "--lost-shards"]) == 0
    assert {path.stem for path in storage.glob("hsx-*-*.jsonl")} == {second.stem}


@settings(max_examples=25, deadline=None)
@given(
    ages=st.lists(st.none() | st.integers(1, 9), max_size=6),
    older=st.none() | st.integers(0, 10),
    keep=st.none() | st.integers(0, 7),
)
def test_removals_match_the_options_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    ages: list[int | None],
    older: int | None,
    keep: int | None,
) -> None:
    storage = tmp_path_factory.mktemp("clean")
    for number, age in enumerate(ages):
        path = storage / f"{number}.safetensors"
        path.write_bytes(b"x" * 100)
        if age is not None:
            acknowledge(
                path, age + 0.5 + number / 100
            )  # for equal ages, later files count as older
    left = {str(number): age for number, age in enumerate(ages)}
    for number, age in sorted(enumerate(ages), key=lambda each: -((each[1] or 0) + each[0] / 100)):
        is_old = age is not None and older is not None and age + 0.5 + number / 100 > older
        if is_old or (age is not None and keep is not None and len(left) > keep):
            del left[str(number)]
    options = [
        *(() if older is None else ("--older-than", f"{older}h")),
        *(() if keep is None else ("--keep-bytes", str(100 * keep))),
    ]
    assert main(["clean", str(storage), *options]) == 0
    assert data_in(storage) == set(left)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--older-than", "7"], "--older-than 7: give a number and a unit"),
        (
            ["--keep-bytes", "64GB"],
            "--keep-bytes 64GB: is not a size; use bytes or a number with B, KiB, MiB or GiB",
        ),
        (["--keep-bytes", "-1"], "--keep-bytes"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["clean", str(tmp_path), *arguments])
    assert told in capsys.readouterr().err
