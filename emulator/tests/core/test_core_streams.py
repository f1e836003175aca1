"""Late mode: work is done when an API guarantees it, and no earlier."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from emulated import NPU, full, pinned, scenarios, side_stream

from ascend_npu_emulator.native import core

pytestmark = pytest.mark.usefixtures("late")


def side_copy(value: float = 7.0) -> tuple[torch.npu.Stream, torch.Tensor]:
    """Return a stream that is copying `value` to the host, and the destination, still 0."""
    source, destination = full(value, 2), pinned(0, 0)
    with side_stream() as stream:
        destination.copy_(source, non_blocking=True)
    source.record_stream(stream)
    return stream, destination


# ---- waits that complete a copy to the host ----

WAITS: dict[str, Callable[[torch.npu.Stream], object]] = {
    "the stream": lambda s: s.synchronize(),
    "an event after it": lambda s: s.record_event().synchronize(),
    "the device": lambda s: torch.npu.synchronize(),
    "torch.accelerator": lambda s: torch.accelerator.synchronize(),
    "the default stream after wait_stream": lambda s: (
        torch.npu.default_stream().wait_stream(s),
        torch.npu.default_stream().synchronize(),
    ),
    "another stream after wait_event": lambda s: _through_another(s),
    "an item on the stream": lambda s: _item_on(s),
    "a copy that blocks": lambda s: _blocking_copy_on(s),
}


def _through_another(s: torch.npu.Stream) -> None:
    other = torch.npu.Stream()
    other.wait_event(s.record_event())
    other.synchronize()


def _item_on(s: torch.npu.Stream) -> None:
    with torch.npu.stream(s):
        torch.zeros(1, device=NPU).item()


def _blocking_copy_on(s: torch.npu.Stream) -> None:
    with torch.npu.stream(s):
        torch.zeros(1, device=NPU).cpu()


@scenarios("wait", WAITS)
def test_host_wait_completes_a_copy_to_the_host(
    wait: Callable[[torch.npu.Stream], object],
) -> None:
    stream, destination = side_copy()
    assert destination.tolist() == [0, 0]
    wait(stream)
    assert destination.tolist() == [7, 7]


NO_WAITS: dict[str, Callable[[torch.npu.Stream], object]] = {
    "nothing": lambda s: None,
    "an event that nobody recorded": lambda s: torch.npu.Event().synchronize(),
    "another stream": lambda s: torch.npu.Stream().synchronize(),
    "the default stream": lambda s: torch.npu.default_stream().synchronize(),
    "a stream that waits, without the host": lambda s: torch.npu.Stream().wait_stream(s),
    "the current stream of a context that ended": lambda s: (
        torch.npu.current_stream().synchronize()
    ),
    "another device": lambda s: torch.npu.synchronize(1),
    "an item on the default stream": lambda s: torch.zeros(1, device=NPU).item(),
}


@scenarios("wait", NO_WAITS)
def test_unrelated_wait_does_not_complete_a_copy_to_the_host(
    wait: Callable[[torch.npu.Stream], object],
) -> None:
    stream, destination = side_copy()
    wait(stream)
    assert destination.tolist() == [0, 0]
    stream.synchronize()
    assert destination.tolist() == [7, 7]


# ---- copies of the default stream ----


def test_default_stream_copy_reads_at_the_call_and_arrives_at_the_wait() -> None:
    source, destination = full(1.0, 2), pinned(0, 0)
    destination.copy_(source, non_blocking=True)
    source.fill_(2)  # ordered after the copy, so the copy has the old value
    assert destination.tolist() == [0, 0]
    torch.npu.current_stream().synchronize()
    assert destination.tolist() == [1, 1]


@pytest.mark.parametrize("aside", [False, True])
def test_event_between_two_copies_completes_the_first_only(aside: bool) -> None:
    source, one, two = full(3.0, 1), pinned(0), pinned(0)
    with side_stream() if aside else nullcontext():
        one.copy_(source, non_blocking=True)
        between = torch.npu.current_stream().record_event()
        two.copy_(source, non_blocking=True)
        between.synchronize()
        assert (one.item(), two.item()) == (3, 0)
    torch.npu.synchronize()
    assert two.item() == 3


def test_device_reads_see_earlier_copies_of_the_same_stream() -> None:
    source, host, back = full(4.0, 2), pinned(0, 0), full(0.0, 2)
    host.copy_(source, non_blocking=True)
    back.copy_(host, non_blocking=True)
    assert back.tolist() == [4, 4]


@pytest.mark.parametrize("destination", ["pageable", "blocking", "another layout"])
def test_copy_to_the_host_is_synchronous_as_on_hardware(destination: str) -> None:
    source = torch.arange(4.0, device=NPU).view(2, 2)
    host = torch.zeros(2, 2) if destination == "pageable" else torch.zeros(2, 2).pin_memory()
    if destination == "another layout":
        host = host.t()
    with side_stream():
        host.copy_(source, non_blocking=destination != "blocking")
    assert host.tolist() == [[0, 1], [2, 3]]


# ---- copies to the device ----


@pytest.mark.parametrize(
    ("pin", "seen"), [(True, 9), (False, 1)], ids=["pinned: late", "pageable: at once"]
)
def test_side_stream_reads_pinned_memory_late_and_pageable_memory_at_once(
    pin: bool, seen: int
) -> None:
    source, there = torch.ones(2, pin_memory=pin), full(0.0, 2)
    with side_stream() as stream:
        there.copy_(source, non_blocking=True)
    source.fill_(9)  # before anything has waited for the copy
    torch.npu.current_stream().wait_stream(stream)
    assert there.tolist() == [seen] * 2


# ---- operators on a side stream ----


def test_results_on_a_side_stream_are_garbage_without_a_wait() -> None:
    x = torch.ones(3, device=NPU)
    with side_stream() as stream:
        y = x + 1
        z = y.view(3, 1)[1:]
    assert core.pending(0, stream.stream_id) > 0
    assert bytes((ctypes.c_ubyte * 12).from_address(y.data_ptr())) == b"\x44" * 12
    torch.npu.current_stream().wait_stream(stream)
    assert core.pending(0, stream.stream_id) == 0
    assert (y.tolist(), z.tolist()) == ([2, 2, 2], [[2], [2]])


def test_work_of_one_stream_keeps_its_order() -> None:
    with side_stream() as stream:
        x = torch.zeros(2, device=NPU)
        for k in range(1, 5):
            x.mul_(10).add_(k)
        y = x.clone()
        x.fill_(-1)
    stream.synchronize()
    assert (x.tolist(), y.tolist()) == ([-1, -1], [1234, 1234])


def test_operators_that_need_host_values_wait_for_their_stream() -> None:
    with side_stream():
        x = torch.arange(4, device=NPU)
        assert x.sum().item() == 6
        assert (x > 1).nonzero().flatten().tolist() == [2, 3]
        assert x[x > 2].tolist() == [3]
        assert torch.equal(x, x.clone())


def test_queued_work_keeps_its_memory() -> None:
    stream = torch.npu.Stream()
    destination = pinned(*[0.0] * 1024)
    with torch.npu.stream(stream):
        source = torch.full((1024,), 5.0, device=NPU)
        destination.copy_(source, non_blocking=True)
    before = torch.npu.memory_allocated()
    del source
    assert torch.npu.memory_allocated() == before - 4096
    stream.synchronize()
    assert destination.unique().tolist() == [5]
    stream, destination = side_copy()
    del destination
    stream.synchronize()


def test_error_of_queued_work_is_raised_when_the_host_waits() -> None:
    table = torch.ones(3, 2, device=NPU)
    index = torch.tensor([9], device=NPU)
    with side_stream() as stream:
        table.index_select(0, index)
    with pytest.raises(
        RuntimeError,
        match=r"aten::index_select, launched earlier on stream \d+ of npu:0.*out of range",
    ):
        stream.synchronize()
    stream.synchronize()


def test_a_full_queue_runs_its_oldest_work() -> None:
    with side_stream() as stream:
        x = torch.zeros(1, device=NPU)
        for _ in range(5000):
            x.add_(1)
        assert 0 < core.pending(0, stream.stream_id) <= 4097
    stream.synchronize()
    assert x.item() == 5000


# ---- events ----


def test_unrecorded_event_counts_as_complete() -> None:
    event = torch.npu.Event()
    assert event.query()
    event.synchronize()
    torch.npu.current_stream().wait_event(event)


def test_recording_an_event_again_replaces_the_first_record() -> None:
    stream, first = side_copy(1.0)
    event = torch.npu.Event()
    event.record(stream)
    other, second = side_copy(2.0)
    event.record(other)
    event.synchronize()
    assert (first.tolist(), second.tolist()) == ([0, 0], [2, 2])
    stream.synchronize()


def test_wait_uses_the_last_record_before_it() -> None:
    first, one = side_copy(1.0)
    second, two = side_copy(2.0)
    event = torch.npu.Event()
    event.record(first)
    waiting = torch.npu.Stream()
    waiting.wait_event(event)
    event.record(second)
    waiting.synchronize()
    assert (one.tolist(), two.tolist()) == ([1, 1], [0, 0])
    second.synchronize()


@pytest.mark.parametrize("what", ["stream", "event"])
def test_query_returns_false_then_makes_progress(what: str) -> None:
    stream, destination = side_copy()
    polled = stream if what == "stream" else stream.record_event()
    assert not polled.query()
    assert destination.tolist() == [0, 0]
    assert any(polled.query() for _ in range(10))
    assert destination.tolist() == [7, 7]


def test_elapsed_time_is_the_time_between_two_events() -> None:
    first, second = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    first.record()
    time.sleep(0.02)  # the measured time
    second.record()
    second.synchronize()
    assert 15 < first.elapsed_time(second) < 5000
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.npu.current_stream().record_event().elapsed_time(second)


def test_many_threads_can_wait_for_one_event_during_other_work() -> None:
    read: list[list[float]] = []
    stream, destination = side_copy(3.0)
    event = stream.record_event()
    threads = [
        threading.Thread(target=lambda: (event.synchronize(), read.append(destination.tolist())))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for _ in range(50):
        torch.ones(8, device=NPU).sum().item()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert read == [[3, 3]] * 8


# ---- streams as objects ----


def test_stream_is_current_only_in_its_context_thread_and_device() -> None:
    stream, seen = torch.npu.Stream(device="npu:2"), []
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == torch.accelerator.current_stream() == stream
        thread = threading.Thread(
            target=lambda: seen.append(torch.npu.current_stream() == torch.npu.default_stream())
        )
        thread.start()
        thread.join()
        assert stream.device == torch.device("npu:2")
        assert torch.npu.current_device() == torch.ones(1, device="npu").device.index == 2
    assert seen == [True]
    assert torch.npu.current_device() == 0
    assert torch.npu.current_stream() == torch.npu.default_stream()


def test_streams_compare_and_hash_by_identity() -> None:
    one, two = torch.npu.Stream(), torch.npu.Stream()
    assert one != two
    assert torch.npu.default_stream() == torch.npu.default_stream(0)
    assert len({one, two, one}) == 2
    assert isinstance(one, torch.Stream)
    assert isinstance(one.record_event(), torch.npu.Event)


def test_torch_stream_and_event_classes_order_device_work() -> None:
    stream, event = torch.Stream(device="npu"), torch.Event(device="npu")
    x, host = torch.ones(2, device=NPU), pinned(0, 0)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        host.copy_(x, non_blocking=True)
        event.record()
    assert host.tolist() == [0, 0]
    event.synchronize()
    assert host.tolist() == [1, 1]


def test_work_of_two_devices_is_ordered_by_a_copy_between_them() -> None:
    here, there = torch.npu.Stream(device="npu:0"), torch.npu.Stream(device="npu:1")
    with torch.npu.stream(here):
        x = torch.ones(2, device="npu:0") * 3
        with torch.npu.stream(there):
            y = torch.zeros(2, device="npu:1")
            y.copy_(x)
            z = y + 1
    there.synchronize()
    assert z.tolist() == [4, 4]


def test_normal_mode_runs_work_at_the_call() -> None:
    torch.npu.synchronize()
    core.set_late(False)  # the fixture restores late mode
    stream, destination = side_copy()
    assert destination.tolist() == [7, 7]
    assert stream.query()
