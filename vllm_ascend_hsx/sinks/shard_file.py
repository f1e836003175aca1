"""Shards: append members to a tar file, and publish each member by a line in the index.

The tar file holds the members of the index, in the order of the lines. Bytes after the last member
are an unfinished append: the next append overwrites them, and sealing truncates them.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from vllm_ascend_hsx.protocol.files import describe, open_regular, write_at
from vllm_ascend_hsx.protocol.lock import has_name
from vllm_ascend_hsx.protocol.names import (
    INDEX,
    MANIFEST,
    SHARDS_MARK,
    TAR,
    parse_shard_name,
    shard_stem,
)
from vllm_ascend_hsx.protocol.shard_index import (
    INDEX_LARGEST,
    SEAL_AT,
    Member,
    check_end,
    decode,
    encode,
    end_of_members,
    read_index,
    shard_manifest,
    split_lines,
)
from vllm_ascend_hsx.protocol.tar import END, headers
from vllm_ascend_hsx.sinks.data_file import DataFile, RowSource, Spare
from vllm_ascend_hsx.sinks.directory import Session
from vllm_ascend_hsx.sinks.storage import Storage, copy_into

logger = logging.getLogger(__name__)

_LOST = "its tar file was removed: restore it, or drop its requests with `hsx clean --lost-shards`"


class Shard:
    """A shard for appends by one thread at a time. `seal` ends it.

    Args:
        storage: the directory.
        stem: stem of the shard's names.
        fds: index and tar file, open for reading and writing; closed by `seal`.
        durable: sync each append, data first, then the index.
        index_end: end of the last whole line of the index.
        end: end of the last member in the tar file.

    Attributes:
        is_sound: False if the index could not be written: no line may be added any more.
        names: names of the appended members. webdataset refuses a tar file with two equal names.
    """

    def __init__(
        self,
        storage: Storage,
        stem: str,
        fds: tuple[int, int],
        durable: bool,
        index_end: int = 0,
        end: int = 0,
    ) -> None:
        self.end = end
        self.is_sound = True
        self.names: set[str] = set()
        self._is_cut = True  # no bytes follow the last member: they could end up in a padding
        self._storage = storage
        self._stem = stem
        self._index_fd, self._fd = fds
        self._durable = durable
        self._index_end = index_end
        self._last = -1  # offset of the last member that was appended

    @classmethod
    def create(cls, storage: Storage, stem: str, durable: bool) -> Shard:
        """Create a new shard. Raises FileExistsError if one of the names exists, and OSError."""
        # The index first: `recover_shard` concludes from a tar file alone that the index was lost.
        index_fd = storage.create(stem + INDEX)
        try:
            return cls(storage, stem, (index_fd, storage.create(stem + TAR)), durable)
        except OSError:
            os.close(index_fd)
            storage.unlink(stem + INDEX)
            raise

    def is_full(self, limit: int) -> bool:
        """Return whether the tar file has `limit` bytes, or the index SEAL_AT bytes."""
        return self.end >= limit or self._index_end >= SEAL_AT

    def is_there(self) -> bool:
        """Return whether the names still lead to the open files, with all members and lines.

        Readers do not see writes to a file that was removed, moved or replaced. In a truncated
        file, the next member or line would follow a hole.
        """
        files = ((self._fd, TAR, self.end), (self._index_fd, INDEX, self._index_end))
        return all(
            has_name(fd, self._stem + suffix, self._storage.fd) and os.fstat(fd).st_size >= size
            for fd, suffix, size in files
        )

    def append(self, data: DataFile, name: str, tokens: int, request_id: str) -> None:
        """Append a complete, open file as a member and publish it.

        Raises OSError; earlier members are unchanged. If only the sync of the index failed, readers
        may see the member until the shard is sealed.
        """
        if not self._is_cut:
            self._cut()
        head = headers(self.end, name, data.size, self._storage.file_mode, int(time.time()))
        offset = self.end + len(head)
        member = Member(name, offset, data.size, tokens, request_id, data.checksum, time.time_ns())
        try:
            write_at(self._fd, memoryview(head), self.end)
            copy_into(data.fd, data.size, self._fd, offset)
            os.ftruncate(self._fd, member.end)
            if self._durable:
                os.fdatasync(self._fd)
        except OSError:
            with suppress(OSError):  # the next append tries again
                self._cut()
            raise
        self._add_line(member)
        self.end, self._last = member.end, offset
        self.names.add(name)

    def source(self, data: DataFile) -> RowSource:
        """Keep the last appended member open, like DataFile.source."""
        return data.source(self._fd, self._last)

    def _cut(self) -> None:
        self._is_cut = False
        os.ftruncate(self._fd, self.end)
        self._is_cut = True

    def _add_line(self, line: Member) -> None:
        """Add a line to the index.

        Raises OSError if the line is not written or synced. Readers may see it until the shard is
        sealed.
        """
        data = encode(line)
        self.is_sound = False
        if not self.is_there():
            raise OSError(errno.ENOENT, "the shard was removed")
        write_at(self._index_fd, memoryview(data), self._index_end)
        if self._durable:
            os.fdatasync(self._index_fd)
            if not self._index_end:
                self._storage.sync()  # the names of the shard
        self.is_sound = True
        self._index_end += len(data)

    def seal(self, workspace: Storage, sealed_by: Literal["server", "recovery"] = "server") -> None:
        """End the tar file, write the manifest and close. Remove a shard with an empty index.

        The manifest is created in `workspace`. After an OSError the next server must seal the
        shard.
        """
        try:
            if not self.is_there():
                logger.error(
                    "%s was removed or truncated while it was being written", self._stem + TAR
                )
            elif not self._index_end:
                self._storage.unlink(self._stem + TAR)
                self._storage.unlink(self._stem + INDEX)
            else:
                os.ftruncate(self._index_fd, self._index_end)  # first: each line needs a member
                os.ftruncate(self._fd, self.end)
                os.ftruncate(self._fd, self.end + len(END))
                if self._durable:
                    os.fdatasync(self._fd)
                    os.fdatasync(self._index_fd)
                self._write_manifest(workspace, sealed_by)
        finally:
            try:
                os.close(self._fd)
            finally:
                os.close(self._index_fd)

    def _write_manifest(self, workspace: Storage, sealed_by: str) -> None:
        name = self._stem + MANIFEST
        text = (
            json.dumps(shard_manifest(self._fd, read_index(self._index_fd), sealed_by), indent=1)
            + "\n"
        )
        workspace.unlink(name)  # left by a server that died while sealing this shard
        gid = workspace.group_in(os.fstat(self._storage.fd))
        with workspace.new_file(name, gid, self._storage, name) as fd:
            write_at(fd, memoryview(text.encode("ascii")), 0)
            if self._durable:
                os.fdatasync(fd)
        if self._durable:
            self._storage.sync()


class SessionShards:
    """The shards of one session. At most one shard is open for requests.

    Args:
        limit: bytes at which a shard is sealed.
        durable: as for Shard.

    Attributes:
        spares: hidden files to reuse, of requests that are in a shard. On ext4, creating and
            removing a file per request, and allocating pages and blocks, takes longer than the copy
            into the shard.
    """

    def __init__(self, session: Session, limit: int, durable: bool) -> None:
        self.spares: deque[Spare] = deque()
        self._session = session
        self._limit = limit
        self._durable = durable
        self._numbers = itertools.count()
        self._appending = threading.Lock()  # one append at a time; guards the fields below
        self._shard: Shard | None = None

    def hidden_file(self) -> str | Spare:
        """Return a hidden file to overwrite, or the name of a new one."""
        try:
            return self.spares.pop()
        except IndexError:
            return self._session.new_name("rows")

    @contextmanager
    def current(self, member: str) -> Iterator[Shard]:
        """Yield the open shard, and seal it afterwards if it is full or unsound. Raises OSError.

        Args:
            member: name of the member that will be appended.
        """
        with self._appending:
            if self._shard is not None and (
                member in self._shard.names or not self._shard.is_there()
            ):
                self._seal(self._session.workspace)
            shard = self._shard = self._shard or self._make()
            try:
                yield shard
            finally:
                if not shard.is_sound or shard.is_full(self._limit):
                    self._seal(self._session.workspace)

    def close(self, workspace: Storage) -> None:
        """Seal the open shard, and close the spares. They are removed with the hidden directory.

        `workspace` is an existing hidden directory of this server.
        """
        with self._appending:
            self._seal(workspace)
        for spare in self.spares:
            with suppress(OSError):  # the rows are in a shard
                os.close(spare.fd)

    def _make(self) -> Shard:
        session = self._session
        with suppress(FileExistsError):
            os.close(session.storage.create(SHARDS_MARK))
        stem = shard_stem(session.token, next(self._numbers))
        shard = Shard.create(session.storage, stem, self._durable)
        session.members.list_again()
        return shard

    def _seal(self, workspace: Storage) -> None:
        """Seal the open shard, if any. Errors concern no request and are only logged."""
        shard, self._shard = self._shard, None
        try:
            if shard is not None:
                shard.seal(workspace)
        except OSError as error:
            self._session.tidy = False
            problem = "a shard could not be sealed; the next server will seal it"
            logger.error("%s", describe(problem, error))


# Recovery: the next server seals the shards of a dead server. It can be interrupted and repeated.


def unsealed_shards(dir_fd: int, token: str) -> list[str]:
    """Return the stems of a server's shards without a manifest, sorted. Raises OSError."""
    with os.scandir(dir_fd) as entries:
        found = [
            parts
            for entry in entries
            if (parts := parse_shard_name(entry.name)) and parts[1] == token
        ]
    sealed = {stem for stem, _, suffix in found if suffix == MANIFEST}
    return sorted({stem for stem, _, _ in found} - sealed)


def recover_shard(dir_fd: int, workspace_fd: int, stem: str) -> int:
    """Truncate a shard after the last member in the index, and seal it durably.

    The caller holds the lock of the hidden directory of the shard's server.

    Args:
        dir_fd, workspace_fd: the directory, and the hidden directory of the shard's server.
        stem: stem of the shard's names.

    Returns:
        The number of requests in the shard.

    Raises:
        OSError: if this fails. Nothing is changed if the index is missing, lacks the end or
            contradicts the tar file.
    """
    storage = Storage(dir_fd, 0o600)  # the caller closes both
    fds = []
    try:
        fds.append(_open(dir_fd, stem + INDEX))
        content = read_index(fds[0], INDEX_LARGEST)
        lines = content[: content.rfind(b"\n") + 1]
        try:
            fds.append(_open(dir_fd, stem + TAR))
        except FileNotFoundError:  # the server died while creating or removing the shard
            if lines:
                raise OSError(errno.ENOENT, _LOST) from None
            storage.unlink(stem + INDEX)
            return 0
        try:
            end = end_of_members(fds[1], lines)
            check_end(fds[1], os.fstat(fds[1]).st_size, end, content)
        except ValueError as error:
            raise OSError(errno.EUCLEAN, str(error)) from error
        workspace = Storage(workspace_fd, os.fstat(fds[1]).st_mode & 0o777)
        shard = Shard(storage, stem, (fds[0], fds[1]), True, len(lines), end)
        fds.clear()
        shard.seal(workspace, "recovery")
        return sum(isinstance(decode(line), Member) for line in split_lines(lines))
    finally:
        for fd in fds:
            os.close(fd)


def _open(dir_fd: int, name: str) -> int:
    return open_regular(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=dir_fd)
