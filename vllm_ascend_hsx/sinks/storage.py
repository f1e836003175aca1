"""An open directory in which files are made, renamed and removed by their names; no symbolic link is ever followed."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.sinks.directory import open_directory

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Storage:
    """A directory, by its descriptor: whatever happens to its path, nothing outside of it is touched.

    Args:
        path: the directory; created if it does not exist.
        file_mode: permissions of the files that are created in it, whatever the umask.

    Raises:
        StorageDirectoryError: it is not a directory, or cannot be created or opened.
    """

    def __init__(self, path: Path, file_mode: int) -> None:
        self.fd = open_directory(path)
        self.file_mode = file_mode

    def create(self, name: str) -> int:
        """A descriptor of a new file, for reading and writing.

        Raises:
            OSError: it cannot be created, or something of that name exists.
        """
        fd = os.open(name, _CREATE, self.file_mode, dir_fd=self.fd)
        try:
            os.fchmod(fd, self.file_mode)
        except BaseException:
            os.close(fd)
            self.unlink(name)
            raise
        return fd

    def open_direct(self, name: str) -> int:
        """A second descriptor of a file, which bypasses the page cache. Raises OSError: the filesystem has no O_DIRECT."""
        return os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def has_file(self, name: str) -> bool:
        """Whether something is called so. Raises IsADirectoryError: a directory is."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        return True

    def sync(self) -> None:
        """Have the names, as they are now, survive a loss of power."""
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
