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
from vllm_ascend_hsx.protocol.shard_index import Gone, Member, encode
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
        stem: of the shard's names.
        fds: its index and its tar file, open for reading and writing; closed with this object.
        durable: sync what is appended, data first, then the index.
        index_end: bytes of the index, all of them whole lines.
        end: bytes of the tar file that the members of the index take.

    Attributes:
        is_sound: False once the index could not be written: no line may be added any more.
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
        self._storage = storage
        self._stem = stem
        self._index_fd, self._fd = fds
        self._durable = durable
        self._index_end = index_end

    @classmethod
    def create(cls, storage: Storage, stem: str, durable: bool) -> Shard:
        """Make a new shard.

        Raises:
            FileExistsError: one of its names is taken.
            OSError: it cannot be created.
        """
        # In this order: `recover_shard` takes a tar file without an index for one that lost it.
        index_fd = storage.create(stem + INDEX)
        try:
            return cls(storage, stem, (index_fd, storage.create(stem + TAR)), durable)
        except OSError:
            os.close(index_fd)
            storage.unlink(stem + INDEX)
            raise

    def is_there(self) -> bool:
        """Return whether its files have names. What is written to a removed file is lost without an error."""
        return bool(os.fstat(self._fd).st_nlink and os.fstat(self._index_fd).st_nlink)

    def append(self, data: DataFile, name: str, tokens: int, request_id: str, time_ns: int) -> None:
        """Append a file as a member and publish it.

        Args:
            data: the file, complete and open.
            name: of the member.
            tokens, request_id, time_ns: for its line.

        Raises:
            OSError: no reader sees it, and what was before it is as it was.
        """
        head = headers(self.end, name, data.size, self._storage.file_mode, int(time.time()))
        offset = self.end + len(head)
        member = Member(name, offset, data.size, tokens, request_id, data.checksum, time_ns)
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

    def seal(
        self, workspace: Storage, sealed_by: Literal["server", "recovery"] = "server"
    ) -> None:
        """End the tar file, write the manifest, and close the shard; remove a shard whose index is empty.

        Args:
            workspace: the hidden directory that the manifest is made in.
            sealed_by: for the manifest.

        Raises:
            OSError: it could not be done, which the next server must do.
        """
        try:
            if not self.is_there():
                logger.error("%s was removed by somebody while it was written", self._stem + TAR)
            elif not self._index_end:
                self._storage.unlink(self._stem + TAR)
                self._storage.unlink(self._stem + INDEX)
            else:
                os.ftruncate(self._index_fd, self._index_end)  # first: a line must lead to a member
                os.ftruncate(self._fd, self.end)
                os.ftruncate(self._fd, self.end + len(END))
                if self._durable:
                    os.fdatasync(self._fd)
                    os.fdatasync(self._index_fd)
                self._write_manifest(workspace, sealed_by)
        finally:
            os.close(self._fd)
            os.close(self._index_fd)

    def _write_manifest(self, workspace: Storage, sealed_by: str) -> None:
        name = self._stem + MANIFEST
        text = json.dumps(manifest(self._fd, read_all(self._index_fd), sealed_by), indent=1) + "\n"
        workspace.unlink(name)  # of a server that died while it sealed this shard
        fd = workspace.create(name, workspace.group_in(self._storage))
        try:
            try:
                write_at(fd, memoryview(text.encode("ascii")), 0)
                if self._durable:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            workspace.move(name, self._storage, name)
        except OSError:
            workspace.unlink(name)
            raise
        if self._durable:
            self._storage.sync()
