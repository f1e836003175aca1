"""The reference for the slot mapping equals the kernels' sources and the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated import int32
from releases import installed_is, only_with
from test_ops_triton import assert_same

from ascend_npu_emulator.ops.triton.kernels import REFERENCES

SOURCES = {
    "vllm": ("v1/worker/block_table.py", {"BLOCK_SIZE": 4}),
    "vllm_ascend": (
        "ops/triton/compute_slot_mapping.py",
        {"TILE_BLOCK_SIZE": 4, "BLOCK_TABLE_WINDOW_SIZE": 16},
    ),
}
OF_ASCEND = pytest.param("vllm_ascend", marks=only_with(">=0.26", "it takes vllm's kernel"))


@pytest.mark.parametrize("package", ["vllm", OF_ASCEND])
@pytest.mark.parametrize(
    ("ranks", "rank", "turn", "parts"), [(1, 0, 1, 1), (2, 1, 1, 1), (2, 0, 4, 1), (2, 1, 2, 2)]
)
def test_slot_mapping_reference_equals_the_kernels_source(
    package: str, ranks: int, rank: int, turn: int, parts: int
) -> None:
    path, sizes = SOURCES[package]
    if installed_is("<0.26"):
        if parts > 1:
            pytest.skip("blocks of the KV cache are no longer than the kernel's before vllm 0.26")
    else:
        sizes = {**sizes, "KV_CACHE_BLOCK_SIZE": 4 * parts, "BLOCKS_PER_KV_BLOCK": parts}

    def arguments() -> dict[str, Any]:
        return {
            "num_tokens": 5, "max_num_tokens": 12, "query_start_loc_ptr": int32(0, 3, 3, 5),
            "positions_ptr": torch.tensor([5, 6, 7, 0, 31, 9, 9]), "block_table_stride": 8, "block_size": 4,
            "block_table_ptr": torch.arange(32, dtype=torch.int32).view(4, 8) * 3 + 1,
            "slot_mapping_ptr": torch.full((12,), 99, dtype=torch.int32),
            "TOTAL_CP_WORLD_SIZE": ranks, "TOTAL_CP_RANK": rank, "CP_KV_CACHE_INTERLEAVE_SIZE": turn, "PAD_ID": -1, **sizes,
        }  # fmt: skip

    assert_same(package, path, "_compute_slot_mapping_kernel", (4,), arguments)


@pytest.mark.parametrize(
    ("ranks", "rank", "turn", "whole"), [(1, 0, 1, 8), (2, 1, 1, 8), (2, 0, 4, 8), (2, 1, 2, 12)]
)
def test_slots_follow_the_definition_with_several_table_blocks_per_cache_block(
    ranks: int, rank: int, turn: int, whole: int
) -> None:
    """By definition, the part of `ranks` KV cache blocks that a rank holds fills `whole` places."""
    positions, table, slots = (
        torch.tensor([0, 5, 6, 7, 19, 30]),
        torch.arange(16, dtype=torch.int32) * 3 + 1,
        torch.zeros(8),
    )
    REFERENCES["vllm_ascend.ops.triton.compute_slot_mapping._compute_slot_mapping_kernel"](
        (2,),
        {
            "num_tokens": 6, "max_num_tokens": 8, "query_start_loc_ptr": int32(0, 6), "positions_ptr": positions,
            "block_table_ptr": table, "block_table_stride": 16, "block_size": 4, "slot_mapping_ptr": slots,
            "KV_CACHE_BLOCK_SIZE": whole, "TOTAL_CP_WORLD_SIZE": ranks, "TOTAL_CP_RANK": rank,
            "CP_KV_CACHE_INTERLEAVE_SIZE": turn, "PAD_ID": -1,
        },
    )  # fmt: skip
    expected = []
    for position in positions.tolist():
        first, held = position // (whole * ranks) * whole * ranks, []
        for place in range(first, first + whole * ranks):
            if (place - first) // turn % ranks == rank:
                held.append(place)
        if position not in held:
            expected.append(-1)
            continue
        local = first // ranks + held.index(position)  # among all places that this rank holds
        expected.append(int(table[local // 4]) * 4 + local % 4)
    assert slots.tolist() == [*expected, -1, -1]
