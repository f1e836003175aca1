"""External events and task groups: a replay blocks until the host has set the parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from emulated import capture, full, replay_aside, scenarios, side_stream


class Scaled:
    """A graph of y = (x + 1) * factor. The host sets the factor, as vllm-ascend sets lengths."""

    def __init__(self) -> None:
        self.x, self.y, self.event, self.update_stream = (
            full(1.0),
            full(0.0),
            torch.npu.ExternalEvent(),
            torch.npu.Stream(),
        )
        self.graph = capture(self._body)

    def _body(self) -> None:
        stream = torch.npu.current_stream()
        self.sum = self.x + 1
        self.event.wait(stream)
        self.event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.mul(self.sum, 10.0, out=self.y)
        self.handle = torch.npu.graph_task_group_end(stream)
        self.after = self.y + 0.5

    def update(self, factor: float, record: bool = True) -> None:
        with torch.npu.stream(self.update_stream):
            torch.npu.graph_task_update_begin(self.update_stream, self.handle)
            torch.mul(self.sum, factor, out=self.y)
            torch.npu.graph_task_update_end(self.update_stream)
            if record:
                self.event.record(self.update_stream)


@pytest.fixture
def scaled(any_mode: None) -> Scaled:
    return Scaled()


def test_replay_uses_parameters_that_the_host_updates_during_the_replay(scaled: Scaled) -> None:
    for x, factor in ((1, 3), (2, 5), (0, 5)):
        scaled.x.fill_(x)
        torch.npu.current_stream().synchronize()
        scaled.graph.replay()
        scaled.update(factor)
        assert scaled.y.tolist() == [(x + 1) * factor] * 4
        assert scaled.after.tolist() == [(x + 1) * factor + 0.5] * 4


def _update_a_replay_aside(scaled: Scaled) -> None:
    stream = replay_aside(scaled.graph)
    scaled.update(3)
    torch.npu.current_stream().wait_stream(stream)


UPDATES: dict[str, Callable[[Scaled], object]] = {
    "before the replay": lambda s: (s.update(3), s.graph.replay()),
    "several times, with the last update in effect": lambda s: (
        s.graph.replay(),
        s.update(7, record=False),
        s.update(3),
    ),
    "while a side stream replays": _update_a_replay_aside,
}


@scenarios("update", UPDATES)
def test_task_group_update_changes_the_replay(
    scaled: Scaled, update: Callable[[Scaled], object]
) -> None:
    update(scaled)
    assert scaled.y.tolist() == [6] * 4


def test_work_after_a_blocked_replay_waits_for_the_update(scaled: Scaled) -> None:
    done = torch.npu.Event()
    scaled.graph.replay()
    done.record()
    assert [done.query() for _ in range(6)] == [False] * 6
    scaled.update(3)
    after = scaled.after * 2  # runs the rest of the replay first
    assert after.tolist() == [13] * 4
    done.synchronize()
    assert done.query()


def test_work_launched_after_a_blocked_replay_runs_in_order(scaled: Scaled) -> None:
    """vllm-ascend does so for a MoE target on model runner V2 (platform.py:651 in 0.30.0rc2)."""
    mask = torch.zeros(4, dtype=torch.bool, device=scaled.x.device)
    for factor in (3, 5):
        scaled.graph.replay()
        mask[:2] = True
        twice = scaled.after * 2
        kept = torch.empty_like(twice).copy_(twice)
        scaled.after.zero_()
        scaled.update(factor)
        assert kept.tolist() == [2 * (2 * factor + 0.5)] * 4
        assert scaled.after.tolist() == [0] * 4
        assert mask.tolist() == [True, True, False, False]


def test_another_stream_can_wait_for_a_blocked_replay(scaled: Scaled) -> None:
    stream = torch.npu.Stream()
    scaled.graph.replay()
    done = torch.npu.current_stream().record_event()
    scaled.update(3)
    stream.wait_event(done)
    with torch.npu.stream(stream):
        twice = scaled.after * 2
    stream.synchronize()
    assert twice.tolist() == [13] * 4


def _wait_on_another_device() -> None:
    with torch.npu.device(1):
        torch.npu.current_stream().wait_event(torch.npu.current_stream(0).record_event())


NEEDS: dict[str, Callable[[Scaled], object]] = {
    "the host": lambda s: torch.npu.current_stream().synchronize(),
    "a copy to the host": lambda s: s.y.cpu(),
    "a copy from the host": lambda s: s.x.copy_(torch.zeros(4)),
    "a number": lambda s: s.y[0].item(),
    "the next replay": lambda s: s.graph.replay(),
    "a stream that waits and runs at once": lambda s: _wait_on_another_device(),
}


@scenarios("need", NEEDS)
def test_wait_for_an_unrecorded_external_event_is_an_error(
    scaled: Scaled, need: Callable[[Scaled], object]
) -> None:
    scaled.graph.replay()
    with pytest.raises(RuntimeError, match="waits for an external event .* that nothing records"):
        need(scaled)


def test_waiting_thread_continues_when_another_thread_records_the_event(
    scaled: Scaled,
) -> None:
    seen, started = [], threading.Event()
    scaled.graph.replay()
    done = torch.npu.current_stream().record_event()

    def wait() -> None:
        started.set()
        done.synchronize()
        seen.append(scaled.y.tolist())

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    scaled.update(3)
    thread.join()
    assert seen == [[6] * 4]


@pytest.mark.usefixtures("any_mode")
def test_external_event_stays_set_until_a_stream_resets_it() -> None:
    event, stream, x = torch.npu.ExternalEvent(), torch.npu.Stream(), full(1.0)
    event.record()
    for _ in range(2):
        event.wait()
        x.add_(1)
    event.reset()
    event.wait()
    torch.npu.synchronize(1)  # another device does not wait
    event.record(stream)
    x.add_(1)
    assert x.tolist() == [4] * 4


@pytest.mark.usefixtures("late")
def test_queued_update_does_not_change_an_unordered_replay() -> None:
    scaled = Scaled()
    scaled.update(3, record=False)  # queued on the update stream
    scaled.event.record()  # but the replay is not ordered after the update
    scaled.graph.replay()
    assert scaled.y.tolist() == [20] * 4
    scaled.update_stream.synchronize()
    scaled.event.record()
    scaled.graph.replay()
    assert scaled.y.tolist() == [6] * 4


@pytest.mark.usefixtures("late")
def test_external_event_orders_work_of_two_streams() -> None:
    scaled, x = Scaled(), full(1.0)
    scaled.update_stream.wait_stream(torch.npu.current_stream())
    scaled.graph.replay()
    with torch.npu.stream(scaled.update_stream):
        x.add_(1)
    scaled.update(3)
    assert (x + scaled.y).tolist() == [8] * 4


def test_update_with_other_operators_is_an_error() -> None:
    scaled = Scaled()
    for body in (
        lambda: None,
        lambda: torch.add(scaled.sum, 1, out=scaled.y),
        lambda: (scaled.y.mul_(2), scaled.y.mul_(2)),
    ):
        torch.npu.graph_task_update_begin(torch.npu.current_stream(), scaled.handle)
        body()
        with pytest.raises(
            RuntimeError,
            match=r"the update has the tasks \[.*\], but the group was captured with \[aten::mul.out\]",
        ):
            torch.npu.graph_task_update_end(torch.npu.current_stream())


def test_update_neither_runs_nor_captures_its_work() -> None:
    scaled = Scaled()
    torch.npu.graph_task_update_begin(torch.npu.current_stream(), scaled.handle)
    assert not torch.npu.is_current_stream_capturing()
    torch.mul(scaled.sum, 7.0, out=scaled.y)
    torch.npu.graph_task_update_end(torch.npu.current_stream())
    assert scaled.y.tolist() == [0] * 4


def test_task_groups_outside_a_capture_and_updates_inside_are_errors() -> None:
    scaled, begin, end = Scaled(), torch.npu.graph_task_group_begin, torch.npu.graph_task_group_end
    with side_stream() as stream:
        for call, message in (
            (begin, "graph_task_group_begin: the stream captures no graph"),
            (end, "graph_task_group_end: the stream captures no graph"),
            (
                torch.npu.graph_task_update_end,
                "graph_task_update_end: the stream has no open update",
            ),
        ):
            with pytest.raises(RuntimeError, match=message):
                call(stream)
    with torch.npu.graph(torch.npu.NPUGraph()):
        stream = torch.npu.current_stream()
        with pytest.raises(
            RuntimeError, match="graph_task_group_end: the stream has no open task group"
        ):
            end(stream)
        with pytest.raises(RuntimeError, match="the stream is capturing or updating already"):
            torch.npu.graph_task_update_begin(stream, scaled.handle)
        begin(stream)
        with pytest.raises(RuntimeError, match="has an open task group already"):
            begin(stream)
        with pytest.raises(NotImplementedError, match="ExternalEvent.record in a graph"):
            scaled.event.record(stream)
        end(stream)
    with pytest.raises(RuntimeError, match="the capture ends inside of a task group"):
        capture(lambda: begin(torch.npu.current_stream()))
    assert not torch.npu.is_current_stream_capturing()
