"""The hidden file of one request: rows at their final offsets, then tail and header."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm_ascend_hsx.protocol.checksum import Checksums, Digest, digest_of_beginning
from vllm_ascend_hsx.protocol.files import OnError, write_at
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.rows import Rows, TokenIds
from vllm_ascend_hsx.protocol.weights import Origin
from vllm_ascend_hsx.sinks.encoder import Scales
from vllm_ascend_hsx.sinks.storage import Storage, copy_into, reserve, start_writeback

WRITEBACK = 1 << 20  # least bytes of a write for which immediate writeback pays off


@dataclass(frozen=True)
class FileOptions:
    """How files are written.

    Attributes:
        mode: permissions of data and error files, regardless of the umask. Users who can read a
            file can also lock it.
        use_lock: hold `<path>.lock` until the file has ended. Otherwise readers wait for the file.
        durability: with "fdatasync", content and name of a visible file survive a power failure.
        io: with "direct" rows bypass the page cache.
        checksum: CRC-32C of the file, or none.
    """

    mode: int = 0o640
    use_lock: bool = True
    durability: Literal["none", "fdatasync"] = "none"
    io: Literal["buffered", "direct"] = "buffered"
    checksum: Literal["crc32c", "none"] = "crc32c"

    @property
    def durable(self) -> bool:
        return self.durability == "fdatasync"


@dataclass(frozen=True)
class Filesystem:
    """Properties of the filesystem.

    Attributes:
        alignment: unit in bytes of offsets, lengths and addresses of direct I/O; 1 without direct
            I/O.
        reserves: whether to reserve the space of a file before the first write.
    """

    alignment: int = 1
    reserves: bool = True


class Spare(NamedTuple):
    """A hidden file of `size` bytes, open for buffered I/O, for a request to overwrite."""

    name: str
    size: int
    fd: int


class RowSource:
    """The rows of a published request, kept open for requests that begin with the same tokens.

    The file may be renamed or removed meanwhile. The last `release` then frees the space.
    Thread-safe.

    Args:
        fd: a descriptor of the file, closed by the last `release`.
        offset: file offset of the first row.
        scales: float32 [tokens] of quantised rows, else None. They are few bytes, and a file may be
            changed.
        sums: checksums of prefixes of the rows, and of all rows; see digest_of_beginning.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        scales: Scales | None = None,
        sums: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.scales = scales
        self._fd = fd
        self._offset = offset
        self._sums = sums
        self._mutex = threading.Lock()  # guards _users
        self._users = 1

    def retain(self) -> None:
        """Keep the file open until one more `release`."""
        with self._mutex:
            assert self._users, "the source was released"
            self._users += 1

    def release(self) -> None:
        """Close the file if nobody else uses it."""
        with self._mutex:
            self._users -= 1
            if not self._users:
                with suppress(OSError):  # of writes: DataFile.close reports them
                    os.close(self._fd)

    @property
    def space(self) -> tuple[tuple[int, int], int]:
        """(device, inode), and the bytes of storage if only descriptors hold the file, else 0."""
        status = os.fstat(self._fd)
        return (status.st_dev, status.st_ino), 0 if status.st_nlink else status.st_blocks * 512

    @property
    def free_space(self) -> int:
        """Free bytes of the filesystem."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def copy_to(self, fd: int, offset: int, num_bytes: int) -> None:
        """Copy the first bytes of the rows into another file. Raises OSError."""
        copy_into(self._fd, num_bytes, fd, offset, self._offset)

    def digest(self, num_bytes: int) -> Digest:
        """Read the first bytes of the rows, and return their digest.

        Raises OSError, also if the rows were changed after publication.
        """
        return digest_of_beginning(self._fd, self._offset, num_bytes, self._sums)


class DataFile:
    """A file under a hidden name, until it is published or withdrawn.

    Several threads may call `write` for different rows, except for the first write. The other
    methods belong to one thread.

    Args:
        workspace, hidden: hidden directory and name of the file, or a spare file to overwrite.
        gid: group of the file, or -1; see Storage.create.
        layout: offsets of rows, tail and header.
        options: how to write.
        expected_tokens: rows to reserve space for. The file may get more or fewer.
        filesystem: the filesystem of the directories.

    Attributes:
        fd: descriptor for reading and writing, or -1 if closed.
        size, checksum: size and checksum of the complete file; "" without a checksum.

    Raises:
        OSError: if the file cannot be created, or not for direct I/O.
    """

    def __init__(
        self,
        workspace: Storage,
        hidden: str | Spare,
        gid: int,
        layout: FileLayout,
        options: FileOptions,
        expected_tokens: int,
        filesystem: Filesystem,
    ) -> None:
        self.size = 0
        self.checksum = ""
        self._layout = layout
        self._options = options
        self._filesystem = filesystem
        self._expected_size = layout.file_size(expected_tokens) if expected_tokens else 0
        self._reserved = False
        self._checksum = Checksums(layout.data_start) if options.checksum == "crc32c" else None
        self._direct_fd = -1
        self._scales: Scales | None = None
        self._place: tuple[Storage, str] | None  # directory and hidden name; None if it has left
        if isinstance(hidden, Spare):
            self._place = workspace, hidden.name
            self.fd = hidden.fd  # `complete` truncates it
            return
        self._place = workspace, hidden
        self.fd = workspace.create(hidden, gid)
        if options.io == "direct":
            with OnError(workspace.unlink, hidden), OnError(self.close):
                self._direct_fd = workspace.open_direct(hidden, self.fd)

    def write(self, first: int, data: memoryview) -> None:
        """Write rows from token position `first` on. `data` are the bytes to store.

        The first write reserves space for all expected rows. Raises OSError.
        """
        offset = self._layout.row_offset(first)
        self._reserve()
        is_direct = self._direct_fd >= 0 and is_aligned(data, offset, self._filesystem)
        fd = self._direct_fd if is_direct else self.fd
        if self._checksum is None:
            write_at(fd, data, offset)
        else:
            self._checksum.begin_write(offset, data.nbytes)
            digest = Digest()
            digest.update(data)
            write_at(fd, data, offset)
            self._checksum.end_write(offset, digest)
        if self._options.durable and self._direct_fd < 0 and data.nbytes >= WRITEBACK:
            start_writeback(self.fd, offset, data.nbytes)

    def copy(self, source: RowSource, num_rows: int) -> None:
        """Copy the first rows from another file, in the kernel if possible.

        Then read the rows of that file: the checksum must be that of the computed rows. Raises
        OSError.
        """
        begin, end = self._layout.data_start, self._layout.row_offset(num_rows)
        self._reserve()
        if self._checksum is not None:
            self._checksum.begin_write(begin, end - begin)
        source.copy_to(self.fd, begin, end - begin)
        if self._checksum is not None:
            self._checksum.end_write(begin, source.digest(end - begin))

    def source(self, fd: int = -1, offset: int = 0) -> RowSource:
        """Keep the rows of this complete file open for other requests. Raises OSError.

        Args:
            fd, offset: another file with the same bytes, and the offset of the bytes there.
        """
        sums = () if self._checksum is None else self._checksum.sums
        return RowSource(
            os.dup(self.fd if fd < 0 else fd), offset + self._layout.data_start, self._scales, sums
        )

    def complete(
        self, token_ids: TokenIds, num_prompt_tokens: int, scales: Scales | None, origin: Origin
    ) -> None:
        """Write tail and header, truncate the file at the end, and sync it if it must be durable.

        No write may be in flight.

        Args:
            token_ids: int64 [tokens]; all their rows have been written.
            num_prompt_tokens: number of prompt tokens among them.
            scales: float32 [tokens] of quantised rows, else None.
            origin: as in SinkFile.

        Raises:
            OSError: if this fails, or the system reports the failure of an earlier write.
        """
        tokens = len(token_ids)
        self._scales = scales
        tail = memoryview(self._layout.tail(token_ids, scales))
        end = self._layout.row_offset(tokens)
        header = self._layout.header(tokens, num_prompt_tokens, self._checksum is not None, origin)
        if self._checksum is not None:
            header, self.checksum = self._checksum.finish(self.fd, end, tail).stamp(header)
        write_at(self.fd, tail, end)
        write_at(self.fd, memoryview(header), 0)
        self.size = self._layout.file_size(tokens)
        if os.fstat(self.fd).st_size > self.size:
            os.ftruncate(self.fd, self.size)
        if self._options.durable:
            os.fdatasync(self.fd)

    def publish(self, storage: Storage, name: str) -> None:
        """Publish the complete file as `name`, durably if required.

        The caller holds the lock of the name. Raises FileExistsError if the name exists, and
        OSError. The file is then not visible.
        """
        self.close()  # a network filesystem may report a failed write only now
        assert self._place is not None
        workspace, hidden = self._place
        workspace.publish(hidden, storage, name)
        self._place = None
        if self._options.durable:
            with OnError(storage.unlink, name):  # a file that may not survive must not be visible
                storage.sync()

    def detach(self) -> Spare:
        """Return the hidden file and the descriptor. `withdraw` and `close` then do nothing."""
        assert self._place is not None
        spare = Spare(self._place[1], self.size, self.fd)
        self._place, self.fd = None, -1
        return spare

    def withdraw(self) -> None:
        """Remove the file. Writes may be in flight. Raises OSError."""
        if self._place is not None:
            storage, name = self._place
            storage.unlink(name)
            self._place = None

    def close(self) -> None:
        """Close the file if it is open.

        Raises OSError if the system reports the failure of an earlier write.
        """
        fds, self.fd, self._direct_fd = (self._direct_fd, self.fd), -1, -1
        try:
            if fds[0] >= 0:
                os.close(fds[0])
        finally:
            if fds[1] >= 0:
                os.close(fds[1])

    def _reserve(self) -> None:
        if self._reserved:
            return
        self._reserved = True
        if self._expected_size and self._filesystem.reserves:
            reserve(self.fd, self._expected_size)
            if self._direct_fd >= 0:
                # ext4 writes rows after a reserved, unwritten page at half the speed: 4 MiB in
                # 4 ms instead of 2.
                write_at(self._direct_fd, memoryview(mmap.mmap(-1, self._layout.data_start)), 0)


def is_aligned(data: memoryview, offset: int, filesystem: Filesystem) -> bool:
    """Return whether direct I/O can write the bytes at this offset. Rows in the ring qualify."""
    if data.readonly or not data:  # ctypes has no address for either
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return not (offset | data.nbytes | address) % filesystem.alignment


def rows_as_bytes(first: int, rows: Rows, row_bytes: int) -> tuple[memoryview, int]:
    """Return the bytes of rows to write, and the number of rows.

    Raises ValueError like SinkFile.write.
    """
    data = as_bytes(rows)
    count, rest = divmod(data.nbytes, row_bytes)
    if rest or first < 0:
        problem = f"{data.nbytes} bytes at position {first} are not rows of {row_bytes} bytes"
        raise ValueError(problem)
    return data, count


def as_bytes(rows: Rows) -> memoryview:
    """Return the bytes of an array or buffer, not copied. Raises ValueError if not contiguous."""
    data = rows if isinstance(rows, memoryview) else rows.data
    if not data.c_contiguous:
        raise ValueError("the rows are not C-contiguous")
    return data.cast("B") if data.nbytes else memoryview(b"")
