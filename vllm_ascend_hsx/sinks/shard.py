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
from vllm_ascend_hsx.protocol.names import file_name, partial_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.shard_index import Gone, latest_ns
from vllm_ascend_hsx.protocol.shard_names import SHARDS_MARK, stem
from vllm_ascend_hsx.sinks.data_file import DataFile, FileOptions, Spare
from vllm_ascend_hsx.sinks.directory_sink import DirectorySink
from vllm_ascend_hsx.sinks.file import set_file_aside
from vllm_ascend_hsx.sinks.home import Home
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard_file import Shard

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
        self._shards: dict[Home, _Shards] = {}

    def make_data(self, file: RequestFile) -> DataFile:
        layout = FileLayout(self.row_format, file.request_id)
        hidden = self._shards_of(file.home).hidden_file()
        return DataFile(file.home.storage, "", hidden, layout, self._file_options, file.expected_tokens, file.home.filesystem)

    def publish(self, file: RequestFile, data: DataFile, tokens: int) -> None:
        shards = self._shards_of(file.home)
        is_spare = data.size <= _LARGEST_SPARE and len(shards.spares) < _SPARES
        if not is_spare:
            data.withdraw()  # its descriptor keeps the bytes; after the index line nothing may fail
        with shards.current() as shard:
            shard.append(data, file.relative, tokens, file.request_id, shards.now_ns())
        if is_spare:
            shards.spares.append(data.detach())

    def move(self, file: RequestFile, successor: RequestFile) -> None:
        if successor.home is not file.home:  # else it is found by its name, whatever has become of a folder that this names
            raise OSError(errno.EXDEV, "they are in a shard of the former one")

    def set_aside(self, file: RequestFile) -> Callable[[], None] | None:
        # No other request has such an id, so its name needs no line: that would be one for each of millions.
        is_unique = file.relative == file_name(file.request_id) and _RANDOM_ID.fullmatch(file.request_id)
        # The name's member may be this request's own already.
        is_here = file.predecessor is not None and file.predecessor.home is file.home
        if not is_unique and not is_here:
            shards = self._shards_of(file.home)
            with shards.current() as shard:
                shard.add_line(Gone(file.relative, shards.now_ns()))
        return set_file_aside(file)

    def leave(self, home: Home) -> None:
        with self._mutex_of_shards:
            shards = self._shards.pop(home, None)
        if shards is not None:
            shards.close()

    def _shards_of(self, home: Home) -> _Shards:
        with self._mutex_of_shards:
            if home not in self._shards:
                self._shards[home] = _Shards(home, self._shard_bytes, self.options.durability == "fdatasync")
            return self._shards[home]


class _Shards:
    """The shards of one sink in one directory, of which one at a time takes requests.

    Args:
        home: the directory.
        limit: bytes at which a shard is sealed.
        durable: as for Shard.

    Attributes:
        spares: hidden files of requests that are in a shard. Creating and removing one for each request, and
            allocating its pages and blocks, takes ext4 longer than the copy into the shard.
    """

    def __init__(self, home: Home, limit: int, durable: bool) -> None:
        self.spares: deque[Spare] = deque()
        self._home = home
        self._limit = limit
        self._durable = durable
        self._numbers = itertools.count()
        self._hidden_numbers = itertools.count()
        self._appending = threading.Lock()  # one append at a time; guards the next two
        self._shard: Shard | None = None
        self._time_ns = latest_ns(home.storage.fd)

    def hidden_file(self) -> str | Spare:
        """Return a hidden file to write over, or the name of a new one."""
        try:
            return self.spares.pop()
        except IndexError:
            return partial_name(f"hsx-{next(self._hidden_numbers)}", self._home.token)

    def now_ns(self) -> int:
        """Return a time later than that of any line before, though the system's clock may have been set back."""
        self._time_ns = max(self._time_ns + 1, time.time_ns())
        return self._time_ns

    @contextmanager
    def current(self) -> Iterator[Shard]:
        """Lend the shard that takes requests; seal it if it is full or unsound then. Raises OSError: there is none."""
        with self._appending:
            if self._shard is not None and not self._shard.is_there():
                self._seal()
            shard = self._shard = self._shard or self._make()
            try:
                yield shard
            finally:
                if not shard.is_sound or shard.end >= self._limit:
                    self._seal()

    def close(self) -> None:
        """Seal the last shard and remove the spares; problems are logged and left to the next server."""
        with self._appending:
            self._seal()
        for spare in self.spares:
            with suppress(OSError):  # the rows in it are in a shard
                os.close(spare.fd)
            try:
                self._home.storage.unlink(spare.hidden)
            except OSError as error:
                self._home.tidy = False
                logger.error("%s", describe(f"{spare.hidden} could not be removed", error))

    def _make(self) -> Shard:
        storage = self._home.storage
        with suppress(FileExistsError):
            os.close(storage.create(SHARDS_MARK))
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError):
                return Shard.create(storage, self._home.token, stem(self._home.token, next(self._numbers)), self._durable)
        raise FileExistsError("every shard's name was taken by somebody else")

    def _seal(self) -> None:
        """End the shard, if there is one. Its problems concern no request and are logged."""
        shard, self._shard = self._shard, None
        try:
            if shard is not None:
                shard.seal()
        except OSError as error:
            self._home.tidy = False
            logger.error("%s", describe("a shard could not be sealed, which the next server will do", error))
