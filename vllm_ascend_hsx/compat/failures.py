"""Step failures: files name the reason, and no tokens from a failed device are answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ascend_hsx.compat.engine import methods
from vllm_ascend_hsx.compat.patch_points import patch
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_30

WORKER = "vllm_ascend.worker.worker"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
OUTPUT_V2 = "vllm.v1.worker.gpu.async_utils"

_REASON = "a file names the reason of a failed step"
_SPOILT = "no answer has tokens from a failed device"


def _connector_methods(name: str) -> Iterator[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        yield from methods(get_kv_transfer_group(), name)


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        for engine_failed in _connector_methods("engine_failed"):
            engine_failed(error)
        raise


@patch(WORKER, "NPUWorker.execute_model", SINCE_0_23, why=_REASON)
@patch(WORKER, "NPUWorker.sample_tokens", SINCE_0_23, why=_REASON)
def report_failed_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass the exception of a step to our connector before vLLM stops the engine.

    Reason: the device reports a failure once, to one thread. If that is the main thread, vLLM stops
    the workers without notifying the connector (v1/executor/multiproc_executor.py, method
    worker_busy_loop, 0.23.0), and no file would name the reason.
    """
    with _reported():
        return original(self, *args, **kwargs)


@patch(RUNNER_V1, "AsyncGPUModelRunnerOutput.get_output", SINCE_0_23, why=_SPOILT)
@patch(OUTPUT_V2, "AsyncOutput.get_output", SINCE_0_30, why=_SPOILT)
def withhold_spoilt_output(original: Any, self: Any) -> Any:
    """Check the device for a failure before the tokens of a step are sent.

    Reason: a failed task drops all tasks behind it, including the copy of the sampled tokens. The
    wait for this copy then returns at once (ReadQueue and ClearUnrecordedCount in torch_npu
    2.10.0.post4, csrc/core/npu/NPUQueue.cpp:469). The tokens would be stale memory. vLLM 0.30 has
    model runner V2.
    """
    with _reported():
        output = original(self)
        for ask_device in _connector_methods("ask_device"):
            ask_device()
        return output
