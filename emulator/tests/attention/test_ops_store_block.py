"""Test cache writes by runs of consecutive slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import int32, random, scenarios

from ascend_npu_emulator.ops.attention.store_block import (
    store_kv_block,
    store_kv_block_metadata,
)

BLOCK = 16
GROUPS = ("group_len", "group_key_idx", "group_key_cache_idx")


def runs(
    slots: list[int], capacity: int | None = None, block_size: int = BLOCK
) -> dict[str, torch.Tensor]:
    groups = {name: torch.full((capacity or len(slots),), -7, dtype=torch.int32) for name in GROUPS}
    store_kv_block_metadata(int32(*slots), **groups, block_size=block_size)
    return groups


@scenarios("slots, expected", {
    "one run": ([3, 4, 5], [(3, 0, 3)]),
    "a run ends at the end of a block": ([14, 15, 16, 17], [(2, 0, 14), (2, 2, 16)]),
    "a run ends at a gap between slots": ([3, 5, 6, 2], [(1, 0, 3), (2, 1, 5), (1, 3, 2)]),
    "negative slots are in no run": ([-1, 0, 1, -1, 2], [(2, 1, 0), (1, 4, 2)]),
    "decreasing slots": ([9, 8, 8], [(1, 0, 9), (1, 1, 8), (1, 2, 8)]),
    "no slot": ([-1, -1], []),
})  # fmt: skip
def test_metadata_lists_the_runs_of_consecutive_slots(
    slots: list[int], expected: list[tuple[int, int, int]]
) -> None:
    groups = runs(slots)
    found = list(zip(*(groups[name].tolist() for name in GROUPS), strict=True))
    assert found == expected + [(0, 0, 0)] * (len(slots) - len(expected))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (1,)], ids=str)
def test_each_row_is_written_to_its_slot(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    slots = [40, 41, -1, 14, 15, 16, 3]
    rows, cache = (
        (100 * random(len(slots), *shape)).to(dtype),
        torch.zeros(3, BLOCK, 1, shape[-1], dtype=dtype),
    )
    store_kv_block(rows, cache, **runs(slots), block_size=BLOCK)
    expected = torch.zeros(3 * BLOCK, shape[-1], dtype=dtype)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = rows[row].flatten()
    assert torch.equal(cache.view(-1, shape[-1]), expected)


def store(**changes: Any) -> Callable[[], object]:
    cache = torch.zeros(3, BLOCK, 1, 8)
    given = {
        "key_in": random(3, 1, 8).half(),
        "key_cache_in": cache.half(),
        **runs([5, 6, 7]),
        "block_size": BLOCK,
    }
    return lambda: store_kv_block(**given | changes)


def find(**changes: Any) -> Callable[[], object]:
    given = {
        "slot_mapping_npu": int32(5, 7, 9),
        **{name: int32(0, 0, 0) for name in GROUPS},
        "block_size": BLOCK,
    }
    return lambda: store_kv_block_metadata(**given | changes)


@scenarios("call, message", {
    "slots in int64": (find(slot_mapping_npu=torch.tensor([1])), "store_kv_block_metadata: slot_mapping_npu: dtype torch.int64"),
    "no slots": (find(slot_mapping_npu=int32()), "store_kv_block_metadata: slot_mapping_npu: must not be empty"),
    "no block": (find(block_size=0), "store_kv_block_metadata: block_size: 0 must be positive"),
    "groups of two lengths": (find(group_key_idx=int32(0)), "store_kv_block_metadata: group_key_idx: shape"),
    "more runs than entries": (find(**{name: int32(0, 0) for name in GROUPS}), "store_kv_block_metadata: group_len: 2 entries are fewer"),
    "rows in float32": (store(key_in=random(3, 1, 8)), "store_kv_block: key_in: dtype torch.float32"),
    "rows of another dtype": (store(key_in=random(3, 1, 8).bfloat16()), "store_kv_block: key_in: dtype torch.bfloat16"),
    "rows of another width": (store(key_in=random(3, 1, 4).half()), "store_kv_block: key_cache_in: shape"),
    "one dimension": (store(key_in=random(3).half()), "store_kv_block: key_in: shape"),
    "blocks with gaps": (store(key_cache_in=torch.zeros(3, BLOCK, 1, 16).half()[..., :8]), "store_kv_block: key_cache_in: strides"),
    "a large block": (store(block_size=1 << 15), "store_kv_block: block_size: 32768 rows"),
    "a run longer than a block": (store(block_size=2), "store_kv_block: group_len: a run of 3"),
    "a run past the rows": (store(group_key_idx=int32(1, 0, 0)), "store_kv_block: group_key_idx: a run of 3 rows from 1"),
    "a run past the cache": (store(group_key_cache_idx=int32(46, 0, 0)), "store_kv_block: group_key_cache_idx: a run of 3 rows to 46"),
    "lengths in int64": (store(group_len=torch.tensor([3, 0, 0])), "store_kv_block: group_len: dtype torch.int64"),
})  # fmt: skip
def test_error_names_operator_and_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_base_calls_are_valid() -> None:
    store()()
    find()()
