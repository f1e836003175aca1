"""The task queue of an NPU: failures in queue mode, held work, waiting threads, a full queue.

The definition is torch_npu 2.10.0.post4 (5dd8ef3f9b37), csrc/core/npu: NPUQueue.cpp, NPUEvent.cpp,
NPUEventManager.cpp, interface/AsyncTaskQueueInterface.cpp. Copies: CopyKernelOpApi.cpp.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import NPU, full, pinned, scenarios, side_stream

from ascend_npu_emulator.native import core

pytestmark = pytest.mark.usefixtures("any_mode", "queue_mode")  # in this order

DEVICE = 0
GARBAGE = 785.066650390625  # bytes 0x44 as float32
ERROR = "The Inner error is reported as above. The process exits for this inner error, and "


def status() -> str:
    return core.queue_status(DEVICE)


def is_garbage(tensor: torch.Tensor) -> bool:
    return set(tensor.flatten().tolist()) == {GARBAGE}


def fail_an_operator() -> None:
    """Make the launch of an operator fail, like a kernel with a wrong parameter."""
    core.fail("aten::tanh", "EZ1001: the parameter is wrong")
    full(0.0).tanh()
    assert status() == "error"


def exhaust() -> None:
    """Make an operator fail, and catch the error."""
    fail_an_operator()
    with pytest.raises(RuntimeError, match=ERROR):
        full(0.0).add(1)


# ---- launches that fail ----


def wait_for_an_event() -> torch.npu.Event:
    event = torch.npu.current_stream().record_event()
    torch.npu.Stream().wait_event(event)
    return event


def record() -> torch.npu.Event:
    return torch.npu.current_stream().record_event()


LAUNCHES: dict[str, tuple[str, Callable[[], object], str]] = {
    "an operator": (
        "aten::add.out",
        lambda: full(1.0) + full(1.0),
        "the current working operator name is aten::add.out",
    ),
    "a stack": (
        "aten::stack.out",
        lambda: torch.stack([full(1.0)], out=full(0.0, 1, 4)),
        "operator name is aten::stack.out",
    ),
    "a product": (
        "aten::mm.out",
        lambda: torch.mm(full(1.0, 2, 2), full(1.0, 2, 2), out=full(0.0, 2, 2)),
        "operator name is aten::mm.out",
    ),
    "a copy to pinned memory": (
        "device_to_host",
        lambda: pinned(0, 0).copy_(full(1.0, 2), non_blocking=True),
        "the current copy params are srclen=8, dstlen=8, kind=2",
    ),
    "a copy from pinned memory": (
        "host_to_device",
        lambda: full(1.0, 2).copy_(pinned(0, 0), non_blocking=True),
        "kind=1",
    ),
    "a copy on the device": (
        "device_to_device",
        lambda: full(1.0).copy_(full(0.0)),
        "operator name is aclnnInplaceCopy",
    ),
    "a record": ("record_event", record, "the current working event is 0x"),
    "a wait": ("wait_event", wait_for_an_event, "the current working event is 0x"),
}


@scenarios(("name", "launch", "named"), LAUNCHES)
def test_failed_launch_raises_once_at_a_later_call(
    name: str, launch: Callable[[], object], named: str
) -> None:
    core.fail(name, "EZ1001: the parameter is wrong")
    kept = launch()  # dropping the event would lose the error
    assert status() == "error"
    text = rf"(?s){ERROR}.*{named}.*asynchronously.*ERR00100 PTA call acl api failed.*EZ1001: the parameter"
    with pytest.raises(RuntimeError, match=text):
        full(0.0).add(1)
    assert status() == "exit"
    full(0.0).add(1)
    del kept


def test_failed_launch_has_not_run() -> None:
    out = full(7.0, 1, 4)
    core.fail("aten::stack.out")
    torch.stack([full(1.0)], out=out)
    with pytest.raises(RuntimeError, match=ERROR):
        full(0.0)
    assert out.tolist() == [[7.0] * 4]


def in_thread(launch: Callable[[], object]) -> None:
    thread = threading.Thread(target=launch, name="my-other-thread-1")
    thread.start()
    thread.join()


def in_a_function_that_is_named() -> None:
    full(0.0).tanh()


FILTERS: dict[str, tuple[str, list[Callable[[], object]], Callable[[], object]]] = {
    "a number": ("aten::tanh:3", [lambda: full(0.0).tanh()] * 2, lambda: full(0.0).tanh()),
    "a thread": (
        "aten::tanh other-thread",
        [lambda: full(0.0).tanh()],
        lambda: in_thread(full(0.0).tanh),
    ),
    "a Python function": (
        "aten::tanh function_that_is_named",
        [lambda: full(0.0).tanh()],
        in_a_function_that_is_named,
    ),
    "an NPU": (
        "aten::tanh npu:0",
        [lambda: torch.zeros(1, device="npu:1").tanh()],
        lambda: full(0.0).tanh(),
    ),
    "an operator": ("aten::tanh", [lambda: full(0.0).sin()], lambda: full(0.0).tanh()),
}


@scenarios(("failure", "others", "launch"), FILTERS)
def test_failure_applies_only_to_matching_launches(
    failure: str, others: list[Callable[[], object]], launch: Callable[[], object]
) -> None:
    core.fail(failure)
    for other in others:
        other()
        assert core.queue_status(0) == core.queue_status(1) == "run"
    launch()
    assert status() == "error"


@pytest.mark.parametrize("launch", ["", ":3", "aten::tanh:0"])
def test_failure_without_an_operator_is_refused(launch: str) -> None:
    with pytest.raises(RuntimeError, match=r"names no launch to fail: give OPERATOR\[:N\]"):
        core.fail(launch)


def test_failures_need_queue_mode() -> None:
    core.set_queue(False)
    with pytest.raises(RuntimeError, match="NPU_EMULATOR_QUEUE=1"):
        core.fail("aten::tanh")


def test_a_file_can_name_the_launch_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "fail"
    core.watch_for_fault(str(file))
    full(0.0).tanh()
    assert status() == "run"
    file.write_text("aten::tanh\n")
    full(0.0).tanh()
    assert status() == "error"


# ---- calls that raise the error ----

# NPUQueue.cpp:543 Enqueue and :315 MakeSureQueueEmpty.
THROWS: dict[str, Callable[[Any], object]] = {
    "an operator": lambda each: each.tensor.add(1),
    "a copy that does not block": lambda each: each.pinned.copy_(each.tensor, non_blocking=True),
    "a copy to the host": lambda each: each.tensor.cpu(),
    "a copy from the host": lambda each: each.tensor.copy_(torch.zeros(4)),
    "an item": lambda each: each.tensor[0].item(),
    "a list": lambda each: each.tensor.tolist(),
    "a record": lambda each: each.event.record(),
    "a wait": lambda each: each.stream.wait_event(each.event),
    "synchronize of a stream": lambda each: each.stream.synchronize(),
    "query of a stream": lambda each: each.stream.query(),
    "synchronize of the device": lambda each: torch.npu.synchronize(),
    "the time between events": lambda each: each.timed[0].elapsed_time(each.timed[1]),
}
DOES_NOT_THROW: dict[str, Callable[[Any], object]] = {
    "query of an event": lambda each: each.event.query(),
    "synchronize of an event": lambda each: each.event.synchronize(),
    "a new tensor": lambda each: torch.empty(4, device=NPU),
    "a view": lambda each: each.tensor[1:].view(3, 1),
    "a new event": lambda each: torch.npu.Event(),
    "a wait for an event that was never recorded": lambda each: each.stream.wait_event(
        torch.npu.Event()
    ),
    "the current stream": lambda each: torch.npu.current_stream(),
}


class Before:
    """Objects that exist before the failure."""

    def __init__(self) -> None:
        self.tensor = full(1.0)
        self.pinned = pinned(0, 0, 0, 0)
        self.stream = torch.npu.Stream()
        self.event = torch.npu.current_stream().record_event()
        self.timed = [torch.npu.Event(enable_timing=True) for _ in range(2)]
        for event in self.timed:
            event.record()
        torch.npu.synchronize()


@scenarios("call", THROWS)
def test_call_raises_the_error_of_a_failed_task(call: Callable[[Any], object]) -> None:
    before = Before()
    fail_an_operator()
    with pytest.raises(RuntimeError, match=ERROR):
        call(before)
    assert status() == "exit"


@scenarios("call", DOES_NOT_THROW)
def test_call_does_not_raise_the_error_of_a_failed_task(call: Callable[[Any], object]) -> None:
    before = Before()
    fail_an_operator()
    call(before)
    assert status() == "error"


def test_error_is_raised_in_one_thread_only() -> None:
    before = Before()
    fail_an_operator()
    raised: list[str] = []

    def first() -> None:
        try:
            before.event.record()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert len(raised) == 1
    before.tensor.add(1)
    torch.npu.synchronize()


def test_dropping_an_event_loses_the_error() -> None:
    """See NPUEvent.cpp:60 and :68."""
    before = Before()
    fail_an_operator()
    before.event = None
    gc.collect()
    assert status() == "exit"


def test_other_npus_continue_after_a_failure() -> None:
    exhaust()
    assert torch.ones(2, device="npu:1").add(1).tolist() == [2, 2]


# ---- work that a failure drops ----


def test_later_operators_are_dropped_and_new_tensors_hold_garbage() -> None:
    x, out = full(1.0), full(7.0)
    exhaust()
    assert is_garbage(x + 1)
    assert is_garbage(torch.zeros(4, device=NPU))
    assert all(is_garbage(part) for part in torch.sort(x.view(2, 2))[:1])
    x.add_(1)
    torch.add(x, 1, out=out)
    assert (x.tolist(), out.tolist()) == ([1.0] * 4, [7.0] * 4)


def test_later_non_blocking_copies_are_dropped() -> None:
    x, host = full(1.0), pinned(7, 7, 7, 7)
    exhaust()
    host.copy_(x, non_blocking=True)
    x.copy_(host, non_blocking=True)
    torch.npu.synchronize()
    assert (host.tolist(), x.tolist()) == ([7.0] * 4, [1.0] * 4)


def test_blocking_copies_copy_the_current_bytes() -> None:
    """Blocking copies synchronize the stream and bypass the queue (CopyKernelOpApi.cpp:51)."""
    x = full(1.0, 2, 2)
    exhaust()
    assert x.cpu().tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert x[0, 0].item() == 1.0
    assert is_garbage(x[:, 0].cpu())  # the contiguous copy is an operator
    x.copy_(torch.tensor([[5.0, 5.0], [5.0, 5.0]]))
    assert x.tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_an_event_recorded_later_never_completes() -> None:
    """See AsyncTaskQueueInterface.cpp:201, NPUEvent.cpp:89 and :212."""
    new, reused = torch.npu.Event(), torch.npu.current_stream().record_event()
    reused.synchronize()
    exhaust()
    for event in (new, reused):
        event.record()
        assert not any(event.query() for _ in range(20))
        thread = threading.Thread(target=event.synchronize, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        core.reset_tasks()  # ends the wait
        thread.join(60)
        assert not thread.is_alive()
        exhaust()


def test_event_whose_record_raises_never_completes() -> None:
    event = torch.npu.Event()
    fail_an_operator()
    with pytest.raises(RuntimeError, match=ERROR):
        event.record()
    assert not any(event.query() for _ in range(20))


def test_wrong_arguments_raise_at_the_call_in_queue_mode() -> None:
    x, y = full(1.0), full(1.0, 3)
    exhaust()
    with pytest.raises(RuntimeError, match="must match the size"):
        x + y
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)


def test_later_operators_with_python_references_are_dropped() -> None:
    x, weight = torch.ones(2, 4, device=NPU), torch.ones(4, device=NPU)
    exhaust()
    out, _ = torch.ops.npu.npu_rms_norm(x, weight)
    assert out.shape == x.shape
    assert is_garbage(out)


# ---- held work ----


def test_held_work_does_not_run_until_it_is_released() -> None:
    x, host, event = full(1.0), pinned(7, 7, 7, 7), torch.npu.Event()
    torch.npu.synchronize()
    core.hold(DEVICE)
    x.add_(1)
    with side_stream() as stream:
        host.copy_(x, non_blocking=True)
        event.record()
    assert not any(event.query() or stream.query() for _ in range(20))
    assert host.tolist() == [7.0] * 4
    core.release(DEVICE)
    event.synchronize()
    assert host.tolist() == [2.0] * 4


def test_the_host_waits_for_held_work() -> None:
    event = torch.npu.Event()
    core.hold(DEVICE)
    event.record()
    started = time.monotonic()
    core.release_after(DEVICE, 0.2)
    event.synchronize()
    assert time.monotonic() - started >= 0.2


def test_an_operator_that_cannot_be_queued_waits_for_the_release() -> None:
    x = torch.ones(4, device=NPU)
    core.hold(DEVICE)
    x.add_(1)
    started = time.monotonic()
    core.release_after(DEVICE, 0.2)
    assert x.nonzero().numel() == 4
    assert time.monotonic() - started >= 0.2


def test_failure_drops_queued_work() -> None:
    """See NPUQueue.cpp:453-469."""
    x, host = full(1.0), pinned(7, 7, 7, 7)
    torch.npu.synchronize()
    core.hold(DEVICE)
    x.add_(1)
    core.fail("aten::tanh")
    x.tanh()
    x.add_(1)
    host.copy_(x, non_blocking=True)
    assert status() == "run"
    core.release(DEVICE)
    assert status() == "error"
    with pytest.raises(RuntimeError, match=ERROR):
        torch.npu.synchronize()
    assert (host.tolist(), x.tolist()) == ([7.0] * 4, [2.0] * 4)


def test_event_with_a_dropped_record_keeps_its_earlier_state() -> None:
    """An event that was never recorded is complete (CANN runtime, event.cc:1189)."""
    new, reused = torch.npu.Event(), torch.npu.current_stream().record_event()
    reused.synchronize()
    core.hold(DEVICE)
    core.fail("aten::tanh")
    full(0.0).tanh()
    for event in (new, reused):
        event.record()
        assert not event.query()
    core.release(DEVICE)
    for event in (new, reused):
        assert event.query()
        event.synchronize()
    assert status() == "error"


# ---- waiting threads ----


def wait_in_threads(event: torch.npu.Event, names: list[str]) -> list[threading.Thread]:
    threads = [threading.Thread(target=event.synchronize, name=name) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(core.waiters()[0]) < len(names):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return threads


def test_waiting_threads_are_reported_by_name() -> None:
    core.hold(DEVICE)
    event = torch.npu.Event()
    event.record()
    core.reset_waiters()
    names = ["one", "two", "three"]
    threads = wait_in_threads(event, names)
    assert sorted(core.waiters()[0]) == sorted(names)
    core.release(DEVICE)
    for thread in threads:
        thread.join()
    now, peak = core.waiters()
    assert now == []
    assert sorted(peak) == sorted(names)
    core.reset_waiters()
    assert core.waiters() == ([], [])


@pytest.mark.parametrize("spins", [False, True])
def test_waiting_thread_spins_if_configured(spins: bool) -> None:
    """NPUEvent.cpp:212 waits in a loop without a pause."""
    event = torch.npu.Event()
    core.hold(DEVICE)
    event.record()
    core.set_spin(spins)
    core.release_after(DEVICE, 1.0)
    used = time.thread_time()
    event.synchronize()
    used = time.thread_time() - used
    core.set_spin(False)
    assert used > 0.05 if spins else used < 0.02  # less than a second on a busy machine


# ---- a full queue ----


def test_full_queue_blocks_a_record_with_the_gil_held() -> None:
    """See NPUQueue.cpp:612 and :787. csrc/npu/Event.cpp:143 keeps the GIL."""
    event = torch.npu.Event()
    core.hold(DEVICE)
    for _ in range(4095):
        event.record()
    turns, began, stop = [0], threading.Event(), threading.Event()

    def run() -> None:
        while not stop.wait(0.001):
            turns[0] += 1
            began.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(60)
    before, started = turns[0], time.monotonic()
    core.release_after(DEVICE, 0.5)
    event.record()
    blocked, meanwhile = time.monotonic() - started, turns[0] - before
    stop.set()
    thread.join()
    assert blocked >= 0.5
    assert meanwhile < 50  # without the GIL held: hundreds


def test_blocked_task_is_dropped_when_an_earlier_task_fails() -> None:
    """See NPUQueue.cpp:599."""
    event, x = torch.npu.Event(), full(7.0)
    torch.npu.synchronize()
    core.hold(DEVICE)
    core.fail("aten::tanh")
    x.tanh()
    for _ in range(4094):
        event.record()
    core.release_after(DEVICE, 0.1)
    x.add_(1)
    assert status() == "error"
    with pytest.raises(RuntimeError, match=ERROR):
        torch.npu.synchronize()
    assert x.tolist() == [7.0] * 4
