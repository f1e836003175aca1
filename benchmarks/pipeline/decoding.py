"""Part (h): rows of generated tokens: CPU time per row, and length of a step."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline.ours import Pipeline, SourceSlot, start_of
from benchmarks.pipeline.rows import Source, Step
from vllm_ascend_hsx.drafter.spans import Span

OFF, OURS, RAW = "no extraction", "ours", "raw write"
DEVICE_S = 0.0005  # seconds per step in which the main thread waits for the device
JOINED_BYTES = 256 << 10  # size of a raw write of many rows


@dataclass(frozen=True)
class Scale:
    """Size of the measurement.

    Attributes:
        in_flight: requests that each get one row per step.
        steps: steps per round.
        rounds: number of rounds; all contestants take turns in each.
        python_s: seconds of Python per step, standing for scheduler and runner.
    """

    in_flight: tuple[int, ...] = (16, 256)
    steps: int = 100
    rounds: int = 5
    python_s: float = 0.008


FULL = Scale()
QUICK = Scale(in_flight=(64,), steps=30, rounds=3)


@dataclass(frozen=True)
class Cell:
    """Medians of the rounds, in seconds.

    Attributes:
        in_flight: number of requests.
        row: CPU time of all threads per row, minus a step without extraction.
        raw, joined: CPU time of os.pwrite per row: one row per call, and many rows per call.
        step, step_off: length of a step with and without extraction.
    """

    in_flight: int
    row: float
    raw: float
    joined: float
    step: float
    step_off: float


@dataclass(frozen=True)
class Result:
    """All cells, and the size of the measurement."""

    cells: list[Cell]
    scale: Scale


def run(scale: Scale, source: Source, directory: Path, show: Callable[[str], None]) -> Result:
    """Measure, with files on the directory's filesystem."""
    loops = _loops(scale.python_s)
    gc.collect()
    gc.freeze()  # as vLLM's engine does (v1/engine/core.py:228 in 0.23.0); a full collection visits all modules
    cells = []
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hsx-benchmark-", dir=directory))
        )
        pipeline = stack.enter_context(closing(Pipeline(source, place, with_copy=False)))
        for in_flight in scale.in_flight:
            rounds = [
                _round(scale, loops, source, pipeline, place, in_flight, turn)
                for turn in range(scale.rounds + 1)
            ]
            cells.append(_median(in_flight, rounds[1:]))  # the first one warms up
            show(
                f"{in_flight} generating requests: {cells[-1].row * 1e6:.0f} µs of CPU time per row"
            )
    return Result(cells, scale)


def _median(in_flight: int, rounds: list[Cell]) -> Cell:
    names = ("row", "raw", "joined", "step", "step_off")
    return Cell(
        in_flight,
        **{name: statistics.median(getattr(cell, name) for cell in rounds) for name in names},
    )


def _round(
    scale: Scale,
    loops: int,
    source: Source,
    pipeline: Pipeline,
    directory: Path,
    in_flight: int,
    turn: int,
) -> Cell:
    off_cpu, off_step = _steps(scale, loops, source, None, directory, in_flight, turn)
    cpu, step = _steps(scale, loops, source, pipeline, directory, in_flight, turn)
    rows = in_flight * scale.steps
    joined_rows = min(scale.steps, max(1, JOINED_BYTES // source.row_format.row_bytes))
    raw, joined = (
        _raw(source, directory, in_flight, scale.steps, count) for count in (1, joined_rows)
    )
    return Cell(in_flight, (cpu - off_cpu) / rows, raw, joined, step, off_step)


def _steps(
    scale: Scale,
    loops: int,
    source: Source,
    pipeline: Pipeline | None,
    directory: Path,
    in_flight: int,
    turn: int,
) -> tuple[float, float]:
    """Return the CPU time of all steps until the files are published, and the median step."""
    ids = [f"cmpl-{turn}-0-{index:08x}" for index in range(in_flight)]
    starts = [
        start_of(each, directory / f"{each}.safetensors", 1, include_output=True) for each in ids
    ]
    spans = [
        tuple(Span(each, step, 1, row) for row, each in enumerate(ids))
        for step in range(scale.steps)
    ]
    slots = [SourceSlot(source, Step(0, each)) for each in spans] if pipeline else []
    lengths = []
    cpu = time.process_time()
    for step in range(scale.steps):
        began = time.perf_counter()
        if pipeline is not None:
            pipeline.start([] if step else starts)
        _python(loops)
        if pipeline is not None:
            if step >= pipeline.staging_slots:
                slots[step - pipeline.staging_slots].issued.wait()
            pipeline.save(slots[step])
        time.sleep(
            DEVICE_S
        )  # stands for the device: no event exists, and other threads get the GIL
        lengths.append(time.perf_counter() - began)
    if pipeline is not None:
        pipeline.end(ids, scale.steps)
        pipeline.wait_for(ids)
    cpu = time.process_time() - cpu
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    return cpu, statistics.median(lengths[2:])


def _raw(source: Source, directory: Path, in_flight: int, steps: int, count: int) -> float:
    """Return the CPU time per row of writes of `count` rows."""
    files = [
        os.open(directory / f"raw-{index}", os.O_CREAT | os.O_RDWR) for index in range(in_flight)
    ]
    row_bytes, calls = source.row_format.row_bytes, steps // count
    data = [
        source.bytes_of(index, count) for index in range(min(in_flight, source.tokens - count + 1))
    ]
    began = time.process_time()
    for call in range(calls):
        for index, fd in enumerate(files):
            os.pwrite(fd, data[index % len(data)], call * count * row_bytes)
    cpu = time.process_time() - began
    for index, fd in enumerate(files):
        os.close(fd)
        (directory / f"raw-{index}").unlink()
    return cpu / (in_flight * calls * count)


def _python(loops: int) -> int:
    """Hold the GIL like Python code."""
    total, kept = 0, {}
    for index in range(loops):
        kept[index & 255] = total
        total += len(kept) + index % 7
    return total


def _loops(seconds: float) -> int:
    """Return the number of loops that take the given time on an idle machine."""
    loops = 20_000
    fastest = min(_timed(loops) for _ in range(9))
    return max(1, int(loops * seconds / fastest))


def _timed(loops: int) -> float:
    began = time.perf_counter()
    _python(loops)
    return time.perf_counter() - began
