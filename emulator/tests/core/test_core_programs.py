"""Random programs over three streams in late mode: a missing wait is an error.

A model of happens-before decides where a program needs a wait. It shares no code with the emulator.
With all waits, of any kind, a program gives the sequential result. Then one wait is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from depth import depth
from emulated import NPU, RACE
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("late")
BUFFERS, HOSTS, STREAMS = 3, 2, 3
HOST = STREAMS  # the number of the host as an actor; the streams are 0 to STREAMS - 1
# (buffer, is it written) of each kind: d and e are device buffers, h is a pinned buffer.
KINDS = {
    "add": [("d", True)],
    "mix": [("e", False), ("d", True)],
    "to host": [("d", False), ("h", True)],
    "to device": [("h", False), ("d", True)],
    "read host": [("h", False)],
    "write host": [("h", True)],
}
WAIT_KINDS = ("wait_stream", "wait_event", "host stream", "host event", "device")


@dataclass(frozen=True)
class Operation:
    """One of KINDS on device buffers `d` and `e` and pinned buffer `h`, by a stream or the host."""

    kind: str
    stream: int
    d: int
    e: int
    h: int

    @property
    def actor(self) -> int:
        return HOST if self.kind in ("read host", "write host") else self.stream

    def conflicts(self, other: Operation) -> bool:
        mine, theirs = (
            [("h" if name == "h" else "d", getattr(op, name), w) for name, w in KINDS[op.kind]]
            for op in (self, other)
        )
        return any((p, k) == (q, n) and (w or v) for p, k, w in mine for q, n, v in theirs)


@dataclass
class Order:
    """Happens-before among operations: the earlier operations that each actor knows of."""

    known: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS + 1)])
    done: list[Operation] = field(default_factory=list)

    def missing(self, op: Operation) -> list[int]:
        """Return the streams with conflicting operations that `op`'s actor does not know of."""
        unseen = [
            earlier
            for number, earlier in enumerate(self.done)
            if number not in self.known[op.actor] | self.known[HOST]
        ]
        return [
            earlier.actor
            for earlier in unseen
            if earlier.actor != op.actor and op.conflicts(earlier)
        ]

    def add(self, op: Operation) -> None:
        self.known[op.actor] |= self.known[HOST] | {len(self.done)}
        self.done.append(op)

    def wait(self, actor: int, other: int) -> None:
        self.known[actor] |= self.known[other] | self.known[HOST]


operations = st.lists(
    st.builds(
        Operation,
        st.sampled_from(list(KINDS)),
        st.integers(0, STREAMS - 1),
        st.integers(0, BUFFERS - 1),
        st.integers(0, BUFFERS - 1),
        st.integers(0, HOSTS - 1),
    ),
    min_size=1,
    max_size=14,
)


class Buffers:
    """The operands of a program. On the CPU they hold the sequential result."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = [torch.full((8,), float(k + 1), device=device) for k in range(BUFFERS)]
        self.host = [
            torch.full((8,), -float(k + 1), pin_memory=device == NPU) for k in range(HOSTS)
        ]
        self.reads: list[list[float]] = []

    def run(self, number: int, op: Operation) -> None:
        d, e, h = self.device[op.d], self.device[op.e], self.host[op.h]
        match op.kind:
            case "add":
                d.add_(1)
            case "mix":
                d.copy_(d * 2 + e)
            case "to host":
                h.copy_(d, non_blocking=True)
            case "to device":
                d.copy_(h, non_blocking=True)
            case "read host":
                self.reads.append(h.tolist())
            case "write host":
                h.fill_(100.0 + number)

    def results(self) -> list[list[float]]:
        return [tensor.tolist() for tensor in self.device + self.host] + self.reads


def sequential(program: list[Operation]) -> list[list[float]]:
    buffers = Buffers("cpu")
    for number, op in enumerate(program):
        buffers.run(number, op)
    return buffers.results()


def make_wait(kind: str, actor: torch.npu.Stream | None, other: torch.npu.Stream) -> None:
    """Make the actor wait for the other stream. None is the host."""
    if kind == "device":
        torch.npu.synchronize()
    elif actor is None or kind.startswith("host"):
        (other if kind.endswith("stream") else other.record_event()).synchronize()
    elif kind == "wait_stream":
        actor.wait_stream(other)
    else:
        actor.wait_event(other.record_event())


def play(
    program: list[Operation], draw: Callable[[], str], leave_out: int | None
) -> tuple[Buffers, Operation | None]:
    """Run the program without wait number `leave_out`, up to the operation that needs the wait."""
    torch.npu.synchronize()
    buffers, order, waits = Buffers(NPU), Order(), 0
    made = [torch.npu.default_stream(), *(torch.npu.Stream() for _ in range(STREAMS - 1)), None]
    torch.npu.synchronize()
    for number, op in enumerate(program):
        left_out = False
        while (missing := order.missing(op)) and not left_out:
            kind, left_out, waits = draw(), waits == leave_out, waits + 1
            if not left_out:
                for other in range(STREAMS) if kind == "device" else missing[:1]:
                    order.wait(op.actor if kind.startswith("wait") else HOST, other)
                make_wait(kind, made[op.actor], made[missing[0]])
        with torch.npu.stream(made[op.stream]) if op.actor != HOST else nullcontext():
            buffers.run(number, op)
        if left_out:
            return buffers, op
        order.add(op)
    torch.npu.synchronize()
    return buffers, None


@settings(max_examples=depth(150), deadline=None)
@given(operations, st.data())
def test_program_with_all_waits_equals_sequential_result(
    program: list[Operation], data: st.DataObject
) -> None:
    buffers, _ = play(program, lambda: data.draw(st.sampled_from(WAIT_KINDS)), None)
    assert buffers.results() == sequential(program)


@settings(max_examples=depth(250), deadline=None)
@given(operations, st.integers(0, 5), st.data())
def test_device_operation_without_its_wait_is_an_error(
    program: list[Operation], leave_out: int, data: st.DataObject
) -> None:
    try:
        buffers, unordered = play(
            program, lambda: data.draw(st.sampled_from(WAIT_KINDS)), leave_out
        )
    except RuntimeError as error:
        assert RACE in str(error)
    else:
        # Accesses by the host are not checked. The host reads stale bytes (test_core_streams.py).
        assert unordered is None or unordered.actor == HOST, f"{unordered} ran without its wait"
        if unordered is None:
            assert buffers.results() == sequential(program)
    torch.npu.synchronize()
