"""`hsx generate` as a command, against servers that are slow, faulty or dead."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from documents import blocks
from generate_bench import Bench
from generate_files import (
    Exchange,
    Seen,
    contents,
    ledger_lines,
    right,
    stored_ids,
    token_rows,
    write_jsonl,
)
from generate_harness import FakeServer

from vllm_ascend_hsx.generate.files import identity_in
from vllm_ascend_hsx.generate.ledger import row_file
from vllm_ascend_hsx.protocol.api import path_in_use
from vllm_ascend_hsx.reader.check import check
from vllm_ascend_hsx.reader.load import load

# Runs the command as if torch and vLLM were not installed.
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "vllm_ascend", "torch_npu"), None))
from vllm_ascend_hsx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_every_row_gets_its_file_and_its_line(any_bench: Bench) -> None:
    bench = any_bench
    code, printed = bench.run("--validate")
    assert code == 0, printed
    bench.check(list(range(6)))
    for row, line in bench.lines().items():
        assert line.pop("seconds") >= 0 and line.pop("time") == pytest.approx(time.time(), abs=600)
        tokens = len(token_rows(6)[row]["token_ids"])
        found = check(bench.output / row_file(row))
        identity, size = identity_in(found.metadata), found.file_bytes
        facts = {
            "identity": identity,
            "tokens": tokens,
            "bytes": size,
            "attempts": 1,
            "endpoint": bench.server.url,
        }
        assert line == {"row": row, "status": "done", **facts}
    assert re.search(r"generated │ 6 │", printed) and re.search(r"tokens │ 27, ", printed)
    # The second run has nothing to do and needs no server.
    probes = bench.server.probes
    code, printed = bench.run(endpoint="http://127.0.0.1:9")
    assert code == 0 and re.search(r"finished before │ 6 │", printed), printed
    assert (bench.server.asked, bench.server.probes) == (Counter(range(6)), probes)


def test_prompts_and_chats_are_sent_as_such(bench: Bench) -> None:
    chat = [{"from": "human", "value": "Why?"}]
    assert bench.run("--validate", records=[{"prompt": "Who, ü?"}, {"conversations": chat}])[0] == 0
    wanted = [list("Who, ü?".encode()), list(b"<user>Why?<assistant>")]
    assert [stored_ids(bench.output / f"hs_{row}.safetensors") for row in (0, 1)] == wanted
    assert {seen.endpoint for seen in bench.server.seen} == {"completions", "chat/completions"}


def test_rows_of_generated_tokens(bench: Bench) -> None:
    records = [{"token_ids": [3, 4]}, {"prompt": "ab"}]
    assert (
        bench.run("--validate", "--include-output-tokens", "--max-tokens", 4, records=records)[0]
        == 0
    )
    assert [stored_ids(bench.output / f"hs_{row}.safetensors") for row in (0, 1)] == [
        [3, 4, 7, 8, 9],
        [97, 98, 7, 8, 9],
    ]
    # Rows of another kind of request are refused.
    code, printed = bench.run(records=records)
    assert code == 2 and "other requests: max_tokens was 4, is 1" in printed


# Retries


class Case(NamedTuple):
    """Answers to requests for row 2, and the result of the row.

    Attributes:
        behaviours: behaviours of the server for row 2; the last is repeated.
        times: number of requests for row 2.
        status: final status of the row.
        error: error in the ledger, if the row failed.
    """

    behaviours: list[str | int]
    times: int
    status: str = "done"
    error: str = ""
    options: tuple[object, ...] = ()


# One request at a time, so that only row 2 times out, even on a slow disk.
PATIENT = ("--request-timeout", 3, "--concurrency", 1)
CASES = {
    "late": Case(["late"], 1),
    "answers-out-of-order": Case(["after-next"], 1),
    "bad-gateway": Case([502, "ok"], 2),
    "unavailable-three-times": Case([503, 503, 500, "ok"], 4),
    "unavailable-for-ever": Case([503], 4, "failed", "answers 503: as the test wants: 503"),
    "unavailable-without-retries": Case([503], 1, "failed", "answers 503", ("--max-retries", 0)),
    "too-many-requests": Case([429, "ok"], 2),
    "told-when-to-come-back": Case(["retry-after", "ok"], 2),
    "request-timeout-by-server": Case([408, "ok"], 2),
    "bad-request": Case([400], 1, "failed", "answers 400: as the test wants: 400"),
    "unprocessable": Case([422], 1, "failed", "answers 422"),
    "no-such-model": Case([404], 4, "failed", "answers 404"),
    "gone-for-a-moment": Case([404, "ok"], 2),
    "too-large": Case([413], 1, "failed", "answers 413"),
    "redirect": Case([302], 4, "failed", "answers 302"),
    "connection-breaks": Case(["drop", "ok"], 2),
    "connection-breaks-for-ever": Case(["drop"], 4, "failed", "the connection broke"),
    "answer-is-lost-the-file-is-there": Case(["drop-complete"], 1),
    "hangs": Case(["hang", "ok"], 2, options=PATIENT),
    "hangs-but-the-file-is-there": Case(["hang-complete"], 1, options=PATIENT),
    "file-comes-too-late": Case(["file-when-asked-again", "ok"], 2, options=PATIENT),
    "error-file": Case(["error-file", "ok"], 2),
    "error-file-for-ever": Case(["error-file"], 4, "failed", "no space on the server's disk"),
    "error-in-the-answer": Case(["error-in-answer", "ok"], 2),
    "error-in-the-answer-for-ever": Case(
        ["error-in-answer"], 4, "failed", "could not store the hidden states: it cannot be opened"
    ),
    "no-file": Case(["no-file", "ok"], 2),
    "no-file-named": Case(
        ["no-params"], 4, "failed", "the answer names no file (kv_transfer_params: {})"
    ),
    "no-json": Case(["no-json"], 4, "failed", "did not return JSON: <html>a proxy's page</html>"),
    "not-finite": Case(["not-finite", "ok"], 2, options=("--validate",)),
    "not-finite-for-ever": Case(["not-finite"], 4, "failed", "not finite", ("--validate",)),
    "corrupt": Case(["corrupt", "ok"], 2, options=("--validate",)),
    "rows-of-another-request": Case(["other-tokens"], 4, "failed", "is 201, not 200"),
    "other-layers-and-no-answer": Case(["drop-other-layers", "ok"], 2),
    "an-answer-of-other-tokens-with-the-right-file": Case(["other-prompt"], 1),
    "other-tokens-were-computed": Case(
        ["other-computed"], 4, "failed", "prompt token 1 is 1, not 201"
    ),
    "everything-at-once": Case([500, "drop", "error-file", "ok"], 4),
}


@pytest.mark.parametrize("name", CASES)
def test_which_failures_are_retried(any_bench: Bench, name: str) -> None:
    bench, case = any_bench, CASES[name]

    def behave(seen: Seen) -> str | int:
        return case.behaviours[min(seen.time, len(case.behaviours)) - 1] if seen.row == 2 else "ok"

    bench.server.behave = behave
    code, printed = bench.run(*case.options, "--max-consecutive-errors", 100)
    assert bench.server.asked == Counter({row: case.times if row == 2 else 1 for row in range(6)})
    line = bench.lines()[2]
    assert line["status"] == case.status
    assert line["attempts"] == case.times
    assert case.error in line.get("error", "")
    assert code == (0 if case.status == "done" else 1)
    assert ("row 2: " in printed) == (case.status == "failed")
    bench.check([row for row in range(6) if row != 2 or case.status == "done"])


def test_next_run_requests_only_failed_rows(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row in (1, 4) else "ok"
    assert bench.run()[0] == 1
    bench.server.behave = lambda seen: "ok"
    assert bench.run()[0] == 0
    assert bench.server.asked == Counter({0: 1, 1: 2, 2: 1, 3: 1, 4: 2, 5: 1})
    bench.check(list(range(6)))
    assert {line["status"] for line in bench.lines().values()} == {"done"}


# End of a run


def test_consecutive_errors_end_the_run(bench: Bench) -> None:
    bench.server.behave = lambda seen: 503 if seen.row >= 10 else "ok"  # type: ignore[operator]
    options = ("--max-consecutive-errors", 4, "--concurrency", 1, "--max-retries", 0)
    code, printed = bench.run(*options, records=60)
    assert code == 1
    assert "stopped: 4 errors in a row (--max-consecutive-errors), the last: " in printed
    assert "run again to continue" in printed
    assert max(bench.lines()) < 20
    assert re.search(r"not done +│ +\d\d │", printed)
    bench.check(list(range(10)), records=60)


def test_errors_with_finished_rows_in_between_do_not_end_the_run(bench: Bench) -> None:
    bench.server.behave = lambda seen: 503 if seen.row % 2 else "ok"  # type: ignore[operator]
    assert (
        bench.run(
            "--max-consecutive-errors", 3, "--concurrency", 1, "--max-retries", 0, records=20
        )[0]
        == 1
    )
    bench.check(list(range(0, 20, 2)), records=20)


def test_refused_rows_do_not_end_the_run(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row < 10 else "ok"  # type: ignore[operator]
    code, printed = bench.run("--max-consecutive-errors", 3, "--concurrency", 1, records=20)
    assert code == 1 and "errors in a row" not in printed
    assert [line["status"] for _, line in sorted(bench.lines().items())] == ["failed"] * 10 + [
        "done"
    ] * 10
    bench.check(list(range(10, 20)), records=20)


def test_permanently_dead_server_ends_the_run(bench: Bench) -> None:
    def die(seen: Seen, stage: str) -> None:
        if seen.row == 3 and stage == "asked":
            bench.server._loop.call_soon_threadsafe(bench.server._server.close)

    bench.server.at = die
    bench.server.behave = lambda seen: "drop" if seen.row >= 3 else "ok"  # type: ignore[operator]
    code, printed = bench.run("--concurrency", 1, "--max-consecutive-errors", 3, records=40)
    assert code == 1
    assert "next request to" in printed and "all servers fail; 2 more errors end the run" in printed
    assert "stopped: 3 errors in a row" in printed
    bench.check([0, 1, 2], records=40)


def test_quantised_rows_are_accepted(bench: Bench, tmp_path: Path) -> None:
    with FakeServer(tmp_path / "second", quantization="fp8") as other:
        bench.output = other.storage
        assert bench.run("--validate", endpoint=other.url)[0] == 0
    assert bench.rows == list(range(6))
    for row in bench.rows:
        states = load(bench.output / f"hs_{row}.safetensors", 0, verify=True)
        assert (
            states.token_ids.tolist() == token_rows(6)[row]["token_ids"]
            and states.scales is not None
        )


# Several servers, several runs


def test_ranks_divide_the_rows(bench: Bench) -> None:
    for rank in range(3):
        code, printed = bench.run("--world-size", 3, "--rank", rank, records=70)
        assert code == 0
        lines = ledger_lines(bench.output / f"ledger-{rank}-of-3.jsonl")
        rows = [row for row in range(70) if row // 16 % 3 == rank]  # neighbours stay together
        assert sorted(line["row"] for line in lines) == rows
        assert f"rows │ {len(rows)} │" in printed and "not done │ 0 │" in printed
    assert bench.server.asked == Counter(range(70))
    # A run of one rank finds all rows done and logs none again.
    assert bench.run(records=70)[0] == 0
    assert len(bench.server.seen) == 70
    assert not bench.lines()


def test_a_limit_can_be_raised_later(bench: Bench) -> None:
    assert bench.run("--limit", 2)[0] == 0
    assert sorted(bench.rows) == [0, 1]
    assert bench.run("--limit", 100)[0] == 0
    bench.check(list(range(6)))
    assert bench.server.asked == Counter(range(6))


def test_concurrency_limits_requests_in_flight(bench: Bench) -> None:
    # The first request is answered immediately. Until then the server gets one at a time.
    bench.server.behave = lambda seen: (
        "after-next" if seen.row % 4 and len(bench.server.seen) > 1 else "ok"
    )
    assert (
        bench.run("--concurrency", 4, records=41)[0] == 0
    )  # with fewer than 4 in flight there would be no answer
    assert bench.server.most_at_once == 4
    bench.check(list(range(41)), records=41)


def test_path_in_use_by_another_request_is_retried(bench: Bench) -> None:
    async def do_in_use(exchange: Exchange) -> None:
        problem = path_in_use(str(bench.server.path(exchange.seen)))
        await bench.server.answer(
            exchange, None, kv_transfer_params={"hidden_states_error": problem}
        )

    bench.server.do_in_use = do_in_use  # type: ignore[attr-defined]
    bench.server.behave = lambda seen: "in-use" if seen.row == 3 and seen.time < 3 else "ok"
    code, printed = bench.run()
    assert code == 0, printed
    assert bench.server.asked == Counter({**dict.fromkeys(range(6), 1), 3: 3})
    bench.check(list(range(6)))


@pytest.mark.parametrize(
    "record",
    [{"prompt": "new"}, {"messages": [{"role": "user", "content": "new"}]}],
    ids=["text", "chat"],
)
def test_file_of_another_request_is_never_used_for_a_text(
    any_bench: Bench, record: dict[str, Any]
) -> None:
    """The server of a killed run may still write rows of another dataset under this name."""
    bench = any_bench

    async def do_other_publishes(exchange: Exchange) -> None:
        earlier = Seen(
            exchange.seen.row,
            0,
            "completions",
            {**exchange.seen.body, "prompt": "old", "request_id": "earlier"},
        )
        earlier.body.pop("messages", None)
        old = replace(exchange, seen=earlier)
        await bench.server.publish(old, await bench.server.begin(old))
        exchange.writer.close()

    bench.server.do_other_publishes = do_other_publishes  # type: ignore[attr-defined]
    bench.server.behave = lambda seen: "other-publishes" if seen.time == 1 else "ok"
    code, printed = bench.run("--validate", records=[record])
    assert code == 0, printed
    assert bench.server.asked == Counter({0: 2})
    assert contents(bench.output) == {
        "hs_0.safetensors": right(bench.server.seen[-1].stored),
        "ledger.jsonl": {},
    }


@pytest.mark.parametrize(
    "record",
    [{"prompt": "new"}, {"messages": [{"role": "user", "content": "new"}]}],
    ids=["text", "chat"],
)
def test_file_of_a_text_is_used_without_an_answer_if_this_run_requested_it(
    any_bench: Bench, record: dict[str, Any]
) -> None:
    any_bench.server.behave = lambda seen: "drop-complete"
    assert any_bench.run(records=[record])[0] == 0
    assert any_bench.server.asked == Counter({0: 1})


def test_documented_command_works(bench: Bench, tmp_path: Path) -> None:
    (shown,) = blocks("generate.md", "generate")
    with FakeServer(bench.output) as second:
        data = write_jsonl(
            tmp_path / "conversations.jsonl",
            [{"conversations": [{"from": "human", "value": str(row)}]} for row in range(9)],
        )
        command = shown.replace("http://node1:8000", bench.server.url).replace(
            "http://node2:8000", second.url
        )
        words = shlex.split(
            command.replace("conversations.jsonl", str(data)).replace(
                "/data/hidden_states", str(bench.output)
            )
        )
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words[1:]],
            text=True,
            capture_output=True,
            check=False,
        )
        assert words[0] == "hsx" and done.returncode == 0, done.stderr
        assert second.asked + bench.server.asked == Counter(range(9))
    assert bench.rows == list(range(9))
    assert sorted(bench.lines()) == list(range(9))
