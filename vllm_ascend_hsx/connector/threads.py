"""Helper threads of a worker: one opens files, the others write them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]
WriterJob: TypeAlias = "Callable[[], Iterable[WriterJob]]"


class JobThread:
    """A thread that runs jobs in order. A job must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that have not started."""
        return self._jobs.qsize()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout: float | None = None) -> bool:
        """Run all submitted jobs, then end the thread.

        Returns:
            False if this takes longer than `timeout` seconds. The thread then continues in the
            background.
        """
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class WriterPool:
    """Threads that write and finish files. An idle thread takes the next job.

    A job must not raise. It may return jobs that can start now that it has ended; its thread runs
    them.

    Args:
        num_threads: number of threads.
        name: name of the threads, to which their number is appended.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[WriterJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def submit(self, job: WriterJob) -> None:
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all submitted jobs have ended. Must not be called from the pool's threads."""
        everybody = threading.Barrier(self.num_threads + 1)

        def meet() -> tuple[()]:
            everybody.wait()
            return ()

        for _ in self._threads:
            self.submit(meet)
        everybody.wait()

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

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            ready = deque([job])
            while ready:
                ready.extend(ready.popleft()())


class OpenerThread(JobThread):
    """A thread that opens files during the forward pass.

    A slow directory delays a step only by the time that remains when the forward pass has ended.
    """

    def __init__(self, name: str) -> None:
        self._condition = threading.Condition()
        self._submitted = 0
        self._done = 0
        self._last_done = 0.0
        super().__init__(name)

    def submit(self, job: Job) -> None:
        with self._condition:
            if self._submitted == self._done:
                self._last_done = time.monotonic()
            self._submitted += 1

        def run() -> None:
            try:
                job()
            finally:
                with self._condition:
                    self._done += 1
                    self._last_done = time.monotonic()
                    self._condition.notify_all()

        super().submit(run)

    def wait(self, timeout: float) -> bool:
        """Wait until all submitted jobs have ended. Return False after `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: self._done == self._submitted, timeout)

    def silent_for(self) -> float:
        """Return the seconds since the last job ended, or 0 if no job is pending."""
        with self._condition:
            return 0.0 if self._done == self._submitted else time.monotonic() - self._last_done
