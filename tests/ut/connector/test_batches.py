"""Batches: rows that arrive one per step are written together, in order, in bounded memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_harness import FORMAT, NOTHING, Engine, ended, started

from vllm_ascend_hsx.connector import batches
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd
from vllm_ascend_hsx.protocol.rows import Rows
from vllm_ascend_hsx.sinks.request_file import RequestFile

BATCH_ROWS = 4


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", BATCH_ROWS * FORMAT.row_bytes)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record each write: request id, first position, number of rows."""
    found: list[tuple[str, int, int]] = []
    original = RequestFile.write

    def write(file: RequestFile, first: int, rows: Rows) -> None:
        found.append((file.request_id, first, memoryview(rows).nbytes // FORMAT.row_bytes))
        original(file, first, rows)

    monkeypatch.setattr(RequestFile, "write", write)
    return found


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(ring_rows=64)


def settle(engine: Engine) -> None:
    """Wait until all rows are collected or written."""
    engine.worker.drain_copies()
    assert engine.worker._writers.wait(30)


def decode(engine: Engine, request_id: str, first: int, end: int) -> None:
    """Generate one token per step. Each step is copied separately."""
    for position in range(first, end):
        engine.step(NOTHING, [(request_id, position, 1)])
        engine.worker.drain_copies()


def test_rows_of_generated_tokens_are_written_in_batches(
    engine: Engine, writes: list[tuple[str, int, int]]
) -> None:
    engine.step(started(engine.start("a", 3, include_output=True)), [("a", 0, 3)])
    decode(engine, "a", 3, 13)
    engine.step(ended("a", output=range(3, 13)), [])
    engine.close()
    assert writes == [("a", 0, 3), ("a", 3, 4), ("a", 7, 4), ("a", 11, 2)]
    engine.assert_file_is_right("a", 13)
    assert stats_bytes(engine) == 13 * FORMAT.row_bytes


def test_joined_rows_begin_at_a_page_for_direct_io(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    original = RequestFile.write

    def write(file: RequestFile, first: int, rows: Rows) -> None:
        written.append((first, address_of(memoryview(rows)) % 4096))
        original(file, first, rows)

    monkeypatch.setattr(RequestFile, "write", write)
    engine.step(started(engine.start("a", 1, include_output=True)), [])
    decode(engine, "a", 0, 8)
    engine.step(ended("a", output=range(1, 8)), [])
    engine.close()
    assert written == [(0, 0), (4, 0)]


def address_of(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def stats_bytes(engine: Engine) -> int:
    stats = engine.worker.take_stats()
    assert stats is not None
    return stats.counter("written_bytes")


def test_the_last_row_of_a_prompt_is_written_at_once(
    engine: Engine, writes: list[tuple[str, int, int]]
) -> None:
    engine.step(started(engine.start("a", 3)), [])
    decode(engine, "a", 0, 3)
    engine.wait_until_decided("a")
    assert writes == [("a", 0, 2), ("a", 2, 1)]
    engine.assert_file_is_right("a", 3)


def test_recomputed_rows_are_written_after_their_batch(
    engine: Engine, writes: list[tuple[str, int, int]]
) -> None:
    engine.values = {("a", position): -1.0 for position in range(5)}
    engine.step(started(engine.start("a", 1, include_output=True)), [("a", 0, 1)])
    decode(engine, "a", 1, 3)
    engine.values = {}
    engine.step(NOTHING, [("a", 0, 2)])  # preempted: it starts again
    decode(engine, "a", 2, 5)
    decode(engine, "a", 0, 1)  # preempted again, with a single row
    engine.step(ended("a", output=range(1, 5)), [])
    engine.close()
    assert writes == [("a", 0, 3), ("a", 0, 2), ("a", 2, 3), ("a", 0, 1)]
    engine.assert_file_is_right("a", 5)


def test_collected_rows_do_not_count_as_waiting_for_storage(engine: Engine) -> None:
    engine.step(started(engine.start("a", 1, include_output=True)), [])
    decode(engine, "a", 0, 2)
    settle(engine)
    progress = engine.worker._progress
    assert progress.backlog == 2 * FORMAT.row_bytes
    assert progress.stalled_for() == 0.0
    stats = engine.worker.take_stats()
    assert stats is not None
    assert stats.gauge("batch_bytes") == {"0": 2 * FORMAT.row_bytes}
    engine.step(ended("a", output=range(1, 2)), [])
    engine.close()
    assert (progress.backlog, engine.worker._batches.num_rows) == (0, 0)


def test_all_batches_are_written_when_they_hold_a_quarter_of_the_ring(
    make_engine: Callable[..., Engine], writes: list[tuple[str, int, int]]
) -> None:
    engine = make_engine(ring_rows=32)
    names = ["a", "b", "c"]
    engine.step(
        started(*(engine.start(name, 1, include_output=True) for name in [*names, "pauses"])),
        [("pauses", 0, 1)],
    )
    for position in range(2):
        engine.step(NOTHING, [(name, position, 1) for name in names])
        settle(engine)
    assert writes == []  # two rows of each request, and one
    engine.step(NOTHING, [(name, 2, 1) for name in names])
    settle(engine)
    assert sorted(writes) == [("a", 0, 3), ("b", 0, 3), ("c", 0, 3), ("pauses", 0, 1)]
    engine.step(
        HsxConnectorMetadata(ended=[RequestEnd(name, False, np.arange(1, 3)) for name in names]), []
    )
    engine.close()
    for name in names:
        engine.assert_file_is_right(name, 3)


def test_batches_are_written_when_the_ring_is_full(
    make_engine: Callable[..., Engine], writes: list[tuple[str, int, int]]
) -> None:
    engine = make_engine(ring_rows=16)
    engine.step(started(engine.start("a", 1, include_output=True), engine.start("prompt", 4)), [])
    decode(engine, "a", 0, 3)
    others = []  # like rows of requests with hanging writes
    while (run := engine.ring.take(16)) is not None:
        others.append((run.first, len(run.rows)))
    engine.step(NOTHING, [("prompt", 0, 4)])
    engine.wait_until_decided("prompt")
    assert writes[0] == ("a", 0, 3)
    engine.assert_file_is_right("prompt", 4)
    engine.ring.free(*others)
    engine.step(ended("a", aborted=True), [])
    engine.close()


@pytest.mark.parametrize("end", ["aborted", "failed", "server stops"])
def test_failed_request_leaves_no_rows_in_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    engine.step(started(engine.start("a", 3, include_output=True)), [("a", 0, 3)])
    decode(engine, "a", 3, 5)
    if end == "failed":
        settle(engine)
        engine.worker._owned["a"].fail("the test says so", "other")
        decode(engine, "a", 5, 6)
    if end != "server stops":
        engine.step(ended("a", aborted=True), [])
        settle(engine)
        assert not engine.worker._batches._open
    engine.close()
    assert engine.visible() == (set() if end == "aborted" else {"a.safetensors.error"})
    assert engine.worker._progress.backlog == 0
    assert not engine.worker._batches._open
    assert engine.ring.free_rows == engine.ring.num_rows


def test_a_row_of_a_batch_that_is_not_finite_fails_its_file(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(ring_rows=64, check_finite=True)
    engine.values = {("a", 2): float("nan")}
    engine.step(started(engine.start("a", 1, include_output=True)), [])
    decode(engine, "a", 0, 4)
    engine.close()
    assert "the row of token position 2 is not finite in layer 0" in str(engine.outcomes["a"])


@settings(max_examples=60)
@given(ring_rows=st.integers(6, 40), data=st.data())
def test_files_are_right_after_any_decodes_preemptions_and_aborts(
    tmp_path_factory: pytest.TempPathFactory, ring_rows: int, data: st.DataObject
) -> None:
    engine = Engine(tmp_path_factory.mktemp("run") / "out", ring_rows=ring_rows)
    with closing(engine):  # even if the example ends early
        prompts = {
            f"r{index}": data.draw(st.integers(1, 6))
            for index in range(data.draw(st.integers(1, 4)))
        }
        totals = {name: tokens + data.draw(st.integers(0, 12)) for name, tokens in prompts.items()}
        aborted = {name for name in prompts if data.draw(st.integers(0, 4)) == 0}
        metadata = started(
            *(engine.start(name, tokens, include_output=True) for name, tokens in prompts.items())
        )
        done = dict.fromkeys(prompts, 0)
        while done:
            spans = []
            for name in done:
                if data.draw(st.integers(0, 15)) == 0:
                    done[name] = 0  # preempted
                again = (
                    totals[name] - done[name]
                )  # after preemption, several rows are computed at once
                count = min(again, data.draw(st.integers(1, 3))) if done[name] == 0 else 1
                spans.append((name, done[name], count))
                done[name] += count
            engine.step(metadata, spans)
            ends = [name for name in done if done[name] == totals[name]]
            metadata = HsxConnectorMetadata(
                ended=[
                    RequestEnd(name, name in aborted, np.arange(prompts[name], totals[name]))
                    for name in ends
                ]
            )
            done = {name: rows for name, rows in done.items() if name not in ends}
        engine.step(metadata, [])
    assert engine.outcomes == dict.fromkeys(prompts)
    assert engine.visible() == {f"{name}.safetensors" for name in prompts if name not in aborted}
    for name in prompts.keys() - aborted:
        engine.assert_file_is_right(name, totals[name])
    assert engine.ring.free_rows == engine.ring.num_rows
    assert engine.worker._progress.backlog == 0
