"""The hidden file of one request while it grows: rows at their final offsets, then tail and header."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from vllm_ascend_hsx.protocol.checksum import Checksums
from vllm_ascend_hsx.protocol.files import write_at
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.rows import Rows, TokenIds
from vllm_ascend_hsx.sinks.directory import Filesystem
from vllm_ascend_hsx.sinks.encoder import Scales
from vllm_ascend_hsx.sinks.storage import Storage
from vllm_ascend_hsx.sinks.system import reserve, start_writeback

WRITEBACK = 1 << 20  # bytes of a write from which it is worth to begin with the disk's part of it at once


@dataclass(frozen=True)
class FileOptions:
    """How files are written.

    Attributes:
        mode: permissions of data and error files, regardless of the umask. Who may read a file may
            also lock it.
        use_lock: hold `<path>.lock` until a file has ended. Without it readers must wait for the file to appear.
        durability: with "fdatasync" a file that can be seen survives a loss of power, its name included.
        io: with "direct" rows go to the disk without a stay in the page cache.
        checksum: CRC-32C of the file, or none.
    """

    mode: int = 0o640
    use_lock: bool = True
    durability: Literal["none", "fdatasync"] = "none"
    io: Literal["buffered", "direct"] = "buffered"
    checksum: Literal["crc32c", "none"] = "crc32c"


class Spare(NamedTuple):
    """A hidden file of `size` bytes, open for buffered I/O, that can take the rows of another request."""

    name: str
    size: int
    fd: int


class DataFile:
    """A file under its hidden name, until readers know it by its own or it is gone.

    Several threads may call `write`, not for the same rows at the same time; the other methods belong to one thread.

    Args:
        workspace: the server's hidden directory, which it is in until it is published.
        hidden: its name there, or a spare file to write over.
        storage: the directory that it is published in.
        name: its name then.
        gid: its group, or -1; see Storage.create.
        layout: offsets of rows, tail and header.
        options: how to write.
        expected_tokens: rows to reserve space for; there may be more or less in the end.
        filesystem: what it is on.

    Attributes:
        fd: open for reading and writing; -1 when closed.
        size, checksum: of the complete file; the checksum is empty if there is none.

    Raises:
        OSError: the file cannot be created, or not for direct I/O.
    """

    def __init__(
        self,
        workspace: Storage,
        hidden: str | Spare,
        storage: Storage,
        name: str,
        gid: int,
        layout: FileLayout,
        options: FileOptions,
        expected_tokens: int,
        filesystem: Filesystem,
    ) -> None:
        self._storage = storage
        self._name = name
        self._place: tuple[Storage, str]  # its directory and its name there
        self._is_detached = False
        self.size = 0
        self.checksum = ""
        self._layout = layout
        self._options = options
        self._filesystem = filesystem
        self._expected_size = layout.file_size(expected_tokens) if expected_tokens else 0
        self._mutex = threading.Lock()  # guards the next two
        self._reserved = False
        self._end = 0  # of what was written
        self._checksum = Checksums(layout.data_start) if options.checksum == "crc32c" else None
        self._direct_fd = -1
        if isinstance(hidden, Spare):
            self._place = workspace, hidden.name
            self._end, self.fd = hidden.size, hidden.fd  # what is after the rows will be cut off
            return
        self._place = workspace, hidden
        self.fd = workspace.create(hidden, gid)
        try:
            if options.io == "direct":
                self._direct_fd = workspace.open_direct(hidden, self.fd)
        except BaseException:
            self.close()
            workspace.unlink(hidden)
            raise

    def write(self, first: int, data: memoryview) -> None:
        """Put rows at their place; the first ones reserve space for all that are expected.

        Args:
            first: token position of the first row.
            data: their bytes, as they are to be stored.

        Raises:
            OSError: they could not be written, or not all of them; or there is no space for all.
        """
        offset = self._layout.row_offset(first)
        self._make_room(offset + data.nbytes)
        # Before the write, which then finds the rows in the processor's cache.
        checksum = 0 if self._checksum is None else self._checksum.begin_write(offset, data)
        write_at(self._fd_for(data, offset), data, offset)
        if self._checksum is not None:
            self._checksum.end_write(offset, data.nbytes, checksum)
        if self._options.durability == "fdatasync" and self._direct_fd < 0 and data.nbytes >= WRITEBACK:
            start_writeback(self.fd, offset, data.nbytes)

    def complete(self, token_ids: TokenIds, num_prompt_tokens: int, scales: Scales | None) -> None:
        """Write header and token ids, cut off what follows them, and make the file durable if that is asked for.

        No write is in flight.

        Args:
            token_ids: int64 [tokens]; all their rows have been written.
            num_prompt_tokens: how many of them are the prompt's.
            scales: float32 [tokens] of quantised rows, else None.

        Raises:
            OSError: the system could not do it, or reports now that an earlier write failed.
        """
        tokens = len(token_ids)
        tail = memoryview(self._layout.tail(token_ids, scales))
        end = self._layout.row_offset(tokens)
        header = self._layout.header(tokens, num_prompt_tokens, self._checksum is not None)
        if self._checksum is not None:
            header, self.checksum = self._checksum.finish(self.fd, end, tail).stamp(header)
        write_at(self.fd, tail, end)
        write_at(self.fd, memoryview(header), 0)
        self.size = self._layout.file_size(tokens)
        if max(self._end, self._expected_size) > self.size:
            os.ftruncate(self.fd, self.size)
        if self._options.durability == "fdatasync":
            os.fdatasync(self.fd)

    def publish(self) -> None:
        """Give the complete file its name, durably if that is asked for. Raises OSError: it does not have it."""
        self.close()  # a network filesystem may report a failed write only now
        workspace, hidden = self._place
        workspace.move(hidden, self._storage, self._name)
        self._place = self._storage, self._name  # what is withdrawn, if it turns out to be where no reader looks
        if self._options.durability == "fdatasync":
            try:
                self._storage.sync()
            except BaseException:
                self._storage.unlink(self._name)  # what may not survive must not be seen
                raise

    def detach(self) -> Spare:
        """Hand over the hidden file with its descriptor; `withdraw` and `close` do nothing then."""
        _, hidden = self._place
        spare = Spare(hidden, self.size, self.fd)
        self.fd = -1
        self._is_detached = True
        return spare

    def withdraw(self) -> None:
        """Remove the file. Writes may be in flight. Raises OSError."""
        if not self._is_detached:
            storage, name = self._place
            storage.unlink(name)

    def close(self) -> None:
        """Close it, if it is open. Raises OSError: the system reports now that an earlier write failed."""
        fds, self.fd, self._direct_fd = (self._direct_fd, self.fd), -1, -1
        try:
            if fds[0] >= 0:
                os.close(fds[0])
        finally:
            if fds[1] >= 0:
                os.close(fds[1])

    def _make_room(self, end: int) -> None:
        with self._mutex:
            self._end = max(self._end, end)
            if not self._reserved and self._expected_size and self._filesystem.reserves:
                reserve(self.fd, self._expected_size)
                if self._direct_fd >= 0:
                    # ext4 writes rows after a reserved, unwritten page at half the speed: 4 MiB in
                    # 4 ms instead of 2.
                    write_at(self._direct_fd, memoryview(mmap.mmap(-1, self._layout.data_start)), 0)
            self._reserved = True

    def _fd_for(self, data: memoryview, offset: int) -> int:
        """Direct I/O takes only what is aligned; the ring is. Other memory, and rows of another size, go through the page cache."""
        return self._direct_fd if self._direct_fd >= 0 and is_aligned(data, offset, self._filesystem) else self.fd


def is_aligned(data: memoryview, offset: int, filesystem: Filesystem) -> bool:
    """Whether bytes can be written to an offset past the page cache."""
    return data.nbytes > 0 and not (offset | data.nbytes | _address(data)) % filesystem.alignment


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if not data.readonly else 1


def rows_as_bytes(first: int, rows: Rows, row_bytes: int) -> tuple[memoryview, int]:
    """Return the bytes of rows to write, and the number of the rows.

    Args:
        first: token position of the first row.
        rows: as for SinkFile.write.
        row_bytes: of one row.

    Raises:
        ValueError: not contiguous, not a whole number of rows, or a negative position.
    """
    data = as_bytes(rows)
    count, rest = divmod(data.nbytes, row_bytes)
    if rest or first < 0:
        problem = f"{data.nbytes} bytes at position {first} are not rows of {row_bytes} bytes"
        raise ValueError(problem)
    return data, count


def as_bytes(rows: Rows) -> memoryview:
    """The bytes of an array or a buffer, not copied.

    Raises:
        ValueError: they do not stand one after the other.
    """
    contiguous = rows.flags.c_contiguous if isinstance(rows, np.ndarray) else rows.c_contiguous
    if not contiguous:
        raise ValueError("the rows are not C-contiguous")
    if rows.nbytes == 0:
        return memoryview(b"")
    if isinstance(rows, np.ndarray):
        return rows.reshape(-1).view(np.uint8).data
    return rows.cast("B")
