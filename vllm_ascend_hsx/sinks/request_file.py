"""One request in a storage directory: write the rows, then publish, fail or discard the file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Protocol

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.files import OnError, describe, write_at
from vllm_ascend_hsx.protocol.format import PRODUCER, FileLayout
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, partial_name
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat, Rows, TokenIds
from vllm_ascend_hsx.sinks.base import FilePath, SinkError, SinkFile
from vllm_ascend_hsx.sinks.data_file import DataFile, RowSource, rows_as_bytes
from vllm_ascend_hsx.sinks.directory import Session
from vllm_ascend_hsx.sinks.encoder import encoder_for
from vllm_ascend_hsx.sinks.storage import Storage

logger = logging.getLogger(__name__)

MOVED = (
    "the storage directory or the folder of the file was moved or replaced before all rows were "
    "written; send the request again"
)


class Owner(Protocol):
    """The part of a sink that a file uses; see DirectorySink."""

    row_format: RowFormat
    keeps_locks: bool

    def make_data(self, file: RequestFile) -> DataFile: ...
    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None: ...
    def forget(self, file: RequestFile) -> None: ...
    def release(self, session: Session) -> None: ...


class RequestFile(SinkFile):
    """One request of a DirectorySink. The hidden file is created when the first rows arrive.

    Args:
        session, storage: the sink's session, and the folder of the file.
        path, relative: path of the file, and the same relative to the directory.
        expected_tokens: as in Sink.open.
        arrived_ns: arrival time of the request, for the metadata; None if unknown.

    Attributes:
        gid: group of the files; see Storage.group_in.
        adapter: the adapter that computes the rows.
        lock: held until the file ends; None without locks.
    """

    def __init__(
        self,
        sink: Owner,
        session: Session,
        storage: Storage,
        request_id: str,
        path: FilePath,
        relative: str,
        expected_tokens: int = 0,
        arrived_ns: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.path = path
        self.relative = relative
        self.name = relative.rpartition("/")[2]
        self.session = session
        self.storage = storage
        self.expected_tokens = expected_tokens
        self._arrived_ns = arrived_ns
        self.gid = -1
        self.adapter: Adapter = NO_ADAPTER
        self.lock: HeldLock | None = None
        self._sink = sink
        self._row_bytes = sink.row_format.row_bytes
        self._encoder = encoder_for(sink.row_format)
        self._data: DataFile | None = None  # created by the first write; that write runs alone

    @property
    def layout(self) -> FileLayout:
        """Layout of the request's file."""
        row_format = self._sink.row_format
        if self.adapter != row_format.adapter:
            row_format = replace(row_format, adapter=self.adapter)
        return FileLayout(row_format, self.request_id, self._arrived_ns, self.placeholders)

    def write(self, first: int, rows: Rows) -> None:
        data, count = rows_as_bytes(first, rows, self._row_bytes)
        file = self._made_data()
        try:
            file.write(first, self._encoder.encode(first, data) if self._encoder else data)
        except OSError as error:
            problem = f"rows [{first}, {first + count}) could not be written"
            raise self._error(describe(problem, error)) from error

    def copy(self, source: RowSource, num_rows: int) -> None:
        file = self._made_data()
        try:
            if self._encoder:
                assert source.scales is not None
                self._encoder.keep(0, source.scales[:num_rows])
            file.copy(source, num_rows)
        except OSError as error:
            problem = (
                f"rows [0, {num_rows}) could not be copied from the file of an earlier request"
            )
            raise self._error(describe(problem, error)) from error

    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        try:
            data = self._made_data()
            scales = self._encoder.scales(len(token_ids)) if self._encoder else None
            data.complete(token_ids, num_prompt_tokens, scales, self.origin)
            if not self.session.is_at_its_path(self.relative.rpartition("/")[0], self.storage):
                raise self._error(MOVED)
            self._sink.publish(self, data, len(token_ids))
            self.stored_bytes = data.size
        except SinkError as error:
            self.fail(error.reason)
            raise
        except OSError as error:
            reason = self._describe("the file could not be published", error)
            self.fail(reason)
            raise self._error(reason) from error
        self._end(keeps_lock=self._sink.keeps_locks)
        self.close()

    def fail(self, reason: str, close: bool = True) -> None:
        self._withdraw()
        if close:
            self._attempt("close its file", self._close_data)  # first: the reason needs space
        self._leave_reason(reason)
        self._end(keeps_lock=True)
        if close:
            self.close()

    def discard(self) -> None:
        self._withdraw()
        self._end(keeps_lock=False)
        self.close()

    def close(self) -> None:
        self._attempt("close its file", self._close_data)
        self._attempt("close its folder", lambda: self.session.leave(self.storage))
        self._sink.release(self.session)

    def refuse(self, reason: str) -> None:
        """Publish the reason instead of opening the file."""
        self._leave_reason(reason)
        if self.lock is not None:
            self._attempt("remove the lock", self.lock.remove)
        self._attempt("close its folder", lambda: self.session.leave(self.storage))

    def withdraw(self) -> None:
        """Release lock and folder instead of opening the file. Change nothing at the path."""
        if self.lock is not None:
            self._attempt(
                "release the lock",
                self.lock.release if self._sink.keeps_locks else self.lock.remove,
            )
        self._attempt("close its folder", lambda: self.session.leave(self.storage))

    def _made_data(self) -> DataFile:
        """Return the hidden file. The first call creates it. Raises SinkError if that fails."""
        if self._data is None:
            try:
                self._data = self._sink.make_data(self)
            except OSError as error:
                reason = self._describe("the file for its rows could not be created", error)
                raise self._error(reason) from error
        return self._data

    def _withdraw(self) -> None:
        source, self.source = self.source, None
        if source is not None:
            source.release()
        if self._data is not None:
            self._attempt("remove its file", self._data.withdraw)

    def _close_data(self) -> None:
        if self._data is not None:
            with OnError(self._data.close):
                self._data.withdraw()  # the first write may have created it after a failure
            self._data.close()

    def _leave_reason(self, reason: str) -> None:
        self._attempt("close spare descriptors", self.session.spares.give_up)
        self._attempt("publish the reason of the failure", lambda: self._write_reason(reason))
        self._attempt("open spare descriptors", self.session.spares.refill)

    def _write_reason(self, reason: str) -> None:
        if self.storage.has_name(self.name):  # a reason would hide the rows of another request
            return
        text = json.dumps(
            {
                "request_id": self.request_id,
                "reason": reason,
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "producer": PRODUCER,
                "producer_version": __version__,
            }
        )
        name = self.name + ERROR_SUFFIX
        place = self.session.workspace, self.session.new_name(name), self.gid
        if not self.session.has_workspace:
            place = self.storage, partial_name(name, self.session.token), -1
        with place[0].new_file(*place[1:], self.storage, name) as fd:
            try:
                write_at(fd, memoryview(text.encode("ascii")), 0)
            except OSError as error:
                # A full disk has room for a name. An empty file means that the request failed.
                logger.error("%s", describe(f"{self.path}{ERROR_SUFFIX} has no reason", error))
                os.ftruncate(fd, 0)

    def _end(self, keeps_lock: bool) -> None:
        """Free name and lock. The outcome is final, so errors are only logged."""
        self._sink.forget(self)  # first: a free lock lets the next request open the name
        if self.lock is not None:
            self._attempt("release the lock", self.lock.release if keeps_lock else self.lock.remove)

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.session.tidy = False
            problem = describe(f"could not {what}", error)
            logger.error("request %r, %s: %s", self.request_id, self.path, problem)

    def _describe(self, problem: str, error: OSError) -> str:
        if not self.session.has_workspace:
            problem += ", because the hidden directory of this server was removed"
        return describe(problem, error)

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)
