"""Progress of a rank: unwritten rows, and the rates of storage and engine."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from vllm_ascend_hsx.connector.budget import StoredFiles
from vllm_ascend_hsx.connector.extraction import Extraction
from vllm_ascend_hsx.connector.metadata import RankState
from vllm_ascend_hsx.drafter.spans import Span

_FORGET_S = 1.0  # time constant of the write rate, in seconds of full load
_WINDOW = 4  # steps of a moving average; engines launch one or two steps ahead of the device
_DECAY = 0.999  # factor by which a peak decays with each step
_REMEMBERED = 16  # steps
_LONGEST_S = 1.0  # upper bound of StepRate.longest


class WriteRate:
    """Bytes per second that storage takes while all writers are busy. Not thread-safe.

    The rate is that of a thread while it writes, times the number of threads. So a light load does
    not make storage look slow.

    Args:
        num_writers: number of writing threads. The attribute may be set before the first write.
        clock: monotonic clock in seconds.
    """

    def __init__(self, num_writers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_writers = num_writers
        self._clock = clock
        self._bytes = 0.0
        self._busy = 0.0  # thread seconds
        self._running: dict[int, tuple[float, int]] = {}  # start time and bytes, by thread

    def begin(self, num_bytes: int) -> None:
        """Record that the calling thread starts to write `num_bytes`."""
        self._running[threading.get_ident()] = self._clock(), num_bytes

    def end(self, num_bytes: int) -> None:
        """Record that the calling thread has written `num_bytes`."""
        since, _ = self._running.pop(threading.get_ident())
        seconds = self._clock() - since
        keep = math.exp(-seconds / (_FORGET_S * self.num_writers))
        self._bytes = self._bytes * keep + num_bytes
        self._busy = self._busy * keep + seconds

    def value(self) -> float | None:
        """Return the rate, or None before the first write. Long-running writes lower the rate."""
        if not self._bytes:
            return None
        usual = self._bytes / max(self._busy, 1e-9)
        now = self._clock()
        running = [
            min(usual, size / max(now - since, 1e-9))
            for since, size in self._running.values()
            if size
        ]
        return usual * (self.num_writers - len(running)) + sum(running)


class StepRate:
    """Decaying peak rates of rows and steps. Time that steps wait for storage does not count.

    For the main thread only.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # seconds, bytes
        self._lengths: deque[float] = deque(maxlen=_REMEMBERED)
        self._ended: float | None = None
        self._waited = 0.0
        self.bytes_per_s: float | None = None
        self.steps_per_s: float | None = None

    def waited(self, seconds: float) -> None:
        """Record that the step waited for storage."""
        self._waited += seconds

    def stepped(self, num_bytes: int) -> None:
        """Record the end of a step that staged `num_bytes` of rows."""
        now = self._clock()
        before, self._ended = self._ended, now
        waited, self._waited = self._waited, 0.0
        if before is None:
            return
        seconds = max(now - before - waited, 1e-6)
        self._lengths.append(seconds)
        self._steps.append((seconds, num_bytes))
        if not num_bytes or len(self._steps) < _WINDOW:
            return
        times, sizes = zip(*self._steps, strict=True)
        total = sum(times)
        self.bytes_per_s = _peak(self.bytes_per_s, sum(sizes) / total)
        if all(sizes):
            self.steps_per_s = _peak(self.steps_per_s, _WINDOW / total)

    @property
    def longest(self) -> float:
        """Seconds of the second-longest recent step. The longest may include idle time."""
        return min(sorted(self._lengths)[-2], _LONGEST_S) if len(self._lengths) > 1 else _LONGEST_S


def _peak(known: float | None, seen: float) -> float:
    return seen if known is None else max(seen, known * _DECAY)


class RankProgress:
    """Progress of one rank, for the scheduler. Thread-safe.

    Args:
        row_bytes: bytes of one token's rows in memory.
        num_writers: number of writing threads.
        files: the rank's files in the storage directory, after the first check; None if they are
            not counted.

    Attributes:
        backlog: bytes of rows that were computed but are not yet in their files.
        step_rate: rates of the engine.
    """

    def __init__(self, row_bytes: int, num_writers: int, files: StoredFiles | None = None) -> None:
        self.backlog = 0
        self.step_rate = StepRate()
        self._row_bytes = row_bytes
        self._mutex = threading.Lock()  # guards `backlog` and everything below
        self._write_rate = WriteRate(num_writers)
        self._coming: dict[Extraction, int] = {}  # prompt rows that are not computed
        self._decided: list[tuple[Extraction, str | None]] = []
        self._refused: dict[str, str] = {}
        self._num_started = 0
        self._staged_bytes = 0  # in the current step
        self._landed_bytes = 0  # bytes of the backlog that wait for storage
        self._finishing = 0  # copies of prefixes and ends of files in progress
        self._answered_at = 0.0
        self._files = files
        self._checked = 0 if files is None else 1
        self._reported = RankState()

    def begin(self, request: Extraction, prompt_rows: int) -> None:
        """Record a request that starts, and the number of prompt rows to compute."""
        with self._mutex:
            self._num_started += 1
            self._coming[request] = prompt_rows

    def refuse(self, request_id: str, reason: str) -> None:
        """Record a request that was refused at the start."""
        with self._mutex:
            self._num_started += 1
            self._refused[request_id] = reason

    def decide(self, request: Extraction, error: str | None) -> None:
        """Record that a request is decided: complete or aborted (None), or failed with `error`.

        A published file is counted in the report that has the outcome.
        """
        with self._mutex:
            if self._files is not None and request.stored_bytes:
                self._files.add(request.path, request.stored_bytes)
            self._coming.pop(request, None)
            self._decided.append((request, error))

    def check(self, number: int) -> None:
        """Stop counting files that consumers have removed. Blocks on storage."""
        assert self._files is not None
        with self._mutex:
            files = self._files.all()
        missing = self._files.missing(files)
        with self._mutex:
            self._files.forget(missing)
            self._checked = number

    def staged(self, num_rows: int, parts: Iterable[tuple[Extraction, Span]] = ()) -> None:
        """Record rows of a step. The prompt rows in `parts` are computed now."""
        num_bytes = num_rows * self._row_bytes
        with self._mutex:
            for request, span in parts if self._coming else ():
                if (coming := self._coming.pop(request, 0) - span.num_rows) > 0:
                    self._coming[request] = coming
            self._staged_bytes += num_bytes
            self.backlog += num_bytes

    def landed(self, num_rows: int) -> None:
        """Record rows in host memory that wait for storage."""
        with self._mutex:
            self._occupy()
            self._landed_bytes += num_rows * self._row_bytes

    def begin_write(self, num_rows: int) -> None:
        """Record that the calling thread starts to write landed rows."""
        with self._mutex:
            self._write_rate.begin(num_rows * self._row_bytes)

    def end_write(self, num_rows: int, written: int) -> None:
        """Record that the rows have left host memory, and that `written` rows were written."""
        with self._mutex:
            self._answered_at = time.monotonic()
            self._write_rate.end(written * self._row_bytes)
            self.backlog -= num_rows * self._row_bytes
            self._landed_bytes -= num_rows * self._row_bytes

    def write_rate(self) -> float | None:
        """Return the bytes per second that storage takes, or None before the first write."""
        with self._mutex:
            return self._write_rate.value()

    def resize_writers(self, num_writers: int) -> None:
        """Record the number of writing threads, before the first write."""
        self._write_rate.num_writers = num_writers

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Count the block as work of the storage, because storage may hang in the block."""
        with self._mutex:
            self._occupy()
            self._finishing += 1
            self._write_rate.begin(0)
        try:
            yield
        finally:
            with self._mutex:
                self._write_rate.end(0)
                self._answered_at = time.monotonic()
                self._finishing -= 1

    def stalled_for(self) -> float:
        """Return the seconds since storage last made progress, or 0 if it has nothing to do."""
        return (
            time.monotonic() - self._answered_at if self._landed_bytes or self._finishing else 0.0
        )

    def _occupy(self) -> None:
        if not self._landed_bytes and not self._finishing:  # storage was idle
            self._answered_at = time.monotonic()

    def end_step(
        self, paused: bool, unresponsive: bool, opens_slowly: bool, needs_space: bool
    ) -> tuple[RankState, list[tuple[Extraction, str | None]], dict[str, str]] | None:
        """Return the rank's state, and the requests decided and refused since the last call.

        Return None if nothing has changed. For the main thread only.

        Args:
            paused, unresponsive, opens_slowly, needs_space: as in RankState.
        """
        with self._mutex:
            staged, self._staged_bytes = self._staged_bytes, 0
            self.step_rate.stepped(staged)
            state = RankState(
                backlog=self.backlog,
                coming=sum(self._coming.values()) * self._row_bytes,
                started=self._num_started,
                write_rate=self._write_rate.value(),
                prompt_rate=self.step_rate.bytes_per_s,
                step_rate=self.step_rate.steps_per_s,
                paused=paused,
                unresponsive=unresponsive,
                opens_slowly=opens_slowly,
                needs_space=needs_space,
                stored=0 if self._files is None else self._files.num_bytes,
                checked=self._checked,
            )
            if not self._decided and not self._refused and state == self._reported:
                return None
            decided, self._decided = self._decided, []
            refused, self._refused = self._refused, {}
            self._reported = state
            return state, decided, refused
