"""Requests for a name that has rows, or is being written, while the storage is slow or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sink_harness import reason_of
from worker_harness import (
    FORMAT,
    NOTHING,
    SILENT,
    Engine,
    answer,
    ended,
    failures,
    fill_ring,
    silence,
    started,
    waiting,
)

from vllm_ascend_hsx.connector.metadata import RequestStart
from vllm_ascend_hsx.connector.worker import NAME_IN_USE
from vllm_ascend_hsx.reader.load import load
from vllm_ascend_hsx.sinks.base import NAME_USED
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile


def publish(engine: Engine, *names: str) -> None:
    """Publish a row under each name, as another rank does in the same directory."""
    with FileSink(engine.directory, FORMAT) as sink:
        for name in names:
            file = sink.open("other", engine.path(name))
            file.write(0, memoryview(bytes(FORMAT.row_bytes)))
            file.commit(np.arange(1, dtype=np.int64), 1)


def chosen(engine: Engine, *names: str) -> list[RequestStart]:
    return [
        RequestStart(f"{name}-0", str(engine.path(name)), 0, np.arange(3, dtype=np.int64))
        for name in names
    ]


def assert_rows_stay(engine: Engine, *names: str) -> None:
    for name in names:
        assert load(engine.path(name), 0).hidden_states.shape[0] == 1
        assert not Path(f"{engine.path(name)}.error").exists()


def test_request_for_a_name_with_rows_is_refused_in_its_first_step(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    publish(engine, "used")
    engine.step(
        started(*chosen(engine, "used"), engine.start("new", 3)), [("used-0", 0, 3), ("new", 0, 3)]
    )
    assert engine.outcomes["used-0"] == NAME_USED, "the response that is sent now has the reason"
    assert "used-0" not in engine.staging.wanted
    engine.step(ended("used-0"), [])
    engine.close()
    assert_rows_stay(engine, "used")
    engine.assert_file_is_right("new", 3)
    assert failures(engine) == {"refused": 1}


def test_request_that_hanging_storage_failed_leaves_no_reason_beside_rows(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    engine = make_engine()
    publish(engine, "earlier")
    fill_ring(engine, storage)
    engine.step(started(*chosen(engine, "earlier", "meanwhile", "new")), [])
    answer(engine, storage)
    engine.close()
    assert {engine.outcomes[f"{name}-0"] for name in ("earlier", "meanwhile", "new")} == {SILENT}
    assert reason_of(engine.path("new")) == SILENT
    assert_rows_stay(engine, "earlier")


def test_file_that_opens_after_its_request_has_failed_leaves_no_reason_beside_rows(
    make_engine: Callable[..., Engine], locks: threading.Event
) -> None:
    engine = make_engine()
    publish(engine, "earlier")
    silence(engine, locks)
    engine.step(started(*chosen(engine, "first", "earlier")), [])
    assert {engine.outcomes[f"{name}-0"] for name in ("first", "earlier")} == {SILENT}
    answer(engine, locks)
    engine.close()
    assert reason_of(engine.path("first")) == SILENT
    assert_rows_stay(engine, "earlier")


@pytest.mark.parametrize(
    "hanging", [(RequestFile, "_made_data"), (FileSink, "publish")], ids=["rows", "publishing"]
)
def test_request_for_a_name_that_is_being_written_is_refused_and_leaves_no_reason(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, hanging: tuple[type, str]
) -> None:
    for storage in waiting(monkeypatch, hanging):
        engine = make_engine()
        engine.step(started(engine.start("mine", 3)), [])
        storage.clear()
        engine.step(NOTHING, [("mine", 0, 3)])
        engine.step(started(*chosen(engine, "mine")), [])
        assert engine.outcomes["mine-0"] == NAME_IN_USE
        answer(engine, storage)
        engine.close()
    assert engine.outcomes["mine"] is None
    engine.assert_file_is_right("mine", 3)
    assert not Path(f"{engine.path('mine')}.error").exists()
