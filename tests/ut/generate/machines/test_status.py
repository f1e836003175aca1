"""`hsx status` shows state and progress of the last run, whatever else is in the directory."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from documents import blocks
from generate_bench import Bench
from generate_files import Seen
from hostile import DEEP, KINDS, plant_no_file, promptly

from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.cli.status import parse_arguments
from vllm_ascend_hsx.generate.ledger import VERSION
from vllm_ascend_hsx.generate.status import Progress, read_status

NOW = 1_000_000.0
ODD_ROWS = ['{"row":1e400', '{"row":true,"status":"done"', '{"row":0,"status":[]', '{"row":-1,"status":"done"', '{"row":39,"status":"lost"',
            '{"row":99999999999999999999,"status":"done"', '{"row":1,"row":2,"status":"done"']  # fmt: skip
ODD_LINES = [DEEP, "[" * 100_000, "[1]", "1e400", "\0", '{"row":1,"status":"done"}', *(f'{each},"identity":""}}' for each in ODD_ROWS),
             '{"run":1}', '{"run":{"rows":-4}}', '{"run":{"rows":1e400}}', '{"run":{"rows":999999999999}}',
             '{"state":[]}', '{"state":"lost"}']  # fmt: skip
Line = dict[str, Any]


def header(rank: int = 0, world_size: int = 1) -> Line:
    return {"ledger": VERSION, "request": {}, "world_size": world_size, "rank": rank, "id": "0"}


def begin(rows: int = 40, age: float = 3600) -> Line:
    return {"run": {"rows": rows, "invalid": 0}, "time": NOW - age}


def row(number: int, status: str = "done", age: float = 10.0) -> Line:
    return {"row": number, "status": status, "identity": "0" * 32, "time": NOW - age}


def state(name: str, reason: str | None = None, age: float = 10.0) -> Line:
    return {"state": name, **({} if reason is None else {"reason": reason}), "time": NOW - age}


def write(directory: Path, name: str, *lines: Line | str, age: float = 0.0) -> None:
    """Write a ledger that was touched `age` seconds ago."""
    directory.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / name).write_text("".join(text + "\n" for text in texts))
    os.utime(directory / name, (NOW - age, NOW - age))


def read(*directories: Path) -> tuple[list[Progress], list[dict[str, str]]]:
    return promptly(lambda: read_status(directories, NOW))


def counts(progress: Progress) -> tuple[int, ...]:
    """(rows, done, made, failed, invalid, remaining)."""
    return (
        progress.rows,
        progress.done,
        progress.made,
        progress.failed,
        progress.invalid,
        progress.remaining,
    )


# Counts

COUNTED: dict[str, tuple[list[Line | str], tuple[int, ...]]] = {
    "begun": ([begin()], (40, 0, 0, 0, 0, 40)),
    "one-of-each": (
        [begin(), row(0), row(1, "found"), row(2, "failed"), row(3, "invalid")],
        (40, 2, 1, 1, 1, 36),
    ),
    "failed-and-then-done": ([begin(), row(3, "failed"), row(3)], (40, 1, 1, 0, 0, 39)),
    "done-twice": ([begin(), row(3), row(3)], (40, 1, 1, 0, 0, 39)),
    "changed": ([begin(), row(3), row(3, "changed")], (40, 0, 0, 0, 0, 40)),
    "changed-before-the-run": ([begin(), row(3), row(3, "changed"), begin()], (40, 0, 0, 0, 0, 40)),
    "changed-and-done-again": (
        [begin(), row(3), row(3, "changed"), begin(), row(3)],
        (40, 1, 1, 0, 0, 39),
    ),
    "rows-of-an-earlier-run-are-done-and-not-made": (
        [begin(), row(3), row(4, "found"), begin(), row(5)],
        (40, 3, 1, 0, 0, 37),
    ),
    "what-failed-in-an-earlier-run-remains": (
        [begin(), row(3, "failed"), row(4, "invalid"), begin()],
        (40, 0, 0, 0, 0, 40),
    ),
    "rows-outside-of-the-limit": (
        [begin(), row(3), row(10), row(30), row(31, "failed"), begin(10)],
        (10, 1, 0, 0, 0, 9),
    ),
    "a-raised-limit": (
        [begin(), row(3), row(30), begin(10), begin(40), row(31)],
        (40, 3, 1, 0, 0, 37),
    ),
    "odd-lines": ([begin(), *ODD_LINES, row(3)], (40, 1, 1, 0, 0, 39)),
    "half-a-line": ([begin(), row(3), '{"row":4,"status":"do'], (40, 1, 1, 0, 0, 39)),
    "no-run": ([], (0, 0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize(("lines", "counted"), COUNTED.values(), ids=COUNTED)
def test_rows_count_by_last_line_and_its_run(
    lines: list[Line | str], counted: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, "ledger.jsonl", header(), *lines)
    (run,), problems = read(tmp_path)
    assert not problems and counts(run) == counted == counts(run.ranks[0])


RATES: dict[str, tuple[list[Line], float]] = {
    "a-minute": ([begin(), row(1, age=300), row(2, age=59), row(3, age=1)], 2 / 60),
    "found-rows-are-no-speed": ([begin(), row(2, "found"), row(3)], 1 / 60),
    "nor-are-those-of-an-earlier-run": ([begin(), row(2), begin(age=120), row(3)], 1 / 60),
    "in-its-first-minute": ([begin(age=10), row(3), row(4)], 2 / 10),
    "a-clock-that-is-ahead": ([begin(), row(3, age=-5000)], 1 / 60),
    "times-that-are-none": (
        [{**begin(), "time": []}, {**row(3), "time": "x"}, {**row(4), "time": -1}],
        0.0,
    ),
}


@pytest.mark.parametrize(("lines", "rate"), RATES.values(), ids=RATES)
def test_rate_covers_rows_made_in_the_last_minute(
    lines: list[Line], rate: float, tmp_path: Path
) -> None:
    write(tmp_path, "ledger.jsonl", header(), *lines)
    (run,), _ = read(tmp_path)
    assert run.rows_per_s == run.ranks[0].rows_per_s == pytest.approx(rate)


def test_rows_of_a_rank_without_a_ledger_remain(tmp_path: Path) -> None:
    write(
        tmp_path,
        "ledger-0-of-3.jsonl",
        header(0, 3),
        begin(),
        *(row(each, age=5) for each in range(12)),
        row(12, "failed"),
    )
    write(
        tmp_path,
        "ledger-1-of-3.jsonl",
        header(1, 3),
        begin(),
        row(16, age=300),
        row(17, "found", age=1),
    )
    (run,), _ = read(tmp_path)
    assert counts(run) == (40, 14, 13, 1, 0, 25) and run.rows_per_s == pytest.approx(12 / 60)
    assert run.state == "2 running, 1 not begun"
    assert [(each.name, *counts(each)) for each in run.ranks] == [
        ("ledger-0-of-3.jsonl", 16, 12, 12, 1, 0, 3),
        ("ledger-1-of-3.jsonl", 16, 2, 1, 0, 0, 14),
    ]


def test_ledgers_of_another_world_size_are_from_an_earlier_run(tmp_path: Path) -> None:
    write(
        tmp_path,
        "ledger-0-of-2.jsonl",
        header(0, 2),
        begin(age=90),
        row(1),
        row(2, "changed"),
        row(0, "failed"),
    )
    write(
        tmp_path,
        "ledger.jsonl",
        header(),
        begin(age=900),
        row(1, "failed"),
        row(2),
        row(3),
        row(5, "failed"),
    )
    (run,), _ = read(tmp_path)
    assert counts(run) == (40, 2, 1, 1, 0, 37)
    assert [each.name for each in run.ranks] == ["ledger-0-of-2.jsonl"] and counts(
        run.ranks[0]
    ) == (24, 2, 1, 1, 0, 21)


# States

STATES: dict[str, tuple[list[Line], float, str, str]] = {
    "begun": ([begin()], 0, "running", ""),
    "running": ([begin(), state("running"), row(3)], 59, "running", ""),
    "waiting": (
        [begin(), state("waiting", "http://a does not answer")],
        0,
        "waiting",
        "http://a does not answer",
    ),
    "running-again": ([begin(), state("waiting", "x"), state("running")], 0, "running", ""),
    "stopped": ([begin(), state("stopped", "SIGINT")], 720, "stopped", "SIGINT"),
    "finished": ([begin(), state("finished")], 720, "finished", ""),
    "begun-again": ([begin(), state("stopped", "SIGINT"), begin()], 0, "running", ""),
    "dead-while-it-ran": (
        [begin(), state("running")],
        720,
        "stopped",
        "no update for 0:12:00",
    ),
    "dead-while-it-waited": (
        [begin(), state("waiting", "x")],
        61,
        "stopped",
        "no update for 0:01:01",
    ),
    "a-clock-that-is-ahead": ([begin(), state("running")], -720, "running", ""),
    "killed-before-it-began": ([], 720, "stopped", "no update for 0:12:00"),
    "a-reason-without-end": ([begin(), state("stopped", "x" * 10_000)], 0, "stopped", "x" * 300),
}


@pytest.mark.parametrize(("lines", "age", "name", "reason"), STATES.values(), ids=STATES)
def test_a_run_is_running_waiting_stopped_or_finished(
    lines: list[Line], age: float, name: str, reason: str, tmp_path: Path
) -> None:
    write(tmp_path, "ledger.jsonl", header(), *lines, age=age)
    (run,), _ = read(tmp_path)
    assert (run.state, run.ranks[0].state, run.ranks[0].reason) == (name, name, reason)


def test_state_of_several_ranks_counts_them(tmp_path: Path) -> None:
    write(tmp_path, "ledger-0-of-4.jsonl", header(0, 4), begin())
    write(tmp_path, "ledger-1-of-4.jsonl", header(1, 4), begin(), state("waiting", "x"))
    write(tmp_path, "ledger-3-of-4.jsonl", header(3, 4), begin())
    (run,), _ = read(tmp_path)
    assert run.state == "2 running, 1 waiting, 1 not begun"


# Invalid ledgers

NO_LEDGERS: dict[str, str] = {
    "empty-object": "{}\n",
    "another-version": json.dumps({**header(), "ledger": VERSION - 1}) + "\n",
    "no-rank": json.dumps({**header(), "rank": 7}) + "\n",
    "ranks-without-end": json.dumps({**header(), "world_size": 10**18}) + "\n",
    "ranks-that-are-no-number": json.dumps({**header(), "world_size": "2", "rank": "0"}) + "\n",
    "deep": DEEP + "\n",
    "one-endless-line": "x" * (3 << 20),
    "zeros": "\0" * 5000 + "\n",
}


@pytest.mark.parametrize("content", NO_LEDGERS.values(), ids=NO_LEDGERS)
def test_invalid_ledger_is_reported_and_others_are_read(content: str, tmp_path: Path) -> None:
    (tmp_path / "ledger-0-of-2.jsonl").write_text(content)
    write(tmp_path, "ledger-1-of-2.jsonl", header(1, 2), begin(), row(16))
    (run,), (told,) = read(tmp_path)
    assert run.done == 1
    assert told == {
        "path": str(tmp_path / "ledger-0-of-2.jsonl"),
        "problem": f"the first line is not the header of a ledger of version {VERSION}",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_special_file_is_reported_and_other_ledgers_are_read(kind: str, tmp_path: Path) -> None:
    plant_no_file(tmp_path / "ledger-0-of-2.jsonl", kind)
    write(tmp_path, "ledger-1-of-2.jsonl", header(1, 2), begin(), row(16))
    (run,), problems = read(tmp_path)
    assert run.done == 1 and len(problems) == 1


def test_huge_row_numbers_are_read_promptly(tmp_path: Path) -> None:
    write(tmp_path, "ledger.jsonl", header(), *([begin(1 << 28), row((1 << 28) - 1)] * 2000))
    (run,), _ = read(tmp_path)
    assert (run.rows, run.done) == (1 << 28, 1)


def test_locked_ledger_is_read_without_touching_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "ledger.jsonl", header(), begin(), row(1))
    with open(tmp_path / "ledger.jsonl", "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", None)
        assert read(tmp_path)[0][0].done == 1


def test_ledger_with_an_incomplete_first_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text(f'{{"ledger":{VERSION},"requ')
    assert read(tmp_path) == ([], [])


# The command


def test_command_shows_ranks_totals_reasons_and_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path / "a",
        "ledger.jsonl",
        header(),
        begin(),
        *map(row, range(10)),
        state("stopped", "the disk is full\x1b[31m"),
    )
    write(
        tmp_path / "b",
        "ledger.jsonl",
        header(),
        begin(),
        row(3, "failed"),
        row(4, "invalid"),
        state("finished"),
    )
    assert main(["status", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    line = (
        f"{tmp_path}/a: stopped, 10 of 40 rows done (25.0%), 10 by this run, 0 failed, 0 "
        "invalid, 30 remaining, 0.0 rows/s\n"
    )
    assert line in printed and "ledger.jsonl: stopped: the disk is full\\x1b[31m\n" in printed
    assert f"{tmp_path}/b: finished, 0 of 40 rows done" in printed
    assert (
        "all: 10 of 80 rows done (12.5%), 10 by this run, 1 failed, 1 invalid, 68 remaining"
        in printed
    )
    assert "│ ledger.jsonl │ stopped │ 10   │" in printed
    assert main(["status", "--json", str(tmp_path / "a"), str(tmp_path / "none")]) == 1
    printed, errors = capsys.readouterr()
    found = json.loads(printed)
    assert (
        found["total"]["done"],
        found["runs"][0]["ranks"][0]["done"],
        found["runs"][0]["ranks"][0]["state"],
    ) == (10, 10, "stopped")
    assert f"hsx status: {tmp_path}/none: cannot be read: No such file" in errors


def test_command_shows_the_remaining_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    begun = {**begin(80), "time": now - 20}
    write(
        tmp_path,
        "ledger.jsonl",
        header(),
        begun,
        *({**row(each), "time": now} for each in range(40)),
    )
    os.utime(tmp_path / "ledger.jsonl")
    assert main(["status", str(tmp_path)]) == 0
    assert " rows/s, ETA 0:00:2" in capsys.readouterr().out


def test_directory_without_a_ledger_is_reported_with_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert problem == (
        f"hsx status: {tmp_path}: no ledger there; give a directory that was --output of "
        "`hsx generate`"
    )


def test_documented_command_is_accepted() -> None:
    (command,) = blocks("generate.md", "status")
    words = shlex.split(command)
    assert words[:2] == ["hsx", "status"] and parse_arguments(words[2:]).directories == [
        Path("/data/hidden_states")
    ]


def test_running_run_is_shown(bench: Bench) -> None:
    seen: list[Progress] = []

    def look(request: Seen, stage: str) -> None:
        if request.row == 15 and stage == "asked":
            seen.extend(read_status([bench.output], time.time())[0])

    bench.server.at = look
    code, printed = bench.run("--limit", 18, records=20)
    assert code == 0, printed
    # Another request may end earlier.
    assert seen[0].state == "running" and 13 <= seen[0].made <= 16 and seen[0].rows == 18
    (run,), _ = read_status([bench.output], time.time())
    assert run.state == "finished" and counts(run) == (18, 18, 18, 0, 0, 0) and run.rows_per_s > 0
    code, printed = bench.run("--limit", 18, records=20)
    (run,), _ = read_status([bench.output], time.time())
    assert code == 0 and counts(run) == (18, 18, 0, 0, 0, 0), "found, not made"
