"""Answers are not trusted: a malformed answer fails the row and touches no other file."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generate_bench import Bench
from generate_files import Exchange, Seen
from generate_harness import FakeServer

from vllm_ascend_hsx.generate.client import LONGEST_DELAY_S, Client
from vllm_ascend_hsx.generate.errors import RequestError
from vllm_ascend_hsx.generate.ledger import row_of_file
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row

ESCAPES = "\x1b]0;owned\x07\x1b[2J bad \ud800"


class OddServer(FakeServer):
    """A server with an unusual answer to row 2.

    Attributes:
        names: path in the answer.
        stores: True if the file of the request exists nevertheless.
        body: body of the answer, instead of a complete answer.
        status: status of the answer.
        headers: additional headers.
        fails: reason in the error file of the server.
    """

    names: Callable[[OddServer, Seen], str] | None = None
    stores = True
    status = 200
    body: object = None
    headers = ""
    fails = ""

    async def do_ok(self, exchange: Exchange) -> None:
        if exchange.seen.row != 2:
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


ELSEWHERE: dict[str, Callable[[OddServer, Seen], str]] = {
    "somebody's rows": lambda server, seen: f"{server.storage}/theirs.safetensors",
    "another row's": lambda server, seen: f"{server.storage}/hs_77.safetensors",
    "any file": lambda server, seen: f"{server.storage.parent}/notes.txt",
    "our name elsewhere": lambda server, seen: f"{server.storage.parent}/other/hs_2.safetensors",
    "our name by way of elsewhere": lambda server, seen: (
        f"{server.storage}/../other/hs_2.safetensors"
    ),
    "its lock": lambda server, seen: f"{server.path(seen)}.lock",
    "the root": lambda server, seen: "/",
    "NUL": lambda server, seen: f"{server.storage}\0/hs_2.safetensors",
    "half a character": lambda server, seen: f"{server.storage}\ud800/hs_2.safetensors",
    "a name without end": lambda server, seen: "/" + "a" * 5000,
}


@pytest.mark.parametrize("what", ELSEWHERE)
@pytest.mark.parametrize("stores", [True, False])
def test_only_the_file_of_the_request_is_used_or_removed(
    bench: Bench, server: OddServer, what: str, stores: bool
) -> None:
    touched: list[Path] = []

    def name(seen: Seen) -> str:
        path = ELSEWHERE[what](server, seen)
        if path.isprintable() and len(path) < 200 and not Path(path).is_dir():
            Path(path).parent.mkdir(exist_ok=True)
            if not path.endswith(".lock"):
                Path(path).write_bytes(b"theirs")
                touched.append(Path(path))
        return path

    server.names, server.stores = name, stores  # type: ignore[assignment]
    code, printed = bench.run("--max-retries", 1)
    assert all(each.read_bytes() == b"theirs" for each in touched), printed
    assert "Traceback" not in printed
    # The answer is lost. The file of the request, if it exists, has the requested name.
    assert code == (0 if stores else 1), printed
    there = {row_of_file(name) for name in os.listdir(server.storage)} - {None, 77}
    assert there == {row for row in range(6) if stores or row != 2}
    assert stores or "the answer names the file" in printed


def chat_of(server: OddServer, ids: object) -> dict[str, object]:
    """Return an answer to a chat that lacks only the token ids of the prompt."""
    path = {"hidden_states_path": str(server.storage / "hs_2.safetensors")}
    return {"choices": [{"token_ids": [5]}], "prompt_token_ids": ids, "kv_transfer_params": path}


# Status and body of the server's answer, and the message about the row.
BODIES: dict[str, tuple[int, Callable[[OddServer], object], str]] = {
    "texts for ids": (
        200,
        lambda server: chat_of(server, ["a", "b"]),
        "the answer has no token ids",
    ),
    "an id of no size": (
        200,
        lambda server: chat_of(server, [10**30]),
        "the answer has no token ids",
    ),
    "a negative id": (200, lambda server: chat_of(server, [-1]), "the answer has no token ids"),
    "ids in lists": (
        200,
        lambda server: chat_of(server, [[1], [2, 3]]),
        "the answer has no token ids",
    ),
    "deep": (200, lambda server: b"[" * 100_000, "did not return JSON"),
    "deep enough to be read": (
        200,
        lambda server: b"[" * 900 + b"]" * 900,
        "unexpected response format",
    ),
    "deep parameters": (
        200,
        lambda server: (
            chat_of(server, [1]) | {"kv_transfer_params": {"x": json.loads("[" * 900 + "]" * 900)}}
        ),
        "the answer names no file",
    ),
    "a deep error": (400, lambda server: b'{"error": ' + b"[" * 100_000, "answers 400"),
    "an error of escape sequences": (
        400,
        lambda server: {"error": {"message": ESCAPES}},
        r"\x1b]0;owned\x07\x1b[2J bad \ud800",
    ),
    "a reason of escape sequences": (
        200,
        lambda server: (
            chat_of(server, [1]) | {"kv_transfer_params": {"hidden_states_error": ESCAPES}}
        ),
        r"\x1b]0;owned\x07\x1b[2J bad \ud800",
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_malformed_answer_fails_only_its_row(bench: Bench, server: OddServer, what: str) -> None:
    server.status, body, reason = BODIES[what]
    server.body, server.stores = body(server), False
    records = [
        {"prompt": str(row)} if row != 2 else {"messages": [{"role": "user", "content": "2"}]}
        for row in range(4)
    ]
    code, printed = bench.run("--max-retries", 0, records=records)
    assert (code, bench.rows) == (1, [0, 1, 3])
    assert "Traceback" not in printed and "\x1b" not in printed
    assert reason in " ".join(printed.split())
    assert bench.lines()[2]["status"] == "failed"


def test_control_characters_in_the_reason_of_a_server_are_escaped(
    bench: Bench, server: OddServer
) -> None:
    server.fails = ESCAPES.replace("\ud800", "")
    code, printed = bench.run("--max-retries", 0)
    assert code == 1
    assert r"\x1b]0;owned\x07\x1b[2J bad" in printed and "\x1b" not in printed


@pytest.mark.parametrize(
    "location", ["//xn--a/", "https://xn--/login", ":http://:.mailto:x", "ftp: xn--"]
)
def test_invalid_redirect_fails_only_its_row(
    bench: Bench, server: OddServer, location: str
) -> None:
    """A proxy may redirect at the end of a session."""
    server.body, server.status, server.headers, server.stores = (
        {},
        302,
        f"Location: {location}\r\n",
        False,
    )
    code, printed = bench.run("--max-retries", 0)
    assert (code, bench.rows) == (1, [0, 1, 3, 4, 5])
    assert (
        "/v1/completions answers 302" in printed
        and "Traceback" not in printed
        and "--endpoint" not in printed
    ), printed


@pytest.mark.parametrize(
    "body",
    [
        {"data": [{"id": 5}]},
        {"data": [{"id": [["x"]]}]},
        {"data": "m"},
        [1],
        b"[" * 100_000,
        b'{"a": 1',
    ],
)
def test_malformed_list_of_models_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, body: object
) -> None:
    send = FakeServer.send

    def odd(self: FakeServer, writer: Any, status: int, answer: object, headers: str = "") -> None:
        send(
            self,
            writer,
            status,
            body if isinstance(answer, dict) and "data" in answer else answer,
            headers,
        )

    monkeypatch.setattr(FakeServer, "send", odd)
    code, printed = bench.run("--max-retries", 0)
    assert code == 2
    assert "unexpected response of" in printed or "did not return JSON" in printed
    assert bench.server.seen == []


def test_retry_after_is_limited(server: OddServer) -> None:
    async def ask() -> float | None:
        server.body, server.status, server.headers = {}, 503, "Retry-After: 1e300\r\n"
        async with Client(Options("", Path())) as client:
            with pytest.raises(RequestError) as error:
                await client.ask(
                    server.url, "tiny", Row(2, "a"), f"{server.storage}/hs_2.safetensors", "0" * 32
                )
            return error.value.retry_after

    assert asyncio.run(ask()) == LONGEST_DELAY_S
