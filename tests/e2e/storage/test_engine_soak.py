"""Many short requests, in batches of 64, with aborts and storage faults: nothing grows.

`--engine-soak N` sends N of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import depth
from harness import tokens
from oracle import Reference
from session import EngineSession, Request
from stage import Stage

REQUESTS = depth(2_000, 4)
ROUND = 100  # requests before each check
BATCH = 64
MOST_TOKENS = 24
LAYER_IDS = (1, 2, 4)
REMEMBERED = 1024  # API requests in the limits; connector/admission.py
GROWTH = 1 << 20  # bytes of the engine's process, in the second half
# Prompts are beginnings of these.
TEXTS = [tokens(MOST_TOKENS, seed=seed) for seed in range(3)]

# Requests are named after the fault: for the file under a hidden name, or for the lock.
DATA, LOCK = r"{}[^/]*\.safetensors\.\d+\b", r"{}[^/]*\.lock"
FAULTS = {
    "lock-open-EMFILE": LOCK,
    "lock-flock-ENOLCK": LOCK,
    "data-open-EACCES": DATA,
    "data-pwrite-ENOSPC": DATA,
    "data-link-EROFS": DATA,
    "data-close-EIO": DATA,
}


@pytest.fixture(scope="module")
def stage(float32_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    options: dict[str, Any] = {
        "max_num_seqs": BATCH,
        "max_num_batched_tokens": 8 * BATCH,
        "layer_ids": LAYER_IDS,
        "dtype": "float32",
    }
    # Small KV cache and ring: the first use of memory is not growth.
    options |= {
        "num_gpu_blocks_override": BATCH + 16,
        "connector_options": {"pinned_ring_bytes": 1 << 20},
    }
    with EngineSession(tmp_path_factory.mktemp("soak"), float32_qwen3, **options) as session:
        yield Stage(session, Reference(float32_qwen3, 4, torch.float32))


def add(stage: Stage, luck: random.Random, kind: str) -> Request:
    prompt = luck.choice(TEXTS)[: luck.randint(1, MOST_TOKENS)]
    if kind == "output":
        return stage.add(prompt, expect="output", max_tokens=luck.randint(2, 5))
    return stage.add(
        prompt,
        name=kind,
        expect="failed" if kind in FAULTS else "prompt",
        max_tokens=luck.randint(1, 3),
    )


@pytest.mark.timeout(3600)
def test_resources_do_not_grow_with_the_number_of_requests(
    stage: Stage, request: pytest.FixtureRequest
) -> None:
    requests = request.config.getoption("engine_soak") or REQUESTS
    rules = []
    for fault, pattern in FAULTS.items():
        _, call, errno = fault.split("-")
        rules.append({"call": call, "errno": errno, "name": pattern.format(fault)})
    stage.session.call("inject", rules)
    luck = random.Random(0)
    counts: Counter[str] = Counter()
    footprints = []
    while counts["sent"] < requests:
        alive: list[Request] = []
        for _ in range(ROUND):
            kind = luck.choices(
                ["prompt", "output", "aborted", *FAULTS], [60, 15, 10, *[2] * len(FAULTS)]
            )[0]
            alive.append(add(stage, luck, kind))
            counts.update(["sent", kind])
            if kind == "aborted":
                stage.step(luck.randint(0, 1))
                stage.abort(alive[-1], expect="either")
            elif sum(each.ended is None for each in alive) >= BATCH:
                stage.step(luck.randint(1, 2))
        stage.check()
        stage.clear()
        footprints.append(stage.session.call("footprint"))
    hits = stage.session.call("inject", [])
    print(dict(counts), footprints)
    assert counts["sent"] == requests
    assert Counter(hit.split()[0] for hit in hits)["pwrite"] >= counts["data-pwrite-ENOSPC"]
    assert min(counts.values()) > requests // 200
    half = footprints[len(footprints) // 2]
    assert footprints[-1]["bytes"] - half["bytes"] < GROWTH
    # Slots and threads remember their last request, and the limits the last API requests.
    assert max(each["objects"] for each in footprints) < 4 * BATCH + REMEMBERED
    assert {each["locks"] for each in footprints} == {half["locks"]}
