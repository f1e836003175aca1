"""HsxStats as Prometheus metrics, for `/metrics` and vLLM's other metric loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_ascend_hsx.connector.histogram import BUCKETS, mean_seconds
from vllm_ascend_hsx.connector.stats import HsxStats

PREFIX = "vllm:hsx_"
OUTCOMES = ("published", "failed", "aborted")


class _Series(NamedTuple):
    """A metric's name, without PREFIX and the suffix _total, and its field in HsxStats."""

    name: str
    of: str
    documentation: str


BYTES = (
    _Series(
        "copied_bytes",
        "copied_bytes",
        "Bytes of hidden states copied from the device into pinned memory.",
    ),
    _Series(
        "written_bytes",
        "written_bytes",
        "Bytes of hidden states written to files, including files that failed later.",
    ),
    _Series(
        "published_bytes", "published_bytes", "Bytes of hidden states in files that were published."
    ),
)
SECONDS = (
    _Series(
        "backpressure_seconds",
        "backpressure_ns",
        "Time in which at least one new request was held back for storage.",
    ),
    _Series("stall_seconds", "stall_ns", "Time that steps waited for storage, over all workers."),
)
FILES = _Series("files", "", "Finished files of hidden states, by outcome.")
FAILURES = _Series(
    "failures",
    "failures",
    "Failed files of hidden states, by errno name or other reason.",
)
REQUESTS_HELD = _Series(
    "requests_held", "requests_held", "New requests that are held back for storage."
)
BY_RANK = (
    _Series(
        "ring_fill_ratio",
        "ring_fill",
        "Largest share of the pinned ring in use between two steps, by tensor-parallel rank.",
    ),
    _Series(
        "backlog_bytes",
        "backlog_bytes",
        "Bytes of hidden states computed but not yet written, by tensor-parallel rank.",
    ),
    _Series(
        "storage_bytes_per_second",
        "write_rate",
        "Bytes that storage takes per second while all writers are busy, by tensor-parallel rank.",
    ),
)
LATENCIES = (
    _Series("copy_seconds", "copy", "Time from the issue of a device copy to its completion."),
    _Series("write_seconds", "write", "Duration of one write of hidden states to a file."),
    _Series(
        "publish_seconds",
        "publish",
        "Time from a file's last row on the host to its publication.",
    ),
)


class HsxPromMetrics(KVConnectorPromMetrics):
    """All metrics of the connector, with one child of each per engine (DP rank).

    Children exist from the start, so that rates are right from the first event on.

    Args:
        vllm_config: vllm.config.VllmConfig; its tensor-parallel size is read.
        metric_types: maps prometheus_client's classes to those to use instead, such as Ray's.
        labelnames: vLLM's labels, which identify the engine.
        per_engine_labelvalues: their values, by engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        ranks = [str(rank) for rank in range(vllm_config.parallel_config.tensor_parallel_size)]
        self._counters = {
            series.of: self._per_engine(self._counter(series)) for series in BYTES + SECONDS
        }
        self._files = self._per_engine_and(OUTCOMES, self._counter(FILES, "outcome"))
        self._failures = self._counter(FAILURES, "reason")
        self._requests_held = self._per_engine(self._gauge(REQUESTS_HELD))
        self._by_rank = {
            series.of: self._per_engine_and(ranks, self._gauge(series, "tp_rank"))
            for series in BY_RANK
        }
        self._latencies = {
            series.of: self._per_engine(self._histogram(series)) for series in LATENCIES
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the stats of one engine.

        Histogram classes accept single values only. Each observation is passed on as the mean of
        its bucket, which keeps counts and sums exact. There is one for each chunk and file since
        the last step.
        """
        stats = HsxStats(data=transfer_stats_data)
        for series in BYTES:
            self._counters[series.of][engine_idx].inc(stats.counter(series.of))
        for series in SECONDS:
            self._counters[series.of][engine_idx].inc(stats.counter(series.of) / 1e9)
        for outcome in OUTCOMES:
            self._files[engine_idx, outcome].inc(stats.counter(outcome))
        for reason, count in stats.failures.items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(count)
        for held in stats.gauge(REQUESTS_HELD.of).values():
            self._requests_held[engine_idx].set(held)
        for series in BY_RANK:
            for rank, value in stats.gauge(series.of).items():
                self._by_rank[series.of][engine_idx, rank].set(value)
        for series in LATENCIES:
            histogram = self._latencies[series.of][engine_idx]
            for count, sum_ns in zip(*stats.histogram(series.of), strict=True):
                for _ in range(count):
                    histogram.observe(mean_seconds(count, sum_ns))

    def _counter(self, series: _Series, *labels: str) -> Any:
        return self._counter_cls(
            name=PREFIX + series.name,
            documentation=series.documentation,
            labelnames=[*self._labelnames, *labels],
        )

    def _gauge(self, series: _Series, *labels: str) -> Any:
        return self._gauge_cls(
            name=PREFIX + series.name,
            documentation=series.documentation,
            labelnames=[*self._labelnames, *labels],
            multiprocess_mode="mostrecent",
        )

    def _histogram(self, series: _Series) -> Any:
        return self._histogram_cls(
            name=PREFIX + series.name,
            documentation=series.documentation,
            labelnames=self._labelnames,
            buckets=list(BUCKETS),
        )

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {
            engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()
        }

    def _per_engine_and(self, last: Sequence[str], metric: Any) -> dict[tuple[int, str], Any]:
        engines = self.per_engine_labelvalues.items()
        return {
            (engine, value): metric.labels(*values, value)
            for engine, values in engines
            for value in last
        }
