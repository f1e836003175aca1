"""The lander on an emulated NPU: threads that use the device, and failures of device calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from staging_harness import MAX_TOKENS, Pipeline, expected_row, target_output

from vllm_ascend_hsx.drafter import landing
from vllm_ascend_hsx.drafter.landing import DeviceError
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import npu

TEXT = "The Inner error is reported as above. the current working operator name is aclnnStack"
Fail = Callable[[], None]


class WatchedEvent(torch.npu.Event):  # type: ignore[name-defined,misc]
    """Record the threads that record, query and drop an event. No thread may synchronize it."""

    used_by: ClassVar[set[str]] = set()

    def record(self, stream: Any = None) -> None:
        self.used_by.add(threading.current_thread().name)
        super().record(stream)

    def query(self) -> bool:
        self.used_by.add(threading.current_thread().name)
        return bool(super().query())

    def synchronize(self) -> None:
        raise AssertionError("a thread that synchronizes an event spins for a forward pass")

    def __del__(self) -> None:
        self.used_by.add(threading.current_thread().name)


class WatchedNpu:
    Event = WatchedEvent

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.npu, name)  # type: ignore[attr-defined]


def test_only_the_lander_uses_events_of_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WatchedEvent, "used_by", set())
    made = Pipeline(ring_rows=4)
    made.close()  # slots and lander have real events
    monkeypatch.setattr(landing, "npu", WatchedNpu)
    pipeline = Pipeline(ring_rows=4)
    asked = pipeline.lander._asked_by_others  # used by `ask`, for the thread that sends the output
    for seed in range(3):
        pipeline.step(target_output(12, seed), [Span("a", 12 * seed, 12, 0)])
    pipeline.close()
    assert len(pipeline.read) == 36
    del pipeline
    gc.collect()
    assert WatchedEvent.used_by == {"hsx-lander"}
    del asked


def test_chunks_of_a_slot_land_together_and_events_are_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One event per slot, or per full ring, because recording an event may block the GIL."""
    created: list[Any] = []

    class CountedEvent(torch.npu.Event):  # type: ignore[name-defined,misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            created.append(self)

    class CountingNpu(WatchedNpu):
        Event = CountedEvent

    monkeypatch.setattr(landing, "npu", CountingNpu)
    pipeline = Pipeline(ring_rows=80)  # chunks of ten rows
    for seed in range(6):
        pipeline.step(
            target_output(MAX_TOKENS, seed), [Span("a", MAX_TOKENS * seed, MAX_TOKENS, 0)]
        )
        pipeline.lander.drain()
    pipeline.close()
    assert len(pipeline.read) == 6 * MAX_TOKENS
    assert len(created) == 3, "two that ask for errors, and one for all slots"


def test_full_ring_is_not_slow_storage_while_rows_are_written() -> None:
    """Otherwise, with slow_storage="fail", the next step would fail requests."""
    pipeline = Pipeline(ring_rows=4)
    (slot, _) = pipeline.staging.slots
    storage_delays: list[bool] = []
    declare = slot.settled.set

    def settled() -> None:
        storage_delays.append(not slot.issued.is_set())
        declare()

    slot.settled.set = settled  # type: ignore[method-assign]
    pipeline.step(target_output(12, 0), [Span("a", 0, 12, 0)])
    pipeline.close()
    assert storage_delays == [False]
    assert len(pipeline.read) == 12


# Failures


def _copy_fails(pipeline: Pipeline, fail: Fail) -> None:
    take = pipeline.ring.take

    class Rows:
        def __len__(self) -> int:
            return 2

        def copy_(self, *_: Any, **__: Any) -> None:
            fail()

    pipeline.ring.take = lambda wish: take(2)._replace(rows=Rows())


def _wait_for_the_slot_fails(pipeline: Pipeline, fail: Fail) -> None:
    pipeline.lander._stream.wait_event = lambda event: fail()


def _record_fails(pipeline: Pipeline, fail: Fail) -> None:
    for slot in pipeline.staging.slots:
        slot.copied.record = lambda stream: fail()


class FailingEvent:
    def __init__(self, method: str, fail: Fail) -> None:
        self._method, self._fail, self._event = method, fail, npu().Event()

    def record(self, stream: Any) -> None:
        self._fail() if self._method == "record" else self._event.record(stream)

    def query(self) -> bool:
        if self._method == "query":
            self._fail()
        return bool(self._event.query())


def _record_of_the_batch_fails(pipeline: Pipeline, fail: Fail) -> None:
    pipeline.lander._unused.append(FailingEvent("record", fail))


def _query_fails(pipeline: Pipeline, fail: Fail) -> None:
    pipeline.lander._unused.append(FailingEvent("query", fail))


CALLS = [
    _copy_fails,
    _wait_for_the_slot_fails,
    _record_fails,
    _record_of_the_batch_fails,
    _query_fails,
]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = Pipeline(ring_rows=16)
    yield made
    made.errors.clear()
    made.close()


@pytest.mark.parametrize("sabotage", CALLS)
def test_failed_device_call_is_reported_once_and_blocks_no_thread(
    pipeline: Pipeline, sabotage: Callable[[Pipeline, Fail], None]
) -> None:
    def fail() -> None:
        raise RuntimeError(TEXT)

    pipeline.step(target_output(4, 0), [Span("a", 0, 4, 0)])
    pipeline.lander.drain()
    sabotage(pipeline, fail)
    pipeline.step(target_output(4, 1), [Span("a", 4, 4, 0)])
    pipeline.lander.drain()
    for slot in pipeline.staging.slots:
        pipeline.lander.submit(slot)
        assert slot.settled.wait(30)
        assert slot.issued.wait(30)
    assert [str(error) for error in pipeline.errors] == [TEXT]
    assert pipeline.lander.close(30)
    assert {position for _, position in pipeline.read} <= set(range(4))


def test_finish_call_waits_until_the_error_is_reported(
    pipeline: Pipeline,
) -> None:
    """Otherwise the main thread could send wrong output before it knows of the error."""
    reporting, go_on, passed = threading.Event(), threading.Event(), threading.Event()

    def fail() -> None:
        raise RuntimeError(TEXT)

    def report(error: Exception) -> None:
        reporting.set()
        go_on.wait()
        pipeline.errors.append(error)

    pipeline.lander._on_failure = report
    _wait_for_the_slot_fails(pipeline, fail)
    pipeline.step(target_output(4, 0), [Span("a", 0, 4, 0)])
    assert reporting.wait(30)
    main = threading.Thread(target=lambda: (pipeline.lander.finish_call(), passed.set()))
    main.start()
    assert not passed.wait(0.2)
    go_on.set()
    assert passed.wait(30)
    main.join()
    assert [str(error) for error in pipeline.errors] == [TEXT]


def test_dropped_copy_is_not_delivered(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reused event still shows the earlier completion."""
    monkeypatch.setattr(landing, "_OTHERS_S", 0.05)
    rows = target_output(4, 0)
    pipeline.step(rows, [Span("a", 0, 4, 0)])
    pipeline.lander.drain()
    _copy_fails(pipeline, lambda: None)
    pipeline.step(target_output(4, 1), [Span("a", 4, 4, 0)])
    pipeline.lander.drain()
    (error,) = pipeline.errors
    assert isinstance(error, DeviceError)
    assert str(error) == "the device has dropped a copy after an earlier failure"
    assert len(pipeline.read) == 4
    assert all(
        torch.equal(pipeline.read["a", position], expected_row(rows, position))
        for position in range(4)
    )


def test_thread_with_the_error_of_a_dropped_copy_may_report_it_first(
    pipeline: Pipeline,
) -> None:
    _copy_fails(pipeline, lambda: None)
    pipeline.step(target_output(4, 0), [Span("a", 0, 4, 0)])
    pipeline.lander.abandon()
    pipeline.lander.drain()
    assert pipeline.errors == [], "another thread has the device's own text"


def test_idle_lander_asks_for_the_error_of_an_overdue_copy(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no thread would enter the task queue until the next request."""
    monkeypatch.setattr(landing, "_ASK_S", 0.01)

    class Dropped(FailingEvent):
        def query(self) -> bool:
            return False

    def record(stream: Any) -> None:
        raise RuntimeError(TEXT)

    pipeline.lander._unused.append(Dropped("", lambda: None))
    pipeline.lander._probe.record = record
    pipeline.step(target_output(4, 0), [Span("a", 0, 4, 0)])
    pipeline.lander.drain()
    assert [str(error) for error in pipeline.errors] == [TEXT]


def test_abandoned_lander_releases_threads_that_wait_for_a_slot(pipeline: Pipeline) -> None:
    pipeline.lander.abandon()
    for seed in range(3):
        pipeline.step(target_output(4, seed), [Span("a", 4 * seed, 4, 0)])
    pipeline.lander.drain()
    assert all(slot.issued.is_set() and slot.settled.is_set() for slot in pipeline.staging.slots)
    assert pipeline.errors == []
    assert pipeline.read == {}
