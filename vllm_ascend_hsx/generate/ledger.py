"""The ledger of an output directory: `ledger.jsonl`, one JSON object per line, never rewritten.

    {"ledger": 3, "request": ..., "world_size": 1, "rank": 0, "id": ...}
    {"run": {"rows": 1000, "invalid": 0}, "time": ...}
    {"state": "running", "time": ...}
    {"server": {"model": ..., "layer_ids": ..., "weights": ..., ...}}
    {"row": 17, "status": "done", "identity": ..., "time": ..., "file": ..., "tokens": ..., ...}

The first line has the fields of all requests. A run with other fields is refused. The random id
distinguishes ledgers of different directories. Each run begins with the number of rows of all
ranks. The server is logged before the first finished row. A row's identity is a hash of the
content. The status "changed" means that the dataset has other content now. A killed run may leave a
partial line. Lines that are not JSON are ignored. An flock excludes a second run of the rank, and
runs of another world size, because they would do the same rows.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import re
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.generate.errors import InputError, RunError
from vllm_ascend_hsx.protocol.files import OnError, describe, open_regular, sync_directory
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.reader.members import members_in

VERSION = 3
_BEGIN = f'{{"ledger":{VERSION},'.encode()
REMEDY = "give another --output, such as a new folder below this one"
_NAME = re.compile(r"ledger(?:-[0-9]+-of-([0-9]+))?\.jsonl")  # group 1: the world size
LONGEST_LINE = 1 << 20  # bytes; longer lines are not from a ledger
_ROW_FILE = re.compile(r"hs_(0|[1-9][0-9]*)" + re.escape(DATA_SUFFIX))
_IDENTITY = re.compile(r"(?:[0-9a-f]{32})?")  # "" for a row without a file
_MOST_ROWS = 1 << 28


class Status(str, Enum):
    """The state of a row after a line."""

    DONE = "done"  # this run made the file
    FOUND = "found"  # the file existed
    FAILED = "failed"
    INVALID = "invalid"  # the dataset's record cannot be sent
    CHANGED = "changed"  # the dataset no longer has the content of the file


class State(str, Enum):
    """The state of a run after a line."""

    RUNNING = "running"
    WAITING = "waiting"  # for a server
    STOPPED = "stopped"  # before its end
    FINISHED = "finished"


class Finished:
    """The rows with files, and the first 64 bits of each identity."""

    def __init__(self) -> None:
        self.marks = array("Q")  # one per row; 0 without a file

    def has(self, row: int, identity: str) -> bool:
        """Return True if the row is finished and has this identity."""
        return row < len(self.marks) and self.marks[row] == mark_of(identity)

    def note(self, row: int, status: Status, identity: str) -> None:
        """Apply a line of a ledger."""
        if row >= len(self.marks):
            self.marks.frombytes(bytes(self.marks.itemsize * (row + 1 - len(self.marks))))
        self.marks[row] = mark_of(identity) if status in (Status.DONE, Status.FOUND) else 0


class Ledger:
    """The locked ledger of this run. Created by `open_ledger`.

    Attributes:
        path: path of the file.
        server: model, layers and weights of the rows, from all ledgers of the directory.
        finished: rows with files, from all ledgers of the directory.
        made: the file and directories that this run has created, if it has created the file.
    """

    def __init__(self, path: Path, fd: int, made: Sequence[Path] = ()) -> None:
        self.path = path
        self.made = made
        self.server: dict[str, Any] | None = None
        self.finished = Finished()
        self._fd = fd
        self._size = 0  # size of the file after the last line

    def is_done(self, row: int, identity: str) -> bool:
        """Return True if a ledger of the directory has the row as finished."""
        return self.finished.has(row, identity)

    def append(self, row: int, status: Status, identity: str, **facts: Any) -> None:
        """Log the state of a row. Facts that are None are left out. Raises RunError."""
        known = {key: value for key, value in facts.items() if value is not None}
        self._log({"row": row, "status": status.value, "identity": identity, **known})
        self.finished.note(row, status, identity)

    def note_run(self, rows: int, invalid: int) -> None:
        """Log the start of a run over the first `rows` rows. Raises RunError."""
        self._log({"run": {"rows": rows, "invalid": invalid}})
        self.note_state(State.RUNNING)

    def note_state(self, state: State, reason: str | None = None) -> None:
        """Log the state of the run. Raises RunError."""
        self._log({"state": state.value, **({"reason": reason} if reason else {})})

    def note_server(self, server: dict[str, Any]) -> None:
        """Log model, layers and weights of the rows durably. Raises RunError."""
        self.server = server
        self._log({"server": server}, durable=True)

    def take(self, line: dict[str, Any]) -> None:
        """Apply a line of an earlier run. Raises InputError: two servers differ."""
        if isinstance(server := line.get("server"), dict):
            if changes := differences(self.server or server, server):
                raise InputError(
                    f"{self.path.parent} holds rows of two servers: {changes}; {REMEDY}"
                )
            self.server = server
        elif (known := row_line(line)) is not None:
            self.finished.note(*known)

    def beat(self) -> None:
        """Touch the ledger, so that `hsx status` sees that the run is alive."""
        with suppress(OSError):
            os.utime(self._fd)

    def require_in_place(self) -> None:
        """Raise RunError if the output directory was replaced or the ledger was truncated.

        Servers create a missing directory, so further rows would go to another one.
        """
        is_in_place = False
        with suppress(OSError):
            is_in_place = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        if not is_in_place:
            raise RunError(
                f"{self.path.parent} was moved, removed or replaced during the run, so some rows "
                "are missing; restore it, add the files that servers have written at this path "
                "since, and run the same command again"
            )
        before = self._size  # read before fstat: another thread may be adding a line
        if (size := os.fstat(self._fd).st_size) < before:
            raise RunError(
                f"{self.path} was truncated during the run, from {before} to {size} bytes; "
                f"restore it, or {REMEDY}"
            )

    def _log(self, line: dict[str, Any], durable: bool = False) -> None:
        self.require_in_place()
        try:
            _write(self._fd, line | {"time": round(time.time(), 1)})
            self._size = os.lseek(self._fd, 0, os.SEEK_CUR)  # end of the line
            if durable:
                os.fdatasync(self._fd)
        except OSError as error:
            raise RunError(describe(f"cannot write {self.path}", error)) from error

    def withdraw(self) -> None:
        """Remove the ledger and the directories that this run has created.

        Keep them if there are files of rows and no other ledger records their requests.
        """
        output = self.path.parent
        with suppress(OSError, RunError):  # the directory is in use or was replaced
            self.require_in_place()
            if self.made and (
                len(ledgers_in(output)) > 1 or next(files_of_rows(output), None) is None
            ):
                self.made[0].unlink()
                for directory in self.made[1:]:
                    directory.rmdir()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def mark_of(identity: str) -> int:
    """Return the first 64 bits of an identity."""
    return int(identity[:16] or "0", 16)


def rank_file(stem: str, world_size: int, rank: int) -> str:
    """Return the name of a rank's file, such as the ledger."""
    return f"{stem}.jsonl" if world_size == 1 else f"{stem}-{rank}-of-{world_size}.jsonl"


def ledgers_in(output: Path) -> list[Path]:
    """Return the ledgers of all ranks. Raises OSError."""
    return [output / name for name in sorted(os.listdir(output)) if _NAME.fullmatch(name)]


def row_file(row: int) -> str:
    """Return the name of a row's file."""
    return f"hs_{row}{DATA_SUFFIX}"


def row_of_file(name: str) -> int | None:
    """Return the row of a file's name; None if it is not the name of a row's file."""
    match = _ROW_FILE.fullmatch(name)
    return int(match[1]) if match else None


def files_of_rows(output: Path) -> Iterator[Path]:
    """Yield the rows' files in a directory, including members of shards. Raises OSError."""
    for name in {*os.listdir(output), *members_in(output)}:
        if row_of_file(name) is not None:
            yield output / name


def open_ledger(
    output: Path,
    request: Mapping[str, Any],
    world_size: int = 1,
    rank: int = 0,
    waits: bool = False,
) -> Ledger:
    """Open and lock the ledger of this rank. Create the ledger and the directory if needed.

    Args:
        output: the directory.
        request: fields of all requests.
        world_size, rank: as in `Options`.
        waits: wait for another run of the same rank, for example on a machine that has just died.

    Raises:
        InputError: the directory cannot be used or holds other rows, another run of this rank is
            in progress, or a run of another world size is.
    """
    try:
        missing = [each for each in (output, *output.parents) if not each.exists()]
        output.mkdir(parents=True, exist_ok=True)
        header = {
            "ledger": VERSION,
            "request": dict(request),
            "world_size": world_size,
            "rank": rank,
            "id": uuid.uuid4().hex,
        }
        return _open(output / rank_file("ledger", world_size, rank), header, missing, waits)
    except OSError as error:
        where = f"--output {output}: {error.strerror or error} ({error.filename or output})"
        raise InputError(f"{where}; give a writable directory") from error


def _open(path: Path, header: dict[str, Any], missing: Sequence[Path], waits: bool) -> Ledger:
    output = path.parent
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT, 0o644)
    with OnError(os.close, fd):
        _lock(path, fd, waits)
        first = os.pread(fd, LONGEST_LINE, 0)
        # An incomplete first line is from a run that was killed while it created the ledger.
        is_new = b"\n" not in first and is_cut_short(first)
        with OnError(path.unlink if is_new else int):
            _require_one_division(output, header["world_size"])
            if is_new:
                os.ftruncate(fd, 0)
                _write(fd, header)
                os.fdatasync(fd)
                sync_directory(output)
            ledger = Ledger(path, fd, (path, *missing) if is_new else ())
            earlier = [
                each
                for each in ledgers_in(output)
                if _is_of(each, header["request"]) and not (is_new and each == path)
            ]
            if not earlier and next(files_of_rows(output), None) is not None:
                raise InputError(
                    f"--output {output} has files of rows but no ledger that records their "
                    f"requests; {REMEDY}"
                )
            # By time: the later of two lines about a row counts.
            for line in heapq.merge(*map(read_lines, earlier), key=_time_of):
                ledger.take(line)
        if os.pread(fd, 1, os.fstat(fd).st_size - 1) != b"\n":
            _write(fd, {})  # end the partial line of a killed run
    return ledger


def differences(before: Any, now: dict[str, Any]) -> str:
    """List the keys with different values."""
    before = before if isinstance(before, dict) else {}
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)


def _lock(path: Path, fd: int, waits: bool) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        remedy = "wait until it has ended, or divide the rows with --world-size and --rank"
        raise InputError(f"{path} is in use by another run; {remedy}") from None


def _require_one_division(output: Path, world_size: int) -> None:
    """Raise InputError if a run of another world size is in progress.

    Lock this run's ledger first. Of two runs that start together, one or both are refused.
    """
    for path in ledgers_in(output):
        if (match := _NAME.fullmatch(path.name)) and int(match[1] or 1) == world_size:
            continue
        with suppress(FileNotFoundError):  # a refused run has removed the ledger
            fd = open_regular(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"{path} is in use by a run of another --world-size than {world_size}"
                raise InputError(
                    f"{problem}, so both would do the same rows; wait until it has ended, or stop it"
                ) from None
            finally:
                os.close(fd)


def _is_of(path: Path, request: dict[str, Any]) -> bool:
    """Return True if a ledger has the same fields of requests, False if it has no complete line.

    Raises InputError if the fields differ.
    """
    header = None
    with suppress(FileNotFoundError):  # a refused run has removed the ledger
        header = next(read_lines(path), None)
    if header is None:
        return False
    if header.get("ledger") != VERSION:
        raise InputError(f"{path} is not a ledger of version {VERSION}; {REMEDY}")
    if changes := differences(header.get("request"), request):
        raise InputError(
            f"{path.parent} holds rows of other requests: {changes} ({path.name}); {REMEDY}"
        )
    return True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ledger up to the current end, header first. Raises OSError.

    A ledger with an incomplete first line has no lines.
    """
    with open(open_regular(path), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and not is_cut_short(text := file.readline(min(LONGEST_LINE, left))):
            left -= len(text)
            yield parse_line(text)


def _time_of(line: dict[str, Any]) -> float:
    written = line.get("time")
    return written if isinstance(written, int | float) else 0.0


def row_line(line: dict[str, Any]) -> tuple[int, Status, str] | None:
    """Return row, status and identity of a line about a row; None for any other line."""
    row, status, identity = line.get("row"), line.get("status"), line.get("identity")
    if (
        type(row) is not int
        or not 0 <= row < _MOST_ROWS
        or not isinstance(identity, str)
        or not _IDENTITY.fullmatch(identity)
    ):
        return None
    with suppress(ValueError):
        return row, Status(status), identity
    return None


def is_cut_short(first: bytes) -> bool:
    """Return True if the first line of a ledger is incomplete, from a killed run."""
    return not first.endswith(b"\n") and (first.startswith(_BEGIN) or _BEGIN.startswith(first))


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line of a ledger. Return {} for an invalid line."""
    try:
        value = parse(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(fd: int, line: dict[str, Any]) -> None:
    data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]
