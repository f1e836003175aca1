"""The directory that files are published in: checked with one clear error at start-up, then open as a descriptor."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.sinks.system import is_in_memory, reserve
from vllm_ascend_hsx.sinks.workspace import Workspace

OPTION = "shared_storage_path"
LOCK_OPTION = "use_synchronization_lock"
IO_OPTION = "io"
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
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
        workspace = make_workspace(path, dir_fd, use_lock, 0o600)
        try:
            return check_workspace(path, workspace, direct, memory)
        finally:
            workspace.remove()
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


def make_workspace(path: Path, dir_fd: int, use_lock: bool, lock_mode: int) -> Workspace:
    """Make the hidden directory of a server in the directory at `path`; see Workspace.make.

    Raises:
        UserError: it cannot be made, or not be locked.
    """
    try:
        return Workspace.make(dir_fd, use_lock, lock_mode)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            raise UserError(
                OPTION,
                os.fspath(path),
                f"is on a filesystem without flock: {error.strerror}",
                f"Mount it with flock, name another directory, or set {LOCK_OPTION} to false and let readers wait for the file to appear.",
            ) from error
        raise UserError(
            OPTION,
            os.fspath(path),
            f"cannot be written: {error.strerror}",
            f"Make it writable for the user that runs the server (uid {os.geteuid()}), or name another one.",
        ) from error


def check_workspace(
    path: Path, workspace: Workspace, direct: bool, memory: memoryview | None
) -> Filesystem:
    """Try in a new workspace what a request will need: create, write, rename, remove.

    Arguments, result and errors are check_directory's.
    """
    fd = -1
    name = "probe"
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=workspace.fd)
        alignment = _alignment_of_direct_writes(path, workspace.fd, name, fd, memory) if direct else 1
        filesystem = Filesystem(alignment, not is_in_memory(fd))
        os.pwrite(fd, b"x", 0)
        os.rename(name, "renamed", src_dir_fd=workspace.fd, dst_dir_fd=workspace.fd)
        os.unlink("renamed", dir_fd=workspace.fd)
        return filesystem
    except OSError as error:
        raise UserError(
            OPTION,
            os.fspath(path),
            f"cannot hold a file: {error.strerror}", "Free space or raise the quota there, or name another one."
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)


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
