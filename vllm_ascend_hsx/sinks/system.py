"""System calls of Linux that Python's os module lacks."""

from __future__ import annotations

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_IN_MEMORY = (0x01021994, 0x858458F6)  # TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)  # of copy_file_range, where read and write may do
_BLOCK = 4 << 20
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write dirty pages, wait for none


def reserve(fd: int, num_bytes: int) -> None:
    """Give a file its size, and the space for it where the filesystem can promise it.

    Unlike `os.posix_fallocate` it never writes zeros in place of a promise, which would write every row twice.

    Raises:
        OSError: no space (ENOSPC), over quota (EDQUOT), or the size cannot be set.
    """
    while _libc.fallocate(fd, 0, 0, num_bytes):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(fd, num_bytes)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def copy_into(source: int, size: int, target: int, offset: int) -> None:
    """Copy the first `size` bytes of a file to `offset` in another, in the kernel or as a reflink where that is possible.

    Neither descriptor's position matters.

    Raises:
        OSError: it could not be read or written.
    """
    position = 0
    while position < size:
        try:
            copied = os.copy_file_range(source, target, size - position, position, offset + position)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            copied = 0
        if copied == 0:
            copied = _copy_block(source, target, position, offset + position)
        position += copied


def _copy_block(source: int, target: int, position: int, offset: int) -> int:
    block = os.pread(source, _BLOCK, position)
    written = os.pwrite(target, block, offset)
    if written == 0:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return written


def is_in_memory(fd: int) -> bool:
    """Whether a file is on tmpfs or ramfs, whose space is not worth reserving: it is made of the same pages that a write makes."""
    status = (ctypes.c_long * 32)()  # struct statfs: f_type comes first, and it is 120 bytes long
    if _libc.fstatfs(fd, status):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return status[0] in _IN_MEMORY


def start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Have the system begin to write a part of a file, so that a later fdatasync has less to wait for.

    Says nothing about success: that is what the fdatasync is for.
    """
    _libc.sync_file_range(fd, offset, num_bytes, _WRITE)
