"""The base class of sinks that publish in a directory, and the sink with a file per request."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.lock import LockHeldError
from vllm_ascend_hsx.protocol.names import (
    ERROR_SUFFIX,
    LOCK_SUFFIX,
    SHARDS_MARK,
    below,
    file_name,
    path_refusal,
)
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat
from vllm_ascend_hsx.sinks.base import NAME_USED, REFUSED, SERVER_STOPPED, FilePath, Sink, SinkError
from vllm_ascend_hsx.sinks.data_file import DataFile, FileOptions
from vllm_ascend_hsx.sinks.directory import Session
from vllm_ascend_hsx.sinks.orphans import remove_orphans
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.storage import Storage

logger = logging.getLogger(__name__)

_DEFAULTS = FileOptions()
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# vLLM's suffix for unique request ids (v1/engine/input_processor.py:240, vLLM 0.23.0).
_RANDOM_ID = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)


class DirectorySink(Sink):
    """Publishes requests in one directory.

    All operations use the directory's descriptor and follow no symbolic link. Neither the name of
    a request nor the content of the directory can lead outside the directory.

    Args:
        directory: the storage directory; created if it does not exist.
        row_format: format of the rows of all files.
        options: how files are written.
        memory: source of direct writes; see Session. Quantised rows are written from ordinary
            memory.
        random_ids: whether vLLM makes the ids of requests unique.

    Raises:
        UserError: if files cannot be created in the directory, or not with these options.

    Attributes:
        keeps_locks: whether the lock file of a published request stays for the consumers.
    """

    keeps_locks = True

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
        # Writes to the page cache hold a lock of the file in the kernel, and waiting threads keep a
        # core busy. Two concurrent writes cost twice the CPU time and gain nothing. Direct writes
        # run in parallel, and quantising takes longer than the write that follows.
        self.writes_side_by_side = options.io == "direct" or row_format.is_quantized
        self._directory = Path(os.path.abspath(directory))
        self._parents = (os.fspath(directory), os.fspath(self._directory))
        self._memory = None if row_format.is_quantized else memory
        self._random_ids = random_ids
        self._session = self._new_session()
        self._opening = threading.Lock()  # held by `open` and `close`, even while storage hangs
        self._mutex = threading.Lock()  # guards everything below, and Session.users
        self._files: dict[str, RequestFile] = {}  # files that have not ended
        self._closed = False

    @property
    def token(self) -> str:
        """Part of the names of the sink's hidden directory and shards."""
        return self._session.token

    def make_data(self, file: RequestFile) -> DataFile:
        """Create the hidden file of a request for the first rows. Raises OSError."""
        session = file.session
        place = session.workspace, session.new_name(file.name), file.gid
        return DataFile(*place, file.layout, self.options, file.expected_tokens, session.filesystem)

    @abstractmethod
    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        """Publish a complete request of `tokens` rows at `file.path`, and set `file.source`.

        Raises SinkError if the name has rows by now, and OSError. The request is then not visible.

        Args:
            file: the request. The caller holds the lock.
            data: the hidden file of the request, complete and open.
        """

    def end_session(self, session: Session) -> None:
        """Free the sink's resources of a session after the last request."""

    def open(
        self,
        request_id: str,
        path: FilePath,
        expected_tokens: int = 0,
        arrived_ns: int | None = None,
        adapter: Adapter = NO_ADAPTER,
    ) -> RequestFile:
        relative = self._relative(path)
        if relative is None:
            raise SinkError(request_id, path, f"it is not inside {self._directory}")
        if (problem := path_refusal(relative)) is not None:
            raise SinkError(request_id, path, f"the name cannot be used: {problem}")
        with self._opening:
            with self._mutex:
                if self._closed:
                    raise SinkError(request_id, path, "the sink is closed")
                # Refuse early: trying the lock takes some milliseconds.
                if relative in self._files:
                    raise SinkError(request_id, path, "another request is writing this file")
            file = self._announce(request_id, path, relative, expected_tokens, arrived_ns)
            file.adapter = adapter
            with self._mutex:
                self._files[relative] = file
            return file

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
        """Free the name of an ended file."""
        with self._mutex:
            if self._files.get(file.relative) is file:
                del self._files[file.relative]

    def release(self, session: Session) -> None:
        """Close a session after its last user."""
        with self._mutex:
            session.users -= 1
            if session.users:
                return
        self.end_session(session)
        session.close(self._clean if self.options.use_lock else None)

    def _has_unique_name(self, file: RequestFile) -> bool:
        """Return whether no other request can have this name."""
        return (
            self._random_ids
            and file.relative == file_name(file.request_id)
            and _RANDOM_ID.fullmatch(file.request_id) is not None
        )

    def _require_unused(self, file: RequestFile) -> None:
        """Raise SinkError if the name of a request already has rows. Also raises OSError."""
        directory = file.session.storage
        is_member = directory.has_name(SHARDS_MARK) and file.session.members.has(file.relative)
        if is_member or file.storage.has_name(file.name):
            raise SinkError(file.request_id, file.path, NAME_USED, REFUSED)

    def _announce(
        self,
        request_id: str,
        path: FilePath,
        relative: str,
        expected_tokens: int,
        arrived_ns: int | None,
    ) -> RequestFile:
        """Make readers wait for a request. Raises SinkError."""
        session, reason, cause = self._usable_session()
        if cause is not None and not session.is_at_its_path():
            raise SinkError(request_id, path, reason) from cause
        try:
            storage = self._enter(session, relative.split("/")[:-1])
        except OSError as error:
            problem = describe("a folder in its path cannot be opened", error)
            raise SinkError(request_id, path, reason or problem) from cause or error
        file = RequestFile(
            self, session, storage, request_id, path, relative, expected_tokens, arrived_ns
        )
        try:
            self._claim_name(file)
        except SinkError:
            file.withdraw()
            raise
        except LockHeldError:
            session.leave(storage)
            raise SinkError(
                request_id, path, "another request or server is writing this file", REFUSED
            ) from None
        except OSError as error:
            reason, cause = reason or describe("it cannot be opened", error), cause or error
        if cause is not None:
            self._refuse(file, reason)
            raise SinkError(request_id, path, reason) from cause
        with self._mutex:
            session.users += 1
        return file

    def _usable_session(self) -> tuple[Session, str, Exception | None]:
        """Return the session, and reason and cause if files cannot be opened, else "" and None."""
        try:
            return self._current_session(), "", None
        except UserError as error:
            return self._session, str(error), error
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            directory = self._directory
            problem = f"{directory} no longer exists" if is_gone else f"{directory} cannot be used"
            return self._session, describe(problem, error), error

    def _claim_name(self, file: RequestFile) -> None:
        """Lock the name of a request, and remove an error file of an earlier request.

        Raises:
            SinkError: the name already has rows.
            LockHeldError: another request or server is writing this file.
            OSError: the storage fails.
        """
        session, storage = file.session, file.storage
        may_be_used = not self._has_unique_name(file)
        file.gid = session.group_in(storage)
        if may_be_used:  # before locking: readers of existing rows need not wait
            self._require_unused(file)
        if self.options.use_lock:
            folder = file.relative.rpartition("/")[0]
            file.lock = session.hold_lock(storage, file.name + LOCK_SUFFIX, file.gid, folder)
        if may_be_used:  # from here on no other request can publish under this name
            self._require_unused(file)
            storage.unlink(file.name + ERROR_SUFFIX)

    def _enter(self, session: Session, folders: list[str]) -> Storage:
        """Open the folder of a file. Raises OSError.

        If the process has no descriptors left, close the spare descriptors first.
        """
        try:
            return session.enter(folders, self.options.durable)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                raise
        session.spares.give_up()
        storage = session.enter(folders, self.options.durable)
        with suppress(OSError):
            session.spares.refill()  # at least one is left for the reason
        return storage

    def _refuse(self, file: RequestFile, reason: str) -> None:
        """Publish the reason why a file cannot be opened. Raises SinkError if the name has rows."""
        try:
            file.session.spares.give_up()
            if not self._has_unique_name(file):
                self._require_unused(file)
        except SinkError:
            file.withdraw()
            raise
        except OSError as error:  # a reason could hide rows
            logger.error(
                "request %r, %s: %s",
                file.request_id,
                file.path,
                describe("could not determine whether its name has rows", error),
            )
            file.withdraw()
        else:
            file.refuse(reason)

    def _current_session(self) -> Session:
        """Return a session in the directory that is now at the path.

        Another process may have removed, renamed, unmounted or replaced the former directory.

        Raises:
            FileNotFoundError: if the directory is missing. It may be a mount point, so it is not
                created again.
            UserError: if the directory cannot be used.
        """
        former = self._session
        if former.is_at_its_path():
            if former.has_lock:
                return former
            what = "lock" if former.has_workspace else "hidden directory"
            problem = f"the {what} of this server was removed; creating a new hidden directory"
            logger.warning("%s: %s", self._directory, problem)
        else:
            if not os.path.exists(self._directory):
                code = errno.ENOENT
                raise FileNotFoundError(code, os.strerror(code), os.fspath(self._directory))
            logger.warning(
                "%s was replaced by another directory; new files are written there", self._directory
            )
        self._session = self._new_session()
        self.release(former)
        return self._session

    def _new_session(self) -> Session:
        session = Session(self._directory, self.options, self._memory)
        if self.options.use_lock:
            self._clean(session.storage.fd)
        with suppress(OSError):  # the first request with a chosen name reports it
            if session.storage.has_name(SHARDS_MARK):
                session.members.look()  # at start, because indexes may be long
        return session

    def _clean(self, dir_fd: int) -> None:
        remove_orphans(dir_fd, os.fspath(self._directory))

    def _relative(self, path: FilePath) -> str | None:
        """Return `path` relative to the directory, compared as text, or None if it is outside."""
        relatives = (below(os.fspath(path), parent) for parent in self._parents)
        return next((each for each in relatives if each is not None), None)


class FileSink(DirectorySink):
    """Publishes a file per request: the complete hidden file gets the final name."""

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        with suppress(OSError):  # no descriptors left: later requests compute these rows again
            file.source = data.source() if file.keeps_source else None
        try:
            data.publish(file.storage, file.name)
        except FileExistsError:
            raise SinkError(file.request_id, file.path, NAME_USED, REFUSED) from None
