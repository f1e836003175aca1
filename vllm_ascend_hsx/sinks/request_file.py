"""One request in a storage directory, from its announcement to its one end: published, failed or discarded."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.files import describe, write_at
from vllm_ascend_hsx.protocol.format import PRODUCER
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX, partial_name
from vllm_ascend_hsx.protocol.rows import RowFormat, Rows, TokenIds
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.sinks.data_file import RequestData
from vllm_ascend_hsx.sinks.home import Home
from vllm_ascend_hsx.sinks.one_end import OneEndFile, State
from vllm_ascend_hsx.sinks.spans import Interval, describe_missing
from vllm_ascend_hsx.sinks.storage import Storage

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """What a file needs of the sink that it belongs to; see DirectorySink."""

    row_format: RowFormat
    keeps_locks: bool

    def make_data(self, file: RequestFile) -> RequestData: ...
    def follow(self, file: RequestFile) -> RequestFile | None: ...
    def move(self, file: RequestFile, successor: RequestFile) -> None: ...
    def forget(self, file: RequestFile) -> None: ...


class RequestFile(OneEndFile):
    """One request of a DirectorySink. The place of its data is made when the first rows arrive.

    Args:
        sink: that it belongs to.
        home: the directory, and the sink's life in it.
        request_id, path: of the request.
        storage: the folder that the file is in.
        relative: what stands in `path` behind the directory.
        expected_tokens, may_grow: how many rows there will be at least, and whether there may be more.
        lock: held until the end, or None.
    """

    def __init__(
        self,
        sink: Owner,
        home: Home,
        request_id: str,
        path: Path,
        storage: Storage,
        relative: str,
        expected_tokens: int,
        may_grow: bool,
        lock: HeldLock | None,
    ) -> None:
        super().__init__(request_id, path, sink.row_format)
        self.relative = relative
        self.name = relative.rpartition("/")[2]
        self.home = home
        self.storage = storage
        self.expected_tokens = expected_tokens
        self.may_grow = may_grow
        self.superseded: Callable[[], None] | None = None
        self.predecessor: RequestFile | None = None  # this request in the folder that its path led to before
        self._sink = sink
        self._lock = lock
        self._data: RequestData | None = None  # both guarded by _condition
        self._write_error: str | None = None
        self._successor: RequestFile | None = None  # this request in the folder that its path leads to now

    def write(self, first: int, rows: Rows) -> None:
        data, count = self._rows(first, rows)
        rows_named = f"rows [{first}, {first + count})"
        file = self._begin_write()
        problem: str | None = f"writing {rows_named} was interrupted"
        try:
            file.write(first, self._encoder.encode(first, data))
            problem = None
        except OSError as error:
            problem = describe(f"{rows_named} could not be written", error)
            raise self._error(problem) from error
        finally:
            self._end_write((first, first + count), problem)

    def refuse(self, reason: str) -> None:
        """Instead of opening it: publish the reason. The response may leave before the scheduler has heard of the failure."""
        self._attempt("publish the reason of the failure", lambda: self._write_reason(reason))
        if self._lock is not None:
            self._attempt("remove the lock", self._lock.remove)
        else:
            hidden = partial_name(self.name + LOCK_SUFFIX, self.home.token)
            self._attempt("remove a lock's hidden file", lambda: self.storage.unlink(hidden))  # if that was what went wrong
        self._leave()

    # Writing

    def _begin_write(self) -> RequestData:
        with self._condition:
            self._require_open()
            if self._data is None:
                try:
                    self._data = self._sink.make_data(self)
                except OSError as error:
                    self._write_error = describe("the file of its rows could not be created", error)
                    raise self._error(self._write_error) from error
            self._writers += 1
            return self._data

    def _end_write(self, span: Interval, problem: str | None) -> None:
        with self._condition:
            self._writers -= 1
            if problem is None:
                self._written.add(*span)
            else:
                self._write_error = problem
            if self._writers == 0:
                if self._state in (State.FAILED, State.DISCARDED):
                    self._close_data()
                self._condition.notify_all()

    # Ending

    def _publish(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Complete the data and show them. Nothing can go wrong once they can be seen under their name to stay."""
        self._wait_for_writers()
        tokens = len(token_ids)
        missing = self._written.missing(tokens)
        if missing:
            raise self._error(self._write_error or describe_missing(missing, tokens))
        if self._data is None:
            self._data = self._sink.make_data(self)
        self._data.complete(token_ids, num_prompt_tokens, self._encoder.scales(tokens))
        self._data.publish()
        self._successor = self._sink.follow(self)
        if self._successor is not None:
            try:
                self._sink.move(self, self._successor)
            except OSError as error:
                raise self._error(describe("the storage directory was replaced, and its rows cannot follow", error)) from error
            if self._successor._claim_end():
                self._successor._end(State.COMMITTED)

    def _why_not_published(self, error: OSError) -> str:
        return describe("the file could not be published", error)

    def _drop_rows(self) -> None:
        with self._condition:
            if self._data is not None:
                self._attempt("remove its rows", self._data.withdraw)
            if self._writers == 0:  # else the last writer closes it: this call must not wait for a slow disk
                self._attempt("close its data", self._close_data)

    def _publish_reason(self, reason: str) -> None:
        self._attempt("publish the reason of the failure", lambda: self._write_reason(reason))
        try:
            successor = self._successor or self._sink.follow(self)
        except SinkError as error:
            logger.error("%s", error)
            return
        if successor is not None:
            successor.fail(reason)

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
        hidden = partial_name(name, self.home.token)
        fd = self.storage.create(hidden)
        try:
            try:
                write_at(fd, memoryview(text.encode("ascii")), 0)
            finally:
                os.close(fd)
            self.storage.rename(hidden, name)
        except BaseException:
            self.storage.unlink(hidden)
            raise

    def _end(self, state: State) -> None:
        """What every end has in common; nothing here can change the outcome any more, so problems are only logged."""
        try:
            if self._lock is not None:  # first: somebody may be asleep on it
                is_left = state is State.FAILED or (state is State.COMMITTED and self._sink.keeps_locks)
                release = self._lock.release if is_left else self._lock.remove
                self._attempt("release the lock", release)
            if self.superseded is not None:
                self._attempt("remove the earlier file of this name", self.superseded)
        finally:
            self._leave()
            with self._condition:
                self._state = state
                if self._writers == 0:
                    self._attempt("close its data", self._close_data)
                self._condition.notify_all()
            self._sink.forget(self)

    def _leave(self) -> None:
        """The directory is needed no more: a writer that is still in flight has the hidden file open."""
        self._attempt("close the directory", lambda: self.home.leave(self.storage))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.home.tidy = False
            logger.error("request %r, %s: %s", self.request_id, self.path, describe(f"could not {what}", error))

    def _close_data(self) -> None:
        if self._data is not None:
            self._data.close()
