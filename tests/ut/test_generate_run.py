"""`hsx generate` as a command, against a server that is slow, faulty or dead in every way that it has to put up with."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from documents import blocks
from generate_harness import (
    SINKS,
    Exchange,
    FakeServer,
    Seen,
    change_a_bit,
    contents,
    ledger_lines,
    right,
    stored_ids,
    token_rows,
    write_jsonl,
)
from rich.console import Console

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate import ledger as ledger_module
from vllm_ascend_hsx.generate import progress as progress_module
from vllm_ascend_hsx.generate.ledger import row_of_file
from vllm_ascend_hsx.generate.progress import Progress
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.check import check
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions

# The command where neither torch nor vLLM is installed.
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "vllm_ascend", "torch_npu"), None))
from vllm_ascend_hsx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Bench:
    """A dataset, a server and its storage directory, which is the output."""

    def __init__(self, root: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.server = server
        self.output = server.storage
        self._capsys = capsys

    def run(self, *arguments: object, records: list[dict[str, Any]] | int = 6, endpoint: str | None = None) -> tuple[int, str]:
        """(exit code, what was printed)."""
        data = write_jsonl(self.root / "data.jsonl", token_rows(records) if isinstance(records, int) else records)
        command = ["--data", data, "--output", self.output, "--endpoint", endpoint or self.server.url, "--retry-delay", 0.001, *arguments]
        self._capsys.readouterr()
        code = generate.main([str(each) for each in command])
        self.server.wait_idle()
        printed = self._capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    @property
    def rows(self) -> list[int]:
        """Rows that have a file."""
        return sorted(row for row in map(row_of_file, contents(self.output)) if row is not None)

    def check(self, rows: list[int], records: int = 6) -> None:
        """These rows are there, each right, and nothing else but the ledger."""
        wanted = {f"hs_{row}.safetensors": right(token_rows(records)[row]["token_ids"]) for row in rows}
        assert contents(self.output) == {**wanted, "ledger.jsonl": {}}

    def lines(self) -> dict[int, dict[str, Any]]:
        """The last line of each row."""
        return {line["row"]: line for line in ledger_lines(self.output / "ledger.jsonl")}


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    with FakeServer(tmp_path / "out") as server:
        yield Bench(tmp_path, server, capsys)


@pytest.fixture(params=SINKS)
def any_bench(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """Of a server of files, and of one of shards."""
    with FakeServer(tmp_path / "out", make_sink=SINKS[request.param]) as server:
        yield Bench(tmp_path, server, capsys)


def test_every_row_gets_its_file_and_its_line(any_bench: Bench) -> None:
    bench = any_bench
    code, printed = bench.run("--validate")
    assert code == 0, printed
    bench.check(list(range(6)))
    for row, line in bench.lines().items():
        assert line.pop("seconds") >= 0
        tokens = len(token_rows(6)[row]["token_ids"])
        size = check(bench.output / f"hs_{row}.safetensors").file_bytes
        facts = {"tokens": tokens, "bytes": size, "attempts": 1, "endpoint": bench.server.url}
        assert line == {"row": row, "status": "done", **facts}
    assert re.search(r"generated │ 6 │", printed) and re.search(r"tokens │ 27, ", printed)
    # Again: there is nothing to do, and no server is needed.
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
    assert bench.run("--validate", "--include-output-tokens", "--max-tokens", 4, records=records)[0] == 0
    assert [stored_ids(bench.output / f"hs_{row}.safetensors") for row in (0, 1)] == [[3, 4, 7, 8, 9], [97, 98, 7, 8, 9]]
    # The same rows, asked for otherwise, are others.
    code, printed = bench.run(records=records)
    assert code == 2 and "requests of another kind: include_output_tokens was True, is False, max_tokens was 4, is 1" in printed


# Retries


class Case(NamedTuple):
    """What happens when row 2 is asked for, time by time, and what comes of it.

    Attributes:
        behaviours: of the server, the last for all further times; the others are well.
        times: how often row 2 is asked for.
        status: of the row in the end.
        error: in the ledger, if it failed.
    """

    behaviours: list[str | int]
    times: int
    status: str = "done"
    error: str = ""
    options: tuple[object, ...] = ()


# Only row 2 is to take longer than that, be the disk ever so slow: so one request at a time.
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
    "no-such-model": Case([404], 1, "failed", "answers 404"),
    "too-large": Case([413], 1, "failed", "answers 413"),
    "redirect": Case([302], 1, "failed", "answers 302"),
    "connection-breaks": Case(["drop", "ok"], 2),
    "connection-breaks-for-ever": Case(["drop"], 4, "failed", "the connection broke"),
    "answer-is-lost-the-file-is-there": Case(["drop-complete"], 1),
    "hangs": Case(["hang", "ok"], 2, options=PATIENT),
    "hangs-but-the-file-is-there": Case(["hang-complete"], 1, options=PATIENT),
    "file-comes-too-late": Case(["file-when-asked-again", "ok"], 2, options=PATIENT),
    "error-file": Case(["error-file", "ok"], 2),
    "error-file-for-ever": Case(["error-file"], 4, "failed", "no space on the server's disk"),
    "error-in-the-answer": Case(["error-in-answer", "ok"], 2),
    "error-in-the-answer-for-ever": Case(["error-in-answer"], 4, "failed", "could not store the hidden states: it cannot be opened"),
    "no-file": Case(["no-file", "ok"], 2),
    "no-file-named": Case(["no-params"], 4, "failed", "the answer names no file (kv_transfer_params are {})"),
    "no-json": Case(["no-json"], 4, "failed", "answers no JSON: <html>a proxy's page</html>"),
    "not-finite": Case(["not-finite", "ok"], 2, options=("--validate",)),
    "not-finite-for-ever": Case(["not-finite"], 4, "failed", "not finite", ("--validate",)),
    "corrupt": Case(["corrupt", "ok"], 2, options=("--validate",)),
    "rows-of-another-request": Case(["other-tokens"], 4, "failed", "of the prompt is 201 in it, and was 200"),
    "other-layers": Case(["other-layers", "ok"], 2),
    "other-layers-for-ever": Case(["other-layers"], 4, "failed", "holds rows of another server: layer_ids was [2, 0, 3], is [2, 0]"),
    "other-layers-and-no-answer": Case(["drop-other-layers", "ok"], 2),
    "an-answer-of-other-tokens-with-the-right-file": Case(["other-prompt"], 1),
    "other-tokens-were-computed": Case(["other-computed"], 4, "failed", "token 1 of the prompt is 1 in it, and was 201"),
    "everything-at-once": Case([500, "drop", "error-file", "ok"], 4),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_again_and_what_is_given_up(any_bench: Bench, name: str) -> None:
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


def test_a_row_that_failed_is_asked_for_again_by_the_next_run_and_no_other(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row in (1, 4) else "ok"
    assert bench.run()[0] == 1
    bench.server.behave = lambda seen: "ok"
    assert bench.run()[0] == 0
    assert bench.server.asked == Counter({0: 1, 1: 2, 2: 1, 3: 1, 4: 2, 5: 1})
    bench.check(list(range(6)))
    assert {line["status"] for line in bench.lines().values()} == {"done"}


def test_a_path_that_no_server_takes_is_told(bench: Bench) -> None:
    bench.output /= "a\udcff"
    code, printed = bench.run()
    assert code == 2 and "refuses the path of a row's file" in printed and "Traceback" not in printed


# When to stop


def test_so_many_errors_in_a_row_end_the_run(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row >= 10 else "ok"  # type: ignore[operator]
    code, printed = bench.run("--max-consecutive-errors", 4, "--concurrency", 1, records=60)
    assert code == 1
    assert "stopped: 4 errors in a row (--max-consecutive-errors), the last: " in printed
    assert "call again to go on" in printed
    assert max(bench.lines()) < 20
    assert re.search(r"not done +│ +\d\d │", printed)
    bench.check(list(range(10)), records=60)


def test_errors_with_finished_rows_in_between_do_not(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row % 2 else "ok"  # type: ignore[operator]
    assert bench.run("--max-consecutive-errors", 3, "--concurrency", 1, records=20)[0] == 1
    bench.check(list(range(0, 20, 2)), records=20)


def test_a_server_that_dies_and_does_not_come_back_ends_the_run(bench: Bench) -> None:
    def die(seen: Seen, stage: str) -> None:
        if seen.row == 3 and stage == "asked":
            bench.server._loop.call_soon_threadsafe(bench.server._server.close)

    bench.server.at = die
    bench.server.behave = lambda seen: "drop" if seen.row >= 3 else "ok"  # type: ignore[operator]
    code, printed = bench.run("--concurrency", 1, "--max-consecutive-errors", 3, records=40)
    assert code == 1
    assert "is left alone for" in printed
    assert "stopped: 3 errors in a row" in printed
    bench.check([0, 1, 2], records=40)


def test_a_server_that_cannot_be_reached_is_named_before_anything_is_sent(bench: Bench) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = bench.run(endpoint=url)
    assert code == 1
    assert f"stopped: {url}/v1/models: All connection attempts failed" in printed


# What is refused before the first row is sent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "2", "--world-size", "2"], "--rank 2: give a number from 0 to 1"),
        (["--endpoint", "localhost:8000"], "--endpoint localhost:8000: give the URL of a server"),
        (["--endpoint", "http://"], "--endpoint http:: give the URL of a server"),
        (["--endpoint", "http://a/v1,http://a"], "--endpoint: one is named twice"),
        (["--endpoint", ","], "--endpoint: give the URL of at least one server"),
        (["--map-path", "/a"], "--map-path /a: give SERVER=LOCAL"),
        (["--endpoint", "http://localhost:99999"], "--endpoint http://localhost:99999: there is no such host or port; give the URL"),
        (["--endpoint", "http://xn--"], "--endpoint http://xn--: Malformed A-label"),
        (["--endpoint", "http://a..b"], "--endpoint http://a..b: encoding with 'idna' codec failed"),
        (["--endpoint", "http://a/\x1b[2J"], r"--endpoint http://a/\x1b[2J: "),
        (["--api-key", "k\u00e9y"], "--api-key (or OPENAI_API_KEY): it has characters that no header can have"),
        (["--api-key", "key\nX-Other: 1"], "--api-key (or OPENAI_API_KEY): it has characters that no header can have"),
        (["--data", "a" * 300], "a: it cannot be read: File name too long; name a file or a folder"),
        (["--max-tokens", "4"], "--max-tokens: the prompt's rows do not depend on it; add --include-output-tokens"),
        (["--include-output-tokens"], "--include-output-tokens: say with --max-tokens"),
        (["--data", "nothing.jsonl"], "nothing.jsonl: it does not exist"),
        (["--column", "text"], "data.jsonl:1: there is no 'text' here"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(bench: Bench, arguments: list[str], message: str) -> None:
    data = write_jsonl(bench.root / "data.jsonl", token_rows(2))
    command = ["--data", str(data), "--output", str(bench.output), *arguments]
    if "--endpoint" not in arguments:
        command += ["--endpoint", bench.server.url]
    code = generate.main(command)
    printed = bench._capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("hsx generate: ") and message in printed.err
    assert "key" not in printed.err.replace("--api-key", "") and "k\u00e9y" not in printed.err
    assert (bench.server.probes, bench.server.seen, contents(bench.output)) == (0, [], {})


def test_a_bad_row_anywhere_is_named_before_anything_is_sent(bench: Bench) -> None:
    code, printed = bench.run(records=[*token_rows(50), {"token_ids": [1, -1]}])
    assert code == 2
    assert "data.jsonl:51: token_ids[1] is -1; token ids are numbers from 0" in printed
    assert (bench.server.probes, bench.server.seen, contents(bench.output)) == (0, [], {})


def test_another_dataset_in_the_same_directory_is_refused_and_has_room_in_a_folder_below(bench: Bench) -> None:
    assert bench.run(records=8)[0] == 0
    code, printed = bench.run(records=6)
    assert code == 2 and "holds rows of another dataset: rows was 8, is 6" in printed
    assert "name another --output, such as a new folder below this one" in printed
    assert len(bench.server.seen) == 8
    bench.output /= "below/it"
    assert bench.run(records=6)[0] == 0
    bench.check(list(range(6)))


@pytest.mark.parametrize("below", [False, True])
def test_a_folder_below_the_storage_directory_receives_rows(any_bench: Bench, below: bool) -> None:
    bench = any_bench
    bench.output /= "a/b" if below else "a"
    for _ in range(2):
        assert bench.run("--validate")[0] == 0
    assert bench.server.asked == Counter(range(6))
    bench.check(list(range(6)))


async def other_layers(exchange: Exchange, server: FakeServer, **changes: Any) -> None:
    row_format = RowFormat(**{"layer_ids": (2, 0, 3), "hidden_size": 8, "dtype": "BF16", "model": "tiny"} | changes)
    with server.make_sink(server.storage, row_format, FileOptions()) as sink:
        await server.answer(exchange, await server.publish(exchange, await server.begin(exchange, sink)))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "other"}, "model was tiny, is other; serve the same model and layers"),
    "layers": ({"layer_ids": (2, 0)}, "layer_ids was [2, 0, 3], is [2, 0], layers was 3, is 2"),
    "order of layers": ({"layer_ids": (2, 3, 0)}, "layer_ids was [2, 0, 3], is [2, 3, 0]"),
    "quantization": ({"quantization": "fp8"}, "dtype was bfloat16, is bfloat16 in float8_e4m3fn"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ledger", ["whole", "of a run that was killed before it noted the server"])
def test_another_server_than_before_is_refused_and_nothing_of_it_stays(any_bench: Bench, name: str, ledger: str) -> None:
    bench, (changes, message) = any_bench, OTHERS[name]
    bench.server.behave = lambda seen: 400 if seen.row == 3 else "ok"
    assert bench.run()[0] == 1
    if ledger != "whole":
        keep_lines(bench, lambda line: "ledger" in line)

    async def do_other(exchange: Exchange) -> None:
        await other_layers(exchange, bench.server, **changes)

    bench.server.do_other = do_other  # type: ignore[attr-defined]
    bench.server.behave = lambda seen: "other"
    code, printed = bench.run()
    assert code == 2 and message in printed, printed
    bench.check([0, 1, 2, 4, 5])


def keep_lines(bench: Bench, wanted: Callable[[dict[str, Any]], bool]) -> None:
    ledger = bench.output / "ledger.jsonl"
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if wanted(json.loads(line))))


@pytest.mark.parametrize("validate", [True, False])
def test_rows_that_differ_from_what_the_ledger_says_are_not_replaced(bench: Bench, validate: bool) -> None:
    """One changed digit in the ledger, and every file looks like one of another server."""
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace("[2,0,3]", "[2,0,4]"))
    (bench.output / "hs_0.safetensors").unlink()
    whole = contents(bench.output)
    code, printed = bench.run(*["--validate"] * validate, "--concurrency", 1)
    assert (code == 2 and "of another server than" in printed) or "holds rows of another server: layer_ids was [2, 0, 4]" in printed
    assert contents(bench.output) == whole


def test_two_servers_that_differ_are_refused(bench: Bench) -> None:
    class Other(FakeServer):
        async def do_ok(self, exchange: Exchange) -> None:
            await other_layers(exchange, self, layer_ids=(1, 0, 3))

    with Other(bench.output) as other:
        code, printed = bench.run("--endpoint", other.url, records=40)
    assert code == 2 and "holds rows of another server: layer_ids was" in printed
    assert len({str(tensors) for tensors in map(len, contents(bench.output).values())}) <= 2


def test_quantised_rows_are_rows_too(bench: Bench, tmp_path: Path) -> None:
    with FakeServer(tmp_path / "second", quantization="fp8") as other:
        bench.output = other.storage
        assert bench.run("--validate", endpoint=other.url)[0] == 0
    assert bench.rows == list(range(6))
    for row in bench.rows:
        states = load(bench.output / f"hs_{row}.safetensors", 0, verify=True)
        assert states.token_ids.tolist() == token_rows(6)[row]["token_ids"] and states.scales is not None


def test_a_server_without_extraction_or_of_another_kind_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "do_ok", FakeServer.do_no_params)
    code, printed = bench.run()
    assert code == 2 and "was the server started with hidden-state extraction?" in printed
    asked = len(bench.server.seen)
    assert asked <= 4
    code, printed = bench.run(endpoint=bench.server.url + "/elsewhere")
    assert code == 2 and "answers 404: " in printed and "give --endpoint the URL of a `vllm serve`" in printed
    code, printed = bench.run("--model", "huge")
    assert code == 2 and "serves tiny, and not huge; name one with --model" in printed
    assert len(bench.server.seen) == asked


def test_the_key_of_the_server_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FakeServer(tmp_path / "store", api_key="secret") as server:
        bench = Bench(tmp_path, server, capsys)
        code, printed = bench.run()
        assert code == 2 and "answers 401: Unauthorized; give the server's key with --api-key or in OPENAI_API_KEY" in printed
        assert bench.run("--api-key", "secret", "--limit", 1)[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert bench.run()[0] == 0
        bench.check(list(range(6)))


# Where rows go


def test_a_server_that_lets_no_request_name_its_file_is_told_at_once(bench: Bench) -> None:
    bench.server.allow_path = False
    code, printed = bench.run()
    assert code == 2 and "refuses the path of a row's file: " in printed
    assert "kv_connector_extra_config.allow_custom_save_path=true" in printed and "`hsx serve` allows" in printed
    assert len(bench.server.seen) == 1


def test_another_directory_than_the_server_s_is_told_at_once(bench: Bench, tmp_path: Path) -> None:
    bench.output = tmp_path / "elsewhere"
    code, printed = bench.run()
    assert code == 2 and f"use a path below {bench.server.storage}" in printed and "--map-path SERVER=HERE" in printed
    assert len(bench.server.seen) == 1


def test_a_directory_that_two_machines_call_alike_and_do_not_share_is_told(bench: Bench, tmp_path: Path) -> None:
    """The server writes, and nothing is found here."""
    bench.output = tmp_path / "mounted"
    code, printed = bench.run("--map-path", f"{bench.server.storage}={bench.output}")
    assert code == 2, printed
    assert re.search(r"the server wrote .*/out/hs_\d.safetensors, and there is no .*/mounted/hs_\d.safetensors; mount", printed)
    assert len(bench.server.seen) <= 4


def test_a_directory_that_has_another_name_on_the_server_s_machine(any_bench: Bench, tmp_path: Path) -> None:
    bench = any_bench
    (tmp_path / "mounted").symlink_to(bench.output)
    maps = ["--map-path", f"/nowhere={tmp_path}", "--map-path", f"{bench.output}={tmp_path / 'mounted'}"]
    assert bench.run("--output", tmp_path / "mounted", *maps, "--limit", 3)[0] == 0
    assert bench.run()[0] == 0
    assert bench.server.asked == Counter(range(6))
    bench.check(list(range(6)))


@pytest.mark.parametrize("output", ["out", "other/../out", "."])
def test_the_output_may_be_relative(bench: Bench, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(bench.output if output == "." else tmp_path)
    code, printed = bench.run("--output", output)
    assert code == 0, printed
    bench.check(list(range(6)))


def test_a_server_without_locks_may_publish_after_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(tmp_path / "out", options=FileOptions(checksum="none", use_lock=False)) as server:
        server.behave = lambda seen: "answer-then-publish"
        bench = Bench(tmp_path, server, capsys)
        assert bench.run("--validate", "--retry-delay", 0.2)[0] == 0
        assert server.asked == Counter(range(6))
        bench.check(list(range(6)))


# Several servers, several runs


def test_several_servers_share_the_rows_and_a_dead_one_loses_none(bench: Bench, tmp_path: Path) -> None:
    with FakeServer(bench.output) as second, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = bench.run("--endpoint", f"{dead},{second.url}/v1/", records=30)
        assert code == 0
        assert f"{dead}/v1/models: All connection attempts failed; {dead} is left alone for" in printed
        both = bench.server.asked + second.asked
        assert both == Counter(range(30))
        assert min(len(bench.server.seen), len(second.seen)) > 5
        assert re.search(rf"{second.url} │ {len(second.seen)} answered, 0 failed", printed)
    bench.check(list(range(30)), records=30)


def test_a_server_that_comes_up_later_gets_rows_too(bench: Bench) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    second = FakeServer(bench.output, port=port)

    def start(seen: Seen, stage: str) -> None:
        if seen.row == 5 and stage == "asked":
            second.__enter__()

    bench.server.at = start
    try:
        assert bench.run("--endpoint", f"http://127.0.0.1:{port}", "--concurrency", 2, records=400)[0] == 0
        assert second.seen
    finally:
        second.__exit__(None, None, None)
    bench.check(list(range(400)), records=400)


def test_ranks_divide_the_rows(bench: Bench) -> None:
    for rank in range(3):
        assert bench.run("--world-size", 3, "--rank", rank, records=10)[0] == 0
        lines = ledger_lines(bench.output / f"ledger-{rank}-of-3.jsonl")
        assert sorted(line["row"] for line in lines) == list(range(rank, 10, 3))
    assert bench.server.asked == Counter(range(10))
    # One run alone finds everything done.
    assert bench.run(records=10)[0] == 0
    assert len(bench.server.seen) == 10
    assert {line["status"] for line in bench.lines().values()} == {"found"}


def test_a_limit_can_be_raised_later(bench: Bench) -> None:
    assert bench.run("--limit", 2)[0] == 0
    assert sorted(bench.rows) == [0, 1]
    assert bench.run("--limit", 100)[0] == 0
    bench.check(list(range(6)))
    assert bench.server.asked == Counter(range(6))


def test_many_are_under_way_at_a_time_and_no_more_than_wanted(bench: Bench) -> None:
    bench.server.behave = lambda seen: "after-next" if seen.row and seen.row % 4 != 0 else "ok"
    assert bench.run("--concurrency", 4, records=41)[0] == 0  # with less than 4 at a time no answer would ever come
    assert bench.server.most_at_once == 4
    bench.check(list(range(41)), records=41)


# Files that are there


def test_files_that_are_there_are_checked_and_bad_ones_made_anew(any_bench: Bench) -> None:
    bench = any_bench
    assert bench.run()[0] == 0
    whole = contents(bench.output)
    change_a_bit(bench.output / "hs_1.safetensors")
    assert bench.run()[0] == 0
    assert len(bench.server.seen) == 6  # without --validate rows are not read
    code, printed = bench.run("--validate")
    assert code == 0 and "hs_1.safetensors: it is not as it was written" in printed and printed.count("; it is asked for again") == 1
    assert bench.server.asked == Counter({**dict.fromkeys(range(6), 1), 1: 2})
    assert contents(bench.output) == whole


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda path: os.truncate(path, 4100), "this is not a file of hidden states: "),
    "another row's": (lambda path: os.replace(path.with_name("hs_3.safetensors"), path), "token 0 of the prompt is 300 in it, and was 200"),
    "an error": (lambda path: path.with_name(f"{path.name}.error").write_text('{"reason": "old"}'), "hs_2.safetensors: old"),
    "a FIFO for its lock": (lambda path: os.mkfifo(f"{path}.lock"), "is a FIFO, not a regular file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_there_and_wrong_is_made_anew_without_validate_too(bench: Bench, name: str) -> None:
    change, message = BAD[name]
    assert bench.run()[0] == 0
    change(bench.output / "hs_2.safetensors")
    code, printed = bench.run()
    assert code == 0 and message in printed and "; it is asked for again" in printed
    bench.check(list(range(6)))


def test_a_bad_file_that_the_server_cannot_replace_does_not_stay(bench: Bench) -> None:
    assert bench.run()[0] == 0
    os.truncate(bench.output / "hs_2.safetensors", 4100)
    bench.server.behave = lambda seen: 400
    assert bench.run()[0] == 1
    bench.check([0, 1, 3, 4, 5])


def test_a_lock_that_a_killed_run_did_not_remove_goes_with_the_next_one(bench: Bench) -> None:
    assert bench.run("--limit", 2)[0] == 0
    for name in ("hs_0.safetensors.lock", "hs_5.safetensors.error"):
        (bench.output / name).write_text('{"reason": "old"}')
    assert bench.run("--limit", 3)[0] == 0
    bench.check([0, 1, 2])


def test_a_row_that_another_run_makes_at_the_same_time_is_not_removed(bench: Bench) -> None:
    """A run of another division into ranks has a ledger of its own; the server refuses the second request for a name."""

    async def do_race(exchange: Exchange) -> None:
        first = await bench.server.begin(exchange)
        with pytest.raises(SinkError, match="another request is writing this file") as refused:
            await bench.server.begin(exchange)
        await bench.server.publish(exchange, first)
        await bench.server.answer(exchange, None, kv_transfer_params={"hidden_states_error": str(refused.value)})

    bench.server.do_race = do_race  # type: ignore[attr-defined]
    bench.server.behave = lambda seen: "race" if seen.row == 3 else "ok"
    assert bench.run("--max-retries", 0)[0] == 0
    bench.check(list(range(6)))


def test_a_file_that_cannot_be_read_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run()[0] == 0
    whole = contents(bench.output)

    def refuse(path: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr("vllm_ascend_hsx.reader.load.open_regular", refuse)
        code, printed = bench.run("--validate")
    assert code == 1 and ".safetensors cannot be read: Input/output error (EIO)" in printed
    assert contents(bench.output) == whole


def test_a_file_that_the_ledger_does_not_know_gets_a_line(bench: Bench) -> None:
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if not line.startswith('{"row":3,')) + '{"row":3,"stat')
    assert bench.run()[0] == 0
    assert bench.lines()[3] == {"row": 3, "status": "found"}
    assert len(bench.server.seen) == 6


# What is seen


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_says_how_much_is_done_how_fast_and_how_long_it_will_take(terminal: bool) -> None:
    time = Time()
    target = console(terminal)
    with Progress(target, 100, now=time) as progress:
        for _ in range(20):
            time.now += 0.5
            progress.done(1000, 50_000_000)
            progress.passed()
        progress.failed()
        progress.retried()
        progress.say("http://a is left alone for 2 s")
        assert progress.line() == (
            "40 of 100 rows, 2.0 rows/s, 2,000 tokens/s, 100.0 MB/s, 1 failed, 1 retries, ETA 0:00:30"
        )
    assert "http://a is left alone for 2 s" in target.file.getvalue()  # type: ignore[attr-defined]


def test_speed_is_that_of_the_last_half_minute() -> None:
    time = Time()
    progress = Progress(console(False), 300, now=time)
    for tokens in (1000, 30):
        for _ in range(100):
            time.now += 1
            progress.done(tokens, 2 * tokens)
    assert "200 of 300 rows, 1.0 rows/s, 31 tokens/s, 62 bytes/s" in progress.line()  # both ends of the window count
    time.now += 1000
    assert "0.0 rows/s, 0 tokens/s" in progress.line()


def test_without_a_terminal_lines_come_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_S", 0.001)
    target = console(False)
    with Progress(target, 10) as progress:
        while "0 of 10 rows" not in target.file.getvalue():  # type: ignore[attr-defined]
            progress._thread.join(0.001)


def test_help_names_every_option_and_the_aliases_of_speculators(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        generate.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--endpoint", "--data", "--preprocessed-data", "--output", "--concurrency", "--validate-outputs", "--request-timeout"):
        assert option in text
    for option in ("--max-retries", "--max-consecutive-errors", "--world-size", "--rank", "--max-samples", "--map-path"):
        assert option in text


def test_the_documented_command_does_what_it_says(bench: Bench, tmp_path: Path) -> None:
    (shown,) = blocks("generate.md", "generate")
    with FakeServer(bench.output) as second:
        data = write_jsonl(
            tmp_path / "conversations.jsonl", [{"conversations": [{"from": "human", "value": str(row)}]} for row in range(9)]
        )
        command = shown.replace("http://node1:8000", bench.server.url).replace("http://node2:8000", second.url)
        words = shlex.split(command.replace("conversations.jsonl", str(data)).replace("/data/hidden_states", str(bench.output)))
        done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words[1:]], text=True, capture_output=True, check=False)
        assert words[0] == "hsx" and done.returncode == 0, done.stderr
        assert second.asked + bench.server.asked == Counter(range(9))
    assert bench.rows == list(range(9))
    assert sorted(bench.lines()) == list(range(9))


def test_the_ledger_s_first_lines_say_whose_rows_these_are(bench: Bench) -> None:
    assert bench.run()[0] == 0
    first, second = map(json.loads, (bench.output / "ledger.jsonl").read_text().splitlines()[:2])
    assert first["dataset"]["rows"] == 6 and len(first["dataset"]["digest"]) == 64
    assert first["request"] == {"include_output_tokens": False, "max_tokens": 1}
    server = {"model": "tiny", "layer_ids": [2, 0, 3], "layers": 3, "hidden_size": 8, "dtype": "bfloat16"}
    assert second == {"server": server}


def test_a_full_disk_is_told_when_a_run_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if not line.startswith('{"row":3,')))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger_module, "_write", full)
    code, printed = bench.run()
    assert code == 1
    assert f"{ledger} cannot be written: No space left on device (ENOSPC)" in printed


def test_names_that_the_console_would_take_for_markup_or_cannot_write_are_no_trouble(bench: Bench) -> None:
    bench.root /= "[/x]\udcff"
    bench.root.mkdir(parents=True)
    bench.output /= "[x]"
    code, printed = bench.run()
    assert code == 0, printed
    assert r"[/x]\udcff/data.jsonl: 6 rows" in printed and "out/[x]" in printed
