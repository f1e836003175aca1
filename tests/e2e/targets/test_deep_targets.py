"""All layers of a deep target: rows are right, and the first request takes no memory of the NPU.

vLLM gives the KV cache all memory that the profile run leaves. Later allocations may fail.
"""

from __future__ import annotations

from pathlib import Path

import torch
from harness import tokens
from oracle import Reference
from session import EngineSession
from stage import Stage

from vllm_ascend_hsx.demo.tiny_models import build_qwen3

LAYERS = 40
PROMPT, PROMPTS = 500, 4  # a temporary for the rows of their step would have 42 MB


def test_first_extracted_requests_take_no_memory_and_launch_no_new_operators(
    tmp_path: Path,
) -> None:
    model = build_qwen3(tmp_path / "qwen3-deep", layers=LAYERS)
    options = {"max_num_batched_tokens": PROMPT * PROMPTS, "layer_ids": tuple(range(LAYERS + 1))}
    # With 2, a workspace is not memory that torch has kept from the forward pass.
    with EngineSession(tmp_path, model, environ={"TASK_QUEUE_ENABLE": "2"}, **options) as session:
        stage = Stage(session, Reference(model, LAYERS, torch.bfloat16))
        for seed in range(PROMPTS):
            stage.add(
                tokens(PROMPT, seed=seed),
                expect="nothing",
                params={"hidden_states": False},
                max_tokens=2,
            )
        session.settle()
        before = session.call("device_use")
        for seed in range(PROMPTS):
            stage.add(tokens(PROMPT, seed=10 + seed))
        session.settle()
        after = session.call("device_use")
        stage.check()
    assert after["free"] == before["free"]
    assert [launch for launch in after["launched"] if launch not in before["launched"]] == []
