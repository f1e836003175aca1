"""Test the products of LoRA adapters row by row against float64 definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import close, random, scenarios

from ascend_npu_emulator.ops.matmul import bgmv_expand, bgmv_shrink, sgmv_expand, sgmv_shrink

HALF = torch.bfloat16
ADAPTERS, RANK, INNER, SIZE, FULL = 3, 8, 48, 32, 96
# The adapters of seven rows; -1 is no adapter. RUNS holds the adapters and lengths of runs of the
# same rows, without the last row. One run is empty.
OF_ROWS = [-1, 2, 2, 0, -1, 1, -1]
RUNS = ([-1, 2, 1, 0, -1, 1], [1, 2, 0, 1, 1, 1])


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def which(runs: bool) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.tensor, RUNS)) if runs else (indices(*OF_ROWS),)


def shrinking(
    runs: bool, *, dtype: torch.dtype = HALF, rank: int = RANK, **changes: Any
) -> dict[str, Any]:
    """Return the named arguments of a shrink product."""
    given = dict(
        zip(("lora_indices", "seq_len") if runs else ("indices",), which(runs), strict=True)
    )
    x, weight = (
        random(7, INNER, seed=1, dtype=dtype),
        random(ADAPTERS, rank, INNER, seed=2, dtype=dtype),
    )
    return {
        "x": x,
        "weight": weight,
        **given,
        "y": random(7, rank, seed=3),
        "scale": 0.75,
        **changes,
    }


def expanding(
    runs: bool, *, dtype: torch.dtype = HALF, rank: int = RANK, **changes: Any
) -> dict[str, Any]:
    given = dict(
        zip(("lora_indices", "seq_len") if runs else ("indices",), which(runs), strict=True)
    )
    x, weight = random(7, rank, seed=1), random(ADAPTERS, SIZE, rank, seed=2, dtype=dtype)
    return {
        "x": x,
        "weight": weight,
        **given,
        "y": random(7, FULL, seed=3, dtype=dtype),
        "slice_offset": 16,
        "slice_size": SIZE,
        **changes,
    }


SHRINK: dict[str, Callable[..., None]] = {"bgmv": bgmv_shrink, "sgmv": sgmv_shrink}
EXPAND: dict[str, Callable[..., torch.Tensor]] = {"bgmv": bgmv_expand, "sgmv": sgmv_expand}


@pytest.mark.parametrize("ones", [False, True], ids=["three dimensions", "four dimensions"])
@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHRINK)
def test_shrink_writes_the_scaled_product_of_each_row_and_adapter(
    name: str, dtype: torch.dtype, ones: bool
) -> None:
    given = shrinking(name == "sgmv", dtype=dtype)
    x, weight, before = given["x"].double(), given["weight"].double(), given["y"].clone()
    SHRINK[name](**{**given, "weight": given["weight"].unsqueeze(1)} if ones else given)
    for row, adapter in enumerate(OF_ROWS):
        if adapter < 0:
            assert torch.equal(given["y"][row], before[row])
        else:  # the old values are overwritten
            close(
                given["y"][row],
                torch.stack([0.75 * (weight[adapter, r] * x[row]).sum() for r in range(RANK)]),
            )


@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=str)
@pytest.mark.parametrize("name", EXPAND)
def test_expand_adds_the_product_of_each_row_and_adapter_to_a_slice(
    name: str, dtype: torch.dtype, rank: int
) -> None:
    given = expanding(name == "sgmv", dtype=dtype, rank=rank)
    x, weight, before = given["x"].double(), given["weight"].double(), given["y"].clone()
    assert EXPAND[name](**given) is given["y"]
    for row, adapter in enumerate(OF_ROWS):
        found, own = given["y"][row], before[row]
        if adapter < 0:
            assert torch.equal(found, own)
            continue
        added = torch.stack([(weight[adapter, column] * x[row]).sum() for column in range(SIZE)])
        close(found[16:48], own[16:48].double() + added)
        assert torch.equal(found[:16], own[:16])
        assert torch.equal(found[48:], own[48:])


def test_expand_rounds_once() -> None:
    """The eight terms are 3/2048 each. In bfloat16, 1 + 3/2048 is 1."""
    given = expanding(
        False, x=torch.full((1, 8), 1 / 8), indices=indices(0), y=torch.ones(1, FULL, dtype=HALF)
    )
    given["weight"] = torch.full((1, SIZE, 8), 3 / 256, dtype=HALF)
    bgmv_expand(**given)
    assert given["y"][0, 16].item() == 1 + 2 / 128  # 1 + 3/256 is a tie and rounds to even


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an adapter past the end": (lambda: bgmv_shrink(**shrinking(False, indices=indices(*[3] * 7))), "indices: .* past the 3 adapters"),
    "an adapter past the end, expanding": (
        lambda: bgmv_expand(**expanding(False, indices=indices(*[0] * 6, 3))), "indices: .* past the 3 adapters"),
    "a run with an adapter past the end": (
        lambda: sgmv_expand(**expanding(True, lora_indices=indices(0, 3), seq_len=indices(1, 6))), "lora_indices: .* past the 3 adapters"),
    "fewer indices than rows": (lambda: bgmv_shrink(**shrinking(False, indices=indices(0))), "indices: 1 indices for 7 rows"),
    "fewer lengths than runs": (lambda: sgmv_shrink(**shrinking(True, seq_len=indices(7))), "lora_indices: 6 indices for 1 runs"),
    "a negative length": (lambda: sgmv_shrink(**shrinking(True, seq_len=indices(1, 2, -1, 1, 1, 1))), "seq_len: .* must not be negative"),
    "int32 indices": (lambda: bgmv_shrink(**shrinking(False, indices=indices(*OF_ROWS).int())), "indices: dtype"),
    "int32 lengths": (lambda: sgmv_shrink(**shrinking(True, seq_len=indices(*RUNS[1]).int())), "seq_len: dtype"),
    "rows of float32": (lambda: bgmv_shrink(**shrinking(False, dtype=torch.float32)), "x: dtype"),
    "sums of bfloat16": (lambda: bgmv_shrink(**shrinking(False, y=random(7, RANK, dtype=HALF))), "y: dtype"),
    "shrunk rows of bfloat16": (lambda: bgmv_expand(**expanding(False, x=random(7, RANK, dtype=HALF))), "x: dtype"),
    "weights of another dtype": (
        lambda: bgmv_expand(**expanding(False, weight=random(ADAPTERS, SIZE, RANK, dtype=torch.float16))), "weight: dtype"),
    "a rank without a kernel": (lambda: bgmv_expand(**expanding(False, rank=24)), "weight: rank 24"),
    "a matrix of another shape": (
        lambda: bgmv_shrink(**shrinking(False, weight=random(ADAPTERS, INNER, RANK, dtype=HALF))), "weight: shape"),
    "more columns than x": (
        lambda: bgmv_shrink(**shrinking(False, y=random(7, 64), weight=random(ADAPTERS, 64, INNER, dtype=HALF))), "y: shape"),
    "a slice past the end": (lambda: bgmv_expand(**expanding(False, slice_offset=80)), "slice_offset: columns 80 to 112"),
    "a slice before the beginning": (lambda: bgmv_expand(**expanding(False, slice_offset=-16)), "slice_offset"),
    "a slice that begins between copies": (lambda: bgmv_expand(**expanding(False, slice_offset=8)), "slice_offset: 8"),
    "rows with gaps": (lambda: bgmv_shrink(**shrinking(False, x=random(7, 2 * INNER, dtype=HALF)[:, :INNER])), "x: strides"),
    "another number of rows": (lambda: sgmv_shrink(**shrinking(True, y=random(6, RANK))), "y: 6 rows"),
}  # fmt: skip


@scenarios("call, message", REFUSED)
def test_error_names_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"gmv_(shrink|expand): {message}"):
        call()
