"""The output directory: which rows are finished, whose they are, and what earlier runs have left half done."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import (
    REMEDY,
    Content,
    Identity,
    Ledger,
    compare,
    is_ledger,
    ledger_name,
    lock,
    open_ledger,
    other_ledgers,
)
from vllm_ascend_hsx.generate.names import is_hidden_file, row_file, row_of_file
from vllm_ascend_hsx.generate.row_set import RowSet
from vllm_ascend_hsx.protocol.files import open_regular
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.reader.shards import shards_of


@dataclass
class Output:
    """The directory, with this rank's ledger locked.

    Attributes:
        ledger: of this rank.
        finished: rows that have their file, of all ranks.
        tokens: of this run's requests, and of those of earlier runs that are over and asked for the same: their files are ours to take.
        overwritten: tokens of runs that were replaced: their files are ours to remove.
        directories: where such files may be.
    """

    path: Path
    ledger: Ledger
    finished: RowSet
    tokens: set[str]
    overwritten: set[str]
    directories: list[str]


def open_output(path: Path, identity: Identity, world_size: int, rank: int, overwrite: bool) -> Output:
    """Make the directory, or go on in it.

    Raises:
        InputError: it cannot be used, or holds rows of something else, or another run of the same rank is under way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        return _open(path, identity, world_size, rank, overwrite)
    except OSError as error:
        where = f"--output {path}: {error.strerror or error} ({error.filename or path})"
        raise InputError(f"{where}; name a directory that can be written") from error


def _open(path: Path, identity: Identity, world_size: int, rank: int, overwrite: bool) -> Output:
    num_rows = identity.dataset["rows"]
    over = _remove_earlier(path, num_rows, world_size, rank) if overwrite else []
    for other in other_ledgers(path, num_rows, world_size, rank):
        if other.alive and other.content.header.get("world_size") != world_size:
            raise InputError(
                f"{other.path} belongs to a run that is under way with --world-size {other.content.header.get('world_size')}; "
                "use the same, or wait for its end"
            )
        # With --overwrite every rank replaces its own part; those that have not begun yet still say what was there.
        if other.alive or not overwrite:
            compare(other.path, other.content, identity)
        if not other.alive:
            over.append(other.content)
    rows = _rows(path)
    if rows and not over and not any(map(is_ledger, os.listdir(path))):
        raise InputError(f"--output {path} holds files of rows, and no ledger that says what they were made from; {REMEDY}")
    ledger = open_ledger(path, identity, world_size, rank)
    output = Output(path, ledger, RowSet(num_rows), {ledger.token}, set(), list(ledger.content.directories))
    for row in rows:
        output.finished.add(row)
    for content in over:
        if not overwrite:
            ledger.content.server = ledger.content.server or content.server
            ledger.content.rows.update(content.rows)
        if content.token is not None:
            (output.overwritten if overwrite else output.tokens).add(content.token)
            output.directories += [each for each in content.directories if each not in output.directories]
    try:
        _remove_hidden(path, output.tokens | output.overwritten)
    except BaseException:
        ledger.close()
        raise
    return output


def _remove_hidden(path: Path, tokens: set[str]) -> None:
    """What runs that are over were trying out or copying when they ended."""
    for name in os.listdir(path):
        if any(is_hidden_file(name, token) for token in tokens):
            with suppress(FileNotFoundError):
                os.unlink(path / name)


def _remove_earlier(path: Path, num_rows: int, world_size: int, rank: int) -> list[Content]:
    """Remove the files or members of this rank's rows, its ledger, and those of other divisions into ranks; returns what these said.

    The ledger goes last, for it says whose files these are.
    """
    name = path / ledger_name(world_size, rank)
    removed = []
    with ExitStack() as stack:
        with suppress(FileNotFoundError):
            fd = open_regular(name, os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            lock(name, fd)
        ledgers = other_ledgers(path, num_rows, world_size, rank, own=True)
        for row in _rows(path):
            if row % world_size == rank:
                remove(path / row_file(row))
        for other in ledgers:
            if other.path == name or (not other.alive and other.content.header.get("world_size") != world_size):
                removed.append(other.content)
                os.unlink(other.path)
    return removed


def _rows(path: Path) -> list[int]:
    names = {*os.listdir(path), *shards_of(path).members()}
    return [row for row in map(row_of_file, names) if row is not None]
