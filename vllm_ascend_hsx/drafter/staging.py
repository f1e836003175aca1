"""Staging: device slots that catch the rows of a step, a pinned ring, and the copy between them on a stream of its own.

The order that must hold, and what keeps it:
* the copy reads a slot after it was written           copy stream waits for `slot.written`
* a slot is written again after its copy was issued    the host waits for `slot.issued` (the copier may be behind a full ring)
* ... and after that copy has run                      compute stream waits for `slot.copied`, on the device
* a writer reads pinned memory after the copy has run  the writer waits in `HostChunk.wait`
* pinned memory is copied into after it was read       `HostChunk.release`, called by each of its readers
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import Span, merge_rows, split_spans


def _npu() -> Any:
    """torch.npu, and never the device-neutral or CUDA names: vllm-ascend replaces those by placeholders (MR:5177)."""
    return torch.npu  # type: ignore[attr-defined]


class StagingSlot:
    """Device memory for the rows of one step, and the events that say who may touch it.

    Attributes:
        rows: [max_tokens, layers, hidden], model dtype.
        spans: what the slot holds; `Span.row` counts rows of the slot.
        issued: set once the copy has been issued.
        settled: set while only the storage decides how long `issued` takes, or it is set: the ring is full.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.spans: list[Span] = []
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

    Allocated with the drafter, before vLLM profiles the device, so its memory is counted and never taken from the KV cache later.

    Args:
        num_slots: slots.
        max_tokens: most rows of a step.
        num_layers, hidden_size: shape of a row.
        dtype: the target's dtype; rows are never converted.
        device: the worker's NPU.
        layer_order: for each layer of a row its place in the target's list (see ExtractionTarget).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_tokens: int,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layer_order: Sequence[int],
    ) -> None:
        self.rows = torch.empty((num_slots, max_tokens, num_layers, hidden_size), dtype=dtype, device=device)
        self.layer_order = tuple(layer_order)
        self.slots = [StagingSlot(self.rows[index]) for index in range(num_slots)]
        self._next = 0
        self._filled: StagingSlot | None = None
        # Set by the connector at the start of each step; without a connector nothing is wanted and nothing is staged.
        self.wanted: dict[str, int] = {}
        # Waits until the copy of what a slot held was issued; False: it will not be, and the rows of these spans are given up.
        self.wait_for_slot: Callable[[StagingSlot, Sequence[Span]], bool] = lambda slot, _: slot.issued.wait()

    def write(self, target_rows: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Write the rows of `spans` into the next slot, once, on the current stream.

        Args:
            target_rows: one [tokens, hidden] per collected layer, in the target's (ascending) order.
            spans: which rows; `Span.row` counts rows of `target_rows`. Not empty.

        Raises:
            ValueError: layers or dtype are not what the staging was made for.
        """
        if len(target_rows) != len(self.layer_order) or target_rows[0].dtype != self.rows.dtype:
            raise ValueError(
                f"the target returned {len(target_rows)} layers of {target_rows[0].dtype}, "
                f"expected {len(self.layer_order)} of {self.rows.dtype}"
            )
        slot = self.slots[self._next]
        if not self.wait_for_slot(slot, spans):
            return
        self._next = (self._next + 1) % len(self.slots)
        compute = _npu().current_stream()
        compute.wait_event(slot.copied)
        at = 0
        for row, count in merge_rows(spans):
            # One launch, and no temporary: it writes where the rows are to stand.
            torch.stack([target_rows[source][row : row + count] for source in self.layer_order], dim=1, out=slot.rows[at : at + count])
            at += count
        at, staged = 0, []
        for span in spans:
            staged.append(span._replace(row=at))
            at += span.num_rows
        slot.spans = staged
        slot.written.record(compute)
        self._filled = slot

    def take(self) -> StagingSlot | None:
        """The slot that was filled since the last call, if any; its rows belong to the caller until it sets `issued`."""
        slot, self._filled = self._filled, None
        return slot


@dataclass
class HostChunk:
    """Rows of one slot on their way to the host.

    Attributes:
        rows: pinned [rows, layers, hidden]; a span's are valid once `wait` has returned, until their `release`.
        data: their bytes.
        spans: what it holds; `Span.row` counts rows of the chunk.
        copied: recorded on the copy stream behind the copy.
        issued_at: when the copy was issued, by time.perf_counter.
    """

    rows: torch.Tensor
    data: memoryview
    spans: list[Span]
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
        """Seconds from the issue of the copy until a reader saw that it had run."""
        return self._landed_at - self.issued_at

    def wait(self) -> float:
        """Block the calling thread until the copy has run; returns when a reader saw it first, by time.perf_counter."""
        self.copied.synchronize()
        with self._lock:
            self._landed_at = self._landed_at or time.perf_counter()
            return self._landed_at

    def read(self, span: Span) -> memoryview:
        """The bytes of one span's rows, once `wait` has returned."""
        row_bytes = self._ring.row_bytes
        return self.data[span.row * row_bytes : (span.row + span.num_rows) * row_bytes]

    def release(self, spans: Sequence[Span]) -> bool:
        """These spans have been read: their memory is used again. Returns True for the last of all."""
        for row, count in merge_rows(spans):
            self._ring.free(self._first + row, count)
        with self._lock:
            self._readers -= len(spans)
            return self._readers == 0


class Copier:
    """A thread that copies filled slots into the ring on a stream of its own, in the order in which they were filled.

    A thread, because a full ring makes the copy wait for the disk, and the worker's main thread must not.

    Args:
        ring: where the rows go.
        device: the worker's NPU.
        deliver: called with each chunk, from this thread, once its copy has been issued.
        on_error: called with the spans of the slot, the number of its rows that were not delivered, and the exception when a copy could not
            be issued; these rows are lost and someone must say so.
    """

    def __init__(
        self,
        ring: PinnedRing,
        device: torch.device,
        deliver: Callable[[HostChunk], None],
        on_error: Callable[[Sequence[Span], int, Exception], None],
    ) -> None:
        self._ring = ring
        self._device = device
        self._deliver = deliver
        self._on_error = on_error
        self._delivered = 0  # rows of the slot in hand
        self._stream = _npu().Stream(device=device)
        self._jobs: queue.SimpleQueue[StagingSlot | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hsx-copier", daemon=True)
        self._thread.start()

    def submit(self, slot: StagingSlot) -> None:
        """Copy what the slot holds. The slot may be written again once `issued` is set and `copied` waited for."""
        slot.issued.clear()
        slot.settled.clear()
        self._jobs.put(slot)

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` from the copier's thread behind all copies submitted so far."""
        self._jobs.put(action)

    def drain(self) -> None:
        """Wait until all that was submitted has been copied: nothing reads a slot until the next is submitted. Not from its own thread."""
        copied = threading.Event()

        def note() -> None:
            self._stream.synchronize()
            copied.set()

        self.then(note)
        copied.wait()

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was submitted and end the thread. No copy reads a slot after this.

        Returns:
            False: not within `timeout` seconds, because the ring is full and stays so.
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
            except Exception as error:  # noqa: BLE001 - a failed copy costs these requests, not the server
                self._on_error(job.spans, job.num_rows - self._delivered, error)
            finally:
                job.issued.set()
                job.settled.set()

    def _copy(self, slot: StagingSlot) -> None:
        total = slot.num_rows
        with _npu().stream(self._stream):
            self._stream.wait_event(slot.written)
            try:
                while (left := total - self._delivered) > 0:
                    run = self._ring.acquire(left, slot.settled.set)
                    slot.settled.clear()
                    begin, count = self._delivered, len(run.rows)
                    try:
                        run.rows.copy_(slot.rows[begin : begin + count], non_blocking=True)
                        copied = _npu().Event()
                        copied.record(self._stream)
                    except Exception:
                        # No chunk will release it, and a ring without memory stops every later request. The copy may have been issued.
                        self._stream.synchronize()
                        self._ring.free(run.first, count)
                        raise
                    spans = split_spans(slot.spans, begin, begin + count)
                    self._deliver(HostChunk(run.rows, run.data, spans, copied, self._ring, run.first))
                    self._delivered += count
            finally:
                # Also behind a failure: whatever was issued may still be reading the slot.
                slot.copied.record(self._stream)
