"""The ledger of `hsx generate` records the requests of a directory and excludes others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from generate_files import ledger_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.generate import ledger as ledger_module
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import (
    Ledger,
    State,
    Status,
    mark_of,
    open_ledger,
    rank_file,
    row_file,
    row_of_file,
)

REQUEST = {"max_tokens": 1, "temperature": 0.0}
IDENTITY, OTHER = "0a" * 16, "b1" * 16  # of a row
SERVER = {
    "model": "tiny",
    "layer_ids": [1, 2],
    "layers": 2,
    "hidden_size": 8,
    "dtype": "bfloat16",
    "rotated": False,
    "lora": "",
}


def opened(
    path: Path, request: Mapping[str, Any] = REQUEST, world_size: int = 1, rank: int = 0
) -> Ledger:
    return open_ledger(path, request, world_size, rank)


def closed(path: Path, **options: Any) -> Ledger:
    """Write a ledger as a finished run leaves it."""
    ledger = opened(path, **options)
    ledger.close()
    return ledger


def logged(ledger: Ledger) -> list[int]:
    return [row for row in range(20) if ledger.is_done(row, IDENTITY)]


def test_run_continues_from_the_ledgers_of_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out"
    first = opened(path)
    first.note_server(SERVER)
    first.append(4, Status.DONE, IDENTITY, tokens=7, error=None)
    first.append(5, Status.FAILED, IDENTITY, error="because")
    first.append(6, Status.FOUND, IDENTITY)
    first.append(7, Status.DONE, IDENTITY)
    first.append(7, Status.CHANGED, "")
    first.append(8, Status.INVALID, "", error="it is empty")
    first.append(9, Status.DONE, OTHER)
    first.close()
    again = closed(path)
    assert (again.server, logged(again)) == (SERVER, [4, 6])
    assert list(again.finished.marks) == [
        0,
        0,
        0,
        0,
        mark_of(IDENTITY),
        0,
        mark_of(IDENTITY),
        0,
        0,
        mark_of(OTHER),
    ]
    other = closed(path, world_size=3, rank=2)
    assert (other.server, logged(other)) == (SERVER, [4, 6])
    assert (
        other.is_done(4, IDENTITY)
        and other.is_done(9, OTHER)
        and not other.is_done(9, IDENTITY)
        and not other.is_done(5, IDENTITY)
    )
    lines = ledger_lines(path / "ledger.jsonl")
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    assert lines[:2] == [
        {"row": 4, "status": "done", "identity": IDENTITY, "tokens": 7},
        {"row": 5, "status": "failed", "identity": IDENTITY, "error": "because"},
    ]


@pytest.mark.parametrize("later", [0, 1])
def test_later_of_two_lines_about_a_row_counts(tmp_path: Path, later: int) -> None:
    """The ledgers are from runs of different world sizes."""
    closed(tmp_path)
    closed(tmp_path, world_size=2, rank=1)
    for at, name in enumerate(("ledger.jsonl", "ledger-1-of-2.jsonl")):
        with open(tmp_path / name, "a") as file:
            for number, row in enumerate((3, 4)):
                line = {
                    "row": row,
                    "status": "done",
                    "identity": (IDENTITY, OTHER)[at],
                    "time": 100.0 * number + (at == later),
                }
                file.write(json.dumps(line) + "\n")
    again = closed(tmp_path)
    assert all(again.is_done(row, (IDENTITY, OTHER)[later]) for row in (3, 4))


def test_ledger_has_rows_and_state_of_a_run(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.note_run(20, 3)
    ledger.note_state(State.WAITING, "nobody answers")
    ledger.note_state(State.FINISHED)
    before = (tmp_path / "ledger.jsonl").stat()
    os.utime(tmp_path / "ledger.jsonl", (0, 0))
    ledger.beat()
    assert (tmp_path / "ledger.jsonl").stat().st_mtime >= before.st_mtime
    ledger.close()
    first, *lines = map(_parsed, (tmp_path / "ledger.jsonl").read_bytes().splitlines())
    assert {key: first[key] for key in ("ledger", "request", "world_size", "rank")} == {
        "ledger": 3, "request": REQUEST, "world_size": 1, "rank": 0
    }  # fmt: skip
    for line in lines:
        assert line.pop("time") >= before.st_mtime - 1
    assert lines == [
        {"run": {"rows": 20, "invalid": 3}},
        {"state": "running"},
        {"state": "waiting", "reason": "nobody answers"},
        {"state": "finished"},
    ]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            REQUEST | {"max_tokens": 8},
            "rows of other requests: max_tokens was 1, is 8 .ledger.*jsonl.",
        ),
        (REQUEST | {"seed": 3}, "other requests: seed was None, is 3"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_other_requests_or_servers_are_refused(
    tmp_path: Path, other: dict[str, Any], message: str, world_size: int
) -> None:
    closed(tmp_path, world_size=world_size)
    before = (tmp_path / rank_file("ledger", world_size, 0)).read_bytes()
    for division in (1, 2):
        with pytest.raises(InputError, match=f"{message}.*; give another --output"):
            opened(tmp_path, other, division)
    assert (tmp_path / rank_file("ledger", world_size, 0)).read_bytes() == before
    assert len(os.listdir(tmp_path)) == 1


def test_ranks_starting_together_do_not_mix_rows_of_different_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has looked for other ledgers before one existed."""
    lock = ledger_module._lock

    def other_rank_is_faster(path: Path, fd: int, waits: bool) -> None:
        monkeypatch.setattr(ledger_module, "_lock", lock)
        closed(tmp_path, request=REQUEST | {"max_tokens": 2}, world_size=2, rank=1)
        lock(path, fd, waits)

    monkeypatch.setattr(ledger_module, "_lock", other_rank_is_faster)
    with pytest.raises(InputError, match="other requests: max_tokens was 2, is 1"):
        opened(tmp_path, world_size=2, rank=0)
    assert os.listdir(tmp_path) == [rank_file("ledger", 2, 1)], (
        "the other rank can be started again"
    )


def test_files_without_a_ledger_are_refused(tmp_path: Path) -> None:
    (tmp_path / row_file(1)).touch()
    (tmp_path / "ledger.jsonl").write_bytes(b'{"ledger":3,"req')
    with pytest.raises(
        InputError,
        match=r"has files of rows but no ledger that records their requests; give another",
    ):
        opened(tmp_path)
    (tmp_path / row_file(1)).unlink()
    closed(tmp_path)


def test_output_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match="--output .*file: File exists .* give a writable directory"
    ):
        opened(tmp_path / "file")
    with pytest.raises(InputError, match="--output .*file/below: Not a directory"):
        opened(tmp_path / "file" / "below")


def test_two_runs_cannot_do_the_same_rows_at_the_same_time(tmp_path: Path) -> None:
    first = opened(tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(
        InputError, match="ledger.jsonl is in use by another run; wait until it has ended"
    ):
        opened(tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    first.close()
    closed(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"), [((1, 0), (2, 1)), ((2, 1), (1, 0)), ((2, 0), (3, 2))]
)
@pytest.mark.parametrize("is_new", [True, False])
def test_runs_of_different_world_sizes_exclude_each_other(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int], is_new: bool
) -> None:
    """The slower run would find unknown files and replace them."""
    if not is_new:
        closed(tmp_path, world_size=second[0], rank=second[1])
    one = opened(tmp_path, world_size=first[0], rank=first[1])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    ledger = rank_file("ledger", *first)
    message = (
        f"{ledger} is in use by a run of another --world-size than "
        f"{second[0]}.*; wait until it has ended"
    )
    with pytest.raises(InputError, match=message):
        opened(tmp_path, world_size=second[0], rank=second[1])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before, (
        "it has no ledger that names it as a rank"
    )
    one.append(3, Status.DONE, IDENTITY)
    one.close()
    again = opened(tmp_path, world_size=second[0], rank=second[1])
    assert again.is_done(3, IDENTITY)
    for rank in set(range(second[0])) - {second[1]}:
        closed(tmp_path, world_size=second[0], rank=rank)
    again.close()


def test_at_most_one_of_two_world_sizes_starting_together_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run has listed the ledgers before the other ledger existed."""
    lock = ledger_module._lock
    others: list[Ledger] = []

    def other_division_is_faster(path: Path, fd: int, waits: bool) -> None:
        monkeypatch.setattr(ledger_module, "_lock", lock)
        with suppress(InputError):
            others.append(opened(tmp_path, world_size=2, rank=1))
        lock(path, fd, waits)

    monkeypatch.setattr(ledger_module, "_lock", other_division_is_faster)
    with pytest.raises(InputError, match="is in use by a run of another --world-size than 1"):
        opened(tmp_path)
    assert others and os.listdir(tmp_path) == [rank_file("ledger", 2, 1)]
    others[0].close()


LINES = st.lists(st.tuples(st.integers(0, 19), st.sampled_from(Status)), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.data())
def test_truncated_ledger_is_continued(
    tmp_path: Path, lines: list[tuple[int, Any]], data: st.DataObject
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    ledger = opened(tmp_path)
    for row, status in lines:
        ledger.append(row, status, IDENTITY)
    ledger.close()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n") - 1  # number of lines after the first
    again = opened(tmp_path)
    again.append(19, Status.DONE, IDENTITY)
    again.close()
    # A last line without a line break counts.
    expected = [row for row, _ in lines[: max(kept, 0)]]
    found = [line["row"] for line in map(_parsed, path.read_bytes().splitlines()) if "row" in line]
    assert found in (
        [*expected, 19],
        [*expected, lines[kept][0], 19] if 0 <= kept < len(lines) else [],
    )
    assert 19 in logged(closed(tmp_path))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return value


def test_invalid_lines_are_ignored_and_other_files_are_refused(
    tmp_path: Path,
) -> None:
    ledger = opened(tmp_path)
    ledger.append(1, Status.DONE, IDENTITY)
    ledger.close()
    path = tmp_path / "ledger.jsonl"
    with open(path, "ab") as file:
        file.write(
            (
                b'\x00\x00\n[1]\n{"row": "x"}\n{"row": 2, "status": "done", "identity": '
                b'"%b"}\n{"server": 4}\n'
            )
            % IDENTITY.encode()
        )
        odd = [
            ("done", "x"),
            ("done", None),
            ("done", IDENTITY[:-1]),
            ("over", IDENTITY),
            ([], IDENTITY),
            (None, IDENTITY),
        ]
        for status, identity in odd:
            file.write(
                json.dumps({"row": 4, "status": status, "identity": identity}).encode() + b"\n"
            )
        for row in (-1, 10**9, True, 4.0):
            file.write(
                json.dumps({"row": row, "status": "done", "identity": IDENTITY}).encode() + b"\n"
            )
        file.write(b'{"row": 20}\n{"row": 1, "status": "failed", "identity": ""}\n{"row": 3')
    again = closed(tmp_path)
    assert (again.server, logged(again), len(again.finished.marks)) == (None, [2], 3)
    for notes in (
        "somebody's notes\n",
        "somebody's notes",
        "\n",
        '{"ledger":1',
        '{"ledger":2,"dataset":{}}\n',
        "x" * 5000,
    ):
        path.write_text(notes)
        with pytest.raises(InputError, match="ledger.jsonl is not a ledger of version 3"):
            opened(tmp_path)
        assert path.read_text() == notes


@given(st.integers(0, 10**12))
def test_names_of_files_map_back_to_rows(row: int) -> None:
    assert row_of_file(row_file(row)) == row
    for name in (
        f"hs_0{row}.safetensors",
        f"hs_{row}.safetensors.lock",
        f"hs_{row}",
        f"xhs_{row}.safetensors",
        f"hs_-{row}.safetensors",
    ):
        assert row_of_file(name) is None


def test_concurrent_line_does_not_look_like_a_truncation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, real_fstat, under_way = opened(tmp_path), os.fstat, list[int]()

    def fstat(fd: int) -> os.stat_result:
        status = real_fstat(fd)
        if not under_way:
            under_way.append(fd)
            ledger.append(0, Status.FAILED, IDENTITY)
            under_way.clear()
        return status

    monkeypatch.setattr(os, "fstat", fstat)
    ledger.require_in_place()
    monkeypatch.undo()
    assert len(ledger_lines(tmp_path / "ledger.jsonl")) >= 2
    ledger.close()
