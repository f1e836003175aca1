"""References for W4A8 experts: grouped products of int8 rows and int4 matrices.

An int32 element holds eight int4 numbers, the first in the lowest four bits.

CANN has no product of int8 and int4. Its kernels write a number x of a row as 16 * high + low + 8,
with high = floor(x / 16) and low = x mod 16 - 8, multiply both halves as int4, and scale each sum
to float16. The checkpoint supplies a float32 summand for the 8: 8 times the sum of each column's
scaled weights. See aclnnGroupedMatmulV5.md of ops-transformer, section A8W4, and its
gmm/grouped_matmul of 15 Nov 2025 (c29bc10): op_kernel/grouped_matmul_antiquant_a8w4_msd_pre.h:177
for the halves, grouped_matmul_antiquant_a8w4_msd.h:310 for sums of float16 over parts of a column,
and :402 for the steps after the sums. vllm-ascend's own kernel,
csrc/gmm/grouped_matmul_swiglu_quant_v2 of 0.23.0.post1 and 0.30.0rc2, does the same before it
applies SwiGLU.

The kernels read the weight's bytes as FRACTAL_NZ; the emulator has one layout only.
"""

from collections.abc import Sequence

import torch

from ascend_npu_emulator.ops.checks import (
    check,
    check_dtype,
    check_rank,
    refuse_options,
    row_groups,
    unsupported,
)
from ascend_npu_emulator.ops.poison import poisoned
from ascend_npu_emulator.ops.quantization.linear import (
    dtype_of,
    int8_product,
    matrix_unit_scale,
    to_int8,
)

_IN_INT32 = 8  # int4 numbers in an int32
_MULTIPLE = 64  # of both dimensions of a matrix: int4 numbers in 32 bytes
_LONGEST_INNER, _LONGEST_GROUPED, _LONGEST_OUTER = 19999, 18432, 10240
_PART = 256  # rows of each part of a column that has several scales


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [..., N / 8] to int8 [..., N], each number from -8 to 7."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 15
    return (nibbles - 16 * (nibbles > 7).int()).to(torch.int8).flatten(-2)


def _scaled_product(rows: torch.Tensor, matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [M, N]: the scaled product, without the 8 in each number of a row.

    Args:
        rows: int8 [M, K].
        matrix: int4 numbers as int8 [K, N].
        scales: int64 [parts, N], for equal parts of each column; see ``matrix_unit_scale``.
    """

    def of_half(numbers: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(
            numbers.shape[0], matrix.shape[1], dtype=torch.float16, device=matrix.device
        )
        parts = zip(
            numbers.chunk(len(scales), 1),
            matrix.chunk(len(scales), 0),
            matrix_unit_scale(scales),
            strict=True,
        )
        for left, right, factor in parts:
            total = total + (int8_product(left, right).float() * factor).half()
        return total.float()

    return 16 * of_half(rows >> 4) + of_half((rows & 15) - 8)


def _one(op: str, name: str, tensors: Sequence[torch.Tensor] | None) -> torch.Tensor:
    check(bool(tensors), op, name, "must be given for a weight of int4")
    assert tensors
    if len(tensors) != 1:
        raise unsupported(op, name, f"{len(tensors)} tensors")
    return tensors[0]


def _check_tensor(
    op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    check_dtype(op, name, tensor, (dtype,))
    check(tuple(tensor.shape) == shape, op, name, f"shape {tuple(tensor.shape)} must be {shape}")


def _check_factors(
    op: str, rows: torch.Tensor, matrices: torch.Tensor, longest: int
) -> tuple[int, int, int]:
    """Check int8 rows [M, K] and packed matrices [groups, K, N / 8]; return groups, K and N."""
    check_rank(op, "x", rows, 2)
    check_rank(op, "weight", matrices, 3)
    count, inner, outer = matrices.shape[0], matrices.shape[1], matrices.shape[2] * _IN_INT32
    check(
        rows.shape[1] == inner,
        op,
        "weight",
        f"shape {tuple(matrices.shape)} does not fit x {tuple(rows.shape)}",
    )
    for name, size in (("x", inner), ("weight", outer)):
        check(size % _MULTIPLE == 0, op, name, f"{size} columns must be a multiple of {_MULTIPLE}")
    check(inner <= longest, op, "x", f"last dimension {inner} must not exceed {longest}")
    return count, inner, outer


def int4_grouped_matmul(
    op: str,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    bias: Sequence[torch.Tensor] | None,
    scale: Sequence[torch.Tensor] | None,
    per_token_scale: Sequence[torch.Tensor] | None,
    groups: Sequence[tuple[int, int]],
    output_dtype: int | None,
) -> torch.Tensor:
    """Multiply int8 rows of each group by its int4 matrix, add the bias, and scale each row.

    Returns bfloat16 [M, N], rounded once. Rows after the last group are undefined. The kernel
    stores the halves in ``rows``, so all of ``rows`` is undefined afterwards.

    This is the kernel for calls without ``tuning_config``. For one scale per column and groups of
    more than N / 5 rows on average, CANN of Nov 2025 runs another kernel, which rounds scales down
    to bfloat16. Later versions do not (op_host/op_tiling/grouped_matmul_tiling.cpp:1631).

    Args:
        rows: int8 [M, K].
        matrices: int32 [groups, K, N / 8].
        bias: one tensor of float32 [groups, N].
        scale: one tensor of int64 [groups, parts, N]; a part is 256 rows of a matrix, or all rows.
        per_token_scale: one tensor of float32 [M].
        groups: rows [first, end) of each group.
    """
    count, inner, outer = _check_factors(op, rows, matrices, _LONGEST_GROUPED)
    if dtype_of(output_dtype) is not torch.bfloat16:
        raise unsupported(op, "output_dtype", output_dtype)
    summand, scales, tokens = (
        _one(op, "bias", bias),
        _one(op, "scale", scale),
        _one(op, "per_token_scale", per_token_scale),
    )
    check_rank(op, "scale", scales, 3)
    parts = scales.shape[1]
    check(
        parts in (1, inner / _PART),
        op,
        "scale",
        f"{parts} parts of {inner} rows must be 1, or parts of {_PART} rows",
    )
    _check_tensor(op, "scale", scales, torch.int64, (count, parts, outer))
    _check_tensor(op, "bias", summand, torch.float32, (count, outer))
    _check_tensor(op, "per_token_scale", tokens, torch.float32, (rows.shape[0],))
    y = poisoned((rows.shape[0], outer), rows, torch.bfloat16)
    for group, (start, end) in enumerate(groups):
        if start < end:
            product = _scaled_product(rows[start:end], unpack_int4(matrices[group]), scales[group])
            y[start:end] = ((product + summand[group]) * tokens[start:end, None]).to(torch.bfloat16)
    rows.copy_(poisoned(tuple(rows.shape), rows))
    return y


def grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 0,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 0,
    transpose_weight: bool = False,
    group_list_type: int = 0,
    tuning_config: Sequence[int] = (),
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply int8 rows by their group's int4 matrix, apply SwiGLU, and quantise each row again.

    The product is that of ``int4_grouped_matmul``, in float32. A positive limit bounds the gate
    from above and the other half on both sides. A row is divided by the row's scale, rounded to
    float16, and then to int8 (op_kernel/grouped_matmul_swiglu_quant_v2_a8w4_msd_post.h:197, :232,
    and grouped_matmul_swiglu_quant_v2_utils.h:268; checks in op_host/op_api/gmm_dsq_base.h:99 and
    :402 of 0.30.0rc2). Rows after the last group are undefined. Supported: one weight and one scale
    per column.

    Args:
        x: int8 [M, K].
        weight: one tensor of int32 [groups, K, N / 8].
        weight_scale: one tensor of int64 [groups, N].
        x_scale: float32 [M].
        group_list: int64 [groups]: running totals of rows (``group_list_type`` 0) or rows per group
            (1).
        weight_assist_matrix: one tensor of float32 [groups, N], the summand.

    Returns:
        int8 [M, N / 2] and the scales, float32 [M].
    """
    op = "grouped_matmul_swiglu_quant_v2"
    refuse_options(
        op, bias=bias, dequant_mode=dequant_mode, dequant_dtype=dequant_dtype, quant_mode=quant_mode, quant_dtype=quant_dtype,
        transpose_weight=transpose_weight, tuning_config=tuning_config,
    )  # fmt: skip
    check(smooth_scale is None, op, "smooth_scale", "must not be given for a weight of int4")
    check(swiglu_limit >= 0, op, "swiglu_limit", f"{swiglu_limit} must not be negative")
    check(group_list_type in (0, 1), op, "group_list_type", f"{group_list_type} is not one of 0, 1")
    matrices, scales = _one(op, "weight", weight), _one(op, "weight_scale", weight_scale)
    summand = _one(op, "weight_assist_matrix", weight_assist_matrix)
    check_dtype(op, "x", x, (torch.int8,))
    if matrices.dtype is torch.int8:
        raise unsupported(op, "weight", matrices)
    check_dtype(op, "weight", matrices, (torch.int32,))
    count, _, outer = _check_factors(op, x, matrices, _LONGEST_INNER)
    check(
        outer <= _LONGEST_OUTER, op, "weight", f"{outer} columns must not exceed {_LONGEST_OUTER}"
    )
    _check_tensor(op, "weight_scale", scales, torch.int64, (count, outer))
    _check_tensor(op, "weight_assist_matrix", summand, torch.float32, (count, outer))
    _check_tensor(op, "x_scale", x_scale, torch.float32, (x.shape[0],))
    y, y_scale = poisoned((x.shape[0], outer // 2), x), poisoned((x.shape[0],), x, torch.float32)
    for group, (start, end) in enumerate(
        row_groups(op, group_list, count, x.shape[0], group_list_type == 0)
    ):
        if start < end:
            product = _scaled_product(
                x[start:end], unpack_int4(matrices[group]), scales[group : group + 1]
            )
            gate, up = ((product + summand[group]) * x_scale[start:end, None]).chunk(2, 1)
            if swiglu_limit > 0:
                gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
            y[start:end], y_scale[start:end] = _rows_to_int8(gate * torch.sigmoid(gate) * up)
    return y, y_scale


def _rows_to_int8(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of float32 [M, H] with a scale per row, rounded as by this kernel."""
    scale = exact.abs().amax(-1) / 127
    return to_int8((exact * (1 / scale).unsqueeze(-1)).half().float()), scale
