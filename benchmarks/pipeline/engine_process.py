"""An engine in a separate process that serves batches of requests. engine.py starts it.

Usage: python -m benchmarks.pipeline.engine_process READ_FD WRITE_FD

The first line is a JSON object of EngineArgs. Each later line is a batch, {"prompts": [[token,
...], ...], "max_tokens": ...}. The answer is the cost. The pipes are separate because vLLM prints
to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(engine: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Answer the requests, and wait until their files are complete if they have any.

    Returns:
        "wall" and "cpu": seconds, from the first request to the last file. "steps": number of
        engine steps. "paths": the files.
    """
    from vllm import SamplingParams

    import vllm_ascend_hsx

    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=batch["max_tokens"])
    paths, steps = [], 0
    cpu, wall = time.process_time(), time.perf_counter()
    for index, prompt in enumerate(batch["prompts"]):
        engine.add_request(f"{batch['name']}-{index}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            if output.finished and (params := output.kv_transfer_params):
                paths.append(params["hidden_states_path"])
    for path in paths:
        vllm_ascend_hsx.load(path, mmap=True)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "steps": steps,
        "paths": paths,
    }


def take_orders(work: Callable[[Any], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Build the engine described by the first line, and answer each further line.

    Args:
        work: takes the engine and returns a function from an order to an answer.
    """
    # Run the scheduler in this process: a step is then a call, with this process's CPU time.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    read_fd, write_fd = map(int, sys.argv[1:])
    for descriptor in (read_fd, write_fd):
        os.set_inheritable(descriptor, False)
    with os.fdopen(read_fd) as orders, os.fdopen(write_fd, "w") as answers:
        arguments = json.loads(orders.readline())
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        answer = work(engine)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in orders:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
        engine.engine_core.shutdown()


if __name__ == "__main__":
    take_orders(lambda engine: lambda batch: serve(engine, batch))
