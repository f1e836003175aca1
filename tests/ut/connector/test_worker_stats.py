"""The stats of a worker match the outcomes of its rows and files."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_harness import FORMAT, Engine, ended, started

from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata
from vllm_ascend_hsx.connector.stats import HsxStats
from vllm_ascend_hsx.sinks.base import SinkError


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "out", rank=0)
    yield engine
    engine.worker.close()


def stats_of(engine: Engine) -> HsxStats:
    """Return all stats once the worker is idle."""
    engine.close()
    stats = engine.worker.take_stats()
    assert stats is not None
    return stats


def observations(stats: HsxStats, name: str) -> int:
    return sum(stats.histogram(name)[0])


def replace_method(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, request_id: str, method: str, replacement: Any
) -> None:
    """Replace a method of the file of one request."""
    original = engine.sink.open

    def open_file(its_id: str, path: Path, expected_tokens: int, *more: Any) -> object:
        file = original(its_id, path, expected_tokens, *more)
        if its_id == request_id:
            monkeypatch.setattr(file, method, replacement)
        return file

    monkeypatch.setattr(engine.sink, "open", open_file)


def test_complete_requests_count_bytes_and_files(engine: Engine) -> None:
    engine.step(started(engine.start("a", 12), engine.start("b", 3)), [("a", 0, 8), ("b", 0, 3)])
    engine.step(HsxConnectorMetadata(), [("a", 8, 4)])
    stats = stats_of(engine)
    num_bytes = 15 * FORMAT.row_bytes
    assert [
        stats.counter(name) for name in ("copied_bytes", "written_bytes", "published_bytes")
    ] == [num_bytes] * 3
    assert (stats.counter("published"), observations(stats, "publish")) == (2, 2)
    assert (
        observations(stats, "copy") == 15
    )  # a chunk of this ring has one row; some rows are written together
    assert 2 <= observations(stats, "write") < 15
    assert (stats.counter("failed"), stats.counter("aborted"), stats.failures) == (0, 0, {})
    assert stats.gauge("backlog_bytes") == {"0": 0}
    assert 0 < stats.gauge("ring_fill")["0"] <= 1


def test_stats_are_sent_on_request_or_after_an_event(
    engine: Engine,
) -> None:
    for wanted in (False, True, False):
        engine.step(HsxConnectorMetadata(stats_wanted=wanted), [])
        assert (engine.worker.take_stats() is not None) == wanted


def test_recomputed_rows_are_written_twice_and_published_once(engine: Engine) -> None:
    engine.step(started(engine.start("a", 10)), [("a", 0, 6)])
    engine.step(HsxConnectorMetadata(), [("a", 0, 8)])
    engine.step(HsxConnectorMetadata(), [("a", 8, 2)])
    stats = stats_of(engine)
    assert (stats.counter("written_bytes"), stats.counter("published_bytes")) == (
        16 * FORMAT.row_bytes,
        10 * FORMAT.row_bytes,
    )
    assert stats.counter("published") == 1


def test_aborts_and_failures_are_counted_by_cause(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(first: int, rows: object) -> None:
        raise SinkError("full", engine.path("full"), "No space left on device") from OSError(
            errno.ENOSPC, "No space left on device"
        )

    def broken(token_ids: object, num_prompt_tokens: int) -> None:
        raise SinkError("broken", engine.path("broken"), "Input/output error") from OSError(
            errno.EIO, "Input/output error"
        )

    replace_method(engine, monkeypatch, "full", "write", full)
    replace_method(engine, monkeypatch, "broken", "commit", broken)
    engine.step(
        started(*(engine.start(name, 4) for name in ("full", "broken", "gone", "short", "good"))),
        [("full", 0, 4), ("broken", 0, 4), ("good", 0, 4), ("gone", 0, 2), ("short", 0, 2)],
    )
    engine.step(ended("gone", aborted=True), [])
    engine.step(ended("short"), [])
    stats = stats_of(engine)
    assert [stats.counter(name) for name in ("published", "failed", "aborted")] == [1, 3, 1]
    assert stats.failures == {"ENOSPC": 1, "EIO": 1, "missing_rows": 1}
    assert stats.counter("published_bytes") == 4 * FORMAT.row_bytes
    assert observations(stats, "publish") == 1


def test_full_ring_shows_in_fill_backlog_and_stall(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    replace_method(engine, monkeypatch, "slow", "write", lambda first, rows: go_on.wait())
    engine.step(started(engine.start("slow", 100)), [("slow", 0, 16)])
    engine.step(HsxConnectorMetadata(), [("slow", 16, 16)])
    stats = engine.worker.take_stats()
    while stats is None or stats.gauge("ring_fill") != {
        "0": 1.0
    }:  # until the lander has copied them
        stats = engine.worker.take_stats() or stats
    assert stats.gauge("backlog_bytes") == {"0": 32 * FORMAT.row_bytes}
    # Both slots wait for the full ring. Storage continues once the main thread waits for a slot.
    issued = engine.staging.slots[0].issued
    wait = issued.wait

    def wait_for_storage_that_goes_on(timeout: float | None = None) -> bool:
        go_on.set()
        return wait(timeout)

    monkeypatch.setattr(issued, "wait", wait_for_storage_that_goes_on)
    engine.step(HsxConnectorMetadata(), [("slow", 32, 16)])
    stats = stats_of(engine)
    assert stats.counter("stall_ns") > 0
    assert stats.gauge("backlog_bytes") == {"0": 0}
