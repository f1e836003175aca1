"""Cost of extraction in an engine: without it, with ours and with vLLM's, in turn."""

from __future__ import annotations

import itertools
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

import torch

import vllm_ascend_hsx
from benchmarks import ROOT
from vllm_ascend_hsx.report.traffic import Traffic, draw_prompts
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

NAMES = OFF, OURS, VLLM = "off", "ours", "vLLM's connector"
LAYER_IDS = (1, 2, 4)
# All except ours: without our plugin an engine is the status quo.
UPSTREAM_PLUGINS = (
    "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling"
)
_ENDED = 60.0


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        starts: number of starts of the three engines. Two processes of the same engine differ by
            more than the cost of extraction, although each is steady.
        rounds: rounds per start; in each, every engine serves the same requests of each traffic
            once.
    """

    starts: int = 7
    rounds: int = 4
    traffics: tuple[Traffic, ...] = (
        Traffic("prefill-bound", requests=24, shortest=256, longest=480, max_tokens=1),
        Traffic("decode-bound", requests=16, shortest=16, longest=48, max_tokens=48),
    )


FULL = Scale()
QUICK = Scale(starts=1, rounds=3)


@dataclass(frozen=True)
class Cell:
    """One engine's results for one traffic, relative to the engine without extraction.

    Attributes:
        requests_per_s: for each start the median of the ratios within a round.
        cpu_per_step: likewise, CPU time of a step, all threads.
        steps: number of steps in a round.
    """

    traffic: str
    extraction: str
    requests_per_s: list[float]
    cpu_per_step: list[float]
    steps: int

    @property
    def speed(self) -> float:
        """Return the median of the starts."""
        return statistics.median(self.requests_per_s)

    @property
    def cpu(self) -> float:
        """Return the median of the starts."""
        return statistics.median(self.cpu_per_step)


@dataclass(frozen=True)
class Result:
    """Results of all engines for all traffics.

    Attributes:
        model: description of the model.
    """

    cells: list[Cell]
    starts: int
    rounds: int
    model: str


class Engine:
    """A process that takes orders; output goes to `log`."""

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
                [
                    python,
                    "-m",
                    f"benchmarks.pipeline.{module}",
                    str(orders_read),
                    str(answers_write),
                ],
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
        """Send an order and wait for the answer.

        Raises:
            RuntimeError: the process has ended; the message has the end of the log.
        """
        print(json.dumps(order), file=self._orders, flush=True)
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(
                "an engine ended with exit code "
                f"{code}:\n{self._log.read_text(errors='replace')[-4000:]}"
            )
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

    with tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory) as temporary:
        model = build_qwen3(Path(temporary) / "model")
        starts = []
        for start in range(scale.starts):
            place = Path(temporary) / f"start-{start}"
            place.mkdir()
            starts.append(_measure(scale, start, model, place))
            for (traffic, name), own in starts[-1].items():
                if name == OFF:
                    continue
                speed = _ratio(starts[-1][traffic, OFF], own, "wall")
                show(
                    f"start {start + 1}, {traffic}: {name} {speed:.1%} of the requests/s of an "
                    "engine without extraction"
                )
    cells = [
        Cell(
            traffic,
            name,
            [_ratio(costs[traffic, OFF], costs[traffic, name], "wall") for costs in starts],
            [
                1 / _ratio(_per_step(costs[traffic, OFF]), _per_step(costs[traffic, name]), "cpu")
                for costs in starts
            ],
            own[-1]["steps"],
        )
        for (traffic, name), own in starts[-1].items()
    ]
    return Result(
        cells,
        scale.starts,
        scale.rounds,
        "Qwen3, dense, 4 layers of 256, bfloat16; 3 layers extracted; 1 NPU",
    )


def _measure(
    scale: Scale, start: int, model: Path, place: Path
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Start the three engines, and return the cost of each round, per traffic and engine."""
    costs: dict[tuple[str, str], list[dict[str, Any]]] = {
        (traffic.name, name): [] for traffic in scale.traffics for name in NAMES
    }
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in random.Random(start).sample(NAMES, len(NAMES)):
            arguments, environ = settings(name, model, place / f"files-{len(engines)}")
            engines[name] = Engine(arguments, environ, place / f"engine-{len(engines)}.log")
            stack.callback(engines[name].close)
        for turn, traffic in itertools.product(range(-1, scale.rounds), scale.traffics):
            seed = start * (scale.rounds + 1) + turn
            prompts = draw_prompts(traffic, seed)
            for name in random.Random(seed).sample(NAMES, len(NAMES)):
                batch = {
                    "name": f"{traffic.name}{turn}",
                    "prompts": prompts,
                    "max_tokens": traffic.max_tokens,
                }
                cost = engines[name].order(batch)
                if name != OFF:
                    _check(cost["paths"], prompts, exact=name == OURS)
                if turn >= 0:
                    costs[traffic.name, name].append(cost)
    return costs


def settings(name: str, model: Path, storage: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """EngineArgs and environment of an engine.

    The three differ only in extraction. vLLM refuses the connector together with chunked prefill,
    so none has it.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.3,
        "block_size": 128,  # vllm-ascend's choice with chunked prefill
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "disable_log_stats": True,
    }
    if name == OFF:
        return arguments, {}
    transfer = kv_transfer_config(storage)
    if name == VLLM:
        transfer["kv_connector"] = "ExampleHiddenStatesConnector"
    arguments |= {
        "speculative_config": speculative_config(LAYER_IDS),
        "kv_transfer_config": transfer,
    }
    return arguments, {"VLLM_PLUGINS": UPSTREAM_PLUGINS} if name == VLLM else {}


def _check(paths: Sequence[str], prompts: Sequence[Sequence[int]], *, exact: bool) -> None:
    """Check and remove each request's file: the prompt and, if `exact`, a finite row per token."""
    if len(paths) != len(prompts):
        raise AssertionError(f"{len(paths)} of {len(prompts)} requests have a file")
    found = []
    for path in paths:
        states = vllm_ascend_hsx.load(path, 0)
        found.append(states.token_ids.tolist())
        if exact and not (
            len(states.hidden_states) == len(found[-1])
            and torch.isfinite(states.hidden_states).all()
        ):
            raise AssertionError("a file of this plugin lacks rows")
        vllm_ascend_hsx.remove(path)
    if sorted(found) != sorted(map(list, prompts)):
        raise AssertionError("the files do not match the prompts")


def _per_step(costs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [{"cpu": cost["cpu"] / cost["steps"]} for cost in costs]


def _ratio(
    reference: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]], key: str
) -> float:
    return statistics.median(
        float(other[key] / cost[key]) for cost, other in zip(costs, reference, strict=True)
    )
