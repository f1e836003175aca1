"""Bad rows do not stop a run. They are reported, counted and requested once they are fixed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from generate_bench import Bench
from generate_files import Seen, contents, right, token_rows

from vllm_ascend_hsx.generate.progress import Progress

BAD: dict[int, tuple[Any, str]] = {
    0: ({"token_ids": []}, "token_ids is empty; remove this row"),
    15: ({"messages": [{"role": "user"}]}, "messages[0].content is None; give the message's text"),
    16: ({"token_ids": [3, -1]}, "token_ids[1] is -1; token ids are whole numbers from 0"),
    150: ({"prompt": None}, "prompt is empty; remove this row"),
    299: ([1, 2], "the row is [1, 2]; give one JSON object per line"),
}
TOO_LONG, BROKEN = 77, 201
RECORDS = [BAD[row][0] if row in BAD else record for row, record in enumerate(token_rows(300))]
LENIENT = ("--skip-invalid", "--allow-failures", 2, "--concurrency", 8)


@pytest.fixture
def bad_bench(any_bench: Bench) -> Bench:
    """A server that refuses one row as too long and always fails with another row."""
    any_bench.server.behave = lambda seen: {TOO_LONG: 400, BROKEN: 502}.get(seen.row, "ok")
    return any_bench


def check(bench: Bench, without: set[int]) -> None:
    """Check that all other rows have the right files, and that there are no other files."""
    wanted = {
        f"hs_{row}.safetensors": right(each["token_ids"])
        for row, each in enumerate(token_rows(300))
        if row not in without
    }
    assert contents(bench.output) == {**wanted, "ledger.jsonl": {}}


def test_only_the_seven_bad_rows_of_300_are_missing_and_only_they_are_requested_once_fixed(
    bad_bench: Bench,
) -> None:
    bench, bad = bad_bench, {*BAD, TOO_LONG, BROKEN}
    code, printed = bench.run(*LENIENT, records=RECORDS)
    assert code == 0, printed
    check(bench, bad)
    assert bench.server.asked == Counter(
        {row: 4 if row == BROKEN else 1 for row in range(300) if row not in BAD}
    )
    for fact in (
        "rows │ 295 │",
        "generated │ 293 │",
        "invalid, skipped │ 5 │",
        "failed │ 2 │",
        "not done │ 0 │",
    ):
        assert fact in printed, printed
    for row, (_, problem) in BAD.items():
        assert f"skipped: {bench.root / 'data.jsonl'}:{row + 1}: {problem}" in printed, printed
    for row, status in ((TOO_LONG, 400), (BROKEN, 502)):
        reason = f"{bench.server.url}/v1/completions answers {status}: as the test wants: {status}"
        assert (
            printed.count(f"row {row} failed: {reason}")
            == printed.count(f"row {row}: {reason}")
            == 1
        ), printed
    lines = bench.lines()
    assert {row: line["status"] for row, line in lines.items() if row in bad} == dict.fromkeys(
        BAD, "invalid"
    ) | {
        TOO_LONG: "failed",
        BROKEN: "failed",
    }
    for row, (_, problem) in BAD.items():
        assert lines[row]["identity"] == "" and problem in lines[row]["error"]

    bench.server.seen.clear()
    bench.server.behave = lambda seen: "ok"
    mended = [*RECORDS]
    for row in bad:
        mended[row] = token_rows(300)[row]
    code, printed = bench.run("--concurrency", 8, records=mended)
    assert code == 0, printed
    assert bench.server.asked == Counter(bad)
    check(bench, set())


def test_next_run_skips_bad_rows_again_and_requests_only_failed_rows(
    bad_bench: Bench,
) -> None:
    bench = bad_bench
    assert bench.run(*LENIENT, records=RECORDS)[0] == 0
    bench.server.seen.clear()
    bench.server.behave = lambda seen: "ok"
    code, printed = bench.run(*LENIENT, records=RECORDS)
    assert (code, bench.server.asked) == (0, Counter({TOO_LONG, BROKEN})), printed
    assert "invalid, skipped │ 5 │" in printed and "finished before │ 293 │" in printed


def test_failed_row_is_reported_during_the_run(
    bad_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, int] = {}
    monkeypatch.setattr(
        Progress, "say", lambda progress, text: said.setdefault(text, len(bad_bench.server.seen))
    )
    assert bad_bench.run(*LENIENT, "--order", "given", records=RECORDS)[0] == 0
    first, second = (said[text] for text in said if " failed: " in text)
    assert TOO_LONG - len(BAD) < first <= TOO_LONG + 20 and second < 300 - len(BAD)


@pytest.mark.parametrize("allowed", [0, 1])
def test_exit_code_is_1_if_more_rows_fail_than_allowed(bad_bench: Bench, allowed: int) -> None:
    code, printed = bad_bench.run(
        "--skip-invalid", "--allow-failures", allowed, "--concurrency", 8, records=RECORDS
    )
    assert code == 1 and "failed │ 2 │" in printed, printed


def test_row_that_was_not_done_counts_as_failed(bench: Bench) -> None:
    """A stopped run fails, whatever number of failures is allowed."""
    bench.server.behave = lambda seen: "ok" if seen.row < 3 else 502
    code, printed = bench.run(
        "--allow-failures",
        100,
        "--max-retries",
        0,
        "--concurrency",
        1,
        "--max-consecutive-errors",
        1,
    )
    assert code == 1 and "not done │ 2 │" in printed and "failed │ 1 │" in printed, printed


def test_bad_row_is_refused_before_anything_is_sent_without_skip_invalid(bench: Bench) -> None:
    code, printed = bench.run("--allow-failures", 300, records=RECORDS)
    assert (code, bench.server.seen, bench.server.probes, bench.output.exists()) == (
        2,
        [],
        0,
        True,
    ), printed
    assert bench.server.files() == []
    assert (
        "data.jsonl: 5 rows cannot be sent; fix them, or skip them with --skip-invalid" in printed
    )
    for row, (_, problem) in BAD.items():
        assert f"data.jsonl:{row + 1}: {problem}" in printed


def test_run_with_only_bad_rows_skips_all_of_them(bench: Bench) -> None:
    code, printed = bench.run("--skip-invalid", records=[each for each, _ in BAD.values()])
    assert (code, bench.server.seen) == (0, []) and "invalid, skipped │ 5 │" in printed, printed


def test_each_rank_skips_only_its_own_bad_rows(bench: Bench) -> None:
    seen: list[Seen] = bench.server.seen
    left_out = []
    for rank in range(2):
        code, printed = bench.run(
            "--skip-invalid", "--world-size", 2, "--rank", rank, records=RECORDS
        )
        assert code == 0, printed
        ledger = bench.output / f"ledger-{rank}-of-2.jsonl"
        left_out.append([line for line in ledger.read_text().splitlines() if '"invalid","' in line])
    assert [len(each) for each in left_out] == [3, 2]
    assert Counter(each.row for each in seen) == Counter(set(range(300)) - set(BAD))
