"""Errors name ranks that wait for each other in different hccl groups. Slow ranks are no error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hccl_ranks import Ranks

from ascend_npu_emulator.hccl import _shared

SIZE = 3
WITHDRAWN = b"-"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(SIZE, tmp_path)
    yield ranks
    ranks.kill()


def records() -> dist.Store:
    """Return the store for the records of waiting ranks."""
    return dist.PrefixStore("hccl/waits", _shared(dist.distributed_c10d._get_default_store()))


def reduce(group: Any) -> None:
    x = torch.ones(2, device="npu")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [group.size()] * 2


def gather(group: Any) -> None:
    dist.all_gather_into_tensor(
        torch.zeros(4 * group.size(), device="npu"), torch.zeros(4, device="npu"), group=group
    )


def crossing(
    groups: list[list[int]], enters: list[int], rank: int, size: int
) -> tuple[str, list[str]]:
    """Gather in group `enters[rank]`. Return the error, and the names of the rank's groups."""
    made = [dist.new_group(members, backend="hccl") for members in groups]
    names = [f"group {group.group_name} (ranks {', '.join(map(str, members))})"
             for group, members in zip(made, groups, strict=True) if rank in members]  # fmt: skip
    with pytest.raises(RuntimeError) as caught:
        gather(made[enters[rank]])
    return str(caught.value).splitlines()[0], names


CROSSINGS = {
    # Rank 2 is not in the cycle, but waits for both ranks.
    "two": ([[0, 1], [0, 1, 2]], [0, 1, 1], (0, 1)),
    "three in a cycle": ([[0, 1], [1, 2], [0, 2]], [0, 1, 2], (0, 1, 2)),
}


@pytest.mark.parametrize("case", CROSSINGS)
def test_all_ranks_name_a_deadlock_across_groups(three: Ranks, case: str) -> None:
    groups, enters, cycle = CROSSINGS[case]
    outcomes = three.run(partial(crossing, groups, enters))
    names = {name.partition("(")[2]: name for _, of_rank in outcomes for name in of_rank}
    members = {rank: ", ".join(map(str, groups[enters[rank]])) for rank in cycle}
    calls = [
        (
            f"rank {rank} calls all_gather_into_tensor of [4] Float in "
            f"{names[f'ranks {members[rank]})']}"
        )
        for rank in cycle
    ]
    for error, _ in outcomes:
        assert error == f"hccl: ranks wait for each other in different groups: {', '.join(calls)}"


def slow(rank: int, size: int) -> bytes:
    """Return the record of this rank after it has waited for an exchange."""
    first, second, everyone = (
        dist.new_group(members, backend="hccl") for members in ([0, 1], [1, 2], [0, 1, 2])
    )
    store = records()
    # Rank 0 waits for rank 1, and rank 1 for rank 2. Rank 2 waits until both have posted records.
    if rank == 2:
        store.wait(["0", "1"])
        before = store.get("1")
    for group in (second, first):
        if rank in dist.get_process_group_ranks(group):
            reduce(group)
    after = store.get(str(rank)) if rank in (0, 1) else WITHDRAWN
    dist.barrier()
    # Rank 2 waits for rank 1, and sees an old record, of an exchange that both have left.
    if rank == 2:
        assert before != WITHDRAWN
        store.set("1", before.decode())
    elif rank == 1:
        store.wait(["2"])
    reduce(everyone)
    return after


def test_slow_ranks_are_not_reported_and_records_are_removed(three: Ranks) -> None:
    assert set(three.run(slow)) == {WITHDRAWN}


def dead(rank: int, size: int) -> str:
    if rank == 1:
        records().wait(["0", "2"])
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        dist.barrier()
    return str(caught.value)


def test_rank_gets_gloos_error_when_its_peer_exits(three: Ranks) -> None:
    for state, text in three.outcomes(dead, leaver=1):
        assert state == "ok"
        assert "gloo" in text
        assert "wait for each other" not in text
