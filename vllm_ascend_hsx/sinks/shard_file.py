"""One shard while it grows: ranges that become members or holes, the lines of its index, and its sealing.

At every instant the tar file can be walked from its first byte to its last member, whoever dies: a range has the headers of a hole before
its first byte is written, and those of a member when all of it is there. What makes it a member for readers is its line in the index.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_hsx.protocol.files import describe, write_at
from vllm_ascend_hsx.protocol.format import PAGE
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, encode, now_ns
from vllm_ascend_hsx.protocol.shard_names import INDEX, TAR
from vllm_ascend_hsx.protocol.tar import BLOCK, HOLE, data_offset, headers, round_up
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.shard_seal import seal
from vllm_ascend_hsx.sinks.system import punch_hole, reserve

if TYPE_CHECKING:
    from vllm_ascend_hsx.sinks.session import Session

logger = logging.getLogger(__name__)


@dataclass
class Range:
    """Bytes of a shard that belong to one request.

    Attributes:
        name: of the request, as a file's path below the storage directory.
        start: of its headers.
        offset: of its data, at a page.
        end: behind its last byte.
        named: whether its headers may be those of a member.
    """

    name: str
    start: int
    offset: int
    end: int
    named: bool = False


class Shard:
    """A shard that is open for writing. Every range that is reserved must be given to `release`, once.

    Args:
        session: the directory.
        stem: of its names.
        options: how to write.
        limit: bytes from which on no more ranges are given out.

    Attributes:
        fd, direct_fd: the tar file; the second bypasses the page cache, or is -1.

    Raises:
        FileExistsError: something is called so.
        OSError: it cannot be created.
    """

    def __init__(self, session: Session, stem: str, options: FileOptions, limit: int) -> None:
        self._session = session
        self._stem = stem
        self._options = options
        self._durable = options.durability == "fdatasync"
        self._limit = limit
        self._mutex = threading.Lock()  # guards everything but the index
        self._end = 0
        self._users = 0  # ranges that are undecided, and lines that are being written
        self._retired = False  # no more ranges
        self._abandoned = False  # not to be sealed
        self._sealed = False
        self._broken = False  # something behind its end could not be taken away, so nothing can be put there
        self._spoiled = False  # a range that was given back has the headers of a member
        self._index_mutex = threading.Lock()
        self._index_end = 0
        self.fd = self.direct_fd = self._index_fd = -1
        storage = session.storage
        self.fd = storage.create(stem + TAR)
        try:
            if options.io == "direct":
                self.direct_fd = storage.open_direct(stem + TAR, self.fd)
            self._index_fd = storage.create(stem + INDEX)
            try:
                if self._durable:
                    storage.sync()
            except BaseException:
                storage.unlink(stem + INDEX)
                raise
        except BaseException:
            storage.unlink(stem + TAR)
            self._close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is undecided, and nothing will be."""
        return self._sealed

    def reserve(self, name: str, size: int, first_bytes: int) -> Range | None:
        """Bytes for a request's data, with their space on the disk; None: this shard has ended.

        Args:
            name: the request's.
            size: of its data.
            first_bytes: how many of them come before the rows.

        Raises:
            OSError: there is no space for them, or the headers could not be written.
        """
        with self._mutex:
            if self._retired or self._broken or self._is_full():
                return None
            if not self._is_there():
                self._broken = True
                return None
            start = self._end
            offset = data_offset(start, name, size)
            # What is written past the page cache shares no page with what others write through it at the same time.
            end = round_up(offset + size, PAGE if self.direct_fd >= 0 else BLOCK)
            try:
                self._write_headers(HOLE, end - offset, start, offset)
                if self._session.filesystem.reserves:
                    reserve(self.fd, end - offset, offset)
                else:
                    os.ftruncate(self.fd, end)
                if self.direct_fd >= 0:  # as DataFile does
                    write_at(self.direct_fd, memoryview(mmap.mmap(-1, round_up(first_bytes, PAGE))), offset)
            except OSError:
                self._cut_off(start)
                raise
            self._end = end
            self._users += 1
            return Range(name, start, offset, end)

    def complete(self, taken: Range, size: int) -> None:
        """Have the range be a member of so many bytes, which have all been written, and durable if that is wanted; not yet in the index.

        Raises:
            OSError: it could not be done, or the system reports now that an earlier write failed.
        """
        end = round_up(taken.offset + size, BLOCK)
        if end < taken.end:  # a hole behind it before the member ends there
            self._write_headers(HOLE, taken.end - end - BLOCK, end, end + BLOCK)
        taken.named = True
        self._write_headers(taken.name, size, taken.start, taken.offset)
        if end < taken.end:
            with self._mutex:
                if taken.end == self._end:
                    os.ftruncate(self.fd, end)
                    self._end = taken.end = end
        if end < taken.end:
            self._punch(end + BLOCK, taken.end)
        if self._durable:
            os.fdatasync(self.fd)

    def publish(self, member: Member) -> None:
        """Add a member to the index. Raises OSError: it is not there, or not to stay; readers do not see it."""
        if not self._is_there():
            raise OSError(errno.ENOENT, "somebody has removed the shard that it is in")
        self._append(member)

    def say_gone(self, name: str) -> bool:
        """Have readers see no earlier member of a name. False: this shard has ended. Raises OSError."""
        with self._mutex:
            if self._retired or self._broken or self._is_full() or not self._is_there():
                return False
            self._users += 1
        try:
            self._append(Gone(name, now_ns()))
        finally:
            self._leave()
        return True

    def release(self, taken: Range, published: bool) -> None:
        """The range is decided: it is a member, or nobody's any more. Seals the shard if it was the last one.

        Raises:
            OSError: it could not be given back; then the shard is as a server that died would leave it.
        """
        try:
            if not published:
                with self._mutex:
                    self._give_back(taken)
        finally:
            self._leave()

    def retire(self, abandon: bool = False) -> None:
        """Give no more ranges, and seal the shard as soon as all of them are decided.

        Args:
            abandon: if some are not decided now, it is left for the next server: the directory is about to be closed.
        """
        with self._mutex:
            self._retired = True
            self._users += 1
            if abandon and self._users > 1 and not self._sealed:
                self._abandoned = True
                self._session.tidy = False
        self._leave()

    def _is_there(self) -> bool:
        """Whether its files have names: what is written to a file that somebody has removed is lost without an error."""
        return bool(os.fstat(self.fd).st_nlink and os.fstat(self._index_fd).st_nlink)

    def _is_full(self) -> bool:
        return self._end >= self._limit

    def _leave(self) -> None:
        """One user less; the last one seals it if it has ended."""
        with self._mutex:
            self._users -= 1
            if self._users or self._sealed or not (self._retired or self._broken or self._is_full()):
                return
            self._retired = self._sealed = True
        try:
            if not self._is_there():
                logger.error("%s was removed by somebody while it was written", self._stem + TAR)
                return
            if self._spoiled:
                raise OSError(errno.EIO, "it has headers of a request that has no rows")
            if not self._abandoned:
                seal(self._session.storage, self._session.token, self._stem, self.fd, self._index_fd, self._end, self._durable, "server")
        except OSError as error:  # of no request
            self._session.tidy = False
            logger.error("%s", describe(f"{self._stem}{TAR} could not be sealed, which the next server will do", error))
        finally:
            self._close()

    def _append(self, line: Member | Gone) -> None:
        with self._index_mutex:
            data = encode(line)
            # If not all of it can be written, the next line is written over what was: readers pass over a last line that has no end.
            write_at(self._index_fd, memoryview(data), self._index_end)
            self._index_end += len(data)
        if self._durable:
            try:
                os.fdatasync(self._index_fd)
            except OSError:
                if isinstance(line, Member):  # what may not survive must not be seen
                    with self._index_mutex:
                        data = encode(Gone(line.name, now_ns()))
                        write_at(self._index_fd, memoryview(data), self._index_end)
                        self._index_end += len(data)
                raise

    def _give_back(self, taken: Range) -> None:
        if self._abandoned:  # the next server may have sealed it already
            return
        if taken.named:
            self._spoiled = True
            self._write_headers(HOLE, taken.end - taken.offset, taken.start, taken.offset)
            self._spoiled = False
        if taken.end == self._end:
            self._cut_off(taken.start)
            if not self._broken:
                self._end = taken.start
                return
        self._punch(taken.offset, taken.end)

    def _cut_off(self, end: int) -> None:
        try:
            os.ftruncate(self.fd, end)
        except OSError:
            self._broken = True

    def _punch(self, begin: int, end: int) -> None:
        """Whole pages only: the rest of the first and the last one is somebody else's."""
        begin, end = round_up(begin, PAGE), end // PAGE * PAGE
        if begin < end:
            punch_hole(self.fd, begin, end - begin)

    def _write_headers(self, name: str, size: int, start: int, offset: int) -> None:
        write_at(self.fd, memoryview(headers(name, size, offset - start, self._options.mode, int(time.time()))), start)

    def _close(self) -> None:
        fds = (self.direct_fd, self.fd, self._index_fd)
        self.direct_fd = self.fd = self._index_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
