"""A sink that publishes one safetensors file per request: rows go to their final offset in a hidden file, then it is renamed."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from functools import cached_property
from pathlib import Path

import numpy as np

import vllm_ascend_hsx
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, RowFormat, Rows, Sink, SinkError, SinkFile, TokenIds
from vllm_ascend_hsx.sinks.directory import check_directory, open_directory
from vllm_ascend_hsx.sinks.format import PRODUCER, FileLayout
from vllm_ascend_hsx.sinks.lock import HeldLock, LockHeldError
from vllm_ascend_hsx.sinks.names import ERROR_SUFFIX, LOCK_SUFFIX, partial_name, refusal
from vllm_ascend_hsx.sinks.spans import Span, SpanSet

logger = logging.getLogger(__name__)

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SPANS_NAMED = 8  # of a file's missing spans; the rest is counted


class FileSink(Sink):
    """Publishes files in one directory.

    Everything is done relative to the directory's descriptor and follows no symbolic link, so nothing outside it is touched, whatever
    a request is called and whatever stands in the directory.

    Args:
        directory: where files appear; created if it does not exist.
        row_format: what a row looks like; the same for all files of a sink.
        file_mode: permissions of the data and error files, whatever the umask. Whoever may read a file may also lock it.
        use_lock: hold `<path>.lock` until a file has ended. Without it readers must wait for the file to appear.

    Raises:
        StorageDirectoryError: files could not be published in the directory.
    """

    def __init__(self, directory: Path, row_format: RowFormat, *, file_mode: int = 0o640, use_lock: bool = True) -> None:
        check_directory(directory, use_lock=use_lock)
        self.row_format = row_format
        self.dir_fd = open_directory(directory)
        self.file_mode = file_mode
        # Hidden names of this sink's own: two servers in one directory never meet in them.
        self.token = secrets.token_hex(4)
        self._directory = os.path.abspath(directory)
        self._parents = (os.fspath(directory), self._directory)
        self._use_lock = use_lock
        # speculators opens the lock for writing: let those who may read the data do so.
        self._lock_mode = file_mode | (file_mode & 0o444) >> 1
        self._mutex = threading.Lock()
        self._files: dict[str, FileSinkFile] = {}
        self._closed = False

    def open(self, request_id: str, path: Path) -> FileSinkFile:
        parent, _, name = os.fspath(path).rpartition("/")
        if parent not in self._parents:
            raise SinkError(request_id, path, f"it is not directly inside {self._directory}")
        problem = refusal(name)
        if problem is not None:
            raise SinkError(request_id, path, f"the name cannot be used: {problem}")
        with self._mutex:
            if self._closed:
                raise SinkError(request_id, path, "the sink is closed")
            if not self._use_lock and name in self._files:
                raise SinkError(request_id, path, "another request is writing this file")
            lock = None
            try:
                if self._use_lock:
                    lock = HeldLock.acquire(self.dir_fd, name + LOCK_SUFFIX, self._lock_mode)
                superseded = self._set_aside(name)
            except LockHeldError:
                raise SinkError(request_id, path, "another request or server is writing this file") from None
            except OSError as error:
                reason = _describe("it cannot be opened", error)
                FileSinkFile(self, request_id, path, name, lock, None).refuse(reason)
                raise SinkError(request_id, path, reason) from error
            file = FileSinkFile(self, request_id, path, name, lock, superseded)
            self._files[name] = file
            return file

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            files = list(self._files.values())
        for file in files:
            file.fail(SERVER_STOPPED)
        os.close(self.dir_fd)

    def forget(self, file: FileSinkFile) -> None:
        """Called by a file that has ended. Its name may already belong to the next one: the lock is free."""
        with self._mutex:
            if self._files.get(file.name) is file:
                del self._files[file.name]

    def _set_aside(self, name: str) -> str | None:
        """Take what an earlier request of this name left out of sight; returns the hidden name of its data, if there was any.

        Were it left in place, a server that dies now would leave the earlier request's rows as the answer to this one.
        """
        with suppress(FileNotFoundError):
            os.unlink(name + ERROR_SUFFIX, dir_fd=self.dir_fd)
        try:
            earlier = os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(earlier.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        hidden = partial_name(f"{name}.superseded", self.token)
        os.rename(name, hidden, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)
        return hidden


class _State(Enum):
    OPEN = "open"
    ENDING = "being ended"
    COMMITTED = "committed"
    FAILED = "failed"
    DISCARDED = "discarded"


class FileSinkFile(SinkFile):
    """One file of a FileSink. Its hidden file is created, and its layout computed, when the first rows arrive."""

    def __init__(self, sink: FileSink, request_id: str, path: Path, name: str, lock: HeldLock | None, superseded: str | None) -> None:
        self.request_id = request_id
        self.path = path
        self.name = name
        self._sink = sink
        self._lock = lock
        self._superseded = superseded
        self._partial = partial_name(name, sink.token)
        self._row_bytes = sink.row_format.row_bytes
        self._condition = threading.Condition()  # guards everything below
        self._state = _State.OPEN
        self._fd = -1
        self._hidden = False  # whether the hidden file exists
        self._writers = 0
        self._written = SpanSet()
        self._write_error: str | None = None
        self._failure: str | None = None

    @cached_property
    def _layout(self) -> FileLayout:
        return FileLayout(self._sink.row_format, self.request_id)

    def write(self, first: int, rows: Rows) -> None:
        data = _as_bytes(rows)
        count, rest = divmod(data.nbytes, self._row_bytes)
        if rest or first < 0:
            raise ValueError(f"{data.nbytes} bytes at position {first} are not rows of {self._row_bytes} bytes")
        rows_named = f"rows [{first}, {first + count})"
        fd = self._begin_write()
        problem: str | None = f"writing {rows_named} was interrupted"
        try:
            _write_at(fd, data, self._layout.row_offset(first))
            problem = None
        except OSError as error:
            problem = _describe(f"{rows_named} could not be written", error)
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
            reason = _describe("the file could not be published", error)
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

    # Writing

    def _begin_write(self) -> int:
        with self._condition:
            if self._state is not _State.OPEN:
                raise self._error(f"no rows can be added, {self._how_it_ended()}")
            if self._fd < 0:
                try:
                    self._fd = self._create(self._partial)
                except OSError as error:
                    self._write_error = _describe("the hidden file could not be created", error)
                    raise self._error(self._write_error) from error
                self._hidden = True
            self._writers += 1
            return self._fd

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
        """Complete the hidden file and rename it. Nothing can go wrong after the rename, which is the last thing done."""
        with self._condition:
            self._condition.wait_for(lambda: self._writers == 0)
        tokens = len(token_ids)
        missing = self._written.missing(tokens)
        if missing:
            raise self._error(self._write_error or _describe_missing(missing, tokens))
        if self._fd < 0:
            self._fd = self._create(self._partial)
            self._hidden = True
        ids = np.ascontiguousarray(token_ids, dtype="<i8")
        _write_at(self._fd, _as_bytes(ids), self._layout.row_offset(tokens))
        _write_at(self._fd, memoryview(self._layout.header(tokens, num_prompt_tokens)), 0)
        os.ftruncate(self._fd, self._layout.file_size(tokens))
        self._close_data()  # before the rename: a network filesystem may report a failed write only now
        self._rename(self._partial, self.name)

    def _end_failed(self, reason: str) -> None:
        self._failure = reason
        try:
            self._drop_data()  # first: its space may be what the error file needs
            self._attempt("publish the reason of the failure", lambda: self._publish_reason(reason))
        finally:
            self._end(_State.FAILED)

    def _drop_data(self) -> None:
        with self._condition:
            if self._hidden:
                self._attempt("remove the hidden file", lambda: self._unlink(self._partial))
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
        name = self.name + ERROR_SUFFIX
        hidden = partial_name(name, self._sink.token)
        fd = self._create(hidden)
        try:
            try:
                _write_at(fd, memoryview(text.encode("ascii")), 0)
            finally:
                os.close(fd)
            self._rename(hidden, name)
        except BaseException:
            self._unlink(hidden)
            raise

    def _end(self, state: _State) -> None:
        """What every end has in common; nothing here can change the outcome any more, so problems are only logged."""
        try:
            if self._superseded is not None:
                superseded = self._superseded
                self._attempt("remove the earlier file of this name", lambda: self._unlink(superseded))
            if self._lock is not None:
                release = self._lock.remove if state is _State.DISCARDED else self._lock.release
                self._attempt("release the lock", release)
        finally:
            with self._condition:
                self._state = state
                if self._writers == 0:
                    self._attempt("close the hidden file", self._close_data)
                self._condition.notify_all()
            self._sink.forget(self)

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            logger.error("request %r, %s: %s", self.request_id, self.path, _describe(f"could not {what}", error))

    # Files, all of them relative to the sink's directory

    def _create(self, name: str) -> int:
        fd = os.open(name, _CREATE, self._sink.file_mode, dir_fd=self._sink.dir_fd)
        try:
            os.fchmod(fd, self._sink.file_mode)
        except BaseException:
            os.close(fd)
            self._unlink(name)
            raise
        return fd

    def _rename(self, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=self._sink.dir_fd, dst_dir_fd=self._sink.dir_fd)

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._sink.dir_fd)

    def _close_data(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # Words

    def _error(self, reason: str) -> SinkError:
        return SinkError(self.request_id, self.path, reason)

    def _how_it_ended(self) -> str:
        because = f" ({self._failure})" if self._failure else ""
        return f"the file is {self._state.value} already{because}"


def _as_bytes(rows: Rows) -> memoryview:
    """The bytes of an array or a buffer, not copied.

    Raises:
        ValueError: they do not stand one after the other.
    """
    contiguous = rows.flags.c_contiguous if isinstance(rows, np.ndarray) else rows.c_contiguous
    if not contiguous:
        raise ValueError("the rows are not C-contiguous")
    if rows.nbytes == 0:
        return memoryview(b"")
    if isinstance(rows, np.ndarray):
        return rows.reshape(-1).view(np.uint8).data
    return rows.cast("B")


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """pwrite all of it; the system may take less at a time than it is given (never more than 2 GiB)."""
    while data:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data = data[written:]
        offset += written


def _describe(what: str, error: OSError) -> str:
    """`what`, and the system's reason in words and by name."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{what}: {error.strerror or error}" + (f" ({name})" if name else "")


def _describe_missing(missing: list[Span], tokens: int) -> str:
    named = ", ".join(f"[{first}, {last})" for first, last in missing[:_SPANS_NAMED])
    more = f" and {len(missing) - _SPANS_NAMED} more spans" if len(missing) > _SPANS_NAMED else ""
    return f"rows of token positions {named}{more} of {tokens} were never written"
