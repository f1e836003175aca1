"""Remove files that consumers have acknowledged, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from vllm_ascend_hsx.protocol.acknowledgement import acknowledges
from vllm_ascend_hsx.protocol.files import LEADS_NOWHERE, NotAFileError, open_regular
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import (
    ACKNOWLEDGED_SUFFIX,
    DATA_SUFFIX,
    INDEX,
    LOCK_SUFFIX,
    MANIFEST,
    TAR,
    parse_shard_name,
)
from vllm_ascend_hsx.sinks.orphans import Cleaning
from vllm_ascend_hsx.sinks.storage import open_folder

_LARGE = (DATA_SUFFIX, TAR)
_MOST = 4096  # bytes; a marker has fewer than 100


class _File(NamedTuple):
    """An acknowledged file. The time is that of the acknowledgement, in seconds since the epoch."""

    time: float
    folder: str
    name: str
    size: int


class Acknowledged:
    """Remove the acknowledged files of a directory, oldest acknowledgement first.

    Args:
        dir_fd: the directory.
        cleaning: counts and reports the removed files.
        dry_run: remove nothing.

    Attributes:
        num_bytes: bytes of all data files and shards, acknowledged or not.
    """

    def __init__(self, dir_fd: int, cleaning: Cleaning, dry_run: bool) -> None:
        self._dir_fd = dir_fd
        self._cleaning = cleaning
        self._dry_run = dry_run
        self._files: list[_File] = []
        self.num_bytes = 0

    def look(self, folders: Iterable[str]) -> None:
        """Find the files of folders below the directory; "" is the directory itself.

        Remove markers whose file is gone.
        """
        for folder in folders:
            with (
                self._cleaning.noting(f"could not read {folder or '.'!r}"),
                open_folder(self._dir_fd, folder or ".") as fd,
            ):
                if fd >= 0:
                    self._look(fd, folder)

    def remove(self, before: float | None, keep_bytes: int | None) -> None:
        """Remove files that were acknowledged before a time, and then the oldest to keep a size.

        Args:
            before: seconds since the epoch, or None.
            keep_bytes: most bytes of all files in the directory, or None.
        """
        for file in sorted(self._files):
            is_old = before is not None and file.time < before
            if not is_old and (keep_bytes is None or self.num_bytes <= keep_bytes):
                continue
            with (
                self._cleaning.noting(f"could not read {file.folder or '.'!r}"),
                open_folder(self._dir_fd, file.folder or ".") as fd,
            ):
                path = os.path.join(file.folder, file.name)
                if fd >= 0 and self._cleaning.remove_acknowledged(
                    path, partial(self._remove, fd, file.name)
                ):
                    self.num_bytes -= file.size

    def _look(self, dir_fd: int, folder: str) -> None:
        with os.scandir(dir_fd) as entries:
            names = {entry.name for entry in entries if not entry.name.startswith(".")}
        for name in names:
            if name.endswith(_LARGE):
                self._look_at(dir_fd, folder, name, name + ACKNOWLEDGED_SUFFIX in names)
            elif (
                name.endswith(ACKNOWLEDGED_SUFFIX)
                and name.removesuffix(ACKNOWLEDGED_SUFFIX) not in names
                and not self._dry_run
            ):
                with self._cleaning.noting(f"could not remove {os.path.join(folder, name)!r}"):
                    _remove_rest(dir_fd, name.removesuffix(ACKNOWLEDGED_SUFFIX))

    def _look_at(self, dir_fd: int, folder: str, name: str, has_marker: bool) -> None:
        with (
            self._cleaning.noting(f"could not examine {os.path.join(folder, name)!r}"),
            suppress(FileNotFoundError),
        ):
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            self.num_bytes += status.st_size
            if has_marker and (time := _acknowledged_at(dir_fd, name)) is not None:
                self._files.append(_File(time, folder, name, status.st_size))

    def _remove(self, dir_fd: int, name: str) -> bool:
        """Remove a file if it is still acknowledged and not in use. Raises OSError."""
        if name.endswith(TAR):
            return self._remove_shard(dir_fd, name)
        lock = name + LOCK_SUFFIX
        end: Callable[[], None] = _nothing
        if (held := HeldLock.adopt(dir_fd, lock)) is not None:
            end = held.release
        elif os.access(
            lock, os.F_OK, dir_fd=dir_fd, follow_symlinks=False
        ):  # held by a reader or a server
            return False
        elif not self._dry_run:  # a consumer has removed the lock
            with suppress(FileExistsError):
                held = HeldLock.create(dir_fd, lock, 0o600)
            if held is None:
                return False
            end = held.remove
        try:
            # Look again: no request of this name can begin now, but one may have been published.
            if _acknowledged_at(dir_fd, name) is None:
                return False
            if held is not None and not self._dry_run:
                _unlink(dir_fd, name)
                _remove_rest(dir_fd, name)
                end = held.remove
            return True
        finally:
            end()

    def _remove_shard(self, dir_fd: int, name: str) -> bool:
        parts = parse_shard_name(name)
        if parts is None or not os.access(
            parts[0] + MANIFEST, os.F_OK, dir_fd=dir_fd, follow_symlinks=False
        ):
            return False  # a server may be writing it, or this package did not write it
        if _acknowledged_at(dir_fd, name) is None:
            return False
        if not self._dry_run:
            _unlink(dir_fd, parts[0] + INDEX)  # first: readers find no member without bytes
            _unlink(dir_fd, name)
            _remove_rest(dir_fd, name)
        return True


def _nothing() -> None:
    pass


def _remove_rest(dir_fd: int, name: str) -> None:
    """Remove the marker of a file that is gone. An interrupted removal is completed."""
    if (parts := parse_shard_name(name)) is not None:
        _unlink(dir_fd, parts[0] + MANIFEST)
    _unlink(dir_fd, name + ACKNOWLEDGED_SUFFIX)


def _acknowledged_at(dir_fd: int, name: str) -> float | None:
    """Return when a file was acknowledged, or None if it was not. Raises OSError."""
    try:
        fd = open_regular(name + ACKNOWLEDGED_SUFFIX, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
    except (FileNotFoundError, NotAFileError):
        return None
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        return os.fstat(fd).st_mtime if acknowledges(os.pread(fd, _MOST, 0), status) else None
    except OSError as error:
        if error.errno in LEADS_NOWHERE:  # the file was removed
            return None
        raise
    finally:
        os.close(fd)


def _unlink(dir_fd: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)
