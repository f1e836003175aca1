"""A sink that appends requests to large tar files, each with an index: for datasets of millions of requests."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from vllm_ascend_hsx.protocol.files import describe
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.shard_index import Gone, latest_ns
from vllm_ascend_hsx.protocol.shard_names import SHARDS_MARK, stem
from vllm_ascend_hsx.sinks.data_file import DataFile, FileOptions, Spare
from vllm_ascend_hsx.sinks.directory_sink import DirectorySink
from vllm_ascend_hsx.sinks.file import hide_previous_file
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.session import Session
from vllm_ascend_hsx.sinks.shard_file import Shard
from vllm_ascend_hsx.sinks.storage import Storage

logger = logging.getLogger(__name__)

_DEFAULTS = FileOptions()
_SPARES = 16  # of a directory
_LARGEST_SPARE = 64 << 20  # bytes
_ATTEMPTS = 8  # to make a shard; each is lost only to somebody who has put something under its name
# How vLLM ends the ids that it makes (v1/engine/input_processor.py:240, vLLM 0.23.0), unless it is told not to.
_RANDOM_ID = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)


class ShardSink(DirectorySink):
    """Publishes requests as members of shards: the hidden file of each is appended when it is complete.

    Arguments and errors are those of DirectorySink, and:

    Args:
        shard_bytes: size at which a shard is sealed and the next one begun.

    Of the options, `io` has no effect: rows go through the page cache.
    """

    keeps_locks = False

    def __init__(
        self,
        directory: Path,
        row_format: RowFormat,
        options: FileOptions = _DEFAULTS,
        memory: memoryview | None = None,
        *,
        shard_bytes: int,
    ) -> None:
        # A copy goes through the page cache. Past it, rows would go to the disk, back, and to the disk again.
        super().__init__(directory, row_format, replace(options, io="buffered"), memory)
        self._file_options = replace(self.options, durability="none")  # it becomes durable in its shard
        self._shard_bytes = shard_bytes
        self._mutex_of_shards = threading.Lock()
        self._shards: dict[Session, _Shards] = {}

    def make_data(self, file: RequestFile) -> DataFile:
        layout = FileLayout(self.row_format, file.request_id)
        session, hidden = file.session, self._shards_of(file.session).hidden_file()
        place = session.workspace, hidden, session.storage, file.name, -1
        return DataFile(*place, layout, self._file_options, file.expected_tokens, session.filesystem)

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        shards = self._shards_of(file.session)
        is_spare = data.size <= _LARGEST_SPARE and len(shards.spares) < _SPARES
        if not is_spare:
            data.withdraw()  # its descriptor keeps the bytes; after the index line nothing may fail
        with shards.current() as shard:
            shard.append(data, file.relative, tokens, file.request_id, shards.now_ns())
        if is_spare:
            shards.spares.append(data.detach())

    def move(self, file: RequestFile, successor: RequestFile) -> None:
        if successor.session is not file.session:  # else it is found by its name, whatever has become of a folder that this names
            raise OSError(errno.EXDEV, "they are in a shard of the former one")

    def hide_previous(self, file: RequestFile) -> Callable[[], None] | None:
        # No other request has such an id, so its name needs no line: that would be one for each of millions.
        is_unique = file.relative == file_name(file.request_id) and _RANDOM_ID.fullmatch(file.request_id)
        # The name's member may be this request's own already.
        is_here = file.predecessor is not None and file.predecessor.session is file.session
        if not is_unique and not is_here:
            shards = self._shards_of(file.session)
            with shards.current() as shard:
                shard.add_line(Gone(file.relative, shards.now_ns()))
        return hide_previous_file(file)

    def seal(self, session: Session) -> None:
        with self._mutex_of_shards:
            shards = self._shards.pop(session, None)
        if shards is not None:
            shards.close(session.workspace if session.has_workspace else self._session.workspace)

    def _shards_of(self, session: Session) -> _Shards:
        with self._mutex_of_shards:
            if session not in self._shards:
                durable = self.options.durability == "fdatasync"
                self._shards[session] = _Shards(session, self._shard_bytes, durable)
            return self._shards[session]


class _Shards:
    """The shards of one sink in one directory, of which one at a time takes requests.

    Args:
        session: the sink's stay in the directory.
        limit: bytes at which a shard is sealed.
        durable: as for Shard.

    Attributes:
        spares: hidden files of requests that are in a shard. Creating and removing one for each request, and
            allocating its pages and blocks, takes ext4 longer than the copy into the shard.
    """

    def __init__(self, session: Session, limit: int, durable: bool) -> None:
        self.spares: deque[Spare] = deque()
        self._session = session
        self._limit = limit
        self._durable = durable
        self._numbers = itertools.count()
        self._appending = threading.Lock()  # one append at a time; guards the next two
        self._shard: Shard | None = None
        self._time_ns = latest_ns(session.storage.fd)

    def hidden_file(self) -> str | Spare:
        """Return a hidden file to write over, or the name of a new one."""
        try:
            return self.spares.pop()
        except IndexError:
            return self._session.new_name("rows")

    def now_ns(self) -> int:
        """Return a time later than that of any line before, though the system's clock may have been set back."""
        self._time_ns = max(self._time_ns + 1, time.time_ns())
        return self._time_ns

    @contextmanager
    def current(self) -> Iterator[Shard]:
        """Lend the shard that takes requests; seal it if it is full or unsound then. Raises OSError: there is none."""
        with self._appending:
            if self._shard is not None and not self._shard.is_there():
                self._seal(self._session.workspace)
            shard = self._shard = self._shard or self._make()
            try:
                yield shard
            finally:
                if not shard.is_sound or shard.end >= self._limit:
                    self._seal(self._session.workspace)

    def close(self, workspace: Storage) -> None:
        """Seal the last shard and close the spares, which are removed with their directory.

        Args:
            workspace: a hidden directory of this server.
        """
        with self._appending:
            self._seal(workspace)
        for spare in self.spares:
            with suppress(OSError):  # the rows in it are in a shard
                os.close(spare.fd)

    def _make(self) -> Shard:
        session = self._session
        with suppress(FileExistsError):
            os.close(session.storage.create(SHARDS_MARK))
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError):
                name = stem(session.token, next(self._numbers))
                return Shard.create(session.storage, name, self._durable)
        raise FileExistsError("every shard's name was taken by somebody else")

    def _seal(self, workspace: Storage) -> None:
        """End the shard, if there is one. Its problems concern no request and are logged."""
        shard, self._shard = self._shard, None
        try:
            if shard is not None:
                shard.seal(workspace)
        except OSError as error:
            self._session.tidy = False
            logger.error("%s", describe("a shard could not be sealed, which the next server will do", error))
