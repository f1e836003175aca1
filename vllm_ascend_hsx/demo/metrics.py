"""What the server counts: our series of GET /metrics, by engine, after a step of each engine has brought the last of it."""

import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from openai import OpenAI

from vllm_ascend_hsx.connector.histogram import quantile

PREFIX = "vllm:hsx_"
NOT_EXTRACTED = {"kv_transfer_params": {"hidden_states": False}}


class Count(NamedTuple):
    """One value of a series. labels lacks those that every series has."""

    name: str
    engine: str
    labels: Mapping[str, str]
    value: float


class Latency(NamedTuple):
    """One histogram, in figures: the seconds that half of them and 99 of 100 do not exceed."""

    name: str
    engine: str
    observations: int
    p50: float
    p99: float


class Metrics(NamedTuple):
    """What one scrape showed of our series."""

    counts: list[Count]
    latencies: list[Latency]

    @property
    def engines(self) -> list[str]:
        """In the order of their numbers."""
        return sorted({count.engine for count in self.counts}, key=int)

    def total(self, name: str, **labels: str) -> float:
        """Of all engines; labels restrict it."""
        return sum(each.value for each in self.counts if each.name == name and labels.items() <= each.labels.items())


def collect(url: str, timeout: float) -> Metrics:
    """Our series once every engine has said all it has counted.

    Raises:
        OSError, OpenAIError: the server did not answer within timeout seconds.
    """
    settle(url, scrape(url, timeout).engines, timeout)
    return scrape(url, timeout)


def settle(url: str, engines: Sequence[str], timeout: float) -> None:
    """Has each engine take one more step: what it counted since the last one is on /metrics then.

    Raises:
        OpenAIError: a request failed or took longer than timeout seconds.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0)
    model = client.models.list().data[0].id
    for engine in engines:
        headers = {"X-data-parallel-rank": engine}
        client.completions.create(model=model, prompt=[1], max_tokens=1, extra_headers=headers, extra_body=NOT_EXTRACTED)


def scrape(url: str, timeout: float) -> Metrics:
    """Our series as they are now.

    Raises:
        OSError: the server did not answer.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics", timeout=timeout) as response:
        return parse(response.read().decode())


def parse(text: str) -> Metrics:
    """Our series in the text of /metrics."""
    from prometheus_client.parser import text_string_to_metric_families  # a requirement of vLLM's, not of ours

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
        latencies.append(Latency(name, engine, upto[-1], quantile(single, 0.5), quantile(single, 0.99)))
    return Metrics(counts, latencies)
