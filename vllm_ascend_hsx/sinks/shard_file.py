"""One shard: members are appended to its tar file, and a line of its index publishes each; then it is sealed.

The tar file holds the members of the index, in the order of their lines, and nothing else before its
end. What is after the last of them belongs to an append that did not finish: the next append writes over
it, and sealing cuts it off.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from contextlib import suppress
from typing import Literal

from vllm_ascend_hsx.protocol.files import read_all, write_at
from vllm_ascend_hsx.protocol.names import partial_name
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, encode, now_ns
from vllm_ascend_hsx.protocol.shard_manifest import manifest
from vllm_ascend_hsx.protocol.shard_names import INDEX, MANIFEST, TAR
from vllm_ascend_hsx.protocol.tar import END, headers
from vllm_ascend_hsx.sinks.data_file import DataFile
from vllm_ascend_hsx.sinks.storage import Storage
from vllm_ascend_hsx.sinks.system import copy_into

logger = logging.getLogger(__name__)


class Shard:
    """A shard that is open for appending, by one thread at a time. `seal` ends it.

    Args:
        storage: the directory.
        token: part of the names of hidden files.
        stem: of the shard's names.
        durable: sync what is appended, data first, then the index.

    Attributes:
        stem: of its names.
        end: bytes of the tar file that members take.
        is_sound: False once the index could not be written: no line may be added any more.

    Raises:
        FileExistsError: one of its names is taken.
        OSError: it cannot be created.
    """

    def __init__(self, storage: Storage, token: str, stem: str, durable: bool) -> None:
        self.end = 0
        self.is_sound = True
        self._storage = storage
        self._token = token
        self.stem = stem
        self._durable = durable
        self._index_end = 0
        # In this order: `recover_shard` takes a tar file without an index for one that lost it.
        self._index_fd = storage.create(stem + INDEX)
        try:
            self._fd = storage.create(stem + TAR)
        except OSError:
            os.close(self._index_fd)
            storage.unlink(stem + INDEX)
            raise

    def is_there(self) -> bool:
        """Return whether its files have names. What is written to a removed file is lost without an error."""
        return bool(os.fstat(self._fd).st_nlink and os.fstat(self._index_fd).st_nlink)

    def append(self, data: DataFile, name: str, tokens: int, request_id: str) -> None:
        """Append a file as a member and publish it.

        Args:
            data: the file, complete and open.
            name: of the member.
            tokens, request_id: for its line.

        Raises:
            OSError: no reader sees it, and what was before it is as it was.
        """
        head = headers(self.end, name, data.size, self._storage.file_mode, int(time.time()))
        offset = self.end + len(head)
        member = Member(name, offset, data.size, tokens, request_id, data.checksum, now_ns())
        try:
            write_at(self._fd, memoryview(head), self.end)
            copy_into(data.fd, data.size, self._fd, offset)
            os.ftruncate(self._fd, member.end)
            if self._durable:
                os.fdatasync(self._fd)
        except OSError:
            with suppress(OSError):  # the next append and sealing do without
                os.ftruncate(self._fd, self.end)
            raise
        self.add_line(member)
        self.end = member.end

    def add_line(self, line: Member | Gone) -> None:
        """Add a line to the index.

        Raises:
            OSError: it could not be written, or is not durable. Readers may see it until the shard is sealed.
        """
        data = encode(line)
        self.is_sound = False
        if not self.is_there():
            raise OSError(errno.ENOENT, "somebody has removed the shard")
        write_at(self._index_fd, memoryview(data), self._index_end)
        if self._durable:
            os.fdatasync(self._index_fd)
            if not self._index_end:
                self._storage.sync()  # the names of the shard
        self.is_sound = True
        self._index_end += len(data)

    def seal(self) -> None:
        """Seal and close it. Raises OSError: the next server must seal it."""
        try:
            if not self.is_there():
                logger.error("%s was removed by somebody while it was written", self.stem + TAR)
                return
            os.ftruncate(self._index_fd, self._index_end)  # first: a line must lead to a member
            fds = self._fd, self._index_fd
            seal(self._storage, self._token, self.stem, *fds, self.end, self._durable, "server")
        finally:
            os.close(self._fd)
            os.close(self._index_fd)


def seal(
    storage: Storage,
    token: str,
    stem: str,
    fd: int,
    index_fd: int,
    end: int,
    durable: bool,
    sealed_by: Literal["server", "recovery"],
) -> None:
    """End the tar file of a shard and write its manifest; remove a shard whose index is empty.

    Args:
        storage: the directory.
        token: for a hidden name.
        stem: of the shard's names.
        fd, index_fd: its tar file, and its index, whose lines are complete.
        end: of the last member.
        durable: sync all of it.
        sealed_by: for the manifest.

    Raises:
        OSError: it could not be done.
    """
    index = read_all(index_fd)
    if not index:
        storage.unlink(stem + TAR)
        storage.unlink(stem + INDEX)
        return
    os.ftruncate(fd, end)
    os.ftruncate(fd, end + len(END))
    if durable:
        os.fdatasync(fd)
        os.fdatasync(index_fd)
    name = stem + MANIFEST
    hidden = partial_name(name, token)
    text = json.dumps(manifest(fd, index, sealed_by), indent=1) + "\n"
    storage.unlink(hidden)  # of a server that died while it sealed this one
    manifest_fd = storage.create(hidden)
    try:
        try:
            write_at(manifest_fd, memoryview(text.encode("ascii")), 0)
            if durable:
                os.fdatasync(manifest_fd)
        finally:
            os.close(manifest_fd)
        storage.rename(hidden, name)
    except OSError:
        storage.unlink(hidden)
        raise
    if durable:
        storage.sync()
