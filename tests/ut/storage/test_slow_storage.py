"""Slow, hanging or failing storage: no step waits forever, and requests fail alone."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sink_harness import reason_of as reason
from worker_harness import (
    NOTHING,
    SILENT,
    Engine,
    answer,
    ended,
    failures,
    fill_ring,
    silence,
    started,
)

from vllm_ascend_hsx.connector import storage_watch
from vllm_ascend_hsx.connector import worker as worker_module


def test_hanging_open_fails_requests_in_their_own_step(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    engine = make_engine()
    silence(engine, storage)
    engine.step(started(engine.start("a", 3), engine.start("b", 4)), [("a", 0, 3), ("b", 0, 4)])
    assert engine.outcomes == {"a": SILENT, "b": SILENT}, (
        "the response that is sent now has the reason"
    )
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
    assert failures(engine) == {"unresponsive_storage": 2}
    assert engine.worker._progress.backlog == 0


def test_hanging_writes_fail_only_requests_whose_rows_wait(
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
    # The storage still hangs. New requests are refused at once, other requests are not affected.
    engine.step(started(engine.start("c", 3)), [("c", 0, 3)])
    assert engine.outcomes["c"] == SILENT
    assert engine.last_report.ranks[0].unresponsive
    engine.step(ended("c"), [("not extracted", 0, 16)])
    answer(engine, storage)
    engine.worker.drain_copies()
    engine.step(NOTHING, [])
    engine.step(started(engine.start("d", 20)), [("d", 0, 16)])
    assert not engine.last_report.ranks[0].unresponsive
    engine.step(NOTHING, [("d", 16, 4)])
    engine.close()
    assert engine.outcomes == {"before": None, "a": SILENT, "b": SILENT, "c": SILENT, "d": None}
    engine.assert_file_is_right("before", 2)
    engine.assert_file_is_right("d", 20)
    assert [reason(engine.path(name)) for name in "abc"] == [SILENT] * 3
    assert engine.visible() == {f"{name}.safetensors" for name in ("before", "d")} | {
        f"{name}.safetensors.error" for name in "abc"
    }
    assert engine.ring.free_rows == engine.ring.num_rows
    assert engine.worker._progress.backlog == 0


def test_unopened_request_is_logged_and_its_reason_stored_later(
    make_engine: Callable[..., Engine], storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The response may lack the reason: with n > 1 vLLM drops kv_transfer_params."""
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


def test_unstored_reasons_are_bounded_in_memory_and_logged(
    make_engine: Callable[..., Engine],
    storage: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_MAX_REASONS", 3)
    engine = make_engine()
    fill_ring(engine, storage)
    refused = [f"c{index}" for index in range(9)]
    for name in refused:
        engine.step(started(engine.start(name, 3)), [])
    assert engine.worker._background.pending == 3
    assert caplog.text.count(SILENT) >= 9
    dropped = caplog.text.count(".safetensors.error is not written: 3 other reasons")
    assert dropped == 6
    answer(engine, storage)
    engine.close()
    left = [name for name in refused if Path(f"{engine.path(name)}.error").exists()]
    assert len(left) == len(refused) - dropped


def test_files_that_cannot_be_opened_do_not_block_writers(
    make_engine: Callable[..., Engine], locks: threading.Event
) -> None:
    """Both writers wait for unopened files. After these fail, the writers serve other files."""
    engine = make_engine(ring_rows=24)
    engine.step(started(engine.start("long", 9)), [("long", 0, 3)])
    silence(engine, locks)
    engine.step(
        started(engine.start("a", 3), engine.start("b", 4), engine.start("c", 4)),
        [("a", 0, 3), ("b", 0, 4), ("c", 0, 4)],
    )
    assert engine.outcomes == {"a": SILENT, "b": SILENT, "c": SILENT}
    engine.worker._watch.storage_timeout = 30.0
    engine.step(NOTHING, [("long", 3, 6)])
    engine.wait_until_decided("long")
    answer(engine, locks)
    engine.close()
    assert engine.outcomes["long"] is None
    assert [reason(engine.path(name)) for name in "abc"] == [SILENT] * 3


def test_small_steps_fill_the_ring_before_waiting(
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
    "storage is too slow for the rows of this request, and slow_storage is 'fail': use faster "
    "storage, raise pinned_ring_bytes, "
    "or set slow_storage to 'wait'"
)


def test_with_slow_storage_fail_rows_without_space_fail_and_steps_continue(
    make_engine: Callable[..., Engine], storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        storage_watch, "_UNRESPONSIVE_S", 30.0
    )  # it is slow here, and does not hang
    monkeypatch.setattr(storage_watch, "_OPENS_S", 30.0)  # this is not about opening
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
    assert engine.worker._progress.backlog == 0


def test_with_slow_storage_fail_only_rows_without_a_slot_fail(
    make_engine: Callable[..., Engine], storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two slots of four rows and a ring of six rows, the first twelve rows of a step fit."""
    monkeypatch.setattr(storage_watch, "_UNRESPONSIVE_S", 30.0)
    monkeypatch.setattr(storage_watch, "_OPENS_S", 30.0)
    engine = make_engine(slow_storage="fail", slot_rows=4)
    engine.step(started(*(engine.start(name, 4) for name in "abc"), engine.start("d", 6)), [])
    storage.clear()
    engine.step(NOTHING, [("a", 0, 4), ("b", 0, 4), ("c", 0, 4), ("d", 0, 4)])
    assert engine.outcomes == {"d": TOO_SLOW}
    assert engine.last_report.ranks[0].backlog == 12 * engine.ring.row_bytes
    storage.set()
    engine.step(NOTHING, [("d", 4, 2)])
    engine.close()
    assert engine.outcomes == {"a": None, "b": None, "c": None, "d": TOO_SLOW}
    for name in "abc":
        engine.assert_file_is_right(name, 4)
    assert engine.ring.free_rows == engine.ring.num_rows
    assert engine.worker._progress.backlog == 0


def test_with_slow_storage_fail_a_file_that_opens_late_fails_alone(
    make_engine: Callable[..., Engine], storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slow_storage="fail")
    with monkeypatch.context() as patient:
        patient.setattr(storage_watch, "_OPENS_S", 30.0)
        engine.step(started(engine.start("open", 20)), [])
    storage.clear()
    engine.step(started(engine.start("late", 3)), [("late", 0, 3)])
    assert engine.outcomes == {"late": TOO_SLOW}, "the response that is sent now has the reason"
    storage.set()
    engine.step(ended("late"), [("open", 0, 10)])
    engine.worker.drain_copies()
    engine.step(NOTHING, [("open", 10, 10)])
    engine.close()
    assert engine.outcomes == {"late": TOO_SLOW, "open": None}
    assert reason(engine.path("late")) == TOO_SLOW


def test_with_slow_storage_fail_requests_are_refused_after_one_hanging_open(
    make_engine: Callable[..., Engine], locks: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped FUSE server: opening a file takes forever, so no step may try it again."""
    engine = make_engine(slow_storage="fail", ring_rows=24)
    with monkeypatch.context() as patient:
        patient.setattr(storage_watch, "_OPENS_S", 30.0)
        engine.step(started(engine.start("before", 20)), [("before", 0, 8)])
    locks.clear()
    engine.step(started(engine.start("a", 3)), [("a", 0, 3)])
    assert engine.outcomes == {"a": TOO_SLOW}
    assert engine.last_report.ranks[0].unresponsive
    with monkeypatch.context() as stopped:
        stopped.setattr(
            engine.worker._opener,
            "wait",
            lambda timeout: pytest.fail("a later step waited for files"),
        )
        for name in "bc":
            engine.step(started(engine.start(name, 3)), [(name, 0, 3)])
            assert engine.outcomes[name] == TOO_SLOW, "the response that is sent now has the reason"
        stopped.setattr(storage_watch, "_UNRESPONSIVE_S", 0.0)
        engine.step(started(engine.start("d", 3)), [])
        assert engine.outcomes["d"] == "the storage did not answer for 0 s", (
            "by now it is no longer merely slow"
        )
    locks.set()
    assert engine.worker._opener.wait(30.0)
    assert not engine.worker._watch.is_unresponsive
    with monkeypatch.context() as patient:
        patient.setattr(storage_watch, "_OPENS_S", 30.0)
        engine.step(started(engine.start("after", 5)), [("before", 8, 8), ("after", 0, 5)])
    assert not engine.last_report.ranks[0].unresponsive
    engine.step(NOTHING, [("before", 16, 4)])
    engine.close()
    assert engine.outcomes["before"] is None and engine.outcomes["after"] is None
    engine.assert_file_is_right("after", 5)
    assert [reason(engine.path(name)) for name in "abc"] == [TOO_SLOW] * 3
    assert failures(engine) == {"slow_storage": 3, "unresponsive_storage": 1}


def test_log_names_storage_and_remedy_while_a_step_waits(
    make_engine: Callable[..., Engine], storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(ring_rows=2)
    engine.step(started(engine.start("a", 40)), [])
    storage.clear()

    class Answer(logging.Handler):
        """The storage answers when the line is logged; otherwise the test would never end."""

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
    (line,) = [
        record.getMessage() for record in caplog.records if "slow storage" in record.getMessage()
    ]
    assert re.search(r"have waited 0\.[5-9] s|have waited [1-9]", line), line
    assert all(
        word in line
        for word in (str(engine.directory), "MiB are computed", "slow_storage", "pinned_ring_bytes")
    )
    assert engine.outcomes == {"a": None}
    stats = engine.worker.take_stats()
    assert stats is not None
    assert stats.counter("stall_ns") >= 5e8
