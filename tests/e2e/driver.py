"""Runs an engine in this process and follows a script, step by step. Started by harness.run_engine; not a test.

Usage: driver.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def run(job: dict[str, Any], result: dict[str, Any]) -> None:
    # The scheduler in this process, so that a step is a call.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**job["engine"]))
    core = engine.engine_core.engine_core
    cache = core.scheduler.kv_cache_config
    result["num_gpu_blocks"] = cache.num_blocks
    result["kv_groups"] = [sorted(group.layer_names) for group in cache.kv_cache_groups]
    result["kv_bytes"] = sum(tensor.size for tensor in cache.kv_cache_tensors)

    preemptions = 0
    preempt = core.scheduler._preempt_request

    def count_preemption(*arguments: Any) -> None:
        nonlocal preemptions
        preemptions += 1
        preempt(*arguments)

    core.scheduler._preempt_request = count_preemption

    def step() -> None:
        for output in engine.step():
            request = result["requests"].setdefault(output.request_id, {"steps": 0})
            request["steps"] += 1
            request["tokens"] = list(output.outputs[0].token_ids)
            request["finished"] = output.finished
            if output.finished:
                request["num_cached_tokens"] = output.num_cached_tokens
                request["kv_transfer_params"] = output.kv_transfer_params

    def add(request_id: str, token_ids: list[int], sampling: dict[str, Any]) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)

    for action, *arguments in job["script"]:
        if action == "add":
            add(*arguments)
        elif action == "step":
            for _ in range(arguments[0]):
                step()
        elif action == "drain":
            while engine.has_unfinished_requests():
                step()
        elif action == "abort":
            engine.abort_request([arguments[0]])
        elif action == "real_events":
            # What vllm-ascend replaces by a placeholder when its runner is built (model_runner_v1.py:5210).
            import torch

            torch.cuda.Event = torch.npu.Event
        else:
            raise ValueError(f"unknown action {action!r}")
    result["preemptions"] = preemptions
    engine.engine_core.shutdown()


def main() -> int:
    job_path, result_path = map(Path, sys.argv[1:])
    result: dict[str, Any] = {"requests": {}, "error": None}
    try:
        run(json.loads(job_path.read_text()), result)
    except BaseException:  # noqa: BLE001 - the test decides what the failure means
        result["error"] = traceback.format_exc()
    finally:
        # Threads that an instrument holds back would keep this process from ending.
        if instruments := sys.modules.get("hsx_test_instruments"):
            instruments.release_writers.set()
    result_path.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
