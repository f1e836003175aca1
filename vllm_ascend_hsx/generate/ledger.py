"""The ledger: an append-only log of JSON lines beside the rows.

    {"ledger": 2, "dataset": {...}, "request": {...}, "world_size": ..., "rank": ..., "id": ...}
    {"server": {"model": ..., "layer_ids": ..., "weights": ..., ...}}
    {"run": {"rows": ...}, "time": ...}
    {"row": 0, "status": "done", "time": ..., "file": ..., "tokens": ..., "seconds": ..., ...}

The first line identifies dataset and options; other ones are refused. Its random id tells ledgers
of the same rows in different directories apart. A run begins with a line that says how many rows of
the dataset it is about, all ranks together. Of lines about the server the last counts: there is
another when a file is the first to tell its weights. Only the existence of a valid file makes its
row finished. The tokens of a text are not known: `file`, a checksum, tells its file from others. A
killed run may leave half a line; other lines than JSON are ignored. An flock excludes a second run,
and runs that divide the rows otherwise: they would do each other's rows.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_ascend_hsx.generate.errors import InputError, RunError
from vllm_ascend_hsx.protocol.files import OnError, describe, open_regular, sync_directory
from vllm_ascend_hsx.protocol.format import WEIGHTS
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.reader.check import Kind
from vllm_ascend_hsx.reader.members import members_in

VERSION = 2
_BEGIN = f'{{"ledger":{VERSION},'.encode()
REMEDY = "name another --output, such as a new folder below this one"
Status = Literal["done", "found", "failed"]

_SERVER_KEYS = {"model", *Kind._fields}
_NAME = re.compile(r"ledger(?:-[0-9]+-of-([0-9]+))?\.jsonl")  # group 1: the world size
LONGEST_LINE = 1 << 20  # bytes; what is longer is no line of a ledger
_ROW_FILE = re.compile(r"hs_(0|[1-9][0-9]*)" + re.escape(DATA_SUFFIX))


class Identity(NamedTuple):
    """What all rows of an output directory have in common, apart from the server.

    Attributes:
        dataset: its digest and number of rows.
        request: options that every request has.
    """

    dataset: dict[str, Any]
    request: dict[str, Any]


class Ledger:
    """The ledger of this run, locked: a `files.RowLog`. Made by `open_ledger`.

    Attributes:
        path: of the file.
        server: as noted by any ledger of the directory.
        logged: for each row, 1 if its last line in the ledger is about its file.
    """

    def __init__(self, path: Path, fd: int, server: dict[str, Any] | None, logged: bytearray, files: set[int], done: bytearray) -> None:
        self.path = path
        self.server = server
        self.logged = logged
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._files = files
        self._done = done

    def is_logged(self, row: int) -> bool:
        """Return whether this ledger has a line for the file of a row."""
        return bool(self.logged[row])

    def knows(self, row: int, file: str) -> bool:
        """Return whether a ledger of the directory names this file of a row."""
        return hash((row, file)) in self._files

    def is_done(self, row: int) -> bool:
        """Return whether a ledger of the directory names a row as done, or as found."""
        return row < len(self._done) and bool(self._done[row])

    def append(self, row: int, status: Status, **facts: Any) -> None:
        """Log what happened to a row, without facts that are None. Raises RunError."""
        known = {key: value for key, value in facts.items() if value is not None}
        self._log({"row": row, "status": status, "time": round(time.time(), 1), **known})
        self.logged[row] = status != "failed"
        self._done[row] |= self.logged[row]

    def note_run(self, rows: int) -> None:
        """Log that a run begins, over the first `rows` rows. Raises RunError."""
        self._log({"run": {"rows": rows}, "time": round(time.time(), 1)})

    def note_server(self, server: dict[str, Any]) -> None:
        """Log model, layers and weights of the rows durably. Raises RunError."""
        self.server = server
        self._log({"server": server}, durable=True)

    def require_in_place(self) -> None:
        """Raise RunError if the output directory is another one now, or the ledger was cut off."""
        require_in_place(self.path, self._fd)
        before = self._size  # read first: another thread may be adding a line
        if (size := os.fstat(self._fd).st_size) < before:
            raise RunError(f"{self.path} was cut off during the run, from {before} to {size} bytes; put back what it had, or {REMEDY}")

    def _log(self, line: dict[str, Any], durable: bool = False) -> None:
        self.require_in_place()
        try:
            _write(self._fd, line)
            self._size = os.lseek(self._fd, 0, os.SEEK_CUR)  # where the line ended
            if durable:
                os.fdatasync(self._fd)
        except OSError as error:
            raise RunError(describe(f"{self.path} cannot be written", error)) from error

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def require_in_place(path: Path, fd: int) -> None:
    """Raise RunError if the output directory is no longer the one that an open ledger is in.

    Servers make a directory that is missing, so rows would go on in another one.
    """
    with suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return
    raise RunError(
        f"{path.parent} was moved, removed or replaced during the run, so its rows are not all there; "
        "put it back with what servers have written under this name since, and run the same command again"
    )


def ledger_name(world_size: int, rank: int) -> str:
    """Return the name of a rank's ledger."""
    return "ledger.jsonl" if world_size == 1 else f"ledger-{rank}-of-{world_size}.jsonl"


def ledgers_in(output: Path) -> list[Path]:
    """Return the ledgers of all ranks. Raises OSError."""
    return [output / name for name in sorted(os.listdir(output)) if _NAME.fullmatch(name)]


def row_file(row: int) -> str:
    """Return the name of a row's file."""
    return f"hs_{row}{DATA_SUFFIX}"


def row_of_file(name: str) -> int | None:
    """Return the row of a file's name, or None if no row's file has that name."""
    match = _ROW_FILE.fullmatch(name)
    return int(match[1]) if match else None


def files_of_rows(output: Path) -> Iterator[Path]:
    """Yield the rows' files in a directory, and members of shards. Raises OSError."""
    for name in {*os.listdir(output), *members_in(output)}:
        if row_of_file(name) is not None:
            yield output / name


def open_ledger(output: Path, identity: Identity, world_size: int, rank: int) -> Ledger:
    """Open and lock the ledger of this rank; create it, and the output directory, if needed.

    Raises:
        InputError: the directory cannot be used or holds other rows, or another run of this rank
            is under way, or one of another world size.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        return _open(output, identity, world_size, rank)
    except OSError as error:
        where = f"--output {output}: {error.strerror or error} ({error.filename or output})"
        raise InputError(f"{where}; name a directory that can be written") from error


def _open(output: Path, identity: Identity, world_size: int, rank: int) -> Ledger:
    rows, server, is_new = identity.dataset["rows"], None, True
    files: set[int] = set()  # hashes of (row, file), of all ledgers
    done = 0  # a byte for each row: 1 if a ledger names it as done
    for each in ledgers_in(output):
        content = _read_at(each, rows, files)
        if content is not None:
            _compare(each, content.header, identity)
            done |= int.from_bytes(content.logged, "little")
            server, is_new = _common_server(each, server, content.server), False
    if is_new and next(files_of_rows(output), None) is not None:
        raise InputError(f"--output {output} holds files of rows, and no ledger that says what they were made from; {REMEDY}")
    path = output / ledger_name(world_size, rank)
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT, 0o644)
    with OnError(os.close, fd):
        _lock(path, fd)
        content = _read(fd, rows, files)
        with OnError(path.unlink if content is None else int):
            _require_one_division(output, world_size)
        if content is None:  # new, or the run that made it was killed at once
            os.ftruncate(fd, 0)
            _write(fd, {"ledger": VERSION, **identity._asdict(), "world_size": world_size, "rank": rank, "id": uuid.uuid4().hex})
            os.fdatasync(fd)
            sync_directory(output)
            with OnError(os.unlink, path):  # ranks that start at the same moment read no ledger above
                for each in ledgers_in(output):
                    if (other := _read_at(each, rows, set())) is not None:
                        _compare(each, other.header, identity)
            return Ledger(path, fd, server, bytearray(rows), files, bytearray(done.to_bytes(rows, "little")))
        _compare(path, content.header, identity)
        if not content.ends_whole:
            os.write(fd, b"\n")
        done |= int.from_bytes(logged := content.logged, "little")
        return Ledger(path, fd, _common_server(path, server, content.server), logged, files, bytearray(done.to_bytes(rows, "little")))


def _compare(path: Path, header: dict[str, Any], identity: Identity) -> None:
    """Raise InputError if a ledger belongs to other rows."""
    if header.get("ledger") != VERSION:
        raise InputError(f"{path} does not begin as a ledger of this version does; {REMEDY}")
    for name, now in identity._asdict().items():
        if header.get(name) != now:
            what = "another dataset" if name == "dataset" else "requests of another kind"
            changes = differences(header.get(name), now)
            raise InputError(f"{path.parent} holds rows of {what}: {changes} ({path.name}); {REMEDY}")


def differences(before: Any, now: dict[str, Any]) -> str:
    """Name the keys whose values differ."""
    before = before if isinstance(before, dict) else {}
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)


def server_differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Name what differs between two servers. Weights that one of them does not tell do not."""
    if not have_other_weights(before, now):
        before, now = before | {WEIGHTS: None}, now | {WEIGHTS: None}
    return differences(before, now)


def have_other_weights(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether two servers tell their weights, and they differ."""
    return WEIGHTS in before and WEIGHTS in now and bool(before[WEIGHTS] != now[WEIGHTS])


def _common_server(path: Path, before: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what two ledgers say about the server. Raises InputError if they contradict."""
    if before is None or now is None:
        return before or now
    if changes := server_differences(before, now):
        raise InputError(f"{path.parent} holds rows of two servers: {changes} ({path.name}); {REMEDY}")
    return before | now


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        remedy = "wait for its end, or divide the rows between the two with --world-size and --rank"
        raise InputError(f"{path} belongs to a run that is under way; {remedy}") from None


def _require_one_division(output: Path, world_size: int) -> None:
    """Raise InputError if a run of another world size is under way.

    Call it with this run's ledger locked. Of two runs that start together one or both are refused.
    """
    for path in ledgers_in(output):
        if (match := _NAME.fullmatch(path.name)) and int(match[1] or 1) == world_size:
            continue
        with suppress(FileNotFoundError):  # a run that was refused has removed it
            fd = open_regular(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"{path} belongs to a run that is under way, of another --world-size than {world_size}"
                raise InputError(f"{problem}, so both would do the same rows; wait for its end, or end it") from None
            finally:
                os.close(fd)


class _Content(NamedTuple):
    header: dict[str, Any]
    server: dict[str, Any] | None
    logged: bytearray
    ends_whole: bool


def _read_at(path: Path, rows: int, files: set[int]) -> _Content | None:
    try:
        fd = open_regular(path)
    except FileNotFoundError:  # a run that was refused has removed it
        return None
    try:
        return _read(fd, rows, files)
    finally:
        os.close(fd)


def _read(fd: int, rows: int, files: set[int]) -> _Content | None:
    """Read a ledger, and add the files that it names to `files`. Raises OSError.

    Return None if its run was killed in the first line.
    """
    server, logged = None, bytearray(rows)
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        first = file.readline(LONGEST_LINE)
        if is_cut_short(first):
            return None
        header = parse_line(first)
        if header.get("ledger") != VERSION:
            return _Content(header, None, logged, True)  # to be refused
        last = first
        while text := file.readline(LONGEST_LINE):
            last, line = text, parse_line(text)
            row = line.get("row")
            if isinstance(found := line.get("server"), dict) and found.keys() - {WEIGHTS} == _SERVER_KEYS:
                server = found
            elif type(row) is int and 0 <= row < rows:
                logged[row] = line.get("status") != "failed"
                if isinstance(name := line.get("file"), str):
                    files.add(hash((row, name)))
    return _Content(header, server, logged, last.endswith(b"\n"))


def is_cut_short(first: bytes) -> bool:
    """Return True if a run was killed when it wrote the first line of its ledger."""
    return not first.endswith(b"\n") and (first.startswith(_BEGIN) or _BEGIN.startswith(first))


def parse_line(line: bytes) -> dict[str, Any]:
    """Return a line of a ledger; {} for anything else."""
    try:
        value = parse(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(fd: int, line: dict[str, Any]) -> None:
    data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]
