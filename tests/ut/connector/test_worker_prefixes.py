"""The worker keeps files open, and copies the rows of a prefix from them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sink_harness import (
    FORMAT,
    finite_rows,
    make_rows,
    open_request,
    put,
    reason_of,
    rows_of,
    token_ids,
)
from worker_harness import NOTHING, PATIENCE, SILENT, Engine, ended, started

from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, Prefix, RequestStart
from vllm_ascend_hsx.connector.open_sources import OpenSources
from vllm_ascend_hsx.connector.threads import Job
from vllm_ascend_hsx.sinks.data_file import DataFile, RowSource
from vllm_ascend_hsx.sinks.file import FileSink

TOKENS = 8


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def publish(engine: Engine, number: int = 7) -> RequestStart:
    """Publish the request "source". The file stays open."""
    start = replace(engine.start("source", TOKENS), number=number, keeps_source=True)
    engine.step(started(start), [("source", 0, TOKENS)])
    engine.wait_until_decided("source")
    engine.step(ended("source"), [])
    assert engine.last_report.sources == {number}
    return start


def continuing(engine: Engine, request_id: str, num_rows: int, number: int = 7) -> RequestStart:
    """Return the start of a request that begins with rows of the source."""
    engine.values |= {
        (request_id, position): engine.value("source", position) for position in range(num_rows)
    }
    return replace(engine.start(request_id, TOKENS), number=8, prefix=Prefix(number, num_rows))


@contextmanager
def copies_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event. Copies begin when it is set, at the latest at the end of the block."""
    go_on = threading.Event()
    copy_to = RowSource.copy_to

    def wait(self: RowSource, *args: Any) -> None:
        assert go_on.wait(30)
        copy_to(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RowSource, "copy_to", wait)
        try:
            yield go_on
        finally:
            go_on.set()


def let_writers_pass(engine: Engine) -> None:
    """Wait until the second writer has run all jobs so far. The first writer copies."""
    delivered, passed = threading.Event(), threading.Event()
    engine.worker._lander.then(delivered.set)
    assert delivered.wait(30)
    engine.worker._writers.submit(passed.set)
    assert passed.wait(30)


def assert_right(engine: Engine, request_id: str, num_rows: int) -> None:
    rows = {
        position: engine.values.get((request_id, position), engine.value(request_id, position))
        for position in range(TOKENS)
    }
    from safetensors.torch import load_file

    found = load_file(engine.path(request_id))["hidden_states"][:, 1, 0].tolist()
    assert found == list(rows.values())
    assert num_rows == 0 or found[0] == engine.value("source", 0)


def test_file_has_copied_and_computed_rows(engine: Engine) -> None:
    publish(engine)
    engine.step(started(continuing(engine, "next", 5)), [("next", 5, 3)])
    engine.wait_until_decided("next")
    engine.collect()
    assert engine.outcomes["next"] is None
    assert_right(engine, "next", 5)
    assert engine.last_report is not None and engine.last_report.ranks[0].coming == 0
    assert engine.worker.take_stats().gauge("open_sources") == {"0": 1}  # type: ignore[union-attr]


def test_file_waits_for_the_copy_and_the_source_stays_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may release a source as soon as a request has started."""
    publish(engine)
    engine.path("source").unlink()
    with copies_wait(monkeypatch):
        engine.step(started(continuing(engine, "next", 5)), [("next", 5, 3)])
        engine.step(HsxConnectorMetadata(released=[7]), [])
        assert engine.worker.take_stats().gauge("open_sources") == {"0": 0}  # type: ignore[union-attr]
        assert not engine.path("next").exists()
    engine.wait_until_decided("next")
    assert_right(engine, "next", 5)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_recomputed_rows_are_written_after_the_copy(
    side_by_side: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a preemption. The recomputed rows differ here, so the order is visible."""
    engine = Engine(tmp_path, side_by_side=side_by_side)
    publish(engine)
    start = continuing(engine, "next", 5)
    with copies_wait(monkeypatch):
        engine.step(started(start), [("next", 5, 1)])
        engine.values |= {("next", 3): -3.0, ("next", 4): -4.0}
        engine.step(NOTHING, [("next", 3, 4)])
        let_writers_pass(engine)  # these rows would be written now if they did not wait
    engine.worker._writers.wait()
    engine.step(NOTHING, [("next", 7, 1)])  # the file would be complete without the waiting rows
    engine.wait_until_decided("next")
    engine.close()
    assert_right(engine, "next", 5)


def test_aborted_request_does_not_close_its_source(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine)
    with copies_wait(monkeypatch):
        engine.step(started(continuing(engine, "aborted", 5)), [("aborted", 5, 1)])
        engine.step(ended("aborted", aborted=True), [])
    engine.wait_until_decided("aborted")
    engine.step(started(continuing(engine, "next", 6)), [("next", 6, 2)])
    engine.wait_until_decided("next")
    assert_right(engine, "next", 6)
    assert not engine.path("aborted").exists()


def test_failed_copy_fails_only_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(engine)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(RowSource, "copy_to", fail)
        engine.step(started(continuing(engine, "failed", 5)), [("failed", 5, 3)])
        engine.wait_until_decided("failed")
    engine.step(started(continuing(engine, "next", 5)), [("next", 5, 3)])
    engine.wait_until_decided("next")
    engine.collect()
    assert "could not be copied from the file of an earlier request" in (
        engine.outcomes["failed"] or ""
    )
    assert "Input/output error" in reason_of(engine.path("failed"))
    assert_right(engine, "next", 5)


def test_request_without_its_source_fails_and_names_missing_rows(
    engine: Engine,
) -> None:
    publish(engine)
    engine.step(HsxConnectorMetadata(released=[7]), [])
    engine.step(started(continuing(engine, "next", 5)), [("next", 5, 3)])
    engine.step(ended("next"), [])
    engine.wait_until_decided("next")
    engine.collect()
    assert (
        engine.outcomes["next"]
        == f"the request ended without rows of token positions [0, 5) of {TOKENS}"
    )


def test_hanging_copy_counts_as_stalled_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, storage_timeout=PATIENCE)
    publish(engine)
    with copies_wait(monkeypatch):
        engine.step(started(continuing(engine, "next", 5)), [])
        deadline = threading.Event()
        while not engine.worker._watch.is_unresponsive:
            deadline.wait(0.01)
        engine.step(started(engine.start("refused", 3)), [("refused", 0, 3)])
    engine.collect()
    assert engine.outcomes["refused"] == SILENT
    engine.close()


def test_close_closes_all_open_sources(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    engine = Engine(tmp_path)
    publish(engine)
    last = replace(engine.start("last", TOKENS), number=9, keeps_source=True)
    engine.step(started(last), [("last", 0, TOKENS)])
    engine.close()
    new = [f"/proc/self/fd/{fd}" for fd in set(os.listdir("/proc/self/fd")) - before]
    assert not [
        fd for fd in new if os.path.lexists(fd) and os.readlink(fd).startswith(str(tmp_path))
    ]


# Open sources


def kept_source(tmp_path: Path, tokens: int = 5) -> tuple[RowSource, Path]:
    with FileSink(tmp_path, FORMAT) as sink:
        file = open_request(sink, tmp_path, tokens=tokens)
        file.keeps_source = True
        path = put(file, tokens)
    assert file.source is not None
    return file.source, path


def run_at_once(job: Job) -> None:
    job()


def is_open(source: RowSource) -> bool:
    return Path(f"/proc/self/fd/{source._fd}").exists()


def test_a_file_stays_open_until_its_last_user_releases_it(tmp_path: Path) -> None:
    kept = OpenSources(run_at_once)
    source, path = kept_source(tmp_path)
    kept.add(7, source)
    path.unlink()
    assert kept.retain(7) is source
    assert kept.retain(8) is None
    kept.release(7)
    assert kept.retain(7) is None
    assert is_open(source)
    with FileSink(tmp_path / "other", FORMAT) as sink:
        file = open_request(sink, tmp_path / "other", tokens=6)
        file.copy(source, 3)
        file.write(3, make_rows(3, 6))
        file.commit(token_ids(6), 6)
    source.release()
    assert not is_open(source)
    assert (rows_of(file.path)[:3] == finite_rows(0, 3)).all()


def test_close_releases_every_file_including_later_files(tmp_path: Path) -> None:
    kept = OpenSources(run_at_once)
    first, _ = kept_source(tmp_path / "first")
    late, _ = kept_source(tmp_path / "late")
    kept.add(1, first)
    kept.close()
    kept.add(2, late)
    assert not is_open(first)
    assert not is_open(late)


def test_removed_files_count_while_they_are_open(tmp_path: Path) -> None:
    now = 0.0
    kept = OpenSources(run_at_once, lambda: now)
    sources = [kept_source(tmp_path / name, 1000) for name in "ab"]
    for number, (source, _) in enumerate(sources):
        kept.add(number, source)
    assert not kept.needs_space()
    size = os.stat(sources[0][1]).st_blocks * 512
    sources[0][1].unlink()
    sources[1][1].rename(tmp_path / "moved")
    assert not kept.needs_space()
    assert kept.space() == (2, 0)  # files are counted once per second
    now = 1.0
    assert not kept.needs_space()
    assert kept.space() == (2, size)
    kept.close()
    assert kept.space() == (0, 0)


@pytest.mark.parametrize(("free", "needs"), [(3.9, True), (4.0, False)])
def test_removed_files_hold_at_most_a_quarter_of_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, needs: bool
) -> None:
    now = 1.0
    kept = OpenSources(run_at_once, lambda: now)
    for number in (0, 1):
        source, path = kept_source(tmp_path / str(number), 1000)
        kept.add(number, source)
        size = os.stat(path).st_blocks * 512
        if number:
            path.unlink()
    monkeypatch.setattr(RowSource, "free_space", int(free * size))
    kept.needs_space()  # begins a count
    assert kept.needs_space() is needs
    assert not kept.needs_space(), "once"
    kept.close()


@pytest.mark.parametrize(
    ("number", "needs"),
    [(errno.EIO, False), (errno.EDQUOT, True), (errno.ENOSPC, True), (errno.EMFILE, True)],
)
def test_request_without_space_releases_open_sources(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int, needs: bool
) -> None:
    publish(engine)
    reported: list[bool] = []
    collect = engine.collect
    monkeypatch.setattr(
        engine,
        "collect",
        lambda: (collect(), reported.append(engine.last_report.ranks[0].needs_space)),
    )
    monkeypatch.setattr(DataFile, "write", lambda *_: raise_error(number))
    engine.step(started(engine.start("full", TOKENS)), [("full", 0, TOKENS)])
    engine.wait_until_decided("full")
    engine.step(ended("full"), [])
    assert any(reported) is needs


def raise_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_hanging_storage_does_not_block_steps_through_open_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    now = 1.0
    kept = OpenSources(jobs.append, lambda: now)
    first, path = kept_source(tmp_path, 1000)
    kept.add(1, first)
    size = os.stat(path).st_blocks * 512
    path.unlink()
    with monkeypatch.context() as hanging:
        hanging.setattr("os.fstat", lambda fd: pytest.fail("fstat in a step"))
        hanging.setattr("os.close", lambda fd: pytest.fail("close in a step"))
        for now in (1.0, 2.0, 3.0):  # noqa: B007 - the clock
            assert not kept.needs_space()
            assert kept.space() == (1, 0)
        assert len(jobs) == 1  # no second count before the first one has ended
        assert kept.retain(1) is first
        first.release()
    jobs.pop()()
    assert kept.space() == (1, size)
    kept.release(1)
    assert is_open(first)
    while jobs:
        jobs.pop()()
    assert not is_open(first)
