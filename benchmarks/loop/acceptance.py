"""Serve a target with a draft, and count the accepted tokens."""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
from openai import OpenAI

from benchmarks.loop.target import Target
from vllm_ascend_hsx.demo import DemoError

DRAFT_TOKENS = 3
ANSWER_TOKENS = 32
CLIENTS = 8
PREFIX = "vllm:spec_decode_num_"


class Acceptance(NamedTuple):
    """vLLM's counts: steps with a draft, tokens of all drafts, and accepted tokens."""

    drafts: int
    draft_tokens: int
    accepted: int


def serve_command(method: str, target: Target, draft: Path, port: int) -> list[str]:
    """Return the `vllm serve` command for the target with the draft, on one NPU."""
    speculative = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS}
    return [
        *(
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(target.directory),
            *target.options,
        ),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--enforce-eager",
            "--gpu-memory-utilization",
            "0.4",
        ),
        *(
            "--max-model-len",
            "256",
            "--max-num-seqs",
            str(CLIENTS),
            "--max-num-batched-tokens",
            "256",
        ),
        *("--speculative-config", json.dumps(speculative)),
    ]


def measure(url: str, prompts: Sequence[Sequence[int]], timeout: float) -> Acceptance:
    """Let the server continue the prompts greedily, and return the counts.

    Raises:
        OpenAIError, HTTPError: if a request failed or took longer than timeout seconds.
        DemoError: if the server drafted nothing.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout, max_retries=0)
    model = client.models.list().data[0].id

    def answer(prompt: Sequence[int], tokens: int = ANSWER_TOKENS) -> None:
        client.completions.create(
            model=model, prompt=list(prompt), max_tokens=tokens, temperature=0
        )

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(answer, prompts))
    answer(prompts[0], 1)  # one more step reports the counts of the step before
    response = httpx.get(f"{url}/metrics", timeout=timeout, trust_env=False)
    return parse(response.raise_for_status().text)


def parse(text: str) -> Acceptance:
    """Return the counts in the text of /metrics. Raise DemoError if there are none."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    counts = [
        round(sum(sample.value for sample in samples if sample.name == f"{PREFIX}{name}_total"))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    if not counts[0]:
        raise DemoError("the server drafted nothing: /metrics counts no step with a draft")
    return Acceptance(*counts)
