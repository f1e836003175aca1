"""Our contestant: the production worker with threads and FileSink, without an engine.

This is the only benchmark module that uses internals of the package.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import vllm_ascend_hsx
from benchmarks.kv_cache import vllm_planner
from benchmarks.pipeline.peers import Contestant
from benchmarks.pipeline.rows import (
    DTYPE,
    MINIMAX_M2,
    STEP_TOKENS,
    Load,
    Source,
    Step,
    assert_files_are_right,
    npu,
    token_ids,
)
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.connector.extraction import Extraction
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RequestEnd, RequestStart
from vllm_ascend_hsx.connector.storage_watch import StorageRules
from vllm_ascend_hsx.connector.worker import ExtractionWorker
from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer
from vllm_ascend_hsx.drafter.landing import HostChunk
from vllm_ascend_hsx.drafter.ring import PinnedRing, ring_bytes_of
from vllm_ascend_hsx.drafter.spans import Span, rows_in_chunk, split_spans
from vllm_ascend_hsx.drafter.staging import StagingCache, StagingSlot
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.settings import ServerSettings
from vllm_ascend_hsx.sinks.storage import Storage
from vllm_ascend_hsx.target import ExtractionTarget

# kv_connector_extra_config, as a user would write it.
Options = Mapping[str, Any]
DEFAULTS: Options = {}
NO_CHECKSUM: Options = {"checksum": "none"}
DURABLE: Options = {"io": "direct", "durability": "fdatasync"}
DURABLE_NO_CHECKSUM: Options = {**DURABLE, **NO_CHECKSUM}


def server_settings(
    row_format: RowFormat, directory: Path, options: Options = DEFAULTS
) -> ServerSettings:
    """Return the settings of a server with these options."""
    layers = row_format.num_layers
    target = ExtractionTarget(
        row_format.model,
        row_format.layer_ids,
        tuple(range(layers)),
        row_format.hidden_size,
        STEP_TOKENS,
    )
    return ServerSettings(
        HsxConfig.parse({"shared_storage_path": str(directory), **options}),
        target,
        row_format,
        DTYPE,
    )


def num_writers() -> int:
    """Return the writer threads of a worker that has this machine for itself."""
    return server_settings(MINIMAX_M2, Path("/unused")).num_writers(1)()


def ring_bytes() -> int:
    """Return the pinned memory of a worker."""
    return ring_bytes_of(server_settings(MINIMAX_M2, Path("/unused")))


def _build_worker(settled: ServerSettings, staging: StagingCache) -> ExtractionWorker:
    """Build a worker like AscendHiddenStatesConnector."""
    config, row_format = settled.config, settled.row_format
    ring = PinnedRing(ring_bytes_of(settled), row_format.row_shape, settled.dtype)
    np.frombuffer(ring.data, np.uint8).fill(0)  # make it resident, like a driver's pinned memory
    return ExtractionWorker(
        rank=0,
        staging=staging,
        ring=ring,
        sink=settled.destination.make_sink(row_format, ring.data),
        num_writers=settled.num_writers(1),
        storage=StorageRules(
            config.storage_timeout_s, config.slow_storage, settled.destination.description
        ),
        check_finite=config.check_finite,
    )


@contextmanager
def _each_publication(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` after each file is published."""
    publish = Storage.publish

    def publish_and_tell(storage: Storage, name: str, target: Storage, new_name: str) -> None:
        publish(storage, name, target, new_name)
        tell()

    with patch.object(Storage, "publish", publish_and_tell):
        yield


def _settle(worker: ExtractionWorker) -> None:
    """Wait until all saved rows are in files, and the outcome of ended requests is decided."""
    copied = threading.Event()
    worker._lander.then(copied.set)
    copied.wait()
    worker._writers.wait()


class SourceSlot(StagingSlot):
    """Hand over a slot filled with source rows; the time to fill it is not measured."""

    def __init__(self, source: Source, step: Step) -> None:
        super().__init__(source.device[step.source : step.source + step.num_rows])
        self.spans = list(step.spans)
        self.host = source.host[step.source : step.source + step.num_rows]
        self.data = source.bytes_of(step.source, step.num_rows)
        self.written.record(npu().current_stream())


class Staging(StagingCache):
    """Return prepared slots instead of filling slots."""

    def ready(self, slot: StagingSlot) -> None:
        self._filled = slot


class Pipeline:
    """A worker as the connector builds it; the calling thread stands for the engine.

    Args:
        with_copy: True to copy from the NPU into the ring. Otherwise chunks are source rows on the
            host, as if a device's DMA engine had copied them; the ring still limits their number.
        options: kv_connector_extra_config, without the directory.
        on_host: called when a piece has arrived; only without the copy.
        on_published: called when a file is visible under the final name.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        *,
        with_copy: bool,
        options: Options = DEFAULTS,
        on_host: Callable[[], None] = lambda: None,
        on_published: Callable[[], None] | None = None,
    ) -> None:
        row_format, device = source.row_format, source.device.device
        settled = server_settings(row_format, directory, options)
        self.staging_slots = settled.config.staging_slots
        self.staging = Staging(
            num_slots=1,
            slot_rows=1,
            num_layers=row_format.num_layers,
            hidden_size=row_format.hidden_size,
            dtype=DTYPE,
            device=device,
            layer_order=settled.target.layer_order,
        )
        self.worker = _build_worker(settled, self.staging)
        self.ring: PinnedRing = self.worker._lander._ring
        self._on_host = on_host
        self._watched = ExitStack()
        if on_published is not None:
            self._watched.enter_context(_each_publication(on_published))
        self._condition = threading.Condition()
        self._decided: dict[str, str | None] = {}
        self._awaited: set[str] = set()
        self._tell_worker = self.worker._on_decided
        self.worker._on_decided = self._on_decided  # type: ignore[method-assign]
        self._ended: list[RequestEnd] = []
        if not with_copy:
            self.worker._lander._copy = self._deliver_source  # type: ignore[method-assign,assignment]

    def start(self, starts: Iterable[RequestStart]) -> None:
        """Begin a step."""
        self.worker.start_step(HsxConnectorMetadata(ended=self._ended, started=list(starts)))
        self._ended = []

    def save(self, slot: StagingSlot) -> None:
        """Complete a step."""
        self.staging.ready(slot)
        self.worker.save()
        self.worker.report()

    def wait_until_open(self) -> None:
        """Wait until the files of new requests have locks."""
        self.worker.report()

    def wait_until_written(self) -> None:
        """Wait until the files have all saved rows."""
        _settle(self.worker)

    def end(self, request_ids: Iterable[str], tokens: int) -> None:
        """End requests that have `tokens` rows, one of them of the prompt."""
        output = token_ids(tokens)[1:]
        self._ended += [RequestEnd(request_id, False, output) for request_id in request_ids]
        self.start([])

    def wait_for(self, request_ids: Iterable[str]) -> None:
        """Wait until the files are published; requests end with the next step, as in an engine."""
        wanted = set(request_ids)
        with self._condition:
            self._awaited = wanted - self._decided.keys()
            self._condition.wait_for(lambda: not self._awaited)
            reasons = {self._decided.pop(request_id) for request_id in wanted} - {None}
        if reasons:
            raise RuntimeError(f"requests failed: {reasons}")
        self._ended += [RequestEnd(request_id, aborted=False) for request_id in wanted]

    def close(self) -> None:
        self.start([])
        self.worker.close()
        self._watched.close()

    def _on_decided(self, extraction: Extraction, error: str | None) -> None:
        self._tell_worker(extraction, error)
        with self._condition:
            self._decided[extraction.request_id] = error
            self._awaited.discard(extraction.request_id)
            if not self._awaited:  # an engine is not woken for each file either
                self._condition.notify_all()

    def _deliver_source(self, slot: SourceSlot) -> None:
        """Replace Lander._copy."""
        lander, row_bytes, begin = self.worker._lander, self.ring.row_bytes, 0
        while begin < slot.num_rows:
            run = self.ring.wait(rows_in_chunk(slot.spans, begin, self.ring.rows_per_chunk))
            assert run is not None  # without a timeout
            end = begin + len(run.rows)
            data = slot.data[begin * row_bytes : end * row_bytes]
            self._on_host()
            spans = split_spans(slot.spans, begin, end)
            chunk = HostChunk(
                slot.host[begin:end], data, spans, slot.requests, self.ring, run.first
            )
            chunk.landed_at = chunk.issued_at
            lander._deliver(chunk)
            begin = end
        slot.copied.record(lander._stream)


class MainThread:
    """A step of the worker's main thread: proposer, cache-only layer, staging.

    The model, the runner and the connector's facade are left out. Tensor and pipeline parallelism
    are off, so the runner has nothing to pad or to coordinate.

    Args:
        max_tokens: tokens per step.
    """

    def __init__(
        self, row_format: RowFormat, directory: Path, device: torch.device, max_tokens: int
    ) -> None:
        import vllm_ascend.ops  # noqa: F401 - before spec_decode: vllm-ascend's modules import each other in circles
        from vllm.config import VllmConfig

        from vllm_ascend_hsx.drafter.proposer import HsxProposer

        vllm_planner.load()  # vLLM 0.30 chooses model runner V2, vllm-ascend's patches V1
        settled = server_settings(row_format, directory)
        staging = StagingCache(
            num_slots=settled.config.staging_slots,
            slot_rows=max_tokens,
            num_layers=row_format.num_layers,
            hidden_size=row_format.hidden_size,
            dtype=DTYPE,
            device=device,
            layer_order=settled.target.layer_order,
        )
        self._worker = _build_worker(settled, staging)
        name = "cache_only_layers.0"
        config = VllmConfig()
        self._proposer = HsxProposer.__new__(HsxProposer)
        self._proposer.runner = SimpleNamespace(
            _pad_for_sequence_parallelism=lambda num_tokens: num_tokens
        )
        self._proposer.vllm_config = config
        self._proposer.staging = staging
        self._proposer.model = AscendCacheOnlyLayer(staging, name, config)
        # Output of the target: one [tokens, hidden] per layer.
        self._rows = [
            torch.zeros(max_tokens, row_format.hidden_size, dtype=DTYPE, device=device)
            for _ in range(row_format.num_layers)
        ]
        self._sampled = torch.zeros(max_tokens, 1, dtype=torch.int64, device=device)
        self._ended: list[RequestEnd] = []

    def step(
        self, starts: Iterable[RequestStart], input_batch: Any, query_start_loc: torch.Tensor
    ) -> float:
        """Run one step and return the CPU time of this thread in seconds.

        Args:
            starts: requests that begin in the step.
            input_batch: the fields of the runner's batch that the proposer reads.
            query_start_loc: int32 [requests + 1] on the host.
        """
        metadata = HsxConnectorMetadata(ended=self._ended, started=list(starts))
        self._ended = []
        self._proposer.runner.input_batch = input_batch
        common = SimpleNamespace(query_start_loc_cpu=query_start_loc)
        target_rows = [rows[: int(query_start_loc[-1])] for rows in self._rows]
        sampled = self._sampled[: len(input_batch.req_ids)]
        began = time.thread_time()
        self._worker.start_step(metadata)
        self._proposer.propose(
            sampled_token_ids=sampled, target_hidden_states=target_rows, common_attn_metadata=common
        )
        self._worker.save()
        self._worker.report()
        return time.thread_time() - began

    def launches(self, num_rows: int) -> float:
        """Fill a slot like a step (stream, events and one launch); return the same as `step`."""
        staging = self._proposer.staging
        slot, rows = staging.slots[staging._next], [rows[:num_rows] for rows in self._rows]
        began = time.thread_time()
        staging._fill(slot, rows, [Span("launched", 0, num_rows, 0)])
        cost = time.thread_time() - began
        staging.take()
        return cost

    def settle(self) -> None:
        """Wait until nothing is in progress, to measure the next step alone."""
        _settle(self._worker)

    def end(self, request_ids: Iterable[str], *, complete: bool) -> None:
        """End the requests with the next step; incomplete ones are aborted."""
        self._ended += [RequestEnd(request_id, aborted=not complete) for request_id in request_ids]

    def close(self) -> None:
        self._worker.start_step(HsxConnectorMetadata(ended=self._ended))
        self._worker.close()


def start_of(
    request_id: str, path: Path, tokens: int, include_output: bool = False
) -> RequestStart:
    """Return the scheduler's description of a new request."""
    return RequestStart(request_id, str(path), 0, token_ids(tokens), include_output)


class Ours(Contestant):
    """Run steps one after the other, as fast as the staging slots allow."""

    def __init__(
        self, source: Source, directory: Path, *, with_copy: bool, options: Options = DEFAULTS
    ) -> None:
        super().__init__(source, directory)
        self._pipeline = Pipeline(source, directory, with_copy=with_copy, options=options)
        self._waves: list[list[tuple[list[RequestStart], SourceSlot]]] = []

    def prepare(self, load: Load) -> None:
        self._waves = [
            [
                (
                    [start_of(name, self.path(name), load.tokens) for name in step.begins],
                    SourceSlot(self.source, step),
                )
                for step in steps
            ]
            for steps in load.waves
        ]

    def run(self, load: Load) -> None:
        for steps in self._waves:
            for index, (starts, slot) in enumerate(steps):
                self._pipeline.start(starts)
                if index >= self._pipeline.staging_slots:
                    steps[index - self._pipeline.staging_slots][
                        1
                    ].issued.wait()  # it has the same memory, see StagingCache.write
                self._pipeline.save(slot)
            self._pipeline.wait_for(start.request_id for starts, _ in steps for start in starts)

    def verify(self, load: Load) -> None:
        for request_id, rows in load.expected(self.source.host).items():
            states = vllm_ascend_hsx.load(self.path(request_id), 0)
            assert_files_are_right(
                [({"hidden_states": states.hidden_states, "token_ids": states.token_ids}, rows)]
            )

    def close(self) -> None:
        self._pipeline.close()
