"""Threads that open and write files, because slow storage must delay neither steps nor the exit.

Also `SpanSet`, the set of the token positions in a file.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

logger = logging.getLogger(__name__)

Job: TypeAlias = "Callable[[], Iterable[Job] | None]"
_NAMED = 8  # missing spans that an error lists; the others are counted


class ThreadPool:
    """Daemon threads that take jobs in order of their submission.

    A job must not raise. If a job raises, the exception is logged and the thread takes the next
    job. A job may return jobs that can start after it; the same thread runs them. Daemon threads,
    unlike the threads of concurrent.futures, do not keep a process alive that waits for storage.

    Args:
        num_threads: number of threads.
        name: name of the first thread. Other threads have a number appended.

    Attributes:
        num_threads: number of threads that take jobs.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the next two attributes
        self._pending = 0  # submitted jobs that have not ended
        self._last_end = 0.0
        self._name = name
        self._threads: list[threading.Thread] = []  # including threads that have ended
        self.num_threads = 0
        self.resize(num_threads)

    def resize(self, num_threads: int) -> None:
        """Start threads, or end some after all jobs submitted so far. For one thread only."""
        for _ in range(num_threads - self.num_threads):
            name = f"{self._name}-{len(self._threads)}" if self._threads else self._name
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        for _ in range(self.num_threads - num_threads):
            self._jobs.put(None)
        self.num_threads = num_threads

    @property
    def pending(self) -> int:
        """Number of submitted jobs that have not ended."""
        return self._pending

    def submit(self, *jobs: Job) -> None:
        with self._changed:
            if not self._pending:
                self._last_end = time.monotonic()
            self._pending += len(jobs)
        for job in jobs:
            self._jobs.put(job)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all submitted jobs have ended. Return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def stalled_for(self) -> float:
        """Return the seconds since the last job ended, or 0 if no job is pending."""
        with self._changed:
            return time.monotonic() - self._last_end if self._pending else 0.0

    def end(self) -> None:
        """End each thread once all submitted jobs have been taken. Do not wait."""
        for _ in range(self.num_threads):
            self._jobs.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the threads have ended.

        Returns:
            False if this takes longer than `timeout` seconds. The threads then continue in the
            background.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, timeout: float | None = None) -> bool:
        """Run all submitted jobs and end the threads. Return False as `join` does."""
        self.end()
        return self.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            ready = deque([job])
            while ready:
                try:
                    ready.extend(ready.popleft()() or ())
                except Exception:  # a bug must not stop other jobs
                    logger.exception("a job has failed; please report this")
            with self._changed:
                self._pending -= 1
                self._last_end = time.monotonic()
                if not self._pending:
                    self._changed.notify_all()


class SpanSet:
    """Token positions that have been written.

    Attributes:
        spans: sorted spans [first, end) that do not touch. Writes in order make a single span.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def add(self, first: int, end: int) -> None:
        """Add positions [first, end). An empty span adds nothing."""
        if first >= end:
            return
        apart = []
        for span in self.spans:
            if span[1] < first or end < span[0]:
                apart.append(span)
            else:
                first, end = min(first, span[0]), max(end, span[1])
        insort(apart, (first, end))
        self.spans = apart

    def missing(self, end: int) -> list[tuple[int, int]]:
        """Return the spans of [0, end) that are not in the set, in order."""
        gaps, position = [], 0
        for span in [*self.spans, (end, end)]:
            if position < min(span[0], end):
                gaps.append((position, min(span[0], end)))
            position = max(position, span[1])
        return gaps


def describe_missing(missing: list[tuple[int, int]], tokens: int) -> str:
    """Return the missing spans of `tokens` positions as text."""
    named = ", ".join(f"[{first}, {end})" for first, end in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more spans" if len(missing) > _NAMED else ""
    return f"{named}{more} of {tokens}"
