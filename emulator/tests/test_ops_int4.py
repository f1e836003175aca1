"""Test products of int8 rows and int4 matrices against definitions in Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import random, scenarios
from operator_cases import int4, int8, scales_of_int4

from ascend_npu_emulator.ops import moe_experts
from ascend_npu_emulator.ops.poison import POISON
from ascend_npu_emulator.ops.quantization import int4 as operators

BF16, INT8_POISON = 15, 127
ROUNDINGS = 2**-10  # two halves rounded to float16, relative to the sum of magnitudes
OF_SCALE = 2**-10  # the matrix unit drops the 13 lowest bits of a scale


def numbers_of(packed: torch.Tensor) -> list[list[int]]:
    """Return the int4 numbers of an int32 matrix, read from the hexadecimal digits."""
    rows = [[f"{word & 0xFFFFFFFF:08x}" for word in row] for row in packed.tolist()]
    return [
        [int(digit, 16) - 16 * (int(digit, 16) > 7) for word in row for digit in reversed(word)]
        for row in rows
    ]


def plain(
    row: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> tuple[list[float], list[float]]:
    """Return the scaled product of a row and the error bound of float16, for each column.

    Args:
        scales: float32 [parts, N].
    """
    numbers, values = numbers_of(packed), row.tolist()
    part = len(values) // len(scales)
    sums, slacks = [], []
    for column in range(packed.shape[1] * 8):
        terms = [
            value * numbers[k][column] * scales[k // part, column].item()
            for k, value in enumerate(values)
        ]
        halves = [
            abs(
                sum(
                    half(value) * numbers[k][column] * scales[k // part, column].item()
                    for k, value in enumerate(values)
                )
            )
            * weight
            for half, weight in ((lambda x: x // 16, 16), (lambda x: x % 16 - 8, 1))
        ]
        sums.append(math.fsum(terms))
        slacks.append(len(scales) * ROUNDINGS * sum(halves) + OF_SCALE * sum(halves) + 1e-3)
    return sums, slacks


def compensation(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return 8 times the sum of the scaled numbers of each column of a matrix."""
    numbers = torch.tensor(numbers_of(packed)).double()
    return (
        8 * (numbers * scales.double().repeat_interleave(len(numbers) // len(scales), 0)).sum(0)
    ).float()


def as_float(scales: torch.Tensor) -> torch.Tensor:
    return scales.int().view(torch.float32)


GROUPS = [[2, 0, 3], [0, 6, 0], [0, 0, 0]]


def group_of(counts: list[int], row: int) -> int | None:
    """Return the group of a row, or None for a row after the last group."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    return next((group for group, end in enumerate(ends) if row < end), None)


def grouped_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    **changes: Any,
) -> torch.Tensor:
    given = {
        "group_type": 0,
        "group_list_type": 1,
        "split_item": 2,
        "output_dtype": BF16,
        **changes,
    }
    (y,) = moe_experts.npu_grouped_matmul([rows], [weight], scale=[scale], bias=[bias], **given)
    return y


@pytest.mark.parametrize("counts", GROUPS)
@pytest.mark.parametrize("parts", [1, 2], ids=["a scale per column", "a scale per 256 rows"])
def test_int4_product_is_exact_except_for_rounding_of_its_halves(
    counts: list[int], parts: int
) -> None:
    inner = 256 * parts
    x, weight, scale, tokens = (
        int8(6, inner),
        int4(3, inner, 8, seed=1),
        scales_of_int4(3, parts, 64, seed=2),
        random(6, seed=3).abs(),
    )
    bias = torch.stack(
        [compensation(matrix, as_float(of)) for matrix, of in zip(weight, scale, strict=True)]
    )
    groups = {"per_token_scale": [tokens], "group_list": torch.tensor(counts)}
    y = grouped_product(x.clone(), weight, scale, bias, **groups)
    assert y.dtype == torch.bfloat16
    for row in range(6):
        group = group_of(counts, row)
        if group is None:
            assert (y[row] == POISON).all(), "rows past the last group are undefined, not zero"
            continue
        for found, exact, slack in zip(
            y[row].tolist(), *plain(x[row], weight[group], as_float(scale[group])), strict=True
        ):
            token = tokens[row].item()
            assert abs(found - exact * token) <= slack * token + abs(exact * token) * 2**-8


def test_both_halves_are_rounded_to_float16_before_the_sum() -> None:
    """127 = 16 * 7 + 7 + 8. With int4 numbers of 7, each half of a row of 64 is 3136."""
    x, weight = (
        torch.full((1, 64), 127, dtype=torch.int8),
        torch.full((1, 64, 8), 0x77777777, dtype=torch.int32),
    )
    factor = 1.5 + 2**-10
    stored = torch.tensor([factor]).view(torch.int32).long().expand(1, 1, 64).contiguous()
    half = torch.tensor(3136 * factor).half().item()
    assert abs(half - 3136 * factor) > 0.5
    summand = torch.full((1, 64), -17.0 * half)
    y = grouped_product(
        x, weight, stored, summand, per_token_scale=[torch.ones(1)], group_list=torch.tensor([1])
    )
    assert not y.any()


def test_13_lowest_bits_of_a_scale_are_ignored() -> None:
    """The bits would add an eighth of a float16 step to 64, the product of ones."""
    x, weight = (
        torch.full((1, 64), 1, dtype=torch.int8),
        torch.full((1, 64, 8), 0x11111111, dtype=torch.int32),
    )
    stored = (torch.ones(1, 1, 64).view(torch.int32) | 0x1FFF).long()
    groups = {"per_token_scale": [torch.ones(1)], "group_list": torch.tensor([1])}
    assert (grouped_product(x, weight, stored, torch.full((1, 64), 7.0 * 64), **groups) == 0).all()


def test_int4_numbers_are_unpacked_from_the_lowest_bits() -> None:
    """Row k has a single 1, in column k. The summand adds back the 8 that each input loses."""
    weight = torch.zeros(1, 64, 8, dtype=torch.int32)
    for k in range(64):
        weight[0, k, k // 8] = 1 << (4 * (k % 8)) if k % 8 < 7 else 1 << 28
    ones = torch.ones(1, dtype=torch.float32).view(torch.int32).long().expand(1, 1, 64).contiguous()
    x = torch.arange(-64, 64, 2, dtype=torch.int8).view(1, 64)
    summand = torch.full((1, 64), 8.0)
    y = grouped_product(
        x.clone(),
        weight,
        ones,
        summand,
        per_token_scale=[torch.ones(1)],
        group_list=torch.tensor([1]),
    )
    assert y[0].tolist() == x[0].tolist()


def test_input_rows_are_undefined_after_an_int4_product() -> None:
    x = int8(2, 64)
    groups = {"per_token_scale": [torch.ones(2)], "group_list": torch.tensor([1])}
    grouped_product(x, int4(1, 64, 8), scales_of_int4(1, 1, 64), torch.zeros(1, 64), **groups)
    assert (x == INT8_POISON).all()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


@pytest.mark.parametrize("counts", GROUPS)
@pytest.mark.parametrize("totals", [False, True], ids=["rows per group", "running totals"])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_fused_product_quantises_each_row_after_swiglu(
    counts: list[int], totals: bool, limit: float
) -> None:
    x, weight, scale, tokens = (
        int8(6, 64),
        int4(3, 64, 8, seed=1),
        scales_of_int4(3, 64, seed=2),
        random(6, seed=3).abs() / 9 + 0.05,
    )
    assist = torch.stack(
        [compensation(matrix, as_float(of)[None]) for matrix, of in zip(weight, scale, strict=True)]
    )
    list_of = torch.tensor(counts).cumsum(0) if totals else torch.tensor(counts)
    options = {
        "weight_assist_matrix": [assist],
        "group_list_type": 0 if totals else 1,
        "swiglu_limit": limit,
    }
    y, scales = operators.grouped_matmul_swiglu_quant_v2(
        x, [weight], [scale], tokens, list_of, **options
    )
    assert (y.dtype, scales.dtype) == (torch.int8, torch.float32)
    for row in range(6):
        group = group_of(counts, row)
        if group is None:
            assert (y[row] == INT8_POISON).all()
            assert scales[row] == POISON
            continue
        sums, slacks = plain(x[row], weight[group], as_float(scale[group])[None])
        product = torch.tensor(sums).double() * tokens[row].double()
        gate, up = product.chunk(2)
        if limit:
            assert (gate > limit).any()
            assert (up.abs() > limit).any()
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        exact = silu(gate) * up
        slack = max(slacks) * tokens[row].item() * (gate.abs().max() + up.abs().max() + 1).item()
        assert scales[row].item() == pytest.approx(exact.abs().max().item() / 127, abs=slack / 127)
        assert y[row].abs().max() == 127
        assert ((y[row] * scales[row] - exact).abs() <= scales[row] * 0.54 + slack).all()


def test_fused_product_of_zeros_is_zero() -> None:
    zeros = torch.zeros(1, 64, dtype=torch.int8)
    weight, scale = int4(1, 64, 8), scales_of_int4(1, 64)
    assist = compensation(weight[0], as_float(scale)).unsqueeze(0)
    y, scales = operators.grouped_matmul_swiglu_quant_v2(
        zeros, [weight], [scale], torch.zeros(1), torch.tensor([1]), weight_assist_matrix=[assist]
    )
    assert not y.any()
    assert scales.tolist() == [0]


# Refused calls

SCALE = scales_of_int4(2, 1, 64)


def grouped(
    x: torch.Tensor | None = None, weight: torch.Tensor | None = None, **changes: Any
) -> Callable[[], object]:
    rows = int8(3, 64) if x is None else x
    given = {
        "scale": [SCALE], "bias": [random(2, 64)], "per_token_scale": [torch.ones(3)], "group_list": torch.tensor([1, 1]),
        "group_type": 0, "group_list_type": 1, "split_item": 2, "output_dtype": BF16, **changes,
    }  # fmt: skip
    return lambda: moe_experts.npu_grouped_matmul(
        [rows], [int4(2, 64, 8) if weight is None else weight], **given
    )


def fused(**changes: Any) -> Callable[[], object]:
    given = {
        "x": int8(3, 64), "weight": [int4(2, 64, 8)], "weight_scale": [SCALE[:, 0]], "x_scale": torch.ones(3),
        "group_list": torch.tensor([1, 2]), "weight_assist_matrix": [random(2, 64)], **changes,
    }  # fmt: skip
    return lambda: operators.grouped_matmul_swiglu_quant_v2(**given)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "running totals": (grouped(group_list_type=0), ValueError, "group_list_type: 0 must be 1"),
    "no bias": (grouped(bias=None), ValueError, "bias: must be given"),
    "no scale": (grouped(scale=None), ValueError, "scale: must be given"),
    "no scale of rows": (grouped(per_token_scale=None), ValueError, "per_token_scale: must be given"),
    "a bias of bfloat16": (grouped(bias=[random(2, 64).bfloat16()]), ValueError, "bias: dtype"),
    "a bias for one group": (grouped(bias=[random(1, 64)]), ValueError, "bias: shape"),
    "a scale of float32": (grouped(scale=[random(2, 1, 64)]), ValueError, "scale: dtype torch.float32"),
    "a scale without parts": (grouped(scale=[SCALE[:, 0]]), ValueError, "scale: shape"),
    "parts of 32 rows": (grouped(scale=[SCALE.repeat(1, 2, 1)]), ValueError, "scale: 2 parts of 64 rows"),
    "a scale for another width": (grouped(scale=[SCALE[..., :8]]), ValueError, "scale: shape"),
    "scales of rows as a column": (grouped(per_token_scale=[torch.ones(3, 1)]), ValueError, "per_token_scale: shape"),
    "a product of float16": (grouped(output_dtype=5), NotImplementedError, "output_dtype=5"),
    "a product with a hint": (grouped(tuning_config=[16]), NotImplementedError, "tuning_config"),
    "a weight for longer rows": (grouped(int8(3, 128)), ValueError, "weight: shape"),
    "rows that are no multiple of 64": (grouped(int8(3, 32), int4(2, 32, 8)), ValueError, "x: 32 columns"),
    "columns that are no multiple of 64": (grouped(weight=int4(2, 64, 4)), ValueError, "weight: 32 columns"),
    "rows above 18432": (grouped(int8(3, 18496), int4(2, 18496, 8)), ValueError, "x: last dimension 18496 must not exceed 18432"),
    "a fused weight of int8": (fused(weight=[int8(2, 64, 64)]), NotImplementedError, "weight=a tensor"),
    "a fused weight of floats": (fused(weight=[random(2, 64, 8)]), ValueError, "weight: dtype"),
    "a tensor for each expert": (fused(weight=[int4(64, 8)] * 2), NotImplementedError, "weight='2 tensors'"),
    "no assist matrix": (fused(weight_assist_matrix=None), ValueError, "weight_assist_matrix: must be given"),
    "an assist matrix of one group": (fused(weight_assist_matrix=[random(1, 64)]), ValueError, "weight_assist_matrix: shape"),
    "an assist matrix of float16": (fused(weight_assist_matrix=[random(2, 64).half()]), ValueError, "weight_assist_matrix: dtype"),
    "fused scales of float32": (fused(weight_scale=[random(2, 64)]), ValueError, "weight_scale: dtype"),
    "fused scales with parts": (fused(weight_scale=[SCALE]), ValueError, "weight_scale: shape"),
    "scales of parts": (fused(dequant_mode=1), NotImplementedError, "dequant_mode=1"),
    "rows of bfloat16": (fused(x=random(3, 64).bfloat16()), ValueError, "x: dtype"),
    "fused scales of rows as a column": (fused(x_scale=torch.ones(3, 1)), ValueError, "x_scale: shape"),
    "groups in int32": (fused(group_list=torch.tensor([1, 2]).int()), ValueError, "group_list: dtype"),
    "pairs of group and rows": (fused(group_list_type=2), ValueError, "group_list_type: 2"),
    "a smooth scale": (fused(smooth_scale=torch.ones(2)), ValueError, "smooth_scale: must not"),
    "a negative limit": (fused(swiglu_limit=-1.0), ValueError, "swiglu_limit: -1.0"),
    "a transposed weight": (fused(transpose_weight=True), NotImplementedError, "transpose_weight"),
    "a bias": (fused(bias=torch.ones(64)), NotImplementedError, "bias"),
    "a width above 10240": (
        fused(weight=[int4(1, 64, 1288)], weight_scale=[SCALE[:1, 0].repeat(1, 161)], weight_assist_matrix=[random(1, 10304)]),
        ValueError, "weight: 10304 columns must not exceed 10240"),
    "rows of 20032": (fused(x=int8(3, 20032), weight=[int4(2, 20032, 8)]), ValueError, "x: last dimension 20032 must not exceed 19999"),
}  # fmt: skip


@scenarios("call, error, message", REFUSED)
def test_error_names_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
