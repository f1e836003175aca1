"""A device error ends the worker: each file has the text, and the main thread raises it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_harness import NOTHING, Engine, ended, failures, started

from vllm_ascend_hsx.connector import failure, worker
from vllm_ascend_hsx.drafter.landing import DeviceError
from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED

TEXT = "The Inner error is reported as above. the current working operator name is aclnnStack"
FAILED = f"the device failed: {TEXT}"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "out", ring_rows=64)
    yield engine
    engine.worker.close()


def fail_copies(engine: Engine) -> None:
    """Let the device report an earlier failure to the lander's next call."""

    def wait_event(event: Any) -> None:
        raise RuntimeError(TEXT)

    engine.worker._lander._stream.wait_event = wait_event  # type: ignore[method-assign]


def reasons(engine: Engine) -> dict[str, str]:
    """Return the reason in each error file, by request."""
    found = {}
    for path in engine.directory.glob(f"*{ERROR_SUFFIX}"):
        found[path.name.partition(".")[0]] = json.loads(path.read_text())["reason"]
    return found


CALLS: dict[str, Callable[[Engine], object]] = {
    "bind_connector_metadata": lambda engine: engine.worker.start_step(NOTHING),
    "save_kv_layer": lambda engine: engine.worker.save(),
    "build_connector_worker_meta": lambda engine: engine.worker.report(),
    "sleep": lambda engine: engine.worker.drain_copies(),
    "an answer": lambda engine: engine.worker.ask_device(),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_of_the_main_thread_raises_what_the_lander_met(engine: Engine, call: str) -> None:
    fail_copies(engine)
    engine.worker.start_step(started(engine.start("a", 4)))
    with pytest.raises(DeviceError, match="aclnnStack"):
        engine.step(NOTHING, [("a", 0, 4)])
        engine.worker.drain_copies()
    with pytest.raises(DeviceError, match="aclnnStack"):
        CALLS[call](engine)


def test_each_file_that_is_not_complete_has_the_devices_text(engine: Engine) -> None:
    engine.step(started(engine.start("complete", 4)), [("complete", 0, 4)])
    engine.wait_until_decided("complete")
    engine.collect()
    open_files = [engine.start("begun", 9), engine.start("written", 8, include_output=True), engine.start("no row", 3)]
    engine.step(started(*open_files), [("begun", 0, 4), ("written", 0, 8)])
    engine.worker._lander.drain()
    failures(engine)
    fail_copies(engine)
    with pytest.raises(DeviceError):
        engine.step(NOTHING, [("begun", 4, 2)])
        engine.worker.drain_copies()
    engine.worker._writers.wait(30)
    assert reasons(engine) == dict.fromkeys(["begun", "written", "no row"], FAILED)
    assert failures(engine) == {"engine": 3}
    engine.assert_file_is_right("complete", 4)


def test_a_file_that_opens_after_the_failure_has_the_devices_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = threading.Event()
    original = engine.sink.open

    def open_late(*args: Any) -> Any:
        opens.wait()
        return original(*args)

    monkeypatch.setattr(engine.sink, "open", open_late)
    engine.worker.start_step(started(engine.start("late", 4)))
    engine.worker._on_device_error(RuntimeError(TEXT))
    opens.set()
    engine.worker._opener.wait(30)
    engine.worker._writers.wait(30)
    assert reasons(engine) == {"late": FAILED}


def test_a_request_that_begins_while_the_device_fails_has_the_devices_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = engine.worker._progress.begin

    def fail_first(*args: Any) -> None:
        engine.worker._on_device_error(RuntimeError(TEXT))
        engine.worker._not_ended.clear()  # as if it had not been there yet
        begin(*args)

    monkeypatch.setattr(engine.worker._progress, "begin", fail_first)
    engine.worker.start_step(started(engine.start("new", 4)))
    engine.worker._opener.wait(30)
    engine.worker._writers.wait(30)
    assert reasons(engine) == {"new": FAILED}


def test_an_exception_of_a_step_is_in_each_file_and_the_lander_stops(engine: Engine) -> None:
    engine.step(started(engine.start("a", 9)), [("a", 0, 4)])
    engine.worker.fail(RuntimeError(TEXT))
    engine.worker._writers.wait(30)
    assert reasons(engine) == {"a": f"the engine failed: RuntimeError: {TEXT}"}
    fail_copies(engine)  # nothing is copied anymore, so nobody meets this one
    engine.worker._lander.drain()
    with pytest.raises(DeviceError, match="the engine failed: RuntimeError"):
        engine.worker.start_step(ended("a"))


def test_the_first_error_is_in_the_files_and_in_the_log_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.step(started(engine.start("a", 9)), [("a", 0, 4)])
    with caplog.at_level(logging.CRITICAL, failure.logger.name):
        engine.worker.fail(RuntimeError(TEXT))
        engine.worker.fail(RuntimeError("raised once more, by the next call of the connector"))
    assert [record.message for record in caplog.records] == [f"no file can be completed: the engine failed: RuntimeError: {TEXT}"]


def test_rows_that_do_not_arrive_are_not_blamed_on_the_storage(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """An event that the device has dropped never completes."""
    engine.worker._lander._has_landed = lambda batch: False  # type: ignore[method-assign]
    engine.step(started(engine.start("a", 4)), [("a", 0, 4)])
    assert engine.worker._progress.silent_for() == 0.0
    with caplog.at_level(logging.ERROR, worker.logger.name):
        engine.worker.close(0.2)
    engine.worker._lander.abandon()
    (line,) = caplog.messages
    assert "the device did not complete the copies of their rows within 0.2 s" in line
    assert reasons(engine) == {"a": SERVER_STOPPED}


@pytest.mark.parametrize(("in_a_child", "ends"), [(True, True), (False, False)])
def test_a_process_of_vllm_ends_if_vllm_does_not_end_it_and_one_of_the_user_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_child: bool, ends: bool
) -> None:
    """The main thread may wait for an event that the device has dropped."""
    ended_by_us = threading.Event()
    monkeypatch.setattr(failure, "_GRACE_S", 0.05)
    monkeypatch.setattr(failure, "_end_process", ended_by_us.set)
    monkeypatch.setattr(failure.multiprocessing, "parent_process", lambda: object() if in_a_child else None)
    engine = Engine(tmp_path / "out")
    fail_copies(engine)
    engine.worker.start_step(started(engine.start("a", 4)))
    with pytest.raises(DeviceError):
        engine.step(NOTHING, [("a", 0, 4)])
        engine.worker.drain_copies()
    assert ended_by_us.wait(30 if ends else 0.2) == ends
    engine.worker.close()


def test_a_worker_that_vllm_closes_does_not_end_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_by_us = threading.Event()
    monkeypatch.setattr(failure, "_GRACE_S", 0.2)
    monkeypatch.setattr(failure, "_end_process", ended_by_us.set)
    monkeypatch.setattr(failure.multiprocessing, "parent_process", object)
    engine = Engine(tmp_path / "out")
    engine.worker.fail(RuntimeError(TEXT))
    engine.worker.close()
    assert not ended_by_us.wait(0.4)
