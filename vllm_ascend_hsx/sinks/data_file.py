"""The hidden file of one request while it grows: rows at their final offset, then what stands around them, then it is safe or not."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

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
        mode: permissions of the data and error files, whatever the umask. Whoever may read a file may also lock it.
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


class RequestData(ABC):
    """What a request's rows become, from the first of them until it can be seen or has gone. `write` may be called from several threads,
    not for the same rows at the same time; the rest belongs to one."""

    @abstractmethod
    def write(self, first: int, data: memoryview) -> None:
        """Put rows at their place; the first ones reserve space for all that are expected.

        Args:
            first: token position of the first row.
            data: their bytes, as they are to be stored.

        Raises:
            OSError: they could not be written, or not all of them; or there is no space for all.
        """

    @abstractmethod
    def complete(self, token_ids: TokenIds, num_prompt_tokens: int, scales: Scales | None) -> None:
        """Write what stands around the rows, cut off what stands behind, and make it durable if that is wanted. No write is in flight.

        Args:
            token_ids: int64 [tokens]; all their rows have been written.
            num_prompt_tokens: how many of them are the prompt's.
            scales: float32 [tokens] of quantised rows, else None.

        Raises:
            OSError: the system could not do it, or reports now that an earlier write failed.
        """

    @abstractmethod
    def publish(self) -> None:
        """Have readers see what is complete, and keep it if it is to be durable. Raises OSError: then they do not see it."""

    @abstractmethod
    def withdraw(self) -> None:
        """It is not to be published: have no trace of it in the directory. Writes may be in flight. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds, if it holds anything; no write is in flight. Raises OSError."""


class DataFile(RequestData):
    """A file under its hidden name, which becomes the one that readers know.

    Args:
        workspace: where it is until it is published.
        hidden: its name there.
        storage: where it is published.
        name: its name then.
        gid: its group, or -1; see Storage.create.
        layout: where everything stands.
        options: how to write.
        expected_tokens: rows to reserve space for; there may be more or less in the end.
        filesystem: what it is on.

    Raises:
        OSError: the file cannot be created, or not for direct I/O.
    """

    def __init__(
        self,
        workspace: Storage,
        hidden: str,
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
        self._place = workspace, hidden
        self._layout = layout
        self._options = options
        self._filesystem = filesystem
        self._expected_size = layout.file_size(expected_tokens) if expected_tokens else 0
        self._mutex = threading.Lock()  # guards the next two
        self._reserved = False
        self._end = 0  # of what was written
        self._checksum = Checksums(layout.data_start) if options.checksum == "crc32c" else None
        self._direct_fd = -1
        self._fd = workspace.create(hidden, gid)
        try:
            if options.io == "direct":
                self._direct_fd = workspace.open_direct(hidden, self._fd)
        except BaseException:
            self.close()
            workspace.unlink(hidden)
            raise

    def write(self, first: int, data: memoryview) -> None:
        offset = self._layout.row_offset(first)
        self._make_room(offset + data.nbytes)
        # Before the write, which then finds the rows in the processor's cache.
        checksum = 0 if self._checksum is None else self._checksum.begin_write(offset, data)
        write_at(self._fd_for(data, offset), data, offset)
        if self._checksum is not None:
            self._checksum.end_write(offset, data.nbytes, checksum)
        if self._options.durability == "fdatasync" and self._direct_fd < 0 and data.nbytes >= WRITEBACK:
            start_writeback(self._fd, offset, data.nbytes)

    def complete(self, token_ids: TokenIds, num_prompt_tokens: int, scales: Scales | None) -> None:
        tokens = len(token_ids)
        tail = memoryview(self._layout.tail(token_ids, scales))
        end = self._layout.row_offset(tokens)
        header = self._layout.header(tokens, num_prompt_tokens, self._checksum is not None)
        if self._checksum is not None:
            header, _ = self._checksum.finish(self._fd, end, tail).stamp(header)
        write_at(self._fd, tail, end)
        write_at(self._fd, memoryview(header), 0)
        size = self._layout.file_size(tokens)
        if max(self._end, self._expected_size) > size:
            os.ftruncate(self._fd, size)
        if self._options.durability == "fdatasync":
            os.fdatasync(self._fd)
        # Before the rename: a network filesystem may report a failed write only now.
        self.close()

    def publish(self) -> None:
        workspace, hidden = self._place
        workspace.move(hidden, self._storage, self._name)
        self._place = self._storage, self._name  # what is withdrawn, if it turns out to be where no reader looks
        if self._options.durability == "fdatasync":
            try:
                self._storage.sync()
            except BaseException:
                self._storage.unlink(self._name)  # what may not survive must not be seen
                raise

    def reopen(self) -> int:
        """A descriptor of the complete file, for reading. Raises OSError."""
        storage, name = self._place
        return storage.open(name)

    def withdraw(self) -> None:
        storage, name = self._place
        storage.unlink(name)

    def close(self) -> None:
        """Close it, if it is open. Raises OSError: the system reports now that an earlier write failed."""
        fds, self._fd, self._direct_fd = (self._direct_fd, self._fd), -1, -1
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
                reserve(self._fd, self._expected_size)
                if self._direct_fd >= 0:
                    # ext4 writes rows behind a reserved page that nobody has written yet at half the speed: in 4 ms instead of 2 for 4 MiB.
                    write_at(self._direct_fd, memoryview(mmap.mmap(-1, self._layout.data_start)), 0)
            self._reserved = True

    def _fd_for(self, data: memoryview, offset: int) -> int:
        """Direct I/O takes only what is aligned; the ring is. Other memory, and rows of another size, go through the page cache."""
        return self._direct_fd if self._direct_fd >= 0 and is_aligned(data, offset, self._filesystem) else self._fd


def is_aligned(data: memoryview, offset: int, filesystem: Filesystem) -> bool:
    """Whether bytes can be written to an offset past the page cache."""
    return data.nbytes > 0 and not (offset | data.nbytes | _address(data)) % filesystem.alignment


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if not data.readonly else 1


def rows_as_bytes(first: int, rows: Rows, row_bytes: int) -> tuple[memoryview, int]:
    """The bytes of rows that are to be written, and how many rows they are.

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
        raise ValueError(f"{data.nbytes} bytes at position {first} are not rows of {row_bytes} bytes")
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
