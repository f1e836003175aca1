"""Worker side: published files that are kept open, for requests that begin with the same tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllm_ascend_hsx.sinks.data_file import RowSource

_SPACE_IS_KNOWN_S = 1.0


class KeptFiles:
    """The files of one rank, by the number of their request. Thread-safe.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()  # guards everything below
        self._sources: dict[int, RowSource] = {}
        self._closed = False
        self._removed_bytes = 0
        self._counted_at = 0.0

    def add(self, number: int, source: RowSource) -> None:
        """Keep a file, which is released with this object at the latest."""
        with self._mutex:
            if not self._closed:
                self._sources[number] = source
                return
        source.release()

    def retain(self, number: int) -> RowSource | None:
        """Return a file that the caller must release, or None if it is not kept."""
        with self._mutex:
            source = self._sources.get(number)
            if source is not None:
                source.retain()
            return source

    def release(self, number: int) -> None:
        """Keep a file no longer."""
        with self._mutex:
            source = self._sources.pop(number, None)
        if source is not None:
            source.release()

    def close(self) -> None:
        """Release all files, also those that are added later."""
        with self._mutex:
            self._closed = True
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.release()

    def space(self) -> tuple[int, int]:
        """Return how many files are kept, and the bytes of those that consumers have removed.

        These are counted at most once a second, because that takes a system call for each file.
        """
        with self._mutex:
            now = self._clock()
            if now - self._counted_at >= _SPACE_IS_KNOWN_S or not self._sources:
                self._counted_at = now
                # Several members of a shard are in one file.
                self._removed_bytes = sum(dict(source.space for source in self._sources.values()).values())
            return len(self._sources), self._removed_bytes
