"""What the tests of sinks and reader share: rows that tell their position, traced system calls, and other readers' lock protocols."""

from __future__ import annotations

import fcntl
import json
import os
import tarfile
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from awscrt.checksums import crc32c

from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.names import token_of_workspace, workspace_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, decode
from vllm_ascend_hsx.protocol.tar import END
from vllm_ascend_hsx.reader.shards import Shards
from vllm_ascend_hsx.sinks import system
from vllm_ascend_hsx.sinks.workspace import LOCK

FORMAT = RowFormat(layer_ids=(2, 0, 3), hidden_size=8, dtype="BF16", model="tiny")


def make_rows(first: int, last: int, version: int = 0) -> npt.NDArray[np.uint16]:
    """Rows of positions [first, last) as bf16 bit patterns, [count, layers, hidden]: no two rows, layers or versions are alike."""
    positions = np.arange(first, last, dtype=np.uint32).reshape(-1, 1, 1)
    layers = np.arange(FORMAT.num_layers, dtype=np.uint32).reshape(1, -1, 1)
    elements = np.arange(FORMAT.hidden_size, dtype=np.uint32).reshape(1, 1, -1)
    mixed = (positions * 7919 + layers * 104729 + elements * 1299709 + version * 15485863) * np.uint32(2654435761)
    return (mixed >> np.uint32(16)).astype(np.uint16)


def token_ids(tokens: int) -> npt.NDArray[np.int64]:
    return np.arange(tokens, dtype=np.int64) * 3 + 1_000_000_007


def checksum_of(content: bytes) -> str:
    """What the checksum of a file with this content must be, as docs/file-format.md says."""
    end = 8 + int.from_bytes(content[:8], "little")
    stated = json.loads(content[8:end])["__metadata__"]["checksum"]
    header = content[:end].replace(f'"checksum":"{stated}"'.encode(), b'"checksum":"00000000"')
    return f"{crc32c(header + content[end:]):08x}"


def as_version_1(content: bytes) -> bytes:
    """The file as versions before 2 wrote it: the checksum is of what follows the header."""
    end = 8 + int.from_bytes(content[:8], "little")
    stated = json.loads(content[8:end])["__metadata__"]["checksum"]
    header = content[:end].replace(b'"format_version":"2"', b'"format_version":"1"')
    return header.replace(f'"checksum":"{stated}"'.encode(), b'"checksum":"%08x"' % crc32c(content[end:])) + content[end:]


def listing(directory: Path) -> list[str]:
    """All names in a directory, and in workspaces but for their locks; without the workspaces themselves of servers that live."""
    names = []
    for name in os.listdir(directory):
        if token_of_workspace(name) is None and not name.startswith(".hsx-unlocked-"):
            names.append(name)
        else:
            inside = os.listdir(directory / name)
            names += [f"{name}/{each}" for each in inside if each != LOCK]
            if LOCK in inside and not is_held(directory / name / LOCK):
                names.append(name)
    return sorted(names)


def dead_workspace(directory: Path, token: str = "0badcafe", folders: str = "") -> Path:
    """What a server has left that died with a file under way."""
    making = directory / f"making-{token}"
    making.mkdir()
    (making / LOCK).write_text(folders)
    (making / "0").touch()
    return making.rename(directory / workspace_name(token))  # only now can somebody clean it up


def open_fds() -> set[tuple[str, str]]:
    """Descriptors of this process with what they point to. Compare by difference: what an earlier test left may go at any time."""
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            fds.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return fds


def wait_for_sleepers(lock: Path, count: int = 1) -> None:
    """Until so many flock() calls sleep on the file, by the kernel's own list."""
    inode = os.stat(lock).st_ino
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line and f":{inode} " in line]
        if len(waiting) >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"nobody sleeps on {lock}")


def is_held(lock: Path) -> bool:
    """Whether a writer holds the lock file now."""
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Entry(NamedTuple):
    """A member of a tar file."""

    name: str
    offset: int
    size: int


def walked(directory: Path, stems: Collection[str] | None = None) -> dict[str, list[Entry]]:
    """Return the members of each shard in a directory, or of some, by its stem, as tarfile sees them.

    Raises:
        AssertionError: they are not what the index says, or something else is in the tar file.
    """
    found = {}
    for path in sorted(path for path in directory.glob("hsx-*.tar") if stems is None or path.stem in stems):
        sealed = path.with_suffix(".json").exists()
        entries = []
        if path.stat().st_size:
            with tarfile.open(path) as tar:
                entries = [Entry(info.name, info.offset_data, info.size) for info in tar]
        assert all(entry.offset % PAGE == 0 for entry in entries)
        members = [line for line in lines_of(directory, path.stem) if isinstance(line, Member)]
        assert entries == [Entry(member.name, member.offset, member.size) for member in members]
        end = members[-1].end if members else 0
        assert path.stat().st_size == end + (len(END) if sealed else 0)
        found[path.stem] = entries
    return found


def lines_of(directory: Path, stem: str) -> list[Member | Gone]:
    """What the index of a shard says."""
    lines = [decode(line) for line in (directory / f"{stem}.jsonl").read_bytes().splitlines()]
    assert None not in lines
    return lines  # type: ignore[return-value]


def member_bytes(directory: Path, name: str) -> bytes | None:
    """The safetensors file that a member is."""
    place = Shards(directory).open(name)
    if place is None:
        return None
    try:
        return os.pread(place.fd, place.size, place.offset)
    finally:
        os.close(place.fd)


class Traced:
    """Stands in for a module: `checkpoint(name)` is called before each call of one of its functions, and may raise."""

    def __init__(self, module: ModuleType, checkpoint: Callable[[str], None]) -> None:
        self._module = module
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        cannot_fail = name in ("fspath", "fsencode", "fsdecode", "getegid", "strerror")
        if cannot_fail or not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                self._checkpoint(name)
            except OSError:
                if name == "close":  # a close that fails closes nevertheless
                    attribute(*args, **kwargs)
                raise
            return attribute(*args, **kwargs)

        return call


def trace(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], None]) -> None:
    """Let `checkpoint` see every system call of the sinks that need a directory, and of nothing else in the process."""
    of_sinks = ("data_file", "request_file", "storage", "session", "workspace", "shard", "shard_file")
    for module in (*(f"sinks.{name}" for name in of_sinks), "protocol.checksum", "protocol.files", "protocol.lock"):
        monkeypatch.setattr(f"vllm_ascend_hsx.{module}.os", Traced(os, checkpoint))
    monkeypatch.setattr("vllm_ascend_hsx.sinks.shard_file.copy_into", Traced(system, checkpoint).copy_into)
    monkeypatch.setattr("vllm_ascend_hsx.protocol.lock.fcntl", Traced(fcntl, checkpoint))
    monkeypatch.setattr("vllm_ascend_hsx.sinks.data_file.reserve", Traced(system, checkpoint).reserve)


Reader = Generator[None, None, "dict[str, Any] | None"]


def speculators_reader(path: Path) -> Reader:
    """The steps of hs-connectors 0.9.0's FileTransfer (transfer.py:25 and 124), one system call each."""
    lock = f"{path}.lock"
    locked = os.path.exists(lock)
    yield
    if locked:
        fd = os.open(lock, os.O_RDWR)
        try:
            while True:
                yield
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    continue
            yield
        finally:
            os.close(fd)
        yield
        os.remove(lock)
        yield
    if not os.path.exists(path):
        return None
    yield
    return _load_file(path)


def vllm_reader(path: Path) -> Reader:
    """The steps of vLLM 0.23.0's load_hidden_states (example_hidden_states_connector.py:45), with its blocking call made in steps."""
    with open(f"{path}.lock") as lock:
        while True:
            yield
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
        yield
        return _load_file(path)


def _load_file(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file  # only here: the processes that test_crash.py kills start without torch

    return load_file(path)


class Stepped:
    """Runs a reader a step at a time, then to its end."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.running = False
        self.done = False
        self.result: dict[str, Any] | None = None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.done:
                return
            self.running = True
            try:
                next(self._reader)
            except StopIteration as stop:
                self.done = True
                self.result = stop.value
            finally:
                self.running = False

    def finish(self) -> dict[str, Any] | None:
        for _ in range(100):
            self.step()
        assert self.done, "the reader still waits for a lock that nobody should hold"
        return self.result
