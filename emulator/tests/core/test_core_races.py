"""Late mode finds missing waits between two accesses, and memory that is freed too early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from emulated import NPU, RACE, full, scenarios, side_stream
from hypothesis import given
from hypothesis import strategies as st

from ascend_npu_emulator.native import core

pytestmark = pytest.mark.usefixtures("late")
Step = Callable[[torch.Tensor], object]
Wait = Callable[[torch.npu.Stream, torch.npu.Stream], object]


def streams(count: int) -> list[torch.npu.Stream]:
    made = [torch.npu.Stream() for _ in range(count)]
    for stream in made:
        stream.wait_stream(torch.npu.current_stream())
    return made


def filled_aside(*shape: int) -> tuple[torch.Tensor, torch.npu.Stream]:
    """Return a tensor of zeros, and the side stream that is filling the tensor with ones."""
    x = full(0.0, *shape)
    with side_stream() as stream:
        x.fill_(1)
    return x, stream


# ---- each kind of conflict, with and without a wait ----

write: Step = lambda x: x.fill_(1)  # noqa: E731
read: Step = lambda x: x + 1  # noqa: E731

CONFLICTS: dict[str, tuple[Step, Step]] = {
    "write, read": (write, read),
    "read, write": (read, write),
    "write, write": (write, write),
    "write, read of a part": (write, lambda x: x[1] * 2),
    "write of a part, read": (lambda x: x[0].zero_(), read),
    "write through a view, read": (lambda x: x.view(-1)[3:].add_(1), read),
    "result, read": (lambda x: x.copy_(x * 2), read),
    "copy from the host, read": (
        lambda x: x.copy_(torch.ones(4, 4).pin_memory(), non_blocking=True),
        read,
    ),
    "write, copy to the host": (
        write,
        lambda x: torch.empty(4, 4).pin_memory().copy_(x, non_blocking=True),
    ),
    "write, index": (write, lambda x: x[torch.tensor([0, 2], device=NPU)]),
    "index_put, read": (lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(2.0)), read),
    "cat into, read": (lambda x: torch.cat([x[:2], x[2:]], out=x.new_empty(4, 4)), write),
}


@pytest.mark.parametrize("into", ["side", "default"])
@pytest.mark.parametrize("wait", [True, False])
@scenarios("first, second", CONFLICTS)
def test_missing_wait_is_an_error_and_adding_it_fixes_the_program(
    first: Step, second: Step, wait: bool, into: str
) -> None:
    x = full(0.0, 4, 4)
    one, other = streams(2) if into == "side" else [*streams(1), torch.npu.default_stream()]
    with torch.npu.stream(one):
        kept = first(x)
    if wait:
        other.wait_stream(one)
    with (
        torch.npu.stream(other),
        nullcontext() if wait else pytest.raises(RuntimeError, match=RACE),
    ):
        second(x)
    torch.npu.synchronize()
    del kept


HARMLESS: dict[str, tuple[Step, Step]] = {
    "two reads": (read, read),
    "two halves": (lambda x: x[:2].fill_(1), lambda x: x[2:].fill_(2)),
    "two columns": (lambda x: x[:, :2].fill_(1), lambda x: x[:, 2:].fill_(2)),
    "columns and their neighbours": (lambda x: x[1:, 3].fill_(1), lambda x: x[:, 0].sum()),
    "a column and the row beside it": (
        lambda x: x[:, 3].fill_(1),
        lambda x: x[1:3, :3].sum() + x[2, :3].sum(),
    ),
    "read of a part, write of another": (lambda x: x[0] + 1, lambda x: x[1].fill_(1)),
    "nothing": (lambda x: x[:0].fill_(1), write),
    "shapes only": (lambda x: x.view(16).unsqueeze(0).t(), write),
}


@scenarios("first, second", HARMLESS)
def test_accesses_without_conflict_need_no_wait(first: Step, second: Step) -> None:
    x = full(0.0, 4, 4)
    for step, stream in zip((first, second), streams(2), strict=True):
        with torch.npu.stream(stream):
            step(x)


ORDERS: dict[str, Wait] = {
    "wait_stream": lambda one, other: other.wait_stream(one),
    "wait_event": lambda one, other: other.wait_event(one.record_event()),
    "Event.wait": lambda one, other: one.record_event().wait(other),
    "the host waits for the stream": lambda one, other: one.synchronize(),
    "the host waits for an event": lambda one, other: one.record_event().synchronize(),
    "the host waits for the device": lambda one, other: torch.npu.synchronize(),
    "the host polls": lambda one, other: _poll(one.record_event()),
    "a third stream between": lambda one, other: _chain(one, other),
}


def _poll(event: torch.npu.Event) -> None:
    while not event.query():
        pass


def _chain(one: torch.npu.Stream, other: torch.npu.Stream) -> None:
    third = torch.npu.Stream()
    third.wait_stream(one)
    other.wait_event(third.record_event())


@scenarios("order", ORDERS)
def test_wait_orders_two_writes(order: Wait) -> None:
    (other,), (x, one) = streams(1), filled_aside()
    order(one, other)
    with torch.npu.stream(other):
        x.mul_(3)
    other.synchronize()
    assert x.tolist() == [3] * 4


NO_ORDERS: dict[str, Wait] = {
    "a wait in the wrong direction": lambda one, other: one.wait_stream(other),
    "a query that returns False": lambda one, other: one.record_event().query(),
    "an event of the waiting stream": lambda one, other: other.wait_event(other.record_event()),
    "the host waiting for the other stream": lambda one, other: other.synchronize(),
}


@scenarios("order", NO_ORDERS)
def test_two_writes_race_without_the_required_wait(order: Wait) -> None:
    (other,), (x, one) = streams(1), filled_aside()
    order(one, other)
    with torch.npu.stream(other), pytest.raises(RuntimeError, match=RACE):
        x.mul_(3)


def test_an_event_orders_only_earlier_launches() -> None:
    y, (x, one) = full(0.0), filled_aside()
    (other,) = streams(1)
    event = one.record_event()
    with torch.npu.stream(one):
        y.fill_(1)
    other.wait_event(event)
    with torch.npu.stream(other):
        x.add_(1)
        with pytest.raises(RuntimeError, match=RACE):
            y.add_(1)


def test_race_error_names_streams_operators_and_shape() -> None:
    x, one = filled_aside(2, 5)
    with pytest.raises(RuntimeError) as caught:
        x + 1
    for part in (
        "aten::add",
        "aten::fill_",
        "[2, 5]",
        f"stream {one.stream_id} of npu:0",
        "the default stream of npu:0",
        "wait_stream",
    ):
        assert part in str(caught.value)


def test_race_in_pinned_memory_is_an_error() -> None:
    host, x = torch.zeros(4).pin_memory(), torch.ones(4, device=NPU)
    one, other = streams(2)
    with torch.npu.stream(one):
        host.copy_(x, non_blocking=True)
    with torch.npu.stream(other), pytest.raises(RuntimeError, match=RACE):
        host.copy_(x, non_blocking=True)
    with torch.npu.stream(other), pytest.raises(RuntimeError, match=RACE):
        torch.zeros(2, device=NPU).copy_(host[2:], non_blocking=True)
    other.wait_stream(one)
    with torch.npu.stream(other):
        host.copy_(x, non_blocking=True)


slices = st.builds(slice, st.integers(0, 5), st.integers(1, 6), st.integers(1, 3))


@given(st.lists(slices, min_size=2, max_size=2), st.lists(slices, min_size=2, max_size=2))
def test_views_overlap_only_if_they_share_an_element(one: list[slice], other: list[slice]) -> None:
    x = torch.zeros(6, 6, device=NPU)
    numbers = torch.arange(36).view(6, 6)
    shared = set(numbers[tuple(one)].flatten().tolist()) & set(
        numbers[tuple(other)].flatten().tolist()
    )
    found = core.may_overlap(x[tuple(one)], x[tuple(other)])
    assert found >= bool(shared), "a conflict would be missed"
    if all(s.step == 1 for s in (one[1], other[1])) and one[0].step == other[0].step:
        assert found == bool(shared), "a conflict would be invented"


@given(
    st.permutations(range(3)),
    st.tuples(slices, slices, slices),
    st.permutations(range(3)),
    st.tuples(slices, slices, slices),
)
def test_overlaps_of_permuted_views_are_found(
    p: list[int], one: tuple[slice, ...], q: list[int], other: tuple[slice, ...]
) -> None:
    x, numbers = torch.zeros(6, 6, 6, device=NPU), torch.arange(216).view(6, 6, 6)
    shared = set(numbers.permute(p)[one].flatten().tolist()) & set(
        numbers.permute(q)[other].flatten().tolist()
    )
    assert core.may_overlap(x.permute(p)[one], x.permute(q)[other]) >= bool(shared)


# ---- memory that is freed too early ----


def _read_and_free(record: bool) -> tuple[torch.Tensor, torch.npu.Stream]:
    x, host = full(0.0, 1 << 12), torch.empty(1 << 12).pin_memory()
    with side_stream() as stream:
        host.copy_(x, non_blocking=True)
    if record:
        x.record_stream(stream)
    return host, stream


@pytest.mark.filterwarnings("ignore:NPU stream race")
def test_memory_freed_while_a_side_stream_reads_it_may_be_overwritten() -> None:
    host, stream = _read_and_free(record=False)
    torch.empty(1 << 12, device=NPU)
    stream.synchronize()
    assert host.isnan().all()


@pytest.mark.parametrize("recorded", [False, True])
def test_allocating_memory_that_a_side_stream_may_still_write_is_an_error(
    recorded: bool,
) -> None:
    x, stream = filled_aside(1 << 12)
    if recorded:
        x.record_stream(stream)
    del x
    message = rf"{RACE}: a block.*aten::fill_.*may still write it.*record_stream"
    with nullcontext() if recorded else pytest.raises(RuntimeError, match=message):
        torch.empty(1 << 12, device=NPU)


@pytest.mark.parametrize("cure", ["record_stream", "wait", "another stream's memory", "larger"])
def test_memory_freed_while_a_side_stream_reads_it_is_safe_with_a_cure(cure: str) -> None:
    host, stream = _read_and_free(record=cure == "record_stream")
    if cure == "wait":
        torch.npu.current_stream().wait_stream(stream)
    if cure == "another stream's memory":
        with torch.npu.stream(torch.npu.Stream()):
            torch.empty(1 << 12, device=NPU)
    elif cure == "larger":
        torch.empty(1 << 16, device=NPU)
    else:
        torch.empty(1 << 12, device=NPU)
    torch.npu.synchronize()
    assert not host.any()
