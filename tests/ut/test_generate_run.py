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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from documents import blocks
from generate_harness import (
    FakeServer,
    Seen,
    contents,
    expected_rows,
    ledger_lines,
    stored_rows,
    token_rows,
    write_jsonl,
)
from rich.console import Console

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate import progress as progress_module
from vllm_ascend_hsx.generate.ledger import Ledger
from vllm_ascend_hsx.generate.progress import Bar, Lines, Rates
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks.data_file import FileOptions

# The command where neither torch nor vLLM is installed.
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "vllm_ascend", "torch_npu"), None))
from vllm_ascend_hsx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Bench:
    """A dataset, a server and an output directory."""

    def __init__(self, root: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.server = server
        self.output = root / "out"
        self._capsys = capsys

    def run(self, *arguments: object, records: list[dict[str, Any]] | int = 6, endpoint: str | None = None) -> tuple[int, str]:
        """(exit code, what was printed)."""
        data = write_jsonl(self.root / "data.jsonl", token_rows(records) if isinstance(records, int) else records)
        command = ["--data", data, "--output", self.output, "--endpoint", endpoint or self.server.url, "--retry-delay", 0.001, *arguments]
        self._capsys.readouterr()
        code = generate.main([str(each) for each in command])
        self.server.wait_idle()
        printed = self._capsys.readouterr()
        return code, printed.out + printed.err

    @property
    def rows(self) -> list[int]:
        """Rows that have a file, each checked to be right."""
        return [int(name[3:-12]) for name in sorted(os.listdir(self.output)) if name.startswith("hs_")]

    def check(self, rows: list[int], records: int = 6) -> None:
        """The files are those of these rows, and right; nothing else is there, and nothing is left at the server's."""
        assert sorted(self.rows) == rows
        for row in rows:
            wanted = token_rows(records)[row]["token_ids"]
            ids, bits = stored_rows(self.output / f"hs_{row}.safetensors")
            assert (ids, bits.tolist()) == (wanted, expected_rows(wanted).tolist())
        assert [name for name in os.listdir(self.output) if not name.startswith("hs_")] == ["ledger.jsonl"]
        assert self.server.files() == []

    def lines(self) -> dict[int, dict[str, Any]]:
        """The last line of each row."""
        return {line["row"]: line for line in ledger_lines(self.output / "ledger.jsonl")}


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    with FakeServer(tmp_path / "store") as server:
        yield Bench(tmp_path, server, capsys)


def test_every_row_gets_its_file_and_its_line(bench: Bench) -> None:
    code, printed = bench.run("--validate")
    assert code == 0
    bench.check(list(range(6)))
    for row, line in bench.lines().items():
        tokens = len(token_rows(6)[row]["token_ids"])
        assert line["seconds"] >= 0
        assert line | {"seconds": 0} == {
            "row": row,
            "status": "done",
            "path": f"hs_{row}.safetensors",
            "tokens": tokens,
            "bytes": (bench.output / f"hs_{row}.safetensors").stat().st_size,
            "seconds": 0,
            "attempts": 1,
            "endpoint": bench.server.url,
        }
    assert bench.server.asked == Counter(range(6))
    assert len(bench.server.trials) == 1
    assert re.search(r"generated +│ +6 │", printed) and re.search(r"tokens +│ +27 │", printed)


def test_prompts_and_chats_are_sent_as_such(bench: Bench) -> None:
    chat = [{"from": "human", "value": "Why?"}]
    assert bench.run("--validate", records=[{"prompt": "Who, ü?"}, {"conversations": chat}])[0] == 0
    assert [stored_rows(bench.output / f"hs_{row}.safetensors")[0] for row in (0, 1)] == [
        list("Who, ü?".encode()),
        list(b"<user>Why?<assistant>"),
    ]
    assert {seen.endpoint for seen in bench.server.seen} == {"completions", "chat/completions"}


def test_rows_of_generated_tokens(bench: Bench) -> None:
    records = [{"token_ids": [3, 4]}, {"prompt": "ab"}]
    assert bench.run("--validate", "--include-output-tokens", "--max-tokens", 4, records=records)[0] == 0
    assert [stored_rows(bench.output / f"hs_{row}.safetensors")[0] for row in (0, 1)] == [[3, 4, 7, 8, 9], [97, 98, 7, 8, 9]]
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
    "other-tokens-were-computed": Case(["other-prompt"], 1, "failed", "the server computed other tokens than were sent, from position 1"),
    "everything-at-once": Case([500, "drop", "error-file", "ok"], 4),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_again_and_what_is_given_up(bench: Bench, name: str) -> None:
    case = CASES[name]

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


def test_nothing_is_sent_when_there_is_nothing_to_do(bench: Bench) -> None:
    assert bench.run()[0] == 0
    trials, seen = len(bench.server.trials), len(bench.server.seen)
    code, printed = bench.run(endpoint="http://127.0.0.1:9")
    assert (code, len(bench.server.trials), len(bench.server.seen)) == (0, trials, seen)
    assert re.search(r"finished before +│ +6 │", printed)


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
    assert bench.server.trials == bench.server.seen == []
    assert not bench.output.exists()


def test_a_bad_row_anywhere_is_named_before_anything_is_sent(bench: Bench) -> None:
    code, printed = bench.run(records=[*token_rows(50), {"token_ids": [1, -1]}])
    assert code == 2
    assert "data.jsonl:51: token_ids[1] is -1; token ids are numbers from 0" in printed
    assert bench.server.trials == bench.server.seen == []
    assert not bench.output.exists()


def test_another_dataset_in_the_same_directory_is_refused_and_replaced_if_that_is_wanted(bench: Bench) -> None:
    assert bench.run(records=8)[0] == 0
    code, printed = bench.run(records=6)
    assert code == 2 and "holds rows of another dataset: rows was 8, is 6" in printed
    assert len(bench.server.seen) == 8
    assert bench.run("--overwrite", records=6)[0] == 0
    bench.check(list(range(6)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "rows of another server: model was tiny, is other; serve the same model and layers"),
        ({"layer_ids": (2, 3, 0)}, r"layer_ids was \[2, 0, 3\], is \[2, 3, 0\]"),
        ({"quantization": "fp8"}, "dtype was BF16, is BF16 in F8_E4M3"),
        ({"api_key": "secret"}, "answers 401: Unauthorized; give the server's key with --api-key or in OPENAI_API_KEY"),
    ],
)
def test_another_server_than_before_is_refused_before_a_row_is_sent(
    bench: Bench, tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    bench.server.behave = lambda seen: 400 if seen.row == 3 else "ok"
    assert bench.run()[0] == 1
    with FakeServer(tmp_path / "second", **changes) as other:
        code, printed = bench.run(endpoint=other.url)
        assert (code, other.seen, other.files()) == (2, [], [])
    assert re.search(message, printed)


def test_quantised_rows_are_rows_too(bench: Bench, tmp_path: Path) -> None:
    with FakeServer(tmp_path / "second", quantization="fp8") as other:
        assert bench.run("--validate", endpoint=other.url)[0] == 0
        assert other.files() == []
    assert sorted(bench.rows) == list(range(6))
    for row in bench.rows:
        wanted = token_rows(6)[row]["token_ids"]
        states = load(bench.output / f"hs_{row}.safetensors", 0, verify=True)
        expected = torch.from_numpy(expected_rows(wanted)).view(torch.bfloat16)
        assert (states.token_ids.tolist(), states.hidden_states.dtype) == (wanted, torch.bfloat16)
        assert torch.allclose(states.hidden_states.float(), expected.float(), rtol=0.08, atol=float(states.scales.max()) / 512)


def test_two_servers_that_differ_are_refused(bench: Bench, tmp_path: Path) -> None:
    with FakeServer(tmp_path / "second", layer_ids=(1, 0, 3)) as other:
        code, printed = bench.run("--endpoint", other.url)
        assert (code, bench.server.seen, other.seen) == (2, [], [])
    assert "rows of another server: layer_ids was" in printed


def test_a_server_without_extraction_or_of_another_kind_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "do_ok", FakeServer.do_no_params)
    code, printed = bench.run()
    assert code == 2 and "was the server started with hidden-state extraction?" in printed
    code, printed = bench.run(endpoint=bench.server.url + "/elsewhere")
    assert code == 2 and "answers 404: " in printed and "give --endpoint the URL of a `vllm serve`" in printed
    code, printed = bench.run("--model", "huge")
    assert code == 2 and "serves tiny, and not huge; name one with --model" in printed
    assert bench.server.seen == []


def test_the_key_of_the_server_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(tmp_path / "store", api_key="secret") as server:
        bench = Bench(tmp_path, server, capsys)
        assert bench.run("--api-key", "secret", "--limit", 1)[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert bench.run()[0] == 0
        bench.check(list(range(6)))


def test_files_of_a_server_on_another_machine_are_found_by_their_directory_s_other_name(bench: Bench) -> None:
    elsewhere = bench.root / "mounted"
    elsewhere.symlink_to(bench.server.storage)
    hidden = bench.root / "hidden"

    class Far(FakeServer):
        """Says other paths than there are."""

        async def answer(self, exchange: Any, path: str | None, **changes: Any) -> None:
            await super().answer(exchange, path and path.replace(str(bench.server.storage), "/data/hidden_states"), **changes)

    bench.server.__class__ = Far
    code, printed = bench.run()
    assert code == 2 and re.search(
        "names /data/hidden_states/cmpl-hsx-.*, and there is no such directory here; mount .*--map-path", printed
    )
    assert bench.server.seen == []
    maps = ["--map-path", f"/data={hidden}", "--map-path", f"/data/hidden_states={elsewhere}"]
    assert bench.run(*maps)[0] == 0
    bench.check(list(range(6)))


# Several servers, several runs


def test_several_servers_share_the_rows_and_a_dead_one_loses_none(bench: Bench, tmp_path: Path) -> None:
    with FakeServer(tmp_path / "second") as second, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = bench.run("--endpoint", f"{dead},{second.url}/v1/", records=30)
        assert code == 0
        assert f"{dead}/v1/models: All connection attempts failed; it is tried again later" in printed
        both = bench.server.asked + second.asked
        assert both == Counter(range(30))
        assert min(len(bench.server.seen), len(second.seen)) > 5
        assert second.files() == []
        assert re.search(rf"{second.url} +│ +{len(second.seen)} answered, 0 failed", printed)
    bench.check(list(range(30)), records=30)


def test_a_server_that_comes_up_later_is_tried_out_before_it_gets_a_row(bench: Bench, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    second = FakeServer(tmp_path / "second", port=port)

    def start(seen: Seen, stage: str) -> None:
        if seen.row == 5 and stage == "asked":
            second.__enter__()

    bench.server.at = start
    try:
        assert bench.run("--endpoint", f"http://127.0.0.1:{port}", "--concurrency", 2, records=400)[0] == 0
        assert len(second.trials) == 1 and second.seen
        assert second.files() == []
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
    assert bench.lines() == {}


def test_a_limit_can_be_raised_later(bench: Bench) -> None:
    assert bench.run("--limit", 2)[0] == 0
    assert sorted(bench.rows) == [0, 1]
    assert bench.run("--limit", 100)[0] == 0
    bench.check(list(range(6)))
    assert bench.server.asked == Counter(range(6))


def test_many_are_under_way_at_a_time_and_no_more_than_wanted(bench: Bench) -> None:
    bench.server.behave = lambda seen: "after-next" if seen.row % 4 != 3 else "ok"  # type: ignore[operator]
    assert bench.run("--concurrency", 4, records=40)[0] == 0  # with less than 4 at a time no answer would ever come
    assert bench.server.most_at_once == 4
    bench.check(list(range(40)), records=40)


# Files that are there


def test_with_validate_files_that_are_there_are_checked_and_bad_ones_made_anew(bench: Bench) -> None:
    assert bench.run()[0] == 0
    whole = contents(bench.output)
    for row, change in ((1, 4096), (4, 5000)):
        path = bench.output / f"hs_{row}.safetensors"
        data = bytearray(path.read_bytes())
        data[change % len(data)] ^= 1
        path.write_bytes(data)
    os.truncate(bench.output / "hs_2.safetensors", 10)
    assert bench.run()[0] == 0
    assert len(bench.server.seen) == 6  # without it nothing is looked at
    code, printed = bench.run("--validate")
    assert code == 0
    assert printed.count("; it is asked for again") == 3
    assert bench.server.asked == Counter({0: 1, 1: 2, 2: 2, 3: 1, 4: 2, 5: 1})
    assert contents(bench.output) == whole
    bench.check(list(range(6)))


def test_with_validate_a_file_that_cannot_be_read_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run()[0] == 0
    whole = contents(bench.output)

    def refuse(path: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr("vllm_ascend_hsx.generate.collect.open_regular", refuse)
        code, printed = bench.run("--validate")
    assert code == 1 and "hs_0.safetensors cannot be read: Input/output error (EIO)" in " ".join(printed.split())
    assert contents(bench.output) == whole


def test_with_validate_a_file_of_another_row_is_found_out(bench: Bench) -> None:
    assert bench.run()[0] == 0
    os.replace(bench.output / "hs_1.safetensors", bench.output / "hs_3.safetensors")
    assert bench.run("--validate")[0] == 0
    bench.check(list(range(6)))


def test_a_file_without_a_checksum_is_checked_as_far_as_it_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(tmp_path / "store", options=FileOptions(checksum="none", use_lock=False)) as server:
        bench = Bench(tmp_path, server, capsys)
        assert bench.run("--validate")[0] == 0
        bench.check(list(range(6)))


def test_a_file_that_the_ledger_does_not_know_gets_a_line(bench: Bench) -> None:
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if not line.startswith('{"row":3,')) + '{"row":3,"stat')
    assert bench.run()[0] == 0
    assert bench.lines()[3] == {"row": 3, "status": "found", "path": "hs_3.safetensors"}
    assert len(bench.server.seen) == 6


def test_a_fifo_that_is_called_like_the_lock_of_an_earlier_run_ends_the_run_with_its_name(bench: Bench) -> None:
    assert bench.run()[0] == 0
    token = json.loads((bench.output / "ledger.jsonl").read_text().splitlines()[0])["token"]
    os.mkfifo(bench.server.storage / f"cmpl-hsx-{token}-0123-2-1-0-01234567.safetensors.lock")
    (bench.output / "hs_1.safetensors").unlink()
    code, said = bench.run()
    assert code == 1
    assert "not a regular file" in said
    assert "Traceback" not in said


# What is seen


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_the_progress_says_how_much_is_done_how_fast_and_how_long_it_will_take(kind: type[Bar] | type[Lines]) -> None:
    time = Time()
    target = console(kind is Bar)
    with kind(target, 100, 20, now=time) as progress:
        for _ in range(20):
            time.now += 0.5
            progress.done(1000, 50_000_000)
        progress.failed()
        progress.passed()
        progress.retried()
        progress.say("http://a is left alone for 2 s")
        if isinstance(progress, Bar):
            progress._bar.refresh()
        else:
            assert progress.line().startswith("41 of 100 rows, ")
        facts = progress._facts()
    assert facts == "2.0 rows/s, 2,000 tokens/s, 100.0 MB/s, 1 failed, 1 retries, ETA 0:00:29"
    printed = target.file.getvalue()  # type: ignore[attr-defined]
    assert "http://a is left alone for 2 s" in printed
    assert kind is Lines or "42/100" in printed


def test_speed_is_that_of_the_last_half_minute() -> None:
    time = Time()
    rates = Rates(time)
    for tokens in (100, 10):
        for _ in range(100):
            time.now += 1
            rates.add(tokens, 2 * tokens)
    assert rates.per_second() == (31 / 30, 310 / 30, 620 / 30)  # both ends of the window count
    time.now += 1000
    assert rates.per_second() == (0, 0, 0)


def test_without_a_terminal_lines_come_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.001)
    target = console(False)
    with Lines(target, 10, 3) as progress:
        while "3 of 10 rows" not in target.file.getvalue():  # type: ignore[attr-defined]
            progress._thread.join(0.001)


def test_help_names_every_option_and_the_aliases_of_speculators(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        generate.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--endpoint", "--data", "--preprocessed-data", "--output", "--concurrency", "--validate-outputs", "--request-timeout"):
        assert option in text
    for option in ("--max-retries", "--max-consecutive-errors", "--world-size", "--rank", "--max-samples", "--map-path", "--overwrite"):
        assert option in text


def test_the_documented_command_does_what_it_says(bench: Bench, tmp_path: Path) -> None:
    (shown,) = blocks("generate.md", "generate")
    with FakeServer(tmp_path / "second") as second:
        data = write_jsonl(
            tmp_path / "conversations.jsonl", [{"conversations": [{"from": "human", "value": str(row)}]} for row in range(9)]
        )
        command = shown.replace("http://node1:8000", bench.server.url).replace("http://node2:8000", second.url)
        words = shlex.split(command.replace("conversations.jsonl", str(data)).replace("/data/rows", str(bench.output)))
        done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words[1:]], text=True, capture_output=True, check=False)
        assert words[0] == "hsx" and done.returncode == 0, done.stderr
        assert second.files() == bench.server.files() == []
        assert second.asked + bench.server.asked == Counter(range(9))
    assert sorted(bench.rows) == list(range(9))
    assert sorted(bench.lines()) == list(range(9))


def test_the_ledger_s_first_lines_say_whose_rows_these_are(bench: Bench) -> None:
    assert bench.run()[0] == 0
    first, second = map(json.loads, (bench.output / "ledger.jsonl").read_text().splitlines()[:2])
    assert first["dataset"]["rows"] == 6 and len(first["dataset"]["digest"]) == 64
    assert first["request"] == {"include_output_tokens": False, "max_tokens": 1}
    assert second == {
        "server": {"model": "tiny", "layer_ids": "[2, 0, 3]", "dtype": "BF16", "row_shape": [3, 8]},
        "directories": [str(bench.server.storage)],
    }


@pytest.mark.parametrize("left", [6, 5], ids=["all are there", "one is missing"])
@pytest.mark.parametrize("line", ["as it was", "gone"])
def test_files_that_agree_with_each_other_and_not_with_the_ledger_are_not_removed(
    bench: Bench, tmp_path: Path, left: int, line: str
) -> None:
    """One changed digit there, and every file looks like one of another server."""
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    if line == "gone":
        ledger.write_text("".join(line for line in lines if '"server"' not in line))
    else:
        ledger.write_text("".join(lines).replace("[2, 0, 3]", "[2, 0, 4]"))
    if left == 5:
        (bench.output / "hs_5.safetensors").unlink()
    whole = contents(bench.output)
    with FakeServer(tmp_path / "second", layer_ids=(2, 0, 4)) as other:
        code, printed = bench.run("--validate", endpoint=other.url)
        assert other.seen == []
    said = " ".join(printed.split())
    if line == "gone" and left == 6:  # the rows themselves say what they have to be
        assert code == 0, printed
    elif line == "gone":
        assert code == 2, printed
        assert "holds rows of another server: BF16 [3, 8] of layers [2, 0, 3], and this one's are BF16 [3, 8] of layers [2, 0, 4]" in said
    else:
        assert code == 2, printed
        assert "hold BF16 [3, 8] of layers [2, 0, 3], and the ledger says BF16 [3, 8] of layers [2, 0, 4]" in said
        assert "name the right --output" in said
    assert contents(bench.output) == whole


def test_a_full_disk_is_told_when_a_run_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run()[0] == 0
    ledger = bench.output / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if not line.startswith('{"row":3,')))

    def full(self: Ledger, entry: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Ledger, "append", full)
    code, printed = bench.run()
    assert code == 2
    assert f"{ledger} cannot be written: No space left on device (ENOSPC); make room for it" in printed


def test_names_that_the_console_would_take_for_markup_or_cannot_write_are_no_trouble(bench: Bench) -> None:
    bench.root /= "[/x]\udcff"
    bench.root.mkdir(parents=True)
    bench.output = bench.root / "out"
    code, printed = bench.run()
    assert code == 0, printed
    assert r"[/x]\udcff/out" in printed
