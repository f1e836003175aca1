"""Test quantisation and quantised products against definitions in whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from emulated import int32, random, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import int8

from ascend_npu_emulator.ops import moe_experts
from ascend_npu_emulator.ops.poison import POISON
from ascend_npu_emulator.ops.quantization import experts, linear, shared_experts

BFLOAT = torch.bfloat16
QINT8, INT8, INT32, BF16 = 12, 1, 3, 15  # c10::ScalarType
INT8_POISON = 127


def bfloat(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=BFLOAT)


def quantise(
    x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None = None
) -> torch.Tensor:
    return linear.npu_quantize(x, scales, zero_points, QINT8, -1, False)


def half_even(value: Fraction) -> int:
    return max(-128, min(127, round(value)))  # Python rounds half to even


def sums(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Compute the products with Python integers and return them as float64."""
    left, right = rows.tolist(), matrix.t().tolist()
    return torch.tensor(
        [
            [float(sum(a * b for a, b in zip(row, column, strict=True))) for column in right]
            for row in left
        ]
    ).double()


def near(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that bfloat16 `actual` is the rounded `exact`, or a neighbour."""
    assert actual.dtype == BFLOAT
    torch.testing.assert_close(actual.double(), exact, atol=1e-9, rtol=2**-8 * 1.01)


# Quantising


def test_ties_are_rounded_to_even() -> None:
    assert quantise(bfloat(0.5, 1.5, 2.5, -0.5, -1.5, -2.5), bfloat(1.0)).tolist() == [
        0,
        2,
        2,
        0,
        -2,
        -2,
    ]


def test_values_out_of_range_are_saturated() -> None:
    assert quantise(bfloat(127.5, 1e30, -128.5, -1e30), bfloat(1.0)).tolist() == [
        127,
        127,
        -128,
        -128,
    ]
    assert quantise(bfloat(100.0, -100.0), bfloat(1.0), bfloat(60.0)).tolist() == [127, -40]


@given(
    st.lists(
        st.tuples(st.integers(-300, 300), st.integers(-90, 90), st.integers(-128, 127)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_static_quantisation_rounds_x_times_scale_plus_zero_point(
    columns: list[tuple[int, int, int]],
) -> None:
    units = zip(zip(*columns, strict=True), (16, 64, 1), strict=True)
    x, scales, zeros = (bfloat(*(value / unit for value in values)) for values, unit in units)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(x.tolist(), scales.tolist(), zeros.tolist(), strict=True)
    ]
    found = quantise(x.repeat(2, 1), scales, zeros)
    assert found.dtype == torch.int8
    assert found.tolist() == [[half_even(value) for value in exact]] * 2


def test_static_quantisation_rounds_once() -> None:
    """Rounding x * scale, 101.285, to 101.5 would give 102. The exact sum, 101.496, gives 101."""
    x, scale, zero = 1.0078125, 100.5, 0.2109375
    assert quantise(bfloat(x), bfloat(scale), bfloat(zero)).tolist() == [
        half_even(Fraction(x) * Fraction(scale) + Fraction(zero))
    ]


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16])
@pytest.mark.parametrize("shape", [(3, 8), (2, 1, 5)])
def test_dynamic_quantisation_maps_the_largest_of_each_row_to_127(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = random(*shape, dtype=dtype) * 7
    rows, scales = linear.npu_dynamic_quant(x, dst_type=INT8)
    assert (rows.shape, rows.dtype, scales.shape, scales.dtype) == (
        x.shape,
        torch.int8,
        x.shape[:-1],
        torch.float32,
    )
    flat = rows.reshape(-1, shape[-1])
    for row, scale, quantised in zip(
        x.reshape(-1, shape[-1]).double(), scales.flatten().double(), flat, strict=True
    ):
        assert scale.item() == pytest.approx(row.abs().max().item() / 127, rel=1e-6)
        assert quantised.abs().max() == 127
        assert ((quantised * scale - row).abs() <= scale * 0.50001).all()


def test_row_of_zeros_stays_zero() -> None:
    rows, scales = linear.npu_dynamic_quant(torch.zeros(2, 4, dtype=BFLOAT))
    assert (rows == 0).all()
    assert (scales == 0).all()


# Products


@pytest.mark.parametrize("scale_dtype", [torch.float32, BFLOAT])
def test_exact_integer_sums_are_scaled_by_column_and_row(scale_dtype: torch.dtype) -> None:
    rows, matrix, scale = (
        int8(4, 33, seed=1),
        int8(33, 6, seed=2),
        random(6, dtype=scale_dtype).abs(),
    )
    exact = sums(rows, matrix) * scale.double()
    near(linear.npu_quant_matmul(rows, matrix, scale, output_dtype=BF16), exact)
    tokens = random(4, seed=3).abs()
    near(
        linear.npu_quant_matmul(rows, matrix, scale, pertoken_scale=tokens, output_dtype=BF16),
        exact * tokens.double().unsqueeze(1),
    )


def test_only_an_integer_bias_is_scaled() -> None:
    rows, matrix, scale, bias = (
        int8(2, 8),
        int8(8, 3, seed=1),
        random(3).abs(),
        int32(70_000, -5, 12),
    )
    near(
        linear.npu_quant_matmul(rows, matrix, scale, bias=bias, output_dtype=BF16),
        (sums(rows, matrix) + bias) * scale.double(),
    )
    floats = random(3, seed=2)
    exact = sums(rows, matrix) * scale.double() + floats.double()
    near(linear.npu_quant_matmul(rows, matrix, scale, bias=floats, output_dtype=BF16), exact)


@pytest.mark.parametrize("scale_dtype", [torch.float32, BFLOAT])
def test_int32_result_holds_the_unscaled_sums(scale_dtype: torch.dtype) -> None:
    rows, matrix, scale, bias = (
        int8(4, 33, seed=1),
        int8(33, 6, seed=2),
        random(6, dtype=scale_dtype),
        int32(70_000, -5, 12, 0, 1, 2),
    )
    found = linear.npu_quant_matmul(rows, matrix, scale, output_dtype=INT32)
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), sums(rows, matrix))
    assert torch.equal(
        linear.npu_quant_matmul(rows, matrix, scale, bias=bias, output_dtype=INT32), found + bias
    )


def test_largest_sums_are_exact() -> None:
    """float32 would lose the last 1 of 65534 * 128 * 128 + 1."""
    rows = torch.full((1, 65535), -128, dtype=torch.int8)
    assert linear.int8_product(rows, rows.t()).tolist() == [[65535 * 128 * 128]]
    rows[0, 0] = 1
    assert linear.int8_product(rows, rows.t()).tolist() == [[65534 * 128 * 128 + 1]]


# Experts


def by_group(ends: list[int], rows: int) -> list[int | None]:
    """Return the group of each row, or None for rows after the last group."""
    return [
        next((group for group, end in enumerate(ends) if row < end), None) for row in range(rows)
    ]


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 0], [1, 3, 6]])
def test_quantised_grouped_product_scales_by_expert_and_row(ends: list[int]) -> None:
    rows, stack, scale, tokens = (
        int8(6, 9),
        int8(3, 9, 4, seed=1),
        random(3, 4, dtype=BFLOAT).abs(),
        random(6, seed=2).abs(),
    )
    (y,) = moe_experts.npu_grouped_matmul(
        [rows],
        [stack],
        scale=[scale],
        per_token_scale=[tokens],
        split_item=2,
        group_type=0,
        group_list_type=0,
        group_list=torch.tensor(ends),
        output_dtype=BF16,
    )
    for row, group in enumerate(by_group(ends, 6)):
        if group is None:
            assert (y[row] == POISON).all(), "rows past the last group are undefined, not zero"
        else:
            near(
                y[row],
                (
                    sums(rows[row : row + 1], stack[group])
                    * scale[group].double()
                    * tokens[row].double()
                )[0],
            )


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 0], [1, 3, 6]])
def test_fused_product_quantises_each_row_after_swiglu(ends: list[int]) -> None:
    x, weight, scale, tokens = (
        int8(6, 9),
        int8(3, 9, 8, seed=1),
        random(3, 8).abs() / 400,
        random(6, seed=2).abs() / 9,
    )
    y, scales, _ = experts.grouped_matmul_swiglu_quant_weight_nz(
        x, weight, scale, tokens, torch.tensor(ends)
    )
    for row, group in enumerate(by_group(ends, 6)):
        if group is None:
            assert (y[row] == INT8_POISON).all()
            assert scales[row] == POISON
            continue
        product = (
            sums(x[row : row + 1], weight[group]) * tokens[row].double() * scale[group].double()
        )[0]
        exact = product[:4] / (1 + (-product[:4]).exp()) * product[4:]
        assert scales[row].item() == pytest.approx(exact.abs().max().item() / 127, rel=1e-5)
        assert y[row].abs().max() == 127
        assert ((y[row] * scales[row] - exact).abs() <= scales[row] * 0.501).all()


# SwiGLU of sums


def swiglu(
    x: torch.Tensor, scale: torch.Tensor, tokens: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return shared_experts.npu_dequant_swiglu_quant(
        x, weight_scale=scale, activation_scale=tokens, quant_mode=1, **options
    )


def quantised_near(y: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that int8 `y` [M, H] and `scale` [M] are the quantised rows of float64 `exact`."""
    assert (y.dtype, scale.dtype) == (torch.int8, torch.float32)
    torch.testing.assert_close(scale.double(), exact.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    assert (y.abs().amax(-1) == 127).all()
    assert (
        (y * scale.double().unsqueeze(-1) - exact).abs() <= scale.double().unsqueeze(-1) * 0.501
    ).all()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


SUMS, OF_COLUMNS, OF_ROWS = (
    int8(6, 64).int() * 300,
    random(64, seed=1).abs() / 1000,
    random(6, seed=2).abs() / 4,
)


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
@pytest.mark.parametrize("options", [{"swiglu_mode": 1}, {"group_index": torch.tensor([6])}])
def test_sums_are_scaled_by_column_and_row_before_swiglu(
    options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    scaled = SUMS * OF_COLUMNS.double() * OF_ROWS.double().unsqueeze(1)
    y, scale = swiglu(SUMS.view(*shape, 64), OF_COLUMNS, OF_ROWS.view(*shape, 1), **options)
    assert (y.shape, scale.shape) == ((*shape, 32), shape)
    quantised_near(y.view(6, 32), scale.view(6), silu(scaled[:, :32]) * scaled[:, 32:])


def test_sums_without_row_scales_are_scaled_by_column() -> None:
    scaled = SUMS * OF_COLUMNS.double()
    y, scale = shared_experts.npu_dequant_swiglu_quant(
        SUMS, weight_scale=OF_COLUMNS, quant_mode=1, swiglu_mode=1
    )
    quantised_near(y, scale, silu(scaled[:, :32]) * scaled[:, 32:])


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 6, 0], [0, 0, 0]])
def test_each_group_of_sums_uses_its_scales(counts: list[int]) -> None:
    columns = random(3, 64, seed=5).abs() / 1000
    y, scale = swiglu(SUMS, columns, OF_ROWS, group_index=torch.tensor(counts))
    for row, group in enumerate(by_group(torch.tensor(counts).cumsum(0).tolist(), 6)):
        if group is None:
            assert (y[row] == INT8_POISON).all(), "rows past the last group are undefined, not zero"
            assert scale[row] == POISON
            continue
        scaled = SUMS[row] * columns[group].double() * OF_ROWS[row].double()
        quantised_near(
            y[row : row + 1], scale[row : row + 1], (silu(scaled[:32]) * scaled[32:]).unsqueeze(0)
        )


def test_swiglu_mode_1_clamps_both_halves_and_adds_glu_bias() -> None:
    scaled = SUMS * OF_COLUMNS.double() * OF_ROWS.double().unsqueeze(1)
    gate, up = scaled[:, :32].clamp(max=2.5), scaled[:, 32:].clamp(-2.5, 2.5)
    assert ((scaled[:, :32] < -2.5).any(), (scaled[:, 32:].abs() > 2.5).any()) == (True, True)
    tuned = {"clamp_limit": 2.5, "glu_alpha": 1.702, "glu_bias": 1.0}
    quantised_near(
        *swiglu(SUMS, OF_COLUMNS, OF_ROWS, swiglu_mode=1, **tuned),
        gate / (1 + (-1.702 * gate).exp()) * (up + 1),
    )
    plain = swiglu(SUMS, OF_COLUMNS, OF_ROWS, group_index=torch.tensor([6]))
    for found, expected in zip(
        swiglu(SUMS, OF_COLUMNS, OF_ROWS, group_index=torch.tensor([6]), **tuned),
        plain,
        strict=True,
    ):
        assert torch.equal(found, expected)  # mode 0 ignores these options


def test_zero_sums_stay_zero() -> None:
    y, scale = swiglu(torch.zeros(1, 64, dtype=torch.int32), OF_COLUMNS, OF_ROWS[:1], swiglu_mode=1)
    assert (y == 0).all()
    assert scale.tolist() == [0]


ROUTING = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}


def test_routing_quantises_copied_rows_and_leaves_other_rows_undefined() -> None:
    x, chosen = random(4, 6, dtype=BFLOAT), int32(0, 3, 3, 1, 2, 0, 1, 2).view(4, 2)
    plain, places, counts, _ = moe_experts.npu_moe_init_routing_custom(
        x, chosen, active_expert_range=[1, 3], quant_mode=-1, **ROUTING
    )
    rows, *others, scales = moe_experts.npu_moe_init_routing_custom(
        x, chosen, active_expert_range=[1, 3], quant_mode=1, **ROUTING
    )
    assert all(torch.equal(one, other) for one, other in zip(others, (places, counts), strict=True))
    count = int(counts.sum())
    expected, expected_scales = linear.npu_dynamic_quant(plain[:count])
    assert torch.equal(rows[:count], expected)
    assert torch.equal(scales[:count], expected_scales)
    assert (rows[count:] == INT8_POISON).all()
    assert (scales[count:] == POISON).all()


def test_routing_copies_quantised_rows_with_their_scales() -> None:
    rows, scales = linear.npu_dynamic_quant(random(4, 6, dtype=BFLOAT))
    chosen = int32(0, 3, 3, 1, 2, 0, 1, 2).view(4, 2)
    copied, places, _, copied_scales = moe_experts.npu_moe_init_routing_custom(
        rows, chosen, scale=scales, active_expert_range=[0, 4], quant_mode=-1, **ROUTING
    )
    for pair, place in enumerate(places.tolist()):
        assert torch.equal(copied[place], rows[pair // 2])
        assert copied_scales[place] == scales[pair // 2]


# Refused calls

X, HALF = int8(2, 4), random(2, 4, dtype=BFLOAT)


def product(x1: torch.Tensor = X, **changes: Any) -> Callable[[], object]:
    arguments = {"x2": int8(4, 3), "scale": torch.ones(3), "output_dtype": BF16, **changes}
    return lambda: linear.npu_quant_matmul(x1, **arguments)


def static(input: torch.Tensor = HALF, **changes: Any) -> Callable[[], object]:
    given = {
        "scales": bfloat(1.0),
        "zero_points": None,
        "dtype": QINT8,
        "axis": -1,
        "div_mode": False,
        **changes,
    }
    return lambda: linear.npu_quantize(input, **given)


def dynamic(input: torch.Tensor = HALF, **changes: Any) -> Callable[[], object]:
    return lambda: linear.npu_dynamic_quant(input, **changes)


def fused(**changes: Any) -> Callable[[], object]:
    given = {
        "x": X,
        "weight": int8(3, 4, 6),
        "weight_scale": torch.ones(3, 6),
        "x_scale": torch.ones(2),
        "group_list": torch.tensor([1, 1, 2]),
    }
    return lambda: experts.grouped_matmul_swiglu_quant_weight_nz(**{**given, **changes})


def of_sums(x: torch.Tensor = SUMS, **changes: Any) -> Callable[[], object]:
    given = {
        "weight_scale": OF_COLUMNS,
        "activation_scale": OF_ROWS,
        "quant_mode": 1,
        "swiglu_mode": 1,
        **changes,
    }
    return lambda: shared_experts.npu_dequant_swiglu_quant(x, **given)


def grouped(**changes: Any) -> Callable[[], object]:
    given = {
        "scale": [torch.ones(3, 6)],
        "per_token_scale": [torch.ones(2)],
        "group_list": torch.tensor([1, 1, 2]),
        "group_list_type": 0,
        "group_type": 0,
        "split_item": 2,
        "output_dtype": BF16,
        **changes,
    }
    return lambda: moe_experts.npu_grouped_matmul([X], [int8(3, 4, 6)], **given)


def routing(x: torch.Tensor = HALF, **changes: Any) -> Callable[[], object]:
    return lambda: moe_experts.npu_moe_init_routing_custom(
        x, int32(0, 1, 1, 2).view(2, 2), **{**ROUTING, "quant_mode": 1, **changes}
    )


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "division": (static(div_mode=True), NotImplementedError, "div_mode=True"),
    "int8 by its storage type": (static(dtype=INT8), NotImplementedError, "dtype=1"),
    "quantising by rows": (static(axis=-2), NotImplementedError, "axis=-2"),
    "an axis before the last two": (static(HALF.view(1, 2, 4), axis=0), ValueError, "axis: 0"),
    "a scale of another dtype": (static(scales=torch.ones(4)), ValueError, "scales: dtype"),
    "a scale of another width": (static(scales=bfloat(1.0, 2.0)), ValueError, r"scales: shape \(2,\)"),
    "fewer zero points than scales": (static(scales=bfloat(1, 1, 1, 1), zero_points=bfloat(0.0)), ValueError, "zero_points: shape"),
    "zero points of int8": (static(zero_points=int8(1)), ValueError, "zero_points: dtype"),
    "rows of int8": (static(X), ValueError, "input: dtype"),
    "float32 rows, dynamically": (dynamic(HALF.float()), ValueError, "input: dtype torch.float32"),
    "one dimension, dynamically": (dynamic(HALF[0]), ValueError, "input: shape"),
    "smooth scales": (dynamic(smooth_scales=HALF[0]), NotImplementedError, "smooth_scales"),
    "int4": (dynamic(dst_type=16), NotImplementedError, "dst_type=16"),
    "one scale for all": (dynamic(quant_mode="pertensor"), NotImplementedError, "quant_mode='pertensor'"),
    "a product of bfloat16": (product(HALF), ValueError, "x1: dtype"),
    "a product of batches": (product(int8(1, 2, 4)), ValueError, "x1: shape"),
    "factors that do not fit": (product(x2=int8(5, 3)), ValueError, "x2: shape"),
    "a weight wider than the hardware takes": (product(x2=int8(4, 65536), scale=torch.ones(1)), ValueError, "x2: last dimension 65536"),
    "a float16 scale": (product(scale=torch.ones(3).half()), ValueError, "scale: dtype"),
    "a scale as int64, for float16": (product(scale=torch.ones(3).long()), ValueError, "scale: dtype"),
    "a scale of another size": (product(scale=torch.ones(2)), ValueError, "scale: shape"),
    "row scales of another number": (product(pertoken_scale=torch.ones(3)), ValueError, "pertoken_scale: shape"),
    "row scales of bfloat16": (product(pertoken_scale=bfloat(1, 1)), ValueError, "pertoken_scale: dtype"),
    "a bias of another size": (product(bias=int32(1)), ValueError, "bias: shape"),
    "an int8 bias": (product(bias=int8(3)), ValueError, "bias: dtype"),
    "a result of int8": (product(output_dtype=None), NotImplementedError, "output_dtype=None"),
    "a result of float16": (product(output_dtype=5), NotImplementedError, "output_dtype=5"),
    "an int32 result with row scales": (product(output_dtype=INT32, pertoken_scale=torch.ones(2)), ValueError, "pertoken_scale: must not"),
    "an int32 result with a bias of floats": (product(output_dtype=INT32, bias=torch.ones(3)), ValueError, "bias: dtype torch.float32"),
    "an int32 result with a float16 scale": (product(output_dtype=INT32, scale=torch.ones(3).half()), ValueError, "scale: dtype"),
    "an offset": (product(offset=torch.ones(3)), NotImplementedError, "offset"),
    "groups of scales": (product(group_sizes=[1, 1, 32]), NotImplementedError, "group_sizes"),
    "fused with a bias": (fused(bias=torch.zeros(3, 6)), NotImplementedError, "bias"),
    "a limit of SwiGLU": (fused(swiglu_limit=7.0), NotImplementedError, "swiglu_limit"),
    "an odd width": (fused(weight=int8(3, 4, 5), weight_scale=torch.ones(3, 5)), ValueError, "weight: last dimension 5"),
    "a width above 10240": (fused(weight=int8(3, 4, 10242), weight_scale=torch.ones(3, 10242)), ValueError, "weight: last dimension 10242"),
    "rows of bfloat16, fused": (fused(x=HALF), ValueError, "x: dtype"),
    "another number of row scales, fused": (fused(x_scale=torch.ones(3)), ValueError, "x_scale: shape"),
    "counts instead of running totals": (fused(group_list=torch.tensor([2, 1, 0])), ValueError, "group_list"),
    "sums of floats": (of_sums(SUMS.float()), ValueError, "x: dtype torch.float32"),
    "unscaled rows of bfloat16": (of_sums(SUMS.bfloat16()), NotImplementedError, "x=a tensor"),
    "sums in one dimension": (of_sums(SUMS[0]), ValueError, "x: shape"),
    "no sums": (of_sums(SUMS[:0]), ValueError, r"x: shape \(0, 64\) must have rows"),
    "sums of a width that is no multiple of 64": (of_sums(SUMS[:, :32]), ValueError, "x: last dimension 32"),
    "wider sums than a core holds": (of_sums(SUMS.repeat(1, 146)), ValueError, "x: last dimension 9344 must not exceed 9280"),
    "sums without a scale": (of_sums(weight_scale=None), ValueError, "weight_scale: must be given"),
    "scales of columns in bfloat16": (of_sums(weight_scale=OF_COLUMNS.bfloat16()), ValueError, "weight_scale: dtype"),
    "scales of two groups for one": (of_sums(weight_scale=OF_COLUMNS.repeat(2, 1)), ValueError, r"weight_scale: shape \(2, 64\)"),
    "one scale for two groups": (of_sums(group_index=torch.tensor([2, 2])), ValueError, r"weight_scale: shape \(64,\) must be \(2, 64\)"),
    "groups in int32": (of_sums(group_index=int32(6)), ValueError, "group_list: dtype torch.int32"),
    "groups of more rows than x": (of_sums(group_index=torch.tensor([7])), ValueError, "7 rows exceed the 6"),
    "scales of rows in bfloat16": (of_sums(activation_scale=OF_ROWS.bfloat16()), ValueError, "activation_scale: dtype"),
    "another number of row scales": (of_sums(activation_scale=OF_ROWS[:5]), ValueError, "activation_scale: shape"),
    "a bias of sums": (of_sums(bias=OF_COLUMNS), NotImplementedError, "bias"),
    "smooth scales of SwiGLU": (of_sums(quant_scale=OF_COLUMNS[:32]), NotImplementedError, "quant_scale"),
    "one scale for all rows": (of_sums(quant_mode=0), NotImplementedError, "quant_mode=0"),
    "an unknown mode of quantisation": (of_sums(quant_mode=2), ValueError, "quant_mode: 2"),
    "an unknown mode of SwiGLU": (of_sums(swiglu_mode=2), ValueError, "swiglu_mode: 2"),
    "plain SwiGLU without groups": (of_sums(swiglu_mode=0), NotImplementedError, "group_index=None"),
    "the gate on the right": (of_sums(activate_left=False), NotImplementedError, "activate_left=False"),
    "a negative limit": (of_sums(clamp_limit=-1.0), ValueError, "clamp_limit: -1.0"),
    "an infinite limit": (of_sums(clamp_limit=float("inf")), ValueError, "clamp_limit: inf"),
    "a factor of NaN": (of_sums(glu_alpha=float("nan")), ValueError, "glu_alpha: nan"),
    "an infinite shift": (of_sums(glu_bias=float("inf")), ValueError, "glu_bias: inf"),
    "a grouped product without scales": (grouped(scale=None), NotImplementedError, "without scale"),
    "a grouped product in int32": (grouped(output_dtype=3), NotImplementedError, "output_dtype=3"),
    "two scales for a weight": (grouped(scale=[torch.ones(3, 6)] * 2), ValueError, "scale: 2 tensors"),
    "a scale per matrix": (grouped(scale=[torch.ones(3)]), ValueError, "scale: shape"),
    "row scales of another dtype, grouped": (grouped(per_token_scale=[bfloat(1, 1)]), ValueError, "per_token_scale: dtype"),
    "a bias of integers, grouped": (grouped(bias=[int32(1)]), NotImplementedError, "bias"),
    "quantising int8 while routing": (routing(X), ValueError, "x: dtype torch.int8"),
    "smooth scales while routing": (routing(scale=torch.ones(2)), NotImplementedError, "scale"),
    "row scales of bfloat16 while routing": (routing(X, quant_mode=-1, scale=bfloat(1, 1)), ValueError, "scale: dtype"),
}  # fmt: skip


@scenarios("call, error, message", REFUSED)
def test_error_names_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
