"""/metrics counts the outcomes of requests, with our connector alone and in MultiConnector.

DP x TP: test_data_parallel.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import page
from harness import tokens
from releases import installed_is
from session import EngineSession
from test_multi_connector import INSTRUMENTS, multi_config

from vllm_ascend_hsx.demo.metrics import Metrics, parse
from vllm_ascend_hsx.serve.options import kv_transfer_config

ROW_BYTES = 3 * 256 * 4
RING_ROWS = 16
OPTS_OUT = {"extra_args": {"kv_transfer_params": {"hidden_states": False}}}


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "in MultiConnector"])
def session(
    request: pytest.FixtureRequest, float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineSession]:
    directory = tmp_path_factory.mktemp("metrics")
    config: dict[str, Any] = kv_transfer_config(directory / "hidden_states")
    ours = config
    if request.param:
        config = multi_config(directory / "hidden_states")
        ours = config["kv_connector_extra_config"]["connectors"][0]
    ours["kv_connector_extra_config"]["pinned_ring_bytes"] = RING_ROWS * ROW_BYTES
    with EngineSession(
        directory,
        float32_qwen3,
        dtype="float32",
        kv_transfer_config=config,
        instruments=INSTRUMENTS,
    ) as session:
        if installed_is("<0.30"):
            session.call("record_all_stats")
        yield session


def scrape(session: EngineSession) -> Metrics:
    return parse(session.call("metrics"))


def scrape_all(session: EngineSession) -> Metrics:
    """Scrape when all is written and one more step has carried the stats."""
    session.drain()
    session.call("finish_writes")
    session.add(tokens(2), {"max_tokens": 1, **OPTS_OUT}, name="last-word")
    session.drain()
    return scrape(session)


def growth(before: Metrics, after: Metrics) -> dict[str, float]:
    """Return the increase of each counter that has grown."""

    def totals(metrics: Metrics) -> dict[str, float]:
        return {
            f"{each.name} {' '.join(each.labels.values())}".strip(): each.value
            for each in metrics.counts
            if "_total" in each.name
        }

    start = totals(before)
    grown = {
        name.removeprefix("vllm:hsx_"): value - start.get(name, 0)
        for name, value in totals(after).items()
    }
    return {name: value for name, value in grown.items() if value}


def test_files_bytes_aborts_and_failures_are_counted(session: EngineSession) -> None:
    before = scrape_all(session)
    gone = session.add(tokens(300), {"max_tokens": 1})
    session.step(2)
    session.abort(gone)
    long, short = (
        session.add(tokens(150), {"max_tokens": 3}),
        session.add(tokens(20), {"max_tokens": 1}),
    )
    failed = session.add(tokens(40), {"max_tokens": 1})
    session.add(tokens(30), {"max_tokens": 2, **OPTS_OUT})
    refused = session.add(
        tokens(30),
        {"max_tokens": 2, "extra_args": {"kv_transfer_params": {"hidden_states": "perhaps"}}},
    )
    (path,) = session.paths(failed)
    session.call("inject", [{"call": "pwrite", "errno": "EIO", "name": rf"{path.name}\.\d+\b"}])
    after = scrape_all(session)
    assert session.call("inject", [])
    assert long.finished and short.finished
    grown = growth(before, after)
    assert grown["files_total published"] == 2
    assert grown["files_total aborted"] == 1
    assert refused.finished
    assert {name: value for name, value in grown.items() if "fail" in name} == {
        "files_total failed": 2,
        "failures_total EIO": 1,
        "failures_total refused": 1,
    }
    assert grown["published_bytes_total"] == 170 * ROW_BYTES
    assert (
        grown["published_bytes_total"]
        <= grown["written_bytes_total"]
        <= grown["copied_bytes_total"]
        <= 500 * ROW_BYTES
    )
    observations = {each.name: each.observations for each in after.latencies}
    assert observations["vllm:hsx_publish_seconds"] == after.total(
        "vllm:hsx_files_total", outcome="published"
    )
    assert observations["vllm:hsx_copy_seconds"] * 2 * ROW_BYTES >= after.total(
        "vllm:hsx_copied_bytes_total"
    )  # a buffer holds two rows
    assert after.total("vllm:hsx_backlog_bytes") == 0
    of_dashboard = set(re.findall(r"(vllm:hsx_\w+?)(?:_bucket)?\{", page("grafana.json")))
    assert of_dashboard == {
        each.name for each in (*after.counts, *after.latencies) if each.name.startswith("vllm:hsx_")
    }


def test_requests_waiting_for_storage_are_shown_in_metrics(session: EngineSession) -> None:
    before = scrape_all(session)
    session.call("hold_writes")
    running = session.add(tokens(60), {"max_tokens": 100}, name="running")
    session.step(4)
    held = session.add(tokens(20), {"max_tokens": 1}, name="held")
    gone = session.add(tokens(21), {"max_tokens": 1}, name="gone")
    session.step(4)
    during = scrape(session)
    assert during.total("vllm:hsx_requests_held") == 2
    assert during.total("vllm:hsx_backlog_bytes", tp_rank="0") == 60 * ROW_BYTES
    assert during.total("vllm:hsx_ring_fill_ratio", tp_rank="0") == 1
    session.abort(gone)
    session.step(3)
    later = scrape(session)
    assert later.total("vllm:hsx_requests_held") == 1
    # Nothing is written meanwhile, but the time that passes is counted.
    assert set(growth(during, later)) == {"backpressure_seconds_total"}
    assert not held.finished
    session.call("release_writes")
    after = scrape_all(session)
    assert running.finished and held.finished
    grown = growth(before, after)
    assert grown["files_total published"] == 2
    assert grown["backpressure_seconds_total"] > growth(before, later)["backpressure_seconds_total"]
    assert after.total("vllm:hsx_requests_held") == after.total("vllm:hsx_backlog_bytes") == 0


def test_engine_log_has_a_metrics_line(session: EngineSession) -> None:
    session.add(tokens(20), {"max_tokens": 1})
    scrape_all(session)
    session.call("log_stats")
    assert "KV Transfer metrics: " in session.log
    line = next(
        line for line in reversed(session.log.splitlines()) if "KV Transfer metrics: " in line
    )
    assert "GB/s per writer" in line
