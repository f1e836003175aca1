"""Part (d): the main thread's cost of a step by prompt length and number of requests in flight."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.pipeline.ours import MainThread, start_of
from benchmarks.pipeline.rows import STEP_TOKENS
from vllm_ascend_hsx.protocol.rows import RowFormat

# Narrow rows cost nothing to move: the calling thread does the work of an emulated NPU.
NARROW = RowFormat(layer_ids=(2, 31, 59, 62), hidden_size=1, dtype="BF16", model="narrow")


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        tokens: lengths of the prompts.
        in_flight: requests that share each step.
        rounds: number of rounds; each measures every cell in a new random order.
        waves: groups of requests per round for one request in flight; with more in flight there are
            fewer.
        steps: maximum per wave; then the requests are aborted.
    """

    tokens: tuple[int, ...] = (128, 512, 2048, 8192)
    in_flight: tuple[int, ...] = (1, 8, 32, 256)
    rounds: int = 5
    waves: int = 12
    steps: int = 12


FULL = Scale()
QUICK = Scale(in_flight=(1, 32), rounds=3)


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
    """Measurements, and the fit.

    Attributes:
        cells: one for each prompt length and number of requests in flight.
        per_step, per_request, per_beginning: seconds; a step costs per_step + per_request for each
            request in it + per_beginning for each that begins in it. Least squares over the cells,
            each deviation relative to the cell's cost.
        launches: seconds of per_step in the device's API: stream, events and one launch.
        per_1000_tokens: seconds that 1000 more prompt tokens add to a step in which no request
            begins; the median slope over the numbers of requests in flight.
    """

    cells: list[Cell]
    per_step: float
    per_request: float
    per_beginning: float
    launches: float
    per_1000_tokens: float


def run(
    scale: Scale,
    directory: Path,
    device: torch.device,
    show: Callable[[str], None],
    *,
    step_tokens: int = STEP_TOKENS,
) -> Result:
    """Measure on the directory's filesystem."""
    keys = [(tokens, in_flight) for tokens in scale.tokens for in_flight in scale.in_flight]
    samples = {key: Samples() for key in keys}
    launches = []
    with tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory) as place:
        thread = MainThread(
            NARROW, Path(place), device, max_tokens=max(step_tokens, *scale.in_flight)
        )
        try:
            for turn in range(-1, scale.rounds):  # the first one warms up
                for tokens, in_flight in random.Random(turn).sample(keys, len(keys)):
                    kept = Samples() if turn < 0 else samples[tokens, in_flight]
                    for _ in range(max(1, scale.waves // in_flight)):
                        _one_wave(thread, tokens, in_flight, scale, step_tokens, Path(place), kept)
                        launches.append(thread.launches(min(tokens, step_tokens)))
        finally:
            thread.close()
    cells = [samples[key].cell(*key) for key in keys]
    for cell in cells:
        show(_line(cell))
    return Result(cells, *fit(cells), statistics.median(launches), slope(cells))


@dataclass
class Samples:
    """Seconds of each kind of step; see Cell."""

    beginning: list[float] = field(default_factory=list)
    going_on: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def cell(self, tokens: int, in_flight: int) -> Cell:
        going_on = statistics.median(self.going_on) if self.going_on else None
        return Cell(
            tokens,
            in_flight,
            statistics.median(self.beginning),
            going_on,
            statistics.median(self.idle),
        )


def _line(cell: Cell) -> str:
    going_on = "" if cell.going_on is None else f", {cell.going_on * 1e6:.0f} us when they continue"
    return (
        f"{cell.tokens} tokens, {cell.in_flight} in flight: {cell.beginning * 1e6:.0f} us per "
        f"step when they begin{going_on}"
    )


def _one_wave(
    thread: MainThread,
    tokens: int,
    in_flight: int,
    scale: Scale,
    step_tokens: int,
    directory: Path,
    samples: Samples,
) -> None:
    share = max(1, min(tokens, step_tokens // in_flight))
    ids = [f"request-{index}" for index in range(in_flight)]
    starts = [
        start_of(request_id, directory / f"{request_id}.safetensors", tokens) for request_id in ids
    ]
    firsts = range(0, tokens, share)[: scale.steps]
    for first in firsts:
        batch = Batch(ids, [first] * in_flight, [min(share, tokens - first)] * in_flight)
        cost = thread.step([] if first else starts, *batch.runner_state())
        (samples.going_on if first else samples.beginning).append(cost)
        thread.settle()
    thread.end(ids, complete=firsts[-1] + share >= tokens)
    for _ in range(
        3
    ):  # the first learns that the requests have ended, the second reports the outcomes
        cost = thread.step([], *Batch(ids, [tokens] * in_flight, [1] * in_flight).runner_state())
        thread.settle()
    samples.idle.append(cost)
    for path in directory.glob("[!.]*"):
        path.unlink()


@dataclass(frozen=True)
class Batch:
    """The part of the runner's batch that the proposer reads.

    Attributes:
        ids: ids of the requests, in batch order.
        firsts: token position of each request's first row. counts: numbers of rows.
    """

    ids: Sequence[str]
    firsts: Sequence[int]
    counts: Sequence[int]

    def runner_state(self) -> tuple[SimpleNamespace, torch.Tensor]:
        """The runner's input_batch, and query_start_loc int32 [requests + 1]."""
        starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        state = SimpleNamespace(
            req_ids=list(self.ids), num_computed_tokens_cpu=np.asarray(self.firsts, dtype=np.int32)
        )
        return state, torch.from_numpy(starts)


def fit(cells: Sequence[Cell]) -> tuple[float, float, float]:
    """Return per_step, per_request and per_beginning; see Result."""
    rows: list[tuple[float, float, float]] = []
    costs: list[float] = []
    for cell in cells:
        rows.append((1.0, cell.in_flight, cell.in_flight))
        costs.append(cell.beginning)
        if cell.going_on is not None:
            rows.append((1.0, cell.in_flight, 0.0))
            costs.append(cell.going_on)
    weights = 1 / np.asarray(costs)
    (step, request, begin), *_ = np.linalg.lstsq(
        np.asarray(rows) * weights[:, None], np.ones(len(costs)), rcond=None
    )
    return float(step), float(request), float(begin)


def slope(cells: Sequence[Cell]) -> float:
    """Return per_1000_tokens; see Result."""
    slopes = []
    for in_flight in sorted({cell.in_flight for cell in cells}):
        points = [
            (cell.tokens, cell.going_on)
            for cell in cells
            if cell.in_flight == in_flight and cell.going_on is not None
        ]
        if len(points) > 1:
            lengths, costs = zip(*points, strict=True)
            slopes.append(float(np.polyfit(lengths, costs, 1)[0]) * 1000)
    return statistics.median(slopes) if slopes else float("nan")
