"""The worker on an emulated NPU in late mode, with real files: faults affect one request."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_harness import FORMAT, MAX_TOKENS, NOTHING, Engine, ended, started

from vllm_ascend_hsx import load
from vllm_ascend_hsx.compat import adapters
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.connector import worker
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd
from vllm_ascend_hsx.connector.threads import ThreadPool
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.weights import WeightVersion
from vllm_ascend_hsx.settings import ServerSettings
from vllm_ascend_hsx.sinks.base import SinkError
from vllm_ascend_hsx.target import ExtractionTarget


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "out")
    yield engine
    engine.worker.close()


def test_file_is_published_after_the_last_row_before_the_request_ends(
    engine: Engine,
) -> None:
    engine.step(started(engine.start("a", 12)), [("a", 0, 8)])
    engine.step(HsxConnectorMetadata(), [("a", 8, 4)])
    engine.close()
    assert engine.outcomes == {"a": None}
    engine.assert_file_is_right("a", 12)


@pytest.mark.parametrize(
    ("spans", "include_output", "end", "kept"),
    [
        ([("a", 0, 8)], False, RequestEnd("a", True, most_kept=12), 8),
        (
            [("a", 0, 8), ("a", 8, 4), ("a", 12, 1)],
            True,
            RequestEnd("a", True, np.array([12, 13]), most_kept=14),
            13,
        ),
        (
            [("a", 0, 8), ("a", 8, 4)],
            True,
            RequestEnd("a", True, np.array([], np.int64), most_kept=12),
            12,
        ),
        ([("a", 0, 8)], False, RequestEnd("a", True, most_kept=3), 3),
        ([("a", 0, 8)], False, RequestEnd("a", True), 0),
        ([], False, RequestEnd("a", True, most_kept=12), 0),
    ],
    ids=[
        "in the prompt",
        "generating",
        "after the prompt",
        "rows of earlier weights follow",
        "not asked for",
        "nothing computed",
    ],
)
def test_an_aborted_request_keeps_the_rows_that_were_computed_and_their_tokens(
    engine: Engine,
    spans: list[tuple[str, int, int]],
    include_output: bool,
    end: RequestEnd,
    kept: int,
) -> None:
    start = replace(
        engine.start("a", 12, include_output=include_output),
        keeps_source=True,
        weights=(WeightVersion(0, "sft"),),
    )
    start = replace(start, placeholders=(Placeholder("image", 1, 4), Placeholder("image", 8, 3)))
    for index, span in enumerate(spans or [("a", 0, 0)]):
        engine.step(NOTHING if index else started(start), [span])
    engine.step(HsxConnectorMetadata(ended=[end]), [])
    engine.wait_until_decided("a")
    engine.collect()
    assert engine.outcomes == {"a": None}
    assert not engine.last_report.sources, "the scheduler does not know the number of rows"
    if not kept:
        assert not engine.path("a").exists()
        return
    engine.assert_file_is_right("a", kept)
    states = load(engine.path("a"), verify=True)
    assert states.metadata["aborted"] == "true"
    assert states.num_prompt_tokens == min(kept, 12)
    assert states.weight_versions == [WeightVersion(0, "sft")]
    assert states.placeholders == [
        each for each in [("image", 1, min(4, kept - 1)), ("image", 8, 3)] if each[1] < kept
    ]


def test_file_records_the_latest_weights_from_the_scheduler(engine: Engine) -> None:
    first, second = WeightVersion(0, "", "0a" * 16), WeightVersion(1, "step 1")
    engine.step(
        started(*(replace(engine.start(name, 6), weights=(first,)) for name in "ab")),
        [("a", 0, 3), ("b", 0, 6)],
    )
    engine.step(
        HsxConnectorMetadata(weights={"a": (first, second), "of another rank": (second,)}),
        [("a", 3, 3)],
    )
    engine.close()
    (a, b) = (load(engine.path(name), verify=True) for name in "ab")
    assert (a.weight_versions, a.metadata.get("weights")) == ([WeightVersion(0), second], None)
    assert (b.weight_versions, b.metadata["weights"]) == ([first], first.fingerprint)
    assert "aborted" not in a.metadata


@pytest.mark.parametrize(
    "when", ["before its last row", "after its last row", "with the same weights"]
)
def test_a_request_fails_if_other_weights_are_loaded_before_its_last_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    weights = {1: "old"}
    monkeypatch.setattr(adapters, "_loaded", weights)
    begun = [
        replace(engine.start(name, 8), lora=SimpleNamespace(lora_name=name, lora_int_id=number))
        for name, number in (("a", 1), ("b", 2))
    ]
    complete = when == "after its last row"
    engine.step(started(*begun), [("a", 0, 8 if complete else 4), ("b", 0, 4)])
    weights[1] = "old" if when == "with the same weights" else "new"
    weights[3] = "of another adapter"
    engine.step(HsxConnectorMetadata(), [("b", 4, 4)] if complete else [("a", 4, 4), ("b", 4, 4)])
    engine.close()
    reason = "adapter 'a' was reloaded with other weights before the last row of this request"
    assert engine.outcomes == {"a": reason if when == "before its last row" else None, "b": None}


def test_rows_of_other_owners_are_ignored(engine: Engine) -> None:
    engine.step(
        started(engine.start("mine", 3), engine.start("theirs", 5, owner=1)),
        [("theirs", 0, 5), ("mine", 0, 3)],
    )
    engine.close()
    assert engine.visible() == {"mine.safetensors"}
    engine.assert_file_is_right("mine", 3)


def test_preempted_request_recomputes_its_rows(engine: Engine) -> None:
    engine.step(started(engine.start("a", 10)), [("a", 0, 6)])
    engine.step(HsxConnectorMetadata(), [("a", 0, 8)])
    engine.step(
        HsxConnectorMetadata(), [("a", 8, 4)]
    )  # the last two of the prompt, then output from before the preemption
    engine.close()
    engine.assert_file_is_right("a", 10)


def test_no_rows_are_staged_after_the_prompt(engine: Engine) -> None:
    engine.step(started(engine.start("a", 5)), [("a", 0, 5)])
    assert engine.staging.wanted == {}
    engine.step(HsxConnectorMetadata(), [("a", 5, 1)])
    engine.step(ended("a"), [])
    engine.close()
    assert engine.outcomes == {"a": None}
    engine.assert_file_is_right("a", 5)


def test_rows_of_generated_tokens_are_published_at_the_end(
    engine: Engine,
) -> None:
    engine.step(started(engine.start("a", 5, include_output=True)), [("a", 0, 5)])
    for position in range(5, 9):
        engine.step(HsxConnectorMetadata(), [("a", position, 1)])
    assert engine.outcomes == {}
    # With asynchronous scheduling one more step was running: position 8 has an unwanted row.
    engine.step(ended("a", output=range(5, 8)), [])
    engine.wait_until_decided("a")  # no later step is needed
    engine.close()
    assert engine.outcomes == {"a": None}
    engine.assert_file_is_right("a", 8)


def test_request_with_missing_generated_rows_fails_and_names_them(engine: Engine) -> None:
    engine.step(started(engine.start("a", 5, include_output=True)), [("a", 0, 5)])
    engine.step(HsxConnectorMetadata(), [("a", 6, 1)])
    engine.step(ended("a", output=range(5, 7)), [])
    engine.close()
    assert engine.outcomes["a"] == "the request ended without rows of token positions [5, 6) of 7"
    assert engine.visible() == {"a.safetensors.error"}


def test_aborted_request_leaves_no_file(engine: Engine) -> None:
    engine.step(started(engine.start("a", 10), engine.start("b", 4)), [("a", 0, 6), ("b", 0, 4)])
    engine.step(ended("a", aborted=True), [])
    engine.close()
    assert engine.outcomes == {"a": None, "b": None}
    assert engine.visible() == {"b.safetensors"}
    assert not engine.path("a").with_name("a.safetensors.lock").exists()


def test_request_with_missing_rows_fails_and_names_them(engine: Engine) -> None:
    engine.step(started(engine.start("a", 10)), [("a", 0, 4)])
    engine.step(HsxConnectorMetadata(), [("a", 7, 2)])
    engine.step(ended("a"), [])
    engine.close()
    assert (
        engine.outcomes["a"]
        == "the request ended without rows of token positions [4, 7), [9, 10) of 10"
    )
    assert engine.visible() == {"a.safetensors.error"}


def test_end_of_a_decided_request_wakes_no_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.step(started(engine.start("a", 5)), [("a", 0, 5)])
    engine.wait_until_decided("a")
    woken: list[object] = []
    monkeypatch.setattr(engine.worker._lander, "then", woken.append)
    engine.step(ended("a"), [])
    assert woken == []
    monkeypatch.undo()
    engine.close()
    assert engine.outcomes == {"a": None}


def test_id_can_be_reused_once_its_file_is_decided(engine: Engine) -> None:
    engine.step(started(engine.start("b", 5)), [("b", 0, 5)])
    engine.wait_until_decided("b")
    engine.path("b").unlink()
    again = HsxConnectorMetadata(ended=[RequestEnd("b", False)], started=[engine.start("b", 7)])
    engine.step(again, [("b", 0, 7)])
    engine.close()
    assert engine.outcomes == {"b": None}
    engine.assert_file_is_right("b", 7)


def test_id_in_use_is_refused_and_the_first_file_is_unaffected(
    engine: Engine,
) -> None:
    engine.step(started(engine.start("b", 9)), [("b", 0, 5)])
    engine.step(started(engine.start("b", 7)), [])
    assert engine.outcomes["b"] == "another request with this id is running"
    engine.step(HsxConnectorMetadata(), [("b", 5, 4)])
    engine.close()
    engine.assert_file_is_right("b", 9)


def test_file_that_cannot_be_opened_fails_only_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.sink.open

    def open_file(request_id: str, path: Path, expected_tokens: int, *more: Any) -> object:
        if request_id == "a":
            raise SinkError(request_id, path, "Too many open files")
        return original(request_id, path, expected_tokens, *more)

    monkeypatch.setattr(engine.sink, "open", open_file)
    engine.step(started(engine.start("a", 3), engine.start("b", 3)), [("a", 0, 3), ("b", 0, 3)])
    engine.step(ended("a"), [])
    engine.close()
    assert engine.outcomes == {"a": "Too many open files", "b": None}
    engine.assert_file_is_right("b", 3)


def test_failed_write_fails_only_its_file_and_frees_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.sink.open

    def open_file(request_id: str, path: Path, expected_tokens: int, *more: Any) -> object:
        file = original(request_id, path, expected_tokens, *more)
        if request_id == "a":

            def write(first: int, rows: object) -> None:
                raise SinkError(request_id, path, "No space left on device")

            monkeypatch.setattr(file, "write", write)
        return file

    monkeypatch.setattr(engine.sink, "open", open_file)
    engine.step(started(engine.start("a", 9), engine.start("b", 7)), [("a", 0, 9), ("b", 0, 7)])
    engine.close()
    assert engine.outcomes == {"a": "No space left on device", "b": None}
    assert engine.visible() == {"a.safetensors.error", "b.safetensors"}
    engine.assert_file_is_right("b", 7)
    assert engine.ring.free_rows == 6
    assert engine.worker._progress.backlog == 0


def test_close_fails_incomplete_files_and_ends_all_threads(
    engine: Engine,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    engine.step(started(engine.start("a", 10), engine.start("b", 2)), [("a", 0, 4), ("b", 0, 2)])
    engine.close()
    assert engine.visible() == {"a.safetensors.error", "b.safetensors"}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hsx-")]
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int, str]]:
    """Draw requests: the number of tokens, and the end of each."""
    return [
        (
            f"r{index}",
            draw(st.integers(1, 30)),
            draw(st.sampled_from(["completes", "completes", "aborted early", "preempted"])),
        )
        for index in range(draw(st.integers(1, 7)))
    ]


@settings(max_examples=40)
@given(requests=lives(), data=st.data())
def test_every_request_is_decided_once_and_every_file_is_right(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[tuple[str, int, str]],
    data: st.DataObject,
) -> None:
    engine = Engine(tmp_path_factory.mktemp("run") / "out")
    waiting, done, ends = list(requests), dict.fromkeys((r[0] for r in requests), 0), []
    running: list[tuple[str, int, str]] = []
    preempted: set[str] = set()
    while waiting or running:
        metadata = HsxConnectorMetadata(ended=ends)
        ends = []
        if waiting and (not running or data.draw(st.booleans())):
            running.append(waiting.pop(0))
            metadata.started.append(engine.start(running[-1][0], running[-1][1]))
        budget, spans = MAX_TOKENS, []
        for request_id, num_tokens, fate in list(running):
            num_rows = min(budget, num_tokens - done[request_id], data.draw(st.integers(1, 8)))
            if num_rows <= 0:
                continue
            spans.append((request_id, done[request_id], num_rows))
            budget -= num_rows
            done[request_id] += num_rows
            finished = done[request_id] == num_tokens
            if fate == "aborted early" and not finished:
                running.remove((request_id, num_tokens, fate))
                ends.append(RequestEnd(request_id, True))
            elif fate == "preempted" and request_id not in preempted and not finished:
                preempted.add(request_id)
                done[request_id] = 0
            elif finished:
                running.remove((request_id, num_tokens, fate))
                ends.append(RequestEnd(request_id, False))
        engine.step(metadata, spans)
    engine.step(HsxConnectorMetadata(ended=ends), [])
    engine.close()
    complete = {request_id: num for request_id, num, _ in requests if done[request_id] == num}
    assert engine.outcomes == dict.fromkeys(r[0] for r in requests)
    assert engine.visible() == {f"{request_id}.safetensors" for request_id in complete}
    for request_id, num_tokens in complete.items():
        engine.assert_file_is_right(request_id, num_tokens)
    assert engine.ring.free_rows == 6
    assert engine.worker._progress.backlog == 0


def server_settings(directory: Path) -> ServerSettings:
    target = ExtractionTarget("tiny", FORMAT.layer_ids, (1, 0), FORMAT.hidden_size, MAX_TOKENS)
    config = HsxConfig.parse({"shared_storage_path": str(directory)})
    return ServerSettings(config, target, FORMAT, torch.float32)


@pytest.mark.parametrize(("cpus_then", "num_writers"), [(1, 2), (3, 3), (64, 8), (None, 2)])
def test_number_of_writers_follows_the_cpus_at_the_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cpus_then: int | None,
    num_writers: int,
) -> None:
    """vllm-ascend binds each worker to CPUs after the warm-up. None stands for no binding."""
    cpus = set(range(128))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    settings = server_settings(tmp_path)
    engine = Engine(tmp_path / "out", num_writers=settings.num_writers(64))
    assert engine.worker._writers.num_threads == 2
    if cpus_then is not None:
        cpus = set(range(cpus_then))
    with caplog.at_level(logging.INFO, worker.logger.name):
        engine.step(started(engine.start("a", 5)), [("a", 0, 5)])
    assert (
        f"rank 0: {num_writers} writers, on the {len(cpus)} CPUs of this process" in caplog.messages
    )
    engine.step(NOTHING, [])
    assert [message for message in caplog.messages if "writers" in message] == caplog.messages[:1]
    live = [thread for thread in engine.worker._writers._threads if thread.is_alive()]
    assert engine.worker._progress._write_rate.num_writers == len(live) == num_writers
    engine.close()
    assert engine.outcomes == {"a": None}
    assert not any(thread.is_alive() for thread in live)


def test_shrinking_pool_ends_threads_after_their_current_jobs() -> None:
    go_on = threading.Event()
    done: list[int] = []

    def job(number: int) -> None:
        go_on.wait()
        done.append(number)

    pool = ThreadPool(4, "pool")
    pool.submit(*(partial(job, number) for number in range(8)))
    pool.resize(1)
    go_on.set()
    assert pool.wait(30)
    assert sorted(done) == list(range(8))
    assert pool.close(30)
