"""Landing: copy filled slots into the pinned ring, and deliver the rows that have arrived.

One thread issues the copies and waits for them. The copies run in order on one stream, so they
also complete in order. This thread sets the device, and no other thread records, queries or drops
events. A thread that has set no device would open a context on NPU 0 (~NPUEvent in torch_npu
2.10.0.post4, csrc/core/npu/NPUEvent.cpp:65, takes the current stream of the calling thread).

A failed device task is reported once, to the next thread that enters the task queue. All later
work is dropped without an error (csrc/core/npu/NPUQueue.cpp:543-592). So an error in this thread
is an error of the whole worker.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ascend_hsx.drafter.ring import PinnedRing, Run
from vllm_ascend_hsx.drafter.spans import Span, merge_rows, rows_in_chunk, split_spans
from vllm_ascend_hsx.drafter.staging import StagingSlot, npu

# Poll, because Event.synchronize would spin for the rest of a forward pass (NPUEvent.cpp:233).
_PAUSE_S = 0.0005
# Interval of entering the task queue. In an idle engine, no other thread would receive an error.
_ASK_S = 1.0
_WRITES_S = 0.05  # time to write rows that have just landed, before storage counts as slow
_OTHERS_S = 2.0  # time for another thread that has received a device error to report it


class DeviceError(RuntimeError):
    """The device has failed. Later results of this process are not reliable."""


@dataclass
class HostChunk:
    """Rows of one slot in host memory.

    Attributes:
        rows: pinned [rows, layers, hidden]. The rows of a span are valid until `release`.
        data: bytes of `rows`.
        spans: contents of the chunk. `Span.row` is an index into the chunk.
        requests: the requests of the slot, by id.
        first: index in the ring of the first row.
        issued_at, landed_at: times when the copy was issued and when the lander saw that it was
            complete, by time.perf_counter.
    """

    rows: torch.Tensor
    data: memoryview
    spans: list[Span]
    requests: Mapping[str, Any]
    _ring: PinnedRing
    first: int
    issued_at: float = field(default_factory=time.perf_counter, init=False)
    landed_at: float = field(default=0.0, init=False)

    def read(self, span: Span) -> memoryview:
        """Return the bytes of one span's rows."""
        row_bytes = self._ring.row_bytes
        return self.data[span.row * row_bytes : (span.row + span.num_rows) * row_bytes]

    def release(self, spans: Sequence[Span]) -> None:
        """Release `spans`; their memory may be reused."""
        self._ring.free(*((self.first + row, count) for row, count in merge_rows(spans)))


@dataclass
class _Batch:
    """Chunks with issued copies, and the event recorded after the copies."""

    chunks: list[HostChunk]
    event: Any


_End = None  # the job that ends the thread
Action = Callable[[], object]


class Lander:
    """A thread that copies filled slots into the ring, and delivers chunks that have landed.

    A full ring makes a copy wait for storage. The worker's main thread must not wait, so another
    thread issues the copies.

    Args:
        ring: destination of the rows.
        device: the worker's NPU.
        deliver: called from the lander's thread with each chunk that has landed, in order.
        on_failure: called from the lander's thread with the first exception of a device call or of
            `deliver`. Nothing is copied after this. Not called after `abandon`.
        make_room: called from the lander's thread if the ring stays full. Must cause all delivered
            rows to be written.
    """

    def __init__(
        self,
        ring: PinnedRing,
        device: torch.device,
        deliver: Callable[[HostChunk], None],
        on_failure: Callable[[Exception], None],
        make_room: Action = lambda: None,
    ) -> None:
        self._ring = ring
        self._device = device
        self._deliver = deliver
        self._make_room = make_room
        self._on_failure = on_failure
        self._stream = npu().Stream(device=device)
        self._jobs: queue.SimpleQueue[StagingSlot | Action | None] = queue.SimpleQueue()
        self._under_way: deque[_Batch | Action] = deque()
        self._unused: list[Any] = []  # events that no batch uses
        self._asked_by_others = npu().Event()
        self._asked_at = 0.0
        self._abandoned = threading.Event()
        self._calling = threading.Lock()  # during a device call, and until its error is reported
        self._mark = os.urandom(8)
        self._thread = threading.Thread(target=self._run, name="hsx-lander", daemon=True)
        self._thread.start()

    def submit(self, slot: StagingSlot) -> None:
        """Copy the rows of a slot.

        The slot may be written again once `issued` is set and `copied` has completed.
        """
        slot.issued.clear()
        slot.settled.clear()
        self._jobs.put(slot)

    def then(self, action: Action) -> None:
        """Call `action` from the lander's thread after all copies submitted so far have landed."""
        self._jobs.put(action)

    def drain(self) -> None:
        """Block until all submitted copies have landed, or the device has failed.

        Must not be called from the lander's thread.
        """
        landed = threading.Event()
        self.then(landed.set)
        landed.wait()

    def finish_call(self) -> None:
        """Wait for the lander's current device call, including the report of an error."""
        with self._calling:
            pass

    def ask(self) -> None:
        """Enter the task queue to receive the error of a failed task.

        The calling thread must have set the device.

        Raises:
            RuntimeError: from torch_npu, if a task has failed and no thread has received the error.
        """
        self._asked_by_others.record(self._stream)

    def abandon(self) -> None:
        """Stop copying, because the device has failed. Any thread may call this."""
        self._abandoned.set()
        self.then(lambda: None)  # wakes the lander's thread

    @property
    def waits_for_device(self) -> bool:
        """True if some issued copies have not landed."""
        return bool(self._under_way)

    def close(self, timeout: float | None = None) -> bool:
        """Land all submitted copies and end the thread. No copy reads a slot afterwards.

        Returns:
            False if this takes longer than `timeout` seconds, because the ring stays full or the
            device does not complete the copies.
        """
        self._jobs.put(_End)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        npu().set_device(self._device)
        self._probe = npu().Event()
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - reported to the worker as fatal
            self._report(error)
            self._decline()
        self._unused.clear()
        del self._probe

    def _serve(self) -> None:
        """Copy slots and run actions until the end, in the order of the queue."""
        while (job := self._next_job()) is not _End:
            if not isinstance(job, StagingSlot):
                self._under_way.append(job)
                continue
            try:
                self._copy(job)
            finally:
                job.issued.set()
                job.settled.set()
        self._jobs.put(_End)  # for _decline, if the rest does not land
        self._land_all()

    def _next_job(self) -> StagingSlot | Action | None:
        """Return the next job. Deliver chunks that land in the meantime."""
        while True:
            self._hand_out()
            with suppress(queue.Empty):
                return self._jobs.get(timeout=_PAUSE_S if self._under_way else None)

    def _copy(self, slot: StagingSlot) -> None:
        """Issue the copies of a slot."""
        begin, total, chunks = 0, slot.num_rows, list[HostChunk]()
        with npu().stream(self._stream):
            with self._device_call():
                self._stream.wait_event(slot.written)
            while begin < total:
                wish = rows_in_chunk(slot.spans, begin, self._ring.rows_per_chunk)
                run = self._ring.take(wish)
                if run is None:
                    self._expect(chunks)
                    chunks = []
                    run = self._wait_for_memory(slot, wish)
                end = begin + len(run.rows)
                run.data[-len(self._mark) :] = self._mark
                with self._device_call():
                    run.rows.copy_(slot.rows[begin:end], non_blocking=True)
                spans = split_spans(slot.spans, begin, end)
                chunks.append(
                    HostChunk(run.rows, run.data, spans, slot.requests, self._ring, run.first)
                )
                begin = end
            with self._device_call():
                slot.copied.record(self._stream)
            self._expect(chunks)

    def _expect(self, chunks: list[HostChunk]) -> None:
        """Deliver these chunks once all copies issued so far are complete."""
        if not chunks:
            return
        event = self._unused.pop() if self._unused else npu().Event()
        with self._device_call():
            event.record(self._stream)
        self._under_way.append(_Batch(chunks, event))
        self._asked_at = time.monotonic()

    def _wait_for_memory(self, slot: StagingSlot, wish: int) -> Run:
        """Land all issued copies, and wait until writers release rows of the ring."""
        self._land_all()
        if (run := self._ring.wait(wish, _WRITES_S)) is None:
            self._make_room()
            slot.settled.set()
            run = self._ring.wait(wish)
            slot.settled.clear()
        assert run is not None
        return run

    def _land_all(self) -> None:
        while self._under_way:
            self._hand_out()
            if self._under_way:
                self._abandoned.wait(_PAUSE_S)

    def _hand_out(self) -> None:
        """Deliver the chunks that have landed, and run the actions that were queued after them."""
        if self._abandoned.is_set():
            raise DeviceError("the device has failed in another thread")
        while self._under_way:
            first = self._under_way[0]
            if isinstance(first, _Batch) and not self._has_landed(first):
                return
            self._under_way.popleft()
            if isinstance(first, _Batch):
                self._unused.append(first.event)
                for chunk in first.chunks:
                    self._deliver(chunk)
            else:
                first()

    def _has_landed(self, batch: _Batch) -> bool:
        """Return whether the copies of a batch are complete.

        Raises:
            DeviceError: if the device has dropped a copy. A recorded event is no proof of the copy:
                a failed task also drops queued records, and a reused event then shows the earlier
                record (ReadQueue and ClearUnrecordedCount, csrc/core/npu/NPUQueue.cpp:469).
        """
        with self._device_call():
            complete = batch.event.query()
        now = time.perf_counter()
        if not complete:
            self._ask_for_error()
            return False
        for chunk in batch.chunks:
            if chunk.data[-len(self._mark) :] == self._mark:
                self._ask_for_error(at_once=True)
                self._abandoned.wait(_OTHERS_S)
                raise DeviceError("the device has dropped a copy after an earlier failure")
            chunk.landed_at = now
        return True

    def _ask_for_error(self, at_once: bool = False) -> None:
        """Enter the task queue, at most once per second, to receive the error of a failed task."""
        now = time.monotonic()
        if at_once or now - self._asked_at >= _ASK_S:
            self._asked_at = now
            with self._device_call():
                self._probe.record(self._stream)

    @contextmanager
    def _device_call(self) -> Iterator[None]:
        """Report an exception of a device call before another thread can pass `finish_call`."""
        with self._calling:
            try:
                yield
            except Exception as error:
                self._report(error)
                raise

    def _report(self, error: Exception) -> None:
        if not self._abandoned.is_set():
            self._abandoned.set()
            self._on_failure(error)

    def _decline(self) -> None:
        """Run all actions and release all slots without copying, until the thread must end."""
        for each in self._under_way:
            if not isinstance(each, _Batch):
                each()
        self._under_way.clear()
        while (job := self._jobs.get()) is not _End:
            if isinstance(job, StagingSlot):
                job.issued.set()
                job.settled.set()
            else:
                job()
