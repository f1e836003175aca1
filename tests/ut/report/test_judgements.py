"""Judgements of steps: memory in a log, the plan, and files after SIGTERM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sink_harness import FORMAT, make_rows, token_ids

from vllm_ascend_hsx.report import throughput
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN, Result, Teller, read_told
from vllm_ascend_hsx.report.served import files_after_stop, one_npu
from vllm_ascend_hsx.sinks.file import FileSink

GIB = 1 << 30
LOG = """
INFO [worker.py:594] Available KV cache memory: 21.50 GiB
INFO [worker.py:594] Available KV cache memory: 21.00 GiB
(EngineCore_DP0 pid=1) INFO [kv_cache_utils.py:1744] GPU KV cache size: 624,000 tokens
(EngineCore_DP1 pid=2) INFO [kv_cache_utils.py:1744] GPU KV cache size: 623,872 tokens
"""


@pytest.fixture
def tell(tmp_path: Path) -> Teller:
    return Teller(tmp_path / "told")


def told(tmp_path: Path) -> Result:
    (result,), _ = read_told(tmp_path / "told")
    return result


@pytest.mark.parametrize(("log", "outcome"), [(LOG, MEASURED), ("nothing of the kind", BROKE)])
def test_kv_cache_size_is_the_minimum_in_the_log(
    log: str, outcome: str, tmp_path: Path, tell: Teller
) -> None:
    (tmp_path / "log").write_text(log)
    server: Any = SimpleNamespace(log=tmp_path / "log", log_tail=lambda: "tail")
    throughput._tell_memory(server, "KV cache, off", tell)
    assert told(tmp_path).outcome == outcome
    if outcome == MEASURED:
        assert told(tmp_path).data == {"tokens": 623_872, "bytes": 21 * GIB}


# MiniMax-M2 with TP=8 and 8,192 tokens a step: 48 MiB of staging, and the collected layers.
@pytest.mark.parametrize(
    ("tokens", "outcome"), [(998_000, HELD), (993_000, HELD), (970_000, BROKE)]
)
def test_a_kv_cache_smaller_than_planned_does_not_hold(
    tokens: int, outcome: str, tmp_path: Path, tell: Teller
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 3072, "num_hidden_layers": 62, "dtype": "bfloat16"})
    )
    found = {
        "sizes": {"tensor_parallel": 8, "data_parallel": 1, "expert_parallel": True},
        "KV cache, off": {"tokens": 1_000_000, "bytes": 20 * GIB},
        "KV cache, hsx": {"tokens": tokens, "bytes": 19 * GIB},
        "KV cache, vllm": {"tokens": 500_000, "bytes": 20 * GIB},
    }
    throughput.plan(Context(tmp_path, tmp_path, False, found=found), tell)
    result = told(tmp_path)
    assert result.outcome == outcome
    assert result.data["staging_bytes"] == 2 * 1024 * 4 * 3072 * 2
    assert (
        f"{tokens / 1e6:.2%} remain" in result.found
        and "with vLLM's connector 50.00%" in result.found
    )


def test_model_too_large_for_one_npu_is_not_served_on_one(tmp_path: Path, tell: Teller) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 * GIB)
    one_npu(Context(tmp_path, tmp_path, False, found={"npus": {"npus": [{"free": 6 * GIB}]}}), tell)
    assert told(tmp_path).outcome == NOT_RUN
    assert told(tmp_path).found.startswith(
        "weights of 5.0 GiB do not fit on 1 NPUs with 6.0 GiB free"
    )


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Two complete files and a failed one."""
    directory = tmp_path / "files"
    with FileSink(directory, FORMAT) as sink:
        for name in ("a", "b"):
            file = sink.open(name, directory / f"{name}.safetensors")
            file.write(0, make_rows(0, 5))
            file.commit(token_ids(5), 5)
        sink.open("c", directory / "c.safetensors").fail("the server has stopped")
    return directory


def test_files_after_a_stop_are_complete_or_have_a_reason(storage: Path) -> None:
    assert files_after_stop(storage, [storage / f"{name}.safetensors" for name in "abc"]) == (
        2,
        1,
        [],
    )


def test_problems_after_a_stop_are_named(storage: Path) -> None:
    data = (storage / "a.safetensors").read_bytes()
    (storage / "a.safetensors").write_bytes(data[:-1])
    (storage / "d.safetensors.lock").touch()
    whole, failed, bad = files_after_stop(storage, [storage / "e.safetensors"])
    assert (whole, failed) == (1, 1)
    assert [each.partition(":")[0] for each in bad] == [
        "a.safetensors",
        "e.safetensors",
        "d.safetensors.lock",
    ]
