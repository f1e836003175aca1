"""The file of one request, from its announcement to its one end: published, failed or discarded."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import vllm_ascend_hsx
from vllm_ascend_hsx.sinks.base import Rows, SinkError, SinkFile, TokenIds
from vllm_ascend_hsx.sinks.data_file import DataFile, as_bytes, write_at
from vllm_ascend_hsx.sinks.format import PRODUCER, FileLayout
from vllm_ascend_hsx.sinks.lock import HeldLock
from vllm_ascend_hsx.sinks.names import ERROR_SUFFIX, partial_name
from vllm_ascend_hsx.sinks.spans import Span, SpanSet, describe_missing
from vllm_ascend_hsx.sinks.storage import Storage
from vllm_ascend_hsx.sinks.system import describe

if TYPE_CHECKING:
    from vllm_ascend_hsx.sinks.file import FileSink
    from vllm_ascend_hsx.sinks.home import Home

logger = logging.getLogger(__name__)


class _State(Enum):
    OPEN = "open"
    ENDING = "being ended"
    COMMITTED = "committed"
    FAILED = "failed"
    DISCARDED = "discarded"


class RequestFile(SinkFile):
    """One file of a FileSink. Its hidden file is created, and its layout computed, when the first rows arrive."""

    def __init__(
        self,
        sink: FileSink,
        home: Home,
        request_id: str,
        path: Path,
        storage: Storage,
        relative: str,
        expected_tokens: int,
        lock: HeldLock | None,
        superseded: str | None,
    ) -> None:
        self.request_id = request_id
        self.path = path
        self.relative = relative
        self._sink = sink
        self._home = home
        self._storage = storage
        self._name = name = relative.rpartition("/")[2]
        self._expected_tokens = expected_tokens
        self._lock = lock
        self._superseded = superseded
        self._partial = partial_name(name, home.token)
        self._row_bytes = sink.row_format.row_bytes
        self._condition = threading.Condition()  # guards everything below
        self._state = _State.OPEN
        self._data: DataFile | None = None
        self._writers = 0
        self._written = SpanSet()
        self._write_error: str | None = None
        self._failure: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether nobody has begun to end it."""
        return self._state is _State.OPEN

    def write(self, first: int, rows: Rows) -> None:
        data = as_bytes(rows)
        count, rest = divmod(data.nbytes, self._row_bytes)
        if rest or first < 0:
            raise ValueError(f"{data.nbytes} bytes at position {first} are not rows of {self._row_bytes} bytes")
        rows_named = f"rows [{first}, {first + count})"
        file = self._begin_write()
        problem: str | None = f"writing {rows_named} was interrupted"
        try:
            file.write(first, data)
            problem = None
        except OSError as error:
            problem = describe(f"{rows_named} could not be written", error)
            raise self._error(problem) from error
        finally:
            self._end_write((first, first + count), problem)

    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        if token_ids.dtype != np.int64 or token_ids.ndim != 1:
            raise ValueError(f"token_ids is {token_ids.dtype} {list(token_ids.shape)}, not int64 [tokens]")
        if not 0 <= num_prompt_tokens <= len(token_ids):
            raise ValueError(f"num_prompt_tokens={num_prompt_tokens} is not in [0, {len(token_ids)}]")
        if not self._claim_end():
            raise self._error(f"it cannot be committed, {self._how_it_ended()}")
        try:
            self._publish(token_ids, num_prompt_tokens)
        except SinkError as error:
            self._end_failed(error.reason)
            raise
        except OSError as error:
            reason = describe("the file could not be published", error)
            self._end_failed(reason)
            raise self._error(reason) from error
        except BaseException as error:
            self._end_failed(f"the file could not be published: {error!r}")
            raise
        self._end(_State.COMMITTED)

    def fail(self, reason: str) -> None:
        if self._claim_end():
            self._end_failed(reason)

    def discard(self) -> None:
        if self._claim_end():
            try:
                self._drop_data()
            finally:
                self._end(_State.DISCARDED)

    def refuse(self, reason: str) -> None:
        """Instead of opening it: publish the reason. The response may leave before the scheduler has heard of the failure."""
        self._attempt("publish the reason of the failure", lambda: self._publish_reason(reason))
        if self._lock is not None:
            self._attempt("remove the lock", self._lock.remove)
        self._leave()

    # Writing

    def _begin_write(self) -> DataFile:
        with self._condition:
            if self._state is not _State.OPEN:
                raise self._error(f"no rows can be added, {self._how_it_ended()}")
            if self._data is None:
                try:
                    self._data = self._make_data_file()
                except OSError as error:
                    self._write_error = describe("the hidden file could not be created", error)
                    raise self._error(self._write_error) from error
            self._writers += 1
            return self._data

    def _make_data_file(self) -> DataFile:
        layout = FileLayout(self._sink.row_format, self.request_id)
        return DataFile(self._storage, self._partial, layout, self._sink.options, self._expected_tokens, self._home.filesystem)

    def _end_write(self, span: Span, problem: str | None) -> None:
        with self._condition:
            self._writers -= 1
            if problem is None:
                self._written.add(*span)
            else:
                self._write_error = problem
            if self._writers == 0:
                if self._state in (_State.FAILED, _State.DISCARDED):
                    self._close_data()
                self._condition.notify_all()

    # Ending

    def _claim_end(self) -> bool:
        """Whether the caller is the one who ends the file; if not, it has ended when this returns."""
        with self._condition:
            if self._state is _State.OPEN:
                self._state = _State.ENDING
                return True
            self._condition.wait_for(lambda: self._state is not _State.ENDING)
            return False

    def _publish(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        """Complete the hidden file and rename it. Nothing can go wrong once it can be seen under its name to stay."""
        with self._condition:
            self._condition.wait_for(lambda: self._writers == 0)
        tokens = len(token_ids)
        missing = self._written.missing(tokens)
        if missing:
            raise self._error(self._write_error or describe_missing(missing, tokens))
        if self._data is None:
            self._data = self._make_data_file()
        self._data.complete(token_ids, num_prompt_tokens)
        self._storage.rename(self._partial, self._name)
        if self._sink.options.durability == "fdatasync":
            try:
                self._storage.sync()
            except BaseException:
                self._storage.unlink(self._name)  # what may not survive must not be seen
                raise

    def _end_failed(self, reason: str) -> None:
        self._failure = reason
        try:
            self._drop_data()  # first: its space may be what the error file needs
            self._attempt("publish the reason of the failure", lambda: self._publish_reason(reason))
        finally:
            self._end(_State.FAILED)

    def _drop_data(self) -> None:
        with self._condition:
            if self._data is not None:
                self._attempt("remove the hidden file", lambda: self._storage.unlink(self._partial))
            if self._writers == 0:  # else the last writer closes it: this call must not wait for a slow disk
                self._attempt("close the hidden file", self._close_data)

    def _publish_reason(self, reason: str) -> None:
        text = json.dumps(
            {
                "request_id": self.request_id,
                "reason": reason,
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "producer": PRODUCER,
                "producer_version": vllm_ascend_hsx.__version__,
            }
        )
        name = self._name + ERROR_SUFFIX
        hidden = partial_name(name, self._home.token)
        fd = self._storage.create(hidden)
        try:
            try:
                write_at(fd, memoryview(text.encode("ascii")), 0)
            finally:
                os.close(fd)
            self._storage.rename(hidden, name)
        except BaseException:
            self._storage.unlink(hidden)
            raise

    def _end(self, state: _State) -> None:
        """What every end has in common; nothing here can change the outcome any more, so problems are only logged."""
        try:
            if self._lock is not None:  # first: somebody may be asleep on it
                release = self._lock.remove if state is _State.DISCARDED else self._lock.release
                self._attempt("release the lock", release)
            if self._superseded is not None:
                superseded = self._superseded
                self._attempt("remove the earlier file of this name", lambda: self._storage.unlink(superseded))
        finally:
            self._leave()
            with self._condition:
                self._state = state
                if self._writers == 0:
                    self._attempt("close the hidden file", self._close_data)
                self._condition.notify_all()
            self._sink.forget(self)

    def _leave(self) -> None:
        """The directory is needed no more: a writer that is still in flight has the hidden file open."""
        self._attempt("close the directory", lambda: self._home.leave(self._storage))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._home.tidy = False
            logger.error("request %r, %s: %s", self.request_id, self.path, describe(f"could not {what}", error))

    def _close_data(self) -> None:
        if self._data is not None:
            self._data.close()

    # Words

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)

    def _how_it_ended(self) -> str:
        because = f" ({self._failure})" if self._failure else ""
        return f"the file is {self._state.value} already{because}"
