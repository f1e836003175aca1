"""The memory of graphs, and replays in late mode, on side streams and in races."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch_npu
from emulated import MIB, NPU, RACE, capture, full, pinned, replay_aside

from ascend_npu_emulator.native import core

both_modes = pytest.mark.usefixtures("any_mode")
late = pytest.mark.usefixtures("late")

# ---- memory ----


def reserved() -> int:
    gc.collect()
    torch.npu.empty_cache()
    return torch.npu.memory_reserved()


def fill_8_mib() -> None:
    torch.empty(8 * MIB, dtype=torch.uint8, device=NPU).fill_(1)


@both_modes
def test_graph_keeps_its_memory_and_shares_it_within_a_pool() -> None:
    before, pool = reserved(), torch.npu.graph_pool_handle()
    graphs = [capture(fill_8_mib, pool=pool) for _ in range(3)]
    graphs[0].replay()
    assert reserved() == before + 8 * MIB
    assert {graph.pool() for graph in graphs} == {pool}
    graphs.append(capture(fill_8_mib, pool=graphs[0].pool()))
    assert reserved() == before + 8 * MIB
    graphs.append(capture(fill_8_mib))
    assert reserved() == before + 16 * MIB
    graphs.pop()
    assert reserved() == before + 8 * MIB
    graphs.clear()
    assert reserved() == before


@both_modes
def test_memory_freed_in_a_capture_is_reused_in_it() -> None:
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


@both_modes
def test_weak_output_is_valid_until_another_graph_of_the_pool_is_replayed() -> None:
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


def test_weak_reference_does_not_keep_memory_and_later_use_is_an_error() -> None:
    before = torch.npu.memory_allocated()
    x = torch.ones(4, MIB, device=NPU)
    weak = torch_npu._C._weak_ref_tensor(x[1:])
    assert (
        weak.device == x.device and weak.shape == (3, MIB) and weak.data_ptr() == x[1:].data_ptr()
    )
    weak.zero_()
    assert x.sum(1).tolist() == [MIB, 0, 0, 0]
    del x
    assert torch.npu.memory_allocated() == before
    with pytest.raises(
        RuntimeError, match="NPU memory was freed, and is used through a weak reference"
    ):
        weak + 1


def test_replay_on_freed_memory_is_an_error() -> None:
    inputs, y = [full(1.0)], full(0.0)
    graph = capture(lambda: y.copy_(inputs[0] + 1))
    graph.replay()
    inputs.clear()
    with pytest.raises(
        RuntimeError,
        match=r"runs aten::add\.\w+ on a tensor of shape \[4\] \(float\) whose memory was freed",
    ):
        graph.replay()


# ---- streams, late mode, races ----


@late
def test_replay_on_a_side_stream_runs_when_another_stream_waits_for_it() -> None:
    host, x = pinned(5, 5, 5, 5), full(0.0)
    graph = capture(lambda: x.copy_(host, non_blocking=True))
    stream = replay_aside(graph)
    assert core.pending(0, stream.stream_id) > 0
    host.fill_(6)
    torch.npu.current_stream().wait_stream(stream)
    assert x.tolist() == [6, 6, 6, 6]


@late
@pytest.mark.parametrize("wait", ["the stream", "an event", None])
def test_other_streams_must_wait_to_read_replay_outputs(wait: str | None) -> None:
    x, y = full(1.0), full(0.0)
    graph = capture(lambda: y.copy_(x * 3))
    stream = replay_aside(graph)
    if wait == "the stream":
        torch.npu.current_stream().wait_stream(stream)
    elif wait == "an event":
        torch.npu.current_stream().wait_event(stream.record_event())
    else:
        with pytest.raises(
            RuntimeError,
            match=RACE + r": aten::add\.\w+ on the default stream .* aten::copy_ on stream",
        ):
            y + 1
        stream.synchronize()
    assert y.tolist() == [3, 3, 3, 3]


@late
def test_replay_races_with_unordered_work_of_other_streams() -> None:
    x, y = full(1.0), full(0.0)
    graph = capture(lambda: y.copy_(x * 3))
    (stream := torch.npu.Stream()).wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x.add_(1)
    with pytest.raises(
        RuntimeError, match=RACE + r": aten::mul\.\w+ on the default stream .* reads"
    ):
        graph.replay()
    torch.npu.current_stream().wait_stream(stream)
    graph.replay()
    assert y.tolist() == [6, 6, 6, 6]


@late
def test_two_graphs_of_one_pool_on_two_streams_race_for_its_memory() -> None:
    pool = torch.npu.graph_pool_handle()
    one, two = (capture(lambda: full(1.0, 512) + 1, pool=pool) for _ in range(2))
    stream = replay_aside(one)
    with pytest.raises(RuntimeError, match=RACE):
        two.replay()
    torch.npu.current_stream().wait_stream(stream)
    two.replay()


@late
def test_replay_on_the_default_stream_does_not_complete_earlier_host_copies() -> None:
    x, host = full(1.0), pinned(0, 0, 0, 0)
    graph = capture(lambda: x.add_(1))
    host.copy_(x, non_blocking=True)
    graph.replay()
    assert host.tolist() == [0, 0, 0, 0]
    torch.npu.current_stream().synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    assert x.tolist() == [2, 2, 2, 2]


@late
def test_new_memory_of_a_graph_holds_garbage_until_the_replay() -> None:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x = full(1.0, 700)
    assert x.min() > 700
    graph.replay()
    assert x.unique().tolist() == [1]


@late
def test_error_in_a_replay_is_raised_when_the_host_waits() -> None:
    x, index = full(1.0), torch.tensor([0], device=NPU)
    graph = capture(lambda: x.index_fill_(0, index, 5.0))
    index.fill_(99)
    stream = replay_aside(graph)
    with pytest.raises((RuntimeError, IndexError), match="out of range|out of bounds"):
        stream.synchronize()
    stream.synchronize()
    index.fill_(2)
    replay_aside(graph).synchronize()
    assert x.tolist() == [1, 1, 5, 1]


@late
@pytest.mark.parametrize("streams_before", [0, 31])
@pytest.mark.parametrize("aside", [False, True])
def test_streams_of_one_graph_race_unless_captured_events_order_them(
    aside: bool, streams_before: int
) -> None:
    # The 33rd stream of a process is the first stream again. Captures may share this stream.
    for _ in range(streams_before):
        torch.npu.Stream()
    x, y, side, captured = full(1.0), full(0.0), torch.npu.Stream(), torch.npu.Stream()

    def body(waits: bool) -> None:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y.copy_(x * 2)
        if waits:
            torch.npu.current_stream().wait_stream(side)
        y.add_(1)
        torch.npu.current_stream().wait_stream(side)

    right, wrong = (capture(partial(body, waits), stream=captured) for waits in (True, False))
    for _ in range(2):
        replayed = replay_aside(right) if aside else right.replay()
        if replayed is not None:
            torch.npu.current_stream().wait_stream(replayed)
        assert y.tolist() == [3] * 4
    with pytest.raises(
        RuntimeError, match=RACE + r": aten::add\.\w+ on .* that aten::copy_ on stream"
    ):
        replay_aside(wrong) if aside else wrong.replay()
