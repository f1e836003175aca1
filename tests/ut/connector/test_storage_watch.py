"""StorageWatch: stalled storage, and the pause after a step that waited for files."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from vllm_ascend_hsx.connector import storage_watch
from vllm_ascend_hsx.connector.admission import Cost, RankLoad
from vllm_ascend_hsx.connector.progress import RankProgress, StepRate
from vllm_ascend_hsx.connector.stats import StatsRecorder
from vllm_ascend_hsx.connector.storage_watch import StorageRules, StorageWatch


def test_step_that_waited_for_files_pauses_admission_and_then_starts_one_request_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, open_after = 100.0, 2.0
    monkeypatch.setattr(storage_watch.time, "monotonic", lambda: now)

    class Opener:
        def wait(self, timeout: float) -> bool:
            nonlocal now, open_after
            passed = min(timeout, open_after)
            now, open_after = now + passed, open_after - passed
            return open_after == 0

        def stalled_for(self) -> float:
            return 0.0

    progress, stats = RankProgress(row_bytes=10, num_writers=1), StatsRecorder(0)
    watch = StorageWatch(StorageRules(30.0, "wait", "/data"), progress, stats)
    load, cost = RankLoad(1000, 10), Cost(20, 0)

    def admitted() -> int:
        news = progress.end_step(watch.is_paused, watch.is_unresponsive, watch.opens_slowly, False)
        if news is not None:
            load.report(news[0])
        load.start([])
        for count in range(5):
            if not load.admits(cost):
                return count
            load.promise(cost)
        return 5

    assert admitted() == 5
    assert watch.wait_for_files(Opener())  # type: ignore[arg-type]
    assert now == 102.0
    assert admitted() == 0
    now = 107.8
    assert admitted() == 0
    now = 107.9
    assert admitted() == 1
    open_after = 0.01
    assert watch.wait_for_files(Opener())  # type: ignore[arg-type]
    assert admitted() == 5


def test_storage_stalls_only_while_waiting_rows_are_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(storage_watch.time, "monotonic", lambda: now)
    progress, stats = RankProgress(row_bytes=10, num_writers=1), StatsRecorder(0)
    waits, fails = (
        StorageWatch(StorageRules(30.0, option, "/data"), progress, stats)
        for option in ("wait", "fail")
    )
    now = 100.0
    assert progress.stalled_for() == 0.0, "storage has nothing to do"
    progress.staged(2)
    now = 100.1
    assert progress.stalled_for() == 0.0, "the device has not copied these rows yet"
    now = 100.0
    progress.landed(1)
    now = 100.5
    progress.landed(1)
    now = 100.75
    assert progress.stalled_for() == 0.75, "more work is no answer"
    assert [watch.is_paused for watch in (waits, fails)] == [False, False]
    now = 101.0
    assert [(watch.is_paused, watch.is_unresponsive) for watch in (waits, fails)] == [
        (True, False),
        (True, False),
    ]
    now = 102.0
    assert [watch.is_unresponsive for watch in (waits, fails)] == [False, True]
    assert fails.failure == ("the storage did not answer for 2 s", "unresponsive_storage")
    progress.begin_write(1)
    progress.end_write(1, 1)
    now = 131.75
    assert not waits.is_unresponsive
    now = 132.0
    assert waits.is_unresponsive


def test_all_rows_of_a_step_count_for_the_prompt_rate() -> None:
    now = 0.0
    progress = RankProgress(row_bytes=10, num_writers=1)
    progress.step_rate = StepRate(clock=lambda: now)
    for _ in range(6):
        progress.staged(3)
        progress.staged(2)
        progress.end_step(paused=False, unresponsive=False, opens_slowly=False, needs_space=False)
        now += 1.0
    assert progress.step_rate.bytes_per_s == pytest.approx(50.0)


def test_storage_that_hangs_at_the_end_of_a_file_counts_as_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(storage_watch.time, "monotonic", lambda: now)
    progress = RankProgress(row_bytes=10, num_writers=1)
    now = 100.0

    def finish() -> None:
        nonlocal now
        with progress.finishing():
            now = 103.0
            assert progress.stalled_for() == 3.0

    def write() -> None:
        progress.begin_write(1)
        progress.end_write(1, 1)

    with progress.finishing(), ThreadPoolExecutor(1) as other_writer:
        now = 101.0
        progress.staged(1)
        other_writer.submit(finish).result()
        assert progress.stalled_for() == 0.0, "it has answered"
        now = 104.0
        other_writer.submit(write).result()
        now = 106.0
        assert progress.stalled_for() == 2.0
    assert progress.stalled_for() == 0.0


@pytest.mark.parametrize(("peer_is_unresponsive", "seconds"), [(False, 30.0), (True, 1.0)])
def test_step_waits_briefly_if_another_rank_is_unresponsive(
    peer_is_unresponsive: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(storage_watch.time, "monotonic", lambda: now)

    def never(timeout: float) -> bool:
        nonlocal now
        now += timeout
        return False

    progress = RankProgress(row_bytes=10, num_writers=1)
    watch = StorageWatch(StorageRules(description="/data"), progress, StatsRecorder(0))
    watch.peer_is_unresponsive = peer_is_unresponsive
    assert not watch.wait(never, lambda: now)
    assert now == seconds
    assert watch.stall_reason == f"the storage did not answer for {seconds:g} s"


@pytest.mark.parametrize(("slow_storage", "waits"), [("wait", 4.0), ("fail", 1.0)])
def test_storage_is_unresponsive_until_late_files_are_open(
    slow_storage: Literal["wait", "fail"], waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further step waits for the storage. Steps of other ranks wait for at most a second."""
    opener = HungOpener(monkeypatch, until=100.0)
    progress, stats = RankProgress(row_bytes=10, num_writers=1), StatsRecorder(0)
    watch = StorageWatch(StorageRules(4.0, slow_storage, "/data"), progress, stats)
    assert not watch.is_unresponsive
    assert not watch.wait_for_files(opener)  # type: ignore[arg-type]
    assert opener.now == pytest.approx(waits, abs=0.051)
    assert watch.is_unresponsive, "the next step does not have to find out"
    assert watch.is_paused, (
        "after a short hang, no new request makes the very next step wait as well"
    )
    opener.now = 50.0  # long after the pause that follows
    assert watch.is_unresponsive
    opener.now = 100.0
    assert not watch.is_unresponsive


def test_wait_for_slow_files_does_not_lengthen_the_next_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait is not part of the length of a step. Otherwise the next step would wait longer."""
    opener = HungOpener(monkeypatch)
    progress, stats = RankProgress(row_bytes=10, num_writers=1), StatsRecorder(0)
    progress.step_rate = StepRate(lambda: opener.now)
    watch = StorageWatch(StorageRules(4.0, "fail", "/data"), progress, stats)
    waits = []
    for step in range(60):
        began = opener.now
        if step >= 20:
            watch.wait_for_files(opener)  # type: ignore[arg-type]
            waits.append(opener.now - began)
        opener.now += 0.08
        progress.step_rate.stepped(0)
    assert waits == pytest.approx([0.08] * 40)
    news = stats.take()
    assert news is not None
    assert news.counter("stall_ns") == pytest.approx(40 * 0.08e9)


class HungOpener:
    """Opens no file before a given time. Waiting advances the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: float = math.inf) -> None:
        self.now = 0.0
        self._until = until
        monkeypatch.setattr(storage_watch.time, "monotonic", lambda: self.now)

    @property
    def pending(self) -> int:
        return int(self.now < self._until)

    def wait(self, timeout: float) -> bool:
        self.now = min(self.now + timeout, max(self.now, self._until))
        return not self.pending

    def stalled_for(self) -> float:
        return self.now if self.pending else 0.0


@pytest.mark.parametrize(("hang", "rest"), [(2.05, 6.0), (29.0, 30.0), (33.0, 30.0)])
def test_pause_after_a_hang_is_at_most_the_storage_timeout(
    hang: float, rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = HungOpener(monkeypatch, until=hang)
    progress, stats = RankProgress(row_bytes=10, num_writers=1), StatsRecorder(0)
    watch = StorageWatch(StorageRules(30.0, "wait", "/data"), progress, stats)
    watch.wait_for_files(opener)  # type: ignore[arg-type]
    ended = opener.now
    opener.now = ended + rest - 0.1
    assert watch.is_paused
    opener.now = ended + rest + 0.1
    assert not watch.is_paused
