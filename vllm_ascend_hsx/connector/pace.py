"""How fast the storage takes rows, and how fast the engine makes them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

_FORGET_S = 1.0  # of full work: after so long a change of the storage's speed is half known
_WINDOW = 4  # steps; an engine launches one or two ahead of its device
_DECAY = 0.999  # of a peak, with each step
_REMEMBERED = 16  # steps
_LONGEST_S = 1.0


class WriteRate:
    """Bytes per second that the storage takes while all writers are busy: what a thread gets, added up over the
    threads. So light load does not make it look slow. Any thread.

    Args:
        num_writers: threads that write.
        clock: seconds that never run backwards.
    """

    def __init__(self, num_writers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._num_writers = num_writers
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = 0.0
        self._busy = 0.0  # thread seconds
        self._running: dict[int, tuple[float, int]] = {}  # since when, and how many bytes, by thread

    def begin(self, num_bytes: int) -> None:
        """The calling thread begins to write so many bytes."""
        with self._lock:
            self._running[threading.get_ident()] = self._clock(), num_bytes

    def end(self, num_bytes: int) -> None:
        """It has written so many of them."""
        with self._lock:
            since, _ = self._running.pop(threading.get_ident())
            seconds = self._clock() - since
            keep = math.exp(-seconds / (_FORGET_S * self._num_writers))
            self._bytes = self._bytes * keep + num_bytes
            self._busy = self._busy * keep + seconds

    def value(self) -> float | None:
        """None if nothing has been written yet. A thread that has been writing for long gets less than before."""
        with self._lock:
            if not self._bytes:
                return None
            now, usual = self._clock(), self._bytes / max(self._busy, 1e-9)
            running = [min(usual, size / max(now - since, 1e-9)) for since, size in self._running.values() if size]
            return usual * (self._num_writers - len(running)) + sum(running)


class StepRate:
    """How fast steps make rows, time that they wait for storage left out: peaks, which fade. The main thread's.

    Args:
        clock: seconds that never run backwards.
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
        """The step waited so long for storage."""
        self._waited += seconds

    def stepped(self, num_bytes: int) -> None:
        """A step ends that staged rows of so many bytes."""
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
        """Seconds of the longest of the last steps but one: an engine that had nothing to do is no long step."""
        return min(sorted(self._lengths)[-2], _LONGEST_S) if len(self._lengths) > 1 else _LONGEST_S


def _peak(known: float | None, seen: float) -> float:
    return seen if known is None else max(seen, known * _DECAY)
