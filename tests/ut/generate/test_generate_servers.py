"""`hsx generate` shares rows between servers. A bad server costs time but no row."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from generate_bench import Bench
from generate_files import Exchange, Seen, contents
from generate_harness import FakeServer
from test_generate_refusals import other_layers


def test_several_servers_share_rows_and_a_dead_server_loses_none(
    bench: Bench, tmp_path: Path
) -> None:
    with FakeServer(bench.output) as second, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = bench.run("--endpoint", f"{dead},{second.url}/v1/", records=150)
        assert code == 0
        assert (
            f"{dead}/v1/models: [Errno 111] Connect call failed" in printed
            and f"; next request to {dead} in" in printed
        )
        both = bench.server.asked + second.asked
        assert both == Counter(range(150))
        assert min(len(bench.server.seen), len(second.seen)) > 5
        assert re.search(rf"{second.url} │ {len(second.seen)} answered, 0 failed", printed)
    bench.check(list(range(150)), records=150)


def test_server_that_starts_later_gets_rows(bench: Bench) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    second = FakeServer(bench.output, port=port)

    def start(seen: Seen, stage: str) -> None:
        if seen.row == 5 and stage == "asked":
            second.__enter__()

    bench.server.at = start
    try:
        assert (
            bench.run("--endpoint", f"http://127.0.0.1:{port}", "--concurrency", 2, records=400)[0]
            == 0
        )
        assert second.seen
    finally:
        second.__exit__(None, None, None)
    bench.check(list(range(400)), records=400)


def test_row_that_fails_is_next_sent_to_a_good_server(bench: Bench) -> None:
    with ExitStack() as servers:
        bad = [servers.enter_context(FakeServer(bench.output, lambda seen: 502)) for _ in range(5)]
        code, printed = bench.run(
            "--endpoint", ",".join(each.url for each in bad), "--max-retries", 1, records=60
        )
        assert code == 0, printed
        assert sum(len(each.seen) for each in bad) > 5
    bench.check(list(range(60)), records=60)


@pytest.mark.parametrize("bad", [4, 10])
def test_concurrency_of_one_finds_the_only_working_server(bench: Bench, bad: int) -> None:
    with ExitStack() as servers:
        bench.server.behave = lambda seen: 502
        others = [
            servers.enter_context(FakeServer(bench.output, lambda seen: 502))
            for _ in range(bad - 1)
        ]
        good = servers.enter_context(FakeServer(bench.output))
        endpoints = ",".join(each.url for each in (*others, good))
        code, printed = bench.run("--endpoint", endpoints, "--concurrency", 1, records=2)
        assert code == 0, printed
    bench.check([0, 1], records=2)


def test_trials_of_servers_do_not_use_up_attempts(bench: Bench) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bad = FakeServer(bench.output, lambda seen: "drop" if seen.row % 2 else 502, port=port)

    def start(seen: Seen, stage: str) -> None:
        if seen.row == 5 and stage == "asked":
            bad.__enter__()

    bench.server.at = start
    try:
        code, printed = bench.run(
            "--endpoint", f"http://127.0.0.1:{port}", "--max-retries", 0, records=400
        )
        assert code == 0, printed
        assert bad.seen
    finally:
        bad.__exit__(None, None, None)
    bench.check(list(range(400)), records=400)


def test_run_ends_if_all_servers_fail(bench: Bench) -> None:
    with FakeServer(bench.output) as second:
        for server in (bench.server, second):
            server.behave = lambda seen: 502 if seen.row >= 10 else "ok"  # type: ignore[operator]
        code, printed = bench.run(
            "--endpoint", second.url, "--max-consecutive-errors", 4, records=60
        )
    assert code == 1
    assert "stopped: 4 errors in a row" in printed
    assert max(bench.lines()) < 20
    bench.check(list(range(10)), records=60)


@pytest.mark.parametrize(("stage", "behaviour"), [("written", "ok"), ("asked", 502)])
def test_output_replaced_by_another_run_is_not_touched(
    bench: Bench, stage: str, behaviour: str | int
) -> None:
    """A suspended run continues after its directory was replaced by that of another run."""
    storage = bench.output
    bench.output = storage / "b"
    assert bench.run(records=[{"token_ids": [7, 7, row]} for row in range(6)])[0] == 0
    (bench.output / "hs_4.safetensors.error").write_text("{}")
    of_b = {path.name: path.read_bytes() for path in bench.output.iterdir()}
    bench.output = storage / "a"

    def rotate(seen: Seen, now: str) -> None:
        if (seen.row, seen.time, now) == (2, 2, stage):
            shutil.move(bench.output, storage / "earlier")
            shutil.move(storage / "b", bench.output)

    bench.server.at = rotate
    bench.server.behave = lambda seen: behaviour if (seen.row, seen.time) == (2, 2) else "ok"
    code, printed = bench.run("--concurrency", 1)
    assert code == 1 and "was moved, removed or replaced during the run" in printed
    assert {path.name: path.read_bytes() for path in bench.output.iterdir()} == of_b


def states(bench: Bench) -> list[str]:
    """Return the states of the runs, in order."""
    lines = map(json.loads, (bench.output / "ledger.jsonl").read_text().splitlines())
    return [line["state"] for line in lines if "state" in line]


@pytest.mark.parametrize("behaviour", ["drop", 502])
def test_waiting_for_the_only_server_is_reported_once(bench: Bench, behaviour: str | int) -> None:
    bench.server.behave = lambda seen: behaviour if 10 <= len(bench.server.seen) < 18 else "ok"
    # One request at a time: an earlier request that succeeds would end the pauses.
    code, printed = bench.run(
        "--max-consecutive-errors", 40, "--max-retries", 30, "--concurrency", 1, records=60
    )
    assert code == 0, printed
    assert printed.count(f"; next request to {bench.server.url} in 0 s") == 1, printed
    assert (
        printed.count("all servers fail; 39 more errors end the run (--max-consecutive-errors)")
        == 1
    ), printed
    assert states(bench) == ["running", "waiting", "running", "finished"]
    bench.check(list(range(60)), records=60)


def test_remaining_errors_are_reported_before_the_run_gives_up(bench: Bench) -> None:
    bench.server.behave = lambda seen: "ok" if seen.row < 3 else "drop"
    code, printed = bench.run(
        "--max-consecutive-errors", 3, "--max-retries", 30, "--concurrency", 1
    )
    assert code == 1 and len(bench.server.seen) == 6, printed
    assert (
        printed.count("all servers fail; 2 more errors end the run (--max-consecutive-errors)") == 1
    ), printed
    assert "stopped: 3 errors in a row (--max-consecutive-errors), the last: " in printed
    assert states(bench) == ["running", "waiting", "stopped"]


def test_run_ended_by_the_first_error_reports_no_remaining_errors(bench: Bench) -> None:
    bench.server.behave = lambda seen: "ok" if seen.row < 3 else "drop"
    code, printed = bench.run("--max-consecutive-errors", 1, "--concurrency", 1)
    assert (
        code == 1 and "all servers fail" not in printed and "stopped: 1 errors in a row" in printed
    ), printed
    assert states(bench) == ["running", "stopped"]


def test_run_does_not_wait_while_one_server_works(bench: Bench) -> None:
    with FakeServer(bench.output) as second:
        second.behave = lambda seen: "ok" if len(second.seen) < 3 else "drop"
        code, printed = bench.run("--endpoint", second.url, records=60)
    assert code == 0 and printed.count(f"next request to {second.url} in") == 1, printed
    assert "all servers fail" not in printed and states(bench) == ["running", "finished"]


@pytest.mark.parametrize("model", [(), ("--model", "tiny")])
def test_restarted_server_with_another_model_is_reported_immediately(
    bench: Bench, model: tuple[str, ...]
) -> None:
    """The server answers 404 to the name that it had at the first request."""
    server = bench.server

    def behave(seen: Seen) -> str | int:
        if seen.row == 20:
            server.model = "other"
        return (
            ("ok" if server.model == "tiny" else "other")
            if seen.body["model"] == server.model
            else 404
        )

    async def do_other(exchange: Exchange) -> None:
        await other_layers(exchange, server, model="other")

    server.behave, server.do_other = behave, do_other  # type: ignore[attr-defined]
    code, printed = bench.run(*model, records=60)
    reason = (
        f"{server.url} serves other, not tiny"
        if model
        else "holds rows of another server: model was tiny, is other"
    )
    assert code == 2 and reason in printed, printed
    assert "next request to" not in printed and len(server.seen) <= 26
    assert set(bench.rows) <= set(range(23)), "no row of the other model is kept"
    server.model, server.behave = "tiny", lambda seen: "ok"
    assert bench.run(*model, records=60)[0] == 0
    bench.check(list(range(60)), records=60)


def test_restarted_server_with_a_renamed_model_continues(
    bench: Bench,
) -> None:
    server = bench.server

    def behave(seen: Seen) -> str | int:
        if seen.row == 20:
            server.model = "renamed"
        return "ok" if seen.body["model"] == server.model else 404

    server.behave = behave
    code, printed = bench.run(records=60)
    assert code == 0 and "next request to" not in printed, printed
    bench.check(list(range(60)), records=60)


def test_output_through_a_link_is_reported_with_the_reason_of_the_server(
    bench: Bench, tmp_path: Path
) -> None:
    """Servers do not follow links out of their storage."""
    (tmp_path / "elsewhere").mkdir()
    (bench.output / "link").symlink_to(tmp_path / "elsewhere")
    bench.output /= "link"
    code, printed = bench.run("--concurrency", 8, records=60)
    assert (code, len(bench.server.seen)) == (2, 4), printed
    problem = "a folder in its path cannot be opened: Not a directory (ENOTDIR)"
    remedy = "fix the server's storage, or set --output to a folder in it, not to a link"
    assert (
        f"{bench.server.url}: the server could not store the hidden states: {problem}; {remedy}"
        in printed
    ), printed
    assert printed.count("next request to") == 1 and "all servers fail" in printed
    assert contents(bench.output) == {}
