"""Sinks that publish in a directory: what they share, and a safetensors file per request."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.lock import LockHeldError
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX, SHARDS_MARK, below, file_name, path_refusal
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat
from vllm_ascend_hsx.protocol.shard_index import Tombstone
from vllm_ascend_hsx.sinks.arrival import arrival_of_error, arrival_of_file, arrival_of_member
from vllm_ascend_hsx.sinks.base import REFUSED, SERVER_STOPPED, FilePath, Sink, SinkError
from vllm_ascend_hsx.sinks.data_file import DataFile, FileOptions
from vllm_ascend_hsx.sinks.directory import Session
from vllm_ascend_hsx.sinks.orphans import remove_orphans
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard_file import SessionShards

logger = logging.getLogger(__name__)

_DEFAULTS = FileOptions()
_SUPERSEDED = "a later request has published this file, or has failed"
# How ids that vLLM makes unique end (v1/engine/input_processor.py:240, vLLM 0.23.0).
_RANDOM_ID = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)


class _LaterRequest(Exception):
    """What is at the path is that of a request which arrived later."""


class DirectorySink(Sink):
    """Publishes requests in one directory.

    All operations are relative to the directory's descriptor and follow no symbolic link, so
    nothing outside it is touched, whatever a request is called and whatever the directory contains.

    Args:
        directory: the directory; created if it does not exist.
        row_format: format of the rows of all files.
        options: how files are written.
        memory: memory that direct writes come from; see Session. Quantised rows come from ordinary
            memory.
        random_ids: whether vLLM makes the ids of requests unique.

    Raises:
        UserError: if files cannot be made in the directory, or not with these options.

    Attributes:
        keeps_locks: whether the lock file of a published request is left to its consumers.
        makes_members: whether requests are published in shards.
        shard_bytes: size at which a shard is sealed.
    """

    keeps_locks = True
    makes_members = False
    shard_bytes = 1  # of a shard without members, which has 0 bytes

    def __init__(
        self,
        directory: Path,
        row_format: RowFormat,
        options: FileOptions = _DEFAULTS,
        memory: memoryview | None = None,
        *,
        random_ids: bool = True,
    ) -> None:
        self.row_format = row_format
        self.options = options
        # Writes to the page cache hold the file's lock, and threads that wait for it keep a core
        # busy: two at a time cost twice the CPU time and gain nothing. Direct writes run in
        # parallel, and quantising takes longer than the write after it.
        self.writes_side_by_side = options.io == "direct" or row_format.is_quantized
        self._directory = Path(os.path.abspath(directory))
        self._parents = (os.fspath(directory), os.fspath(self._directory))
        self._memory = None if row_format.is_quantized else memory
        self._random_ids = random_ids
        self._shards: dict[Session, SessionShards] = {}
        self._mutex_of_shards = threading.Lock()  # guards the former
        self._session = self._new_session()
        self._opening = threading.Lock()  # held by `open` and `close`, also while storage hangs
        self._mutex = threading.Lock()  # guards everything below, and Session.users
        self._files: dict[str, RequestFile] = {}  # files that have not ended
        self._closed = False

    @property
    def token(self) -> str:
        """Part of the names of its hidden directory and of its shards."""
        return self._session.token

    def make_data(self, file: RequestFile) -> DataFile:
        """Make the hidden file of a request whose first rows have arrived. Raises OSError."""
        session = file.session
        place = session.workspace, session.new_name(file.name), file.gid
        return DataFile(*place, file.layout, self.options, file.expected_tokens, session.filesystem)

    @abstractmethod
    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        """Make a complete request of `tokens` rows visible where its path leads; set its `source`.

        Raises OSError: it is not visible.

        Args:
            file: the request; see RequestFile.destination.
            data: its hidden file, complete and open.
        """

    def hide_previous(self, file: RequestFile, can_look: bool = True) -> Callable[[], None] | None:
        """Hide what an earlier request of this name published; return what to call at the end.

        Otherwise a server that dies now would leave the earlier rows as the answer to this request.
        Raises OSError. `can_look`: whether other servers' shards can be read, whose clocks differ.
        """
        if self.may_be_member(file):
            shards = self.shards_of(file.session)
            with shards.current() as shard:
                shard.add_line(Tombstone(file.relative, shards.now_ns(can_look)))
        if not file.storage.has_file(file.name):
            return None
        workspace, hidden = file.session.workspace, file.session.new_name(file.name)
        try:
            file.storage.move(file.name, workspace, hidden)
        except FileNotFoundError:
            # If a consumer has not just removed it, the hidden directory has gone.
            file.storage.unlink(file.name)
            return None
        return partial(workspace.unlink, hidden)

    def hide_from(self, file: RequestFile) -> None:
        """As `hide_previous`, for a request that could not be opened. Raises OSError."""
        try:
            superseded, can_look = self._is_superseded(file), True
        except OSError:  # no rows are better than those of another request
            superseded, can_look = False, False
        if not superseded:
            file.remove_previous = self.hide_previous(file, can_look)

    def shards_of(self, session: Session) -> SessionShards:
        """Return the shards that this sink writes in a session. Raises OSError."""
        with self._mutex_of_shards:
            if session not in self._shards:
                self._shards[session] = SessionShards(session, self.shard_bytes, self.options.durable)
            return self._shards[session]

    def open(
        self,
        request_id: str,
        path: FilePath,
        expected_tokens: int = 0,
        arrived_ns: int | None = None,
        adapter: Adapter = NO_ADAPTER,
    ) -> RequestFile:
        try:
            file = self._open(request_id, path, expected_tokens, arrived_ns)
        except _LaterRequest:
            raise SinkError(request_id, path, _SUPERSEDED, REFUSED) from None
        file.adapter = adapter
        return file

    def leave_reason(self, request_id: str, path: FilePath, reason: str, arrived_ns: int | None) -> None:
        with suppress(_LaterRequest):
            self._open(request_id, path, arrived_ns=arrived_ns).fail(reason)

    def _open(self, request_id: str, path: FilePath, expected_tokens: int = 0, arrived_ns: int | None = None) -> RequestFile:
        """Open a file. Raises SinkError and _LaterRequest."""
        relative = self._relative(path)
        if relative is None:
            raise SinkError(request_id, path, f"it is not inside {self._directory}")
        if (problem := path_refusal(relative)) is not None:
            raise SinkError(request_id, path, f"the name cannot be used: {problem}")
        with self._opening:
            with self._mutex:
                if self._closed:
                    raise SinkError(request_id, path, "the sink is closed")
                # Refused at once: trying its lock takes some milliseconds.
                if relative in self._files:
                    raise SinkError(request_id, path, "another request is writing this file")
            file = self._announce(request_id, path, relative, expected_tokens, arrived_ns)
            with self._mutex:
                self._files[relative] = file
            return file

    def follow(self, file: RequestFile) -> RequestFile | None:
        """Announce a request again if its path leads elsewhere: its folder was moved or replaced.

        Returns the file that readers of the path see from now on, which the caller ends; None if
        the path leads where it did. Raises SinkError if nothing can be published where it leads.
        """
        if file.session.is_at_its_path(file.relative.rpartition("/")[0], file.storage):
            return None
        with self._opening:
            try:
                return self._announce(file.request_id, file.path, file.relative, file.expected_tokens, file.arrived_ns)
            except _LaterRequest:
                raise SinkError(file.request_id, file.path, _SUPERSEDED) from None

    def close(self) -> None:
        with self._opening, self._mutex:
            if self._closed:
                return
            self._closed = True
            not_ended = list(self._files.values())
        for file in not_ended:
            file.fail(SERVER_STOPPED)
        self.release(self._session)

    def forget(self, file: RequestFile) -> None:
        """Free the name of a file that ends."""
        with self._mutex:
            if self._files.get(file.relative) is file:
                del self._files[file.relative]

    def release(self, session: Session) -> None:
        """Close a session after its last user."""
        with self._mutex:
            session.users -= 1
            if session.users:
                return
        with self._mutex_of_shards:
            shards = self._shards.pop(session, None)
        if shards is not None:
            shards.close(session.workspace if session.has_workspace else self._session.workspace)
        session.close(self._clean if self.options.use_lock else None)

    def _has_unique_name(self, file: RequestFile) -> bool:
        """Return whether no other request can have the name."""
        return self._random_ids and file.relative == file_name(file.request_id) and _RANDOM_ID.fullmatch(file.request_id) is not None

    def may_be_member(self, file: RequestFile) -> bool:
        """Return whether an earlier request of this name may be a member of a shard."""
        # A line to hide it would be one per request.
        return not self._has_unique_name(file) and (self.makes_members or file.session.storage.has_name(SHARDS_MARK))

    def _is_superseded(self, file: RequestFile) -> bool:
        """Return whether a request that arrived later has ended under this name. Raises OSError.

        A client may give up while its request waits, or while its file is being opened, and then
        give the name to another one, on another rank.
        """
        if file.arrived_ns is None or self._has_unique_name(file):
            return False
        published = [arrival_of_file(file.storage.fd, file.name), arrival_of_error(file.storage.fd, file.name + ERROR_SUFFIX)]
        if self.may_be_member(file):
            published.append(arrival_of_member(file.session.storage.fd, file.relative, file.arrived_ns))
        # What is in the future was written before the clock was set back.
        return any(arrival is not None and file.arrived_ns < arrival <= time.time_ns() for arrival in published)

    def _announce(
        self, request_id: str, path: FilePath, relative: str, expected_tokens: int = 0, arrived_ns: int | None = None
    ) -> RequestFile:
        """Make readers wait for a request. Raises as `_open`."""
        session, reason = self._session, ""
        cause: Exception | None = None
        try:
            session = self._current_session()
        except UserError as error:
            reason, cause = str(error), error
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            problem = f"{self._directory} is not there any more" if is_gone else f"{self._directory} cannot be used"
            reason, cause = describe(problem, error), error
        if cause is not None and not session.is_at_its_path():
            raise SinkError(request_id, path, reason) from cause
        try:
            storage = session.enter(relative.split("/")[:-1], self.options.durable)
        except OSError as error:
            problem = describe("a directory on the way to it cannot be entered", error)
            raise SinkError(request_id, path, reason or problem) from cause or error
        file = RequestFile(self, session, storage, request_id, path, relative, expected_tokens, arrived_ns)
        try:
            file.gid = session.group_in(storage)
            if self.options.use_lock:
                file.lock = session.hold_lock(storage, file.name + LOCK_SUFFIX, file.gid, relative.rpartition("/")[0])
            # From here on no other request can publish under this name.
            if self._is_superseded(file):
                file.withdraw()
                raise _LaterRequest
            if cause is None and not self._has_unique_name(file):
                file.remove_previous = self.hide_previous(file)
                storage.unlink(file.name + ERROR_SUFFIX)  # last: it may be all that hides the former
        except LockHeldError:
            session.leave(storage)
            raise SinkError(request_id, path, "another request or server is writing this file", REFUSED) from None
        except OSError as error:
            reason, cause = reason or describe("it cannot be opened", error), cause or error
        if cause is not None:
            file.refuse(reason)
            raise SinkError(request_id, path, reason) from cause
        with self._mutex:
            session.users += 1
        return file

    def _current_session(self) -> Session:
        """Return a session in the directory that the path leads to now.

        Another process may have removed, renamed, unmounted or replaced the former one.

        Raises:
            FileNotFoundError: if nothing is there. It is not made again: it may be a mount point.
            UserError: if what is there cannot be used.
        """
        former = self._session
        if former.is_at_its_path():
            if former.has_lock:
                return former
            what = "lock" if former.has_workspace else "hidden directory"
            problem = f"somebody has removed the {what} of this server; it makes another hidden directory"
            logger.warning("%s: %s", self._directory, problem)
        else:
            if not os.path.exists(self._directory):
                code = errno.ENOENT
                raise FileNotFoundError(code, os.strerror(code), os.fspath(self._directory))
            logger.warning("%s is another directory than before; new files go there", self._directory)
        self._session = self._new_session()
        self.release(former)
        return self._session

    def _new_session(self) -> Session:
        session = Session(self._directory, self.options, self._memory)
        if self.options.use_lock:
            self._clean(session.storage.fd)
        return session

    def _clean(self, dir_fd: int) -> None:
        remove_orphans(dir_fd, os.fspath(self._directory))

    def _relative(self, path: FilePath) -> str | None:
        """Return `path` relative to the directory, compared as text; None if it is not below it."""
        relatives = (below(os.fspath(path), parent) for parent in self._parents)
        return next((each for each in relatives if each is not None), None)


class FileSink(DirectorySink):
    """Publishes a file per request: its hidden file is renamed when it is complete."""

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        with suppress(OSError):  # no more descriptors: then requests compute these rows anew
            file.source = data.source() if file.keeps_source else None
        data.publish(file.destination.storage, file.name)
