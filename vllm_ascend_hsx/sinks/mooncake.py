"""A sink that publishes each request as one object of a Mooncake store: rows gather in registered memory until all are there."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Literal

from vllm_ascend_hsx.config import MooncakeOptions
from vllm_ascend_hsx.sinks.arena import Arena
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, RowFormat, Sink, SinkError
from vllm_ascend_hsx.sinks.mooncake_client import MooncakeClient, MooncakeError, MooncakeUnavailableError
from vllm_ascend_hsx.sinks.mooncake_file import MooncakeFile
from vllm_ascend_hsx.sinks.one_end import fail_all
from vllm_ascend_hsx.sinks.packed import MANIFEST_KEY_SUFFIX

_TIDIED = 16  # handles that are looked at with each that is published


class MooncakeSink(Sink):
    """Publishes objects in one store.

    Args:
        options: of the store.
        row_format: what a row looks like; the same for all requests of a sink.
        checksum: of each object, or none.

    Raises:
        MooncakeUnavailableError: the store cannot be used.
    """

    writes_side_by_side = True  # they are copies in memory

    def __init__(self, options: MooncakeOptions, row_format: RowFormat, checksum: Literal["crc32c", "none"] = "crc32c") -> None:
        self.row_format = row_format
        self.checksum = checksum
        self.client = MooncakeClient(options, options.global_segment_size)
        self.arena = Arena(options.local_buffer_size)
        try:
            self.client.register(self.arena.address, self.arena.size)
        except MooncakeError as error:
            self.client.close()
            remedy = "Give less, or let the server lock more memory (ulimit -l)."
            raise MooncakeUnavailableError("local_buffer_size", self.arena.size, f"cannot be registered: {error}", remedy) from error
        self.published = Published(self.client)
        self._mutex = threading.Lock()
        self._files: dict[str, MooncakeFile] = {}
        self._closed = False

    def open(self, request_id: str, path: Path, expected_tokens: int = 0, may_grow: bool = True) -> MooncakeFile:
        handle = os.fspath(path)
        if not handle or not handle.isascii() or not handle.isprintable() or set(handle) & {"/", ":"}:
            raise SinkError(request_id, path, "the handle cannot be used: it is not a plain, printable name")
        file = MooncakeFile(self, request_id, path)
        with self._mutex:
            if self._closed:
                raise SinkError(request_id, path, "the sink is closed")
            if handle in self._files:
                raise SinkError(request_id, path, "another request is writing under this handle")
            self._files[handle] = file
        file.begin(expected_tokens)
        return file

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            files = list(self._files.values())
        fail_all(files, SERVER_STOPPED)
        self.client.close()

    def forget(self, file: MooncakeFile) -> None:
        """Called by a file that has ended."""
        with self._mutex:
            if self._files.get(file.handle) is file:
                del self._files[file.handle]


class Published:
    """Handles whose data is in the store. Consumers that do not know of manifests leave them there; nobody else would ever remove them.

    Args:
        client: of the store.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._mutex = threading.Lock()
        self._handles: deque[str] = deque()

    def tidy(self, handle: str) -> None:
        """Take note of one more, and remove the manifests of some that were published before, if their data has been removed.

        Raises:
            MooncakeError: the store did not do it; a later call will.
        """
        with self._mutex:
            some = [self._handles.popleft() for _ in range(min(_TIDIED, len(self._handles)))]
            self._handles.append(handle)
        there = [True] * len(some)
        try:
            if some:
                there = self._client.exist(some)
                self._client.remove([each + MANIFEST_KEY_SUFFIX for each, is_there in zip(some, there, strict=True) if not is_there])
        except MooncakeError:
            there = [True] * len(some)
            raise
        finally:
            with self._mutex:
                self._handles += [each for each, is_there in zip(some, there, strict=True) if is_there]
