"""Late mode finds missing waits: a program that orders its work gives the sequential result, and one that does not is an error.

The properties run random programs over three streams. A model of happens-before, written independently of the emulator's, decides
where a program needs a wait, puts one of several kinds there, and then leaves one out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.emulator.native import core

pytestmark = pytest.mark.usefixtures("late")
NPU = torch.device("npu:0")
RACE = "NPU stream race"


def streams(count: int) -> list[torch.npu.Stream]:
    made = [torch.npu.Stream() for _ in range(count)]
    for stream in made:
        stream.wait_stream(torch.npu.current_stream())
    return made


# ---- each kind of conflict, with and without its wait ----

Step = Callable[[torch.Tensor], object]
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
    "copy from the host, read": (lambda x: x.copy_(torch.ones(4, 4).pin_memory(), non_blocking=True), read),
    "write, copy to the host": (write, lambda x: torch.empty(4, 4).pin_memory().copy_(x, non_blocking=True)),
    "write, index": (write, lambda x: x[torch.tensor([0, 2], device=NPU)]),
    "index_put, read": (lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(2.0)), read),
    "cat into, read": (lambda x: torch.cat([x[:2], x[2:]], out=x.new_empty(4, 4)), write),
}


@pytest.mark.parametrize("into", ["side", "default"])
@pytest.mark.parametrize("name", CONFLICTS)
def test_a_missing_wait_is_an_error_and_the_wait_cures_it(name: str, into: str) -> None:
    first, second = CONFLICTS[name]
    for wait in (True, False):
        x = torch.zeros(4, 4, device=NPU)
        (one,) = streams(1)
        other = torch.npu.Stream() if into == "side" else torch.npu.default_stream()
        if into == "side":
            other.wait_stream(torch.npu.default_stream())
        with torch.npu.stream(one):
            kept = first(x)
        if wait:
            other.wait_stream(one)
        with torch.npu.stream(other):
            if wait:
                kept = second(x)
            else:
                with pytest.raises(RuntimeError, match=RACE):
                    second(x)
        torch.npu.synchronize()
        del kept


HARMLESS: dict[str, tuple[Step, Step]] = {
    "two reads": (read, read),
    "two halves": (lambda x: x[:2].fill_(1), lambda x: x[2:].fill_(2)),
    "two columns": (lambda x: x[:, :2].fill_(1), lambda x: x[:, 2:].fill_(2)),
    "columns and their neighbours": (lambda x: x[1:, 3].fill_(1), lambda x: x[:, 0].sum()),
    "a column and the row beside it": (lambda x: x[:, 3].fill_(1), lambda x: x[1:3, :3].sum() + x[2, :3].sum()),
    "read of a part, write of another": (lambda x: x[0] + 1, lambda x: x[1].fill_(1)),
    "nothing": (lambda x: x[:0].fill_(1), write),
    "shapes only": (lambda x: x.view(16).unsqueeze(0).t(), write),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_accesses_that_do_not_conflict_need_no_wait(name: str) -> None:
    first, second = HARMLESS[name]
    x = torch.zeros(4, 4, device=NPU)
    one, other = streams(2)
    with torch.npu.stream(one):
        first(x)
    with torch.npu.stream(other):
        second(x)


ORDERS: dict[str, Callable[[torch.npu.Stream, torch.npu.Stream], object]] = {
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


@pytest.mark.parametrize("name", ORDERS)
def test_two_writes_are_ordered_by(name: str) -> None:
    x = torch.zeros(4, device=NPU)
    one, other = streams(2)
    with torch.npu.stream(one):
        x.fill_(1)
    ORDERS[name](one, other)
    with torch.npu.stream(other):
        x.mul_(3)
    other.synchronize()
    assert x.tolist() == [3] * 4


NO_ORDERS: dict[str, Callable[[torch.npu.Stream, torch.npu.Stream], object]] = {
    "a wait in the wrong direction": lambda one, other: one.wait_stream(other),
    "a query that said no": lambda one, other: one.record_event().query(),
    "an event of the waiting stream": lambda one, other: other.wait_event(other.record_event()),
    "the host waiting for the other stream": lambda one, other: other.synchronize(),
}


@pytest.mark.parametrize("name", NO_ORDERS)
def test_two_writes_are_not_ordered_by(name: str) -> None:
    x = torch.zeros(4, device=NPU)
    one, other = streams(2)
    with torch.npu.stream(one):
        x.fill_(1)
    NO_ORDERS[name](one, other)
    with torch.npu.stream(other), pytest.raises(RuntimeError, match=RACE):
        x.mul_(3)


def test_an_event_orders_only_what_was_launched_before_it() -> None:
    x, y = torch.zeros(4, device=NPU), torch.zeros(4, device=NPU)
    one, other = streams(2)
    with torch.npu.stream(one):
        x.fill_(1)
        event = one.record_event()
        y.fill_(1)
    other.wait_event(event)
    with torch.npu.stream(other):
        x.add_(1)
        with pytest.raises(RuntimeError, match=RACE):
            y.add_(1)


def test_the_error_names_streams_operators_and_shape() -> None:
    x = torch.zeros(2, 5, device=NPU)
    (one,) = streams(1)
    with torch.npu.stream(one):
        x.fill_(1)
    with pytest.raises(RuntimeError) as caught:
        x + 1
    message = str(caught.value)
    for part in ("aten::add", "aten::fill_", "[2, 5]", f"stream {one.stream_id} of npu:0", "the default stream of npu:0", "wait_stream"):
        assert part in message


def test_pinned_memory_is_checked_too() -> None:
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
def test_two_parts_of_a_matrix_overlap_if_and_only_if_they_share_an_element(one: list[slice], other: list[slice]) -> None:
    x = torch.zeros(6, 6, device=NPU)
    numbers = torch.arange(36).view(6, 6)
    shared = set(numbers[tuple(one)].flatten().tolist()) & set(numbers[tuple(other)].flatten().tolist())
    found = core.may_overlap(x[tuple(one)], x[tuple(other)])
    assert found >= bool(shared), "a conflict would be missed"
    if all(s.step == 1 for s in (one[1], other[1])) and one[0].step == other[0].step:
        assert found == bool(shared), "a conflict would be invented"


@given(st.permutations(range(3)), st.tuples(slices, slices, slices), st.permutations(range(3)), st.tuples(slices, slices, slices))
def test_no_overlap_of_permuted_parts_is_missed(p: list[int], one: tuple[slice, ...], q: list[int], other: tuple[slice, ...]) -> None:
    x, numbers = torch.zeros(6, 6, 6, device=NPU), torch.arange(216).view(6, 6, 6)
    shared = set(numbers.permute(p)[one].flatten().tolist()) & set(numbers.permute(q)[other].flatten().tolist())
    assert core.may_overlap(x.permute(p)[one], x.permute(q)[other]) >= bool(shared)


# ---- memory that is freed too early ----


def _read_and_free(stream: torch.npu.Stream, record: bool) -> torch.Tensor:
    x, host = torch.zeros(1 << 12, device=NPU), torch.empty(1 << 12).pin_memory()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        host.copy_(x, non_blocking=True)
    if record:
        x.record_stream(stream)
    return host


@pytest.mark.filterwarnings("ignore:NPU stream race")
def test_memory_freed_while_a_side_stream_reads_it_may_be_overwritten() -> None:
    (stream,) = streams(1)
    host = _read_and_free(stream, record=False)
    torch.empty(1 << 12, device=NPU)
    stream.synchronize()
    assert host.isnan().all()


def test_memory_freed_while_a_side_stream_writes_it_may_not_be_allocated_again() -> None:
    (stream,) = streams(1)
    x = torch.zeros(1 << 12, device=NPU)
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x.fill_(1)
    del x
    with pytest.raises(RuntimeError, match=r"NPU stream race: a block.*aten::fill_.*may still write it.*record_stream"):
        torch.empty(1 << 12, device=NPU)


def test_memory_recorded_on_the_stream_that_writes_it_may_be_allocated_again() -> None:
    (stream,) = streams(1)
    x = torch.zeros(1 << 12, device=NPU)
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x.fill_(1)
    x.record_stream(stream)
    del x
    torch.empty(1 << 12, device=NPU)


@pytest.mark.parametrize("cure", ["record_stream", "wait", "another stream's memory", "larger"])
def test_memory_freed_while_a_side_stream_reads_it_is_safe_with(cure: str) -> None:
    (stream,) = streams(1)
    host = _read_and_free(stream, record=cure == "record_stream")
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


# ---- random programs ----

BUFFERS, HOSTS, STREAMS = 3, 2, 3
KINDS = ("add", "mix", "to host", "to device", "read host", "write host")


@dataclass(frozen=True)
class Operation:
    """add: d += 1. mix: d = d * 2 + e. to host: h <- d. to device: d <- h. read host, write host: by the host itself."""

    kind: str
    stream: int
    d: int
    e: int
    h: int

    @property
    def by_host(self) -> bool:
        return self.kind in ("read host", "write host")

    @property
    def places(self) -> list[tuple[tuple[str, int], bool]]:
        """(place, is it written): ("d", k) are device buffers, ("h", k) pinned ones."""
        d, e, h = ("d", self.d), ("d", self.e), ("h", self.h)
        return {
            "add": [(d, True)],
            "mix": [(e, False), (d, True)],
            "to host": [(d, False), (h, True)],
            "to device": [(h, False), (d, True)],
            "read host": [(h, False)],
            "write host": [(h, True)],
        }[self.kind]


@dataclass
class Order:
    """Happens-before among operations: who knows of which earlier operations. Actors 0.. are streams, the last is the host."""

    known: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS + 1)])
    done: list[tuple[int, Operation]] = field(default_factory=list)

    def missing(self, op: Operation) -> list[int]:
        """The streams with an earlier conflicting operation that the actor of `op` does not know of."""
        actor = STREAMS if op.by_host else op.stream
        seen = self.known[actor] | self.known[STREAMS]
        wanted = []
        for number, (who, earlier) in enumerate(self.done):
            clash = any(p == q and (w or v) for p, w in earlier.places for q, v in op.places)
            if clash and who != actor and number not in seen and who not in wanted:
                wanted.append(who)
        return wanted

    def add(self, op: Operation) -> None:
        actor = STREAMS if op.by_host else op.stream
        self.known[actor] |= self.known[STREAMS] | {len(self.done)}
        self.done.append((actor, op))

    def wait(self, actor: int, other: int) -> None:
        self.known[actor] |= self.known[other] | self.known[STREAMS]


operations = st.lists(
    st.builds(
        Operation,
        st.sampled_from(KINDS),
        st.integers(0, STREAMS - 1),
        st.integers(0, BUFFERS - 1),
        st.integers(0, BUFFERS - 1),
        st.integers(0, HOSTS - 1),
    ),
    min_size=1,
    max_size=14,
)
WAIT_KINDS = ("wait_stream", "wait_event", "host stream", "host event", "device")


def sequential(program: list[Operation]) -> tuple[list[float], list[float], list[float]]:
    """Device buffers, host buffers and what the host read, if everything ran in program order."""
    device, host, reads = [float(k + 1) for k in range(BUFFERS)], [-float(k + 1) for k in range(HOSTS)], []
    for number, op in enumerate(program):
        if op.kind == "add":
            device[op.d] += 1
        elif op.kind == "mix":
            device[op.d] = device[op.d] * 2 + device[op.e]
        elif op.kind == "to host":
            host[op.h] = device[op.d]
        elif op.kind == "to device":
            device[op.d] = host[op.h]
        elif op.kind == "read host":
            reads.append(host[op.h])
        else:
            host[op.h] = 100.0 + number
    return device, host, reads


class Machine:
    """Runs a program on the emulated NPU."""

    def __init__(self) -> None:
        torch.npu.synchronize()
        self.device = [torch.full((8,), float(k + 1), device=NPU) for k in range(BUFFERS)]
        self.host = [torch.full((8,), -float(k + 1)).pin_memory() for k in range(HOSTS)]
        self.streams = [torch.npu.default_stream(), *(torch.npu.Stream() for _ in range(STREAMS - 1))]
        torch.npu.synchronize()
        self.reads: list[float] = []

    def run(self, number: int, op: Operation) -> None:
        d, e, h = self.device[op.d], self.device[op.e], self.host[op.h]
        if op.kind == "read host":
            assert len(set(h.tolist())) == 1
            self.reads.append(h[0].item())
        elif op.kind == "write host":
            h.fill_(100.0 + number)
        else:
            with torch.npu.stream(self.streams[op.stream]):
                if op.kind == "add":
                    d.add_(1)
                elif op.kind == "mix":
                    d.copy_(d * 2 + e)
                elif op.kind == "to host":
                    h.copy_(d, non_blocking=True)
                else:
                    d.copy_(h, non_blocking=True)

    def wait(self, actor: int, other: int, kind: str) -> None:
        """Makes the actor wait for the other stream."""
        if kind == "device":
            torch.npu.synchronize()
        elif actor == STREAMS or kind.startswith("host"):
            (self.streams[other] if kind.endswith("stream") else self.streams[other].record_event()).synchronize()
        elif kind == "wait_stream":
            self.streams[actor].wait_stream(self.streams[other])
        else:
            self.streams[actor].wait_event(self.streams[other].record_event())

    def results(self) -> tuple[list[float], list[float], list[float]]:
        torch.npu.synchronize()
        return [x[0].item() for x in self.device], [x[0].item() for x in self.host], self.reads


def play(program: list[Operation], draw: Callable[[], str], leave_out: int | None) -> tuple[Machine, Operation | None]:
    """Runs the program with every wait it needs but the `leave_out`-th, up to the operation that needed that one."""
    machine, order, waits = Machine(), Order(), 0
    for number, op in enumerate(program):
        while missing := order.missing(op):
            other, kind = missing[0], draw()
            actor = STREAMS if op.by_host else op.stream
            if waits == leave_out:
                machine.run(number, op)
                return machine, op
            waits += 1
            if kind == "device":
                for k in range(STREAMS):
                    order.wait(STREAMS, k)
            else:
                order.wait(STREAMS if machine_waits(kind, actor) else actor, other)
            machine.wait(actor, other, kind)
        machine.run(number, op)
        order.add(op)
    return machine, None


def machine_waits(kind: str, actor: int) -> bool:
    """Whether it is the host that waits."""
    return actor == STREAMS or kind not in ("wait_stream", "wait_event")


@settings(max_examples=depth(150), deadline=None)
@given(operations, st.data())
def test_a_program_that_waits_where_it_must_gives_the_sequential_result(program: list[Operation], data: st.DataObject) -> None:
    machine, _ = play(program, lambda: data.draw(st.sampled_from(WAIT_KINDS)), None)
    assert machine.results() == sequential(program)


@settings(max_examples=depth(250), deadline=None)
@given(operations, st.integers(0, 5), st.data())
def test_a_device_operation_without_the_wait_it_needs_is_an_error(program: list[Operation], leave_out: int, data: st.DataObject) -> None:
    try:
        machine, unordered = play(program, lambda: data.draw(st.sampled_from(WAIT_KINDS)), leave_out)
    except RuntimeError as error:
        assert RACE in str(error)
    else:
        # What the host does by itself is not checked; its stale bytes are test_core_streams.py's.
        assert unordered is None or unordered.by_host, f"{unordered} ran without the wait it needs"
        if unordered is None:
            assert machine.results() == sequential(program)
    torch.npu.synchronize()
