"""Check a storage directory: creation of files, filesystem, free space and write speed."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.mounts import kind_of, mount_of, mounted_locks

TOPIC = "storage"
WRITTEN = 256 << 20  # bytes of the file whose write is timed
_FORMAT = RowFormat(layer_ids=(0, 1, 2, 3), hidden_size=4096, dtype="BF16", model="hsx doctor")
_CHUNK = 8 << 20  # bytes per write, a few hundred tokens
_LEAST_FREE = 1 << 30  # bytes; less would be full within minutes
_IN_MEMORY = ("tmpfs", "ramfs")


def check_storage(
    directory: Path,
    options: FileOptions,
    row_format: RowFormat = _FORMAT,
    num_bytes: int = WRITTEN,
    root: Path = Path("/"),
) -> Iterator[Finding]:
    """Use the directory as a server does: create it if needed, then write and remove a file.

    Args:
        directory: the storage directory.
        options: options of the files.
        row_format: format of the rows, to convert free space to tokens.
        num_bytes: size of the file, rounded down to whole writes, at least one.
        root: directory that contains /proc.
    """
    new = not directory.exists()
    try:
        sink = FileSink(directory, _FORMAT, options)
    except UserError as error:
        yield Finding(TOPIC, "directory", "problem", f"{directory} {error.problem}", error.remedy)
        return
    with sink:
        was = " did not exist and was created" if new else ""
        way = ", ".join(
            (
                "with locks" if options.use_lock else "without locks",
                options.io,
                f"durability {options.durability}",
            )
        )
        yield Finding(
            TOPIC, "directory", "ok", f"{directory}{was}: files can be created there, {way}"
        )
        yield _filesystem(directory, root)
        if options.use_lock and (local := mounted_locks(directory, root)):
            yield Finding(TOPIC, "locks", "note", local.problem, local.remedy)
        try:
            free = _free(directory)
            yield _space(directory, free, row_format)
            if free < 2 * num_bytes:
                remedy = "Free some space and run again."
                yield Finding(
                    TOPIC,
                    "write speed",
                    "note",
                    f"not measured: the test needs {_gb(2 * num_bytes)} of free space",
                    remedy,
                )
            else:
                yield _speed(sink, directory, num_bytes)
        except OSError as error:
            remedy = "Check the system log, or give another directory; remove hsx-doctor-* there."
            yield Finding(
                TOPIC,
                "write speed",
                "problem",
                f"an operation in the directory failed: {error}",
                remedy,
            )


def filesystem_of(directory: Path, root: Path = Path("/")) -> str:
    """Return a directory's filesystem, such as "ext4", from mountinfo (proc_pid_mountinfo(5))."""
    line = mount_of(directory, root)
    return kind_of(line) if line else "unknown"


def _filesystem(directory: Path, root: Path) -> Finding:
    try:
        kind = filesystem_of(directory, root)
    except (OSError, IndexError) as error:
        return Finding(TOPIC, "filesystem", "note", f"unknown: {error}")
    if kind in _IN_MEMORY:
        remedy = "Move finished files to a disk, or give a directory on a disk."
        return Finding(
            TOPIC,
            "filesystem",
            "note",
            f"{kind}: files take memory and are lost when the machine restarts",
            remedy,
        )
    return Finding(TOPIC, "filesystem", "ok", kind)


def _free(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _space(directory: Path, free: int, row_format: RowFormat) -> Finding:
    if free < _LEAST_FREE:
        remedy = "Free some space, raise the quota, or give another directory."
        return Finding(TOPIC, "free space", "problem", f"{_gb(free)} in {directory}", remedy)
    tokens, layer_bytes = (
        free // row_format.row_bytes,
        row_format.row_bytes // row_format.num_layers,
    )
    found = (
        f"{_gb(free)}: about {tokens:,} tokens of {row_format.num_layers} layers x "
        f"{layer_bytes:,} bytes"
    )
    return Finding(TOPIC, "free space", "ok", found)


def _speed(sink: FileSink, directory: Path, num_bytes: int) -> Finding:
    path = directory / f"hsx-doctor-{secrets.token_hex(4)}{DATA_SUFFIX}"
    memory = mmap.mmap(-1, _CHUNK)  # page-aligned, as direct I/O requires
    memory.write(os.urandom(_CHUNK))  # a filesystem cannot compress random bytes
    tokens_per_write = _CHUNK // _FORMAT.row_bytes
    tokens = max(1, num_bytes // _CHUNK) * tokens_per_write
    token_ids = np.arange(tokens, dtype=np.int64)
    try:
        begun = time.perf_counter()
        file = sink.open("hsx-doctor", path, tokens)
        with ExitStack() as undo:
            undo.callback(file.discard)
            for first in range(0, tokens, tokens_per_write):
                file.write(first, memoryview(memory))
            undo.pop_all()
        file.commit(token_ids, tokens)
        seconds = time.perf_counter() - begun
    except SinkError as error:
        remedy = "Check the filesystem's log, free some space, or give another directory."
        return Finding(
            TOPIC,
            "write speed",
            "problem",
            f"a file of {_gb(tokens * _FORMAT.row_bytes)} failed: {error.reason}",
            remedy,
        )
    finally:
        remove(path)
    speed = tokens * _FORMAT.row_bytes / seconds
    where = (
        "to the disk"
        if sink.options.io == "direct" or sink.options.durability == "fdatasync"
        else "to the page cache"
    )
    size = f"{tokens * _FORMAT.row_bytes >> 20} MiB"
    found = (
        f"about {_gb(int(speed))}/s {where}, an estimate: one file of {size}, one writer; "
        "several writers may reach more"
    )
    return Finding(
        TOPIC,
        "write speed",
        "ok",
        found,
        "Compare it with the write bandwidth that `hsx plan` shows.",
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
