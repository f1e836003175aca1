"""The rows of a request on their way into a shard: straight to their final place, or, while their number is open, in a hidden file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from vllm_ascend_hsx.protocol.checksum import Checksums
from vllm_ascend_hsx.protocol.files import write_at
from vllm_ascend_hsx.protocol.format import FileLayout, FormatError, read_header
from vllm_ascend_hsx.protocol.rows import TokenIds
from vllm_ascend_hsx.protocol.shard_index import Member, now_ns
from vllm_ascend_hsx.sinks.data_file import WRITEBACK, DataFile, FileOptions, RequestData, is_aligned
from vllm_ascend_hsx.sinks.directory import Filesystem
from vllm_ascend_hsx.sinks.encoder import Scales
from vllm_ascend_hsx.sinks.shard_file import Range, Shard
from vllm_ascend_hsx.sinks.system import copy_into, start_writeback

# Name, size, and how many bytes come before the rows; see Shard.reserve.
Reserve: TypeAlias = "Callable[[str, int, int], tuple[Shard, Range]]"


class MemberData(RequestData):
    """A request that becomes a member of a shard.

    Args:
        name: its path below the storage directory.
        request_id: its id.
        layout: where everything stands.
        reserve: finds a place in a shard.
    """

    def __init__(self, name: str, request_id: str, layout: FileLayout, reserve: Reserve) -> None:
        self._name = name
        self._request_id = request_id
        self._layout = layout
        self._reserve = reserve
        self._shard: Shard | None = None
        self._range: Range | None = None
        self._member: Member | None = None
        self._published = False

    def publish(self) -> None:
        assert self._shard is not None and self._member is not None
        self._shard.publish(self._member)
        self._published = True

    def close(self) -> None:
        shard, taken, self._shard, self._range = self._shard, self._range, None, None
        if shard is not None and taken is not None:
            shard.release(taken, self._published)

    def _place(self, size: int) -> tuple[Shard, Range]:
        self._shard, self._range = self._reserve(self._name, size, self._layout.data_start)
        return self._shard, self._range

    def _complete(self, shard: Shard, taken: Range, size: int, tokens: int, checksum: str) -> None:
        shard.complete(taken, size)
        self._member = Member(self._name, taken.offset, size, tokens, self._request_id, checksum, now_ns())


class RowsInPlace(MemberData):
    """A request whose rows are known in number: each is written once, to its final place, which is reserved with the first of them.

    Rows behind the ones that were announced are dropped; without them it cannot be completed if they turn out to be wanted.

    Args:
        name, request_id, layout, reserve: of MemberData.
        options: how to write.
        expected_tokens: the number of rows.
        filesystem: what the shards are on.
    """

    def __init__(
        self,
        name: str,
        request_id: str,
        layout: FileLayout,
        reserve: Reserve,
        options: FileOptions,
        expected_tokens: int,
        filesystem: Filesystem,
    ) -> None:
        super().__init__(name, request_id, layout, reserve)
        self._options = options
        self._tokens = expected_tokens
        self._filesystem = filesystem
        self._mutex = threading.Lock()  # while the place is reserved
        self._checksum: Checksums | None = None

    def write(self, first: int, data: memoryview) -> None:
        shard, taken = self._reserved()
        begin, end = self._layout.row_offset(first), self._layout.row_offset(self._tokens)
        data = data[: max(0, end - begin)]
        offset = taken.offset + begin
        direct = shard.direct_fd >= 0 and is_aligned(data, offset, self._filesystem)
        checksum = 0 if self._checksum is None else self._checksum.begin_write(offset, data)
        write_at(shard.direct_fd if direct else shard.fd, data, offset)
        if self._checksum is not None:
            self._checksum.end_write(offset, data.nbytes, checksum)
        if self._options.durability == "fdatasync" and not direct and data.nbytes >= WRITEBACK:
            start_writeback(shard.fd, offset, data.nbytes)

    def complete(self, token_ids: TokenIds, num_prompt_tokens: int, scales: Scales | None) -> None:
        tokens = len(token_ids)
        if tokens > self._tokens:
            raise OSError(errno.EFBIG, f"it has {tokens} rows, and {self._tokens} were announced")
        shard, taken = self._reserved()
        tail = memoryview(self._layout.tail(token_ids, scales))
        end = taken.offset + self._layout.row_offset(tokens)
        header, checksum = self._layout.header(tokens, num_prompt_tokens, self._checksum is not None), ""
        if self._checksum is not None:
            header, checksum = self._checksum.finish(shard.fd, end, tail).stamp(header)
        write_at(shard.fd, tail, end)
        write_at(shard.fd, memoryview(header), taken.offset)
        self._complete(shard, taken, self._layout.file_size(tokens), tokens, checksum)

    def withdraw(self) -> None:
        """Nothing: readers know its place as a hole until it is completed, and writers may be in flight until it is closed."""

    def _reserved(self) -> tuple[Shard, Range]:
        with self._mutex:
            if self._shard is None or self._range is None:
                shard, taken = self._place(self._layout.file_size(self._tokens))
                if self._options.checksum == "crc32c":
                    self._checksum = Checksums(taken.offset + self._layout.data_start)
                return shard, taken
            return self._shard, self._range


class RowsBeside(MemberData):
    """A request that may grow: it is put together in a hidden file, and moved into a shard when its size is known.

    Args:
        name, request_id, layout, reserve: of MemberData.
        file: the hidden file.
    """

    def __init__(self, name: str, request_id: str, layout: FileLayout, reserve: Reserve, file: DataFile) -> None:
        super().__init__(name, request_id, layout, reserve)
        self._file = file

    def write(self, first: int, data: memoryview) -> None:
        self._file.write(first, data)

    def complete(self, token_ids: TokenIds, num_prompt_tokens: int, scales: Scales | None) -> None:
        self._file.complete(token_ids, num_prompt_tokens, scales)
        fd = self._file.reopen()
        try:
            size = os.fstat(fd).st_size
            try:
                checksum = read_header(fd).metadata.get("checksum", "")
            except FormatError as error:
                raise OSError(errno.EIO, f"the hidden file is not as it was written: {error}") from error
            shard, taken = self._place(size)
            copy_into(fd, shard.fd, taken.offset)
        finally:
            os.close(fd)
        self._complete(shard, taken, size, len(token_ids), checksum)

    def publish(self) -> None:
        self._file.withdraw()  # first: once it is published nothing may go wrong
        super().publish()

    def withdraw(self) -> None:
        self._file.withdraw()

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            super().close()
