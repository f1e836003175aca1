"""Part (c), what extraction costs an engine: three take turns, without it, with ours and vLLM's."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vllm_ascend_hsx
from benchmarks import ROOT
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

OFF, OURS, VLLM = "off", "ours", "vLLM's connector"
LAYER_IDS = (1, 2, 4)
VOCABULARY = 600  # tokens that the tiny model knows, without the special ones
# All but ours: without our plugin an engine is what its users have today.
UPSTREAM_PLUGINS = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling"
_ENDED = 60.0


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: in each of which every engine serves the same requests once.
        requests: of a round. max_tokens: that each generates.
    """

    rounds: int = 9
    requests: int = 24
    max_tokens: int = 6


FULL = Scale()
QUICK = Scale(rounds=3, requests=12)


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of the ratios within a round, by engine.

    Attributes:
        requests_per_s: of those of the engine without extraction.
        cpu_per_step: CPU time of a step, all threads, of that of the engine without extraction.
        steps: how many there were in a round.
        model: in words.
    """

    requests_per_s: dict[str, float]
    cpu_per_step: dict[str, float]
    steps: dict[str, int]
    model: str


class Engine:
    """A process of a module that takes orders; its output goes to `log`."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str],
        log: Path,
        module: str = "engine_process",
        python: str = sys.executable,
    ) -> None:
        orders_read, orders_write = os.pipe()
        answers_read, answers_write = os.pipe()
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.pipeline.{module}", str(orders_read), str(answers_write)],
                pass_fds=(orders_read, answers_write),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
                cwd=ROOT,
            )
        os.close(orders_read)
        os.close(answers_write)
        self._orders, self._answers = os.fdopen(orders_write, "w"), os.fdopen(answers_read)
        self.order(arguments)

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Say something, and wait for the answer.

        Raises:
            RuntimeError: the process has ended; the message is the end of its log.
        """
        print(json.dumps(order), file=self._orders, flush=True)
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"an engine ended with exit code {code}:\n{self._log.read_text(errors='replace')[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._orders.close()
        try:
            self._process.wait(_ENDED)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def run(scale: Scale, directory: Path, show: Callable[[str], None]) -> Result:
    """Measure, with files on the directory's filesystem."""
    from vllm_ascend_hsx.demo.tiny_models import build_qwen3

    costs: dict[str, list[dict[str, Any]]] = {OFF: [], OURS: [], VLLM: []}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory)))
        model = build_qwen3(place / "model")
        engines: dict[str, Engine] = {}
        for name in costs:
            show(f"starting the engine: {name}")
            arguments, environ = settings(name, model, place / f"files-{len(engines)}")
            engines[name] = Engine(arguments, environ, place / f"engine-{len(engines)}.log")
            stack.callback(engines[name].close)
        for turn in range(-1, scale.rounds):
            prompts = draw_prompts(scale.requests, turn)
            for name in random.Random(turn).sample(list(engines), len(engines)):
                cost = engines[name].order({"name": f"round{turn}", "prompts": prompts, "max_tokens": scale.max_tokens})
                if name != OFF:
                    _check(cost["paths"], prompts, exact=name == OURS)
                if turn >= 0:
                    costs[name].append(cost)
    result = Result(
        {name: _ratio(costs[OFF], own, "wall") for name, own in costs.items()},
        {name: 1 / _ratio(_per_step(costs[OFF]), _per_step(own), "cpu") for name, own in costs.items()},
        {name: own[-1]["steps"] for name, own in costs.items()},
        "Qwen3, dense, 4 layers of 256, bfloat16; 3 layers extracted; 1 NPU",
    )
    show(f"requests/s of an engine without extraction: ours {result.requests_per_s[OURS]:.0%}, {VLLM} {result.requests_per_s[VLLM]:.0%}")
    return result


def settings(name: str, model: Path, storage: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """EngineArgs and environment of an engine.

    The three differ in extraction alone. vLLM refuses its connector together with chunked prefill,
    so all three go without.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.3,
        "block_size": 128,  # what vllm-ascend chooses with chunked prefill
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "disable_log_stats": True,
    }
    if name == OFF:
        return arguments, {}
    transfer = kv_transfer_config(storage)
    if name == VLLM:
        transfer["kv_connector"] = "ExampleHiddenStatesConnector"
    arguments |= {"speculative_config": speculative_config(LAYER_IDS), "kv_transfer_config": transfer}
    return arguments, {"VLLM_PLUGINS": UPSTREAM_PLUGINS} if name == VLLM else {}


def draw_prompts(count: int, seed: int) -> list[list[int]]:
    """Random tokens, 32 to 480 of them."""
    draw = np.random.default_rng(seed + 1)
    return [draw.integers(3, VOCABULARY, size=int(draw.integers(32, 481))).tolist() for _ in range(count)]


def _check(paths: Sequence[str], prompts: Sequence[Sequence[int]], *, exact: bool) -> None:
    """Check and remove each request's file: its prompt and, if `exact`, a finite row per token."""
    if len(paths) != len(prompts):
        raise AssertionError(f"{len(paths)} of {len(prompts)} requests have a file")
    found = []
    for path in paths:
        states = vllm_ascend_hsx.load(path, 0)
        found.append(states.token_ids.tolist())
        if exact and not (len(states.hidden_states) == len(found[-1]) and torch.isfinite(states.hidden_states).all()):
            raise AssertionError("a file of ours lacks rows")
        vllm_ascend_hsx.remove(path)
    if sorted(found) != sorted(map(list, prompts)):
        raise AssertionError("the files are not those of the prompts")


def _per_step(costs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [{"cpu": cost["cpu"] / cost["steps"]} for cost in costs]


def _ratio(reference: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(float(other[key] / cost[key]) for cost, other in zip(costs, reference, strict=True))
