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
_RESET_PEAK = "5"  # man 5 proc_pid_clear_refs: the peak of resident memory starts again from the present value


@dataclass(frozen=True)
class Cost:
    """What one run cost.

    Attributes:
        wall: seconds.
        cpu: seconds of CPU time, user and system, all threads of the process.
        rss: bytes by which resident memory was above its value at the beginning, at its peak.
    """

    wall: float
    cpu: float
    rss: int


def cost_of(work: Callable[[], None]) -> Cost:
    """Run `work` once."""
    _CLEAR_REFS.write_text(_RESET_PEAK)
    before = resident_bytes()
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(wall, cpu, max(0, _status_bytes("VmHWM") - before))


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10  # kB, which the kernel counts in 1024
    raise OSError(f"{_STATUS} has no {field}")


def in_turn(
    contestants: Mapping[str, Callable[[], Cost]],
    repetitions: int,
    *,
    warm_up: int = 1,
    seed: int = 0,
) -> dict[str, list[Cost]]:
    """Run every contestant once per repetition, each time in a new random order.

    Whatever else the machine does then affects all of them alike.

    Args:
        contestants: what to run, by name.
        repetitions: how often each is measured.
        warm_up: repetitions before these, which are thrown away.

    Returns:
        By name one cost per repetition; entries of the same index were measured side by side.
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
    """Seconds."""
    return statistics.median(cost.wall for cost in costs)


def speed_ratio(costs: Sequence[Cost], reference: Sequence[Cost]) -> float:
    """How many times as fast as the reference: the median of the ratios within a repetition."""
    return statistics.median(
        other.wall / cost.wall for cost, other in zip(costs, reference, strict=True)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
