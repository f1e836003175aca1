"""Staging on an emulated NPU in late mode: writers read the computed rows after any steps."""

from __future__ import annotations

import gc
import queue
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from hypothesis import given, settings
from hypothesis import strategies as st
from releases import installed_is
from staging_harness import (
    DEVICE,
    DTYPE,
    HIDDEN,
    LAYERS,
    MAX_TOKENS,
    Pipeline,
    expected_row,
    run_steps,
    steps,
    target_output,
)
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_ascend_hsx.drafter.landing import HostChunk
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache, StagingSlot


@pytest.fixture
def pipeline() -> Iterator[Callable[..., Pipeline]]:
    made: list[Pipeline] = []

    def make(**options: Any) -> Pipeline:
        made.append(Pipeline(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@settings(max_examples=60)
@given(
    batches=steps(),
    slots=st.integers(1, 3),
    ring_rows=st.integers(2, 40),
    slot_rows=st.integers(1, MAX_TOKENS),
)
def test_every_row_arrives_unchanged(
    batches: list[list[Span]], slots: int, ring_rows: int, slot_rows: int
) -> None:
    pipeline = Pipeline(slots=slots, ring_rows=ring_rows, slot_rows=slot_rows)
    expected = run_steps(pipeline, batches)
    assert pipeline.read.keys() == expected.keys()
    for key, row in expected.items():
        assert torch.equal(pipeline.read[key], row), key
    assert pipeline.ring._free.intervals == [(0, pipeline.ring.num_rows)]


def test_defect_2_upstreams_padding_slots_overwrite_a_row_of_the_last_block_before_0_26() -> None:
    from vllm.model_executor.models.extract_hidden_states import basic_cache

    cache = torch.zeros(4, 2, 1, 1)
    basic_cache(torch.full((3, 1, 1), 7.0), cache, torch.tensor([0, -1, -1]))
    assert cache[3, 1].item() == (0.0 if installed_is(">=0.26") else 7.0)


def test_defect_2_rows_without_a_span_are_not_written() -> None:
    pipeline = Pipeline()
    pipeline.staging.rows.fill_(7.0)
    run_steps(pipeline, [[Span("a", 0, 3, 1)]])
    # Three rows at the front of the first slot. Padding and rows of other requests are not written.
    assert (pipeline.staging.rows[0, 3:] == 7.0).all()
    assert (pipeline.staging.rows[1:] == 7.0).all()
    assert not (pipeline.staging.rows[0, :3] == 7.0).any()


FULL = [[Span("a", 0, 12, 0)], [Span("b", 0, 12, 3)], [Span("c", 0, 12, 5)], [Span("d", 0, 12, 1)]]


def _no_wait_for_the_write(pipeline: Pipeline) -> None:
    for slot in pipeline.staging.slots:
        slot.written = torch.npu.Event()
        slot.written.record = lambda stream: None


def _no_wait_for_the_copy_before_the_slot_is_reused(pipeline: Pipeline) -> None:
    for slot in pipeline.staging.slots:
        slot.copied.record = lambda stream: None


def _no_wait_for_the_copy_to_be_issued(pipeline: Pipeline) -> None:
    for slot in pipeline.staging.slots:
        slot.issued.wait = slot.settled.wait = lambda timeout=None: True
        slot.issued.is_set = lambda: True


def _no_wait_for_the_copy_before_it_is_read(pipeline: Pipeline) -> None:
    pipeline.lander._has_landed = lambda batch: True


def _ring_is_free_too_early(pipeline: Pipeline) -> None:
    original = pipeline.lander._deliver

    def deliver(chunk: HostChunk) -> None:
        original(chunk)
        pipeline.ring.free((chunk.first, len(chunk.rows)))
        chunk._ring = SimpleNamespace(row_bytes=pipeline.ring.row_bytes, free=lambda *runs: None)

    pipeline.lander._deliver = deliver


@pytest.mark.parametrize("slot_rows", [MAX_TOKENS, 4], ids=["a step fits", "three pieces"])
@pytest.mark.parametrize(
    "sabotage",
    [
        _no_wait_for_the_write,
        _no_wait_for_the_copy_before_the_slot_is_reused,
        _no_wait_for_the_copy_to_be_issued,
        _no_wait_for_the_copy_before_it_is_read,
        _ring_is_free_too_early,
    ],
)
def test_each_ordering_is_necessary(
    pipeline: Callable[..., Pipeline], sabotage: Callable[[Pipeline], None], slot_rows: int
) -> None:
    sabotaged = pipeline(slots=1, ring_rows=16, slot_rows=slot_rows)
    sabotage(sabotaged)
    # Hold the writer until the lander waits for memory and the main thread for the lander, or all
    # steps are done.
    sabotaged.gate.clear()

    def wait(slot: StagingSlot, spans: Sequence[Span]) -> bool:
        slot.settled.wait()
        if not slot.issued.is_set():
            sabotaged.gate.set()
        return slot.issued.wait()

    sabotaged.staging.wait_for_slot = wait
    try:
        expected = run_steps(sabotaged, FULL)
    except RuntimeError as error:
        assert "race" in str(error).lower()
        with suppress(RuntimeError):  # the lander may have raised it, too
            sabotaged.close()
        return
    arrived = {key: row for key, row in sabotaged.read.items() if torch.equal(row, expected[key])}
    assert arrived.keys() != expected.keys()


class Copied(TorchDispatchMode):
    """Count the bytes that operators write on the device, and name operators that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.operators.add(func.overloadpacket.__name__)
            self.num_bytes += (kwargs or {}).get("out", args[0]).nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slot_rows", [MAX_TOKENS, 5], ids=["a step fits", "three pieces"])
def test_each_row_is_written_once_without_other_device_memory(slot_rows: int) -> None:
    """Three passes over the bytes of a row: a read and a write here, and a read by the copy."""
    pipeline = Pipeline(slots=1, slot_rows=slot_rows)
    staging = pipeline.staging
    rows = [layer.to(DEVICE) for layer in target_output(MAX_TOKENS, 1)]
    passed_on: list[StagingSlot] = []
    staging.pass_on = passed_on.append
    gc.collect()  # objects of earlier tests must not be freed meanwhile
    allocated = torch.npu.memory_allocated(DEVICE)
    torch.npu.reset_peak_memory_stats(DEVICE)
    with Copied() as copied:
        staging.write(rows, [Span("a", 0, 5, 2), Span("b", 7, 4, 7), Span("c", 0, 3, 15)])
    assert copied.operators == {"stack"}
    assert copied.num_bytes == 12 * LAYERS * HIDDEN * DTYPE.itemsize
    assert torch.npu.max_memory_allocated(DEVICE) == allocated
    pipeline.close()
    assert len(passed_on) == -(-12 // slot_rows) - 1, (
        "the connector takes the last slot when the step is staged"
    )


@pytest.mark.parametrize("num_layers", [32, 33, 80])
def test_layers_of_a_deep_target_are_staged_without_other_device_memory(num_layers: int) -> None:
    """A stack of more than 32 inputs needs a temporary (aclnn_stack.cpp:157, ops-math 9.1.0)."""
    order = list(reversed(range(num_layers)))
    staging = StagingCache(
        num_slots=1,
        slot_rows=MAX_TOKENS,
        num_layers=num_layers,
        hidden_size=HIDDEN,
        dtype=DTYPE,
        device=DEVICE,
        layer_order=order,
    )
    rows = [torch.randn(MAX_TOKENS, HIDDEN).to(DTYPE) for _ in order]
    on_device = [layer.to(DEVICE) for layer in rows]
    gc.collect()
    allocated = torch.npu.memory_allocated(DEVICE)
    torch.npu.reset_peak_memory_stats(DEVICE)
    staging.write(on_device, [Span("a", 0, 5, 2), Span("b", 0, 3, 15)])
    assert torch.npu.max_memory_allocated(DEVICE) == allocated
    expected = torch.stack([rows[source] for source in order], dim=1)
    assert torch.equal(staging.rows[0, :8].cpu(), torch.cat([expected[2:7], expected[15:18]]))


@pytest.mark.parametrize(("num_rows", "waits"), [(1, 0), (4, 0), (5, 0), (12, 0), (13, 1), (24, 3)])
def test_step_waits_only_for_slots_that_it_reuses(num_rows: int, waits: int) -> None:
    """Three slots of four rows. A wait for a slot ends when the lander has issued the copy."""
    pipeline = Pipeline(slots=3, slot_rows=4)
    staging, pending, waited = pipeline.staging, [], []

    def pass_on(slot: StagingSlot) -> None:
        slot.issued.clear()
        pending.append(slot)

    def wait(slot: StagingSlot, spans: Sequence[Span]) -> bool:
        if not slot.issued.is_set():
            waited.append(slot)
            assert slot is pending[0], "the copies are issued in order, so the first is there first"
            pipeline.lander.submit(pending.pop(0))
        return slot.issued.wait()

    staging.pass_on, staging.wait_for_slot = pass_on, wait
    rows = target_output(num_rows, 1)
    staging.write([layer.to(DEVICE) for layer in rows], [Span("a", 0, num_rows, 0)])
    last = staging.take()
    assert last is not None
    for slot in [*pending, last]:
        pipeline.lander.submit(slot)
    pipeline.close()
    assert len(waited) == waits
    assert [position for _, position in pipeline.read] == list(range(num_rows))
    assert all(
        torch.equal(row, expected_row(rows, position))
        for (_, position), row in pipeline.read.items()
    )


def test_later_rows_of_a_dropped_request_are_dropped_in_the_same_step(
    pipeline: Callable[..., Pipeline],
) -> None:
    made = pipeline(slots=3, slot_rows=4)
    answers = [True, False, True]
    made.staging.wait_for_slot = lambda slot, spans: answers.pop(0)
    rows = target_output(12, 1)
    made.step(rows, [Span("a", 0, 4, 0), Span("b", 0, 6, 4), Span("c", 0, 2, 10)])
    made.close()
    assert [*made.read] == [*(("a", position) for position in range(4)), ("c", 0), ("c", 1)]
    assert torch.equal(made.read["c", 0], expected_row(rows, 10))


def test_steps_use_the_slots_in_turn(pipeline: Callable[..., Pipeline]) -> None:
    """With a single slot, a step would wait for the copy of the previous step."""
    staging = pipeline(slots=3).staging
    taken = []
    for number in range(6):
        staging.write(
            [layer.to(DEVICE) for layer in target_output(4, number)], [Span("a", 4 * number, 4, 0)]
        )
        taken.append(staging.take())
    assert taken == [*staging.slots, *staging.slots]


def test_close_waits_until_no_copy_reads_a_slot() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = Pipeline(ring_rows=40)
        # No thread reads the chunks, as after failed requests, so no thread waits for the copies.
        pipeline.lander._deliver = lambda chunk: None
        run_steps(pipeline, FULL[:1])
        shape = pipeline.staging.rows.shape
        del pipeline
        gc.collect()
        # Memory of the same size. The device could allocate the same memory again.
        torch.empty(shape, dtype=DTYPE, device=DEVICE)
    assert not [str(warning.message) for warning in caught if "race" in str(warning.message)]


def test_rows_of_a_chunk_are_freed_separately() -> None:
    pipeline = Pipeline(ring_rows=80)  # chunks of ten rows
    chunks: queue.SimpleQueue[HostChunk] = queue.SimpleQueue()
    pipeline.lander._deliver = chunks.put
    pipeline.step(
        target_output(10, 1), [Span("a", 0, 3, 0), Span("b", 0, 2, 3), Span("c", 0, 5, 5)]
    )
    chunk = chunks.get(timeout=30)
    first, second, third = chunk.spans
    chunk.release([second])
    assert pipeline.ring._free.intervals == [(3, 5), (10, 80)]
    chunk.release([first])
    chunk.release([third])
    assert pipeline.ring._free.intervals == [(0, 80)]
    pipeline.close()


def test_wrong_number_of_layers_or_dtype_is_refused() -> None:
    pipeline = Pipeline()
    try:
        with pytest.raises(ValueError, match=r"2 layers of torch\.bfloat16, expected 3"):
            pipeline.staging.write([layer.to(DEVICE) for layer in target_output(4, 0)[:2]], FULL[0])
        with pytest.raises(ValueError, match=r"torch\.float32, expected 3 of torch\.bfloat16"):
            pipeline.staging.write(
                [layer.float().to(DEVICE) for layer in target_output(4, 0)], FULL[0]
            )
    finally:
        pipeline.close()


@pytest.mark.parametrize("drained", [True, False])
def test_slots_can_be_unmapped_only_after_copies_are_drained(
    pipeline: Callable[..., Pipeline], drained: bool
) -> None:
    """As for a sleeping worker: the host frees memory regardless of the order on the device."""
    held = pipeline(ring_rows=64)
    held.gate.clear()  # no writer waits for a copy
    rows = target_output(6, seed=1)
    held.step(rows, [Span("r", 0, 6, 0)])
    issued = held.staging.slots[0].issued
    assert issued.wait(10)
    if drained:
        held.lander.drain()
        held.staging.rows.fill_(-2.0)
        held.close()
        assert all(
            torch.equal(held.read["r", position], expected_row(rows, position).cpu())
            for position in range(6)
        )
    else:
        with pytest.raises(RuntimeError, match="race"):
            held.staging.rows.fill_(-2.0)
