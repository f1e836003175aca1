"""A closing worker writes computed rows within the timeout, and fails all other files."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from scheduler_harness import make_request, make_scheduler, schedule
from worker_harness import Engine, started

from vllm_ascend_hsx.connector import worker as worker_module
from vllm_ascend_hsx.connector.connector import AscendHiddenStatesConnector
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata
from vllm_ascend_hsx.reader.lock_wait import wait_until_released
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.storage import Storage

NOTHING = HsxConnectorMetadata()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event. Writes begin only while it is set. It is set at the end."""
    answers = threading.Event()
    begin = RequestFile._made_data

    def wait(self: Any) -> Any:
        answers.wait()
        return begin(self)

    monkeypatch.setattr(RequestFile, "_made_data", wait)
    yield answers
    answers.set()


@pytest.fixture
def engine(tmp_path: Path, storage: threading.Event) -> Engine:
    return Engine(tmp_path / "out")


def threads(engine: Engine) -> list[threading.Thread]:
    """Return the threads of this worker, without threads of earlier tests."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("hsx-") and thread not in engine.threads_before
    ]


def reasons(engine: Engine) -> dict[str, str]:
    return {
        path.name.removesuffix(".safetensors.error"): json.loads(path.read_text())["reason"]
        for path in engine.directory.glob("*.error")
    }


def locks_that_are_held(engine: Engine) -> list[str]:
    held = []
    for path in engine.directory.glob("*.lock"):
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path.name)
    return held


def compute(engine: Engine, *spans: tuple[str, int, int]) -> None:
    """Compute rows that are in no file yet: 6 in the ring, the others in staging slots."""
    engine.step(
        started(engine.start("complete", 9), engine.start("half", 20)),
        [("complete", 0, 9), ("half", 0, 7)],
    )


def test_close_writes_all_computed_rows(
    engine: Engine, storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    compute(engine)
    said = []

    def answer_then(record: logging.LogRecord) -> bool:
        if not storage.is_set():
            said.append((record.getMessage(), list(engine.directory.glob("*.safetensors"))))
            storage.set()
        return True

    worker_module.logger.addFilter(answer_then)
    try:
        engine.worker.close(60)
    finally:
        worker_module.logger.removeFilter(answer_then)
    assert said == [("the server stops after writing 512 bytes of rows, in at most 60 s", [])]
    assert engine.visible() == {"complete.safetensors", "half.safetensors.error"}
    engine.assert_file_is_right("complete", 9)
    assert reasons(engine) == {"half": SERVER_STOPPED}
    stopped = "stopping without the files of 1 requests (the requests were not complete): half"
    assert stopped in caplog.text
    assert (threads(engine), locks_that_are_held(engine)) == ([], [])


def test_close_ends_after_its_timeout_and_threads_end_once_storage_responds(
    engine: Engine, storage: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(os.listdir("/proc/self/fd")) - {"0"}
    compute(engine)
    engine.worker.close(0.2)
    assert not storage.is_set()
    assert reasons(engine) == {"complete": SERVER_STOPPED, "half": SERVER_STOPPED}
    assert engine.visible() == {"complete.safetensors.error", "half.safetensors.error"}
    assert locks_that_are_held(engine) == []
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line == (
        "stopping without the files of 2 requests (the storage did not take 512 bytes within "
        "0.2 s): complete, half"
    )
    waiting = threads(engine)
    assert waiting, "the storage is silent"
    storage.set()
    for thread in waiting:
        thread.join(30)
    assert threads(engine) == []
    # The outcomes do not change.
    assert reasons(engine) == {"complete": SERVER_STOPPED, "half": SERVER_STOPPED}
    assert engine.visible() == {"complete.safetensors.error", "half.safetensors.error"}
    assert engine.ring.free_rows == engine.ring.num_rows
    assert set(os.listdir("/proc/self/fd")) - before <= {"0"}
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_hanging_publication_does_not_delay_reasons_of_other_requests(
    engine: Engine, storage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing, go_on = threading.Event(), threading.Event()
    publish = Storage.publish

    def hang(self: Storage, name: str, target: Storage, new_name: str) -> None:
        if new_name == "complete.safetensors":
            publishing.set()
            go_on.wait()
        publish(self, name, target, new_name)

    monkeypatch.setattr(Storage, "publish", hang)
    monkeypatch.setattr(worker_module, "FAILURE_REPORT_TIMEOUT_S", 0.5)
    storage.set()
    compute(engine)
    assert publishing.wait(30)
    engine.worker.close(0)
    assert wait_until_released(engine.path("half").with_name("half.safetensors.lock"), 30)
    assert reasons(engine) == {"half": SERVER_STOPPED}
    waiting = threads(engine)
    go_on.set()
    for thread in waiting:
        thread.join(30)
    assert engine.visible() == {"complete.safetensors", "half.safetensors.error"}
    engine.assert_file_is_right("complete", 9)
    assert (threads(engine), locks_that_are_held(engine)) == ([], [])


def test_exception_of_a_signal_handler_ends_the_wait_but_reasons_are_published(
    engine: Engine, storage: threading.Event
) -> None:
    """KeyboardInterrupt in a user process; SystemExit in vllm-ascend's static-kernel handler."""

    class Impatience(Exception):
        pass

    interrupted = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise Impatience

    compute(engine)
    earlier = signal.signal(signal.SIGUSR1, handler)
    joining = threading.Event()
    lander = engine.worker._lander._thread
    join = lander.join

    def join_lander(timeout: float | None) -> None:
        joining.set()  # the lander must end
        join(timeout)

    lander.join = join_lander  # type: ignore[method-assign]
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        joining.wait()
        while (
            not interrupted.is_set()
        ):  # a signal just before the main thread sleeps does not wake it
            signal.pthread_kill(main, signal.SIGUSR1)
            interrupted.wait(0.05)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(Impatience):
            engine.worker.close(60)
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert reasons(engine) == {"complete": SERVER_STOPPED, "half": SERVER_STOPPED}
    assert locks_that_are_held(engine) == []
    lander.join = join  # type: ignore[method-assign]
    storage.set()
    # In Python 3.11 a thread counts as stopped after an exception has interrupted `join`.
    deadline = time.monotonic() + 30
    pause = threading.Event()
    while threads(engine) and time.monotonic() < deadline:
        pause.wait(0.01)
    assert threads(engine) == []


# The connector


class Closed:
    """Replaces the worker. It may belong to another process."""

    def __init__(self, note: Callable[[float], None]) -> None:
        self.close = note


def connector(note: Callable[[float], None]) -> AscendHiddenStatesConnector:
    made = object.__new__(AscendHiddenStatesConnector)
    made._worker, made._drain_timeout, made._process = Closed(note), 7.0, os.getpid()  # type: ignore[assignment]
    return made


def test_connector_closes_its_worker_once_with_drain_timeout() -> None:
    calls: list[float] = []
    one = connector(calls.append)
    one.shutdown()
    one.shutdown()
    assert calls == [7.0]


def test_forked_child_does_not_touch_files_of_the_parent(tmp_path: Path) -> None:
    note = tmp_path / "closed"
    one = connector(lambda timeout: note.touch())
    child = os.fork()
    if child == 0:
        one.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not note.exists()
    one.shutdown()
    assert note.exists()


# The scheduler's side


@pytest.mark.parametrize(
    "change",
    [{}, {"sampling_params": SimpleNamespace(stop=["."]), "num_output_tokens": 3}],
    ids=["no stop string", "stop string"],
)
def test_aborts_of_a_stopping_server_are_not_sent_to_workers(
    change: dict[str, Any],
) -> None:
    """Otherwise the file would be discarded or, with stop strings, published incomplete."""
    scheduler = make_scheduler()
    cut, whole = make_request("cut", **change), make_request("whole")
    for request in (cut, whole):
        scheduler.on_new_request(request)
    schedule(scheduler, cut, whole)
    scheduler.server_stops()
    cut.status = SimpleNamespace(name="FINISHED_ABORTED")
    assert scheduler.on_finished(cut) is None
    scheduler.on_finished(whole)
    assert [(end.request_id, end.aborted) for end in schedule(scheduler).ended] == [
        ("whole", False)
    ]
