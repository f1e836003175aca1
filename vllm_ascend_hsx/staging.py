"""Staging: device slots that catch the rows of a step, a pinned ring, and the copy between them on a stream of its own.

The order that must hold, and what keeps it:
* the copy reads a slot after it was written           copy stream waits for `slot.written`
* a slot is written again after its copy was issued    the host waits for `slot.issued` (the copier may be behind a full ring)
* ... and after that copy has run                      compute stream waits for `slot.copied`, on the device
* a writer reads pinned memory after the copy has run  the writer waits for `Piece.copied`
* pinned memory is copied into after it was read       `Piece.release`, called by the last of its readers
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ascend_hsx.spans import Span, cut, merge_rows


def _npu() -> Any:
    """torch.npu, and never the device-neutral or CUDA names: vllm-ascend replaces those by placeholders (MR:5177)."""
    return torch.npu  # type: ignore[attr-defined]


class StagingSlot:
    """Device memory for the rows of one step, and the events that say who may touch it.

    Attributes:
        rows: [max_tokens, layers, hidden], model dtype.
        spans: what the slot holds; `Span.row` counts rows of the slot.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.spans: list[Span] = []
        self.written = _npu().Event()
        self.copied = _npu().Event()
        self.issued = threading.Event()
        self.issued.set()

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
        collected: for each layer of a row its place in the target's list (see ExtractionTarget).
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
        collected: Sequence[int],
    ) -> None:
        self.rows = torch.empty((num_slots, max_tokens, num_layers, hidden_size), dtype=dtype, device=device)
        self.collected = tuple(collected)
        self.slots = [StagingSlot(self.rows[index]) for index in range(num_slots)]
        self._next = 0
        self._filled: StagingSlot | None = None
        # Set by the connector at the start of each step; without a connector nothing is wanted and nothing is staged.
        self.wanted: dict[str, int] = {}

    def write(self, target_rows: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Write the rows of `spans` into the next slot, once, on the current stream.

        Args:
            target_rows: one [tokens, hidden] per collected layer, in the target's (ascending) order.
            spans: which rows; `Span.row` counts rows of `target_rows`. Not empty.

        Raises:
            ValueError: layers or dtype are not what the staging was made for.
        """
        if len(target_rows) != len(self.collected) or target_rows[0].dtype != self.rows.dtype:
            raise ValueError(
                f"the target returned {len(target_rows)} layers of {target_rows[0].dtype}, "
                f"expected {len(self.collected)} of {self.rows.dtype}"
            )
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        slot.issued.wait()
        compute = _npu().current_stream()
        compute.wait_event(slot.copied)
        at = 0
        for row, count in merge_rows(spans):
            for layer, source in enumerate(self.collected):
                slot.rows[at : at + count, layer].copy_(target_rows[source][row : row + count])
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
class Piece:
    """Rows of one slot on their way to the host.

    Attributes:
        rows: pinned [rows, layers, hidden]; valid once `copied` has been waited for, until `release`.
        spans: what it holds; `Span.row` counts rows of the piece.
        copied: recorded on the copy stream behind the copy.
    """

    rows: torch.Tensor
    spans: list[Span]
    copied: Any
    _ring: PinnedRing
    _buffer: int
    _readers: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._readers = len(self.spans)

    def read(self, span: Span) -> torch.Tensor:
        """The rows of one span, [num_rows, layers, hidden], after the copy has run. Blocks the calling thread until then."""
        self.copied.synchronize()
        return self.rows[span.row : span.row + span.num_rows]

    def release(self) -> None:
        """Say that one of the spans has been read; after the last one the memory is used again."""
        with self._lock:
            self._readers -= 1
            last = self._readers == 0
        if last:
            self._ring.free(self._buffer)


class PinnedRing:
    """A fixed amount of pinned host memory, cut into equal buffers of whole rows.

    Args:
        num_bytes: upper bound for all buffers together.
        row_shape, dtype: of one row.

    Raises:
        ValueError: less than two rows fit.
    """

    BUFFERS = 8

    def __init__(self, num_bytes: int, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        row_bytes = torch.Size(row_shape).numel() * dtype.itemsize
        total_rows = num_bytes // row_bytes
        if total_rows < 2:
            raise ValueError(f"a row has {row_bytes} bytes and two must fit: give at least {2 * row_bytes} bytes")
        buffers = min(self.BUFFERS, total_rows)
        self.rows_per_buffer = total_rows // buffers
        self._memory = torch.empty((buffers, self.rows_per_buffer, *row_shape), dtype=dtype, pin_memory=True)
        self.num_bytes = self._memory.numel() * dtype.itemsize
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(buffers):
            self._free.put(index)

    @property
    def free_buffers(self) -> int:
        return self._free.qsize()

    def acquire(self) -> tuple[int, torch.Tensor]:
        """Wait for a free buffer: its index for `free`, and its rows."""
        index = self._free.get()
        return index, self._memory[index]

    def free(self, index: int) -> None:
        self._free.put(index)


class Copier:
    """A thread that copies filled slots into the ring on a stream of its own, in the order in which they were filled.

    A thread, because a full ring makes the copy wait for the disk, and the worker's main thread must not.

    Args:
        ring: where the rows go.
        device: the worker's NPU.
        deliver: called with each piece, from this thread, once its copy has been issued.
        on_error: called with the spans of the slot, the number of its rows that were not delivered, and the exception when a copy could not
            be issued; these rows are lost and someone must say so.
    """

    def __init__(
        self,
        ring: PinnedRing,
        device: torch.device,
        deliver: Callable[[Piece], None],
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

    def close(self) -> None:
        """Finish what was submitted and end the thread. No copy reads a slot after this."""
        self._jobs.put(None)
        self._thread.join()
        self._stream.synchronize()

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

    def _copy(self, slot: StagingSlot) -> None:
        with _npu().stream(self._stream):
            self._stream.wait_event(slot.written)
            try:
                for start, count, spans in cut(slot.spans, self._ring.rows_per_buffer):
                    index, buffer = self._ring.acquire()
                    rows = buffer[:count]
                    try:
                        rows.copy_(slot.rows[start : start + count], non_blocking=True)
                        copied = _npu().Event()
                        copied.record(self._stream)
                    except Exception:
                        # No piece will release it, and a ring without buffers stops every later request. The copy may have been issued.
                        self._stream.synchronize()
                        self._ring.free(index)
                        raise
                    self._deliver(Piece(rows, spans, copied, self._ring, index))
                    self._delivered += count
            finally:
                # Also behind a failure: whatever was issued may still be reading the slot.
                slot.copied.record(self._stream)
