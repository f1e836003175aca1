"""Extraction observes SinkFile's contract in any thread: one end, no pending write, all rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_ascend_hsx.connector.extraction import Extraction
from vllm_ascend_hsx.connector.metadata import RequestEnd, RequestStart
from vllm_ascend_hsx.connector.open_sources import OpenSources
from vllm_ascend_hsx.connector.stats import StatsRecorder
from vllm_ascend_hsx.connector.threads import Job, ThreadPool
from vllm_ascend_hsx.protocol.rows import Rows, TokenIds
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED, Sink, SinkError, SinkFile

TOKENS, ROW = 8, 4


class StrictFile(SinkFile):
    """Record violations of the contract in `broken`. First writes and commits wait for the test."""

    def __init__(self) -> None:
        self.request_id, self.path = "r", Path("r.safetensors")
        self.ends: list[str] = []
        self.broken: list[str] = []
        self.closed = False
        self.write_begun, self.commit_begun = threading.Event(), threading.Event()
        self.may_write, self.may_commit = threading.Event(), threading.Event()
        self.may_write.set()
        self.may_commit.set()
        self._mutex = threading.Lock()
        self._writing: list[range] = []
        self._has_rows = False
        self._written: set[int] = set()

    def write(self, first: int, rows: Rows) -> None:
        span = range(first, first + rows.nbytes // ROW)
        with self._mutex:
            self._require(not self.closed, "written after it was closed")
            self._require(self._has_rows or not self._writing, "the first write is not alone")
            self._require(
                not any(set(span) & set(other) for other in self._writing),
                "rows of one position in flight twice",
            )
            self._writing.append(span)
        self.write_begun.set()
        if first == 0:
            assert self.may_write.wait(10)
        with self._mutex:
            self._has_rows = True
            self._writing.remove(span)
            self._written |= set(span)

    def commit(self, token_ids: TokenIds, num_prompt_tokens: int) -> None:
        self._end("commit", close=True)
        self._require(self._written >= set(range(len(token_ids))), "rows are missing")
        self.commit_begun.set()
        assert self.may_commit.wait(10)

    def fail(self, reason: str, close: bool = True) -> None:
        self._end(reason, close)

    def discard(self) -> None:
        self._end("discard", close=True)

    def close(self) -> None:
        with self._mutex:
            self._require(
                bool(self.ends) and not self._writing and not self.closed,
                "closed at the wrong time",
            )
            self.closed = True

    def _end(self, how: str, close: bool) -> None:
        with self._mutex:
            self._require(not self.ends, "ended twice")
            self._require(not (close and self._writing), "a write is in flight")
            self.ends.append(how)
            self.closed |= close

    def _require(self, kept: bool, what: str) -> None:
        if not kept:
            self.broken.append(what)


class StrictSink(Sink):
    writes_side_by_side = True

    def __init__(self, file: StrictFile) -> None:
        self._file = file

    def open(self, request_id: str, path: Path, expected_tokens: int = 0, *_: Any) -> SinkFile:
        return self._file

    def close(self) -> None: ...


class Life:
    """An extraction of a prompt, and the outcome."""

    def __init__(self, writers: ThreadPool) -> None:
        self.file = StrictFile()
        self.decided: list[str | None] = []
        self.lander = threading.Lock()  # one thread lets jobs enter
        self.ended = threading.Semaphore(0)
        start = RequestStart("r", "r.safetensors", 0, np.arange(TOKENS, dtype=np.int64), False)
        stats = StatsRecorder(0)
        callbacks = (
            lambda _, error: self.decided.append(error),
            lambda _: self.ended.release(),
            OpenSources(lambda _: None),
        )
        self.extraction = Extraction(start, writers, True, (ROW, ROW), *callbacks, stats)

    def open(self) -> Life:
        self.extraction.open(StrictSink(self.file))
        return self

    def write(self, first: int, last: int) -> int:
        """Write rows as the worker does: in this thread, or in a writer when the lane is free.

        Return how many this thread wrote.
        """
        written: list[int] = []

        def job() -> list[Job]:
            count, jobs = self.extraction.write(first, memoryview(bytes((last - first) * ROW)), 0.0)
            written.append(count)
            return jobs

        with self.lander:
            enters = self.extraction.enter((first, last), job)
            if self.extraction.is_complete():
                assert not self.extraction.enter_end(self.extraction.complete)
        if not enters:
            return 0
        run(job)
        return written[0]

    def end(self, aborted: bool) -> None:
        """End the request once all rows have entered the lane."""
        job = partial(self.extraction.end, RequestEnd("r", aborted=aborted))
        with self.lander:
            enters = self.extraction.enter_end(job)
        if enters:
            run(job)

    def stop(self) -> None:
        self.extraction.give_up()
        self.extraction.stop()

    def check(self, *ends: str) -> None:
        """Check that the request ended once, in one of these ways, and that the file is closed."""
        assert self.ended.acquire(timeout=10)
        assert not self.ended.acquire(blocking=False)
        assert self.file.broken == []
        assert len(self.file.ends) == 1
        assert self.file.ends[0] in ends
        assert self.file.closed
        assert len(self.decided) <= 1


def run(job: Job) -> None:
    """Run a job and the jobs that it returns, as a thread of the pool does."""
    ready = [job]
    while ready:
        ready += ready.pop(0)() or ()


def in_thread(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.fixture
def writers() -> Iterator[ThreadPool]:
    pool = ThreadPool(1, "test-writer")
    yield pool
    assert pool.close(10)


def test_file_is_published_after_its_last_write(writers: ThreadPool) -> None:
    life = Life(writers).open()
    life.write(4, 6)
    life.file.may_write.clear()
    first = in_thread(lambda: life.write(0, 4))
    assert life.file.write_begun.wait(10)
    life.write(6, 8)
    assert life.file.ends == []
    life.file.may_write.set()
    first.join()
    assert writers.wait(10)
    life.check("commit")
    assert life.decided == [None]


def test_first_write_runs_alone() -> None:
    pool, other_thread_is_free = ThreadPool(2, "test-writer"), threading.Event()
    life = Life(pool)
    life.file.may_write.clear()
    life.write(0, 3)
    life.write(3, 8)
    life.open()
    assert life.file.write_begun.wait(10)
    pool.submit(other_thread_is_free.set)
    assert other_thread_is_free.wait(10)
    life.file.may_write.set()
    assert pool.close(10)
    life.check("commit")


def test_recomputed_rows_are_written_alone(writers: ThreadPool) -> None:
    life = Life(writers).open()
    life.write(0, 6)
    life.file.write_begun.clear()
    life.file.may_write.clear()
    again = in_thread(lambda: life.write(0, 4))
    assert life.file.write_begun.wait(10)
    assert life.write(6, 8) == 0, "it waits, although it is of other rows"
    life.file.may_write.set()
    again.join()
    assert writers.wait(10)
    life.check("commit")


@pytest.mark.parametrize("stops", [False, True], ids=["fails", "server stops"])
def test_failure_reason_does_not_wait_for_a_hanging_write(writers: ThreadPool, stops: bool) -> None:
    life = Life(writers).open()
    life.file.may_write.clear()
    writer = in_thread(lambda: life.write(0, 8))
    assert life.file.write_begun.wait(10)
    life.stop() if stops else life.extraction.fail("too slow", "slow_storage")
    assert life.ended.acquire(timeout=10)
    life.ended.release()
    assert life.file.ends == [SERVER_STOPPED if stops else "too slow"]
    assert not life.file.closed
    assert life.write(0, 8) == 0, "nothing more is written"
    life.file.may_write.set()
    writer.join()
    life.check(SERVER_STOPPED, "too slow")


def test_give_up_does_not_affect_a_file_that_is_being_published(
    writers: ThreadPool,
) -> None:
    life = Life(writers).open()
    life.file.may_commit.clear()
    writer = in_thread(lambda: life.write(0, 8))
    assert life.file.commit_begun.wait(10)
    life.stop()
    life.extraction.fail("late", "slow_storage")
    assert not life.ended.acquire(blocking=False)
    life.file.may_commit.set()
    writer.join()
    life.check("commit")
    assert life.decided == [None]


@pytest.mark.parametrize("stops", [False, True], ids=["fails", "server stops"])
def test_request_that_failed_before_opening_publishes_the_reason(
    writers: ThreadPool, stops: bool
) -> None:
    life = Life(writers)
    life.extraction.give_up() if stops else life.extraction.fail("too slow", "slow_storage")
    life.open()
    life.check(SERVER_STOPPED, "too slow")
    assert life.decided == ([] if stops else ["too slow"])


def test_unexpected_exception_fails_its_file(
    writers: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(writers).open()

    def commit(*args: object, **options: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(life.file, "commit", commit)
    life.write(0, 8)
    life.check("RuntimeError: a mistake")
    assert life.decided == ["RuntimeError: a mistake"]


def test_file_ends_once_and_is_closed_after_its_last_write(
    writers: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = set()
    for turn in range(150):
        life = Life(writers)
        if turn % 5 == 4:
            monkeypatch.setattr(
                life.file,
                "write",
                lambda *_: (_ for _ in ()).throw(SinkError("r", Path("r"), "no room")),
            )
        barrier = threading.Barrier(5)
        actions: list[Callable[[], object]] = [
            life.open,
            *(lambda span=span, life=life: life.write(*span) for span in ((0, 3), (3, 8))),
            (lambda life=life: life.extraction.fail("late", "slow_storage"))
            if turn % 2
            else (lambda: None),
            life.stop if turn % 3 == 0 else (lambda: None),
        ]
        threads = [
            in_thread(lambda action=action, barrier=barrier: (barrier.wait(), action()))
            for action in actions
        ]
        for thread in threads:
            thread.join(10)
        assert writers.wait(10)
        life.end(aborted=turn % 7 == 0)
        life.stop()  # otherwise the writer of the failure has not run yet
        life.check("commit", "discard", "late", "no room", SERVER_STOPPED)
        ends.add(life.file.ends[0])
    assert len(ends) >= 3
