"""A block of rows, done by `hsx generate` on a node of a Ray cluster; nothing here knows Ray."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vllm_ascend_hsx.generate.client import Answer
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.generation import Generation
from vllm_ascend_hsx.generate.ledger import State, Status, require_in_place
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
        answered: those whose answers are stored.
        server: model, layers and weights of the rows; None if no row is known.
        ledger: of the run. Its first line shows that a node sees the same storage.
        begin: its first line.
    """

    number: int
    rows: list[Row]
    done: frozenset[int]
    answered: frozenset[int]
    server: dict[str, Any] | None
    ledger: Path
    begin: bytes

    def __str__(self) -> str:
        return f"rows {self.rows[0].index} to {self.rows[-1].index}"


class Line(NamedTuple):
    """A line for the ledger."""

    row: int
    status: Status
    identity: str
    facts: dict[str, Any]


@dataclass
class BlockResult:
    """The result of a block.

    Attributes:
        outcome: counts; without the reason of a stop.
        node: name of the machine.
        lines: for the ledger, in order.
        answers: row, identity and answer of the target.
        server: as for the block; the block's first row tells it if nobody knew it.
        refusal: why the run must end; "" if it need not.
        messages: lines for the user.
    """

    outcome: Outcome
    node: str
    lines: list[Line] = field(default_factory=list)
    answers: list[tuple[int, str, Answer]] = field(default_factory=list)
    server: dict[str, Any] | None = None
    refusal: str = ""
    messages: list[str] = field(default_factory=list)


class BlockLog:
    """A RowLog that keeps its lines for the process that has the ledger.

    Raises:
        InputError: this machine does not see the ledger.
    """

    def __init__(self, block: Block, result: BlockResult) -> None:
        self.server = block.server
        self._block = block
        self._result = result
        try:
            self._fd = open_regular(block.ledger)
            if os.pread(self._fd, len(block.begin), 0) == block.begin:
                return
            os.close(self._fd)
            problem = "it has another one of that name"
        except OSError as error:
            problem = error.strerror or str(error)
        remedy = "mount the storage there, or name the nodes that have it with --ray-label KEY=VALUE"
        raise InputError(f"{result.node} does not see the run's ledger {block.ledger} ({problem}); {remedy}")

    def close(self) -> None:
        os.close(self._fd)

    def is_logged(self, row: int, identity: str) -> bool:
        return row in self._block.done

    def is_done(self, row: int, identity: str) -> bool:
        return row in self._block.done

    def append(self, row: int, status: Status, identity: str, **facts: Any) -> None:
        self.require_in_place()
        self._result.lines.append(Line(row, status, identity, facts))

    def note_server(self, server: dict[str, Any]) -> None:
        self.server = self._result.server = server

    def note_state(self, state: State, reason: str | None = None) -> None:
        """Leave the state out: other blocks go on."""

    def require_in_place(self) -> None:
        require_in_place(self._block.ledger, self._fd)


class BlockAnswers:
    """An AnswerLog that keeps its answers for the process that has the ledger."""

    def __init__(self, block: Block, result: BlockResult) -> None:
        self._block = block
        self._result = result

    def has(self, row: int, identity: str) -> bool:
        return row in self._block.answered

    def append(self, row: int, identity: str, answer: Answer) -> None:
        self._result.answers.append((row, identity, answer))


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
    messages = io.StringIO()
    result = BlockResult(Outcome(len(block.rows)), socket.gethostname(), server=block.server)
    try:
        log = BlockLog(block, result)
        try:
            progress = Progress(Console(file=messages, width=10**6, no_color=True), result.outcome)
            answers = BlockAnswers(block, result) if options.include_output else None
            asyncio.run(Generation(options, iter(block.rows), log, answers, result.outcome, progress).run())
        finally:
            log.close()
        stopped, result.outcome.stopped_by = result.outcome.stopped_by, None
        if stopped is not None:
            raise stopped
    except InputError as error:
        result.refusal = str(error)
    result.outcome.endpoints = [replace(each) for each in result.outcome.endpoints]
    result.messages = messages.getvalue().splitlines()
    return result
