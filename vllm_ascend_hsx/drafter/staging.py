"""Staging: device slots for the rows of a step.

A slot holds 1 / `tensor_parallel` of a step. If a rank owns more rows of a step, the rows take
several slots, or the same slot again after the copy. `landing.py` copies the slots to the host.
These orderings must hold:
* the copy reads a slot after it was written           the copy stream waits for `slot.written`
* a slot is written again after its copy was issued    the host waits for `slot.issued`
* ... and after this copy has completed                the device waits for `slot.copied`
* a writer reads pinned memory after the copy          the lander delivers landed rows only
* pinned memory is reused after it was read            each reader calls `HostChunk.release`
The host waits for `slot.issued` because a full ring delays the lander. Within a step, this wait
also covers the time until the lander has taken the slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_ascend_hsx.drafter.rotation import TurnBack
from vllm_ascend_hsx.drafter.shapes import turned_rows
from vllm_ascend_hsx.drafter.spans import Span, cut_spans, merge_rows


def npu() -> Any:
    """Return torch.npu, because the device-neutral and CUDA names are placeholders (MR:5177)."""
    return torch.npu  # type: ignore[attr-defined]


# With more inputs, a stack needs a temporary as large as the output (SplitToStack in CANN 9.1.0,
# ops-math, conversion/pack/op_api/aclnn_stack.cpp:157). vLLM would not have counted this memory. A
# copy into a part of a slot needs no temporary (conversion/view_copy/op_api/aclnn_copy.cpp:106).
_STACKED_AT_ONCE = 32


class StagingSlot:
    """Device memory for rows of one step, and the events that order access to it.

    Attributes:
        rows: [rows of a slot, layers, hidden], model dtype.
        spans: contents of the slot. `Span.row` is an index into the slot.
        requests: the requests of the spans, by id; set by the caller of `Lander.submit`.
        issued: set once the copy has been issued.
        settled: set while the lander waits for a full ring, and once `issued` is set. In both cases
            only storage can cause further delay.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.spans: list[Span] = []
        self.requests: Mapping[str, Any] = {}
        self.written = npu().Event()
        self.copied = npu().Event()
        self.issued = threading.Event()
        self.issued.set()
        self.settled = threading.Event()
        self.settled.set()

    @property
    def num_rows(self) -> int:
        return sum(span.num_rows for span in self.spans)


class StagingCache:
    """A fixed number of staging slots, used in turn.

    Slots are allocated with the drafter, before vLLM profiles the device. So vLLM counts this
    memory and does not use it for the KV cache.

    Args:
        num_slots: number of slots.
        slot_rows: rows of a slot; see shapes.slot_rows.
        num_layers, hidden_size: shape of a row.
        dtype: dtype of the target; rows are never converted.
        device: the worker's NPU.
        layer_order: for each layer of a row, the index in the target's list; see ExtractionTarget.
        rotation: Q of a target that returns X @ Q, float32 [hidden, hidden] on the host. Slots then
            receive X. None for other targets.
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
        self.rows = torch.empty(
            (num_slots, slot_rows, num_layers, hidden_size), dtype=dtype, device=device
        )
        self.layer_order = tuple(layer_order)
        self._turn_back = (
            None if rotation is None else TurnBack(rotation, turned_rows(slot_rows), device)
        )
        self.slots = [StagingSlot(self.rows[index]) for index in range(num_slots)]
        self._next = 0
        self._filled: StagingSlot | None = None
        # The connector sets this at the start of each step. Without a connector nothing is staged.
        self.wanted: dict[str, int] = {}
        # Waits until the last copy of the slot was issued. Returns False if this takes too long. In
        # this case the rows of these spans are dropped, and later rows of the same requests in this
        # step.
        self.wait_for_slot: Callable[[StagingSlot, Sequence[Span]], bool] = lambda slot, _: (
            slot.issued.wait()
        )
        # Set by the connector. Called with each slot of a step except the last. `take` returns the
        # last slot.
        self.pass_on: Callable[[StagingSlot], None]

    @property
    def matrix(self) -> torch.Tensor | None:
        """Qᵀ on the device, float32 [hidden, hidden], or None without a rotation."""
        return None if self._turn_back is None else self._turn_back.matrix

    def write(self, target_rows: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Write the rows of `spans` into the next slots, on the current stream.

        If the slots cannot hold all rows, slots are reused within the step, and the stream waits
        for their copies.

        Args:
            target_rows: one [tokens, hidden] per extracted layer, in the target's (ascending)
                order.
            spans: the rows to write, not empty. `Span.row` is an index into `target_rows`.

        Raises:
            ValueError: if the number of layers or the dtype differs from the staging slots.
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

    def _fill(
        self, slot: StagingSlot, target_rows: Sequence[torch.Tensor], spans: Sequence[Span]
    ) -> None:
        self._next = (self._next + 1) % len(self.slots)
        compute = npu().current_stream()
        compute.wait_event(slot.copied)
        at = 0
        for row, count in merge_rows(spans):
            layers = [target_rows[source][row : row + count] for source in self.layer_order]
            out = slot.rows[at : at + count]
            if self._turn_back is not None:
                self._turn_back(layers, out)
            elif len(layers) <= _STACKED_AT_ONCE:
                torch.stack(layers, dim=1, out=out)  # one launch, no temporary
            else:
                for index, layer in enumerate(layers):
                    out[:, index].copy_(layer)
            at += count
        at, staged = 0, []
        for span in spans:
            staged.append(Span(span.request_id, span.first, span.num_rows, at))
            at += span.num_rows
        slot.spans = staged
        slot.written.record(compute)
        self._filled = slot

    def before_sleep(self) -> None:
        """Save the rotation to the host. Slots hold no rows, because no step runs."""
        if self._turn_back is not None:
            self._turn_back.before_sleep()

    def take(self) -> StagingSlot | None:
        """Return the last filled slot, or None if it was already returned.

        The caller owns the rows until the lander sets `issued`.
        """
        slot, self._filled = self._filled, None
        return slot
