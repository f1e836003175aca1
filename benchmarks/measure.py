"""Measure wall time, CPU time of all threads and memory growth; run contestants in turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # man 5 proc_pid_clear_refs: resets the peak of resident memory


@dataclass(frozen=True)
class Cost:
    """Cost of one run.

    Attributes:
        wall: seconds of wall time.
        cpu: seconds of CPU time, user and system, all threads of the process.
        rss: growth of resident memory in bytes, from the start to the peak.
    """

    wall: float
    cpu: float
    rss: int


def cost_of(work: Callable[[], None]) -> Cost:
    """Run `work` once and measure it."""
    _CLEAR_REFS.write_text(_RESET_PEAK)
    before = resident_bytes()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall, cpu, max(0, _status_bytes("VmHWM") - before))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10  # kB means 1024 bytes here
    raise OSError(f"{_STATUS} has no {field}")


def in_turn(
    contestants: Mapping[str, Callable[[], Cost]],
    repetitions: int,
    *,
    warm_up: int = 1,
    seed: int = 0,
) -> dict[str, list[Cost]]:
    """Run every contestant once per repetition, each time in a new random order.

    Other load on the machine then affects all of them alike.

    Args:
        contestants: functions to run, by name.
        repetitions: number of measurements of each.
        warm_up: discarded repetitions before the measurements.

    Returns:
        Costs by name, one per repetition; equal indexes were measured side by side.
    """
    draw = random.Random(seed)
    costs: dict[str, list[Cost]] = {name: [] for name in contestants}
    for repetition in range(warm_up + repetitions):
        names = list(contestants)
        draw.shuffle(names)
        for name in names:
            cost = contestants[name]()
            if repetition >= warm_up:
                costs[name].append(cost)
    return costs


def median_wall(costs: Sequence[Cost]) -> float:
    """Return the median in seconds."""
    return statistics.median(cost.wall for cost in costs)


def speed_ratio(costs: Sequence[Cost], reference: Sequence[Cost]) -> float:
    """Return the speed relative to the reference: the median of the ratios within a repetition."""
    return statistics.median(
        other.wall / cost.wall for cost, other in zip(costs, reference, strict=True)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by at least `share` of the values."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
