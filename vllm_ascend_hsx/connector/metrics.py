"""HsxStats as Prometheus metrics, for `/metrics` and vLLM's other metric loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_ascend_hsx.connector.histogram import BUCKETS
from vllm_ascend_hsx.connector.stats import HsxStats

PREFIX = "vllm:hsx_"
OUTCOMES = ("published", "failed", "aborted")


class _Series(NamedTuple):
    """A metric's name, without PREFIX and the suffix _total, and the field `of` of HsxStats.

    The field divided by `unit` is the value in Prometheus.
    """

    name: str
    of: str
    documentation: str
    unit: float = 1


COUNTERS = (
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
    _Series(
        "backpressure_seconds",
        "backpressure_ns",
        "Time in which at least one new request was held back for storage.",
        1e9,
    ),
    _Series(
        "stall_seconds", "stall_ns", "Time that steps waited for storage, over all workers.", 1e9
    ),
    _Series(
        "reused_tokens",
        "reused_tokens",
        "Prompt tokens whose rows were copied from an earlier request and not computed.",
    ),
)
FILES = _Series("files", "files", "Finished files of hidden states, by outcome.")
FAILURES = _Series(
    "failures", "failures", "Failed files of hidden states, by errno name or other reason."
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
        "batch_bytes",
        "batch_bytes",
        "Part of the backlog that waits to be written in batches, by tensor-parallel rank.",
    ),
    _Series(
        "storage_bytes_per_second",
        "write_rate",
        "Bytes that storage takes per second while all writers are busy, by tensor-parallel rank.",
    ),
    _Series(
        "open_sources",
        "open_sources",
        "Files kept open for later requests with the same first tokens, by tensor-parallel rank.",
    ),
    _Series(
        "open_source_bytes",
        "open_source_bytes",
        "Bytes of open sources that consumers have removed, by tensor-parallel rank.",
    ),
)
LATENCIES = (
    _Series("copy_seconds", "copy", "Time from the issue of a device copy to its completion."),
    _Series("write_seconds", "write", "Duration of one write of hidden states to a file."),
    _Series(
        "publish_seconds", "publish", "Time from a file's last row on the host to its publication."
    ),
)


class HsxPromMetrics(KVConnectorPromMetrics):
    """All metrics of the connector, with one child of each per engine (DP rank).

    Children exist from the start, because rates must be right from the first event on. Only the
    children of FAILURES are created by the first failure with their reason.

    Args:
        vllm_config: vllm.config.VllmConfig; the tensor-parallel size is read.
        metric_types: maps prometheus_client's classes to replacements, for example Ray's.
        labelnames: vLLM's labels that identify the engine.
        per_engine_labelvalues: values of the labels, by engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        ranks = [str(rank) for rank in range(vllm_config.parallel_config.tensor_parallel_size)]
        gauge = partial(self._gauge_cls, multiprocess_mode="mostrecent")
        for series in COUNTERS:
            self._register(self._counter_cls, series)
        self._register(self._counter_cls, FILES, "outcome", OUTCOMES)
        self._register(self._counter_cls, FAILURES, "reason", ())
        self._register(gauge, REQUESTS_HELD)
        for series in BY_RANK:
            self._register(gauge, series, "tp_rank", ranks)
        for series in LATENCIES:
            self._register(partial(self._histogram_cls, buckets=list(BUCKETS)), series)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the stats of one engine.

        Histogram classes accept single values only. Each observation is passed on as the mean of
        the bucket. This keeps counts and sums exact. The observations are the chunks, writes and
        files since the last step.
        """
        stats = HsxStats(data=transfer_stats_data)

        def child(series: _Series, *label: str) -> Any:
            return self._metrics[series.of].labels(*self.per_engine_labelvalues[engine_idx], *label)

        for series in COUNTERS:
            child(series).inc(stats.counter(series.of) / series.unit)
        for outcome in OUTCOMES:
            child(FILES, outcome).inc(stats.counter(outcome))
        for reason, count in stats.failures.items():
            child(FAILURES, reason).inc(count)
        for held in stats.gauge(REQUESTS_HELD.of).values():
            child(REQUESTS_HELD).set(held)
        for series in BY_RANK:
            for rank, value in stats.gauge(series.of).items():
                child(series, rank).set(value)
        for series in LATENCIES:
            histogram = child(series)
            for count, sum_ns in zip(*stats.histogram(series.of), strict=True):
                for _ in range(count):
                    # The mean lies in the same bucket: both divisions are correctly rounded.
                    histogram.observe(sum_ns / count / 1e9)

    def _register(
        self,
        metric_class: Callable[..., Any],
        series: _Series,
        label: str | None = None,
        values: Iterable[str] = (),
    ) -> None:
        """Make a metric with one child per engine, or per engine and value of `label`."""
        labelnames = self._labelnames if label is None else [*self._labelnames, label]
        metric = metric_class(
            name=PREFIX + series.name, documentation=series.documentation, labelnames=labelnames
        )
        self._metrics[series.of] = metric
        for engine, extra in product(
            self.per_engine_labelvalues.values(), [()] if label is None else zip(values)
        ):
            metric.labels(*engine, *extra)
