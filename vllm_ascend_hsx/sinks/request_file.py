"""One request in a storage directory: its rows, and what each of its ends leaves there."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.files import describe, write_at
from vllm_ascend_hsx.protocol.format import PRODUCER
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX
from vllm_ascend_hsx.protocol.rows import RowFormat, Rows, TokenIds
from vllm_ascend_hsx.sinks.base import SinkError, SinkFile
from vllm_ascend_hsx.sinks.data_file import DataFile, rows_as_bytes
from vllm_ascend_hsx.sinks.encoder import encoder_for
from vllm_ascend_hsx.sinks.session import Session
from vllm_ascend_hsx.sinks.storage import Storage

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """What a file needs of the sink that it belongs to; see DirectorySink."""

    row_format: RowFormat
    keeps_locks: bool

    def make_data(self, file: RequestFile) -> DataFile: ...
    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None: ...
    def follow(self, file: RequestFile) -> RequestFile | None: ...
    def move(self, file: RequestFile, successor: RequestFile) -> None: ...
    def forget(self, file: RequestFile) -> None: ...
    def leave(self, file: RequestFile) -> None: ...


class RequestFile(SinkFile):
    """One request of a DirectorySink. Its hidden file is made when the first rows arrive.

    Args:
        sink: that it belongs to.
        session: the sink's stay in the directory.
        request_id, path: of the request.
        storage: the folder that the file is in.
        relative: `path` relative to the directory.
        expected_tokens, may_grow: how many rows there will be at least, and whether there may be more.
        gid: group of its files; see Storage.group_in.
        lock: held until the end, or None.
    """

    def __init__(
        self,
        sink: Owner,
        session: Session,
        request_id: str,
        path: Path,
        storage: Storage,
        relative: str,
        expected_tokens: int,
        may_grow: bool,
        gid: int,
        lock: HeldLock | None,
    ) -> None:
        self.request_id = request_id
        self.path = path
        self.relative = relative
        self.name = relative.rpartition("/")[2]
        self.session = session
        self.storage = storage
        self.gid = gid
        self.expected_tokens = expected_tokens
        self.may_grow = may_grow
        self.remove_previous: Callable[[], None] | None = None
        self.predecessor: RequestFile | None = None  # this request in the folder that its path led to before
        self._sink = sink
        self._lock = lock
        self._row_bytes = sink.row_format.row_bytes
        self._encoder = encoder_for(sink.row_format)
        self._mutex = threading.Lock()  # guards the next two
        self._data: DataFile | None = None
        self._withdrawn = False
        self._successor: RequestFile | None = None  # this request in the folder that its path leads to now

    def write(self, first: int, rows: Rows) -> None:
        data, count = rows_as_bytes(first, rows, self._row_bytes)
        file = self._made_data()
        try:
            file.write(first, self._encoder.encode(first, data))
        except OSError as error:
            raise self._error(describe(f"rows [{first}, {first + count}) could not be written", error)) from error

    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        try:
            data = self._made_data()
            data.complete(token_ids, num_prompt_tokens, self._encoder.scales(len(token_ids)))
            self._sink.publish(self, data, len(token_ids))
            self._follow_directory()
        except SinkError as error:
            self.fail(error.reason)
            raise
        except OSError as error:
            reason = describe("the file could not be published", error)
            self.fail(reason)
            raise self._error(reason) from error
        self._end(lock_stays=self._sink.keeps_locks)
        self.close()

    def fail(self, reason: str, close: bool = True) -> None:
        self._withdraw()
        if close:
            self._attempt("close its data", self._close_data)  # first: the reason may need its space
        self._attempt("publish the reason of the failure", lambda: self._write_reason(reason))
        try:
            successor = self._successor or self._sink.follow(self)
        except SinkError as error:
            logger.error("%s", error)
        else:
            if successor is not None:
                successor.fail(reason)
        self._end(lock_stays=True)
        if close:
            self.close()

    def discard(self) -> None:
        self._withdraw()
        self._end(lock_stays=False)
        self.close()

    def close(self) -> None:
        self._attempt("close its data", self._close_data)
        self._attempt("close the directory", lambda: self.session.leave(self.storage))
        self._sink.leave(self)

    def refuse(self, reason: str) -> None:
        """Publish the reason instead of opening the file.

        The response may leave before the scheduler knows of the failure.
        """
        self._attempt("publish the reason of the failure", lambda: self._write_reason(reason))
        if self._lock is not None:
            self._attempt("remove the lock", self._lock.remove)
        self._attempt("close the directory", lambda: self.session.leave(self.storage))

    def _made_data(self) -> DataFile:
        """Return its hidden file, made for the first rows. Raises SinkError: it cannot be, or `fail` came first."""
        with self._mutex:
            if self._withdrawn:
                raise self._error("the file has failed")
            if self._data is None:
                try:
                    self._data = self._sink.make_data(self)
                except OSError as error:
                    raise self._error(describe("the file of its rows could not be created", error)) from error
            return self._data

    def _withdraw(self) -> None:
        with self._mutex:
            self._withdrawn = True
            if self._data is not None:
                self._attempt("remove its rows", self._data.withdraw)

    def _close_data(self) -> None:
        if self._data is not None:
            self._data.close()

    def _follow_directory(self) -> None:
        """Have what was published be where the path leads now. Raises SinkError."""
        self._successor = self._sink.follow(self)
        if self._successor is not None:
            try:
                self._sink.move(self, self._successor)
            except OSError as error:
                raise self._error(describe("the storage directory was replaced, and its rows cannot follow", error)) from error
            self._successor._end(lock_stays=self._sink.keeps_locks)
            self._successor.close()

    def _write_reason(self, reason: str) -> None:
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
        workspace, hidden = self.session.workspace, self.session.new_name(name)
        fd = workspace.create(hidden, self.gid)
        try:
            try:
                write_at(fd, memoryview(text.encode("ascii")), 0)
            except OSError as error:
                # A full disk has room for a name: an empty file says that the request failed.
                logger.error("%s", describe(f"{self.path}{ERROR_SUFFIX} stays empty", error))
                os.ftruncate(fd, 0)
            finally:
                os.close(fd)
            workspace.move(hidden, self.storage, name)
        except BaseException:
            workspace.unlink(hidden)
            raise

    def _end(self, lock_stays: bool) -> None:
        """What every end has in common; nothing here can change the outcome any more, so problems are only logged."""
        self._sink.forget(self)  # first: a free lock lets the next request open the name
        if self._lock is not None:
            self._attempt("release the lock", self._lock.release if lock_stays else self._lock.remove)
        if self.remove_previous is not None:
            self._attempt("remove the earlier file of this name", self.remove_previous)

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.session.tidy = False
            logger.error("request %r, %s: %s", self.request_id, self.path, describe(f"could not {what}", error))

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)
