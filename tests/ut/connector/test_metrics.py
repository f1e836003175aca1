"""Prometheus series through vLLM's classes: per engine, with other connectors, and in Ray."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial, reduce
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from documents import page
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics import ray_wrappers
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_ascend_hsx.connector.connector import AscendHiddenStatesConnector
from vllm_ascend_hsx.connector.histogram import BUCKETS
from vllm_ascend_hsx.connector.metrics import HsxPromMetrics
from vllm_ascend_hsx.connector.stats import HsxStats, SchedulerRecorder, StatsRecorder

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=2), kv_transfer_config=None
)


def metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    return {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}


def make_metrics(registry: CollectorRegistry) -> HsxPromMetrics:
    return AscendHiddenStatesConnector.build_prom_metrics(
        CONFIG, metric_types(registry), LABELS, ENGINES
    )


def take(recorder: StatsRecorder) -> HsxStats:
    stats = recorder.take()
    assert stats is not None
    return stats


def busy(rank: int) -> HsxStats:
    """Return the stats of a rank with every kind of event."""
    gauges = {
        "ring_fill": 0.25 * (rank + 1),
        "backlog_bytes": 100 * (rank + 1),
        "batch_bytes": 10 * (rank + 1),
    }
    recorder = StatsRecorder(
        rank,
        lambda: {**gauges, "open_sources": 3, "open_source_bytes": 30},
        lambda: 1e6 * (rank + 1),
    )
    recorder.copied(1000, 0.002)
    recorder.wrote(900, 0.004)
    recorder.published(1100, 0.0007)
    recorder.failed("ENOSPC")
    recorder.failed()
    recorder.aborted()
    recorder.stalled(0.5)
    return take(recorder)


def held() -> HsxStats:
    """Return the stats of a scheduler.

    It has held two requests for three seconds and reused two blocks.
    """
    clock = iter([0.0, 3.0])
    recorder = SchedulerRecorder(clock=lambda: next(clock))
    recorder.held(2)
    recorder.reused(256)
    stats = recorder.take()
    assert stats is not None
    return stats


def values(registry: CollectorRegistry, engine: int) -> dict[str, float]:
    """Return the values of one engine in /metrics, by name and other labels."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("engine") == str(engine):
                assert labels.pop("model_name") == "tiny"
                found[
                    sample.name.removeprefix("vllm:hsx_")
                    + "".join(f" {key}={value}" for key, value in labels.items())
                ] = sample.value
    return {
        name: value
        for name, value in found.items()
        if "_bucket" not in name and "_created" not in name
    }


EXPECTED = {
    "copied_bytes_total": 2000,
    "written_bytes_total": 1800,
    "published_bytes_total": 2200,
    "backpressure_seconds_total": 3,
    "stall_seconds_total": 1,
    "reused_tokens_total": 256,
    "files_total outcome=published": 2,
    "files_total outcome=failed": 4,
    "files_total outcome=aborted": 2,
    "failures_total reason=ENOSPC": 2,
    "failures_total reason=other": 2,
    "requests_held": 2,
    "ring_fill_ratio tp_rank=0": 0.25,
    "ring_fill_ratio tp_rank=1": 0.5,
    "backlog_bytes tp_rank=0": 100,
    "backlog_bytes tp_rank=1": 200,
    "batch_bytes tp_rank=0": 10,
    "batch_bytes tp_rank=1": 20,
    "storage_bytes_per_second tp_rank=0": 1e6,
    "storage_bytes_per_second tp_rank=1": 2e6,
    "open_sources tp_rank=0": 3,
    "open_sources tp_rank=1": 3,
    "open_source_bytes tp_rank=0": 30,
    "open_source_bytes tp_rank=1": 30,
    "copy_seconds_count": 2,
    "copy_seconds_sum": 0.004,
    "write_seconds_count": 2,
    "write_seconds_sum": 0.008,
    "publish_seconds_count": 2,
    "publish_seconds_sum": 0.0014,
}


def test_series_of_each_engine_start_at_zero() -> None:
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    zero = {
        name: 0 for name in EXPECTED if "failures" not in name
    }  # reasons are not known before they occur
    assert values(registry, 0) == values(registry, 1) == zero
    metrics.observe(reduce(HsxStats.aggregate, [busy(0), busy(1), held()]).data, 1)
    assert values(registry, 1) == pytest.approx(EXPECTED)
    assert values(registry, 0) == zero


def test_counters_add_up_and_gauges_keep_the_last_value() -> None:
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    for stats in (held(), busy(0), busy(0)):
        metrics.observe(stats.data, 0)
    found = values(registry, 0)
    assert (
        found["written_bytes_total"],
        found["files_total outcome=failed"],
        found["write_seconds_count"],
    ) == (1800, 4, 2)
    assert (
        found["ring_fill_ratio tp_rank=0"],
        found["requests_held"],
        found["backpressure_seconds_total"],
    ) == (0.25, 2, 3)


def test_the_documentation_lists_the_series_with_their_labels() -> None:
    registry = CollectorRegistry()
    make_metrics(registry).observe(busy(0).data, 0)
    made = {}
    for family in registry.collect():
        labels = [set(sample.labels) - {*LABELS, "le"} for sample in family.samples]
        if family.samples and not family.name.endswith("_created"):
            made[family.name + ("_total" if family.type == "counter" else "")] = ",".join(
                sorted(labels[0])
            )
    listed = re.findall(
        r"^\| `(vllm:hsx_\w+)(?:\{(\w+)\})?` \|", page("operations.md"), re.MULTILINE
    )
    assert dict(listed) == made


# Grafana's dashboard, docs/grafana.json.
DASHBOARD = json.loads(page("grafana.json"))
SERIES = re.compile(r"(vllm:hsx_\w+)(?:\{([^}]*)\})?(\[[^]]*\])?")


def labels_of_samples() -> dict[str, set[str]]:
    """Return the labels of each sample in /metrics, including the labels of histograms."""
    registry = CollectorRegistry()
    make_metrics(registry).observe(busy(0).data, 0)
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[tuple[str, str]]:
    """Return each expression of the dashboard with the legend, including variables."""
    variables = [
        (each["query"], "") for each in DASHBOARD["templating"]["list"] if each["type"] == "query"
    ]
    return variables + [
        (target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("query", "legend"), queries())
def test_dashboard_queries_use_existing_series_and_labels(query: str, legend: str) -> None:
    ((name, matchers, interval),) = SERIES.findall(query)
    labels = labels_of_samples()[name]
    grouped = re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query)))
    shown = re.findall(r"\{\{(\w+)\}\}", legend)
    asked = [re.split("=~", each)[0] for each in filter(None, matchers.split(","))]
    if query.startswith("label_values"):
        grouped = re.findall(r", (\w+)\)$", query)
    else:
        assert asked == LABELS
    assert {*grouped, *shown, *asked} <= labels and set(shown) <= set(grouped)
    # A failure reason has no series before the first failure, so a rate would miss this failure.
    is_counted = name.endswith(("_total", "_bucket")) and not name.endswith("failures_total")
    assert query.startswith("label_values") or ("rate(" in query) == bool(interval) == is_counted
    assert ("histogram_quantile" in query) == ("le" in grouped) == name.endswith("_bucket")


def test_the_dashboard_shows_every_series() -> None:
    shown = {
        re.sub("_bucket$", "", name)
        for query, legend in queries()
        if legend
        for name, *_ in SERIES.findall(query)
    }
    listed = re.findall(r"^\| `(vllm:hsx_\w+)", page("operations.md"), re.MULTILINE)
    assert shown == set(listed)


def test_dashboard_follows_grafanas_model() -> None:
    """The classic model: kinds/dashboard/dashboard_kind.cue of Grafana 10."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource", *LABELS]
    assert (
        8 <= len(DASHBOARD["uid"]) <= 40
        and DASHBOARD["title"]
        and "id" not in DASHBOARD
        and "version" not in DASHBOARD
    )
    used: set[tuple[int, int]] = set()
    for number, panel in enumerate(DASHBOARD["panels"], start=1):
        assert (
            panel["id"] == number
            and panel["type"] == "timeseries"
            and panel["title"]
            and panel["description"]
        )
        place = panel["gridPos"]
        cells = set(
            product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & used and place["x"] + place["w"] <= 24
        used |= cells
        assert panel["datasource"] == source and all(
            each["datasource"] == source for each in panel["targets"]
        )
        assert [each["refId"] for each in panel["targets"]] == list("ABC"[: len(panel["targets"])])
        assert (
            set(panel["fieldConfig"]) == {"defaults", "overrides"}
            and panel["fieldConfig"]["defaults"]["unit"]
        )
    assert len(used) == 24 * (1 + max(row for _, row in used)), "no gaps"


nanoseconds = st.one_of(
    st.integers(0, 20_000_000_000), st.sampled_from([round(bound * 1e9) for bound in BUCKETS])
)


@given(st.lists(st.lists(nanoseconds, max_size=20), max_size=4))
def test_histograms_equal_histograms_of_single_observations(steps: list[list[int]]) -> None:
    registry, reference = (
        CollectorRegistry(),
        Histogram("reference", "", buckets=BUCKETS, registry=None),
    )
    metrics = make_metrics(registry)
    recorder = StatsRecorder(0)
    for step in steps:
        for value in step:
            recorder.wrote(0, value / 1e9)
            reference.observe(int(value / 1e9 * 1e9) / 1e9)
        if stats := recorder.take():
            metrics.observe(stats.data, 0)
    (family,) = reference.collect()
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            name = sample.name.replace("reference", "vllm:hsx_write_seconds")
            value = registry.get_sample_value(
                name, {**sample.labels, "model_name": "tiny", "engine": "0"}
            )
            assert value == (
                pytest.approx(sample.value) if name.endswith("_sum") else sample.value
            ), name


# The whole way: workers' outputs, the scheduler's part, msgpack, loggers.


def payload(stats: Any) -> dict[str, Any]:
    """Return the stats in SchedulerStats: `data`, or since 0.30 the result of to_dict."""
    data: dict[str, Any] = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    return data


def sent(worker_stats: list[Any], scheduler_stats: Any) -> dict[str, Any]:
    """Send the stats of a step to the API server: KVOutputAggregator, scheduler, msgpack."""
    outputs = []
    for stats in worker_stats:
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(kv_connector_stats=stats)
        outputs.append(output)
    aggregated = KVOutputAggregator(expected_finished_count=len(outputs)).aggregate(outputs)
    assert aggregated is not None and aggregated.kv_connector_output is not None
    stats = aggregated.kv_connector_output.kv_connector_stats
    assert stats is not None
    if scheduler_stats is not None:
        stats = stats.aggregate(scheduler_stats)
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(payload(stats)))
    return found


def logged(connector: Any, data: dict[str, Any]) -> str:
    """Return vLLM's log line for these stats."""
    logging = KVConnectorLogging(None)
    logging.connector_cls = connector
    logging.observe(data)
    lines: list[str] = []
    logging.log(lambda text, *arguments: lines.append(text % arguments))
    (line,) = lines
    return line


@pytest.mark.parametrize("silent_rank", [None, 0, 1])
def test_stats_of_ranks_and_scheduler_reach_the_metrics(silent_rank: int | None) -> None:
    ranks = [None if rank == silent_rank else busy(rank) for rank in (0, 1)]
    data = sent(ranks, held())
    registry = CollectorRegistry()
    make_metrics(registry).observe(data, 0)
    found = values(registry, 0)
    assert found["written_bytes_total"] == 900 * sum(rank is not None for rank in ranks)
    assert found["requests_held"] == 2
    line = logged(AscendHiddenStatesConnector, data)
    assert f"Files={found['files_total outcome=published']:.0f}, " in line
    assert "Back-pressure (s)=3.0" in line


@pytest.mark.parametrize("shared_process", [False, True], ids=["own process", "shared process"])
def test_stats_arrive_through_multi_connector(
    shared_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        KVConnectorFactory._registry,
        AscendHiddenStatesConnector.__name__,
        lambda: AscendHiddenStatesConnector,
    )
    entry = (AscendHiddenStatesConnector, CONFIG)
    monkeypatch.setattr(
        MultiConnector,
        "_get_connector_classes_and_configs",
        classmethod(lambda cls, config: [entry]),
    )
    registry = CollectorRegistry()
    metrics = MultiConnector.build_prom_metrics(CONFIG, metric_types(registry), LABELS, ENGINES)

    def inside(stats: HsxStats) -> Any:
        made = MultiConnector.__new__(MultiConnector)
        ours = AscendHiddenStatesConnector.__new__(AscendHiddenStatesConnector)
        ours.get_kv_connector_stats = lambda: stats  # type: ignore[method-assign]
        made._connectors = [ours]
        return made.get_kv_connector_stats()

    data = sent([inside(busy(0)), inside(busy(1))], inside(held()))
    if shared_process:
        data = payload(inside(busy(0)).aggregate(inside(busy(1))).aggregate(inside(held())))
    metrics.observe(data, 0)
    assert values(registry, 0) == pytest.approx(EXPECTED)
    assert "'Files': 2, 'Failed': 4" in logged(MultiConnector, data)


class RayMetric:
    """The part of ray.util.metrics.Metric that vLLM's wrappers use. Records the values."""

    made: dict[str, Any] = {}  # noqa: RUF012

    def __init__(
        self,
        name: str,
        description: str,
        tag_keys: tuple[str, ...],
        boundaries: list[float] | None = None,
    ) -> None:
        assert boundaries is None or all(bound > 0 for bound in boundaries)
        self._tag_keys = tag_keys
        self.came: list[tuple[float, dict[str, str]]] = []
        self.made[name] = self

    def take(self, value: float, tags: dict[str, str]) -> None:
        assert math.isfinite(value) and set(tags) == set(self._tag_keys)
        self.came.append((value, tags))

    set = inc = observe = take


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, RayMetric]]:
    monkeypatch.setattr(
        ray_wrappers,
        "ray_metrics",
        SimpleNamespace(Gauge=RayMetric, Counter=RayMetric, Histogram=RayMetric),
    )
    yield RayMetric.made
    RayMetric.made.clear()


def test_rays_metric_classes_accept_the_stats(ray: dict[str, RayMetric]) -> None:
    wrappers = ray_wrappers.RayKVConnectorProm
    types = {
        Gauge: wrappers._gauge_cls,
        Counter: wrappers._counter_cls,
        Histogram: wrappers._histogram_cls,
    }
    metrics = AscendHiddenStatesConnector.build_prom_metrics(CONFIG, types, LABELS, ENGINES)
    metrics.observe(reduce(HsxStats.aggregate, [busy(0), busy(1), held()]).data, 1)
    assert [(value, tags["engine"]) for value, tags in ray["vllm_hsx_written_bytes"].came] == [
        (1800, "1")
    ]
    assert {tags["outcome"]: value for value, tags in ray["vllm_hsx_files"].came} == {
        "published": 2,
        "failed": 4,
        "aborted": 2,
    }
    assert {tags["tp_rank"]: value for value, tags in ray["vllm_hsx_ring_fill_ratio"].came} == {
        "0": 0.25,
        "1": 0.5,
    }
    assert [value for value, _ in ray["vllm_hsx_write_seconds"].came] == pytest.approx(
        [0.004, 0.004]
    )
