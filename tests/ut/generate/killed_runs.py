"""Runs of `hsx generate` that are killed at a system call or by the server."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fakes import generate_process
from generate_files import (
    SINKS,
    Exchange,
    Tensors,
    contents,
    ledger_lines,
    right,
    token_rows,
    write_jsonl,
)
from generate_harness import FakeServer

from vllm_ascend_hsx.generate.ledger import row_of_file

ROWS = 5
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["fakes.generate_process"])


class Death(NamedTuple):
    """The moment at which a process is killed.

    Attributes:
        at: number of a system call, or stage of a request at the server.
        row: row of this request.
        aborts: True if the server aborts the request before it has published the file.
    """

    at: int | Literal["asked", "begun", "written", "answered"]
    row: int = 0
    aborts: bool = True


class DeadlyServer(FakeServer):
    """A server that kills the client."""

    death: Death | None = None
    process: Any = None

    async def do_kill(self, exchange: Exchange) -> None:
        assert self.death is not None
        if self.death.at == "asked":
            await self._kill()
            if self.death.aborts:
                return
        file = await self.begin(exchange)
        if self.death.at == "begun":
            await self._kill()
            if self.death.aborts:
                return file.discard()
        path = await self.publish(exchange, file)
        if self.death.at == "written":
            return await self._kill()
        await self.answer(exchange, path)
        await self._kill()

    async def _kill(self) -> None:
        await self._loop.run_in_executor(None, self._kill_now)

    def _kill_now(self) -> None:
        with suppress(ProcessLookupError):  # the process may have ended after this answer
            process = os.pidfd_open(self.process.pid)
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [])
            finally:
                os.close(process)


class Runs:
    """Successive runs of a command into the directory of a server of files or shards."""

    def __init__(self, root: Path, kind: str = "files") -> None:
        self.output = root / "out"
        self.log = root / "log"
        self.server = DeadlyServer(self.output, make_sink=SINKS[kind])
        self.data = write_jsonl(root / "data.jsonl", token_rows(ROWS))
        self.options = ["--concurrency", "3", "--retry-delay", "0.001", "--validate"]

    def start(self, last_call: int | None = None) -> Any:
        arguments = [
            "--data",
            str(self.data),
            "--output",
            str(self.output),
            "--endpoint",
            self.server.url,
            *self.options,
        ]
        process = FORKSERVER.Process(
            target=generate_process.main, args=(arguments, self.log, last_call)
        )
        self.server.process = process
        process.start()
        return process

    def run(self, death: Death | None = None) -> int:
        """Return the exit code; negative for a signal."""
        self.server.death = death
        kills = death is not None and isinstance(death.at, str)
        self.server.behave = lambda seen: (
            "kill" if kills and death is not None and seen.row == death.row else "ok"
        )
        process = self.start(death.at if death is not None and isinstance(death.at, int) else None)
        process.join()
        self.server.wait_idle()
        assert process.exitcode is not None
        return int(process.exitcode)

    @property
    def finished(self) -> set[int]:
        """Return the rows with a file, and check each file."""
        found = {
            row: tensors
            for name, tensors in contents(self.output).items()
            if (row := row_of_file(name)) is not None
        }
        assert found == {row: right_row(row) for row in found}
        return set(found)

    def check_complete(self) -> None:
        """Check that the directory is equal to that of an undisturbed run."""
        expected = {f"hs_{row}.safetensors": right_row(row) for row in range(ROWS)}
        assert contents(self.output) == {**expected, "ledger.jsonl": {}}, self.log.read_text()
        lines = {line["row"]: line["status"] for line in ledger_lines(self.output / "ledger.jsonl")}
        assert sorted(lines) == list(range(ROWS))
        assert set(lines.values()) <= {"done", "found"}


def right_row(row: int) -> Tensors:
    return right(token_rows(ROWS)[row]["token_ids"])
