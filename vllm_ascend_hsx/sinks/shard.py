"""A sink that appends requests to large tar files, each with an index: for datasets of millions of requests."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.shard_index import follow
from vllm_ascend_hsx.protocol.shard_names import SHARDS_MARK, stem
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory_sink import DirectorySink
from vllm_ascend_hsx.sinks.file import hide_previous_file, make_data_file
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.session import Session
from vllm_ascend_hsx.sinks.shard_data import MemberData, RowsBeside, RowsInPlace
from vllm_ascend_hsx.sinks.shard_file import Range, Shard

_DEFAULTS = FileOptions()
_ATTEMPTS = 8  # to make a shard; each is lost only to somebody who has put something under its name
# How vLLM ends the ids that it makes (v1/engine/input_processor.py:240, vLLM 0.23.0), unless it is told not to.
_RANDOM_ID = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)


class ShardSink(DirectorySink):
    """Publishes requests as members of shards. Arguments and errors are those of DirectorySink, and:

    Args:
        shard_bytes: size from which on a shard takes no more requests.
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
        super().__init__(directory, row_format, options, memory)
        self._shard_bytes = shard_bytes
        self._shards: dict[Session, _Shards] = {}
        self._shards_mutex = threading.Lock()

    def make_data(self, file: RequestFile) -> MemberData:
        layout = FileLayout(self.row_format, file.request_id)
        common = (file.relative, file.request_id, layout, self._shards_of(file.session).reserve)
        if not file.may_grow:
            return RowsInPlace(*common, self.options, file.expected_tokens, file.session.filesystem)
        data = make_data_file(file, self.row_format, replace(self.options, durability="none"))  # it becomes durable in the shard
        return RowsBeside(*common, data)

    def move(self, file: RequestFile, successor: RequestFile) -> None:
        if successor.session is not file.session:  # else it is found by its name, whatever has become of a folder that this names
            raise OSError(errno.EXDEV, "they are in a shard of the former one")

    def hide_previous(self, file: RequestFile) -> Callable[[], None] | None:
        # No other request has such an id, so nothing need be said of the earlier ones: a line for each of millions.
        is_unique = file.relative == file_name(file.request_id) and _RANDOM_ID.fullmatch(file.request_id)
        # The name's member may be this request's own already.
        is_here = file.predecessor is not None and file.predecessor.session is file.session
        if not is_unique and not is_here:
            self._shards_of(file.session).say_gone(file.relative)
        return hide_previous_file(file)

    def seal(self, session: Session) -> None:
        with self._shards_mutex:
            shards = self._shards.pop(session, None)
        if shards is not None:
            shards.close()

    def _shards_of(self, session: Session) -> _Shards:
        with self._shards_mutex:
            shards = self._shards.get(session)
            if shards is None:
                follow(session.storage.fd)
                shards = self._shards[session] = _Shards(session, self.options, self._shard_bytes)
            return shards


class _Shards:
    """The shards of one sink in one directory, of which one at a time takes requests."""

    def __init__(self, session: Session, options: FileOptions, shard_bytes: int) -> None:
        self._session = session
        self._options = options
        self._shard_bytes = shard_bytes
        self._numbers = itertools.count()
        self._mutex = threading.Lock()
        self._current: Shard | None = None
        self._ended: list[Shard] = []  # some of their ranges may be undecided
        self._closed = False

    def reserve(self, name: str, size: int, first_bytes: int) -> tuple[Shard, Range]:
        """A place for a request. Raises OSError."""
        with self._mutex:
            while True:
                shard = self._shard()
                taken = shard.reserve(name, size, first_bytes)
                if taken is not None:
                    return shard, taken
                self._end_current()

    def say_gone(self, name: str) -> None:
        """Have readers see no earlier member of a name. Raises OSError."""
        with self._mutex:
            while not self._shard().say_gone(name):
                self._end_current()

    def close(self) -> None:
        """Seal what can be sealed: what is still being written is left for the next server."""
        with self._mutex:
            self._closed = True
            for shard in [*self._ended, *([] if self._current is None else [self._current])]:
                shard.retire(abandon=True)

    def _shard(self) -> Shard:
        if self._closed:
            raise OSError(errno.ESHUTDOWN, SERVER_STOPPED)
        for _ in range(_ATTEMPTS):
            if self._current is not None:
                return self._current
            self._mark()
            with suppress(FileExistsError):
                self._current = Shard(self._session, stem(self._session.token, next(self._numbers)), self._options, self._shard_bytes)
        if self._current is None:
            raise FileExistsError("every shard's name was taken by somebody else")
        return self._current

    def _mark(self) -> None:
        """Say that there are shards here."""
        with suppress(FileExistsError):
            os.close(self._session.storage.create(SHARDS_MARK))

    def _end_current(self) -> None:
        shard, self._current = self._current, None
        if shard is not None:
            shard.retire()
            self._ended = [each for each in (*self._ended, shard) if not each.has_ended]
