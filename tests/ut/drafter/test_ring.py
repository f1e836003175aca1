"""The pinned ring allocates each row once, in runs of any length. Rows are freed in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from depth import depth
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ascend_npu_emulator.native import core
from vllm_ascend_hsx.drafter.ring import FreeRows, PinnedRing, Run
from vllm_ascend_hsx.drafter.shapes import ring_shape
from vllm_ascend_hsx.protocol.errors import UserError

ROW_SHAPE, DTYPE = (3, 8), torch.bfloat16
ROW_BYTES = 48


def make_ring(rows: int) -> PinnedRing:
    return PinnedRing(rows * ROW_BYTES, ROW_SHAPE, DTYPE)


class AllocatorLife(RuleBasedStateMachine):
    """Runs are taken and freed, whole or in parts, in any order. The model is a set of rows."""

    @initialize(num_rows=st.integers(1, 60))
    def start(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.rows = FreeRows(num_rows)
        self.free = set(range(num_rows))
        self.taken: list[tuple[int, int]] = []

    def longest(self) -> int:
        return max((end - first for first, end in self.rows.intervals), default=0)

    @rule(wish=st.integers(1, 70), least=st.integers(1, 10))
    def take(self, wish: int, least: int) -> None:
        longest = self.longest()
        run = self.rows.take(wish, least)
        if run is None:
            assert longest < min(wish, least)
            return
        first, count = run
        assert count == min(wish, longest)
        rows = set(range(first, first + count))
        assert rows <= self.free
        self.free -= rows
        self.taken.append(run)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        first, count = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        part = data.draw(st.integers(1, count))
        self.rows.give_back(first, part)
        if part < count:
            self.taken.append((first + part, count - part))
        self.free |= set(range(first, first + part))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def rows_that_are_free_are_not_taken_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(ValueError, match="are free"):
            self.rows.give_back(row, 1)

    @invariant()
    def intervals_are_the_free_rows_and_no_two_touch(self) -> None:
        intervals = self.rows.intervals
        assert {row for first, end in intervals for row in range(first, end)} == self.free
        assert all(first < end for first, end in intervals)
        assert all(one[1] < other[0] for one, other in zip(intervals, intervals[1:], strict=False))
        assert self.rows.count == len(self.free)

    def teardown(self) -> None:
        for first, count in getattr(self, "taken", []):
            self.rows.give_back(first, count)
        if hasattr(self, "rows"):
            assert self.rows.intervals == [(0, self.num_rows)]


AllocatorLife.TestCase.settings = settings(max_examples=depth(150), stateful_step_count=40)
TestAllocatorLife = AllocatorLife.TestCase


@pytest.mark.parametrize(
    ("rows", "rows_per_chunk"), [(2, 1), (10, 1), (40, 5), (800_000, (4 << 20) // ROW_BYTES)]
)
def test_ring_holds_as_many_rows_as_fit(rows: int, rows_per_chunk: int) -> None:
    assert ring_shape(rows * ROW_BYTES + ROW_BYTES - 1, ROW_BYTES) == (rows, rows_per_chunk)


def test_ring_is_pinned_page_aligned_and_contiguous() -> None:
    ring = make_ring(10)
    assert (ring.num_rows, ring.pinned_bytes) == (10, 512)
    runs = [ring.wait(3) for _ in range(10)]
    assert all(run.rows.is_pinned() for run in runs)
    assert runs[0].rows.data_ptr() % 4096 == 0
    for index, run in enumerate(runs):
        run.rows.fill_(index)
        assert torch.equal(torch.frombuffer(run.data, dtype=DTYPE), run.rows.flatten())
    assert bytes(ring.data) == b"".join(bytes(run.data) for run in runs)
    assert ring.free_rows == 0


def test_ring_for_fewer_than_two_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least 96 bytes"):
        PinnedRing(95, ROW_SHAPE, DTYPE)


def test_peak_fill_is_measured_since_the_last_call() -> None:
    ring = make_ring(8)
    assert ring.take_peak_fill() == 0.0
    first, second, third = (ring.wait(1).first for _ in range(3))
    ring.free((first, 1))
    ring.free((second, 1))
    assert ring.take_peak_fill() == 3 / 8
    assert ring.take_peak_fill() == 1 / 8  # the third, still in use
    ring.free((third, 1))
    assert ring.take_peak_fill() == 1 / 8
    assert ring.take_peak_fill() == 0.0


def take_in_thread(ring: PinnedRing, wish: int) -> tuple[threading.Thread, list[Run]]:
    """Return a thread that waits for rows of a full ring, and the list of runs that it gets."""
    got: list[Run] = []
    waiting = threading.Event()
    original = ring._changed.wait

    def wait(timeout: float | None = None) -> bool:
        waiting.set()
        return original(timeout)

    ring._changed.wait = wait  # type: ignore[method-assign]
    taker = threading.Thread(target=lambda: got.append(ring.wait(wish)), daemon=True)
    taker.start()
    assert waiting.wait(30)
    return taker, got


def test_full_ring_waits_for_rows_to_become_free() -> None:
    ring = make_ring(2)
    runs = [ring.wait(1) for _ in range(2)]
    assert ring.take(1) is None
    taker, got = take_in_thread(ring, 1)
    assert not got
    ring.free((runs[1].first, 1))
    taker.join(30)
    assert [run.first for run in got] == [1]


def test_full_ring_does_not_fragment_into_ever_smaller_runs() -> None:
    ring = make_ring(
        64 * 8
    )  # chunks of 64 rows; a run of less than 4 rows is not taken if more rows are wanted
    while ring.free_rows:
        ring.wait(64)
    for row in range(3):
        ring.free((row, 1))
    assert ring.take(64) is None
    taker, got = take_in_thread(ring, 64)
    ring.free((3, 1))
    taker.join(30)
    assert [(run.first, len(run.rows)) for run in got] == [(0, 4)]


@pytest.mark.parametrize("num_bytes", [4096, 1 << 20, 1 << 25])
def test_ring_pins_the_documented_size_and_uses_all_of_it(num_bytes: int) -> None:
    """The allocator rounds up, so 4 KiB more for alignment would double the ring."""
    before = torch.npu.host_memory_stats()["active_bytes.current"]  # type: ignore[attr-defined]
    ring = PinnedRing(num_bytes, ROW_SHAPE, DTYPE)
    pinned = torch.npu.host_memory_stats()["active_bytes.current"] - before  # type: ignore[attr-defined]
    assert pinned == ring.pinned_bytes == num_bytes
    assert num_bytes - len(ring.data) < ROW_BYTES


def test_ring_skips_memory_before_the_first_page_boundary(
    pinned_fault: Callable[[str], None],
) -> None:
    pinned_fault("UNALIGNED")
    ring = PinnedRing(1 << 17, ROW_SHAPE, DTYPE)
    run = ring.wait(1)
    assert run.rows.data_ptr() % 4096 == 0
    assert ring.pinned_bytes == 1 << 17
    assert 0 < (1 << 17) - len(ring.data) < 4096 + ROW_BYTES
    run.rows.fill_(7)
    assert torch.equal(torch.frombuffer(run.data, dtype=DTYPE), run.rows.flatten())


def test_null_pointer_from_the_driver_is_refused(pinned_fault: Callable[[str], None]) -> None:
    """torch_npu 2.10.0.post4 with a driver before 25.5: CachingHostAllocator.cpp:259."""
    pinned_fault("NULL")
    with pytest.raises(
        UserError,
        match=r"pinned_ring_bytes=1048576 cannot be allocated.*null pointer.*Set a smaller value",
    ):
        PinnedRing(1 << 20, ROW_SHAPE, DTYPE)


def test_allocation_failure_is_a_one_line_error_of_the_option() -> None:
    with pytest.raises(UserError) as refusal:
        PinnedRing(1 << 50, ROW_SHAPE, DTYPE)
    assert (
        "kv_connector_extra_config.pinned_ring_bytes=1125899906842624 cannot be allocated"
        in str(refusal.value)
    )
    assert "\n" not in str(refusal.value)
    assert refusal.value.__context__ is None, "the allocator's own has a backtrace of C++"


@pytest.fixture
def pinned_fault() -> Iterator[Callable[[str], None]]:
    """Make pinned allocations of the emulated driver fail until the test ends."""
    torch.npu.host_empty_cache()
    yield lambda name: core.set_pinned_fault(getattr(core.PinnedFault, name))
    core.set_pinned_fault(core.PinnedFault.NONE)
    torch.npu.host_empty_cache()
