"""Stats of all threads, ranks and steps arrive, and their size does not grow."""

from __future__ import annotations

import errno
import math
import pickle
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_ascend_hsx.connector.histogram import BUCKETS, quantile
from vllm_ascend_hsx.connector.stats import HsxStats, SchedulerRecorder, StatsRecorder, failure_kind
from vllm_ascend_hsx.sinks.base import SinkError

Event = Callable[[StatsRecorder], None]


def make_recorder(rank: int = 0, gauges: dict[str, float] | None = None) -> StatsRecorder:
    return StatsRecorder(rank, lambda: dict(gauges or {"ring_fill": 0.0, "backlog_bytes": 0}))


def one_of_each(recorder: StatsRecorder) -> None:
    recorder.copied(1000, 0.002)
    recorder.wrote(600, 0.001)
    recorder.wrote(400, 30.0)
    recorder.published(1100, 0.0007)
    recorder.failed("ENOSPC")
    recorder.aborted()
    recorder.stalled(0.5)


def test_recorded_stats_are_returned_once() -> None:
    recorder = make_recorder(rank=3)
    one_of_each(recorder)
    stats = recorder.take()
    assert stats is not None
    names = (
        "copied_bytes",
        "written_bytes",
        "published_bytes",
        "published",
        "failed",
        "aborted",
        "stall_ns",
    )
    assert {name: stats.counter(name) for name in names} == dict(
        zip(names, (1000, 1000, 1100, 1, 1, 1, 500_000_000), strict=True)
    )
    assert stats.failures == {"ENOSPC": 1}
    counts, sums = stats.histogram("write")
    assert {
        bound: count for bound, count in zip((*BUCKETS, math.inf), counts, strict=True) if count
    } == {0.001: 1, math.inf: 1}
    assert sum(sums) == 30_001_000_000
    assert recorder.take() is None


def test_changed_gauge_is_returned_without_any_event() -> None:
    gauges = {"ring_fill": 0.0, "backlog_bytes": 0.0}
    recorder = make_recorder(2, gauges)
    assert recorder.take() is None
    gauges.update(ring_fill=0.25, backlog_bytes=4096)
    stats = recorder.take()
    assert stats is not None
    assert (stats.gauge("ring_fill"), stats.gauge("backlog_bytes")) == ({"2": 0.25}, {"2": 4096})
    assert recorder.take() is None
    gauges.update(ring_fill=0.0, backlog_bytes=0)
    stats = recorder.take()
    assert stats is not None
    assert (stats.gauge("ring_fill"), stats.gauge("backlog_bytes")) == ({"2": 0.0}, {"2": 0})


def test_send_returns_stats_without_any_event() -> None:
    recorder = make_recorder(1)
    recorder.send()
    stats = recorder.take()
    assert stats is not None
    assert (
        stats.gauge("ring_fill"),
        stats.gauge("backlog_bytes"),
        stats.counter("written_bytes"),
    ) == ({"1": 0.0}, {"1": 0}, 0)
    assert recorder.take() is None


def test_no_event_is_lost_while_another_thread_takes_stats() -> None:
    recorder = make_recorder()
    threads, rounds = 4, 2000
    taken: list[HsxStats] = []
    taken_in_between = threading.Event()

    def record() -> None:
        for index in range(rounds):
            one_of_each(recorder)
            if index == rounds // 2:
                taken_in_between.wait()

    workers = [threading.Thread(target=record) for _ in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        if stats := recorder.take():
            taken.append(stats)
            taken_in_between.set()
    for worker in workers:
        worker.join()
    if stats := recorder.take():
        taken.append(stats)
    total = reduce(HsxStats.aggregate, taken)
    events = threads * rounds
    assert len(taken) > 1
    assert (total.counter("published"), total.counter("failed"), total.counter("aborted")) == (
        events,
        events,
        events,
    )
    assert (total.counter("copied_bytes"), total.counter("written_bytes")) == (
        1000 * events,
        1000 * events,
    )
    assert total.counter("stall_ns") == 500_000_000 * events
    assert total.failures == {"ENOSPC": events}
    assert [sum(total.histogram(name)[0]) for name in ("copy", "write", "publish")] == [
        events,
        2 * events,
        events,
    ]
    assert sum(total.histogram("copy")[1]) == 2_000_000 * events


seconds = st.floats(0, 100)
num_bytes = st.integers(0, 1 << 40)
events: st.SearchStrategy[tuple[str, tuple[object, ...]]] = st.one_of(
    st.tuples(st.sampled_from(["copied", "wrote", "published"]), st.tuples(num_bytes, seconds)),
    st.tuples(st.just("failed"), st.tuples(st.sampled_from(["ENOSPC", "EIO", "other"]))),
    st.tuples(st.just("aborted"), st.just(())),
    st.tuples(st.just("stalled"), st.tuples(seconds)),
)


@st.composite
def intervals(draw: st.DrawFn) -> list[HsxStats]:
    """Draw stats of several ranks and steps, and of the scheduler."""
    found = []
    for rank, ring_fill, backlog, happened in draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.floats(0, 1), num_bytes, st.lists(events, max_size=8)),
            min_size=1,
            max_size=6,
        )
    ):
        recorder = StatsRecorder(
            rank, lambda fill=ring_fill, value=backlog: {"ring_fill": fill, "backlog_bytes": value}
        )
        for name, arguments in happened:
            getattr(recorder, name)(*arguments)
        found.append(recorder.take() or HsxStats())
    clock = iter(draw(st.lists(st.integers(0, 1000), min_size=2, max_size=2).map(sorted)))
    back_pressure = SchedulerRecorder(clock=lambda: float(next(clock)))
    back_pressure.held(1)
    return [*found, back_pressure.take() or HsxStats()]


def grouped(parts: Sequence[HsxStats], draw: st.DrawFn) -> HsxStats:
    """Aggregate all parts, in groups of any kind."""
    if len(parts) == 1:
        return parts[0]
    cut = draw(st.integers(1, len(parts) - 1))
    return grouped(parts[:cut], draw).aggregate(grouped(parts[cut:], draw))


@given(st.data())
def test_aggregation_does_not_depend_on_order_or_grouping(data: st.DataObject) -> None:
    parts = data.draw(intervals())
    before = pickle.dumps([part.data for part in parts])
    in_turn = reduce(HsxStats.aggregate, parts, HsxStats())
    shuffled = grouped(data.draw(st.permutations(parts)), data.draw).aggregate(HsxStats())
    assert shuffled == in_turn
    for name in (
        "copied_bytes",
        "written_bytes",
        "published",
        "failed",
        "stall_ns",
        "backpressure_ns",
    ):
        assert in_turn.counter(name) == sum(part.counter(name) for part in parts)
    for name in ("ring_fill", "backlog_bytes"):
        for rank, value in in_turn.gauge(name).items():
            assert value == max(
                part.gauge(name)[rank] for part in parts if rank in part.gauge(name)
            )
    assert in_turn.is_empty() == all(part.is_empty() for part in parts)
    assert pickle.dumps([part.data for part in parts]) == before


def test_stats_travel_through_pickle_and_msgpack() -> None:
    recorder = make_recorder()
    one_of_each(recorder)
    recorder.wrote(np.int64(5), 0.1)
    stats = recorder.take()
    assert stats is not None
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert HsxStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data))) == stats
    # In MultiConnector the object itself passes msgpack and must keep its data under this name.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"ours": stats})) == {
        "ours": {"data": stats.data}
    }


def test_the_size_of_stats_does_not_grow_with_traffic() -> None:
    sizes = []
    for rounds in (1, 30_000):
        recorder = make_recorder()
        for index in range(rounds):
            recorder.copied(1, 10.0 ** (index % 9 - 6))
            recorder.wrote(1, 10.0 ** (index % 9 - 6))
            recorder.published(1, 10.0 ** (index % 9 - 6))
            recorder.failed(failure_kind(OSError(index, "any")))
        stats = recorder.take()
        assert stats is not None
        sizes.append(len(msgspec.msgpack.encode(stats.data)))
    # One kind per errno, and more digits; otherwise as for one event of each kind.
    assert sizes[0] < 400
    assert sizes[1] < 3000


def test_empty_stats_are_zero() -> None:
    stats = HsxStats()
    assert stats.is_empty()
    assert set(stats.reduce().values()) == {0}
    recorder = make_recorder()
    one_of_each(recorder)
    full = recorder.take()
    assert full is not None
    assert not full.is_empty()
    full.reset()
    assert full.is_empty()


def test_the_log_line_has_the_numbers_of_the_interval() -> None:
    recorder = make_recorder(0, {"ring_fill": 0.5})
    for _ in range(100):
        recorder.wrote(10_000_000, 0.005)
        recorder.published(10_000_000, 0.0008)
    recorder.aborted()
    stats = recorder.take()
    assert stats is not None
    line = stats.reduce()
    assert (line["Files"], line["Failed"], line["Aborted"]) == (100, 0, 1)
    assert (line["GB written"], line["GB/s per writer"], line["Max ring fill (%)"]) == (
        1.0,
        2.0,
        50.0,
    )
    assert 0.5 <= line["Last row to file P50 (ms)"] <= line["Last row to file P99 (ms)"] <= 1.0


@given(st.lists(seconds, min_size=1, max_size=50), st.floats(0.01, 1))
@example([0.002] * 3 + [1.0] * 3, 0.5)  # 0.001 + (0.0025 - 0.001) * 3 / 3 is more than 0.0025
def test_quantile_lies_in_the_bucket_of_the_exact_quantile(
    values: list[float], share: float
) -> None:
    recorder = make_recorder()
    for value in values:
        recorder.published(0, value)
    stats = recorder.take()
    assert stats is not None
    # The smallest value that at least `share` of the values do not exceed, recorded in whole ns.
    ordered = sorted(int(value * 1e9) / 1e9 for value in values)
    true = next(
        value for index, value in enumerate(ordered, start=1) if index >= share * len(ordered)
    )
    bucket = bisect_left(BUCKETS, true)
    estimate = quantile(stats.histogram("publish")[0], share)
    if bucket == len(BUCKETS):
        assert estimate == BUCKETS[-1]
    else:
        assert (BUCKETS[bucket - 1] if bucket else 0.0) <= estimate <= BUCKETS[bucket]


def test_refused_request_counts_as_one_failure() -> None:
    recorder = SchedulerRecorder()
    assert recorder.take() is None
    recorder.refused()
    recorder.refused()
    stats = recorder.take()
    assert stats is not None
    assert (stats.counter("failed"), stats.failures) == (2, {"refused": 2})
    assert recorder.take() is None


def test_back_pressure_counts_the_time_with_at_least_one_request_held() -> None:
    now = 0.0
    recorder = SchedulerRecorder(clock=lambda: now)

    def taken() -> tuple[float, float] | None:
        stats = recorder.take()
        return stats and (
            stats.counter("backpressure_ns") / 1e9,
            stats.gauge("requests_held")["scheduler"],
        )

    recorder.held(0)
    assert taken() is None
    now = 1.0
    recorder.held(1)
    now = 3.0
    recorder.held(2)
    assert taken() == (2.0, 2)
    now = 4.0
    recorder.held(1)
    now = 5.5
    recorder.held(0)
    now = 100.0  # no request waits
    assert taken() == (2.5, 0)
    assert taken() is None
    recorder.held(1)
    now = 100.25
    recorder.held(0)
    assert taken() == (0.25, 0)


def sink_error_from(cause: BaseException) -> SinkError:
    try:
        raise SinkError("request", Path("path"), "reason") from cause
    except SinkError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "ENOSPC"),
        (sink_error_from(OSError(errno.EIO, "Input/output error")), "EIO"),
        (SinkError("request", Path("path"), "reason", "not_finite"), "not_finite"),
        (OSError("without a number"), "other"),
        (OSError(99999, "a number that is no errno"), "other"),
        (ValueError("a mistake of ours"), "other"),
        (None, "other"),
    ],
)
def test_failure_kind_is_the_errno_or_the_kind_of_the_sink_error(
    error: BaseException | None, kind: str
) -> None:
    assert failure_kind(error) == kind
