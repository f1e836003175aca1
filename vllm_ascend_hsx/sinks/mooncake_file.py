"""The object of one request in a Mooncake store, from its announcement to its one end: published, failed or discarded."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_hsx.sinks.arena import ArenaFullError, Gathering
from vllm_ascend_hsx.sinks.base import Rows, SinkError, TokenIds
from vllm_ascend_hsx.sinks.checksum import Digest
from vllm_ascend_hsx.sinks.data_file import as_bytes
from vllm_ascend_hsx.sinks.encoder import Scales
from vllm_ascend_hsx.sinks.format import HIDDEN_STATES, SCALES, TOKEN_IDS, metadata_of
from vllm_ascend_hsx.sinks.mooncake_client import MooncakeError
from vllm_ascend_hsx.sinks.one_end import OneEndFile, State
from vllm_ascend_hsx.sinks.packed import (
    ERROR_KEY_SUFFIX,
    MANIFEST_KEY_SUFFIX,
    PackedLayout,
    error_marker,
    keys_of,
    manifest,
    packed_layout,
)
from vllm_ascend_hsx.sinks.spans import Span, describe_missing

if TYPE_CHECKING:
    from vllm_ascend_hsx.sinks.mooncake import MooncakeSink

logger = logging.getLogger(__name__)

NO_ROOM = "ENOSPC"  # kind of a failure for want of memory, as of one for want of disk


class MooncakeFile(OneEndFile):
    """One object of a MooncakeSink, under the handle that stands where others have a path. Nothing of it is in the store before it ends."""

    def __init__(self, sink: MooncakeSink, request_id: str, path: Path) -> None:
        super().__init__(request_id, path, sink.row_format)
        self.handle = os.fspath(path)
        self._sink = sink
        self._stored_row_bytes = sink.row_format.stored_row_bytes
        self._gathering = Gathering(sink.arena)
        self._write_error: SinkError | None = None

    def begin(self, expected_tokens: int) -> None:
        """Remove what an earlier request left under the handle, and take memory for the tokens that will come.

        Raises:
            SinkError: one of the two cannot be done; the file has failed.
        """
        try:
            self._sink.client.remove(keys_of(self.handle))
            self._reserve(packed_layout(self._sink.row_format, expected_tokens).size)
        except MooncakeError as error:
            raise self._failed("what an earlier request left under its handle could not be removed", error) from error
        except SinkError as error:
            self.fail(error.reason)
            raise

    def write(self, first: int, rows: Rows) -> None:
        data, count = self._rows(first, rows)
        self._begin_write()
        written = False
        try:
            self._reserve((first + count) * self._stored_row_bytes)
            self._gathering.write(first * self._stored_row_bytes, self._encoder.encode(first, data))
            written = True
        except SinkError as error:
            self._write_error = error
            raise
        finally:
            self._end_write((first, first + count) if written else (0, 0))

    # Writing

    def _begin_write(self) -> None:
        with self._condition:
            self._require_open()
            self._writers += 1

    def _end_write(self, span: Span) -> None:
        with self._condition:
            self._writers -= 1
            self._written.add(*span)
            if self._writers == 0:
                if self._state in (State.FAILED, State.DISCARDED):
                    self._gathering.free()
                self._condition.notify_all()

    def _reserve(self, size: int) -> None:
        try:
            self._gathering.reserve(size)
        except ArenaFullError as error:
            reason = (
                f"{error.wanted} bytes more are wanted to put its rows together, and of mooncake.local_buffer_size={error.size} "
                f"{error.free} are free; give more, or send fewer requests at a time"
            )
            raise SinkError(self.request_id, self.path, reason, NO_ROOM) from error

    # Ending

    def _publish(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Put the data, then the manifest: who sees the manifest finds the data, all of it."""
        self._wait_for_writers()
        tokens = len(token_ids)
        missing = self._written.missing(tokens)
        if missing:
            raise self._write_error or self._error(describe_missing(missing, tokens))
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
        """Write what stands behind the rows, over rows that are not wanted."""
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

    def _why_not_published(self, error: OSError) -> str:
        return f"it could not be put into the store: {error}"

    def _publish_reason(self, reason: str) -> None:
        marker = self.handle + ERROR_KEY_SUFFIX
        self._attempt("publish the reason of the failure", lambda: self._sink.client.put(marker, error_marker(reason), may_go=True))

    def _end(self, state: State) -> None:
        with self._condition:
            self._state = state
            self._condition.notify_all()
        self._drop_rows()
        self._sink.forget(self)

    def _drop_rows(self) -> None:
        """Give the memory back; the last writer in flight does, if there is one."""
        with self._condition:
            if self._writers == 0:
                self._gathering.free()

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except MooncakeError as error:
            logger.error("request %r, %s: could not %s: %s", self.request_id, self.path, what, error)

    def _failed(self, what: str, error: MooncakeError) -> SinkError:
        """Fail with a reason; the error to raise."""
        reason = f"{what}: {error}"
        self.fail(reason)
        return self._error(reason)
