"""A block of rows, done by `hsx generate` on a node of a Ray cluster; nothing here knows Ray."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_ascend_hsx.generate.dataset import Dataset, DatasetError
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.generation import Generation
from vllm_ascend_hsx.generate.ledger import Status, require_in_place
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import Outcome, Progress
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.protocol.files import open_regular


@dataclass(frozen=True)
class Block:
    """Rows that one task does.

    Attributes:
        number: of the block.
        rows: of the dataset, ascending.
        done: those that a ledger names as done.
        server: model, layers and weights of the rows; None if nobody knows.
        ledger: of the run, whose first line tells that a node sees the same storage.
        begin: its first line.
    """

    number: int
    rows: list[Row]
    done: frozenset[int]
    server: dict[str, Any] | None
    ledger: Path
    begin: bytes

    def __str__(self) -> str:
        return f"rows {self.rows[0].index} to {self.rows[-1].index}"


class Line(NamedTuple):
    """A line for the ledger."""

    row: int
    status: Status
    facts: dict[str, Any]


@dataclass
class BlockResult:
    """What became of a block.

    Attributes:
        lines: for the ledger, in order.
        server: as for the block, with what its rows tell.
        outcome: counts; without what stopped it.
        refusal: why the run must end; "" if it need not.
        said: lines for the user.
        node: name of the machine.
    """

    lines: list[Line]
    server: dict[str, Any] | None
    outcome: Outcome
    refusal: str = ""
    said: list[str] = field(default_factory=list)
    node: str = ""


class BlockLog:
    """A RowLog that keeps its lines for the process that has the ledger.

    Raises:
        InputError: this machine does not see the ledger.
    """

    def __init__(self, block: Block) -> None:
        self.server = block.server
        self.lines: list[Line] = []
        self._block = block
        try:
            self._fd = open_regular(block.ledger)
            if os.pread(self._fd, len(block.begin), 0) == block.begin:
                return
            os.close(self._fd)
            problem = "it has another one of that name"
        except OSError as error:
            problem = error.strerror or str(error)
        remedy = "mount the storage there, or name the nodes that have it with --ray-label KEY=VALUE"
        raise InputError(f"{socket.gethostname()} does not see the run's ledger {block.ledger} ({problem}); {remedy}")

    def close(self) -> None:
        os.close(self._fd)

    def is_logged(self, row: int) -> bool:
        return False  # so that each row has a line; who has the ledger knows which are new

    def is_done(self, row: int) -> bool:
        return row in self._block.done

    def knows(self, row: int, file: str) -> bool:
        return row in self._block.done  # who has the ledger compares the file

    def append(self, row: int, status: Status, **facts: Any) -> None:
        self.require_in_place()
        self.lines.append(Line(row, status, facts))

    def note_server(self, server: dict[str, Any]) -> None:
        self.server = server

    def require_in_place(self) -> None:
        require_in_place(self._block.ledger, self._fd)


class BlockRows(Dataset):
    """The rows of a block, which were checked before."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(Path(), [], None)
        self._rows = rows

    def records(self, wanted: Callable[[int], bool]) -> Iterator[Row | DatasetError | None]:
        yield from (row if wanted(row.index) else None for row in self._rows)


def do_block(options: Options, block: Block) -> BlockResult:
    """Do a block of rows.

    Args:
        options: of the run.
        block: to do.

    Raises:
        RunError, OSError: the run cannot go on here.
    """
    indices = frozenset(row.index for row in block.rows)
    options = replace(options, block=indices, world_size=1, rank=0, limit=None, endpoint_file=None, ray=None)
    said, outcome = io.StringIO(), Outcome(len(block.rows))
    node = socket.gethostname()
    try:
        log = BlockLog(block)
    except InputError as error:
        return BlockResult([], block.server, outcome, str(error), [], node)
    try:
        progress = Progress(Console(file=said, width=10**6, no_color=True), outcome)
        asyncio.run(Generation(options, BlockRows(block.rows), log, outcome, progress).run())
    finally:
        log.close()
    stopped, outcome.stopped_by = outcome.stopped_by, None
    if stopped is not None and not isinstance(stopped, InputError):
        raise stopped
    outcome.endpoints = [replace(each) for each in outcome.endpoints]
    return BlockResult(log.lines, log.server, outcome, str(stopped or ""), said.getvalue().splitlines(), node)
