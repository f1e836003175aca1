"""The goals of the plugin, and how far the measurements reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kv_cache import capacity
from benchmarks.pipeline import conversations, decoding, engine, latency, per_step, slow_storage
from benchmarks.pipeline.host_path import COPIED, DURABLY, OURS, Cell

MIB = 1 << 20
# The interpreter and threads take and release this much memory, independent of the rows.
STRAY_BYTES = 4 * MIB
SMALL_CHUNK = 64  # rows of a last chunk; writing so few does not delay the reader


@dataclass(frozen=True)
class Results:
    """All measurements. A part that was left out is empty."""

    machine: dict[str, str]
    load_average: tuple[float, float]
    ring_bytes: int
    host: list[Cell]
    no_durable_view: dict[str, str]
    latency: list[latency.Result]
    engine: engine.Result | None
    step: per_step.Result | None
    slow_storage: slow_storage.Result | None
    capacity: capacity.Result | None
    conversations: conversations.Result | None
    decode: decoding.Result | None = None


@dataclass(frozen=True)
class Verdict:
    """One row of the table of goals.

    Attributes:
        goal, measured: in words.
        met: "yes", "no", or the number of cells that meet the goal.
    """

    goal: str
    measured: str
    met: str


def judge(results: Results) -> list[Verdict]:
    """Return every goal that has a measurement."""
    return [
        *_engine(results.engine),
        *_conversations(results.conversations),
        *_memory(results.host),
        *_durable(results.host),
        *_latency(results.latency),
        *_steps(results.step),
    ]


def _engine(result: engine.Result | None) -> list[Verdict]:
    return [
        Verdict(
            f"{cell.traffic}: at least 99% of the requests per second of off",
            f"{cell.speed:.1%}",
            _yes(cell.speed >= 0.99),
        )
        for cell in (result.cells if result is not None else [])
        if cell.extraction == engine.OURS
    ]


def _conversations(result: conversations.Result | None) -> list[Verdict]:
    cells = {cell.name: cell for cell in result.cells} if result is not None else {}
    if (ours := cells.get(conversations.OURS)) is None:
        return []
    return [
        Verdict(
            "conversations: at most 1.1 times the tokens of off",
            f"{ours.of_off:.2f} times",
            _yes(ours.of_off <= 1.1),
        ),
        Verdict(
            "conversations: at most 1.15 times the time of off",
            f"{ours.wall_of_off:.2f} times",
            _yes(ours.wall_of_off <= 1.15),
        ),
    ]


def _memory(cells: Sequence[Cell]) -> list[Verdict]:
    beyond = [cell.figures[OURS].rss for cell in cells if cell.view == COPIED]
    if not beyond:
        return []
    goal = f"at most {STRAY_BYTES / MIB:.0f} MiB of host memory beyond the ring"
    return [Verdict(goal, f"{max(beyond) / MIB:.1f} MiB", _yes(max(beyond) <= STRAY_BYTES))]


def _durable(cells: Sequence[Cell]) -> list[Verdict]:
    """Judge every cell: the goal is met if all cells meet it."""
    shares = sorted(
        cell.figures[OURS].of_raw
        for cell in cells
        if cell.view == DURABLY and not cell.evenly and cell.tokens >= 2048
    )
    if not shares:
        return []
    good = sum(share >= 0.95 for share in shares)
    return [
        Verdict(
            "durable, from 2,048 tokens on: at least 95% of raw O_DIRECT with fdatasync",
            f"{shares[len(shares) // 2]:.0%}, worst {shares[0]:.0%}",
            "yes" if good == len(shares) else f"in {good} of {len(shares)} cells",
        )
    ]


def _latency(results: Sequence[latency.Result]) -> list[Verdict]:
    """Judge the slowest of the prompts that end with a small chunk."""
    verdicts = []
    for result in results:
        p50s = [
            each.quantiles["from_host"]["p50"]
            for each in result.prompts
            if each.last_chunk == SMALL_CHUNK
        ]
        if p50s:
            verdicts.append(
                Verdict(
                    f"{result.filesystem}: published within 1 ms (p50) of the last row",
                    f"{max(p50s) * 1e3:.2f} ms",
                    _yes(max(p50s) <= 1e-3),
                )
            )
    return verdicts


def _steps(result: per_step.Result | None) -> list[Verdict]:
    if result is None:
        return []
    return [
        Verdict(
            "main thread: at most 100 µs per step",
            f"{result.per_step * 1e6:.0f} µs, {result.launches * 1e6:.0f} of them the emulator's",
            _yes(result.per_step <= 1e-4),
        )
    ]


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"
