"""Part (d), what a step costs the worker's main thread, against the length of the prompts and the number of requests in flight."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.ours import MainThread, start_of
from benchmarks.rows import STEP_TOKENS
from vllm_ascend_hsx.sinks.base import RowFormat

# Rows so narrow that moving them costs nothing: on an emulated NPU the device's work is done by the thread that asks for it.
NARROW = RowFormat(layer_ids=(2, 31, 59, 62), hidden_size=8, dtype="BF16", model="narrow")


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        tokens: lengths of the prompts.
        in_flight: requests that share each step.
        steps: measured of each kind, in each cell.
    """

    tokens: tuple[int, ...] = (128, 512, 2048, 8192)
    in_flight: tuple[int, ...] = (1, 8, 32, 256)
    steps: int = 60


FULL = Scale()
QUICK = Scale(in_flight=(1, 32), steps=20)


@dataclass(frozen=True)
class Cell:
    """Medians, in seconds of CPU time of the main thread.

    Attributes:
        tokens: of each prompt. in_flight: requests in each step.
        beginning: a step in which all requests of the batch begin.
        going_on: a step in which none begins; None if a prompt has only one.
        idle: a step in which nothing is extracted.
    """

    tokens: int
    in_flight: int
    beginning: float
    going_on: float | None
    idle: float


@dataclass(frozen=True)
class Result:
    """What was measured, and the line through it.

    Attributes:
        cells: one for each prompt length and number of requests in flight.
        per_step, per_request, per_beginning: seconds; a step costs per_step + per_request for each request in it + per_beginning for each
            that begins in it. Least squares over the cells, each deviation as a share of the cell's cost.
        per_1000_tokens: seconds that a prompt longer by 1000 tokens adds to a step in which no request begins; the median slope over
            the numbers of requests in flight.
    """

    cells: list[Cell]
    per_step: float
    per_request: float
    per_beginning: float
    per_1000_tokens: float


def run(
    scale: Scale, directory: Path, device: torch.device, show: Callable[[str], None], *, step_tokens: int = STEP_TOKENS
) -> Result:
    """Measure on the directory's filesystem."""
    with tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory) as place:
        thread = MainThread(NARROW, Path(place), device, max_tokens=max(step_tokens, *scale.in_flight))
        try:
            _measure(thread, min(scale.tokens), 1, scale, step_tokens, Path(place))  # warms up
            cells = []
            for tokens in scale.tokens:
                for in_flight in scale.in_flight:
                    cells.append(_measure(thread, tokens, in_flight, scale, step_tokens, Path(place)))
                    show(_line(cells[-1]))
        finally:
            thread.close()
    return Result(cells, *fit(cells), slope(cells))


def _line(cell: Cell) -> str:
    going_on = "" if cell.going_on is None else f", {cell.going_on * 1e6:.0f} us when they go on"
    return f"{cell.tokens} tokens, {cell.in_flight} in flight: {cell.beginning * 1e6:.0f} us per step when they begin{going_on}"


def _measure(thread: MainThread, tokens: int, in_flight: int, scale: Scale, step_tokens: int, directory: Path) -> Cell:
    share, steps = max(1, min(tokens, step_tokens // in_flight)), scale.steps
    beginning: list[float] = []
    going_on: list[float] = []
    idle: list[float] = []
    wave = 0
    while len(beginning) < max(3, steps // in_flight) or (share < tokens and len(going_on) < steps):
        ids = [f"wave-{wave}-{index}" for index in range(in_flight)]
        starts = [start_of(request_id, directory / f"{request_id}.safetensors", tokens) for request_id in ids]
        wave += 1
        firsts = list(range(0, tokens, share))[:steps]
        for first in firsts:
            count = min(share, tokens - first)
            batch = Batch(ids, [first] * in_flight, [count] * in_flight)
            cost = thread.step(starts if first == 0 else [], *batch.runner_state())
            (beginning if first == 0 else going_on).append(cost)
            thread.settle()
        thread.end(ids, complete=firsts[-1] + share >= tokens)
        for _ in range(3):  # the first hears that the requests have ended, the second reports what became of them
            cost = thread.step([], *Batch(ids, [tokens] * in_flight, [1] * in_flight).runner_state())
            thread.settle()
        idle.append(cost)
        for path in directory.iterdir():
            path.unlink()
    return Cell(
        tokens,
        in_flight,
        statistics.median(beginning),
        statistics.median(going_on) if going_on else None,
        statistics.median(idle),
    )


@dataclass(frozen=True)
class Batch:
    """As much of the runner's batch as the proposer reads.

    Attributes:
        ids: of the requests, in batch order.
        firsts: token position of each one's first row. counts: its rows.
    """

    ids: Sequence[str]
    firsts: Sequence[int]
    counts: Sequence[int]

    def runner_state(self) -> tuple[SimpleNamespace, torch.Tensor]:
        """The runner's input_batch, and query_start_loc int32 [requests + 1]."""
        starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        state = SimpleNamespace(req_ids=list(self.ids), num_computed_tokens_cpu=np.asarray(self.firsts, dtype=np.int32))
        return state, torch.from_numpy(starts)


def fit(cells: Sequence[Cell]) -> tuple[float, float, float]:
    """per_step, per_request and per_beginning; see Result."""
    rows: list[tuple[float, float, float]] = []
    costs: list[float] = []
    for cell in cells:
        rows.append((1.0, cell.in_flight, cell.in_flight))
        costs.append(cell.beginning)
        if cell.going_on is not None:
            rows.append((1.0, cell.in_flight, 0.0))
            costs.append(cell.going_on)
    weights = 1 / np.asarray(costs)
    (step, request, begin), *_ = np.linalg.lstsq(np.asarray(rows) * weights[:, None], np.ones(len(costs)), rcond=None)
    return float(step), float(request), float(begin)


def slope(cells: Sequence[Cell]) -> float:
    """per_1000_tokens; see Result."""
    slopes = []
    for in_flight in sorted({cell.in_flight for cell in cells}):
        points = [(cell.tokens, cell.going_on) for cell in cells if cell.in_flight == in_flight and cell.going_on is not None]
        if len(points) > 1:
            lengths, costs = zip(*points, strict=True)
            slopes.append(float(np.polyfit(lengths, costs, 1)[0]) * 1000)
    return statistics.median(slopes) if slopes else float("nan")
