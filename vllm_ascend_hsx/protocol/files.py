"""Open, read and write files: only regular ones are opened, without a wait; and describe the system's errors."""

from __future__ import annotations

import errno
import os
import stat

_MOST = 16 << 20  # bytes of a small file; our own have some hundred
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


# Of a symbolic link.
LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class NotAFileError(OSError):
    """Something that is no regular file has the name of one; `reason` says what it is, in one sentence."""

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        problem = f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file"
        super().__init__(errno.EINVAL, f"it {problem}", os.fspath(path))
        self.reason = f"{os.path.basename(path)} {problem}"


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file. To open anything else could wait for ever (a FIFO) or have an effect (a device).

    Args:
        path: of the file; symbolic links are followed unless `flags` has O_NOFOLLOW.
        flags: as for os.open.
        mode: permissions of a file that is created, with O_CREAT.
        dir_fd: directory in which a relative path begins.

    Raises:
        NotAFileError: it is no regular file.
        FileNotFoundError: it is not there, or its name is longer than one can be.
        OSError: it cannot be opened.
    """
    try:
        _require_regular(path, os.stat(path, dir_fd=dir_fd, follow_symlinks=not flags & os.O_NOFOLLOW))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(errno.ENOENT, error.strerror, os.fspath(path)) from error
    # Without a wait all the same: somebody may put something else there between the two calls.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        _require_regular(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a small regular file, up to 16 MiB. Raises OSError: as open_regular, or it cannot be read."""
    fd = open_regular(path)
    try:
        return os.pread(fd, _MOST, 0)
    finally:
        os.close(fd)


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(path, status.st_mode)


def read_all(fd: int) -> bytes:
    """The content of a file. Raises OSError."""
    size = os.fstat(fd).st_size
    blocks = []
    position = 0
    while position < size and (block := os.pread(fd, min(size - position, 1 << 30), position)):
        blocks.append(block)
        position += len(block)
    return b"".join(blocks)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """pwrite all of it; the system may take less at a time than it is given (never more than 2 GiB)."""
    while data:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data = data[written:]
        offset += written


def describe(what: str, error: OSError) -> str:
    """`what`, and the system's reason in words and by name."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{what}: {error.strerror or error}" + (f" ({name})" if name else "")
