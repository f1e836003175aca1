"""A worker on an emulated NPU with real files, and the calls of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from safetensors.torch import load_file
from sink_harness import listing

from vllm_ascend_hsx.connector.extraction import Extraction
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart
from vllm_ascend_hsx.connector.storage_watch import StorageRules
from vllm_ascend_hsx.connector.worker import ExtractionWorker
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.spans import Span
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.file import FileSink

LAYERS, HIDDEN, MAX_TOKENS = 2, 4, 16
FORMAT = RowFormat(layer_ids=(3, 1), hidden_size=HIDDEN, dtype="F32", model="tiny")
DEVICE = torch.device("npu:0")
PATIENCE = 0.3
SILENT = f"the storage did not answer for {PATIENCE:g} s"
NOTHING = HsxConnectorMetadata()


class Engine:
    """A worker, the calls of an engine, and the expected value of every row."""

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        storage_timeout: float = 30.0,
        check_finite: bool = False,
        ring_rows: int = 6,
        side_by_side: bool = False,
        slow_storage: Literal["wait", "fail"] = "wait",
        slot_rows: int = MAX_TOKENS,
        num_writers: Callable[[], int] = lambda: 2,
        rotation: torch.Tensor | None = None,
    ) -> None:
        self.directory = directory
        self.threads_before = frozenset(threading.enumerate())
        staging = StagingCache(
            num_slots=2,
            slot_rows=slot_rows,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            dtype=torch.float32,
            device=DEVICE,
            layer_order=(1, 0),
            rotation=None if rotation is None else rotation.to(DEVICE),
        )
        self.staging = staging
        self.sink = FileSink(directory, FORMAT)
        # As with direct I/O. Rows of this size are too small for direct I/O.
        self.sink.writes_side_by_side = side_by_side
        self.ring = PinnedRing(ring_rows * FORMAT.row_bytes, FORMAT.row_shape, torch.float32)
        self.worker = ExtractionWorker(
            rank=rank,
            staging=staging,
            ring=self.ring,
            sink=self.sink,
            num_writers=num_writers,
            storage=StorageRules(storage_timeout, slow_storage, str(directory)),
            check_finite=check_finite,
        )
        self.values: dict[tuple[str, int], float] = {}  # values of rows with an unusual value
        self.outcomes: dict[str, str | None] = {}
        self._decided = threading.Condition()
        report_decision = self.worker._on_decided

        def on_decided(extraction: Extraction, error: str | None) -> None:
            with self._decided:
                report_decision(extraction, error)
                self._decided.notify_all()

        self.worker._on_decided = on_decided

    def path(self, request_id: str) -> Path:
        return self.directory / f"{request_id}.safetensors"

    def start(
        self, request_id: str, num_tokens: int, owner: int = 0, include_output: bool = False
    ) -> RequestStart:
        return RequestStart(
            request_id,
            str(self.path(request_id)),
            owner,
            np.arange(num_tokens, dtype=np.int64),
            include_output,
        )

    def value(self, request_id: str, position: int) -> float:
        return float(sum(request_id.encode()) * 1000 + position)

    def step(self, metadata: HsxConnectorMetadata, spans: list[tuple[str, int, int]]) -> None:
        """Run an engine step. Spans are (request, first position, rows), in batch order."""
        self.worker.start_step(metadata)
        rows, staged = torch.zeros(MAX_TOKENS, HIDDEN), []
        at = 0
        for request_id, first, num_rows in spans:
            for offset in range(num_rows):
                position = first + offset
                rows[at + offset] = self.values.get(
                    (request_id, position), self.value(request_id, position)
                )
            if self.staging.wanted.get(request_id, 0) > first:
                staged.append(
                    Span(
                        request_id,
                        first,
                        min(num_rows, self.staging.wanted[request_id] - first),
                        at,
                    )
                )
            at += num_rows
        if staged:
            self.staging.write([rows.to(DEVICE), (rows + 0.5).to(DEVICE)], staged)
        self.worker.save()
        self.collect()

    def wait_until_decided(self, request_id: str) -> None:
        with self._decided:
            assert self._decided.wait_for(lambda: request_id in self._known_outcomes(), timeout=30)

    def _known_outcomes(self) -> set[str]:
        return {
            *self.outcomes,
            *(extraction.request_id for extraction, _ in self.worker._progress._decided),
        }

    def collect(self) -> None:
        report = self.worker.report()
        if report is not None:
            self.last_report = report
            self.outcomes |= report.outcomes

    def close(self) -> None:
        self.worker.close()
        self.collect()

    def assert_file_is_right(self, request_id: str, num_tokens: int) -> None:
        tensors = load_file(self.path(request_id))
        expected = torch.tensor(
            [self.value(request_id, position) for position in range(num_tokens)]
        )
        # Layer ids (3, 1): the first layer of a row is the second collected layer.
        assert torch.equal(
            tensors["hidden_states"][:, 0], (expected + 0.5).unsqueeze(1).expand(-1, HIDDEN)
        )
        assert torch.equal(tensors["hidden_states"][:, 1], expected.unsqueeze(1).expand(-1, HIDDEN))
        assert tensors["token_ids"].tolist() == list(range(num_tokens))

    def visible(self) -> set[str]:
        return {name for name in listing(self.directory) if not name.endswith(".lock")}


def started(*starts: RequestStart) -> HsxConnectorMetadata:
    return HsxConnectorMetadata(started=list(starts))


def ended(request_id: str, aborted: bool = False, output: range = range(0)) -> HsxConnectorMetadata:
    return HsxConnectorMetadata(
        ended=[RequestEnd(request_id, aborted, np.array(output, dtype=np.int64))]
    )


def failures(engine: Engine) -> dict[str, int]:
    """Return the number of requests that have failed since the last call, by kind."""
    stats = engine.worker.take_stats()
    assert stats is not None
    return dict(stats.failures)


def waiting(monkeypatch: pytest.MonkeyPatch, *calls: tuple[type, str]) -> Iterator[threading.Event]:
    """Make methods wait for an event. The event is set at first, and again at the end."""
    answers = threading.Event()
    answers.set()
    for owner, name in calls:
        original = getattr(owner, name)

        def wait(*args: Any, _original: Any = original) -> Any:
            answers.wait()
            return _original(*args)

        monkeypatch.setattr(owner, name, wait)
    yield answers
    answers.set()


def silence(engine: Engine, storage: threading.Event) -> None:
    """Stall the storage, with a short timeout. A slow disk may otherwise need a longer timeout."""
    storage.clear()
    engine.worker._watch.storage_timeout = PATIENCE


def answer(engine: Engine, storage: threading.Event) -> None:
    engine.worker._watch.storage_timeout = 30.0
    storage.set()


def fill_ring(engine: Engine, storage: threading.Event) -> None:
    """Stall the storage until the worker considers it unresponsive."""
    engine.step(started(engine.start("filler", 200)), [("filler", 0, 8)])
    silence(engine, storage)
    fill_up(engine)


def fill_up(engine: Engine) -> None:
    """Stage rows of "filler" after the first 8, until a step finds no slot."""
    position = 8
    while "filler" not in engine.outcomes:
        engine.step(NOTHING, [("filler", position, 16)])
        position += 16
