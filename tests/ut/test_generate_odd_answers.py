"""What a server says is not to be believed: whatever its answers name or hold, the row fails with a reason, and nothing is touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generate_harness import Exchange, FakeServer, Seen
from test_generate_run import Bench

from vllm_ascend_hsx.generate.backoff import LONGEST
from vllm_ascend_hsx.generate.client import Asking, Client
from vllm_ascend_hsx.generate.errors import RequestError
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.protocol.names import file_name

ESCAPES = "\x1b]0;owned\x07\x1b[2J bad \ud800"


class OddServer(FakeServer):
    """Answers row 2, or the trial, as the test wants.

    Attributes:
        names: the path that the answer names.
        stores: whether the file of the request is there all the same.
        body: of an answer, instead of a whole one; status: of it; headers: more of them.
        fails: what the server leaves as the reason why it has no file.
    """

    names: Callable[[OddServer, Seen], str] | None = None
    stores = True
    trial = False
    status = 200
    body: object = None
    headers = ""
    fails = ""

    def is_odd(self, seen: Seen) -> bool:
        return seen.row is None if self.trial else seen.row == 2

    async def do_ok(self, exchange: Exchange) -> None:
        if not self.is_odd(exchange.seen):
            return await super().do_ok(exchange)
        file = await self.begin(exchange)
        if self.fails:
            file.fail(self.fails)
        elif self.stores:
            await self.publish(exchange, file)
        else:
            file.discard()
        if self.body is not None:
            self.send(exchange.writer, self.status, self.body, self.headers)
        else:
            await self.answer(exchange, self.names(exchange.seen) if self.names else str(file.path))  # type: ignore[call-arg, arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OddServer]:
    with OddServer(tmp_path / "store") as server:
        yield server


@pytest.fixture
def bench(tmp_path: Path, server: OddServer, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, server, capsys)


def victim(server: OddServer, seen: Seen) -> Path:
    """Somebody's hidden states, in the server's directory: of the same tokens, so that only their name says whose they are."""
    return server.storage / "cmpl-theirs-0-0123abcd.safetensors"


ELSEWHERE: dict[str, tuple[Callable[[OddServer, Seen], Path | str], str]] = {
    "somebody's rows": (victim, "is not the file of this request"),
    "any file": (lambda server, seen: server.storage.parent / "notes.txt", "is not the file of this request"),
    "another row's request": (
        lambda server, seen: f"{server.storage}/{file_name(server.internal_id(seen)).replace('-2-', '-77-').replace('-probe-', '-77-')}",
        "is not the file of this request",
    ),
    "our name elsewhere": (
        lambda server, seen: server.storage.parent / "other" / file_name(server.internal_id(seen)),
        "is in another directory than the trial request's",
    ),
    "our name by way of elsewhere": (
        lambda server, seen: f"{server.storage}/../other/{file_name(server.internal_id(seen))}",
        "is in another directory than the trial request's",
    ),
    "its lock": (lambda server, seen: f"{server.path(seen)}.lock", "is not the file of this request"),
    "the root": (lambda server, seen: "/", "is not the file of this request"),
    "NUL": (lambda server, seen: f"{server.storage}\0/{file_name(server.internal_id(seen))}", "no system takes for a path"),
    "half a character": (lambda server, seen: f"{server.storage}\ud800/{server.internal_id(seen)}", "no system takes for a path"),
    "a name without end": (lambda server, seen: "/" + "a" * 5000, "is not the file of this request"),
}


@pytest.mark.parametrize(
    ("what", "trial", "stores"),
    [
        *((what, False, stores) for what in ELSEWHERE for stores in (True, False)),
        # Where its files are the server says with that of the trial.
        *((what, True, True) for what in ELSEWHERE if "elsewhere" not in what),
    ],
)
def test_only_the_file_of_the_request_itself_is_taken_or_removed(
    bench: Bench, server: OddServer, what: str, trial: bool, stores: bool, tmp_path: Path
) -> None:
    path, reason = ELSEWHERE[what]
    touched: list[Path] = []

    def name(seen: Seen) -> str:
        named = path(server, seen)
        if isinstance(named, Path):
            named.parent.mkdir(exist_ok=True)
            named.write_bytes(b"theirs")
            touched.append(named)
        return str(named)

    server.names, server.trial, server.stores = name, trial, stores  # type: ignore[assignment]
    code, printed = bench.run("--max-retries", 1)
    assert all(each.read_bytes() == b"theirs" for each in touched), printed
    assert "Traceback" not in printed
    said = " ".join(printed.split())
    if trial:
        assert (code, server.seen) == (1, [])
    else:  # the answer is lost; the file of the request, if it is there, is known by its name
        assert code == (0 if stores else 1), printed
        assert sorted(bench.rows) == [row for row in range(6) if stores or row != 2]
    assert reason in said or (stores and not trial)


def chat_of(server: OddServer, ids: object) -> dict[str, object]:
    """An answer to a chat, whole but for the ids of its prompt."""
    path = {"hidden_states_path": str(server.storage / "x.safetensors")}
    return {"choices": [{"token_ids": [5]}], "prompt_token_ids": ids, "kv_transfer_params": path}


# What the server sends: status, body, and what is said of the row.
BODIES: dict[str, tuple[int, Callable[[OddServer], object], str]] = {
    "texts for ids": (200, lambda server: chat_of(server, ["a", "b"]), "the answer has no token ids"),
    "an id of no size": (200, lambda server: chat_of(server, [10**30]), "the answer has no token ids"),
    "a negative id": (200, lambda server: chat_of(server, [-1]), "the answer has no token ids"),
    "ids in lists": (200, lambda server: chat_of(server, [[1], [2, 3]]), "the answer has no token ids"),
    "deep": (200, lambda server: b"[" * 100_000, "it nests too deep"),
    "deep enough to be read": (200, lambda server: b"[" * 900 + b"]" * 900, "the answer is not what vLLM's looks like"),
    "deep parameters": (
        200,
        lambda server: chat_of(server, [1]) | {"kv_transfer_params": {"x": json.loads("[" * 900 + "]" * 900)}},
        "the answer names no file",
    ),
    "a deep error": (400, lambda server: b'{"error": ' + b"[" * 100_000, "answers 400"),
    "an error of escape sequences": (400, lambda server: {"error": {"message": ESCAPES}}, r"\x1b]0;owned\x07\x1b[2J bad \ud800"),
    "a reason of escape sequences": (
        200,
        lambda server: chat_of(server, [1]) | {"kv_transfer_params": {"hidden_states_error": ESCAPES}},
        r"\x1b]0;owned\x07\x1b[2J bad \ud800",
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_an_odd_answer_is_the_failure_of_its_row_alone(bench: Bench, server: OddServer, what: str) -> None:
    server.status, body, reason = BODIES[what]
    server.body, server.stores = body(server), False
    records = [{"prompt": str(row)} if row != 2 else {"messages": [{"role": "user", "content": "2"}]} for row in range(4)]
    code, printed = bench.run("--max-retries", 0, records=records)
    assert (code, bench.rows) == (1, [0, 1, 3])
    assert "Traceback" not in printed and "\x1b" not in printed
    assert reason in " ".join(printed.split())
    assert bench.lines()[2]["status"] == "failed"


@pytest.mark.parametrize("charset", ["hex", "undefined", "rot13", "idna", "zlib"])
def test_a_charset_that_is_none_is_the_failure_of_its_row_alone(bench: Bench, server: OddServer, charset: str) -> None:
    server.status, server.body, server.stores = 500, b"na\xefve", False
    server.headers = f"Content-Type: text/plain; charset={charset}\r\n"
    code, printed = bench.run("--max-retries", 0, records=[{"prompt": str(row)} for row in range(4)])
    assert (code, bench.rows) == (1, [0, 1, 3])
    assert "Traceback" not in printed and "na\ufffdve" in printed


@pytest.mark.parametrize("trial", [True, False], ids=["trial", "row"])
def test_the_reason_that_a_server_leaves_reaches_no_terminal_as_instructions(bench: Bench, server: OddServer, trial: bool) -> None:
    server.trial, server.fails = trial, ESCAPES.replace("\ud800", "")
    code, printed = bench.run("--max-retries", 0)
    assert code == 1
    assert r"\x1b]0;owned\x07\x1b[2J bad" in printed and "\x1b" not in printed


@pytest.mark.parametrize("body", [{"data": [{"id": 5}]}, {"data": [{"id": [["x"]]}]}, {"data": "m"}, [1], b"[" * 100_000, b'{"a": 1'])
def test_a_list_of_models_that_is_none_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch, body: object) -> None:
    send = FakeServer.send

    def odd(self: FakeServer, writer: Any, status: int, answer: object, headers: str = "") -> None:
        send(self, writer, status, body if isinstance(answer, dict) and "data" in answer else answer, headers)

    monkeypatch.setattr(FakeServer, "send", odd)
    code, printed = bench.run("--max-retries", 0)
    assert code == 1
    assert "/v1/models answers" in printed or "answers no JSON" in printed
    assert bench.server.trials == []


def test_nobody_is_left_alone_for_longer_than_we_wait_ourselves(server: OddServer) -> None:
    async def ask() -> float | None:
        server.body, server.status, server.headers = {}, 503, "Retry-After: 1e300\r\n"
        async with Client(30) as client:
            with pytest.raises(RequestError) as error:
                await client.ask(server.url, "tiny", Row(2, "a"), "hsx-0123456789ab-0000-2-1", Asking())
            return error.value.retry_after

    assert asyncio.run(ask()) == LONGEST
