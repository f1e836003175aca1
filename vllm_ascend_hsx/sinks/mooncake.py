"""A sink that publishes each request as one object of a Mooncake store: rows gather in registered memory until all are there."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, SCALES, TOKEN_IDS, metadata_of
from vllm_ascend_hsx.protocol.mooncake_manifest import (
    ERROR_KEY_SUFFIX,
    MANIFEST_KEY_SUFFIX,
    PackedLayout,
    error_marker,
    keys_of,
    manifest,
    packed_layout,
)
from vllm_ascend_hsx.protocol.mooncake_store import OPTION, MooncakeClient, MooncakeError, MooncakeOptions
from vllm_ascend_hsx.protocol.rows import RowFormat, Rows, TokenIds
from vllm_ascend_hsx.sinks.arena import Arena, ArenaFullError, Gathering
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, Sink, SinkError, SinkFile
from vllm_ascend_hsx.sinks.data_file import as_bytes, rows_as_bytes
from vllm_ascend_hsx.sinks.encoder import Scales, encoder_for

logger = logging.getLogger(__name__)

_TIDIED = 16  # handles that are looked at with each that is published
NO_ROOM = "ENOSPC"  # kind of a failure for want of memory, as of one for want of disk


class MooncakeFile(SinkFile):
    """One object of a MooncakeSink, named by a handle instead of a path.

    It enters the store, whole, when it is committed.
    """

    def __init__(self, sink: MooncakeSink, request_id: str, path: Path) -> None:
        self.request_id = request_id
        self.path = path
        self.handle = os.fspath(path)
        self._sink = sink
        self._row_bytes = sink.row_format.row_bytes
        self._stored_row_bytes = sink.row_format.stored_row_bytes
        self._encoder = encoder_for(sink.row_format)
        self._gathering = Gathering(sink.arena)

    def begin(self, expected_tokens: int) -> None:
        """Remove what an earlier request left under the handle, and take memory for the tokens that will come.

        Raises:
            SinkError: one of the two cannot be done; the file has failed.
        """
        try:
            self._sink.client.remove(keys_of(self.handle))
            self._reserve(packed_layout(self._sink.row_format, expected_tokens).size)
        except MooncakeError as error:
            reason = f"what an earlier request left under its handle could not be removed: {error}"
            self.fail(reason)
            raise self._error(reason) from error
        except SinkError as error:
            self.fail(error.reason)
            raise

    def write(self, first: int, rows: Rows) -> None:
        data, count = rows_as_bytes(first, rows, self._row_bytes)
        self._reserve((first + count) * self._stored_row_bytes)
        self._gathering.write(first * self._stored_row_bytes, self._encoder.encode(first, data))

    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        try:
            self._publish(token_ids, num_prompt_tokens)
        except SinkError as error:
            self.fail(error.reason)
            raise
        except MooncakeError as error:
            reason = f"it could not be put into the store: {error}"
            self.fail(reason)
            raise self._error(reason) from error
        self._sink.forget(self)
        self.close()

    def fail(self, reason: str, close: bool = True) -> None:
        marker = self.handle + ERROR_KEY_SUFFIX
        self._attempt("publish the reason of the failure", lambda: self._sink.client.put(marker, error_marker(reason), may_go=True))
        self._sink.forget(self)
        if close:
            self.close()

    def discard(self) -> None:
        self._sink.forget(self)
        self.close()

    def close(self) -> None:
        self._gathering.free()

    def _reserve(self, size: int) -> None:
        try:
            self._gathering.reserve(size)
        except ArenaFullError as error:
            reason = (
                f"{error.wanted} bytes more are wanted to put its rows together, and of mooncake.local_buffer_size={error.size} "
                f"{error.free} are free; give more, or send fewer requests at a time"
            )
            raise SinkError(self.request_id, self.path, reason, NO_ROOM) from error

    def _publish(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Put the data, then the manifest: who sees the manifest finds the data, all of it. Raises MooncakeError, SinkError."""
        tokens = len(token_ids)
        if not tokens:
            raise self._error("there are no tokens, and Mooncake stores no object without bytes")
        layout = packed_layout(self._sink.row_format, tokens)
        self._complete(layout, token_ids, self._encoder.scales(tokens))
        has_checksum = self._sink.checksum != "none"
        said = manifest(layout, metadata_of(self._sink.row_format, self.request_id, tokens, num_prompt_tokens, has_checksum))
        if has_checksum:
            said, _ = self._digest(layout.size).stamp(said)
        client = self._sink.client
        client.put_parts(self.handle, self._gathering.parts(layout.size))
        try:
            client.put(self.handle + MANIFEST_KEY_SUFFIX, said)
        except MooncakeError:
            self._attempt("remove data that has no manifest", lambda: client.remove([self.handle]))
            raise
        self._attempt("tidy up the store", lambda: self._sink.published.tidy(self.handle))

    def _complete(self, layout: PackedLayout, token_ids: TokenIds, scales: Scales | None) -> None:
        """Write the tail after the rows, over rows beyond the tokens."""
        self._reserve(layout.size)
        self._gathering.clear(layout.end(HIDDEN_STATES), layout.size)
        self._gathering.write(layout.offset(TOKEN_IDS), as_bytes(np.ascontiguousarray(token_ids, dtype="<i8")))
        if scales is not None:
            self._gathering.write(layout.offset(SCALES), as_bytes(np.ascontiguousarray(scales, dtype="<f4")))

    def _digest(self, size: int) -> Digest:
        digest = Digest()
        for part in self._gathering.views(size):
            digest.update(part)
        return digest

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except MooncakeError as error:
            logger.error("request %r, %s: could not %s: %s", self.request_id, self.path, what, error)

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)


class MooncakeSink(Sink):
    """Publishes objects in one store.

    Args:
        options: of the store.
        row_format: what a row looks like; the same for all requests of a sink.
        checksum: of each object, or none.

    Raises:
        UserError: the store cannot be used.
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
            raise UserError(f"{OPTION}.local_buffer_size", self.arena.size, f"cannot be registered: {error}", remedy) from error
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
            not_ended = list(self._files.values())
        for file in not_ended:
            file.fail(SERVER_STOPPED)
        self.client.close()

    def forget(self, file: MooncakeFile) -> None:
        """Called by a file that ends: its handle can be used again."""
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
