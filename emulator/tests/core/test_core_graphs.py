"""Graphs: a capture runs nothing, and a replay runs the captured work on the same memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from emulated import NPU, capture, full, pinned, scenarios

CAPTURED = "107027: stream is captured"
UNSAFE = "107030: the current capture mode does not support this operation"
INNER, OUTSIDE = capture(lambda: full(0.0)), torch.npu.Stream()
both_modes = pytest.mark.usefixtures("any_mode")


# ---- a capture runs nothing ----

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "a fill": lambda x: x.fill_(9),
    "zeros": lambda x: x.zero_(),
    "a copy": lambda x: x.copy_(full(9)),
    "a copy from pinned memory": lambda x: x.copy_(pinned(9, 9, 9, 9), non_blocking=True),
    "through a view": lambda x: x.view(2, 2)[0].mul_(5),
    "an output argument": lambda x: torch.add(x, x, out=x),
    "an index": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(9.0)),
    "a reference that writes": lambda x: torch.ops.npu.npu_apply_rotary_pos_emb(
        *[x.view(1, 1, 1, 4)] * 2, *[full(0.0, 1, 1, 1, 4)] * 2
    ),
}


@both_modes
@scenarios("write", WRITES)
def test_capture_runs_nothing_before_the_replay(write: Callable[[torch.Tensor], object]) -> None:
    x = full(2.0)
    direct = x.clone()
    write(direct)
    graph = capture(lambda: write(x))
    assert x.tolist() == [2, 2, 2, 2]
    graph.replay()
    assert x.tolist() == direct.tolist() != [2, 2, 2, 2]


@both_modes
def test_each_replay_reads_current_inputs_and_writes_the_same_outputs() -> None:
    x, total = full(1.0), full(0.0)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
        total += doubled.sum()
        later = total.clone()
    where = doubled.data_ptr(), later.data_ptr()
    for value, expected in ((1, 8), (3, 32), (0, 32)):
        x.fill_(value)
        graph.replay()
        assert doubled.tolist() == [2 * value] * 4
        assert later.tolist() == [expected] * 4
    assert where == (doubled.data_ptr(), later.data_ptr())


@both_modes
def test_host_memory_is_read_at_capture_and_pinned_memory_at_replay() -> None:
    scalar, host = torch.tensor(3.0), pinned(1, 1, 1, 1)
    x, y = full(0.0), full(0.0)

    def body() -> None:
        x.fill_(1)
        x.mul_(scalar)
        y.copy_(host, non_blocking=True)

    graph = capture(body)
    scalar.fill_(100)
    host.fill_(7)
    graph.replay()
    assert x.tolist() == [3, 3, 3, 3]
    assert y.tolist() == [7, 7, 7, 7]


def test_metadata_changes_immediately_in_a_capture() -> None:
    x = full(0.0, 2, 6)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        parts = x.view(3, 4).t().split(2)
        assert torch.npu.is_current_stream_capturing()
        assert [tuple(part.shape) for part in parts] == [(2, 3), (2, 3)]
        assert parts[0].data_ptr() == x.data_ptr()
        assert (x @ x.t()).shape == (2, 2)
    assert not torch.npu.is_current_stream_capturing()


# ---- calls that a capture refuses ----

REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x[0].item(), CAPTURED),
    "a condition": (lambda x: bool(x[0] > 0), CAPTURED),
    "a mask": (lambda x: x[x > 0], UNSAFE),
    "nonzero": (lambda x: x.nonzero(), UNSAFE),
    "a copy to the host": (lambda x: x.cpu(), UNSAFE),
    "a copy from the host": (lambda x: x.copy_(torch.zeros(4)), UNSAFE),
    "a tensor from numbers": (lambda x: torch.tensor([1.0], device=NPU), UNSAFE),
    "the stream": (lambda x: torch.npu.current_stream().synchronize(), CAPTURED),
    "the stream's query": (lambda x: torch.npu.current_stream().query(), CAPTURED),
    "the device": (lambda x: torch.npu.synchronize(), CAPTURED),
    "an event": (lambda x: torch.npu.current_stream().record_event().synchronize(), CAPTURED),
    "an event's query": (lambda x: torch.npu.current_stream().record_event().query(), CAPTURED),
    "an event from outside": (
        lambda x: torch.npu.current_stream().wait_event(OUTSIDE.record_event()),
        "recorded outside of the capture",
    ),
    "a stream that has joined it": (
        lambda x: (
            OUTSIDE.wait_stream(torch.npu.current_stream()),
            torch.npu.current_stream().wait_stream(OUTSIDE),
            OUTSIDE.synchronize(),
        ),
        CAPTURED,
    ),
    "an update": (
        lambda x: torch.npu.graph_task_update_begin(torch.npu.current_stream(), None),
        "TaskGroup|capturing",
    ),
}


@both_modes
@scenarios("call, message", REFUSED)
def test_host_cannot_wait_for_captured_work(
    call: Callable[[torch.Tensor], object], message: str
) -> None:
    x = full(1.0)
    OUTSIDE.record_event()
    with (
        torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode="global"),
        pytest.raises((RuntimeError, TypeError), match=message),
    ):
        call(x)
    assert x.tolist() == [1, 1, 1, 1]


MISSING: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "random numbers": (lambda x: x.uniform_(), "aten::uniform_: random numbers in a graph"),
    "random permutations": (
        lambda x: torch.randperm(4, device=NPU),
        "aten::randperm.*: random numbers in a graph",
    ),
    "an asynchronous copy to the host": (
        lambda x: pinned(0, 0, 0, 0).copy_(x, non_blocking=True),
        "a copy to the host in a graph",
    ),
    "the default stream": (
        lambda x: torch.npu.default_stream().wait_stream(torch.npu.current_stream()),
        "a graph capture that takes in the default stream",
    ),
    "a graph": (lambda x: INNER.replay(), "the replay of a graph in another graph's capture"),
    "an operator without a reference": (
        lambda x: torch.ops.npu.npu_clipped_swiglu(x),
        "npu_clipped_swiglu has no reference",
    ),
}


@scenarios("call, message", MISSING)
def test_unsupported_graph_feature_is_named(
    call: Callable[[torch.Tensor], object], message: str
) -> None:
    x = full(1.0)
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(NotImplementedError, match=message):
        call(x)


@pytest.mark.parametrize(
    ("mode", "allowed"), [("global", False), ("thread_local", True), ("relaxed", True)]
)
def test_capture_error_mode_controls_synchronous_copies_of_threads(
    mode: str, allowed: bool
) -> None:
    x, errors, copied = full(1.0), [], []
    OUTSIDE.wait_stream(torch.npu.current_stream())

    def copy() -> None:
        with torch.npu.stream(OUTSIDE):
            try:
                copied.append(x.cpu())
            except RuntimeError as error:
                errors.append(str(error))

    with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode=mode):
        other = threading.Thread(target=copy)
        other.start()
        other.join()
    assert len(copied) == allowed
    assert all(UNSAFE in error for error in errors)
    assert len(errors) == (not allowed)


def test_other_streams_run_their_work_during_a_capture() -> None:
    x = full(1.0)
    OUTSIDE.wait_stream(torch.npu.current_stream())
    with torch.npu.graph(torch.npu.NPUGraph()):
        with torch.npu.stream(OUTSIDE):
            assert not torch.npu.is_current_stream_capturing()
            x.add_(1)
        OUTSIDE.synchronize()
    torch.npu.current_stream().wait_stream(OUTSIDE)
    assert x.tolist() == [2, 2, 2, 2]


def test_graph_calls_in_the_wrong_order_are_errors() -> None:
    graph, own, other = torch.npu.NPUGraph(), torch.npu.Stream(), torch.npu.Stream()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with torch.npu.stream(own):
        graph.capture_begin()
        with (
            pytest.raises(RuntimeError, match="only one NPU graph capture may be underway"),
            torch.npu.stream(other),
        ):
            torch.npu.NPUGraph().capture_begin()
        with (
            pytest.raises(RuntimeError, match="must end on the same stream"),
            torch.npu.stream(torch.npu.default_stream()),
        ):
            graph.capture_end()
        graph.capture_end()
    with (
        torch.npu.stream(other),
        pytest.raises(RuntimeError, match="already owns a captured graph"),
    ):
        graph.capture_begin()
    with pytest.raises(
        RuntimeError, match="Expected `global`, `thread_local`, or `relaxed`, got sometimes"
    ):
        capture(lambda: None, capture_error_mode="sometimes")
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_failed_capture_leaves_the_stream_usable() -> None:
    x = full(1.0)
    with pytest.raises(RuntimeError, match=CAPTURED):
        capture(lambda: x.sum().item())
    assert not torch.npu.is_current_stream_capturing()
    graph = capture(lambda: x.add_(1))
    graph.replay()
    assert x.tolist() == [2, 2, 2, 2]


def test_captured_events_have_no_effect_outside_the_capture() -> None:
    x, event = full(1.0), torch.npu.Event()

    def body() -> None:
        x.add_(1)
        event.record()
        event.wait()
        x.mul_(2)

    graph = capture(body)
    graph.replay()
    assert x.tolist() == [4, 4, 4, 4]
    with pytest.raises(RuntimeError, match="a graph capture that has ended"):
        torch.npu.current_stream().wait_event(event)


# ---- a second stream ----


def beside(
    side: torch.npu.Stream, first: Callable[[], object], second: Callable[[], object]
) -> Callable[[], None]:
    """Return a body that launches `first`, launches `second` on `side`, and waits for `side`."""

    def body() -> None:
        side.wait_stream(torch.npu.current_stream())
        first()
        with torch.npu.stream(side):
            second()
        torch.npu.current_stream().wait_stream(side)

    return body


@both_modes
def test_stream_that_waits_for_a_capture_is_captured() -> None:
    x, y, z, side = full(1.0), full(0.0), full(0.0), torch.npu.Stream()
    total = full(0.0)
    run = beside(side, lambda: y.copy_(x * 2), lambda: z.copy_(x * 3))

    def body() -> None:
        run()
        total.copy_(y + z)

    graph = capture(body)
    assert (y.tolist(), z.tolist()) == ([0] * 4, [0] * 4)
    for value in (1.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert total.tolist() == [5 * value] * 4
    with torch.npu.stream(side):  # the stream no longer captures
        assert not torch.npu.is_current_stream_capturing()
        side.wait_stream(torch.npu.default_stream())
        z.fill_(7)
    side.synchronize()
    assert z.tolist() == [7] * 4


def test_capture_end_requires_waits_for_all_captured_streams() -> None:
    side, x = torch.npu.Stream(), full(1.0)

    def body() -> None:
        side.wait_stream(torch.npu.current_stream())
        torch.npu.current_stream().wait_stream(side)
        with torch.npu.stream(side):
            x.add_(1)

    with pytest.raises(
        RuntimeError, match=f"has not waited for all that stream {side.stream_id} has captured"
    ):
        capture(body)
    assert not torch.npu.is_current_stream_capturing()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        x.add_(1)
    side.synchronize()
    assert x.tolist() == [2] * 4
