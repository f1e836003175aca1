"""Graphs: a capture runs nothing, a replay runs what was captured, on the same memory and in the order of its stream."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch_npu

from vllm_ascend_hsx.emulator.native import core

NPU = torch.device("npu:0")
MIB = 1 << 20
CAPTURED = "107027: stream is captured"
UNSAFE = "107030: the current capture mode does not support this operation"


def full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape or (4,), value, device=NPU)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def capture(body: Callable[[], object], **options: object) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        body()
    return graph


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
    "a reference that writes": lambda x: torch.ops.npu.npu_apply_rotary_pos_emb(*[x.view(1, 1, 1, 4)] * 2, *[full(0.0, 1, 1, 1, 4)] * 2),
}


@pytest.mark.usefixtures("any_mode")
@pytest.mark.parametrize("write", WRITES)
def test_what_is_captured_is_not_run_before_the_replay(write: str) -> None:
    x = full(2.0)
    direct = x.clone()
    WRITES[write](direct)
    graph = capture(lambda: WRITES[write](x))
    assert x.tolist() == [2, 2, 2, 2]
    graph.replay()
    assert x.tolist() == direct.tolist() != [2, 2, 2, 2]


@pytest.mark.usefixtures("any_mode")
def test_each_replay_reads_what_the_inputs_hold_by_then_and_writes_the_same_outputs() -> None:
    x, total = full(1.0), full(0.0)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
        total += doubled.sum()
        later = total.clone()
    where = doubled.data_ptr(), later.data_ptr()
    for value, wanted in ((1, 8), (3, 32), (0, 32)):
        x.fill_(value)
        graph.replay()
        assert doubled.tolist() == [2 * value] * 4
        assert later.tolist() == [wanted] * 4
    assert where == (doubled.data_ptr(), later.data_ptr())


@pytest.mark.usefixtures("any_mode")
def test_what_the_host_holds_is_read_at_the_capture_and_pinned_memory_at_the_replay() -> None:
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


def test_metadata_changes_at_once_in_a_capture() -> None:
    x = full(0.0, 2, 6)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        parts = x.view(3, 4).t().split(2)
        assert torch.npu.is_current_stream_capturing()
        assert [tuple(part.shape) for part in parts] == [(2, 3), (2, 3)]
        assert parts[0].data_ptr() == x.data_ptr()
        assert (x @ x.t()).shape == (2, 2)
    assert not torch.npu.is_current_stream_capturing()


# ---- what a capture refuses ----

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
    "an event from outside": (lambda x: torch.npu.current_stream().wait_event(OUTSIDE.record_event()), "recorded outside of the capture"),
    "an update": (lambda x: torch.npu.graph_task_update_begin(torch.npu.current_stream(), None), "TaskGroup|capturing"),
}
OUTSIDE = torch.npu.Stream()


@pytest.mark.usefixtures("any_mode")
@pytest.mark.parametrize("what", REFUSED)
def test_a_host_that_waits_for_what_is_only_recorded_is_refused(what: str) -> None:
    call, message = REFUSED[what]
    x = full(1.0)
    OUTSIDE.record_event()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, capture_error_mode="global"), pytest.raises((RuntimeError, TypeError), match=message):
        call(x)
    assert x.tolist() == [1, 1, 1, 1]


MISSING: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "random numbers": (lambda x: x.uniform_(), "aten::uniform_: random numbers in a graph"),
    "random permutations": (lambda x: torch.randperm(4, device=NPU), "aten::randperm.*: random numbers in a graph"),
    "an asynchronous copy to the host": (lambda x: pinned(0, 0, 0, 0).copy_(x, non_blocking=True), "a copy to the host in a graph"),
    "a second stream": (lambda x: OUTSIDE.wait_stream(torch.npu.current_stream()), "a graph capture that takes in a second stream"),
    "a graph": (lambda x: INNER.replay(), "the replay of a graph in another graph's capture"),
    "an operator without a reference": (lambda x: torch.ops.npu.npu_dynamic_quant(x), "npu_dynamic_quant has no reference"),
}
INNER = capture(lambda: full(0.0))


@pytest.mark.parametrize("what", MISSING)
def test_what_graphs_do_not_have_yet_says_so_by_name(what: str) -> None:
    call, message = MISSING[what]
    x = full(1.0)
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(NotImplementedError, match=message):
        call(x)


@pytest.mark.parametrize(("mode", "allowed"), [("global", False), ("thread_local", True), ("relaxed", True)])
def test_the_error_mode_says_whether_other_threads_may_copy_synchronously_meanwhile(mode: str, allowed: bool) -> None:
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


def test_work_of_other_streams_goes_on_during_a_capture() -> None:
    x = full(1.0)
    OUTSIDE.wait_stream(torch.npu.current_stream())
    with torch.npu.graph(torch.npu.NPUGraph()):
        with torch.npu.stream(OUTSIDE):
            assert not torch.npu.is_current_stream_capturing()
            x.add_(1)
        OUTSIDE.synchronize()
    torch.npu.current_stream().wait_stream(OUTSIDE)
    assert x.tolist() == [2, 2, 2, 2]


def test_graphs_are_used_in_the_right_order() -> None:
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="only one NPU graph capture may be underway"), torch.npu.stream(torch.npu.Stream()):
            torch.npu.NPUGraph().capture_begin()
        with pytest.raises(RuntimeError, match="must end on the same stream"), torch.npu.stream(torch.npu.default_stream()):
            graph.capture_end()
        graph.capture_end()
    with torch.npu.stream(torch.npu.Stream()), pytest.raises(RuntimeError, match="already owns a captured graph"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="Expected `global`, `thread_local`, or `relaxed`, got sometimes"):
        capture(lambda: None, capture_error_mode="sometimes")
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_capture_that_fails_leaves_the_stream_as_it_was() -> None:
    x = full(1.0)
    with pytest.raises(RuntimeError, match=CAPTURED):
        capture(lambda: x.sum().item())
    assert not torch.npu.is_current_stream_capturing()
    graph = capture(lambda: x.add_(1))
    graph.replay()
    assert x.tolist() == [2, 2, 2, 2]


def test_events_within_a_capture_order_its_stream_and_mean_nothing_outside() -> None:
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


# ---- memory ----


def reserved() -> int:
    gc.collect()
    torch.npu.empty_cache()
    return torch.npu.memory_reserved()


def big(body: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    return lambda: body(torch.empty(8 * MIB, dtype=torch.uint8, device=NPU))


@pytest.mark.usefixtures("any_mode")
def test_memory_of_a_capture_stays_with_its_graph() -> None:
    before = reserved()
    graph = capture(big(lambda x: x.fill_(1)))
    assert reserved() == before + 8 * MIB
    graph.replay()
    assert reserved() == before + 8 * MIB
    del graph
    assert reserved() == before


@pytest.mark.usefixtures("any_mode")
def test_graphs_of_one_pool_share_memory_and_others_do_not() -> None:
    before, pool = reserved(), torch.npu.graph_pool_handle()
    graphs = [capture(big(lambda x: x.fill_(1)), pool=pool) for _ in range(3)]
    assert reserved() == before + 8 * MIB
    assert {graph.pool() for graph in graphs} == {pool}
    graphs.append(capture(big(lambda x: x.fill_(1)), pool=graphs[0].pool()))
    assert reserved() == before + 8 * MIB
    graphs.append(capture(big(lambda x: x.fill_(1))))
    assert reserved() == before + 16 * MIB
    graphs.clear()
    assert reserved() == before


@pytest.mark.usefixtures("any_mode")
def test_memory_freed_in_a_capture_is_used_again_in_it() -> None:
    before = reserved()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x = torch.zeros(2 * MIB, device=NPU)
        for _ in range(6):
            x = x + 1
    assert reserved() <= before + 3 * 8 * MIB
    graph.replay()
    assert x.unique().tolist() == [6]
    del graph, x
    assert reserved() == before


@pytest.mark.usefixtures("any_mode")
def test_an_output_lives_while_it_is_held_and_a_weak_one_until_another_graph_of_the_pool_is_replayed() -> None:
    pool = torch.npu.graph_pool_handle()
    held: dict[str, torch.Tensor] = {}

    def first() -> None:
        weak = full(1.0, 512)
        held.update(strong=full(1.0, 512), weak=torch_npu._C._weak_ref_tensor(weak))

    def second() -> None:
        held["other"] = full(2.0, 512)

    graphs = [capture(first, pool=pool), capture(second, pool=pool)]
    graphs[0].replay()
    assert held["strong"].unique().tolist() == held["weak"].unique().tolist() == [1]
    graphs[1].replay()
    assert held["strong"].unique().tolist() == [1]
    assert held["weak"].unique().tolist() == [2]
    assert held["weak"].data_ptr() == held["other"].data_ptr()


def test_a_weak_reference_does_not_keep_memory_and_says_when_it_is_gone() -> None:
    before = torch.npu.memory_allocated()
    x = torch.ones(4, MIB, device=NPU)
    weak = torch_npu._C._weak_ref_tensor(x[1:])
    assert weak.device == x.device and weak.shape == (3, MIB) and weak.data_ptr() == x[1:].data_ptr()
    weak.zero_()
    assert x.sum(1).tolist() == [MIB, 0, 0, 0]
    del x
    assert torch.npu.memory_allocated() == before
    with pytest.raises(RuntimeError, match="NPU memory was freed, and is used through a weak reference"):
        weak + 1


def test_a_replay_on_memory_that_was_freed_since_is_an_error() -> None:
    inputs, y = [full(1.0)], full(0.0)
    graph = capture(lambda: y.copy_(inputs[0] + 1))
    graph.replay()
    inputs.clear()
    with pytest.raises(RuntimeError, match=r"runs aten::add\.\w+ on a tensor of shape \[4\] \(float\) whose memory was freed"):
        graph.replay()


# ---- streams, late mode, races ----


def side_replay(graph: torch.npu.NPUGraph) -> torch.npu.Stream:
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        graph.replay()
    return stream


@pytest.mark.usefixtures("late")
def test_a_replay_on_a_side_stream_runs_when_something_waits_for_it() -> None:
    host, x = pinned(5, 5, 5, 5), full(0.0)
    graph = capture(lambda: x.copy_(host, non_blocking=True))
    stream = side_replay(graph)
    assert core.pending(0, stream.stream_id) > 0
    host.fill_(6)
    torch.npu.current_stream().wait_stream(stream)
    assert x.tolist() == [6, 6, 6, 6]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("wait", ["the stream", "an event", None])
def test_what_a_replay_writes_is_read_elsewhere_only_after_a_wait(wait: str | None) -> None:
    x, y = full(1.0), full(0.0)
    graph = capture(lambda: y.copy_(x * 3))
    stream = side_replay(graph)
    if wait == "the stream":
        torch.npu.current_stream().wait_stream(stream)
    elif wait == "an event":
        torch.npu.current_stream().wait_event(stream.record_event())
    else:
        with pytest.raises(RuntimeError, match=r"NPU stream race: aten::add\.\w+ on the default stream .* aten::copy_ on stream"):
            y + 1
        stream.synchronize()
    assert y.tolist() == [3, 3, 3, 3]


@pytest.mark.usefixtures("late")
def test_a_replay_is_held_against_what_other_streams_did() -> None:
    x, y = full(1.0), full(0.0)
    graph = capture(lambda: y.copy_(x * 3))
    (stream := torch.npu.Stream()).wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"NPU stream race: aten::mul\.\w+ on the default stream .* reads"):
        graph.replay()
    torch.npu.current_stream().wait_stream(stream)
    graph.replay()
    assert y.tolist() == [6, 6, 6, 6]


@pytest.mark.usefixtures("late")
def test_two_graphs_of_one_pool_on_two_streams_race_for_its_memory() -> None:
    pool = torch.npu.graph_pool_handle()
    one, two = (capture(lambda: full(1.0, 512) + 1, pool=pool) for _ in range(2))
    stream = side_replay(one)
    with pytest.raises(RuntimeError, match="NPU stream race"):
        two.replay()
    torch.npu.current_stream().wait_stream(stream)
    two.replay()


@pytest.mark.usefixtures("late")
def test_a_replay_on_the_default_stream_leaves_earlier_copies_to_the_host_under_way() -> None:
    x, host = full(1.0), pinned(0, 0, 0, 0)
    graph = capture(lambda: x.add_(1))
    host.copy_(x, non_blocking=True)
    graph.replay()
    assert host.tolist() == [0, 0, 0, 0]
    torch.npu.current_stream().synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    assert x.tolist() == [2, 2, 2, 2]


@pytest.mark.usefixtures("late")
def test_new_memory_of_a_graph_holds_garbage_until_the_replay() -> None:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x = full(1.0, 700)
    assert x.min() > 700
    graph.replay()
    assert x.unique().tolist() == [1]


@pytest.mark.usefixtures("late")
def test_an_error_in_a_replay_surfaces_where_the_host_waits_and_the_stream_goes_on() -> None:
    x, index = full(1.0), torch.tensor([0], device=NPU)
    graph = capture(lambda: x.index_fill_(0, index, 5.0))
    index.fill_(99)
    stream = side_replay(graph)
    with pytest.raises((RuntimeError, IndexError), match="out of range|out of bounds"):
        stream.synchronize()
    stream.synchronize()
    index.fill_(2)
    side_replay(graph).synchronize()
    assert x.tolist() == [1, 1, 5, 1]
