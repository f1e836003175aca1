"""Requests for measurements, and the cost of one round of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove

VOCABULARY = 600  # ordinary tokens of the tiny models, without special ones
STEPS = "vllm:iteration_tokens_total_count"  # a histogram over the steps of an engine
READ_S = 60.0


@dataclass(frozen=True)
class Traffic:
    """Requests with about the same ratio of prompt to output.

    Attributes:
        requests: number per round. shortest, longest: lengths of the prompts in tokens.
        max_tokens: tokens that each request generates.
    """

    name: str
    requests: int
    shortest: int
    longest: int
    max_tokens: int


@dataclass(frozen=True)
class Round:
    """Measurements of one round of traffic.

    Attributes:
        seconds: from the first request to the last file.
        steps: steps of the engine that took most.
        prompt_tokens: sum over all requests.
        unread: number of files that could not be read.
    """

    seconds: float
    steps: int
    prompt_tokens: int
    unread: int = 0


def draw_prompts(traffic: Traffic, seed: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Return prompts of random tokens."""
    draw = np.random.default_rng(seed + 1)
    lengths = draw.integers(traffic.shortest, traffic.longest + 1, traffic.requests)
    return [draw.integers(3, vocabulary, size=int(length)).tolist() for length in lengths]


def serve_round(
    url: str, traffic: Traffic, prompts: Sequence[Sequence[int]], timeout: float, *, extracts: bool
) -> Round:
    """Send all prompts at once, wait for answers and files, and remove the files.

    Raises:
        HTTPError: a request failed, or took longer than `timeout` seconds.
        ValueError: an answer names no file.
    """
    with httpx.Client(
        timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=len(prompts))
    ) as client:
        model = client.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "max_tokens": traffic.max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }

        def complete(prompt: Sequence[int]) -> dict[str, Any]:
            answer: dict[str, Any] = (
                client.post(f"{url}/v1/completions", json={**body, "prompt": prompt})
                .raise_for_status()
                .json()
            )
            return answer

        before = engine_steps(client, url)
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(complete, prompts))
        paths = [_path_of(answer) for answer in answers] if extracts else []
        unread = sum(not _is_readable(path) for path in paths)
        seconds = time.perf_counter() - begun
        after = engine_steps(client, url)
    for path in paths:
        remove(path)
    steps = max(after[engine] - before.get(engine, 0) for engine in after)
    return Round(seconds, steps, sum(map(len, prompts)), unread)


def _is_readable(path: Path) -> bool:
    """Wait for a file and read it. With TP, files of vLLM 0.23's connector have several writers."""
    try:
        load(path, READ_S, mmap=True)
    except (HiddenStatesError, OSError):  # includes TimeoutError
        return False
    return True


def _path_of(answer: dict[str, Any]) -> Path:
    path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    if path is None:
        raise ValueError("an answer has no hidden_states_path")
    return Path(path)


def engine_steps(client: httpx.Client, url: str) -> dict[str, int]:
    """Return the number of steps of each engine."""
    # vLLM requires it; this package does not
    from prometheus_client.parser import text_string_to_metric_families

    text = client.get(f"{url}/metrics").raise_for_status().text
    samples = (
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    )
    return {
        sample.labels["engine"]: int(sample.value) for sample in samples if sample.name == STEPS
    }
