"""The ledger of an output directory: `ledger.jsonl`, one JSON object per line, never rewritten.

    {"ledger": 3, "request": ..., "world_size": 1, "rank": 0, "id": ...}
    {"run": {"rows": 1000, "invalid": 0}, "time": ...}
    {"state": "running", "time": ...}
    {"server": {"model": ..., "layer_ids": ..., "weights": ..., ...}}
    {"row": 17, "status": "done", "identity": ..., "time": ..., "file": ..., "tokens": ..., ...}

The first line has the fields of all requests. Other ones are refused. Its random id tells ledgers
of different directories apart. A run begins with the number of rows that it is about, all ranks
together. The server is logged before the first row is logged as done. The row's identity says of
which content its file is; "changed" says that the dataset has another content now. A killed run may
leave half a line. Lines that are no JSON are ignored. An flock excludes a second run, and runs that
divide the rows otherwise, because they would do each other's rows.
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
REMEDY = "name another --output, such as a new folder below this one"
_NAME = re.compile(r"ledger(?:-[0-9]+-of-([0-9]+))?\.jsonl")  # group 1: the world size
LONGEST_LINE = 1 << 20  # bytes; a longer line is no line of a ledger
_ROW_FILE = re.compile(r"hs_(0|[1-9][0-9]*)" + re.escape(DATA_SUFFIX))
_IDENTITY = re.compile(r"(?:[0-9a-f]{32})?")  # none: of a row without a file
_MOST_ROWS = 1 << 28


class Status(str, Enum):
    """The state of a row after a line."""

    DONE = "done"  # this run made its file
    FOUND = "found"  # its file was there
    FAILED = "failed"
    INVALID = "invalid"  # the dataset's record cannot be sent
    CHANGED = "changed"  # its file is of a content that the dataset no longer has


class State(str, Enum):
    """The state of a run after a line."""

    RUNNING = "running"
    WAITING = "waiting"  # for a server
    STOPPED = "stopped"  # before its end
    FINISHED = "finished"


class Finished:
    """The rows that have their files, with the first 64 bits of their identities."""

    def __init__(self) -> None:
        self.marks = array("Q")  # for each row; 0: it has no file

    def has(self, row: int, identity: str) -> bool:
        """Return True if the row is finished, and of this identity."""
        return row < len(self.marks) and self.marks[row] == mark_of(identity)

    def note(self, row: int, status: Status, identity: str) -> None:
        """Take a line of a ledger into account."""
        if row >= len(self.marks):
            self.marks.frombytes(bytes(self.marks.itemsize * (row + 1 - len(self.marks))))
        self.marks[row] = mark_of(identity) if status in (Status.DONE, Status.FOUND) else 0


class Ledger:
    """The ledger of this run, locked. Made by `open_ledger`.

    Attributes:
        path: of the file.
        server: model, layers and weights of the rows, as noted by any ledger of the directory.
        finished: rows that have their files, as any ledger of the directory says.
        made: the file and the directories that this run has made, if it has made the file.
    """

    def __init__(self, path: Path, fd: int, made: Sequence[Path] = ()) -> None:
        self.path = path
        self.made = made
        self.server: dict[str, Any] | None = None
        self.finished = Finished()
        self._fd = fd
        self._size = 0  # when the last line was written

    def is_done(self, row: int, identity: str) -> bool:
        """Return whether a ledger of the directory has a line for the file of a row."""
        return self.finished.has(row, identity)

    def append(self, row: int, status: Status, identity: str, **facts: Any) -> None:
        """Log the state of a row, without facts that are None. Raises RunError."""
        known = {key: value for key, value in facts.items() if value is not None}
        self._log({"row": row, "status": status.value, "identity": identity, **known})
        self.finished.note(row, status, identity)

    def note_run(self, rows: int, invalid: int) -> None:
        """Log that a run begins, over the first `rows` rows. Raises RunError."""
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
        """Take a line of an earlier run into account. Raises InputError: two servers differ."""
        if isinstance(server := line.get("server"), dict):
            if changes := differences(self.server or server, server):
                raise InputError(
                    f"{self.path.parent} holds rows of two servers: {changes}; {REMEDY}"
                )
            self.server = server
        elif (known := row_line(line)) is not None:
            self.finished.note(*known)

    def beat(self) -> None:
        """Show `hsx status` that the run is alive, by the time of the ledger's last change."""
        with suppress(OSError):
            os.utime(self._fd)

    def require_in_place(self) -> None:
        """Raise RunError if the output directory is another one now, or the ledger was cut off.

        Servers make a directory that is missing, so rows would go on in another one.
        """
        is_in_place = False
        with suppress(OSError):
            is_in_place = os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        if not is_in_place:
            raise RunError(
                f"{self.path.parent} was moved, removed or replaced during the run, so its rows "
                "are not all there; "
                "put it back with what servers have written under this name since, and run the "
                "same command again"
            )
        before = self._size  # read first: another thread may be adding a line
        if (size := os.fstat(self._fd).st_size) < before:
            raise RunError(
                f"{self.path} was cut off during the run, from {before} to {size} bytes; put "
                f"back what it had, or {REMEDY}"
            )

    def _log(self, line: dict[str, Any], durable: bool = False) -> None:
        self.require_in_place()
        try:
            _write(self._fd, line | {"time": round(time.time(), 1)})
            self._size = os.lseek(self._fd, 0, os.SEEK_CUR)  # where the line ended
            if durable:
                os.fdatasync(self._fd)
        except OSError as error:
            raise RunError(describe(f"{self.path} cannot be written", error)) from error

    def withdraw(self) -> None:
        """Remove the ledger and the directories that this run has made, as if it had not begun.

        They stay if a file of a row is there whose request only this ledger tells.
        """
        output = self.path.parent
        with suppress(OSError, RunError):  # the directory is in use, or another one now
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
    """Return the name of a rank's file, such as that of its ledger."""
    return f"{stem}.jsonl" if world_size == 1 else f"{stem}-{rank}-of-{world_size}.jsonl"


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


def open_ledger(
    output: Path,
    request: Mapping[str, Any],
    world_size: int = 1,
    rank: int = 0,
    waits: bool = False,
) -> Ledger:
    """Open and lock the ledger of this rank; create it, and the output directory, if needed.

    Args:
        output: the directory.
        request: fields that all requests have.
        world_size, rank: as for `Options`.
        waits: wait for another run of the same rank, such as one whose machine has just died.

    Raises:
        InputError: the directory cannot be used or holds other rows, or another run of this rank
            is under way, or one of another world size.
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
        raise InputError(f"{where}; name a directory that can be written") from error


def _open(path: Path, header: dict[str, Any], missing: Sequence[Path], waits: bool) -> Ledger:
    output = path.parent
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT, 0o644)
    with OnError(os.close, fd):
        _lock(path, fd, waits)
        first = os.pread(fd, LONGEST_LINE, 0)
        is_new = b"\n" not in first and is_cut_short(
            first
        )  # or the run that made it was killed at once
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
                    f"--output {output} holds files of rows, and no ledger that says what they "
                    f"were made from; {REMEDY}"
                )
            # By time: of two lines about a row in two ledgers the later one counts.
            for line in heapq.merge(*map(read_lines, earlier), key=_time_of):
                ledger.take(line)
        if os.pread(fd, 1, os.fstat(fd).st_size - 1) != b"\n":
            _write(fd, {})  # ends the line at which a run was killed
    return ledger


def differences(before: Any, now: dict[str, Any]) -> str:
    """Name the keys whose values differ."""
    before = before if isinstance(before, dict) else {}
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)


def _lock(path: Path, fd: int, waits: bool) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
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
                problem = (
                    f"{path} belongs to a run that is under way, of another --world-size than "
                    f"{world_size}"
                )
                raise InputError(
                    f"{problem}, so both would do the same rows; wait for its end, or end it"
                ) from None
            finally:
                os.close(fd)


def _is_of(path: Path, request: dict[str, Any]) -> bool:
    """Return True if a ledger belongs to the same requests; False if it has no whole line.

    Raises InputError if it belongs to others.
    """
    header = None
    with suppress(FileNotFoundError):  # a run that was refused has removed it
        header = next(read_lines(path), None)
    if header is None:
        return False
    if header.get("ledger") != VERSION:
        raise InputError(f"{path} does not begin as a ledger of this version does; {REMEDY}")
    if changes := differences(header.get("request"), request):
        raise InputError(
            f"{path.parent} holds rows of requests of another kind: {changes} ({path.name}); "
            f"{REMEDY}"
        )
    return True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ledger, up to its present end, the header first. Raises OSError.

    A ledger whose run was killed in the first line has none.
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
