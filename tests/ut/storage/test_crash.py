"""Sinks are killed at any instant. Visible files are right, and the next start cleans up.

`--kills N` kills N sinks. The default is 500, or 2,000 with `--long`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from crash_mutations import ALONE, IN_ORDER, MUTATIONS, OF_SHARDS, TOGETHER
from depth import depth, is_long

HARNESS = Path(__file__).with_name("crash_harness.py")
SOURCE = os.pathsep.join([str(HARNESS.parents[3]), str(HARNESS.parents[1])])
KILLS = {1: depth(1200, 4), 3: depth(800, 4)}  # by number of concurrent servers
SHARD_KILLS = {1: depth(300, 2), 3: depth(100, 2)}
MUTATION_KILLS = 1600  # at most: the first ten mostly find a mistake that needs two threads
STEP = 1 if is_long() else 3  # of a sweep: system calls from one kill to the next

# Settings of servers differ in direct I/O, durability, checksum and row size.
SERVERS = (2, *(pytest.param(number, marks=pytest.mark.long) for number in (4, 6)))
# Names are new, or have data or an error. Requests end in each way, or never.
ENDS = [
    (0, "commit"),
    (0, "commit"),
    (1, "fail"),
    (1, "commit"),
    (2, "discard"),
    (0, "discard"),
    (3, "never"),
    (1, "never"),
]
# A start reads an orphan's lock once. When depends on the order of names, which differs from one
# life to the next, so a sweep may miss that `pread`.
CALLS = {
    "start": {
        "open",
        "flock",
        "stat",
        "fstat",
        "fchmod",
        "pwrite",
        "rename",
        "unlink",
        "close",
        "scandir",
    },
    "open": {"open", "flock", "stat", "fstat", "fchmod", "link", "unlink"},
    "write": {"open", "fchmod", "pwrite"},
    "commit": {"pwrite", "close", "link", "flock", "unlink"},
    "remove": {"flock", "unlink"},
    "fail": {"unlink", "close", "open", "fchmod", "pwrite", "rename", "flock"},
    "discard": {"unlink", "close", "stat", "flock"},
    "close": {"unlink", "open", "pwrite", "rename", "flock", "close", "stat"},
}


def play(method: str, directory: Path, **arguments: Any) -> dict[str, Any]:
    """Run crash_harness.py, where forks are cheap. Return the findings."""
    directory.mkdir()
    environ = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HARNESS), method, str(directory), json.dumps(arguments)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    print(found)
    return found


def contexts(phases: dict[str, int]) -> set[str]:
    return {phase.partition(" ")[0] for phase in phases}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("together", KILLS, ids=["one server", "three servers"])
def test_visible_state_is_right_when_a_server_is_killed_at_any_time(
    tmp_path: Path, together: int, request: pytest.FixtureRequest
) -> None:
    asked = request.config.getoption("kills")
    kills = KILLS[together] if asked is None else asked * KILLS[together] // sum(KILLS.values())
    ends = ("commit done", "fail done", "discard done", "stopped")
    wanted = dict.fromkeys(ends, kills // 10)
    found = play(
        "run", tmp_path / "storage", seed=asked or 0, together=together, kills=kills, wanted=wanted
    )
    assert not found["problems"]
    assert found["kills"] >= kills
    assert min(found["by_itself"], found["kills"] - found["by_itself"]) > kills // 4, (
        "at a system call, and anywhere"
    )
    assert contexts(found["phases"]) >= CALLS.keys() - {
        "close"
    }  # a short phase; the sweeps cover it
    assert min(found[end] for end in ends) >= kills // 10
    assert min(found["files_checked"], found["seen_meanwhile"], found["waits"]) > kills // 10
    if together == 1:
        assert found["let_go"] > 0, "readers that slept on the lock of a server when it was killed"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", SERVERS)
def test_visible_state_is_right_when_a_server_is_killed_at_any_system_call(
    tmp_path: Path, number: int
) -> None:
    found = play("sweep", tmp_path / "storage", number=number, ends=ENDS, step=STEP)
    assert not found["problems"]
    assert found["kills"] > 200 // STEP
    assert found["stopped"] == 1, "the last one was to be killed at a call that it does not make"
    assert contexts(found["phases"]) >= CALLS.keys()
    if STEP == 1:
        assert {f"{context} {call}" for context, calls in CALLS.items() for call in calls} <= found[
            "phases"
        ].keys()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("together", SHARD_KILLS, ids=["one server", "three servers"])
def test_members_are_right_when_a_server_is_killed_at_any_time(
    tmp_path: Path, together: int
) -> None:
    # A start reads the end of each index, so many kills happen there.
    kills = SHARD_KILLS[together]
    wanted = {
        "shards_checked": kills // 6,
        "commit done": kills // 6,
        "errors_checked": kills // 20,
    }
    found = play(
        "run", tmp_path / "storage", shards=True, together=together, kills=kills, wanted=wanted
    )
    assert not found["problems"]
    assert not {event: found[event] for event, number in wanted.items() if found[event] < number}
    assert found["members_checked"] >= found["commit done"]
    assert min(found["waits"], found["seen_meanwhile"]) > kills // 20


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", SERVERS)
def test_members_are_right_when_a_server_is_killed_at_any_system_call(
    tmp_path: Path, number: int
) -> None:
    found = play("sweep", tmp_path / "storage", number=number, ends=ENDS, shards=True, step=STEP)
    assert not found["problems"]
    assert found["kills"] > 200 // STEP
    assert found["stopped"] == 1, "the last one was to be killed at a call that it does not make"
    assert contexts(found["phases"]) >= {"write", "commit", "close", "open"}
    if STEP == 1:
        assert {
            "write pwrite",
            "commit pwrite",
            "close ftruncate",
            "close rename",
            "remove pwrite",
        } <= found["phases"].keys()


# A mistake that shows in one of hundreds of kills.
RARE = "with_cleaning_that_ignores_locks"


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(each, marks=pytest.mark.long) if each == RARE else each for each in MUTATIONS],
)
def test_killing_servers_finds_planted_mistakes(tmp_path: Path, mutation: str) -> None:
    assert mutation in ALONE or mutation in TOGETHER
    assert problems_of(mutation, tmp_path, together=1 if mutation in ALONE else 3)


@pytest.mark.parametrize("mutation", OF_SHARDS)
def test_killing_servers_finds_planted_mistakes_in_shards(tmp_path: Path, mutation: str) -> None:
    assert problems_of(mutation, tmp_path, shards=True)


def problems_of(mutation: str, directory: Path, **arguments: Any) -> list[str]:
    """Return the findings of kills at each system call or, if there are none, at any instant."""
    found = (
        play("sweep", directory / "storage", mutation=mutation, number=2, ends=ENDS, **arguments)
        if mutation in IN_ORDER
        else play(
            "run", directory / "storage", mutation=mutation, kills=MUTATION_KILLS, **arguments
        )
    )
    problems: list[str] = found["problems"]
    return problems
