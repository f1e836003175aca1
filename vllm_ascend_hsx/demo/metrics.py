"""Read this plugin's metrics from GET /metrics, by engine, after a last step of each engine."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx
from openai import OpenAI

from vllm_ascend_hsx.connector.histogram import quantile

PREFIX = "vllm:hsx_"
NOT_EXTRACTED = {"kv_transfer_params": {"hidden_states": False}}


class Count(NamedTuple):
    """One value of a metric. `labels` omits the labels that every metric has."""

    name: str
    engine: str
    labels: Mapping[str, str]
    value: float


class Latency(NamedTuple):
    """One histogram: median and 99th percentile in seconds."""

    name: str
    engine: str
    observations: int
    p50: float
    p99: float


class Metrics(NamedTuple):
    """This plugin's metrics at one time."""

    counts: list[Count]
    latencies: list[Latency]

    @property
    def engines(self) -> list[str]:
        """Engines in numerical order."""
        return sorted({count.engine for count in self.counts}, key=int)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all engines, restricted by labels."""
        return sum(
            each.value
            for each in self.counts
            if each.name == name and labels.items() <= each.labels.items()
        )


def collect(url: str, timeout: float) -> Metrics:
    """Return the metrics after every engine has reported all counts.

    Raises:
        HTTPError, OpenAIError: if the server did not answer within timeout seconds.
    """
    settle(url, scrape(url, timeout).engines, timeout)
    return scrape(url, timeout)


def settle(url: str, engines: Sequence[str], timeout: float) -> None:
    """Make each engine take one more step. It then reports the latest counts.

    Raises:
        OpenAIError: if a request failed or took longer than timeout seconds.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0)
    model = client.models.list().data[0].id
    for engine in engines:
        headers = {"X-data-parallel-rank": engine}
        client.completions.create(
            model=model, prompt=[1], max_tokens=1, extra_headers=headers, extra_body=NOT_EXTRACTED
        )


def scrape(url: str, timeout: float) -> Metrics:
    """Return the current metrics.

    Raises:
        HTTPError: if the server did not answer.
    """
    return parse(
        httpx.get(f"{url}/metrics", timeout=timeout, trust_env=False).raise_for_status().text
    )


def parse(text: str) -> Metrics:
    """Parse the text of /metrics."""
    # vLLM requires it; this package does not
    from prometheus_client.parser import text_string_to_metric_families

    counts, buckets = [], defaultdict(list)
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            engine = labels.pop("engine")
            labels.pop("model_name")
            if family.type == "histogram":
                if sample.name.endswith("_bucket"):
                    buckets[family.name, engine].append((float(labels["le"]), int(sample.value)))
            elif not sample.name.endswith("_created"):
                counts.append(Count(sample.name, engine, labels, sample.value))
    latencies = []
    for (name, engine), cumulative in buckets.items():
        upto = [0, *(count for _, count in sorted(cumulative))]
        single = [count - before for before, count in zip(upto, upto[1:], strict=False)]
        latencies.append(
            Latency(name, engine, upto[-1], quantile(single, 0.5), quantile(single, 0.99))
        )
    return Metrics(counts, latencies)
