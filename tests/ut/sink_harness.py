"""Helpers of tests of sinks and readers: rows that differ by position, requests, listings."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from awscrt.checksums import crc32c
from tracing import trace

from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.names import token_of_workspace, workspace_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.shard_index import Member, Tombstone, decode
from vllm_ascend_hsx.protocol.tar import END
from vllm_ascend_hsx.reader.members import open_member
from vllm_ascend_hsx.sinks.base import SinkFile
from vllm_ascend_hsx.sinks.file import DirectorySink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.workspace import LOCK

if TYPE_CHECKING:  # processes that test_crash.py kills start without torch
    import torch

MIB = 1 << 20
FORMAT = RowFormat(layer_ids=(2, 0, 3), hidden_size=8, dtype="BF16", model="tiny")


def make_rows(first: int, last: int, version: int = 0) -> npt.NDArray[np.uint16]:
    """Return bf16 bits [count, layers, hidden]; no two rows, layers or versions are alike."""
    positions = np.arange(first, last, dtype=np.uint32).reshape(-1, 1, 1)
    layers = np.arange(FORMAT.num_layers, dtype=np.uint32).reshape(1, -1, 1)
    elements = np.arange(FORMAT.hidden_size, dtype=np.uint32).reshape(1, 1, -1)
    mixed = (
        positions * 7919 + layers * 104729 + elements * 1299709 + version * 15485863
    ) * np.uint32(2654435761)
    return (mixed >> np.uint32(16)).astype(np.uint16)


def finite_rows(first: int, last: int, version: int = 0) -> npt.NDArray[np.uint16]:
    """Return rows like make_rows without NaN and infinity."""
    return make_rows(first, last, version) & np.uint16(0xBFFF)


def token_ids(tokens: int) -> npt.NDArray[np.int64]:
    return np.arange(tokens, dtype=np.int64) * 3 + 1_000_000_007


def put(file: SinkFile, tokens: int, version: int = 0) -> Path:
    """Write all rows of a request, commit it, and return the path. The last token is generated."""
    file.write(0, finite_rows(0, tokens, version))
    file.commit(token_ids(tokens), max(0, tokens - 1))
    return file.path


def open_request(sink: DirectorySink, where: Path, name: str = "a", tokens: int = 0) -> RequestFile:
    """Open a request of at least this many tokens. vLLM's random suffix is -0123abcd."""
    return sink.open(f"{Path(name).name}-0123abcd", where / f"{name}-0123abcd.safetensors", tokens)


def publish(
    sink: DirectorySink, where: Path, name: str = "a", tokens: int = 3, version: int = 0
) -> Path:
    """Publish one request, and return the path."""
    return put(open_request(sink, where, name, tokens), tokens, version)


def end(file: SinkFile, how: str, tokens: int = 2) -> None:
    """Commit a file with written rows, fail it with the reason "as a test", or discard it."""
    if how == "commit":
        file.commit(token_ids(tokens), tokens)
    elif how == "fail":
        file.fail("as a test")
    else:
        assert how == "discard"
        file.discard()


ENDS = ("commit", "fail", "discard")


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Return the bits of 16-bit elements. Equal bits are equal, also for NaN."""
    import torch

    return tensor.view(torch.uint16).numpy()


def rows_of(path: Path, *, verify: bool = True, **options: bool) -> npt.NDArray[np.uint16]:
    """Load the rows of a file or a member, as bit patterns."""
    from vllm_ascend_hsx.reader.load import load

    return bits(load(path, 0, verify=verify, **options).hidden_states)


def reason_of(path: Path) -> str:
    """Return the reason in a request's error file."""
    return str(json.loads(Path(f"{path}.error").read_text())["reason"])


def run_threads(*actions: Callable[[], object]) -> None:
    """Run actions at the same time, and raise the first error."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(actions))

    def run(action: Callable[[], object]) -> None:
        begin.wait()
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@contextmanager
def write_in_flight(file: SinkFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start to write four rows of a file in a thread. The write ends when the block is left."""
    writing, go_on = threading.Event(), threading.Event()

    def checkpoint(call: str) -> None:
        if call == "pwrite" and threading.current_thread() is writer:
            writing.set()
            assert go_on.wait(30)

    writer = threading.Thread(target=lambda: file.write(0, make_rows(0, 4, version=8)))
    with monkeypatch.context() as patch:
        trace(patch, checkpoint)
        writer.start()
        assert writing.wait(30)
        try:
            yield
        finally:
            go_on.set()
            writer.join()


def killed(serve: Callable[[], object]) -> None:
    """Call a function in a forked process, and kill the process afterwards."""
    child = os.fork()
    if child == 0:
        try:
            serve()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def checksum_of(content: bytes) -> str:
    """Return the right checksum of a file with this content (docs/file-format.md)."""
    end = 8 + int.from_bytes(content[:8], "little")
    stated = json.loads(content[8:end])["__metadata__"]["checksum"]
    header = content[:end].replace(f'"checksum":"{stated}"'.encode(), b'"checksum":"00000000"')
    return f"{crc32c(header + content[end:]):08x}"


def as_version_1(content: bytes) -> bytes:
    """Return the file in format version 1: the checksum covers only the bytes after the header."""
    end = 8 + int.from_bytes(content[:8], "little")
    stated = json.loads(content[8:end])["__metadata__"]["checksum"]
    header = content[:end].replace(b'"format_version":"2"', b'"format_version":"1"')
    return (
        header.replace(
            f'"checksum":"{stated}"'.encode(), b'"checksum":"%08x"' % crc32c(content[end:])
        )
        + content[end:]
    )


def listing(directory: Path) -> list[str]:
    """Return all names in a directory and in workspaces, without live workspaces themselves."""
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
    """Create the workspace of a server that died while it was writing a file."""
    making = directory / f"making-{token}"
    making.mkdir()
    (making / LOCK).write_text(folders)
    (making / "0").touch()
    return making.rename(directory / workspace_name(token))  # from now on a server may clean it up


def open_fds(below: Path | None = None) -> set[tuple[str, str]]:
    """Return (descriptor, target) pairs of this process, optionally only targets in `below`.

    Compare by difference: descriptors of an earlier test may be closed at any time.
    """
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            fds.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return {fd for fd in fds if below is None or fd[1].startswith(str(below))}


def wait_for_sleepers(lock: Path, count: int = 1) -> None:
    """Wait until `count` flock() calls sleep on the file, according to /proc/locks."""
    inode = os.stat(lock).st_ino
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        waiting = [
            line
            for line in Path("/proc/locks").read_text().splitlines()
            if "->" in line and f":{inode} " in line
        ]
        if len(waiting) >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"nobody sleeps on {lock}")


def join_sleepers() -> None:
    """Wait for threads that slept on locks. They close descriptors after they answer."""
    for thread in threading.enumerate():
        if thread.name.startswith("hsx-lock-"):
            thread.join(30)
            assert not thread.is_alive()


def is_held(lock: Path) -> bool:
    """Return True if a writer holds the lock."""
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_free(lock: Path) -> bool:
    """Return True if nobody holds the lock. A server that cleans up may remove it at any time."""
    try:
        return not is_held(lock)
    except FileNotFoundError:
        return True


class Entry(NamedTuple):
    """A member of a tar file."""

    name: str
    offset: int
    size: int


def walked(directory: Path, stems: Collection[str] | None = None) -> dict[str, list[Entry]]:
    """Return the members of the shards in a directory, by stem, as read by tarfile.

    Raises:
        AssertionError: the members differ from the index, or the tar file has other content.
    """
    found = {}
    for path in sorted(
        path for path in directory.glob("hsx-*.tar") if stems is None or path.stem in stems
    ):
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


def lines_of(directory: Path, stem: str) -> list[Member | Tombstone]:
    """Return the lines of the index of a shard."""
    lines = [decode(line) for line in (directory / f"{stem}.jsonl").read_bytes().splitlines()]
    assert None not in lines
    return lines  # type: ignore[return-value]


def member_bytes(directory: Path, name: str) -> bytes | None:
    """Return the content of a member (a safetensors file), or None."""
    place = open_member(directory / name)
    if place is None:
        return None
    try:
        return os.pread(place.fd, place.size, place.offset)
    finally:
        os.close(place.fd)
