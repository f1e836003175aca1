"""Worker side: keep published files open for requests with the same first tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from vllm_ascend_hsx.connector.threads import Job
from vllm_ascend_hsx.sinks.data_file import RowSource

_SPACE_IS_KNOWN_S = 1.0
# Removed files may hold 1 / _PART_OF_FREE of the free space. New files need the rest.
_PART_OF_FREE = 4
_FULL = ("ENOSPC", "EDQUOT", "EMFILE", "ENFILE")  # no space, or no descriptors


class OpenSources:
    """The open sources of one rank, by request number. Thread-safe.

    System calls on the files run in another thread, because storage that hangs must not stop a
    step.

    Args:
        submit: has a job run in another thread.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self, submit: Callable[[Job], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._mutex = threading.Lock()  # guards everything below
        self._sources: dict[int, RowSource] = {}
        self._closed = False
        self._removed_bytes = 0  # by the last count
        self._needs_space = False
        self._is_counting = False
        self._counted_at = 0.0

    def add(self, number: int, source: RowSource) -> None:
        """Keep a file open until `release` or `close`."""
        with self._mutex:
            if not self._closed:
                self._sources[number] = source
                return
        source.release()

    def retain(self, number: int) -> RowSource | None:
        """Return a file that the caller must release, or None if the file is not open."""
        with self._mutex:
            source = self._sources.get(number)
            if source is not None:
                source.retain()
            return source

    def release(self, number: int) -> None:
        """Release a file."""
        with self._mutex:
            source = self._sources.pop(number, None)
        if source is not None:
            self._submit(source.release)

    def close(self) -> None:
        """Release all files, including files that are added later."""
        with self._mutex:
            self._closed = True
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.release()

    def space(self) -> tuple[int, int]:
        """Return the number of open files, and the bytes of files that consumers have removed.

        The bytes are as of the last count; see `needs_space`.
        """
        with self._mutex:
            return len(self._sources), self._removed_bytes if self._sources else 0

    def failed(self, kind: str) -> None:
        """Record that a request has failed. If storage was full, removed files must be released."""
        with self._mutex:
            self._needs_space |= kind in _FULL

    def needs_space(self) -> bool:
        """Return whether removed files may hold space that new files need, once per occurrence.

        Each step calls this. A new count starts if there are files, and if the last count has
        ended and began at least a second ago.
        """
        with self._mutex:
            now = self._clock()
            is_due = (
                bool(self._sources)
                and not self._is_counting
                and now - self._counted_at >= _SPACE_IS_KNOWN_S
            )
            if is_due:
                self._is_counting, self._counted_at = True, now
            needed, self._needs_space = self._needs_space, False
        if is_due:
            self._submit(self._count)
        return needed

    def _count(self) -> None:
        with self._mutex:
            sources = list(self._sources.values())
            for source in sources:
                source.retain()
        # By device and inode, because members of a shard share a file.
        removed: dict[tuple[int, int], int] = {}
        free: dict[int, int] = {}
        for source in sources:
            with suppress(OSError):  # skip files of unknown size
                file, num_bytes = source.space
                removed[file] = num_bytes
                if num_bytes and file[0] not in free:
                    free[file[0]] = source.free_space
            source.release()
        with self._mutex:
            self._removed_bytes, self._is_counting = sum(removed.values()), False
            self._needs_space |= any(
                self._removed_bytes > each // _PART_OF_FREE for each in free.values()
            )
