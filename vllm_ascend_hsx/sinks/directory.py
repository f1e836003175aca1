"""The directory that files are published in: checked with one clear error at start-up, then open as a descriptor."""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.lock import hold_new
from vllm_ascend_hsx.protocol.names import mark_name, partial_name
from vllm_ascend_hsx.sinks.system import is_in_memory, reserve

OPTION = "shared_storage_path"
LOCK_OPTION = "use_synchronization_lock"
IO_OPTION = "io"
_ATTEMPTS = 8  # to hold a new file; each is lost only to somebody who saw it before it was held
_SECTORS = (512, 1024, 2048, PAGE)  # what a filesystem may want direct I/O to be aligned to


@dataclass(frozen=True)
class Filesystem:
    """What the sink has to know of the filesystem that the directory is on.

    Attributes:
        alignment: what offsets, lengths and addresses of direct I/O must be multiples of, in bytes; 1 if none is wanted.
        reserves: whether space for a whole file is taken before its first rows are written.
    """

    alignment: int = 1
    reserves: bool = True


def check_directory(path: Path, *, use_lock: bool = True, direct: bool = False, memory: memoryview | None = None) -> Filesystem:
    """Create the directory if need be, and try in it everything a request will need: create, lock, write, rename, remove.

    Args:
        path: the directory; a symbolic link to one is followed, for the administrator chose it.
        use_lock: whether files will be locked, so that a filesystem without flock is refused.
        direct: whether rows will bypass the page cache, so that a filesystem without O_DIRECT is refused.
        memory: what direct writes will come from; it begins at a page, and is not changed. A device's driver may map its pinned memory in a
            way that the disk cannot fetch it from. Ordinary memory without it, or if it has less than two pages.

    Raises:
        UserError: a file could not be published there.
    """
    dir_fd = open_directory(path)
    try:
        return _try_to_publish(path, dir_fd, use_lock, direct, memory)
    finally:
        os.close(dir_fd)


def open_directory(path: Path) -> int:
    """A descriptor of the directory, which is created if it does not exist.

    Raises:
        UserError: it is not a directory, or cannot be created or opened.
    """
    try:
        os.makedirs(path, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            OPTION, os.fspath(path), f"cannot be a directory: {error.filename} is not one", "Name a directory, or remove what is there."
        ) from error
    except OSError as error:
        raise UserError(
            OPTION,
            os.fspath(path),
            f"cannot be created or opened: {error.strerror}",
            "Create it, writable for the user that runs the server, or name another one.",
        ) from error
    except ValueError as error:
        raise UserError(OPTION, os.fspath(path), f"is not a path: {error}", "Name a directory.") from error


def _try_to_publish(path: Path, dir_fd: int, use_lock: bool, direct: bool, memory: memoryview | None) -> Filesystem:
    name, fd = _make_probe(path, dir_fd, use_lock)
    try:
        try:
            alignment = _alignment_of_direct_writes(path, dir_fd, name, fd, memory) if direct else 1
            filesystem = Filesystem(alignment, not is_in_memory(fd))
            os.pwrite(fd, b"x", 0)
            renamed = _probe_name(use_lock)
            os.rename(name, renamed, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            name = renamed
        except OSError as error:
            remedy = "Free space or raise the quota there, or name another one."
            raise UserError(OPTION, os.fspath(path), f"cannot hold a file: {error.strerror}", remedy) from error
        return filesystem
    finally:
        try:
            os.unlink(name, dir_fd=dir_fd)  # while it is held, or somebody who cleans up is faster
        finally:
            os.close(fd)


def _probe_name(use_lock: bool) -> str:
    """With locks that of a server's mark: it is held, and were we killed now, the next server removes it."""
    token = secrets.token_hex(4)
    return mark_name(token) if use_lock else partial_name("probe", token)


def _make_probe(path: Path, dir_fd: int, use_lock: bool) -> tuple[str, int]:
    for _ in range(_ATTEMPTS):
        name = _probe_name(use_lock)
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
        except OSError as error:
            raise UserError(
                OPTION,
                os.fspath(path),
                f"cannot be written: {error.strerror}",
                f"Make it writable for the user that runs the server (uid {os.geteuid()}), or name another one.",
            ) from error
        try:
            if not use_lock or hold_new(dir_fd, name, fd):
                return name, fd
        except OSError as error:
            os.unlink(name, dir_fd=dir_fd)
            os.close(fd)
            raise UserError(
                OPTION,
                os.fspath(path),
                f"is on a filesystem without flock: {error.strerror}",
                f"Mount it with flock, name another directory, or set {LOCK_OPTION} to false and let readers wait for the file to appear.",
            ) from error
        os.close(fd)
    raise UserError(
        OPTION, os.fspath(path), "cannot be used: new files in it are locked or removed at once", "Find out by whom, or name another one."
    )


def _alignment_of_direct_writes(path: Path, dir_fd: int, name: str, fd: int, memory: memoryview | None) -> int:
    """Found by trying, for what statx says of it is not known on older kernels, and wrong on some network filesystems."""
    remedy = f'Set {IO_OPTION} to "buffered", or name a directory on a local disk.'
    try:
        direct_fd = os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        raise UserError(OPTION, os.fspath(path), f"is on a filesystem without O_DIRECT: {error.strerror}", remedy) from error
    try:
        reserve(fd, 2 * PAGE)
        page = memory if memory is not None and len(memory) >= 2 * PAGE else memoryview(mmap.mmap(-1, 2 * PAGE))
        for alignment in _SECTORS:
            try:
                os.pwrite(direct_fd, page[alignment : 2 * alignment], alignment)
                return alignment
            except OSError as error:
                refused = error
        raise UserError(OPTION, os.fspath(path), f"takes no direct writes: {refused.strerror}", remedy) from refused
    finally:
        os.close(direct_fd)
