"""Writers of a worker: the threads that open and write files, and the order of writes to a file."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_harness import Engine, ended, failures, started

from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata
from vllm_ascend_hsx.sinks.request_file import RequestFile

NOTHING = HsxConnectorMetadata()


def test_files_are_opened_in_another_thread_before_the_step_ends(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    original, opened_by = engine.sink.open, []

    def open_file(request_id: str, path: Path, expected_tokens: int, *more: Any) -> object:
        opened_by.append((request_id, threading.current_thread().name, expected_tokens))
        return original(request_id, path, expected_tokens, *more)

    monkeypatch.setattr(engine.sink, "open", open_file)
    engine.step(started(*(engine.start(f"r{index}", 4) for index in range(5))), [])
    assert opened_by == [(f"r{index}", "hsx-opener", 4) for index in range(5)]
    assert sorted(path.name for path in engine.directory.iterdir() if path.suffix == ".lock") == [
        f"r{index}.safetensors.lock" for index in range(5)
    ]


class OpeningGate:
    """Block all openings of a sink until the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.open = threading.Event()
        original = engine.sink.open

        def wait_then_open(*request: Any) -> object:
            assert self.open.wait(30)
            return original(*request)

        monkeypatch.setattr(engine.sink, "open", wait_then_open)


def test_files_that_open_slowly_block_no_writer(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(ring_rows=24)
    engine.step(started(engine.start("open", 6)), [("open", 0, 3)])
    gate = OpeningGate(monkeypatch, engine)
    # More files than writers.
    starts = started(engine.start("slow", 3), engine.start("too", 3), engine.start("three", 3))
    step = threading.Thread(
        target=engine.step,
        args=(starts, [("slow", 0, 3), ("too", 0, 3), ("three", 0, 3), ("open", 3, 3)]),
    )
    step.start()
    engine.wait_until_decided("open")
    gate.open.set()
    step.join(30)
    engine.close()
    assert engine.outcomes == {"open": None, "slow": None, "too": None, "three": None}
    for name, num_tokens in (("open", 6), ("slow", 3), ("too", 3), ("three", 3)):
        engine.assert_file_is_right(name, num_tokens)


def test_request_that_fails_while_opening_frees_its_memory_immediately(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slow_storage="fail")
    gate = OpeningGate(monkeypatch, engine)
    engine.step(started(engine.start("slow", 3)), [("slow", 0, 3)])
    engine.worker.drain_copies()
    assert engine.worker._writers.wait(10)
    assert (engine.ring.free_rows, engine.worker._progress.backlog) == (engine.ring.num_rows, 0)
    gate.open.set()
    engine.close()
    assert engine.visible() == {"slow.safetensors.error"}


def test_close_writes_rows_of_files_that_are_being_opened(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    gate = OpeningGate(monkeypatch, engine)
    wait = engine.worker._opener.wait
    monkeypatch.setattr(
        engine.worker._opener, "wait", lambda timeout=None: (gate.open.set(), wait(timeout))
    )
    monkeypatch.setattr(engine, "collect", lambda: None)  # the end of the step would wait
    engine.step(started(engine.start("a", 3)), [("a", 0, 3)])
    engine.worker.close()
    engine.assert_file_is_right("a", 3)


def test_no_rows_of_a_failed_request_are_staged(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_row_that_is_not_finite_fails_its_file_and_is_named(
    make_engine: Callable[..., Engine], value: float
) -> None:
    engine = make_engine(check_finite=True)
    engine.values["a", 5] = value
    engine.step(started(engine.start("a", 9), engine.start("b", 7)), [("a", 0, 9), ("b", 0, 7)])
    engine.close()
    assert engine.outcomes == {
        "a": "the row of token position 5 is not finite in layer 0 of 2 stored layers",
        "b": None,
    }
    assert failures(engine) == {"not_finite": 1}
    assert engine.visible() == {"a.safetensors.error", "b.safetensors"}


def test_without_the_check_a_row_that_is_not_finite_is_stored(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    engine.values["a", 0] = float("nan")
    engine.step(started(engine.start("a", 1)), [("a", 0, 1)])
    engine.close()
    assert engine.outcomes == {"a": None}


class Gate:
    """Holds the writes of one position until it is opened.

    Attributes:
        written: first positions of the request's writes that have ended, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, request_id: str, first: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.written: list[int] = []
        write = RequestFile.write

        def wait_then_write(file: RequestFile, position: int, rows: Any) -> None:
            if (file.request_id, position) == (request_id, first) and not self.reached.is_set():
                self.reached.set()
                assert self.open.wait(30)
            write(file, position, rows)
            if file.request_id == request_id:
                self.written.append(position)

        monkeypatch.setattr(RequestFile, "write", wait_then_write)


@pytest.mark.parametrize(
    ("shares", "written"), [(True, [0, 6]), (False, [0])], ids=["direct", "page cache"]
)
def test_slow_write_delays_no_other_file_and_own_file_only_in_the_page_cache(
    make_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    shares: bool,
    written: list[int],
) -> None:
    gate = Gate(monkeypatch, "long", 3)
    engine = make_engine(ring_rows=24, side_by_side=shares)  # chunks of three rows
    engine.step(started(engine.start("long", 9)), [("long", 0, 6)])
    assert gate.reached.wait(30)
    engine.step(started(engine.start("short", 4)), [("long", 6, 3), ("short", 0, 4)])
    engine.wait_until_decided("short")
    assert gate.written == written
    gate.open.set()
    engine.close()
    assert engine.outcomes == {"long": None, "short": None}
    engine.assert_file_is_right("long", 9)
    engine.assert_file_is_right("short", 4)


def test_recomputed_rows_are_written_after_their_first_version(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "a", 2)
    engine = make_engine(ring_rows=24, side_by_side=True)  # chunks of three rows
    engine.values = {("a", position): -1.0 for position in range(5)}
    engine.step(started(engine.start("a", 8)), [("a", 0, 2)])
    engine.step(NOTHING, [("a", 2, 3)])
    assert gate.reached.wait(30)
    engine.values = {}
    engine.step(
        NOTHING, [("a", 0, 3)]
    )  # preempted: it starts again, and the first part has another length
    engine.step(NOTHING, [("a", 3, 3)])
    engine.step(started(engine.start("b", 2)), [("b", 0, 2)])
    engine.wait_until_decided("b")  # the other writer has run
    assert gate.written == [0]
    gate.open.set()
    engine.step(NOTHING, [("a", 6, 2)])
    engine.close()
    assert engine.outcomes == {"a": None, "b": None}
    engine.assert_file_is_right("a", 8)


def test_request_ends_after_its_rows(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "a", 0)
    engine = make_engine(ring_rows=24, side_by_side=True)  # chunks of three rows
    engine.step(
        started(engine.start("a", 3, include_output=True), engine.start("b", 1)), [("a", 0, 3)]
    )
    assert gate.reached.wait(30)
    engine.step(NOTHING, [("a", 3, 1)])
    engine.step(ended("a", output=range(3, 4)), [("b", 0, 1)])
    engine.wait_until_decided("b")
    assert "a" not in engine._known_outcomes()
    gate.open.set()
    engine.close()
    assert engine.outcomes == {"a": None, "b": None}
    engine.assert_file_is_right("a", 4)
