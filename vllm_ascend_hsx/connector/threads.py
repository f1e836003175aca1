"""Threads that open and write files, so that slow storage delays neither a step nor the exit."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

Job: TypeAlias = "Callable[[], Iterable[Job] | None]"


class ThreadPool:
    """Daemon threads that take jobs in order of their submission.

    A job must not raise. It may return jobs that can start now that it has ended; its thread runs
    them. Daemon threads, unlike those of concurrent.futures, do not keep a process alive that
    waits for storage in vain.

    Args:
        num_threads: number of threads.
        name: name of the threads, to which their number is appended if there are several.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the next two
        self._pending = 0  # submitted jobs that have not ended
        self._last_end = 0.0
        names = [f"{name}-{index}" for index in range(num_threads)] if num_threads > 1 else [name]
        self._threads = [threading.Thread(target=self._run, name=each, daemon=True) for each in names]
        for thread in self._threads:
            thread.start()

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

    def silent_for(self) -> float:
        """Return the seconds since the last job ended, or 0 if no job is pending."""
        with self._changed:
            return time.monotonic() - self._last_end if self._pending else 0.0

    def end(self) -> None:
        """Let each thread end once all submitted jobs have been taken."""
        for _ in self._threads:
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
                ready.extend(ready.popleft()() or ())
            with self._changed:
                self._pending -= 1
                self._last_end = time.monotonic()
                if not self._pending:
                    self._changed.notify_all()
