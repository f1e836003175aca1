"""The ledger and the output directory of `hsx generate`: whose rows these are, which are finished, and who may go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from generate_harness import ledger_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.generate import ledger as ledger_module
from vllm_ascend_hsx.generate import output as output_module
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import Entry, Identity, ledger_name, open_ledger
from vllm_ascend_hsx.generate.names import hidden_file, row_file
from vllm_ascend_hsx.generate.output import Output, open_output
from vllm_ascend_hsx.generate.row_set import RowSet
from vllm_ascend_hsx.protocol.files import open_regular

IDENTITY = Identity({"rows": 20, "digest": "d0"}, {"include_output_tokens": False, "max_tokens": 1})
SERVER = {"model": "tiny", "layer_ids": "[1, 2]", "dtype": "BF16", "row_shape": [2, 8]}


def opened(path: Path, identity: Identity = IDENTITY, world_size: int = 1, rank: int = 0, overwrite: bool = False) -> Output:
    return open_output(path, identity, world_size, rank, overwrite)


def closed(path: Path, **options: Any) -> Output:
    """As a run that is over leaves it."""
    output = opened(path, **options)
    output.ledger.close()
    return output


def finish(path: Path, *rows: int) -> None:
    for row in rows:
        (path / row_file(row)).touch()


def test_a_row_is_finished_when_its_file_is_there_whatever_the_ledger_says(tmp_path: Path) -> None:
    output = opened(tmp_path / "new" / "out")
    finish(output.path, 3, 19, 20)
    output.ledger.append(Entry(4, "done", row_file(4)))
    (output.path / "hs_5.safetensors.lock").touch()
    (output.path / "hs_06.safetensors").touch()
    output.ledger.close()
    again = closed(output.path)
    assert [row for row in range(30) if row in again.finished] == [3, 19]
    assert 4 in again.ledger.content.rows and 3 not in again.ledger.content.rows


def test_a_run_goes_on_with_the_same_requests_names_and_knows_where_their_files_are(tmp_path: Path) -> None:
    output = opened(tmp_path)
    output.ledger.note_server(SERVER, "/store/a")
    output.ledger.note_server(SERVER, "/store/b")
    output.ledger.note_server(SERVER, "/store/a")
    output.ledger.close()
    again = closed(tmp_path)
    assert again.tokens == {output.ledger.token}
    assert again.directories == ["/store/a", "/store/b"]
    assert again.ledger.content.server == SERVER
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (
            IDENTITY._replace(dataset={"rows": 20, "digest": "d1"}),
            "holds rows of another dataset: digest was d0, is d1 .ledger.*jsonl.; name",
        ),
        (IDENTITY._replace(dataset={"rows": 21, "digest": "d0"}), "rows was 20, is 21"),
        (
            IDENTITY._replace(request={"include_output_tokens": True, "max_tokens": 8}),
            "requests of another kind: include_output_tokens was",
        ),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_something_else_are_not_mixed_with_these(tmp_path: Path, identity: Identity, message: str, world_size: int) -> None:
    closed(tmp_path, world_size=world_size)
    before = (tmp_path / ledger_name(world_size, 0)).read_bytes()
    with pytest.raises(InputError, match=f"{message}.*--overwrite"):
        opened(tmp_path, identity)
    assert (tmp_path / ledger_name(world_size, 0)).read_bytes() == before
    again = closed(tmp_path, identity=identity, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["ledger.jsonl"]
    assert (len(again.tokens), len(again.overwritten)) == (1, 1)  # files of the earlier run's requests are ours to remove, not to take


@pytest.mark.parametrize("change", [{"model": "other"}, {"layer_ids": "[2, 1]"}, {"dtype": "F16"}, {"row_shape": [2, 16]}])
def test_rows_of_another_server_are_not_mixed_with_these(tmp_path: Path, change: dict[str, Any]) -> None:
    output = opened(tmp_path)
    output.ledger.note_server(SERVER, "/store")
    output.ledger.close()
    (key,) = change
    for options in ({}, {"world_size": 3, "rank": 2}):
        again = opened(tmp_path, **options)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"rows of another server: {key} was .*, is .*; serve the same model and layers"):
            again.ledger.note_server(SERVER | change, "/store")
        again.ledger.close()


def test_files_without_a_ledger_are_nobody_s(tmp_path: Path) -> None:
    finish(tmp_path, 1)
    with pytest.raises(InputError, match=r"holds files of rows, and no ledger that says what they were made from; .* --overwrite"):
        opened(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["hs_1.safetensors"]
    closed(tmp_path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["ledger.jsonl"]


def test_an_output_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--output .*file: File exists .* name a directory"):
        opened(tmp_path / "file")
    with pytest.raises(InputError, match="--output .*file/below: Not a directory"):
        opened(tmp_path / "file" / "below")


def test_two_runs_cannot_do_the_same_rows_at_the_same_time(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(InputError, match="ledger.jsonl belongs to a run that is under way; wait for its end"):
            opened(tmp_path, **options)
    with pytest.raises(InputError, match="a run that is under way with --world-size 1; use the same"):
        opened(tmp_path, world_size=2)
    first.ledger.close()
    closed(tmp_path)


def test_ranks_share_a_directory_and_leave_each_other_s_requests_alone(tmp_path: Path) -> None:
    ranks = [opened(tmp_path, world_size=2, rank=rank) for rank in range(2)]
    assert [rank.tokens for rank in ranks] == [{rank.ledger.token} for rank in ranks]
    assert len({rank.ledger.token for rank in ranks}) == 2
    copies = [hidden_file(row_file(4 + number), rank.ledger.token) for number, rank in enumerate(ranks)]
    for name in copies:
        (tmp_path / name).touch()
    ranks[0].ledger.note_server(SERVER, "/store/0")
    ranks[0].ledger.append(Entry(4, "done", row_file(4)))
    finish(tmp_path, 4)
    ranks[0].ledger.close()
    # The run of rank 0 is over: whoever comes next takes over what it left.
    ranks[1].ledger.close()
    one = opened(tmp_path, world_size=2, rank=1)
    assert one.tokens == {rank.ledger.token for rank in ranks}
    assert one.directories == ["/store/0"]
    assert one.ledger.content.server == SERVER
    assert 4 in one.finished and 4 in one.ledger.content.rows
    one.ledger.close()
    assert sorted(os.listdir(tmp_path)) == ["hs_4.safetensors", "ledger-0-of-2.jsonl", "ledger-1-of-2.jsonl"]
    assert sorted(name for name in os.listdir(tmp_path) if name in copies) == []


def test_a_rank_overwrites_its_own_rows_only(tmp_path: Path) -> None:
    for rank in range(2):
        closed(tmp_path, world_size=2, rank=rank)
    finish(tmp_path, 0, 1, 2, 3)
    other = IDENTITY._replace(dataset={"rows": 20, "digest": "d1"})
    zero = opened(tmp_path, other, world_size=2, rank=0, overwrite=True)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("hs")) == ["hs_1.safetensors", "hs_3.safetensors"]
    with pytest.raises(InputError, match="rows of another dataset"):
        opened(tmp_path, world_size=2, rank=1)
    one = closed(tmp_path, identity=other, world_size=2, rank=1, overwrite=True)
    zero.ledger.close()
    assert len(one.finished) == 0


def test_with_overwrite_nothing_but_rows_and_ledgers_goes(tmp_path: Path) -> None:
    closed(tmp_path)
    closed(tmp_path, world_size=2)
    finish(tmp_path, 1, 17)
    for name in ("notes.txt", "hs_1.safetensors.bak", "model.safetensors"):
        (tmp_path / name).touch()
    closed(tmp_path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["hs_1.safetensors.bak", "ledger.jsonl", "model.safetensors", "notes.txt"]


LINES = st.lists(st.tuples(st.integers(0, 19), st.sampled_from(["done", "recovered", "found", "failed"])), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.data())
def test_a_ledger_that_was_cut_off_anywhere_is_gone_on_with(tmp_path: Path, lines: list[tuple[int, Any]], data: st.DataObject) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    ledger = open_ledger(tmp_path, IDENTITY, 1, 0)
    for row, status in lines:
        ledger.append(Entry(row, status))
    ledger.close()
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n") - 1  # lines behind the first
    again = open_ledger(tmp_path, IDENTITY, 1, 0)
    again.append(Entry(19, "done", "x"))
    again.close()
    assert again.token == ledger.token if kept >= 0 else again.token != ledger.token
    # A last line that lacks nothing but its end counts.
    expected = [row for row, _ in lines[: max(kept, 0)]]
    found = [line["row"] for line in map(_parsed, path.read_bytes().splitlines()) if "row" in line]
    assert found in ([*expected, 19], [*expected, lines[kept][0], 19] if 0 <= kept < len(lines) else [])
    assert 19 in open_and_close(tmp_path).rows


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return value


def open_and_close(path: Path) -> Any:
    ledger = open_ledger(path, IDENTITY, 1, 0)
    ledger.close()
    return ledger.content


def test_garbage_between_lines_is_passed_over_and_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    output = opened(tmp_path)
    output.ledger.append(Entry(1, "done"))
    output.ledger.close()
    path = tmp_path / "ledger.jsonl"
    with open(path, "ab") as file:
        file.write(b'\x00\x00\n[1]\n{"row": "x"}\n{"row": 2, "status": "done"}\n{"server": 4}\n')
        file.write(b'{"server": {"layer_ids": "[1]", "dtype": "BF16", "row_shape": [1, 8]}, "directories": ["a\\u0000b"]}\n')
        file.write(b'{"row": 1, "status": "failed"}\n{"row": 3')
    content = open_and_close(tmp_path)
    assert (content.server, content.directories) == (None, [])
    assert [row for row in range(20) if row in content.rows] == [2]
    path.write_text("somebody's notes\n")
    with pytest.raises(InputError, match="ledger.jsonl does not begin as a ledger of this version does"):
        opened(tmp_path)
    assert path.read_text() == "somebody's notes\n"


def test_an_entry_says_what_is_known_and_no_more(tmp_path: Path) -> None:
    output = opened(tmp_path)
    output.ledger.append(Entry(3, "failed", attempts=4, error="because"))
    output.ledger.close()
    assert ledger_lines(tmp_path / "ledger.jsonl") == [{"row": 3, "status": "failed", "attempts": 4, "error": "because"}]


@settings(deadline=None)
@given(st.integers(0, 50), st.lists(st.tuples(st.booleans(), st.integers(-3, 60))), st.lists(st.integers(0, 60)))
def test_a_set_of_rows_is_a_set_of_those_that_there_are(size: int, changes: list[tuple[bool, int]], others: list[int]) -> None:
    rows, model = RowSet(size), set()
    for adds, row in changes:
        (rows.add if adds else rows.discard)(row)
        (model.add if adds else model.discard)(row)
    other = RowSet(size)
    for row in others:
        other.add(row)
    rows.update(other)
    model = {row for row in model | set(others) if 0 <= row < size}
    assert {row for row in range(-5, 70) if row in rows} == model
    assert len(rows) == len(model)


def test_a_lock_on_a_ledger_that_was_removed_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run with --overwrite, of another division, comes between the opening and the lock."""
    closed(tmp_path, world_size=2)
    opened_by_us: list[int] = []

    def open_and_lose(path: Any, *arguments: Any, **options: Any) -> int:
        fd = open_regular(path, *arguments, **options)
        if path.name == ledger_name(2, 0) and not opened_by_us:
            opened_by_us.append(fd)
            os.unlink(path)
        return fd

    monkeypatch.setattr(ledger_module, "open_regular", open_and_lose)
    fd = ledger_module.open_locked(tmp_path / ledger_name(2, 0), os.O_CREAT)
    monkeypatch.undo()
    with pytest.raises(InputError, match="belongs to a run that is under way"):
        opened(tmp_path, world_size=2)
    os.close(fd)


def test_from_its_first_removal_on_nobody_else_gets_a_directory_that_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(tmp_path)
    finish(tmp_path, 0, 1, 2)
    refusals = []

    def remove_and_look(path: Path) -> None:
        path.unlink()
        for overwrite in (False, True):
            with pytest.raises(InputError, match="belongs to a run that is under way") as refusal:
                opened(tmp_path, overwrite=overwrite)
            refusals.append(refusal)

    monkeypatch.setattr(output_module, "remove", remove_and_look)
    closed(tmp_path, overwrite=True)
    assert len(refusals) == 6
    assert os.listdir(tmp_path) == ["ledger.jsonl"]


def test_what_is_finished_is_looked_up_when_nobody_can_remove_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed(tmp_path)
    finish(tmp_path, 0, 1, 2)

    def replaced_before(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        closed(tmp_path, overwrite=True)
        return open_ledger(*arguments, **options)

    monkeypatch.setattr(output_module, "open_ledger", replaced_before)
    assert len(closed(tmp_path).finished) == 0


def test_overwrite_touches_nothing_while_a_run_of_another_division_is_under_way(tmp_path: Path) -> None:
    other = opened(tmp_path, world_size=2)
    finish(tmp_path, 0, 1, 2)
    with pytest.raises(InputError, match="a run that is under way with --world-size 2"):
        opened(tmp_path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["hs_0.safetensors", "hs_1.safetensors", "hs_2.safetensors", "ledger-0-of-2.jsonl"]
    other.ledger.close()
