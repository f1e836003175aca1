"""Staging: device slots for the rows of a step, and asynchronous copies to the pinned ring.

A rank's slots hold its share of a step, one of `tensor_parallel` equal ones. A step of which the
rank owns more takes several slots, or the same one again after its copy. These orderings must hold:
* the copy reads a slot after it was written           the copy stream waits for `slot.written`
* a slot is written again after its copy was issued    the host waits for `slot.issued`
* ... and after that copy has completed                the device waits for `slot.copied`
* a writer reads pinned memory after the copy          the writer waits in `HostChunk.wait`
* pinned memory is reused after it was read            each reader calls `HostChunk.release`
The host's wait for `slot.issued` exists because a full ring delays the copier; within a step it
also waits for the copier to see the slot.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.rotation import TurnBack
from vllm_ascend_hsx.drafter.shapes import turned_rows
from vllm_ascend_hsx.drafter.spans import Span, cut_spans, merge_rows, rows_in_chunk, split_spans
from vllm_ascend_hsx.protocol.files import OnError


def _npu() -> Any:
    """Return torch.npu: the device-neutral and CUDA names are placeholders (MR:5177)."""
    return torch.npu  # type: ignore[attr-defined]


class StagingSlot:
    """Device memory for rows of one step, and the events that order access to it.

    Attributes:
        rows: [rows of a slot, layers, hidden], model dtype.
        spans: contents of the slot. `Span.row` is an index into the slot.
        requests: the requests of the spans, by id; set by the caller of `Copier.submit`.
        issued: set once the copy has been issued.
        settled: set while the copier waits for a full ring, and once `issued` is set. In both cases
            only storage can cause further delay.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.spans: list[Span] = []
        self.requests: Mapping[str, Any] = {}
        self.written = _npu().Event()
        self.copied = _npu().Event()
        self.issued = threading.Event()
        self.issued.set()
        self.settled = threading.Event()
        self.settled.set()

    @property
    def num_rows(self) -> int:
        return sum(span.num_rows for span in self.spans)


class StagingCache:
    """A fixed number of staging slots, used in turn.

    Slots are allocated with the drafter, before vLLM profiles the device. So their memory is
    counted, and never taken from the KV cache later.

    Args:
        num_slots: number of slots.
        slot_rows: rows of a slot; see shapes.slot_rows.
        num_layers, hidden_size: shape of a row.
        dtype: the target's dtype; rows are never converted.
        device: the worker's NPU.
        layer_order: for each layer of a row, its index in the target's list (see ExtractionTarget).
        rotation: float32 [hidden, hidden], Q of a target that returns X @ Q; rows become X. None
            for other targets.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        slot_rows: int,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layer_order: Sequence[int],
        rotation: torch.Tensor | None = None,
    ) -> None:
        self.rows = torch.empty((num_slots, slot_rows, num_layers, hidden_size), dtype=dtype, device=device)
        self.layer_order = tuple(layer_order)
        self._turn_back = None if rotation is None else TurnBack(rotation, turned_rows(slot_rows))
        self.slots = [StagingSlot(self.rows[index]) for index in range(num_slots)]
        self._next = 0
        self._filled: StagingSlot | None = None
        # The connector sets this at the start of each step. Without a connector nothing is staged.
        self.wanted: dict[str, int] = {}
        # Wait until the slot's last copy was issued. False: it will not be in time. The rows of
        # these spans are dropped, and later ones of their requests in this step.
        self.wait_for_slot: Callable[[StagingSlot, Sequence[Span]], bool] = lambda slot, _: slot.issued.wait()
        # Called with each slot of a step but the last, which `take` returns. Set by the connector.
        self.pass_on: Callable[[StagingSlot], None]

    def write(self, target_rows: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Write the rows of `spans` into the next slots, once, on the current stream.

        If the slots hold less, the stream waits for the copies of the first while it writes the
        others.

        Args:
            target_rows: one [tokens, hidden] per extracted layer, in the target's (ascending)
                order.
            spans: the rows to write, not empty. `Span.row` is an index into `target_rows`.

        Raises:
            ValueError: if the number of layers or the dtype is not that of the staging slots.
        """
        if len(target_rows) != len(self.layer_order) or target_rows[0].dtype != self.rows.dtype:
            raise ValueError(
                f"the target returned {len(target_rows)} layers of {target_rows[0].dtype}, "
                f"expected {len(self.layer_order)} of {self.rows.dtype}"
            )
        dropped: set[str] = set()
        for piece in cut_spans(spans, self.rows.shape[1]):
            if dropped:
                piece = [span for span in piece if span.request_id not in dropped]
                if not piece:
                    continue
            if (filled := self.take()) is not None:
                self.pass_on(filled)
            slot = self.slots[self._next]
            if self.wait_for_slot(slot, piece):
                self._fill(slot, target_rows, piece)
            else:
                dropped |= {span.request_id for span in piece}

    def _fill(self, slot: StagingSlot, target_rows: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        self._next = (self._next + 1) % len(self.slots)
        compute = _npu().current_stream()
        compute.wait_event(slot.copied)
        at = 0
        for row, count in merge_rows(spans):
            layers, out = [target_rows[source][row : row + count] for source in self.layer_order], slot.rows[at : at + count]
            if self._turn_back is None:
                torch.stack(layers, dim=1, out=out)  # one launch and no temporary: `out` is the final place
            else:
                self._turn_back(layers, out)
            at += count
        at, staged = 0, []
        for span in spans:
            staged.append(Span(span.request_id, span.first, span.num_rows, at))
            at += span.num_rows
        slot.spans = staged
        slot.written.record(compute)
        self._filled = slot

    def take(self) -> StagingSlot | None:
        """Return the slot that was filled last, if it was not returned before.

        The caller owns its rows until it sets `issued`.
        """
        slot, self._filled = self._filled, None
        return slot


@dataclass
class HostChunk:
    """Rows of one slot on their way to the host.

    Attributes:
        rows: pinned [rows, layers, hidden]. The rows of a span are valid from the return of `wait`
            to their `release`.
        data: the bytes of `rows`.
        spans: contents of the chunk. `Span.row` is an index into the chunk.
        requests: those of the slot.
        copied: event that is recorded on the copy stream after the copy.
        issued_at: when the copy was issued, by time.perf_counter.
    """

    rows: torch.Tensor
    data: memoryview
    spans: list[Span]
    requests: Mapping[str, Any]
    copied: Any
    _ring: PinnedRing
    _first: int
    issued_at: float = field(default_factory=time.perf_counter, init=False)
    _landed_at: float = field(default=0.0, init=False)
    _readers: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._readers = len(self.spans)

    @property
    def landed_after(self) -> float:
        """Seconds from the issue of the copy until a reader saw that it had completed."""
        return self._landed_at - self.issued_at

    def wait(self) -> float:
        """Block until the copy has completed.

        Return when a reader first saw this, by time.perf_counter.
        """
        self.copied.synchronize()
        with self._lock:
            self._landed_at = self._landed_at or time.perf_counter()
            return self._landed_at

    def read(self, span: Span) -> memoryview:
        """Return the bytes of one span's rows. Call `wait` first."""
        row_bytes = self._ring.row_bytes
        return self.data[span.row * row_bytes : (span.row + span.num_rows) * row_bytes]

    def release(self, spans: Sequence[Span]) -> bool:
        """Release `spans`; their memory may be reused. Return True if none is left to release."""
        for row, count in merge_rows(spans):
            self._ring.free(self._first + row, count)
        with self._lock:
            self._readers -= len(spans)
            return self._readers == 0


class Copier:
    """A thread that copies filled slots into the ring, in order, on a separate stream.

    It is a thread because a full ring makes the copy wait for the disk, and the worker's main
    thread must not.

    Args:
        ring: destination of the rows.
        device: the worker's NPU.
        deliver: called from this thread with each chunk, once its copy has been issued.
        on_error: called with the slot, the number of its rows that were not delivered, and the
            exception, if a copy could not be issued. These rows are lost.
    """

    def __init__(
        self,
        ring: PinnedRing,
        device: torch.device,
        deliver: Callable[[HostChunk], None],
        on_error: Callable[[StagingSlot, int, Exception], None],
    ) -> None:
        self._ring = ring
        self._device = device
        self._deliver = deliver
        self._on_error = on_error
        self._delivered = 0  # rows of the current slot
        self._stream = _npu().Stream(device=device)
        self._jobs: queue.SimpleQueue[StagingSlot | Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hsx-copier", daemon=True)
        self._thread.start()

    def submit(self, slot: StagingSlot) -> None:
        """Copy the rows of a slot.

        It may be written again once `issued` is set and `copied` has completed.
        """
        slot.issued.clear()
        slot.settled.clear()
        self._jobs.put(slot)

    def then(self, action: Callable[[], object]) -> None:
        """Call `action` from the copier's thread after all copies submitted so far."""
        self._jobs.put(action)

    def drain(self) -> None:
        """Block until all submitted copies have completed.

        Must not be called from the copier's thread.
        """
        copied = threading.Event()

        def note() -> None:
            self._stream.synchronize()
            copied.set()

        self.then(note)
        copied.wait()

    def close(self, timeout: float | None = None) -> bool:
        """Complete all submitted copies and end the thread. No copy reads a slot after this.

        Returns:
            False if this takes longer than `timeout` seconds, because the ring stays full.
        """
        self._jobs.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._stream.synchronize()
        return True

    def _run(self) -> None:
        _npu().set_device(self._device)
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, StagingSlot):
                job()
                continue
            self._delivered = 0
            try:
                self._copy(job)
            except Exception as error:  # noqa: BLE001 - a failed copy fails its requests only
                self._on_error(job, job.num_rows - self._delivered, error)
            finally:
                job.issued.set()
                job.settled.set()

    def _copy(self, slot: StagingSlot) -> None:
        total = slot.num_rows
        with _npu().stream(self._stream):
            self._stream.wait_event(slot.written)
            try:
                while self._delivered < total:
                    wish = rows_in_chunk(slot.spans, self._delivered, self._ring.rows_per_chunk)
                    run = self._ring.acquire(wish, slot.settled.set)
                    slot.settled.clear()
                    begin, count = self._delivered, len(run.rows)
                    # No chunk will free the run of a copy that failed, and a leaked ring blocks
                    # every later request. The copy may have been issued.
                    with OnError(self._ring.free, run.first, count), OnError(self._stream.synchronize):
                        run.rows.copy_(slot.rows[begin : begin + count], non_blocking=True)
                        copied = _npu().Event()
                        copied.record(self._stream)
                    spans = split_spans(slot.spans, begin, begin + count)
                    self._deliver(HostChunk(run.rows, run.data, spans, slot.requests, copied, self._ring, run.first))
                    self._delivered += count
            finally:
                # Also after a failure: an issued copy may still be reading the slot.
                slot.copied.record(self._stream)
