"""Measurements of memory, turns and quantiles in the benchmarks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch_npu  # noqa: F401 - brings torch.npu

from benchmarks import measure
from benchmarks.measure import Cost

ROOT = Path(__file__).parents[3]
MEMORY = """
import numpy
from benchmarks.measure import cost_of
print(cost_of(lambda: numpy.ones(64 << 20, numpy.uint8)).rss, cost_of(lambda: None).rss)
"""


def test_peak_memory_includes_memory_that_was_freed() -> None:
    """In a separate process: threads of other tests may free memory meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    touched, nothing = map(int, done.stdout.split())
    assert 0.9 < touched / (64 << 20) < 2
    assert nothing < 16 << 20


def test_contestants_take_turns_and_ratios_are_taken_within_a_repetition() -> None:
    order: list[str] = []

    def contestant(name: str, walls: list[float]) -> Cost:
        order.append(name)
        return Cost(walls.pop(0), 0.0, 0)

    # The machine is ten times as slow in the second repetition: a ratio of medians would say 0.3.
    slow, fast = [9.0, 2.0, 40.0, 6.0], [9.0, 1.0, 20.0, 3.0]
    costs = measure.in_turn(
        {"slow": lambda: contestant("slow", slow), "fast": lambda: contestant("fast", fast)}, 3
    )
    assert [sorted(order[index : index + 2]) for index in range(0, 8, 2)] == [["fast", "slow"]] * 4
    assert [cost.wall for cost in costs["slow"]] == [2.0, 40.0, 6.0]
    assert measure.speed_ratio(costs["slow"], costs["fast"]) == 0.5


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_quantile_is_the_smallest_sufficient_value(share: float, expected: int) -> None:
    assert measure.quantile([float(value) for value in range(100, 0, -1)], share) == expected
