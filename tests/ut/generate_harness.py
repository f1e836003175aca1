"""A server that answers like vLLM with extraction, writes with FileSink, and fails on demand."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from generate_files import (
    HIDDEN,
    LAYER_IDS,
    MODEL,
    Exchange,
    Seen,
    change_a_bit,
    expected_rows,
    in_common,
)
from sink_harness import wait_for_sleepers

from vllm_ascend_hsx.generate.ledger import row_of_file
from vllm_ascend_hsx.protocol.api import REUSED_KEY, ParamsError, ServerParams, read_params
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.weights import Origin, WeightVersion
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import DirectorySink, FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile

REASONS = {200: "OK", 400: "Bad Request"}


@dataclass
class FakeServer:
    """A server in a thread of this process. Use as a context manager.

    Attributes:
        storage: directory of the files.
        behave: behaviour for a request: the name of a method do_*, or an HTTP status.
        at: called at the stages of a request: "asked", "begun" (lock held), "written" (file
            published), "answered".
        tls: context for HTTPS; None for HTTP.
        reuses: True to report the reuse of published prompts. Any other value is sent as
            `reused_tokens`.
        seen: requests for rows.
        rendered: requests for the token ids of a prompt.
    """

    storage: Path
    behave: Callable[[Seen], str | int] = lambda seen: "ok"
    at: Callable[[Seen, str], None] = lambda seen, stage: None
    model: str = MODEL
    layer_ids: tuple[int, ...] = LAYER_IDS
    quantization: Literal["none", "fp8"] = "none"
    weights: str = ""
    options: FileOptions = field(default_factory=FileOptions)
    make_sink: Callable[[Path, RowFormat, FileOptions], DirectorySink] = FileSink
    api_key: str | None = None
    allow_path: bool = True
    tls: ssl.SSLContext | None = None
    reuses: Any = False
    seen: list[Seen] = field(default_factory=list)
    rendered: list[dict[str, Any]] = field(default_factory=list)
    probes: int = 0
    most_at_once: int = 0
    port: int = 0

    def __enter__(self) -> FakeServer:
        row_format = RowFormat(self.layer_ids, HIDDEN, "BF16", self.model, self.quantization)
        self._sink = self.make_sink(self.storage, row_format, self.options)
        self._times: Counter[int] = Counter()
        self._unanswered = 0
        self._answered: dict[int, asyncio.Event] = {}
        self._hanging: dict[int, asyncio.Event] = {}
        self._published: list[list[int]] = []
        self._reused: dict[int, dict[str, Any]] = {}
        self._late: list[tuple[Exchange, RequestFile]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = 0
        self._mutex = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-server")
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._sink.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def asked(self) -> Counter[int]:
        """Return the number of requests for each row."""
        return Counter(each.row for each in self.seen)

    def wait_idle(self) -> None:
        """Wait until no request is being answered."""
        assert self._idle.wait(30)

    def files(self) -> list[str]:
        """Return the files in the storage directory, without hidden files of the server."""
        return sorted(name for name in os.listdir(self.storage) if not name.startswith("."))

    # HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                with self._counted():
                    await self._handle(request.split()[1], headers, body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return  # the client has closed the connection, or the test has ended
        finally:
            self._tasks.discard(task)
            writer.close()

    def _counted(self) -> Any:
        server = self

        class Counted:
            def __enter__(self) -> None:
                with server._mutex:
                    server._busy += 1
                    server._idle.clear()

            def __exit__(self, *_: object) -> None:
                with server._mutex:
                    server._busy -= 1
                    if not server._busy:
                        server._idle.set()

        return Counted()

    async def _handle(
        self,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return self.send(writer, 401, {"error": {"message": "Unauthorized"}})
        if path == "/v1/models":
            self.probes += 1
            self._unanswered += 1
            return self.send(writer, 200, {"data": [{"id": self.model}]})
        if path == "/detokenize":
            self._unanswered += 1
            return self.send(writer, 200, {"prompt": bytes(json.loads(body)["tokens"]).decode()})
        if path in ("/v1/completions/render", "/v1/chat/completions/render"):
            self._unanswered += 1
            self.rendered.append(json.loads(body))
            ids = Seen(0, 0, path, self.rendered[-1]).token_ids
            return self.send(writer, *self.render(ids if "chat" in path else [ids]))
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return self.send(writer, 404, {"detail": "Not Found"})
        content = json.loads(body)
        named = content["kv_transfer_params"]["hidden_states_path"]
        row = row_of_file(os.path.basename(named))
        assert row is not None
        self._times[row] += 1
        seen = Seen(row, self._times[row], path.removeprefix("/v1/"), content)
        self.seen.append(seen)
        self._unanswered += 1
        self.most_at_once = max(self.most_at_once, self._unanswered)
        await self._at(seen, "asked")
        if row in self._hanging:
            await self._hanging.pop(row).wait()
        for late in [each for each in self._late if each[0].seen.row == row]:
            self._late.remove(late)
            await self.publish(*late)
        exchange = Exchange(seen, reader, writer)
        try:
            self.path(seen)
        except ParamsError as error:
            return await self.answer(
                exchange, None, kv_transfer_params={"hidden_states_error": str(error)}
            )
        action = self.behave(seen)
        if isinstance(action, int):
            return self.send(writer, action, {"error": {"message": f"as the test wants: {action}"}})
        try:
            await getattr(self, "do_" + action.replace("-", "_"))(exchange)
        except SinkError as error:
            await self.answer(
                exchange,
                None,
                kv_transfer_params={
                    "hidden_states_path": named,
                    "hidden_states_error": error.reason,
                },
            )

    def render(self, ids: Any) -> tuple[int, Any]:
        """Return status and answer to a request for the token ids of a prompt."""
        return 200, {"token_ids": ids} if not ids or isinstance(ids[0], int) else [
            {"token_ids": each} for each in ids
        ]

    async def _at(self, seen: Seen, stage: str) -> None:
        await self._loop.run_in_executor(None, self.at, seen, stage)

    def send(
        self, writer: asyncio.StreamWriter, status: int, body: object, headers: str = ""
    ) -> None:
        self._unanswered -= 1  # before the client can send another request
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/json" if data[:1] in (b"{", b"[") else "text/html"
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}\r\nContent-Type: "
            f"{kind}\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
        )
        writer.write(head.encode() + data)

    async def answer(self, exchange: Exchange, path: str | None, **changes: Any) -> None:
        seen = exchange.seen
        text = "".join(f"<{each}>" for each in seen.output)
        said = {"message": {"content": text}} if "messages" in seen.body else {"text": text}
        choice = {"index": 0, "token_ids": seen.output, "finish_reason": "length", **said}
        params = {"hidden_states_path": path} | self._reused.pop(id(seen), {}) if path else None
        body = {"id": "x", "choices": [choice], "kv_transfer_params": params}
        (body if "messages" in seen.body else choice)["prompt_token_ids"] = changes.pop(
            "prompt", seen.token_ids
        )
        self.send(exchange.writer, 200, body | changes)
        await exchange.writer.drain()
        self._event(seen.row).set()
        await self._at(seen, "answered")

    def _event(self, row: int) -> asyncio.Event:
        return self._answered.setdefault(row, asyncio.Event())

    # Files

    def path(self, seen: Seen) -> Path:
        """Return the path of the request's file. Raises ParamsError."""
        params = ServerParams(self.storage, allow_path=self.allow_path)
        path = read_params(seen.body["kv_transfer_params"], params).path
        assert path is not None
        return path

    async def begin(self, exchange: Exchange, sink: DirectorySink | None = None) -> RequestFile:
        """Lock the file and write the rows."""
        seen = exchange.seen
        if self.reuses is not False:
            ids = seen.token_ids[:-1]
            reused = max((in_common(ids, each) for each in self._published), default=0)
            self._reused[id(seen)] = {REUSED_KEY: reused if self.reuses is True else self.reuses}
        sink = sink or self._sink
        file = sink.open(f"{seen.request_id}-0123abcd", self.path(seen), len(seen.stored))
        file.origin = Origin([WeightVersion(fingerprint=self.weights)])
        file.write(0, expected_rows(seen.stored, sink.row_format.num_layers))
        await self._at(seen, "begun")
        return file

    async def publish(self, exchange: Exchange, file: RequestFile) -> str:
        file.commit(np.asarray(exchange.seen.stored, dtype=np.int64), len(exchange.seen.token_ids))
        self._published.append(exchange.seen.token_ids)
        await self._at(exchange.seen, "written")
        return str(file.path)

    # Behaviours

    async def do_ok(self, exchange: Exchange) -> None:
        await self.answer(exchange, await self.publish(exchange, await self.begin(exchange)))

    async def do_late(self, exchange: Exchange) -> None:
        """Answer before the file is published. Publish it when a reader waits for the lock."""
        file = await self.begin(exchange)
        await self.answer(exchange, str(file.path))
        await self._loop.run_in_executor(None, wait_for_sleepers, Path(f"{file.path}.lock"))
        await self.publish(exchange, file)

    async def do_after_next(self, exchange: Exchange) -> None:
        """Answer after the next row is answered."""
        path = await self.publish(exchange, await self.begin(exchange))
        await self._event(exchange.seen.row + 1).wait()
        await self.answer(exchange, path)

    async def do_drop(self, exchange: Exchange) -> None:
        """Break the connection and abort the request."""
        (await self.begin(exchange)).discard()
        exchange.writer.close()

    async def do_drop_complete(self, exchange: Exchange) -> None:
        """Break the connection after the file is published."""
        await self.publish(exchange, await self.begin(exchange))
        exchange.writer.close()

    async def do_hang(self, exchange: Exchange) -> None:
        """Never answer. Abort when the client disconnects, before the next request of the row."""
        file = await self.begin(exchange)
        aborted = self._hanging[exchange.seen.row] = asyncio.Event()
        await exchange.gone()
        file.discard()
        aborted.set()

    async def do_hang_complete(self, exchange: Exchange) -> None:
        """Publish the file but never answer."""
        await self.publish(exchange, await self.begin(exchange))
        await exchange.gone()

    async def do_file_when_asked_again(self, exchange: Exchange) -> None:
        """Answer, and publish the file only when the row is requested again."""
        file = await self.begin(exchange)
        await self.answer(exchange, str(file.path))
        self._late.append((exchange, file))

    async def do_error_file(self, exchange: Exchange) -> None:
        file = await self.begin(exchange)
        file.fail("no space on the server's disk")
        await self.answer(exchange, str(file.path))

    async def do_error_in_answer(self, exchange: Exchange) -> None:
        await self.answer(
            exchange,
            None,
            kv_transfer_params={
                "hidden_states_path": "/x",
                "hidden_states_error": "it cannot be opened",
            },
        )

    async def do_no_file(self, exchange: Exchange) -> None:
        await self.answer(exchange, str(self.path(exchange.seen)))

    async def do_no_params(self, exchange: Exchange) -> None:
        await self.answer(exchange, None)

    async def do_no_json(self, exchange: Exchange) -> None:
        self.send(exchange.writer, 200, b"<html>a proxy's page</html>")

    async def do_retry_after(self, exchange: Exchange) -> None:
        self.send(
            exchange.writer, 429, {"error": {"message": "too many"}}, "Retry-After: 0.001\r\n"
        )

    async def do_other_prompt(self, exchange: Exchange) -> None:
        path = await self.publish(exchange, await self.begin(exchange))
        await self.answer(exchange, path, prompt=[*exchange.seen.token_ids[:-1], 1])

    async def do_other_computed(self, exchange: Exchange) -> None:
        ids = [*exchange.seen.token_ids[:-1], 1]
        file = await self.begin(exchange)
        file.commit(np.asarray(ids, dtype=np.int64), len(ids))
        await self.answer(exchange, str(file.path), prompt=ids)

    async def do_answer_then_publish(self, exchange: Exchange) -> None:
        file = await self.begin(exchange)
        await self.answer(exchange, str(file.path))
        await asyncio.sleep(0.05)
        await self.publish(exchange, file)

    async def do_other_tokens(self, exchange: Exchange) -> None:
        """Publish a file with the tokens of another request."""
        file = await self.begin(exchange)
        file.commit(
            np.asarray(exchange.seen.stored, dtype=np.int64) + 1, len(exchange.seen.token_ids)
        )
        await self.answer(exchange, str(file.path))

    async def do_not_finite(self, exchange: Exchange) -> None:
        file = await self.begin(exchange)
        rows = expected_rows(exchange.seen.stored)
        rows[-1, -1, -1] = 0x7FC0
        file.write(0, rows)
        await self.answer(exchange, await self.publish(exchange, file))

    async def do_corrupt(self, exchange: Exchange) -> None:
        """Publish a file, and flip a bit in it."""
        path = await self.publish(exchange, await self.begin(exchange))
        change_a_bit(Path(path))
        await self.answer(exchange, path)

    async def do_drop_other_layers(self, exchange: Exchange) -> None:
        with self.make_sink(
            self.storage, RowFormat((2, 0), HIDDEN, "BF16", self.model), self.options
        ) as other:
            await self.publish(exchange, await self.begin(exchange, other))
        exchange.writer.close()
