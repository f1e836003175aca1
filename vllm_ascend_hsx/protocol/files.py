"""Open, read and write regular files without blocking, undo on errors, describe system errors."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST = 16 << 20  # bytes; small files have a few hundred
_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFLNK: "a symbolic link",
}  # fmt: skip
# Errors of link(2) on a filesystem without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
# Errors of a symbolic link that leads nowhere.
LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class NotAFileError(OSError):
    """The path is not a regular file. `reason` is one sentence with the kind of the file."""

    def __init__(self, path: str | os.PathLike[str], mode: int, kind: str = "") -> None:
        problem = (
            f"is {kind or _KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file"
        )
        super().__init__(errno.EINVAL, f"it {problem}", os.fspath(path))
        self.reason = f"{os.path.basename(path)} {problem}"


class OnError:
    """Call `undo` if the block raises anything, an interrupt included. The exception propagates.

    An ExitStack does the same, for a microsecond more in code that runs several times per file.
    """

    def __init__(self, undo: Callable[..., object], *arguments: object) -> None:
        self._undo = undo
        self._arguments = arguments

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._undo(*self._arguments)


class Naming:
    """Add the file's name to a system error of the block that has none (of a call by descriptor).

    A generator with `contextmanager` does the same, for a microsecond more per file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = os.fspath(self._path)


def again_if_stale(call: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Call a function of a path. Repeat it if the file was replaced on another machine (ESTALE).

    The second call looks up the name anew.
    """
    try:
        return call(*arguments, **options)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return call(*arguments, **options)


def open_name(
    path: str | os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    """Open like os.open, with `again_if_stale`."""
    return again_if_stale(os.open, path, flags, mode, dir_fd=dir_fd)


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
) -> int:
    """Return a descriptor of a regular file.

    Opening anything else could block forever (a FIFO) or have side effects (a device).

    Args:
        path: the file. Symbolic links are followed unless `flags` has O_NOFOLLOW.
        flags: as for os.open.
        mode: permissions of a file that is created, with O_CREAT.
        dir_fd: directory of a relative path.

    Raises:
        NotAFileError: if `path` is not a regular file, or is a link that cannot lead to a file: to
            itself, or below a file.
        FileNotFoundError: if the file does not exist, or the name is too long to exist.
        BlockingIOError: if another process holds a lease on the file (F_SETLEASE).
    """
    try:
        follows = not flags & os.O_NOFOLLOW
        _require_regular(
            path, again_if_stale(os.stat, path, dir_fd=dir_fd, follow_symlinks=follows)
        )
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(path, dir_fd):
            raise NotAFileError(path, stat.S_IFLNK, "a broken symbolic link") from error
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, error.strerror, os.fspath(path)) from error
    # Non-blocking all the same: another process may replace the file between the two calls.
    fd = open_name(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    with OnError(os.close, fd), Naming(path):
        _require_regular(path, os.fstat(fd))
    return fd


@contextmanager
def opened(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
) -> Iterator[int]:
    """Yield a descriptor from `open_regular`. Errors of the block name the file."""
    fd = open_regular(path, flags, mode, dir_fd=dir_fd)
    try:
        with Naming(path):
            yield fd
    finally:
        os.close(fd)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a small regular file, up to 16 MiB. Raises like `open_regular`."""
    with opened(path) as fd:
        return os.pread(fd, _MOST, 0)


def _is_link(path: str | os.PathLike[str], dir_fd: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except OSError:  # the path to the link leads nowhere
        return False


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(path, status.st_mode)


def read_all(fd: int) -> bytes:
    """Return the content of a file. Raises OSError."""
    return read_bytes(fd, os.fstat(fd).st_size, 0)


def read_bytes(fd: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at `offset`, fewer only at the end. One pread may return fewer."""
    blocks = []
    end = offset + size
    while offset < end and (block := os.pread(fd, min(end - offset, 1 << 30), offset)):
        blocks.append(block)
        offset += len(block)
    return b"".join(blocks)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. One pwrite may write less (never more than 2 GiB)."""
    while data:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data = data[written:]
        offset += written


def link(source_fd: int, source: str, dir_fd: int, name: str) -> bool:
    """Create a hard link to a file. Return False if the filesystem has no hard links.

    Raises FileExistsError if the name exists, and OSError.

    Args:
        source_fd, source: directory and name of the file.
        dir_fd, name: directory and new name.
    """
    try:
        os.link(source, name, src_dir_fd=source_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory survive a power failure. Raises OSError."""
    fd = open_name(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def describe(what: str, error: OSError) -> str:
    """Append the system's reason and the name of the errno to `what`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{what}: {error.strerror or error}" + (f" ({name})" if name else "")
