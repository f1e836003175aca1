"""AscendHiddenStatesConnector: vLLM's interface to the scheduler side and the worker side."""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_ascend_hsx.checkpoint import weights_of
from vllm_ascend_hsx.compat.drafts import require_no_drafts
from vllm_ascend_hsx.compat.engine import Share, engine_of
from vllm_ascend_hsx.compat.runner import find_layers, tensor_parallel_rank
from vllm_ascend_hsx.connector.admission import Ranks, RequestLimits
from vllm_ascend_hsx.connector.budget import DirectoryBudget, StoredFiles
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, WorkerReport
from vllm_ascend_hsx.connector.metrics import HsxPromMetrics
from vllm_ascend_hsx.connector.prefixes import PrefixIndex
from vllm_ascend_hsx.connector.scheduler import ExtractionScheduler
from vllm_ascend_hsx.connector.stats import HsxStats
from vllm_ascend_hsx.connector.storage_watch import StorageRules
from vllm_ascend_hsx.connector.worker import ExtractionWorker
from vllm_ascend_hsx.drafter.ring import PinnedRing, ring_bytes_of
from vllm_ascend_hsx.protocol.api import ServerParams
from vllm_ascend_hsx.settings import ServerSettings, read_settings

logger = logging.getLogger(__name__)


class AscendHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Write the hidden states of each request to a file while it runs.

    The connector loads nothing and holds no KV block.

    Args:
        vllm_config: vllm.config.VllmConfig.
        role: scheduler or worker; selects the side to create.
        kv_cache_config: unused: the rows are not in the KV cache.

    Raises:
        UserError: if a setting or the store cannot be used.
    """

    _scheduler: ExtractionScheduler  # on the scheduler's side
    _worker: ExtractionWorker | None = None  # on a worker's side, until `shutdown`

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = read_settings(vllm_config)
        require_no_drafts(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            config = settings.config
            stored_row_bytes = settings.row_format.stored_row_bytes
            reuses = (
                config.prefix_reuse_bytes
                and config.prefix_reuse_files
                and config.sink != "mooncake"
            )
            prefixes = (
                PrefixIndex(config.prefix_reuse_files, config.prefix_reuse_bytes, stored_row_bytes)
                if reuses
                else None
            )
            destination = settings.destination
            self._scheduler = ExtractionScheduler(
                destination,
                Ranks(
                    vllm_config.parallel_config.tensor_parallel_size,
                    ring_bytes_of(settings),
                    settings.row_format.row_bytes,
                ),
                ServerParams(
                    destination.directory,
                    include_output=config.include_output_tokens,
                    allow_path=config.allow_custom_save_path,
                    extract_all=config.extract == "all",
                    sample_rate=config.sample_rate,
                ),
                limits=RequestLimits(
                    config.max_files_per_request, config.max_bytes_per_request, stored_row_bytes
                ),
                prefixes=prefixes,
                fingerprint=weights_of(vllm_config),  # the target is loaded
                budget=None
                if config.directory_budget_bytes is None
                else DirectoryBudget(
                    config.directory_budget_bytes,
                    engine_of(vllm_config.parallel_config).of,
                    settings.row_format,
                ),
            )
        else:
            self._worker = self._build_worker(settings)
            # An engine in the user's own process is not shut down when it is deleted or the process
            # ends (v1/engine/llm_engine.py:422). Exit handlers run in reverse order, so this
            # handler runs before the handlers of torch_npu.
            atexit.register(self.shutdown)

    def _build_worker(self, settings: ServerSettings) -> ExtractionWorker:
        from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer

        layers = find_layers(self._vllm_config, AscendCacheOnlyLayer)
        ((self._layer_name, layer),) = layers.items()
        config, row_format = settings.config, settings.row_format
        parallel = self._vllm_config.parallel_config
        self._drain_timeout, self._process = config.drain_timeout_s, os.getpid()
        files, directory = None, settings.destination.directory
        if config.directory_budget_bytes is not None and directory is not None:
            engine, tp_size = engine_of(parallel), parallel.tensor_parallel_size
            share = Share(engine.number * tp_size + tensor_parallel_rank(), engine.of * tp_size)
            files = StoredFiles.found_in(str(directory), share)
        ring = PinnedRing(ring_bytes_of(settings), row_format.row_shape, settings.dtype)
        logger.info(
            "the ring pins %.1f MiB of host memory for %d rows",
            ring.pinned_bytes / 2**20,
            ring.num_rows,
        )
        return ExtractionWorker(
            rank=tensor_parallel_rank(),
            staging=layer.staging,
            ring=ring,
            stored_row_bytes=row_format.stored_row_bytes,
            sink=settings.destination.make_sink(row_format, ring.data),
            num_writers=settings.num_writers(
                parallel.tensor_parallel_size * parallel.data_parallel_size_local
            ),
            storage=StorageRules(
                config.storage_timeout_s, config.slow_storage, settings.destination.description
            ),
            check_finite=config.check_finite,
            files=files,
        )

    # Scheduler side

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no KV block is delivered, so requests may be preempted (vLLM 0.26 and later)."""
        return False

    def beside_others(self) -> None:
        """Accept unknown parameters of requests; see compat.engine.name_other_connectors."""
        if self.role is KVConnectorRole.SCHEDULER:
            self._scheduler.beside_others()

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def extracts(self, request: Any) -> bool:
        """Return whether the request is extracted; see compat.engine.compute_extracted_tokens."""
        return self._scheduler.extracts(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return 0, because nothing is loaded, or None while the request must wait."""
        return (
            (None, False) if self._scheduler.must_wait(request, num_computed_tokens) else (0, False)
        )

    def end_request(self, request: Any) -> dict[str, Any] | None:
        """Return the request's `kv_transfer_params`; see compat.engine.answer_beside_others."""
        return self._scheduler.on_finished(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def reset_prefixes(self) -> None:
        """Reuse no rows that were computed before; see compat.engine.reset_rows_with_cache."""
        self._scheduler.reset_prefixes()

    def prefix_cache_is_empty(self) -> None:
        """Reuse rows again; see compat.engine.reset_rows_with_cache."""
        self._scheduler.prefix_cache_is_empty()

    def weights_may_change(self) -> None:
        """Begin a version of the weights; see compat.weights.follow_weights."""
        self._scheduler.weights_may_change()

    def weights_are_of(self, directory: str) -> None:
        """Record the checkpoint that was loaded; see compat.weights.follow_weights."""
        self._scheduler.weights.are(weights_of(self._vllm_config, directory))

    def name_weights(self, name: object) -> None:
        """Name the version of the weights. Raises ValueError; see compat.weights."""
        self._scheduler.weights.are_named(name)

    def server_stops(self) -> None:
        """Treat later aborts as caused by the server's stop; see compat.shutdown.stop_in_order."""
        self._scheduler.server_stops()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.take_report(connector_output.kv_connector_worker_meta)

    def take_report(self, report: KVConnectorWorkerMetadata | None) -> None:
        """Process the workers' report of a step; see compat.engine.report_before_answers."""
        if isinstance(report, WorkerReport):
            self._scheduler.on_worker_report(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.on_finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.on_finished(request)

    # Stats are recorded on both sides. vLLM asks the scheduler's side only if workers sent stats.

    def get_kv_connector_stats(self) -> HsxStats | None:
        side = self._scheduler if self.role is KVConnectorRole.SCHEDULER else self._worker
        return None if side is None else side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HsxStats:
        return HsxStats() if data is None else HsxStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HsxPromMetrics:
        return HsxPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the step.

        vLLM calls this before the forward pass. vLLM 0.30 calls `start_load_kv` after the forward
        pass (v1/worker/kv_connector_model_runner_mixin.py:86).
        """
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None
        assert isinstance(connector_metadata, HsxConnectorMetadata)
        self._worker.start_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: rows are never loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pass the filled slot on. Ignore the target's layers: vLLM calls this for every layer."""
        if layer_name == self._layer_name:
            assert self._worker is not None
            self._worker.save()

    def wait_for_save(self) -> None:
        """Do nothing: the rows are in a staging slot, and the engine does not overwrite it."""

    def before_sleep(self) -> None:
        """Keep nothing in device memory; see compat.engine.copy_before_sleep."""
        if self._worker is not None:
            self._worker.before_sleep()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        return self._worker.report()

    def engine_failed(self, error: Exception) -> None:
        """Fail all files with the text of `error`; see compat.failures."""
        if self._worker is not None:
            self._worker.fail(error)

    def ask_device(self) -> None:
        """Raise if the device has failed; see compat.failures.withhold_spoilt_output."""
        if self._worker is not None:
            self._worker.ask_device()

    def shutdown(self) -> None:
        """Write all computed rows, for at most drain_timeout_s, then end all threads."""
        worker, self._worker = self._worker, None
        # A forked child has a copy of this object, but owns neither the threads nor the files.
        if worker is not None and os.getpid() == self._process:
            atexit.unregister(self.shutdown)
            worker.close(self._drain_timeout)
