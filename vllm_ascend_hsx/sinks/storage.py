"""Access directories and files by descriptor, without following symbolic links."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from vllm_ascend_hsx.protocol.files import OnError, describe, link, open_name, write_at

logger = logging.getLogger(__name__)

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECT = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SPARES = 2
_ATTEMPTS = 8  # to enter a directory that another process may remove meanwhile

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_IN_MEMORY = (0x01021994, 0x858458F6)  # TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
# Errors of copy_file_range after which read and write may work.
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
_BLOCK = 4 << 20
_PAGE = 4096
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start writing dirty pages, wait for none


class Storage:
    """An open directory. Operations stay inside even if the path is moved or replaced.

    Args:
        fd: the directory; closed with this object.
        file_mode: permissions of created files, regardless of the umask.
    """

    def __init__(self, fd: int, file_mode: int) -> None:
        self.fd = fd
        self.file_mode = file_mode
        self._group: int | None = None  # of new files here, computed on first use

    def enter(self, names: Sequence[str], *, durable: bool = False) -> Storage:
        """Open the folder at the path `names`, and create missing folders.

        A new folder gets the permissions of the parent folder, so the same users may remove files.

        Args:
            names: path components.
            durable: sync the folders. Then all names in the path survive a power failure, even if
                another process created the folders.

        Returns:
            This object if `names` is empty, otherwise a new object that the caller closes.

        Raises OSError.
        """
        if not names:
            return self
        inside = self._enter(names[0], durable)
        if not names[1:]:
            return inside
        with OnError(inside.close):
            innermost = inside.enter(names[1:], durable=durable)
        with OnError(innermost.close):
            inside.close()
        return innermost

    def _enter(self, name: str, durable: bool) -> Storage:
        made = False
        for _ in range(_ATTEMPTS):
            try:
                fd = open_name(name, DIRECTORY, dir_fd=self.fd)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self.fd)
                    made = True
                continue
            with OnError(os.close, fd):
                if made:
                    os.fchmod(fd, stat.S_IMODE(os.fstat(self.fd).st_mode) | 0o700)
                if durable:
                    os.fsync(self.fd)
            return Storage(fd, self.file_mode)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def create(self, name: str, gid: int = -1) -> int:
        """Create a file, and return a descriptor for reading and writing. Raises OSError.

        `gid` is the group of the file; -1 keeps the default group of this directory.
        """
        fd = open_name(name, _CREATE, self.file_mode, dir_fd=self.fd)
        with OnError(self.unlink, name), OnError(os.close, fd):
            if gid >= 0:
                os.fchown(fd, -1, gid)
            os.fchmod(fd, self.file_mode)
        return fd

    @contextmanager
    def new_file(self, hidden: str, gid: int, target: Storage, name: str) -> Iterator[int]:
        """Create a hidden file here, yield a descriptor for writing, and move the file to `target`.

        Removes the file if a step fails. Raises OSError.
        """
        fd = self.create(hidden, gid)
        with OnError(self.unlink, hidden):
            try:
                yield fd
            finally:
                os.close(fd)
            self.move(hidden, target, name)

    def open_direct(self, name: str, fd: int) -> int:
        """Open the file `name` a second time, with O_DIRECT. It is already open at `fd`.

        Raises OSError if the filesystem has no O_DIRECT, or `name` is now another file (ESTALE).
        """
        direct_fd = open_name(name, _DIRECT, dir_fd=self.fd)
        with OnError(os.close, direct_fd):
            if not os.path.sameopenfile(fd, direct_fd):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        return direct_fd

    def move(self, name: str, target: Storage, new_name: str) -> None:
        """Rename a file into another directory, replacing an existing file there.

        Raises OSError.
        """
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=target.fd)

    def publish(self, name: str, target: Storage, new_name: str) -> None:
        """Move a file to an unused name in another directory.

        Without hard links this checks the name before the move, so the caller must hold the lock of
        the name. Raises FileExistsError if the name exists, and OSError.
        """
        if link(self.fd, name, target.fd, new_name):
            try:
                os.unlink(name, dir_fd=self.fd)
            except OSError as error:  # the file is published; the hidden directory is removed later
                logger.warning(
                    "%s: %s", new_name, describe("its hidden name could not be removed", error)
                )
        elif target.has_name(new_name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_name)
        else:
            self.move(name, target, new_name)

    def group_in(self, folder: os.stat_result) -> int:
        """Return the group of new files in another folder, or -1 if new files here get the same.

        `folder` is the status of that folder. The group of new files here is computed once: this
        directory belongs to the server, and the group does not change.
        """
        wanted = _group_of_files(folder)
        self._group = _group_of_files(os.fstat(self.fd)) if self._group is None else self._group
        return -1 if wanted == self._group else wanted

    def unlink(self, name: str) -> None:
        """Remove a file if it exists. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def has_name(self, name: str) -> bool:
        """Return whether the name exists. Raises OSError."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def sync(self) -> None:
        """Make the names in this directory survive a power failure. Raises OSError."""
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class SpareDescriptors:
    """Two reserved descriptors, for the reason of a failure in a process without free descriptors.

    One is for a folder, one for the reason. Thread-safe.

    Args:
        fd: any descriptor that stays open.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._spares: deque[int] = deque()
        self.refill()

    def give_up(self) -> None:
        """Close the descriptors. Raises OSError."""
        with suppress(IndexError):  # another thread was faster
            while self._spares:
                os.close(self._spares.pop())

    def refill(self) -> None:
        """Open the missing descriptors. Raises OSError; fewer than two are then open."""
        while len(self._spares) < _SPARES:
            self._spares.append(os.dup(self._fd))


def _group_of_files(status: os.stat_result) -> int:
    return status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()


@contextmanager
def open_folder(dir_fd: int, folder: str) -> Iterator[int]:
    """Yield a descriptor of a folder below a directory, or -1 if the folder does not exist.

    Raises OSError if `folder` is not a folder, or cannot be opened.
    """
    name, _, below = folder.partition("/")
    try:
        fd = open_name(name, DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        yield -1
        return
    try:
        if below:
            with open_folder(fd, below) as inside:
                yield inside
        else:
            yield fd
    finally:
        os.close(fd)


# System calls that Python's os module lacks


def reserve(fd: int, num_bytes: int) -> None:
    """Set the size of a file, and reserve space if the filesystem supports it. Raises OSError.

    `os.posix_fallocate` would write zeros on other filesystems, and every row would be written
    twice.
    """
    while _libc.fallocate(fd, 0, 0, num_bytes):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(fd, num_bytes)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def copy_into(source: int, size: int, target: int, offset: int, begin: int = 0) -> None:
    """Copy `size` bytes from offset `begin` of one file to `offset` of another.

    Uses the kernel's copy or a reflink if possible. Raises OSError.
    """
    position = 0
    while position < size:
        rest = size - position
        if rest > _PAGE:  # whole pages can be a reflink
            rest -= rest % _PAGE
        try:
            copied = os.copy_file_range(source, target, rest, begin + position, offset + position)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            copied = 0
        if copied == 0:
            block = os.pread(source, min(_BLOCK, size - position), begin + position)
            if not block:
                raise OSError(
                    errno.EUCLEAN,
                    f"the file was truncated: it ends at byte {begin + position}, before its last row",
                )
            copied = len(block)
            write_at(target, memoryview(block), offset + position)
        position += copied


def is_in_memory(fd: int) -> bool:
    """Return whether a file or directory is on tmpfs or ramfs.

    Reserving space there gains nothing: it allocates the same pages as a write.
    """
    status = (ctypes.c_long * 32)()  # struct statfs has 120 bytes and begins with f_type
    if _libc.fstatfs(fd, status):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return status[0] in _IN_MEMORY


def start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Start writing a part of a file to disk, to shorten a later fdatasync.

    Ignores errors, because the fdatasync reports them.
    """
    _libc.sync_file_range(fd, offset, num_bytes, _WRITE)
