"""A sink that puts each complete request into a Mooncake store as one object."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Literal

from vllm_ascend_hsx.protocol.checksum import Digest
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, SCALES, TOKEN_IDS, metadata_of
from vllm_ascend_hsx.protocol.mooncake.manifest import (
    ERROR_KEY_SUFFIX,
    MANIFEST_KEY_SUFFIX,
    PackedLayout,
    error_marker,
    manifest,
    packed_layout,
)
from vllm_ascend_hsx.protocol.mooncake.store import (
    OPTION,
    MooncakeClient,
    MooncakeError,
    MooncakeOptions,
)
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat, Rows, TokenIds
from vllm_ascend_hsx.sinks.base import (
    NAME_USED,
    REFUSED,
    SERVER_STOPPED,
    FilePath,
    Sink,
    SinkError,
    SinkFile,
)
from vllm_ascend_hsx.sinks.data_file import as_bytes, rows_as_bytes
from vllm_ascend_hsx.sinks.encoder import Scales, encoder_for
from vllm_ascend_hsx.sinks.mooncake.buffer_pool import BufferPool, BufferPoolFullError, PooledBuffer

logger = logging.getLogger(__name__)

_TIDIED = 16  # earlier handles to check after each put
# Seconds for which puts are repeated. mooncake_master takes 10 seconds to notice that a process has
# ended (-client_ttl). Until then it places objects in the memory of that process.
RETRY_S = 12.0
_LONGEST_PAUSE = 0.5  # seconds between two tries
NO_ROOM = "ENOSPC"  # kind of failures for lack of memory, the same as for a full disk


class MooncakeFile(SinkFile):
    """One object of a MooncakeSink, named by a handle instead of a path.

    `commit` puts the whole object into the store.
    """

    def __init__(
        self, sink: MooncakeSink, request_id: str, path: FilePath, adapter: Adapter
    ) -> None:
        self.request_id = request_id
        self.path = path
        self.handle = os.fspath(path)
        self._sink = sink
        self._format = replace(sink.row_format, adapter=adapter)
        self._encoder = encoder_for(sink.row_format)
        self._buffer = PooledBuffer(sink.buffer_pool)

    def begin(self, expected_tokens: int) -> None:
        """Remove leftovers of a failed request, and reserve memory.

        Data without a manifest, and a manifest without data, are leftovers of a process that has
        ended. Raises SinkError; the file has then ended.
        """
        failure, rows = (
            self.handle + ERROR_KEY_SUFFIX,
            [self.handle, self.handle + MANIFEST_KEY_SUFFIX],
        )
        try:
            self._sink.client.remove([failure])
            if not (is_used := all(self._sink.client.exist(rows))):
                self._sink.client.remove(rows)
                self._reserve(packed_layout(self._format, expected_tokens).size)
        except MooncakeError as error:
            reason = f"leftovers of an earlier request could not be removed from the store: {error}"
            self._fail_to_begin(reason)
            raise self._error(reason) from error
        except SinkError as error:
            self._fail_to_begin(error.reason)
            raise
        if is_used:
            self.discard()
            raise SinkError(self.request_id, self.path, NAME_USED, REFUSED)

    def write(self, first: int, rows: Rows) -> None:
        data, count = rows_as_bytes(first, rows, self._format.row_bytes)
        self._reserve((first + count) * self._format.stored_row_bytes)
        stored = self._encoder.encode(first, data) if self._encoder else data
        self._buffer.write(first * self._format.stored_row_bytes, stored)

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
        put = partial(self._sink.retries.run, partial(self._put_reason, reason))
        self._attempt("publish the reason of the failure", put)
        self._sink.forget(self)
        if close:
            self.close()

    def discard(self) -> None:
        self._sink.forget(self)
        self.close()

    def close(self) -> None:
        self._buffer.free()

    def _fail_to_begin(self, reason: str) -> None:
        """Fail after one attempt: a step waits for this, and the response contains the reason."""
        self._attempt("publish the reason of the failure", partial(self._put_reason, reason))
        self.discard()

    def _put_reason(self, reason: str) -> None:
        self._sink.client.put(self.handle + ERROR_KEY_SUFFIX, error_marker(reason), evictable=True)

    def _reserve(self, size: int) -> None:
        try:
            self._buffer.reserve(size)
        except BufferPoolFullError as error:
            reason = (
                f"it needs {error.wanted} more bytes, but of mooncake.local_buffer_size={error.size} "
                f"only {error.free} are free; increase it, or send fewer requests at a time"
            )
            raise SinkError(self.request_id, self.path, reason, NO_ROOM) from error

    def _publish(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Put the data before the manifest: a reader of the manifest must find all data.

        Raises MooncakeError, SinkError.
        """
        tokens = len(token_ids)
        if not tokens:
            raise self._error("there are no tokens, and Mooncake cannot store an empty object")
        layout = packed_layout(self._format, tokens)
        self._complete(layout, token_ids, self._encoder.scales(tokens) if self._encoder else None)
        has_checksum = self._sink.checksum != "none"
        metadata = metadata_of(
            self._format,
            self.request_id,
            tokens,
            num_prompt_tokens,
            has_checksum,
            None,
            self.placeholders,
            self.origin,
        )
        content = manifest(layout, metadata)
        if has_checksum:
            digest = Digest()
            for part in self._buffer.views(layout.size):
                digest.update(part)
            content, _ = digest.stamp(content)
        client, retries = self._sink.client, self._sink.retries
        retries.run(partial(client.put_parts, self.handle, self._buffer.parts(layout.size)))
        try:
            retries.run(partial(client.put, self.handle + MANIFEST_KEY_SUFFIX, content))
        except MooncakeError:
            self._attempt("remove data without a manifest", lambda: client.remove([self.handle]))
            raise
        self._attempt(
            "remove manifests of removed data", lambda: self._sink.published.tidy(self.handle)
        )

    def _complete(self, layout: PackedLayout, token_ids: TokenIds, scales: Scales | None) -> None:
        """Write the tail. It overwrites rows at positions after the last token."""
        self._reserve(layout.size)
        self._buffer.clear(layout.end(HIDDEN_STATES), layout.size)
        self._buffer.write(layout.offset(TOKEN_IDS), as_bytes(token_ids.astype("<i8")))
        if scales is not None:
            self._buffer.write(layout.offset(SCALES), as_bytes(scales.astype("<f4")))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except MooncakeError as error:
            problem = f"could not {what}: {error}"
            logger.error("request %r, %s: %s", self.request_id, self.path, problem)

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)


class MooncakeSink(Sink):
    """Publishes objects in one store.

    Args:
        options: options of the store.
        row_format: format of the rows of all requests.
        checksum: checksum of each object, or none.

    Raises:
        UserError: if the store cannot be used.
    """

    writes_side_by_side = True  # writes are copies in memory

    def __init__(
        self,
        options: MooncakeOptions,
        row_format: RowFormat,
        checksum: Literal["crc32c", "none"] = "crc32c",
    ) -> None:
        self.row_format = row_format
        self.checksum = checksum
        self.client = MooncakeClient(options, options.global_segment_size)
        self.buffer_pool = BufferPool(options.local_buffer_size)
        try:
            self.client.register(self.buffer_pool.address, self.buffer_pool.size)
        except MooncakeError as error:
            self.client.close()
            option, problem = f"{OPTION}.local_buffer_size", f"cannot be registered: {error}"
            remedy = "Reduce it, or let the server lock more memory (ulimit -l)."
            raise UserError(option, self.buffer_pool.size, problem, remedy) from error
        self.retries = Retries()
        self.published = Published(self.client)
        self._mutex = threading.Lock()
        self._files: dict[str, MooncakeFile] = {}
        self._closed = False

    def open(
        self,
        request_id: str,
        path: FilePath,
        expected_tokens: int = 0,
        arrived_ns: int | None = None,
        adapter: Adapter = NO_ADAPTER,
    ) -> MooncakeFile:
        handle = os.fspath(path)
        if (
            not handle
            or not handle.isascii()
            or not handle.isprintable()
            or set(handle) & {"/", ":"}
        ):
            reason = "the handle cannot be used: it is not a plain, printable name"
            raise SinkError(request_id, path, reason)
        file = MooncakeFile(self, request_id, path, adapter)
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
        """Free the handle of an ended file."""
        with self._mutex:
            if self._files.get(file.handle) is file:
                del self._files[file.handle]


class Retries:
    """Repeats puts that fail because a process with memory of the store has ended. Thread-safe.

    The master usually chooses another process for the next attempt. After RETRY_S without a
    successful put, puts are not repeated until one succeeds. This bounds the delay of a thread.
    """

    def __init__(self) -> None:
        self._failing_since: float | None = None

    def run(self, put: Callable[[], None]) -> None:
        """Raises MooncakeError."""
        since: float | None = None
        pause = 0.0
        while True:
            try:
                put()
            except MooncakeError as error:
                if not error.is_retryable:
                    self._failing_since = None
                    raise
                since = self._note_failure() if since is None else since
                if monotonic() - since >= RETRY_S:
                    raise
            else:
                self._failing_since = None
                return
            sleep(pause)  # the master signals no event
            pause = min(_LONGEST_PAUSE, 2 * pause or 0.01)

    def _note_failure(self) -> float:
        since = self._failing_since
        if since is None:
            since = self._failing_since = monotonic()
        return since


class Published:
    """Handles of published data, kept to remove their manifests.

    Consumers that do not know manifests leave them in the store.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._mutex = threading.Lock()
        self._handles: deque[str] = deque()

    def tidy(self, handle: str) -> None:
        """Record a handle, and remove manifests of some earlier handles without data.

        Raises MooncakeError; a later call tries again.
        """
        with self._mutex:
            some = [self._handles.popleft() for _ in range(min(_TIDIED, len(self._handles)))]
            self._handles.append(handle)
        kept = some
        try:
            there = self._client.exist(some) if some else []
            gone = [each for each, is_there in zip(some, there, strict=True) if not is_there]
            if gone:
                self._client.remove([each + MANIFEST_KEY_SUFFIX for each in gone])
            kept = [each for each in some if each not in gone]
        finally:
            with self._mutex:
                self._handles += kept
