"""What sinks have in common whose requests have a name each in a storage directory: locks, reasons of failures, cleaning up."""

from __future__ import annotations

import errno
import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.lock import HeldLock, LockHeldError
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX, below, path_refusal
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, Sink, SinkError
from vllm_ascend_hsx.sinks.data_file import DataFile, FileOptions
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.session import Session

logger = logging.getLogger(__name__)

_DEFAULTS = FileOptions()


class DirectorySink(Sink):
    """Publishes requests in one directory.

    Everything is done relative to the directory's descriptor and follows no symbolic link, so nothing outside it is touched, whatever
    a request is called and whatever the directory contains.

    Args:
        directory: where they appear; created if it does not exist.
        row_format: what a row looks like; the same for all files of a sink.
        options: how they are written.
        memory: what direct writes will come from, so that it is tried; see check_directory. Quantised rows come from ordinary memory.

    Raises:
        UserError: files could not be published in the directory, or not in the way that is asked for.

    Attributes:
        keeps_locks: whether the lock file of a request that was published is left to its consumers.
    """

    keeps_locks = True

    def __init__(self, directory: Path, row_format: RowFormat, options: FileOptions = _DEFAULTS, memory: memoryview | None = None) -> None:
        self.row_format = row_format
        self.options = options
        # Writes to the page cache hold the file's lock, and those that wait for it keep a core busy: two at a time cost twice the CPU time
        # and gain nothing. Direct ones go to the disk in parallel, and quantising takes longer than the write after it.
        self.writes_side_by_side = options.io == "direct" or row_format.is_quantized
        self._directory = Path(os.path.abspath(directory))
        self._parents = (os.fspath(directory), os.fspath(self._directory))
        self._memory = None if row_format.is_quantized else memory
        self._session = Session(self._directory, options, self._memory)
        self._opening = threading.Lock()  # for one request, or the end, at a time; held while the storage does not answer
        self._mutex = threading.Lock()  # guards everything below, and the numbers of requests
        self._former: list[Session] = []  # each with files that are not closed
        self._files: dict[str, RequestFile] = {}  # that have not ended
        self._closed = False

    @property
    def token(self) -> str:
        """Part of the name of its hidden directory, and of its shards."""
        return self._session.token

    def make_data(self, file: RequestFile) -> DataFile:
        """Make the hidden file of a request, whose first rows have arrived. Raises OSError."""
        session, layout = file.session, FileLayout(self.row_format, file.request_id)
        place = session.workspace, session.new_name(file.name), file.storage, file.name, file.gid
        return DataFile(*place, layout, self.options, file.expected_tokens, session.filesystem)

    @abstractmethod
    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        """Show a complete request to readers.

        Args:
            file: the request.
            data: its hidden file, complete and open.
            tokens: its rows.

        Raises:
            OSError: readers do not see it.
        """

    @abstractmethod
    def hide_previous(self, file: RequestFile) -> Callable[[], None] | None:
        """Take what an earlier request of this name left out of sight.

        Were it left in place, a server that dies now would leave the earlier request's rows as the answer to this one.

        Returns:
            What is to be done about it when the request has ended, if anything.

        Raises:
            OSError: it could not be done.
        """

    @abstractmethod
    def move(self, file: RequestFile, successor: RequestFile) -> None:
        """Have what `file` has published stand where its successor is, instead. Raises OSError: it cannot."""

    def open(self, request_id: str, path: Path, expected_tokens: int = 0, may_grow: bool = True) -> RequestFile:
        relative = self._relative(path)
        if relative is None:
            raise SinkError(request_id, path, f"it is not inside {self._directory}")
        problem = path_refusal(relative)
        if problem is not None:
            raise SinkError(request_id, path, f"the name cannot be used: {problem}")
        with self._opening:
            with self._mutex:
                if self._closed:
                    raise SinkError(request_id, path, "the sink is closed")
                earlier = self._files.get(relative)
            # At once: to take its lock would be tried for some milliseconds.
            if earlier is not None:
                raise SinkError(request_id, path, "another request is writing this file")
            file = self._announce(request_id, path, relative, expected_tokens, may_grow)
            with self._mutex:
                self._files[relative] = file
            return file

    def follow(self, file: RequestFile) -> RequestFile | None:
        """Announce a request once more, if its path leads to another folder than it did: somebody has renamed or replaced that.

        Returns:
            What readers of the path see of it from now on, to be ended by the caller; None: the path leads where it did.

        Raises:
            SinkError: nothing can be published where it leads.
        """
        if file.session.is_at_its_path(file.relative.rpartition("/")[0], file.storage):
            return None
        with self._opening:
            return self._announce(file.request_id, file.path, file.relative, 0, False, file)

    def close(self) -> None:
        with self._opening, self._mutex:
            if self._closed:
                return
            self._closed = True
            not_ended = list(self._files.values())
        for file in not_ended:
            file.fail(SERVER_STOPPED)
        self._close_after_requests(self._session)

    def seal(self, session: Session) -> None:
        """Called when all files in a directory are closed, before it is closed itself."""

    def forget(self, file: RequestFile) -> None:
        """Called by a file that ends: its name can be used again."""
        with self._mutex:
            if self._files.get(file.relative) is file:
                del self._files[file.relative]

    def leave(self, file: RequestFile) -> None:
        """Called by a file that is closed."""
        session = file.session
        with self._mutex:
            session.requests -= 1
            was_last = session in self._former and not session.requests
            if was_last:
                self._former.remove(session)
        if was_last:
            self._close(session)

    def _announce(
        self, request_id: str, path: Path, relative: str, expected_tokens: int, may_grow: bool, predecessor: RequestFile | None = None
    ) -> RequestFile:
        """Have readers wait for a request. Raises SinkError."""
        *folders, name = relative.split("/")
        try:
            session = self._settle()
        except (UserError, FileNotFoundError) as error:
            reason = describe(f"{self._directory} is not there any more", error) if isinstance(error, OSError) else str(error)
            raise SinkError(request_id, path, reason) from error
        try:
            storage = session.enter(folders, durable=self.options.durability == "fdatasync")
        except OSError as error:
            raise SinkError(request_id, path, describe("a directory on the way to it cannot be entered", error)) from error
        lock, gid = None, -1
        try:
            gid = session.workspace.group_in(storage)
            if self.options.use_lock:
                lock = HeldLock.acquire(storage.fd, name + LOCK_SUFFIX, session.lock_mode, session.workspace.fd, gid)
            file = RequestFile(self, session, request_id, path, storage, relative, expected_tokens, may_grow, gid, lock)
            file.predecessor = predecessor
            storage.unlink(name + ERROR_SUFFIX)
            file.remove_previous = self.hide_previous(file)
        except LockHeldError:
            session.leave(storage)
            raise SinkError(request_id, path, "another request or server is writing this file") from None
        except OSError as error:
            reason = describe("it cannot be opened", error)
            RequestFile(self, session, request_id, path, storage, relative, 0, False, gid, lock).refuse(reason)
            raise SinkError(request_id, path, reason) from error
        with self._mutex:
            session.requests += 1
        return file

    def _settle(self) -> Session:
        """The directory that its path leads to now: somebody may have removed, renamed, unmounted or replaced the one before.

        Raises:
            FileNotFoundError: nothing is there. It is not made again: it may be where something was mounted.
            UserError: what is there cannot be used.
        """
        former = self._session
        if former.is_at_its_path():
            if former.has_workspace:
                return former
            logger.warning("%s: somebody has removed the hidden directory of this server; it makes another one", self._directory)
        else:
            if not os.path.exists(self._directory):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(self._directory))
            logger.warning("%s is another directory than before; new files go there", self._directory)
        self._session = Session(self._directory, self.options, self._memory)
        self._close_after_requests(former)
        return self._session

    def _close_after_requests(self, session: Session) -> None:
        """Close a directory in which no more files are opened, or have its last file close it."""
        with self._mutex:
            if session.requests:
                self._former.append(session)
                return
        self._close(session)

    def _close(self, session: Session) -> None:
        self.seal(session)
        session.close()

    def _relative(self, path: Path) -> str | None:
        """Return `path` relative to the directory, compared as text; None if it is not below it."""
        text = os.fspath(path)
        relative = below(text, self._parents[0])
        return below(text, self._parents[1]) if relative is None else relative
