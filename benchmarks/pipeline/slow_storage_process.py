"""An engine in a separate process: a stream without extraction, extracted prompts, slow storage.

slow_storage.py starts it and sets the storage's speed.

Usage: python -m benchmarks.pipeline.slow_storage_process READ_FD WRITE_FD

The first line is a JSON object of EngineArgs; each later line is a measurement, see
`Bench.measure`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.pipeline.engine_process import take_orders

SMALL = 1000  # bytes; smaller writes are not slowed down
_OPTS_OUT = {"extra_args": {"kv_transfer_params": {"hidden_states": False}}}


class SlowDisk:
    """Replacement of os.pwrite: all threads share a number of bytes per second, or hang."""

    def __init__(self) -> None:
        self._pwrite = os.pwrite
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._rate = 0.0
        self._free_at = 0.0
        self.release()
        os.pwrite = self.pwrite

    def slow_down(self, bytes_per_s: float) -> None:
        """Limit all later writes; 0 stops them."""
        self._rate, self._free_at = bytes_per_s, 0.0
        self._released.clear()

    def release(self) -> None:
        """Restore full speed; waiting writes continue."""
        self._released.set()

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        size = memoryview(data).nbytes
        if size >= SMALL and not self._released.is_set():
            self._released.wait(self._turn(size))
        return self._pwrite(fd, data, offset)

    def _turn(self, size: int) -> float | None:
        if not self._rate:
            return None
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + size / self._rate
            return self._free_at - now


class Bench:
    """The engine and the measurements with it.

    Args:
        engine: vllm.v1.engine.llm_engine.LLMEngine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._disk = SlowDisk()
        self._draw = np.random.default_rng(0)
        self._count = 0

    def measure(
        self,
        *,
        extract: bool,
        bytes_per_s: float | None,
        seconds: float,
        in_flight: int,
        tokens: int,
    ) -> dict[str, Any]:
        """Run one stream beside `in_flight` prompts.

        Args:
            extract: True to extract the prompts.
            bytes_per_s: speed of storage; None for full speed, 0 to stop it.

        Returns:
            "gaps": seconds between the stream's tokens. "answered": prompts in that time. "failed":
            number of prompts without rows.
        """
        if bytes_per_s is not None:
            self._disk.slow_down(bytes_per_s)
        prompts: set[str] = set()
        times: list[float] = []
        answers: list[dict[str, Any] | None] = []
        answered = 0
        stream = self._add(8, 400, extract=False)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            while len(prompts) < in_flight:
                prompts.add(self._add(tokens, 1, extract=extract))
            for output in self._engine.step():
                if output.request_id == stream:
                    times.append(time.perf_counter())
                    stream = self._add(8, 400, extract=False) if output.finished else stream
                elif output.finished:
                    prompts.discard(output.request_id)
                    answers.append(output.kv_transfer_params)
                    answered += 1
        times.append(time.perf_counter())  # a stream that has stalled until now has a gap, too
        self._engine.abort_request([stream])
        self._disk.release()
        while self._engine.has_unfinished_requests():
            answers += [
                output.kv_transfer_params for output in self._engine.step() if output.finished
            ]
        failed = sum(not _has_rows(params) for params in answers if params)
        return {
            "gaps": np.diff(times).tolist(),
            "answered": answered,
            "failed": failed,
            "prompts": len(answers),
        }

    def _add(self, tokens: int, max_tokens: int, *, extract: bool) -> str:
        from vllm import SamplingParams

        self._count += 1
        sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=max_tokens,
            **({} if extract else _OPTS_OUT),
        )
        prompt = self._draw.integers(8, 600, size=tokens).tolist()
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, sampling)
        return str(self._count)


def _has_rows(params: dict[str, Any]) -> bool:
    """Return True if a request has the file, and remove the file."""
    import vllm_ascend_hsx

    if "hidden_states_error" in params:
        return False
    try:
        vllm_ascend_hsx.load(params["hidden_states_path"], timeout=120, mmap=True)
        return True
    except vllm_ascend_hsx.HiddenStatesError:
        return False
    finally:
        vllm_ascend_hsx.remove(params["hidden_states_path"])


def work(engine: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    bench = Bench(engine)
    return lambda order: bench.measure(**order)


if __name__ == "__main__":
    take_orders(work)
