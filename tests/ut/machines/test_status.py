"""`hsx status`: progress over all ranks' ledgers, whatever else is in the directory."""

from __future__ import annotations

import fcntl
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from documents import blocks
from generate_bench import Bench
from generate_files import Seen
from hostile import DEEP, KINDS, plant_no_file, promptly

from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.cli.status import parse_arguments
from vllm_ascend_hsx.generate.machines.status import Rank, Status, read_status

NOW = 1_000_000.0
ODD_LINES = [DEEP, "[" * 100_000, "[1]", "1e400", '{"row":1e400}', '{"row":true,"status":"done"}', '{"row":0,"status":[]}',
             '{"row":-1,"status":"done"}', '{"row":99999999999999999999,"status":"done"}',
             '{"run":1}', '{"run":{"rows":-4}}', '{"row":1,"row":2,"status":"done"}', "\0"]  # fmt: skip


def header(rank: int = 0, world_size: int = 1, rows: Any = 40, digest: str = "d") -> dict[str, Any]:
    return {"ledger": 2, "dataset": {"rows": rows, "digest": digest}, "request": {}, "world_size": world_size, "rank": rank}


def row(number: int, status: str = "done", age: float | None = 10.0) -> dict[str, Any]:
    return {"row": number, "status": status, **({} if age is None else {"time": NOW - age})}


def write(directory: Path, name: str, *lines: dict[str, Any] | str) -> None:
    directory.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / name).write_text("".join(text + "\n" for text in texts))


def read(*directories: Path) -> Status:
    return promptly(lambda: read_status(directories, NOW))


def test_all_ranks_count_and_a_rank_without_a_ledger_remains(tmp_path: Path) -> None:
    run = {"run": {"rows": 40}, "time": NOW - 3600}
    write(tmp_path, "ledger-0-of-3.jsonl", header(0, 3), run, *(row(each, age=5) for each in range(12)), row(12, "failed"))
    write(tmp_path, "ledger-1-of-3.jsonl", header(1, 3), run, row(16, age=300), row(17, "found", age=1))
    (one,) = read(tmp_path).runs
    assert (one.done, one.failed, one.remaining, one.rows) == (14, 1, 25, 40)
    assert one.rows_per_s == pytest.approx(12 / 60)
    assert one.ranks == [
        Rank(12, 1, 3, 12 / 60, "ledger-0-of-3.jsonl", 0, 3, NOW - 10),  # found rows are no speed
        Rank(2, 0, 14, 0.0, "ledger-1-of-3.jsonl", 1, 3, NOW - 1),
    ]


SCENARIOS: dict[str, tuple[list[dict[str, Any] | str], tuple[int, int, int], float | None]] = {
    "begun": ([header()], (0, 0, 40), None),
    "failed-and-then-done": ([header(), row(3, "failed"), row(3)], (1, 0, 39), 1 / 60),
    "done-twice": ([header(), row(3), row(3)], (1, 0, 39), 2 / 60),
    "limit": ([header(), {"run": {"rows": 10}, "time": NOW - 90}, row(3)], (1, 0, 9), 1 / 60),
    "limit-raised": ([header(), {"run": {"rows": 10}}, {"run": {"rows": 20}}, row(3)], (1, 0, 19), 1 / 60),
    "of-an-earlier-version": ([header(), row(3, age=None)], (1, 0, 39), None),
    "in-its-first-minute": ([header(), {"run": {"rows": 40}, "time": NOW - 10}, row(3), row(4)], (2, 0, 38), 2 / 10),
    "clock-ahead": ([header(), row(3, age=-5000)], (1, 0, 39), 1 / 60),
    "odd-lines": ([header(), *ODD_LINES, row(3)], (1, 0, 39), 1 / 60),
    "half-a-line": ([header(), row(3), '{"row":4,"status":"do'], (1, 0, 39), 1 / 60),
}


@pytest.mark.parametrize(("lines", "counts", "rate"), SCENARIOS.values(), ids=SCENARIOS)
def test_what_a_ledger_says(lines: list[dict[str, Any] | str], counts: tuple[int, int, int], rate: float | None, tmp_path: Path) -> None:
    write(tmp_path, "ledger.jsonl", *lines)
    status = read(tmp_path)
    (one,) = status.runs
    assert not status.problems and (one.done, one.failed, one.remaining) == counts
    assert one.rows_per_s == (rate if rate is None else pytest.approx(rate))


def test_a_row_of_two_ledgers_counts_once_and_done_counts_more_than_failed(tmp_path: Path) -> None:
    write(tmp_path, "ledger.jsonl", header(), row(3), row(4, "failed"), row(5, "failed"))
    write(tmp_path, "ledger-0-of-2.jsonl", header(0, 2), row(3), row(4))
    (one,) = read(tmp_path).runs
    assert (one.done, one.failed, one.remaining) == (2, 1, 37)


NO_LEDGERS: dict[str, tuple[str, str]] = {
    "empty-object": ("{}\n", "rows is no number"),
    "rows-without-end": (json.dumps(header(rows=10**18)) + "\n", "rows is no number from 1 to"),
    "no-rows": (json.dumps(header(rows="x")) + "\n", "rows is no number"),
    "no-rank": (json.dumps({**header(), "rank": 7}) + "\n", "rank is no number from 0 to 0"),
    "deep": (DEEP + "\n", "rows is no number"),
    "one-endless-line": ("x" * (3 << 20), "rows is no number"),
    "zeros": ("\0" * 5000 + "\n", "rows is no number"),
}


@pytest.mark.parametrize(("content", "problem"), NO_LEDGERS.values(), ids=NO_LEDGERS)
def test_what_is_no_ledger_costs_itself_alone(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "ledger-0-of-2.jsonl").write_text(content)
    write(tmp_path, "ledger-1-of-2.jsonl", header(1, 2), row(16))
    status = read(tmp_path)
    assert [each.done for each in status.runs] == [1]
    (told,) = status.problems
    assert told["path"].endswith("ledger-0-of-2.jsonl") and problem in told["problem"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_costs_itself_alone(kind: str, tmp_path: Path) -> None:
    plant_no_file(tmp_path / "ledger-0-of-2.jsonl", kind)
    write(tmp_path, "ledger-1-of-2.jsonl", header(1, 2), row(16))
    status = read(tmp_path)
    assert [each.done for each in status.runs] == [1] and len(status.problems) == 1


def test_a_ledger_of_another_dataset_is_another_run(tmp_path: Path) -> None:
    write(tmp_path, "ledger-0-of-2.jsonl", header(0, 2, digest="e"), row(1))
    write(tmp_path, "ledger-1-of-2.jsonl", header(1, 2), row(16), row(17))
    status = read(tmp_path)
    assert sorted((each.digest, each.done) for each in status.runs) == [("d", 2), ("e", 1)]
    assert status.total.done == 3


def test_a_locked_ledger_is_read_and_its_lock_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "ledger.jsonl", header(), row(1))
    with open(tmp_path / "ledger.jsonl", "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", None)
        assert read(tmp_path).total.done == 1


def test_a_ledger_whose_run_was_killed_in_its_first_line_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"ledger":2,"data')
    assert read(tmp_path) == Status()


def test_the_command_shows_ranks_sums_and_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", "ledger.jsonl", header(), *map(row, range(10)))
    write(tmp_path / "b", "ledger.jsonl", header(), row(3, "failed"))
    assert main(["status", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path}/a: 10 of 40 rows (25.0%), 0 failed, 30 remaining, 0.0 rows/s\n" in printed
    assert "all: 10 of 80 rows (12.5%), 1 failed, 69 remaining" in printed and "│ 0 of 1 │ 10   │" in printed
    assert main(["status", "--json", str(tmp_path / "a"), str(tmp_path / "none")]) == 1
    printed, errors = capsys.readouterr()
    found = json.loads(printed)
    assert (found["total"]["done"], found["runs"][0]["ranks"][0]["done"]) == (10, 10)
    assert f"hsx status: {tmp_path}/none: it cannot be read: No such file" in errors
    (tmp_path / "empty").mkdir()
    assert main(["status", str(tmp_path / "empty")]) == 2
    assert "it has no ledger; name a directory that was --output" in capsys.readouterr().err


def test_the_command_of_the_page_is_one_that_is_accepted() -> None:
    (command,) = blocks("generate.md", "status")
    words = shlex.split(command)
    assert words[:2] == ["hsx", "status"] and parse_arguments(words[2:]).directories == [Path("/data/hidden_states")]


def test_a_run_under_way_is_seen(bench: Bench) -> None:
    seen: list[tuple[int, int]] = []

    def look(request: Seen, stage: str) -> None:
        if request.row == 15 and stage == "asked":
            (one,) = read_status([bench.output]).runs
            seen.append((one.done, one.rows))

    bench.server.at = look
    code, printed = bench.run("--limit", 18, records=20)
    assert code == 0, printed
    # Another request may end before this one is answered.
    assert seen and 13 <= seen[0][0] <= 16 and seen[0][1] == 18
    (one,) = read_status([bench.output]).runs
    assert (one.done, one.failed, one.remaining) == (18, 0, 0)
    assert one.rows_per_s is not None and one.rows_per_s > 0
