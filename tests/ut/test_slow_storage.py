"""Storage that is slow, hangs, or gives errors: no step waits for ever, requests fail alone, and everything comes back with the storage."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worker_harness import Engine, ended, started

from vllm_ascend_hsx.connector import storage_watch
from vllm_ascend_hsx.connector import worker as worker_module
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RankState, RequestStart, WorkerReport
from vllm_ascend_hsx.connector.pace import StepRate, WriteRate
from vllm_ascend_hsx.connector.scheduler import ExtractionScheduler
from vllm_ascend_hsx.connector.stats import StatsRecorder
from vllm_ascend_hsx.connector.storage_watch import StorageWatch
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.sinks.destination import InDirectory
from vllm_ascend_hsx.sinks.request_file import RequestFile

PATIENCE = 0.3
SILENT = f"the storage did not answer for {PATIENCE:g} s"
NOTHING = HsxConnectorMetadata()


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(tmp_path / "out", **options))
        return made[-1]

    yield make
    for engine in made:
        engine.worker.close()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Answers while it is set; a write begins and an opened lock comes back only then."""
    yield from waiting(monkeypatch, (RequestFile, "_made_data"), (HeldLock, "acquire"))


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The same for an opened lock alone."""
    yield from waiting(monkeypatch, (HeldLock, "acquire"))


def waiting(monkeypatch: pytest.MonkeyPatch, *calls: tuple[type, str]) -> Iterator[threading.Event]:
    answers = threading.Event()
    answers.set()
    for owner, name in calls:
        original = getattr(owner, name)

        def wait(*args: Any, _original: Any = original) -> Any:
            answers.wait()
            return _original(*args)

        monkeypatch.setattr(owner, name, wait)
    yield answers
    answers.set()


def silence(engine: Engine, storage: threading.Event) -> None:
    """Patience is short only while the storage is silent: what it does otherwise may take long on a slow disk."""
    storage.clear()
    engine.worker._watch.patience = PATIENCE


def answer(engine: Engine, storage: threading.Event) -> None:
    engine.worker._watch.patience = 30.0
    storage.set()


def reason(path: Path) -> str:
    return json.loads(Path(f"{path}.error").read_text())["reason"]


def kinds(engine: Engine) -> dict[str, int]:
    stats = engine.worker.take_stats()
    assert stats is not None
    return dict(stats.failures)


def test_storage_that_hangs_while_files_are_opened_fails_these_requests_in_their_own_step(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    engine = make_engine()
    silence(engine, storage)
    engine.step(started(engine.start("a", 3), engine.start("b", 4)), [("a", 0, 3), ("b", 0, 4)])
    assert engine.outcomes == {"a": SILENT, "b": SILENT}, "the response that leaves now says so"
    assert engine.staging.wanted == {}
    engine.step(ended("a"), [])
    engine.step(ended("b"), [])
    answer(engine, storage)
    engine.worker.drain_copies()  # the rest of their rows waited for the ring
    engine.step(started(engine.start("c", 5)), [("c", 0, 5)])
    engine.close()
    assert engine.outcomes == {"a": SILENT, "b": SILENT, "c": None}
    engine.assert_file_is_right("c", 5)
    assert (reason(engine.path("a")), reason(engine.path("b"))) == (SILENT, SILENT)
    assert kinds(engine) == {"silent_storage": 2}
    assert engine.worker._backlog == 0


def test_storage_that_hangs_while_rows_are_written_stops_no_step_and_fails_only_those_whose_rows_wait(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    """The ring holds 6 rows and the two slots 16 each: the fourth step finds no slot."""
    engine = make_engine()
    engine.step(started(engine.start("before", 2)), [("before", 0, 2)])
    engine.wait_until_decided("before")
    engine.step(started(engine.start("a", 40), engine.start("b", 40)), [("a", 0, 8), ("b", 0, 8)])
    silence(engine, storage)
    position = 8
    while "a" not in engine.outcomes:
        engine.step(NOTHING, [("a", position, 8), ("b", position, 8)])
        position += 8
        assert position <= 40
    assert engine.outcomes == {"before": None, "a": SILENT, "b": SILENT}
    assert engine.staging.wanted == {}
    # The storage is still silent. New requests are refused at once, and others are not concerned.
    engine.step(started(engine.start("c", 3)), [("c", 0, 3)])
    assert engine.outcomes["c"] == SILENT
    assert engine.last_report.ranks[0].stuck
    engine.step(ended("c"), [("not extracted", 0, 16)])
    answer(engine, storage)
    engine.worker.drain_copies()
    engine.step(NOTHING, [])
    engine.step(started(engine.start("d", 20)), [("d", 0, 16)])
    assert not engine.last_report.ranks[0].stuck
    engine.step(NOTHING, [("d", 16, 4)])
    engine.close()
    assert engine.outcomes == {"before": None, "a": SILENT, "b": SILENT, "c": SILENT, "d": None}
    engine.assert_file_is_right("before", 2)
    engine.assert_file_is_right("d", 20)
    assert [reason(engine.path(name)) for name in "abc"] == [SILENT] * 3
    assert engine.visible() == {f"{name}.safetensors" for name in ("before", "d")} | {f"{name}.safetensors.error" for name in "abc"}
    assert engine.ring.free_rows == engine.ring.num_rows
    assert engine.worker._backlog == 0


def fill_ring(engine: Engine, storage: threading.Event) -> None:
    """Silence the storage until the worker takes it for stuck."""
    engine.step(started(engine.start("filler", 200)), [("filler", 0, 8)])
    silence(engine, storage)
    position = 8
    while "filler" not in engine.outcomes:
        engine.step(NOTHING, [("filler", position, 16)])
        position += 16


def test_a_request_that_was_never_opened_is_in_the_log_at_once_and_leaves_its_reason_when_the_storage_answers(
    make_engine: Callable[..., Engine], storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer may have no room for the reason: with n > 1 vLLM drops kv_transfer_params."""
    engine = make_engine()
    fill_ring(engine, storage)
    refused = [f"c{index}" for index in range(5)]
    engine.step(started(*(engine.start(name, 3) for name in refused)), [])
    for name in refused:
        assert f"request '{name}', {engine.path(name)}: {SILENT}" in caplog.text
    answer(engine, storage)
    engine.close()
    assert [reason(engine.path(name)) for name in refused] == [SILENT] * 5
    assert not [path for path in engine.directory.iterdir() if path.name.startswith(".")]


def test_requests_without_a_reason_in_their_place_are_limited_in_memory_and_still_logged(
    make_engine: Callable[..., Engine], storage: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_MAX_REASONS", 3)
    engine = make_engine()
    fill_ring(engine, storage)
    refused = [f"c{index}" for index in range(9)]
    for name in refused:
        engine.step(started(engine.start(name, 3)), [])
    assert engine.worker._reasons.waiting in (2, 3), "one may have been taken from those that wait"
    assert caplog.text.count(SILENT) >= 9
    dropped = caplog.text.count(".safetensors.error will not be there: 3 others wait")
    assert dropped in (5, 6), "the writer may take the first reason at any step"
    answer(engine, storage)
    engine.close()
    left = [name for name in refused if Path(f"{engine.path(name)}.error").exists()]
    assert len(left) == len(refused) - dropped


def test_a_reason_does_not_take_the_place_of_what_a_client_has_chosen_or_already_has(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    """The name may be another request's by the time the storage answers."""
    engine = make_engine()
    fill_ring(engine, storage)
    chosen = RequestStart("c-0", str(engine.path("mine")), 0, np.arange(3, dtype=np.int64))
    engine.step(started(chosen, engine.start("first", 3), engine.start("again", 3)), [])
    engine.path("again").write_text("rows of a later request")
    answer(engine, storage)
    engine.close()
    assert engine.outcomes["c-0"] == engine.outcomes["again"] == SILENT
    assert not Path(f"{engine.path('mine')}.error").exists()
    assert engine.path("again").exists()


def test_files_that_cannot_be_opened_keep_no_writer_from_the_rows_of_others(
    make_engine: Callable[..., Engine], locks: threading.Event
) -> None:
    """Both writers have come to rows of files that are not open yet. When these have failed the writers serve others."""
    engine = make_engine(ring_rows=24)
    engine.step(started(engine.start("long", 9)), [("long", 0, 3)])
    silence(engine, locks)
    engine.step(started(engine.start("a", 3), engine.start("b", 4), engine.start("c", 4)), [("a", 0, 3), ("b", 0, 4), ("c", 0, 4)])
    assert engine.outcomes == {"a": SILENT, "b": SILENT, "c": SILENT}
    engine.worker._watch.patience = 30.0
    engine.step(NOTHING, [("long", 3, 6)])
    engine.wait_until_decided("long")
    answer(engine, locks)
    engine.close()
    assert engine.outcomes["long"] is None
    assert [reason(engine.path(name)) for name in "abc"] == [SILENT] * 3


def test_small_steps_fill_the_whole_ring_before_one_has_to_wait(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    engine = make_engine(ring_rows=24)
    engine.step(started(engine.start("a", 26)), [])
    silence(engine, storage)
    for position in range(26):  # 24 rows in the ring and one in each staging slot
        engine.step(NOTHING, [("a", position, 1)])
    assert engine.outcomes == {}
    answer(engine, storage)
    stats = engine.worker.take_stats()
    assert stats is not None
    assert stats.counter("stall_ns") == 0
    engine.close()
    assert engine.outcomes == {"a": None}
    engine.assert_file_is_right("a", 26)


TOO_SLOW = (
    "its rows would have had to wait for slow storage, and slow_storage is 'fail': use faster storage, raise pinned_ring_bytes, "
    "or set it to 'wait'"
)


def test_where_nobody_waits_rows_that_have_no_room_fail_and_no_step_is_held_up(
    make_engine: Callable[..., Engine], storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_watch, "_HUNG_S", 30.0)  # it is slow here, not silent
    monkeypatch.setattr(worker_module, "_OPENS_S", 30.0)  # this is not about opening
    engine = make_engine(ring_rows=24, slow_storage="fail")
    engine.step(started(engine.start("a", 40), engine.start("b", 60)), [])
    storage.clear()
    for position in range(26):  # 24 rows in the ring and one in each staging slot
        engine.step(NOTHING, [("a", position, 1)])
    assert engine.outcomes == {}
    engine.step(NOTHING, [("a", 26, 1), ("not extracted", 0, 5)])
    assert engine.outcomes == {"a": TOO_SLOW}
    engine.step(NOTHING, [("a", 27, 1), ("b", 0, 3)])
    assert engine.outcomes == {"a": TOO_SLOW, "b": TOO_SLOW}
    assert engine.staging.wanted == {}
    engine.step(NOTHING, [("not extracted", 5, 16)])
    storage.set()
    engine.worker.drain_copies()
    stats = engine.worker.take_stats()
    assert stats is not None
    assert dict(stats.failures) == {"slow_storage": 2}
    assert stats.counter("stall_ns") == 0
    engine.step(started(engine.start("c", 9)), [("c", 0, 9)])
    engine.close()
    assert engine.outcomes == {"a": TOO_SLOW, "b": TOO_SLOW, "c": None}
    engine.assert_file_is_right("c", 9)
    assert (reason(engine.path("a")), reason(engine.path("b"))) == (TOO_SLOW, TOO_SLOW)
    assert engine.ring.free_rows == engine.ring.num_rows
    assert engine.worker._backlog == 0


def test_where_nobody_waits_a_file_that_does_not_open_in_time_fails_alone(
    make_engine: Callable[..., Engine], storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slow_storage="fail")
    with monkeypatch.context() as patient:
        patient.setattr(worker_module, "_OPENS_S", 30.0)
        engine.step(started(engine.start("open", 20)), [])
    storage.clear()
    engine.step(started(engine.start("late", 3)), [("late", 0, 3)])
    assert engine.outcomes == {"late": TOO_SLOW}, "the response that leaves now says so"
    storage.set()
    engine.step(ended("late"), [("open", 0, 10)])
    engine.worker.drain_copies()
    engine.step(NOTHING, [("open", 10, 10)])
    engine.close()
    assert engine.outcomes == {"late": TOO_SLOW, "open": None}
    assert reason(engine.path("late")) == TOO_SLOW


def test_the_log_says_while_a_step_waits_where_rows_go_and_what_to_do(
    make_engine: Callable[..., Engine], storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(ring_rows=2)
    engine.step(started(engine.start("a", 40)), [])
    storage.clear()

    class Answer(logging.Handler):
        """The storage answers because there is a line; without one the test would never end."""

        def emit(self, record: logging.LogRecord) -> None:
            if "slow storage" in record.getMessage():
                storage.set()

    handler = Answer()
    logging.getLogger("vllm_ascend_hsx.connector.storage_watch").addHandler(handler)
    try:
        for position in range(0, 40, 8):
            engine.step(NOTHING, [("a", position, 8)])
    finally:
        logging.getLogger("vllm_ascend_hsx.connector.storage_watch").removeHandler(handler)
    engine.close()
    (line,) = [record.getMessage() for record in caplog.records if "slow storage" in record.getMessage()]
    assert re.search(r"have waited 0\.[5-9] s|have waited [1-9]", line), line
    assert all(word in line for word in (str(engine.directory), "MiB are computed", "slow_storage", "pinned_ring_bytes"))
    assert engine.outcomes == {"a": None}
    stats = engine.worker.take_stats()
    assert stats is not None
    assert stats.counter("stall_ns") >= 5e8


def test_storage_is_silent_only_while_there_is_something_to_write_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now, backlog = 100.0, 0
    monkeypatch.setattr(storage_watch.time, "monotonic", lambda: now)
    steps, stats = StepRate(), StatsRecorder(0, lambda: 0.0, lambda: backlog)
    waits, fails = (
        StorageWatch(30.0, option, "/data", lambda: backlog, stats, WriteRate(1), steps) for option in ("wait", "fail")
    )
    for watch in (waits, fails):
        watch.answered()
    now = 500.0
    assert waits.silent_for() == 0.0, "nobody has asked it for anything"
    backlog, now = 10, 100.75
    assert [watch.is_quiet for watch in (waits, fails)] == [False, False]
    now = 101.0
    assert [(watch.is_quiet, watch.is_stuck) for watch in (waits, fails)] == [(True, False), (True, False)]
    now = 102.0
    assert [watch.is_stuck for watch in (waits, fails)] == [False, True]
    assert fails.failure == ("the storage did not answer for 2 s", "silent_storage")
    waits.answered()
    now = 131.75
    assert not waits.is_stuck
    now = 132.0
    assert waits.is_stuck


def test_files_are_opened_beside_the_main_thread_and_are_open_at_the_end_of_the_step(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    original, opened_by = engine.sink.open, []

    def open_file(request_id: str, path: Path, expected_tokens: int, **options: bool) -> object:
        opened_by.append((request_id, threading.current_thread().name, expected_tokens))
        return original(request_id, path, expected_tokens, **options)

    monkeypatch.setattr(engine.sink, "open", open_file)
    engine.step(started(*(engine.start(f"r{index}", 4) for index in range(5))), [])
    assert opened_by == [(f"r{index}", "hsx-opener", 4) for index in range(5)]
    assert sorted(path.name for path in engine.directory.iterdir() if path.suffix == ".lock") == [
        f"r{index}.safetensors.lock" for index in range(5)
    ]


def test_a_rank_whose_storage_is_silent_refuses_instead_of_holding_requests_back() -> None:
    class Request:
        request_id, kv_transfer_params, pooling_params, prompt_token_ids, resumable = "a", None, None, [1, 2], False
        priority, arrival_time = 0, 0.0

    request = Request()
    scheduler = ExtractionScheduler(InDirectory(Path("/data")), row_bytes=8, num_ranks=1, ring_bytes=100)
    scheduler.on_new_request(request)
    scheduler.on_worker_report(WorkerReport({}, {0: RankState(backlog=200)}))
    assert scheduler.must_wait(request)
    scheduler.on_worker_report(WorkerReport({}, {0: RankState(backlog=200, stuck=True)}))
    assert not scheduler.must_wait(request)
    scheduler.build_metadata(SimpleNamespace(scheduled_new_reqs=[]))
    scheduler.on_worker_report(WorkerReport({}, {0: RankState(backlog=200)}))
    assert scheduler.must_wait(request)


def test_a_request_that_has_failed_has_no_more_rows_staged(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    engine.step(started(engine.start("a", 40)), [("a", 0, 4)])
    monkeypatch.setattr("vllm_ascend_hsx.sinks.data_file.write_at", refuse)
    engine.step(NOTHING, [("a", 4, 4)])
    engine.wait_until_decided("a")
    engine.step(NOTHING, [])
    assert engine.staging.wanted == {}
    assert "ENOSPC" in str(engine.outcomes["a"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_its_file_and_is_named(make_engine: Callable[..., Engine], value: float) -> None:
    engine = make_engine(check_finite=True)
    engine.values["a", 5] = value
    engine.step(started(engine.start("a", 9), engine.start("b", 7)), [("a", 0, 9), ("b", 0, 7)])
    engine.close()
    assert engine.outcomes == {"a": "the row of token position 5 is not finite in layer 0 of the 2 that are stored", "b": None}
    assert kinds(engine) == {"not_finite": 1}
    assert engine.visible() == {"a.safetensors.error", "b.safetensors"}


def test_without_the_check_a_row_that_is_not_finite_is_stored(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.values["a", 0] = float("nan")
    engine.step(started(engine.start("a", 1)), [("a", 0, 1)])
    engine.close()
    assert engine.outcomes == {"a": None}


class Gate:
    """Holds the writes of one position until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, request_id: str, first: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        write = RequestFile.write

        def wait_then_write(file: RequestFile, position: int, rows: Any) -> None:
            if (file.request_id, position) == (request_id, first) and not self.reached.is_set():
                self.reached.set()
                assert self.open.wait(30)
            write(file, position, rows)

        monkeypatch.setattr(RequestFile, "write", wait_then_write)


@pytest.mark.parametrize(("side_by_side", "missing"), [(True, [(0, 3)]), (False, [(0, 6)])], ids=["direct", "page cache"])
def test_a_write_that_takes_long_holds_up_no_other_file_and_of_its_own_only_what_goes_through_the_page_cache(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, side_by_side: bool, missing: list[tuple[int, int]]
) -> None:
    gate = Gate(monkeypatch, "long", 0)
    engine = make_engine(ring_rows=24, side_by_side=side_by_side)  # chunks of three rows
    engine.step(started(engine.start("long", 6)), [("long", 0, 3)])
    assert gate.reached.wait(30)
    engine.step(started(engine.start("short", 4)), [("long", 3, 3), ("short", 0, 4)])
    engine.wait_until_decided("short")
    (extraction,) = engine.worker._under_way
    assert extraction._written.missing(6) == missing
    gate.open.set()
    engine.close()
    assert engine.outcomes == {"long": None, "short": None}
    engine.assert_file_is_right("long", 6)
    engine.assert_file_is_right("short", 4)


def test_rows_that_are_computed_again_are_written_behind_their_first_version(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "a", 2)
    engine = make_engine(ring_rows=24, side_by_side=True)  # chunks of three rows
    engine.values = {("a", position): -1.0 for position in range(5)}
    engine.step(started(engine.start("a", 8)), [("a", 0, 2)])
    engine.step(NOTHING, [("a", 2, 3)])
    assert gate.reached.wait(30)
    engine.values = {}
    engine.step(NOTHING, [("a", 0, 3)])  # preempted: it starts again, and its first part is cut elsewhere
    engine.step(NOTHING, [("a", 3, 3)])
    engine.step(started(engine.start("b", 2)), [("b", 0, 2)])
    engine.wait_until_decided("b")  # the other writer has come by
    (extraction,) = engine.worker._under_way
    assert extraction._written.missing(8) == [(2, 8)]
    gate.open.set()
    engine.step(NOTHING, [("a", 6, 2)])
    engine.close()
    assert engine.outcomes == {"a": None, "b": None}
    engine.assert_file_is_right("a", 8)


def test_the_end_of_a_request_comes_behind_its_rows(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "a", 0)
    engine = make_engine(ring_rows=24, side_by_side=True)  # chunks of three rows
    engine.step(started(engine.start("a", 3, include_output=True), engine.start("b", 1)), [("a", 0, 3)])
    assert gate.reached.wait(30)
    engine.step(NOTHING, [("a", 3, 1)])
    engine.step(ended("a", output=range(3, 4)), [("b", 0, 1)])
    engine.wait_until_decided("b")
    assert "a" not in engine._known_outcomes()
    gate.open.set()
    engine.close()
    assert engine.outcomes == {"a": None, "b": None}
    engine.assert_file_is_right("a", 4)
