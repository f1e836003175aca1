"""Test npu_gather_pa_kv_cache row by row against a definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import NPU, int32, random, scenarios

from ascend_npu_emulator.ops.attention.mla import npu_gather_pa_kv_cache

BLOCKS, SIZE, HEADS = 5, 4, 2
WIDTHS = {"key": 8, "value": 6}
GATHER = "npu_gather_pa_kv_cache: "


def arguments(
    lengths: list[int], offsets: list[int] | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Return arguments for two sequences. The output tensors hold NaN."""
    caches = {
        f"{name}_cache": random(BLOCKS, SIZE, HEADS, width, dtype=dtype)
        for name, width in WIDTHS.items()
    }
    targets = {
        name: torch.full((sum(lengths), HEADS, width), torch.nan, dtype=dtype)
        for name, width in WIDTHS.items()
    }
    return {
        **caches,
        "block_tables": torch.tensor([[2, 0, 4], [1, 3, 10_000]], dtype=torch.int32),
        "seq_lens": int32(*lengths),
        **targets,
        "seq_offset": None if offsets is None else int32(*offsets),
    }


def defined(
    given: dict[str, Any], name: str, lengths: list[int], offsets: list[int]
) -> torch.Tensor:
    """Return the rows of all sequences.

    Row j of sequence i is row j % SIZE of the block in table column offset // SIZE + j // SIZE.
    """
    cache, table = given[f"{name}_cache"], given["block_tables"]
    rows = [
        cache[int(table[i, offset // SIZE + j // SIZE]), j % SIZE]
        for i, (length, offset) in enumerate(zip(lengths, offsets, strict=True))
        for j in range(length)
    ]
    return torch.stack(rows)


CALLS: list[tuple[list[int], list[int] | None]] = [
    ([6, 3], None),
    ([1, 8], [0, 0]),
    ([4, 4], [4, 4]),
    ([0, 2], [8, 4]),
    ([5, 0], [4, 400]),
    ([5, 3], [6, 7]),  # offsets within a block: rows start at the first row of the block
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("running_totals", [False, True])
@pytest.mark.parametrize(("lengths", "offsets"), CALLS)
def test_rows_of_all_sequences_are_loaded_contiguously(
    lengths: list[int], offsets: list[int] | None, running_totals: bool, dtype: torch.dtype
) -> None:
    given = arguments(lengths, offsets, dtype=dtype)
    exact = {name: defined(given, name, lengths, offsets or [0, 0]) for name in WIDTHS}
    if running_totals:
        given |= {"seq_lens": int32(0, lengths[0], sum(lengths)), "is_seq_lens_cumsum": True}
    assert npu_gather_pa_kv_cache(**given) is None
    assert all(torch.equal(given[name], exact[name]) for name in WIDTHS)


def test_device_operator_writes_the_output_tensors() -> None:
    given = arguments([6, 3], [4, 0])
    on_device = {
        name: value.to(NPU) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    torch.ops.npu.npu_gather_pa_kv_cache(**on_device)
    npu_gather_pa_kv_cache(**given)
    assert all(torch.equal(on_device[name].cpu(), given[name]) for name in WIDTHS)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def gather(
    lengths: tuple[int, int] = (6, 3), offsets: tuple[int, int] = (0, 0), **changes: Any
) -> Callable[[], object]:
    given = arguments(list(lengths), list(offsets))
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    return lambda: npu_gather_pa_kv_cache(**given)


BAD_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    **{
        f"{name} with gaps": (
            gather(**{name: strided}),
            GATHER + f"{name}: strides .* must be contiguous",
        )
        for name in arguments([1, 1], [0, 0])
    },
    "a cache without blocks": (
        gather(value_cache=lambda cache: cache[:0]),
        GATHER + r"value_cache: shape .* must not be empty",
    ),
    "no rows": (gather((0, 0)), GATHER + "key: shape .* must not be empty"),
    "rows in float32": (
        gather(key=torch.Tensor.float),
        GATHER + "key: dtype torch.float32 is not supported",
    ),
    "values of another dtype": (
        gather(value=torch.Tensor.half),
        GATHER + "value: dtype torch.float16 must equal key_cache's",
    ),
    "lengths in int64": (
        gather(seq_lens=torch.Tensor.long),
        GATHER + "seq_lens: dtype torch.int64 is not supported",
    ),
    "offsets in int64": (
        gather(seq_offset=torch.Tensor.long),
        GATHER + "seq_offset: dtype torch.int64 is not supported",
    ),
    "a table in int64": (
        gather(block_tables=torch.Tensor.long),
        GATHER + "block_tables: dtype torch.int64 is not supported",
    ),
    "a table of one sequence": (
        gather(block_tables=lambda table: table[0]),
        GATHER + "block_tables: shape .* must have 2",
    ),
    "a cache of three dimensions": (
        gather(key_cache=lambda cache: cache[0]),
        GATHER + "key_cache: shape .* must have 4",
    ),
    "other blocks of values": (
        gather(value_cache=lambda cache: cache[:4]),
        GATHER + "value_cache: shape .* must begin like",
    ),
    "too few lengths": (
        gather(seq_lens=lambda lengths: lengths[:1]),
        GATHER + r"seq_lens: shape \(1,\) must be \(2,\)",
    ),
    "too few totals": (
        gather(is_seq_lens_cumsum=True),
        GATHER + r"seq_lens: shape \(2,\) must be \(3,\)",
    ),
    "totals that begin with 1": (
        gather(is_seq_lens_cumsum=True, seq_lens=int32(1, 6, 9)),
        GATHER + "seq_lens: .* must begin with 0",
    ),
    "decreasing totals": (
        gather(is_seq_lens_cumsum=True, seq_lens=int32(0, 10, 9)),
        GATHER + "seq_lens: .* must not be negative",
    ),
    "a negative offset": (
        gather(seq_offset=int32(0, -4)),
        GATHER + "seq_offset: .* must not be negative",
    ),
    "three offsets for two sequences": (
        gather(seq_offset=int32(0, 0, 0)),
        GATHER + r"seq_offset: shape \(3,\) must be \(2,\)",
    ),
    "an output with more rows": (
        gather(key=lambda key: torch.cat((key, key))),
        GATHER + r"key: shape \(18, 2, 8\) must be \(9, 2, 8\)",
    ),
    "values in place of keys": (
        gather(key=lambda key: key[..., :6].contiguous()),
        GATHER + r"key: shape \(9, 2, 6\) must be",
    ),
    "more rows than blocks": (gather((13, 1)), GATHER + "block_table: sequence 0 has 13 keys"),
    "a block that does not exist": (
        gather((1, 9)),
        GATHER + r"block_table: sequence 1 uses blocks \[10000\]",
    ),
}


@scenarios("call, message", BAD_VALUES)
def test_error_names_operator_and_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_base_call_is_valid() -> None:
    gather()()
