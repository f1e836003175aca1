"""Part (f): tokens computed for conversations whose prompts extend each other, by contestant.

This module also runs in an engine's process and takes orders; see engine_process.py.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import vllm_ascend_hsx
from benchmarks import ROOT, machine
from benchmarks.pipeline.engine import LAYER_IDS, UPSTREAM_PLUGINS, Engine
from benchmarks.pipeline.engine_process import take_orders
from vllm_ascend_hsx.generate.order import RowOrder, Turn
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.report.traffic import VOCABULARY
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

RELEASE = "0.30.0rc2"
PYTHON = ROOT / f".venv-{RELEASE}" / "bin" / "python"
OFF, OURS, WITHOUT = "off", "ours", "ours, prefix_reuse_bytes=0"
OFF_THERE, VLLM = f"off, {RELEASE}", f"vLLM's connector, {RELEASE}"
# The baseline of each contestant.
CONTESTANTS = {OFF: OFF, OURS: OFF, WITHOUT: OFF, OFF_THERE: OFF_THERE, VLLM: OFF_THERE}
COUNTER, SOURCE = "vllm:prompt_tokens_by_source", "local_compute"
_PUBLISHED_S = 60.0
_IDLE_S = 0.1  # poll interval of an idle engine that waits for a file


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        conversations: total number. rounds: number of rounds that share them, for every engine.
        turns: prompts per conversation; each extends the previous one.
        system: tokens of the common prefix. least, most: tokens that a turn adds.
        concurrency: requests in flight.
    """

    conversations: int = 200
    rounds: int = 8
    turns: int = 4
    system: int = 2000
    least: int = 100
    most: int = 300
    concurrency: int = 32


FULL = Scale()
QUICK = Scale(conversations=8, rounds=1, concurrency=8)


@dataclass(frozen=True)
class Cell:
    """Results of one contestant.

    Attributes:
        prompt, computed: number of prompt tokens, and of computed ones.
        copied: rows copied from earlier files.
        wall: seconds until the last file was published, relative to `off` of the same release;
            median of the rounds.
        of_off: computed tokens, relative to `off`.
        bytes: size of the files. files, right: number of files, and number of files equal to the
            reference.
        reason: reason for a missing measurement; empty if measured.
    """

    name: str
    prompt: int = 0
    computed: int = 0
    copied: int = 0
    wall: float = 0.0
    wall_of_off: float = 0.0
    of_off: float = 0.0
    bytes: int = 0
    files: int = 0
    right: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """Results of all contestants.

    Attributes:
        distinct: tokens of the system prompt and of all turns: the minimum for any server.
        machine: description and load of the machine.
    """

    cells: list[Cell]
    distinct: int
    scale: Scale
    machine: str


def prompts_of(scale: Scale, conversations: range) -> list[list[int]]:
    """Return shuffled turns of some conversations. Negative ones have another system prompt."""
    warm_up = conversations.start < 0
    system = np.random.default_rng(warm_up).integers(3, VOCABULARY, scale.system).tolist()
    prompts = []
    for number in conversations:
        draw = np.random.default_rng((int(warm_up), abs(number)))
        prompt = system
        for _ in range(scale.turns):
            prompt = (
                prompt
                + draw.integers(
                    3, VOCABULARY, int(draw.integers(scale.least, scale.most + 1))
                ).tolist()
            )
            prompts.append(prompt)
    random.Random(conversations.start).shuffle(prompts)
    return prompts


def run(
    scale: Scale, directory: Path, show: Callable[[str], None], python: Path = PYTHON
) -> Result:
    """Measure, with files on the directory's filesystem.

    Args:
        scale: size of the measurement.
        directory: directory for the files; they are removed after each round.
        show: callback for progress.
        python: interpreter of the environment with vLLM's connector of RELEASE.
    """
    from vllm_ascend_hsx.demo.tiny_models import build_qwen3

    before = machine.load_average()
    rounds: dict[str, list[Cell]] = {}
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory))
        )
        model = build_qwen3(place / "model")
        engines: dict[str, Engine] = {}
        reasons = {}
        for number, name in enumerate(CONTESTANTS):
            is_there = name not in (OFF_THERE, VLLM)
            if not (is_there or python.exists()):
                reasons[name] = f"needs `make setup VLLM_ASCEND={RELEASE}`"
                continue
            show(f"starting the engine: {name}")
            arguments, environ = settings(name, model, place / f"files-{number}")
            executable = sys.executable if is_there else str(python)
            engines[name] = Engine(
                arguments, environ, place / f"engine-{number}.log", "conversations", executable
            )
            stack.callback(engines[name].close)
        for index in range(-1, scale.rounds):
            each = -(-scale.conversations // scale.rounds)
            numbers = (
                range(-2, 0)
                if index < 0
                else range(index * each, min((index + 1) * each, scale.conversations))
            )
            for name in random.Random(index).sample(list(engines), len(engines)):
                if name == WITHOUT and index > 0:
                    continue  # one round without reuse takes longer than all rounds of another contestant
                found = engines[name].order(
                    {"scale": asdict(scale), "first": numbers.start, "last": numbers.stop}
                )
                cell = _cell(name, found, prompts_of(scale, numbers), model)
                if index >= 0:
                    rounds.setdefault(name, []).append(cell)
                    show(
                        f"round {index}, {name}: {cell.computed:,} of {cell.prompt:,} tokens "
                        f"computed, {cell.wall:.1f} s"
                    )
    cells = [
        _sum(name, rounds) if name in rounds else Cell(name, reason=reasons[name])
        for name in CONTESTANTS
    ]
    longest = (
        max(map(len, prompts_of(scale, range(number, number + 1))))
        for number in range(scale.conversations)
    )
    distinct = scale.system + sum(length - scale.system for length in longest)
    load = f"load average {before:.1f} before, {machine.load_average():.1f} after"
    return Result(cells, distinct, scale, f"{machine.processor()}, {load}")


def settings(name: str, model: Path, storage: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """EngineArgs and environment of an engine."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.6,
        "block_size": 128,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    if name in (OURS, WITHOUT, VLLM):
        transfer = kv_transfer_config(
            storage, **({"prefix_reuse_bytes": 0} if name == WITHOUT else {})
        )
        if name == VLLM:
            transfer["kv_connector"] = "ExampleHiddenStatesConnector"
        arguments |= {
            "speculative_config": speculative_config(LAYER_IDS),
            "kv_transfer_config": transfer,
        }
    return arguments, {"VLLM_PLUGINS": UPSTREAM_PLUGINS} if name in (OFF, OFF_THERE, VLLM) else {}


def _cell(
    name: str, found: Mapping[str, Any], prompts: Sequence[Sequence[int]], model: Path
) -> Cell:
    """Compare the files of a round with the reference, and remove them."""
    num_bytes = right = 0
    if name not in (OFF, OFF_THERE) and len(found["paths"]) != len(prompts):
        raise AssertionError(
            f"{name}: {len(found['paths'])} of {len(prompts)} requests have a file"
        )
    for index, path in found["paths"].items():
        num_bytes += Path(path).stat().st_size
        states = vllm_ascend_hsx.load(path, _PUBLISHED_S)
        problem = _difference(states, tuple(prompts[int(index)]), prompts, str(model))
        if problem and name in (OURS, WITHOUT):
            raise AssertionError(f"{name}: {path} is wrong: {problem}")
        right += not problem
        vllm_ascend_hsx.remove(path)
    return Cell(
        name, sum(map(len, prompts)), found["computed"], found["copied"], found["wall"],
        bytes=num_bytes, files=len(found["paths"]), right=right,
    )  # fmt: skip


def _difference(
    states: Any, prompt: tuple[int, ...], prompts: Sequence[Sequence[int]], model: str
) -> str:
    """Return the difference from transformers' rows in float32; empty if there is none."""
    from vllm_ascend_hsx.demo.compare import compare

    if tuple(states.token_ids.tolist()) != prompt:
        return "the file has the tokens of another prompt"
    # Rows depend only on preceding tokens: rows of the last turn include the rows of all turns.
    last = max((each for each in prompts if tuple(each[: len(prompt)]) == prompt), key=len)
    return compare(
        states.hidden_states, _reference(model, tuple(last))[: len(prompt)], LAYER_IDS
    ).reason


@lru_cache(maxsize=64)
def _reference(model: str, prompt: tuple[int, ...]) -> Any:
    from vllm_ascend_hsx.demo.reference import reference_hidden_states

    return reference_hidden_states(model, prompt, LAYER_IDS)


def _sum(name: str, rounds: Mapping[str, Sequence[Cell]]) -> Cell:
    cells, off = rounds[name], rounds[CONTESTANTS[name]][: len(rounds[name])]
    total = {
        key: sum(getattr(cell, key) for cell in cells)
        for key in ("computed", "prompt", "copied", "wall", "bytes", "files", "right")
    }
    wall = statistics.median(cell.wall / other.wall for cell, other in zip(cells, off, strict=True))
    return Cell(
        name,
        **total,
        wall_of_off=wall,
        of_off=total["computed"] / sum(cell.computed for cell in off),
    )


# In the engine's process


def serve(engine: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the prompts of some conversations, in the order of `hsx generate`.

    Returns:
        "wall": seconds until the last file is published. "computed": number of prompt tokens.
        "copied": number of rows from earlier files. "paths": the files, by prompt number, with
        extraction.
    """
    from vllm import SamplingParams

    scale = Scale(**order["scale"])
    prompts = prompts_of(scale, range(order["first"], order["last"]))
    rows = RowOrder((Row(index, array("q", prompt)) for index, prompt in enumerate(prompts)))
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    in_flight: dict[str, Turn] = {}
    unpublished: dict[str, Turn] = {}
    paths, copied = {}, 0
    computed, began = _computed(engine), time.perf_counter()
    last = began  # a file was published
    while in_flight or unpublished or not rows.is_over:
        while (
            len(in_flight) + len(unpublished) < scale.concurrency
            and (turn := rows.take()) is not None
        ):
            in_flight[name := f"{order['first']}-{turn.row.index}"] = turn
            engine.add_request(name, {"prompt_token_ids": prompts[turn.row.index]}, sampling)
        for (
            output
        ) in engine.step():  # vLLM's connector writes a file in the step after the request's last
            if output.finished:
                turn, params = in_flight.pop(output.request_id), output.kv_transfer_params
                if not params:
                    rows.end(turn)
                    continue
                unpublished[params["hidden_states_path"]] = turn
                paths[turn.row.index] = params["hidden_states_path"]
                copied += params.get("reused_tokens", 0)
        for path, turn in list(unpublished.items()):
            try:
                vllm_ascend_hsx.load(path, 0 if in_flight else _IDLE_S, mmap=True)
            except TimeoutError:
                if time.perf_counter() - last > _PUBLISHED_S:
                    raise
                continue
            del unpublished[path]
            rows.end(turn)
            last = time.perf_counter()
    return {
        "wall": time.perf_counter() - began,
        "computed": _computed(engine) - computed,
        "copied": copied,
        "paths": paths,
    }


def _computed(engine: Any) -> int:
    """Return the number of prompt tokens that the engine has computed."""
    return sum(
        int(each.value)
        for each in engine.get_metrics()
        if each.name == COUNTER and each.labels["source"] == SOURCE
    )


if __name__ == "__main__":
    take_orders(lambda engine: lambda order: serve(engine, order))
