"""The ledger of a run: one JSON line for what happened to every row, behind two that say whose files these are.

    {"ledger": 1, "token": ..., "dataset": {...}, "request": {...}, "world_size": ..., "rank": ...}
    {"server": {"model": ..., "layer_ids": ..., ...}, "directories": [...]}
    {"row": 0, "status": "done", "path": "hs_0.safetensors", "tokens": ..., "bytes": ..., "seconds": ..., "attempts": ..., ...}

It is only ever appended to, and a lock on it says that a run is under way. A run that is killed may leave half a line: whatever is no whole
line of JSON is passed over. Whether a row is finished is told by its file, not by its line.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.names import is_path, is_token, new_token
from vllm_ascend_hsx.generate.row_set import RowSet
from vllm_ascend_hsx.protocol.files import open_regular
from vllm_ascend_hsx.protocol.strict_json import parse

VERSION = 1
REMEDY = "name another --output, or replace what is there with --overwrite (not with --in-place, where you remove it yourself)"
Status = Literal["done", "recovered", "found", "failed"]

_NAME = re.compile(r"ledger(?:-[0-9]+-of-[0-9]+)?\.jsonl")
# struct flock of linux/fcntl.h on 64-bit machines: l_type, l_whence, l_start, l_len, l_pid. All zeros but the type: the whole file.
_FLOCK = struct.Struct("hhqqi4x")


class Identity(NamedTuple):
    """What all files of an output directory have in common, apart from the server.

    Attributes:
        dataset: its digest and number of rows.
        request: what is asked for with every row.
    """

    dataset: dict[str, Any]
    request: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """What happened to a row.

    Attributes:
        status: "done"; "recovered": an earlier request's file was there; "found": its own file was there, and no line; "failed".
        path: of the file, in the output directory.
        tokens, bytes: of the file.
        seconds: from the first request to the file.
        attempts: requests that were sent.
        error: why the last one failed.
        endpoint: that answered last.
    """

    row: int
    status: Status
    path: str | None = None
    tokens: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    attempts: int | None = None
    error: str | None = None
    endpoint: str | None = None


@dataclass
class Content:
    """What a ledger says.

    Attributes:
        header: its first line.
        server: what the files come from, or None if no server has answered yet.
        directories: where servers have put files of these requests, as they are called here.
        rows: that have a line and have not failed.
    """

    rows: RowSet
    header: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] | None = None
    directories: list[str] = field(default_factory=list)

    @property
    def token(self) -> str | None:
        token = self.header.get("token")
        return token if self.header.get("ledger") == VERSION and is_token(token) else None

    def add(self, line: dict[str, Any]) -> None:
        """Take note of a line behind the first."""
        row, server, directories = line.get("row"), line.get("server"), line.get("directories", [])
        if _is_server(server) and isinstance(directories, list) and all(map(is_path, directories)):
            self.server = server
            self.directories += [each for each in directories if each not in self.directories]
        elif type(row) is int:
            (self.rows.discard if line.get("status") == "failed" else self.rows.add)(row)


class Ledger:
    """The ledger of this run, locked. Made by `open_ledger`."""

    def __init__(self, path: Path, fd: int, content: Content) -> None:
        assert content.token is not None
        self.path = path
        self.token = content.token
        self.content = content
        self._fd = fd

    def append(self, entry: Entry) -> None:
        """Raises OSError: it cannot be written."""
        _write(self._fd, {key: value for key, value in asdict(entry).items() if value is not None})

    def note_server(self, server: dict[str, Any], directory: str) -> None:
        """Note durably whose files these are, and where the server puts them.

        Raises:
            InputError: there are files of another one.
            OSError: it cannot be written.
        """
        known = self.content.server
        if known is not None and known != server:
            raise InputError(
                f"{self.path.parent} holds rows of another server: {_differences(known, server)}; serve the same model and layers, {REMEDY}"
            )
        if known is None or directory not in self.content.directories:
            line = {"server": server, "directories": [*self.content.directories, directory]}
            _write(self._fd, line)
            os.fdatasync(self._fd)
            self.content.add(line)

    def close(self) -> None:
        """Let other runs use the directory."""
        os.close(self._fd)


class Other(NamedTuple):
    """The ledger of another rank, or of another division into ranks. alive: its run is under way."""

    path: Path
    content: Content
    alive: bool


def ledger_name(world_size: int, rank: int) -> str:
    return "ledger.jsonl" if world_size == 1 else f"ledger-{rank}-of-{world_size}.jsonl"


def open_ledger(output: Path, identity: Identity, world_size: int, rank: int, clear: Callable[[], None] | None = None) -> Ledger:
    """Lock the ledger of this rank; it is made if it is not there.

    Args:
        output: the directory.
        identity: of the rows.
        world_size, rank: whose ledger.
        clear: removes what the ledger is about, which then begins anew. Until then it says whose files these are.

    Raises:
        InputError: a run of this rank is under way, or its rows are of something else.
        OSError: it cannot be read or written.
    """
    path = output / ledger_name(world_size, rank)
    fd = open_locked(path, os.O_CREAT)
    try:
        content, whole = _read(fd, identity.dataset["rows"])
        if clear is not None:
            clear()
            content = None
        if content is None:
            # The first line is written before anything is asked for: if it is not whole, there is nothing else.
            header = {"ledger": VERSION, "token": new_token(), **identity._asdict(), "world_size": world_size, "rank": rank}
            os.ftruncate(fd, 0)
            _write(fd, header)
            os.fdatasync(fd)
            sync_directory(output)
            return Ledger(path, fd, Content(RowSet(identity.dataset["rows"]), header))
        compare(path, content, identity)
        if not whole:
            os.write(fd, b"\n")
        return Ledger(path, fd, content)
    except BaseException:
        os.close(fd)
        raise


def is_ledger(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def other_ledgers(output: Path, rows: int, world_size: int, rank: int, own: bool = False) -> list[Other]:
    """All ledgers of a directory but that of this rank, or with it. Raises OSError: one cannot be read."""
    found = []
    for name in sorted(os.listdir(output)):
        if is_ledger(name) and (own or name != ledger_name(world_size, rank)):
            fd = open_regular(output / name)
            try:
                content, _ = _read(fd, rows)
                if content is not None:
                    found.append(Other(output / name, content, _is_locked(fd)))
            finally:
                os.close(fd)
    return found


def compare(path: Path, content: Content, identity: Identity) -> None:
    """Raises InputError: a ledger is of other rows."""
    if content.token is None:
        raise InputError(f"{path} does not begin as a ledger of this version does; {REMEDY}")
    for name, now in (("dataset", identity.dataset), ("request", identity.request)):
        before = content.header.get(name)
        if before != now:
            what = "another dataset" if name == "dataset" else "requests of another kind"
            raise InputError(f"{path.parent} holds rows of {what}: {_differences(before, now)} ({path.name}); {REMEDY}")


def open_locked(path: Path, flags: int = 0) -> int:
    """A descriptor of a ledger that says that a run is under way, until it is closed.

    Args:
        path: of the ledger.
        flags: O_CREAT, to make it.

    Raises:
        InputError: a run is under way.
        OSError: it cannot be opened.
    """
    while True:
        fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | flags, 0o644)
        try:
            # Not flock: with this kind others can see whether the lock is held without taking it for a moment, in which we would fail.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    return fd
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise
            raise InputError(
                f"{path} belongs to a run that is under way; wait for its end, or divide the rows between the two with --world-size and "
                "--rank"
            ) from None
        os.close(fd)  # a run with --overwrite has removed it meanwhile: nobody else would see this lock


def sync_directory(directory: Path) -> None:
    """Have the names in it survive a loss of power. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _read(fd: int, rows: int) -> tuple[Content | None, bool]:
    """What a ledger says, None if its first line is not whole; and whether its last line is."""
    content = Content(RowSet(rows))
    line = b"\n"
    with open(os.dup(fd), "rb") as file:
        file.seek(0)
        first = file.readline()
        if not first.endswith(b"\n"):
            return None, False
        content.header = _parse(first)
        for line in file:
            content.add(_parse(line))
    return content, line.endswith(b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = parse(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_server(value: object) -> bool:
    """Whether it is what `note_server` was given."""
    if not isinstance(value, dict) or not isinstance(value.get("row_shape"), list) or "layer_ids" not in value:
        return False
    return isinstance(value["layer_ids"], str | None) and isinstance(value.get("dtype"), str)


def _write(fd: int, line: dict[str, Any]) -> None:
    data = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def _differences(before: Any, now: dict[str, Any]) -> str:
    before = before if isinstance(before, dict) else {}
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)
