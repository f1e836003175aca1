"""A device error ends the worker: each file has the error, and the main thread raises it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_harness import HIDDEN, NOTHING, Engine, ended, failures, started

from ascend_npu_emulator.native import core
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
    """Make the device report an earlier failure at the next call of the lander."""

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
def test_main_thread_raises_the_error_of_the_lander_at_the_next_call(
    engine: Engine, call: str
) -> None:
    fail_copies(engine)
    engine.worker.start_step(started(engine.start("a", 4)))
    with pytest.raises(DeviceError, match="aclnnStack"):
        engine.step(NOTHING, [("a", 0, 4)])
        engine.worker.drain_copies()
    with pytest.raises(DeviceError, match="aclnnStack"):
        CALLS[call](engine)


def test_each_incomplete_file_has_the_error_of_the_device(engine: Engine) -> None:
    engine.step(started(engine.start("complete", 4)), [("complete", 0, 4)])
    engine.wait_until_decided("complete")
    engine.collect()
    open_files = [
        engine.start("begun", 9),
        engine.start("written", 8, include_output=True),
        engine.start("no row", 3),
    ]
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


def test_file_opened_after_the_failure_has_the_error_of_the_device(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_request_that_starts_during_the_failure_has_the_error_of_the_device(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = engine.worker._progress.begin

    def fail_first(*args: Any) -> None:
        engine.worker._on_device_error(RuntimeError(TEXT))
        engine.worker._not_ended.clear()  # as if the request had not started yet
        begin(*args)

    monkeypatch.setattr(engine.worker._progress, "begin", fail_first)
    engine.worker.start_step(started(engine.start("new", 4)))
    engine.worker._opener.wait(30)
    engine.worker._writers.wait(30)
    assert reasons(engine) == {"new": FAILED}


def test_exception_of_a_step_fails_each_file_and_stops_the_lander(engine: Engine) -> None:
    engine.step(started(engine.start("a", 9)), [("a", 0, 4)])
    engine.worker.fail(RuntimeError(TEXT))
    engine.worker._writers.wait(30)
    assert reasons(engine) == {"a": f"the engine failed: RuntimeError: {TEXT}"}
    fail_copies(engine)  # nothing is copied anymore, so no thread receives this error
    engine.worker._lander.drain()
    with pytest.raises(DeviceError, match="the engine failed: RuntimeError"):
        engine.worker.start_step(ended("a"))


def test_only_the_first_error_is_reported(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.step(started(engine.start("a", 9)), [("a", 0, 4)])
    with caplog.at_level(logging.CRITICAL, failure.logger.name):
        engine.worker.fail(RuntimeError(TEXT))
        engine.worker.fail(RuntimeError("raised once more, by the next call of the connector"))
    assert [record.message for record in caplog.records] == [
        f"no file can be completed: the engine failed: RuntimeError: {TEXT}"
    ]


def test_missing_copies_are_blamed_on_the_device_not_the_storage(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A dropped event never completes."""
    engine.worker._lander._has_landed = lambda batch: False  # type: ignore[method-assign]
    engine.step(started(engine.start("a", 4)), [("a", 0, 4)])
    assert engine.worker._progress.stalled_for() == 0.0
    with caplog.at_level(logging.ERROR, worker.logger.name):
        engine.worker.close(0.2)
    engine.worker._lander.abandon()
    (line,) = caplog.messages
    assert "the device did not complete the copies of rows within 0.2 s" in line
    assert reasons(engine) == {"a": SERVER_STOPPED}


@pytest.mark.parametrize(("in_a_child", "ends"), [(True, True), (False, False)])
def test_failed_worker_ends_its_process_unless_it_is_the_process_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_child: bool, ends: bool
) -> None:
    """The main thread may wait for a dropped event."""
    ended_by_us = threading.Event()
    monkeypatch.setattr(failure, "_GRACE_S", 0.05)
    monkeypatch.setattr(failure, "_end_process", ended_by_us.set)
    monkeypatch.setattr(
        failure.multiprocessing, "parent_process", lambda: object() if in_a_child else None
    )
    engine = Engine(tmp_path / "out")
    fail_copies(engine)
    engine.worker.start_step(started(engine.start("a", 4)))
    with pytest.raises(DeviceError):
        engine.step(NOTHING, [("a", 0, 4)])
        engine.worker.drain_copies()
    assert ended_by_us.wait(30 if ends else 0.2) == ends
    engine.worker.close()


def test_closed_worker_does_not_end_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_by_us = threading.Event()
    monkeypatch.setattr(failure, "_GRACE_S", 0.2)
    monkeypatch.setattr(failure, "_end_process", ended_by_us.set)
    monkeypatch.setattr(failure.multiprocessing, "parent_process", object)
    engine = Engine(tmp_path / "out")
    engine.worker.fail(RuntimeError(TEXT))
    engine.worker.close()
    assert not ended_by_us.wait(0.4)


# With the emulator's queue mode, which follows torch_npu after a failed task.

ERROR = "The Inner error is reported as above."
FAULTS = {
    "stack": "aten::stack.out",
    "copy": "device_to_host hsx-lander",
    "record of the main thread": "record_event MainThread",
    "record of the lander": "record_event hsx-lander",
    "wait of the main thread": "wait_event MainThread",
    "wait of the lander": "wait_event hsx-lander",
    "mm": "aten::mm.out",
}


@pytest.fixture(params=[True, False], ids=["late", "at once"])
def queue_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    late, queue = core.late(), core.queue()
    torch.npu.synchronize()  # objects of earlier tests
    core.set_late(request.param)
    core.set_queue(True)
    yield
    core.reset_tasks()
    torch.npu.synchronize()
    core.set_late(late)
    core.set_queue(queue)


def steps_until_the_engine_ends(engine: Engine) -> Exception:
    """Run steps as vLLM does. Return the exception that ends the engine."""
    for number in range(8):
        request = f"r{number}"
        try:
            engine.step(started(engine.start(request, 4)), [(request, 0, 4)])
            engine.worker.ask_device()
        except Exception as error:  # noqa: BLE001 - as compat.failures does
            engine.worker.fail(error)
            return error
    raise AssertionError("the engine goes on")


@pytest.mark.usefixtures("queue_mode")
@pytest.mark.parametrize("fault", FAULTS)
def test_any_failed_device_call_ends_the_engine_and_fails_each_file(
    tmp_path: Path, fault: str
) -> None:
    engine = Engine(
        tmp_path / "out", ring_rows=64, rotation=torch.eye(HIDDEN) if fault == "mm" else None
    )
    engine.step(started(engine.start("healthy", 4)), [("healthy", 0, 4)])
    engine.wait_until_decided("healthy")
    core.fail(FAULTS[fault], "EZ9999: the text of the driver")
    error = steps_until_the_engine_ends(engine)
    assert ERROR in str(error)
    engine.worker.close(30)
    begun = {
        path.name.partition(".")[0]
        for path in engine.directory.iterdir()
        if not path.name.startswith(".")
    }
    failed = reasons(engine)
    assert failed
    for request_id in begun - failed.keys():  # all requests are decided: these are complete
        engine.assert_file_is_right(request_id, 4)
    for reason in failed.values():
        assert ERROR in reason
        assert "EZ9999: the text of the driver" in reason
        assert "storage" not in reason


@pytest.mark.usefixtures("queue_mode")
@pytest.mark.parametrize("who_asks", ["the lander", "the main thread"])
def test_rows_after_a_failed_task_are_never_published(tmp_path: Path, who_asks: str) -> None:
    """The failure also drops queued copies and event records."""
    engine = Engine(tmp_path / "out", ring_rows=64)
    for name in ("first", "second"):  # so each event has completed before
        engine.step(started(engine.start(name, 4)), [(name, 0, 4)])
        engine.wait_until_decided(name)
    copied = engine.staging.slots[0].issued
    fill = engine.staging._fill

    def fill_while_the_device_is_busy(*args: Any) -> None:
        core.hold(0)
        core.fail("aten::stack.out", "EZ9999: the text of the driver")
        fill(*args)

    engine.staging._fill = fill_while_the_device_is_busy  # type: ignore[method-assign]
    engine.step(started(engine.start("spoilt", 4)), [("spoilt", 0, 4)])
    assert copied.wait(30)
    core.release(0)
    if who_asks == "the main thread":
        with pytest.raises(RuntimeError, match=ERROR) as raised:
            engine.worker.ask_device()
        engine.worker.fail(raised.value)
    engine.worker._lander.drain()
    engine.worker.close(30)
    assert reasons(engine).keys() == {"spoilt"}
    assert "EZ9999: the text of the driver" in reasons(engine)["spoilt"]
    assert not engine.path("spoilt").exists()
