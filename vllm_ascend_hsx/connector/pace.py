"""Measure how fast storage takes rows, and how fast the engine makes them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

_FORGET_S = 1.0  # time constant, in seconds of full load, with which old writes fade
_WINDOW = 4  # steps of a moving average; an engine launches one or two steps ahead of its device
_DECAY = 0.999  # factor by which a peak decays with each step
_REMEMBERED = 16  # steps
_LONGEST_S = 1.0


class WriteRate:
    """Bytes per second that storage takes while all writers are busy. Thread-safe.

    It is the rate of one thread, added up over all threads, so a light load does not make storage
    look slow.

    Args:
        num_writers: number of writing threads.
        clock: monotonic clock in seconds.
    """

    def __init__(self, num_writers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._num_writers = num_writers
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = 0.0
        self._busy = 0.0  # thread seconds
        self._running: dict[int, tuple[float, int]] = {}  # start time and bytes, by thread

    def begin(self, num_bytes: int) -> None:
        """Record that the calling thread starts to write `num_bytes`."""
        with self._lock:
            self._running[threading.get_ident()] = self._clock(), num_bytes

    def end(self, num_bytes: int) -> None:
        """Record that the calling thread has written `num_bytes`."""
        with self._lock:
            since, _ = self._running.pop(threading.get_ident())
            seconds = self._clock() - since
            keep = math.exp(-seconds / (_FORGET_S * self._num_writers))
            self._bytes = self._bytes * keep + num_bytes
            self._busy = self._busy * keep + seconds

    def value(self) -> float | None:
        """Return the rate, or None before the first write. A long-running write lowers it."""
        with self._lock:
            if not self._bytes:
                return None
            now, usual = self._clock(), self._bytes / max(self._busy, 1e-9)
            running = [
                min(usual, size / max(now - since, 1e-9))
                for since, size in self._running.values()
                if size
            ]
            return usual * (self._num_writers - len(running)) + sum(running)


class StepRate:
    """Peak rates, which decay, of rows and steps, without the time that steps wait for storage.

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
        total = sum(seconds for seconds, _ in self._steps)
        self.bytes_per_s = _peak(self.bytes_per_s, sum(size for _, size in self._steps) / total)
        if all(size for _, size in self._steps):
            self.steps_per_s = _peak(self.steps_per_s, _WINDOW / total)

    @property
    def longest(self) -> float:
        """Seconds of the second-longest recent step. An idle engine makes one step look long."""
        return min(sorted(self._lengths)[-2], _LONGEST_S) if len(self._lengths) > 1 else _LONGEST_S


def _peak(known: float | None, seen: float) -> float:
    return seen if known is None else max(seen, known * _DECAY)
