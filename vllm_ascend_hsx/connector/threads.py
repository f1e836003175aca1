"""The threads of a worker beside its main one: those that write files, and the one that opens them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class JobThread:
    """Runs what it is given, in order. A job must not raise."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout: float | None = None) -> bool:
        """Run what was submitted, then end. False: not within `timeout` seconds; it goes on by itself."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class WriterThread(JobThread):
    """All work on one file goes through one writer, so a row that is computed again is written again behind its first version, and the
    end of a request comes behind all of its rows.

    Attributes:
        assigned: bytes of the files that are its own now; the main thread gives the next file to the writer with the least.
    """

    def __init__(self, name: str) -> None:
        self._mutex = threading.Lock()
        self.assigned = 0
        super().__init__(name)

    def assign(self, num_bytes: int) -> None:
        """Add to `assigned`, from any thread; negative once a file has ended."""
        with self._mutex:
            self.assigned += num_bytes


class OpenerThread(JobThread):
    """Opens files beside the forward pass. A directory that answers slowly costs a step only what is left of it at the step's end."""

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

    def wait(self, patience: float) -> bool:
        """Wait until all that was submitted is done. False: the storage has not answered one call for `patience` seconds."""
        with self._condition:
            while self._done < self._submitted and (left := self._last_done + patience - time.monotonic()) > 0:
                self._condition.wait(left)
            return self._done == self._submitted
