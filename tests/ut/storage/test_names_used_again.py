"""A chosen name that is used again while the storage hangs never answers with other rows."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sink_harness import reason_of as reason
from worker_harness import FORMAT, NOTHING, SILENT, Engine, answer, fill_ring, fill_up, silence, started, waiting

from vllm_ascend_hsx.connector.metadata import RequestStart
from vllm_ascend_hsx.connector.worker import NAME_IN_USE
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.reader import load as reader
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.reader.shards import Place
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

ARRIVED = 10**18  # when the requests of these tests do


def publish(engine: Engine, name: str, arrived_ns: int = ARRIVED - 1) -> None:
    """Publish a row under a name, as another rank does in the same directory."""
    with FileSink(engine.directory, FORMAT) as sink:
        file = sink.open("other", engine.path(name), arrived_ns=arrived_ns)
        file.write(0, memoryview(bytes(FORMAT.row_bytes)))
        file.commit(np.arange(1, dtype=np.int64), 1)


def a_later_file(engine: Engine) -> Path:
    """Return the file of a later request, to be copied while storage hangs."""
    publish(engine, "copied", ARRIVED + 1)
    return engine.path("copied").rename(engine.directory / "copied")


def chosen(engine: Engine, *names: str) -> list[RequestStart]:
    return [RequestStart(f"{name}-0", str(engine.path(name)), 0, np.arange(3, dtype=np.int64), arrived_ns=ARRIVED) for name in names]


def test_no_earlier_rows_are_taken_for_those_of_a_request_that_hanging_storage_failed(
    make_engine: Callable[..., Engine], storage: threading.Event
) -> None:
    engine = make_engine()
    publish(engine, "earlier")
    later = a_later_file(engine)
    fill_ring(engine, storage)
    shutil.copyfile(engine.path("earlier"), engine.path("meanwhile"))  # as another rank publishes
    engine.step(started(*chosen(engine, "earlier", "meanwhile", "new", "later")), [])
    shutil.copyfile(later, engine.path("later"))
    answer(engine, storage)
    engine.close()
    assert {engine.outcomes[f"{name}-0"] for name in ("earlier", "meanwhile", "new", "later")} == {SILENT}
    assert [reason(engine.path(name)) for name in ("earlier", "meanwhile", "new")] == [SILENT] * 3
    assert not engine.path("earlier").exists() and not engine.path("meanwhile").exists()
    assert load(engine.path("later")).hidden_states.shape[0] == 1, "a later request's rows stay"
    assert not Path(f"{engine.path('later')}.error").exists()


def test_a_file_that_opens_after_its_request_has_failed_hides_earlier_rows_and_no_later_ones(
    make_engine: Callable[..., Engine], locks: threading.Event
) -> None:
    engine = make_engine()
    publish(engine, "earlier")
    later = a_later_file(engine)
    silence(engine, locks)
    engine.step(started(*chosen(engine, "first", "earlier", "later")), [])
    for name in ("first", "later"):  # the first one is being opened
        shutil.copyfile(later, engine.path(name))
    answer(engine, locks)
    engine.close()
    assert {engine.outcomes[f"{name}-0"] for name in ("first", "earlier", "later")} == {SILENT}
    assert reason(engine.path("earlier")) == SILENT
    assert not engine.path("earlier").exists()
    for name in ("first", "later"):
        assert load(engine.path(name)).hidden_states.shape[0] == 1
        assert not Path(f"{engine.path(name)}.error").exists()


@pytest.mark.parametrize("noticed", [True, False], ids=["silence is noticed", "it is not yet"])
@pytest.mark.parametrize("hanging", [(RequestFile, "_made_data"), (FileSink, "publish")], ids=["rows", "publishing"])
def test_a_request_that_was_refused_while_another_one_of_its_name_was_written_leaves_its_reason_and_no_rows(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, hanging: tuple[type, str], noticed: bool
) -> None:
    """A reader that waits for the refused request wakes up when the other one's lock is free."""
    seen: list[str] = []
    release = HeldLock.release

    def release_to_a_reader(self: HeldLock) -> None:
        release(self)
        if engine.path("mine").name in self._name:
            try:
                seen.append(f"{len(load(engine.path('mine'), timeout=0).token_ids)} rows")
            except HiddenStatesError as failed:
                seen.append(str(failed))

    monkeypatch.setattr(HeldLock, "release", release_to_a_reader)
    for storage in waiting(monkeypatch, hanging):
        engine = make_engine()
        engine.step(started(engine.start("mine", 3), engine.start("other", 3), engine.start("filler", 200)), [])
        if noticed:
            silence(engine, storage)
        storage.clear()
        engine.step(NOTHING, [("mine", 0, 3), ("other", 0, 3), ("filler", 0, 8)])
        if noticed:
            fill_up(engine)
        engine.step(started(*chosen(engine, "mine")), [])
        answer(engine, storage)
        engine.close()
    refused = SILENT if noticed else NAME_IN_USE
    assert engine.outcomes["mine"] == f"a later request of this name has failed: {refused}"
    assert engine.outcomes["mine-0"] == refused
    assert engine.outcomes["other"] is None
    assert seen and all(refused in reason for reason in seen)
    assert reason(engine.path("mine")) == refused
    assert not engine.path("mine").exists()


def test_a_name_is_never_without_rows_while_its_next_request_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks of a reader one request of a shard may begin, publish and drop its lock."""
    path = tmp_path / "a.safetensors"
    with ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink:

        def begin() -> RequestFile:
            file = sink.open("a", path, 1)
            file.write(0, memoryview(bytes(FORMAT.row_bytes)))
            return file

        def commit(file: RequestFile) -> None:
            file.commit(np.arange(1, dtype=np.int64), 1)

        commit(begin())
        under_way: list[RequestFile] = []
        wait, stored = reader.wait_until_released, reader._stored

        def wait_and_begin(lock: Path, timeout: float | None) -> None:
            wait(lock, timeout)
            under_way.append(begin())

        def look_and_publish(where: Path) -> Place | None:
            found = stored(where)
            if under_way:
                commit(under_way.pop())
            return found

        monkeypatch.setattr(reader, "wait_until_released", wait_and_begin)
        monkeypatch.setattr(reader, "_stored", look_and_publish)
        assert load(path, 10).token_ids.tolist() == [0]
