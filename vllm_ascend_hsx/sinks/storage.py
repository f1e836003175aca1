"""An open directory in which files are made, renamed and removed by their names; no symbolic link is ever followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.files import open_regular
from vllm_ascend_hsx.sinks.directory import open_directory

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 8  # to enter a directory; each is lost only to somebody who removed it between two of our calls


class Storage:
    """A directory, by its descriptor: whatever happens to its path, nothing outside of it is touched.

    Args:
        fd: the directory; closed with this object.
        file_mode: permissions of the files that are created in it, whatever the umask.
    """

    def __init__(self, fd: int, file_mode: int) -> None:
        self.fd = fd
        self.file_mode = file_mode

    @classmethod
    def at(cls, path: Path, file_mode: int) -> Storage:
        """The directory of that path; created if it does not exist.

        Raises:
            UserError: it is not a directory, or cannot be created or opened.
        """
        return cls(open_directory(path), file_mode)

    def enter(self, names: Sequence[str], *, durable: bool = False) -> Storage:
        """The directory that `names` lead to from here; this one if there are none, otherwise one that the caller closes.

        Each is made if it does not exist, with the permissions of the directory that it is in: who may take files from that one may
        take them from this. A symbolic link is no directory.

        Args:
            names: one path component each.
            durable: sync the folders, so that their names survive a power failure, also where another
                process made them.

        Raises:
            OSError: one of them is not a directory, or cannot be made or opened.
        """
        inside = self
        try:
            for name in names:
                above, inside = inside, inside._enter(name, durable)
                if above is not self:
                    above.close()
        except BaseException:
            if inside is not self:
                inside.close()
            raise
        return inside

    def _enter(self, name: str, durable: bool) -> Storage:
        made = False
        for _ in range(_ATTEMPTS):
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=self.fd)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self.fd)
                    made = True
                continue
            try:
                if made:
                    os.fchmod(fd, stat.S_IMODE(os.fstat(self.fd).st_mode) | 0o700)
                if durable:
                    os.fsync(self.fd)
            except BaseException:
                os.close(fd)
                raise
            return Storage(fd, self.file_mode)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def create(self, name: str, gid: int = -1) -> int:
        """A descriptor of a new file, for reading and writing.

        Args:
            name: the file's.
            gid: its group; -1: the one that files made here have.

        Raises:
            OSError: it cannot be created, or something of that name exists.
        """
        fd = os.open(name, _CREATE, self.file_mode, dir_fd=self.fd)
        try:
            if gid >= 0:
                os.fchown(fd, -1, gid)
            os.fchmod(fd, self.file_mode)
        except BaseException:
            os.close(fd)
            self.unlink(name)
            raise
        return fd

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file that is there. Raises OSError: it cannot be opened, or is no regular file (EINVAL)."""
        return open_regular(name, flags | os.O_NOFOLLOW, dir_fd=self.fd)

    def open_direct(self, name: str, fd: int) -> int:
        """A second descriptor of the file `name`, which is open at `fd`; it bypasses the page cache.

        Raises:
            OSError: the filesystem has no O_DIRECT, or somebody has put another file in its place (ESTALE).
        """
        direct_fd = os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            if not os.path.samestat(os.fstat(fd), os.fstat(direct_fd)):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        except BaseException:
            os.close(direct_fd)
            raise
        return direct_fd

    def move(self, name: str, target: Storage, new_name: str) -> None:
        """Rename a file into another directory, over what has the name there. Raises OSError."""
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=target.fd)

    def group_in(self, folder: Storage) -> int:
        """The group to give a file made here so that it looks as if made in `folder`; -1: it does."""
        here, there = os.fstat(self.fd), os.fstat(folder.fd)
        wanted = there.st_gid if there.st_mode & stat.S_ISGID else os.getegid()
        inherited = here.st_gid if here.st_mode & stat.S_ISGID else os.getegid()
        return -1 if wanted == inherited else wanted

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

    def leads_to(self, folder: str, other: Storage) -> bool:
        """True if the folder of that name below this directory is `other`. Raises OSError: something else is, or it cannot be opened."""
        fd = open_folder(self.fd, folder)
        if fd < 0:
            return False
        try:
            return os.path.samestat(os.fstat(fd), os.fstat(other.fd))
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Have the names, as they are now, survive a loss of power."""
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def open_folder(dir_fd: int, folder: str) -> int:
    """A descriptor of a folder below the directory; -1 if it is not there. Raises OSError: something else is, or it cannot be opened."""
    fd = os.dup(dir_fd)
    try:
        for name in folder.split("/"):
            above, fd = fd, os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(above)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, FileNotFoundError):
            return -1
        raise
    return fd
