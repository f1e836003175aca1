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
    ledger_name,
    open_ledger,
    open_locked,
    other_ledgers,
)
from vllm_ascend_hsx.generate.names import is_hidden_file, row_file, row_of_file
from vllm_ascend_hsx.generate.row_set import RowSet
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
    removed: list[Content] = []

    def clear() -> None:
        removed.extend(_remove_earlier(path, num_rows, world_size, rank))

    # Before a ledger is made, which would be in the way of those that are there; and again when our lock shows others that we are here.
    _others(path, identity, world_size, rank, overwrite)
    if not overwrite and _rows(path) and not other_ledgers(path, num_rows, world_size, rank, own=True):
        raise InputError(f"--output {path} holds files of rows, and no ledger that says what they were made from; {REMEDY}")
    ledger = open_ledger(path, identity, world_size, rank, clear if overwrite else None)
    try:
        over = removed + _others(path, identity, world_size, rank, overwrite)
        output = Output(path, ledger, RowSet(num_rows), {ledger.token}, set(), list(ledger.content.directories))
        for row in _rows(path):
            output.finished.add(row)
        for content in over:
            if not overwrite:
                ledger.content.server = ledger.content.server or content.server
                ledger.content.rows.update(content.rows)
            if content.token is not None:
                (output.overwritten if overwrite else output.tokens).add(content.token)
                output.directories += [each for each in content.directories if each not in output.directories]
        _remove_hidden(path, output.tokens | output.overwritten)
    except BaseException:
        ledger.close()
        raise
    return output


def _others(path: Path, identity: Identity, world_size: int, rank: int, overwrite: bool) -> list[Content]:
    """Ledgers of other ranks and divisions whose runs are over. Raises InputError: one that counts forbids this run."""
    others = other_ledgers(path, identity.dataset["rows"], world_size, rank)
    for other in others:
        if other.alive and other.content.header.get("world_size") != world_size:
            raise InputError(
                f"{other.path} belongs to a run that is under way with --world-size {other.content.header.get('world_size')}; "
                "use the same, or wait for its end"
            )
        # With --overwrite every rank replaces its own part; those that have not begun yet still say what was there.
        if other.alive or not overwrite:
            compare(other.path, other.content, identity)
    return [other.content for other in others if not other.alive]


def _remove_hidden(path: Path, tokens: set[str]) -> None:
    """What runs that are over were trying out or copying when they ended."""
    for name in os.listdir(path):
        if any(is_hidden_file(name, token) for token in tokens):
            with suppress(FileNotFoundError):
                os.unlink(path / name)


def _remove_earlier(path: Path, num_rows: int, world_size: int, rank: int) -> list[Content]:
    """Remove the files or members of this rank's rows, and the ledgers of other divisions into ranks.

    Returns:
        What these said, and what this rank's ledger says, which is locked.

    Raises:
        InputError: a run of another division has just begun.
        OSError: something cannot be removed.
    """
    name = path / ledger_name(world_size, rank)
    with ExitStack() as stack:
        ledgers = other_ledgers(path, num_rows, world_size, rank, own=True)
        doomed = [other for other in ledgers if other.path != name and other.content.header.get("world_size") != world_size]
        for other in doomed:
            stack.callback(os.close, open_locked(other.path))
        for row in _rows(path):
            if row % world_size == rank:
                remove(path / row_file(row))
        for other in doomed:
            os.unlink(other.path)
    return [other.content for other in ledgers if other.path == name or other in doomed]


def _rows(path: Path) -> list[int]:
    names = {*os.listdir(path), *shards_of(path).members()}
    return [row for row in map(row_of_file, names) if row is not None]
