"""References for W8A8 layers: quantisation to int8, static or per row, and int8 products."""

import torch

from ascend_npu_emulator.ops.checks import (
    FLOATS,
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)

# Codes that torch passes for a dtype where the schema has int (c10/core/ScalarType.h).
_DTYPES = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.qint8,
    15: torch.bfloat16,
}
_LARGEST = 127  # the quantised value of a row's largest magnitude
_LONGEST = 65535  # limit of a factor's last dimension (aclnnQuantMatmulV4, constraints)
_SCALE_BITS = (
    0xFFFFE000  # bits of a float32 scale that the matrix unit reads (CANN, aclnnTransQuantParamV2)
)


def dtype_of(code: int | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of an argument declared as int; None for an unknown code."""
    return code if code is None or isinstance(code, torch.dtype) else _DTYPES.get(code)


def to_int8(exact: torch.Tensor) -> torch.Tensor:
    """Round float32 to int8, half to even, and saturate.

    This is the rounding of CANN's kernels (ops-nn quant/ascend_quant_v2/op_kernel: CAST_RINT, then
    a saturating conversion). NaN becomes 0.
    """
    return exact.nan_to_num(nan=0.0).round().clamp(-128, 127).to(torch.int8)


def rows_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` [..., H] with a scale per row; return int8 [..., H] and scales float32 [...].

    The scale is the row's largest magnitude / 127, and the result round(x / scale), in float32. A
    row of zeros gives scale 0 and zeros.
    """
    exact = x.float()
    scale = exact.abs().amax(-1) / _LARGEST
    return to_int8(exact / scale.unsqueeze(-1)), scale


def int8_product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the int32 product of int8 [M, K] and int8 [K, N], exactly.

    float64 is exact for each sum: with K <= 65535 none exceeds 2^30.
    """
    return (rows.double() @ matrix.double()).to(torch.int32)


def matrix_unit_scale(scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 scales that the matrix unit reads from int64.

    The low half of a number has the bits of a float32. The 13 lowest bits are ignored.
    """
    return (scales & _SCALE_BITS).to(torch.int32).view(torch.float32)


def npu_quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Return round(input * scales + zero_points) as int8, computed in float32 and saturated.

    The definition is CANN's aclnnAscendQuantV3. Supported: ``div_mode`` False, ``dtype``
    torch.qint8, and ``axis`` the last dimension.

    Args:
        input: float [..., H].
        scales, zero_points: [H] or [1], of the input's dtype.
    """
    op = "npu_quantize"
    if div_mode:
        raise unsupported(op, "div_mode", div_mode)
    if dtype_of(dtype) is not torch.qint8:
        raise unsupported(op, "dtype", dtype)
    check_rank(op, "input", input, *range(1, 9))
    check_dtype(op, "input", input, FLOATS)
    check(
        axis in (-1, -2, input.dim() - 1, input.dim() - 2),
        op,
        "axis",
        f"{axis} is not one of the last two dimensions",
    )
    if axis not in (-1, input.dim() - 1):
        raise unsupported(op, "axis", axis)
    for name, tensor in (("scales", scales), ("zero_points", zero_points)):
        if tensor is not None:
            check_rank(op, name, tensor, 1)
            check(
                tensor.dtype == input.dtype,
                op,
                name,
                f"dtype {tensor.dtype} must equal input's {input.dtype}",
            )
            sizes = (1, input.shape[-1])
            check(
                tensor.shape[0] in sizes,
                op,
                name,
                f"shape {tuple(tensor.shape)} is not one of {[(size,) for size in sizes]}",
            )
    scaled = input.float() * scales.float()
    if zero_points is not None:
        same = f"shape {tuple(zero_points.shape)} must equal scales' {tuple(scales.shape)}"
        check(zero_points.shape == scales.shape, op, "zero_points", same)
        scaled = scaled + zero_points.float()
    return to_int8(scaled)


def npu_dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of ``input`` [..., H], float16 or bfloat16, with a scale per row.

    Returns int8 like ``input`` and the scales, float32 [...]; see ``rows_to_int8``. The definition
    is CANN's aclnnDynamicQuant. Supported: int8, ``quant_mode`` "pertoken".
    """
    op = "npu_dynamic_quant"
    refuse_options(
        op, smooth_scales=smooth_scales, group_index=group_index, dst_type_max=dst_type_max
    )
    if dst_type is not None and dtype_of(dst_type) is not torch.int8:
        raise unsupported(op, "dst_type", dst_type)
    if quant_mode != "pertoken":
        raise unsupported(op, "quant_mode", quant_mode)
    check(
        input.dim() >= 2, op, "input", f"shape {tuple(input.shape)} must have at least 2 dimensions"
    )
    check_dtype(op, "input", input, (torch.float16, torch.bfloat16))
    return rows_to_int8(input)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    **dtypes_and_groups: object,
) -> torch.Tensor:
    """Multiply int8 ``x1`` [M, K] by int8 ``x2`` [K, N] in int32; return [M, N].

    An int32 ``bias`` is added to the sums. The sums are then scaled by ``scale`` of the column and
    ``pertoken_scale`` of the row. A bias of another dtype is added after scaling. All steps after
    the sums are float32, rounded once at the end (aclnnQuantMatmulV4 of CANN). Supported: matrices,
    and ``output_dtype`` bfloat16 or int32.

    An int32 result is the sums alone. ``scale`` is required for it but has no effect (ops-nn of 22
    Aug 2026, matmul/quant_batch_matmul_v3: docs/aclnnQuantMatmulV4.md:468 for the dtypes,
    op_kernel/quant_batch_matmul_v3.h:266 for the scale).

    Args:
        scale: float32 or bfloat16 [N] or [1].
        pertoken_scale: float32 [M]; for bfloat16 only.
        bias: int32 [N], or for bfloat16 also bfloat16 or float32.
    """
    op = "npu_quant_matmul"
    refuse_options(op, offset=offset, **dtypes_and_groups)
    wanted = dtype_of(output_dtype)
    if wanted not in (torch.bfloat16, torch.int32):
        raise unsupported(op, "output_dtype", output_dtype)
    for name, tensor in (("x1", x1), ("x2", x2)):
        check_dtype(op, name, tensor, (torch.int8,))
        check_rank(op, name, tensor, 2)
        check(
            tensor.shape[1] <= _LONGEST,
            op,
            name,
            f"last dimension {tensor.shape[1]} must not exceed {_LONGEST}",
        )
    (rows, inner), columns = x1.shape, x2.shape[1]
    check(
        x2.shape[0] == inner, op, "x2", f"shape {tuple(x2.shape)} does not fit x1 {tuple(x1.shape)}"
    )
    check_dtype(op, "scale", scale, (torch.float32, torch.bfloat16))
    check(
        tuple(scale.shape) in ((columns,), (1,)),
        op,
        "scale",
        f"shape {tuple(scale.shape)} must be ({columns},) or (1,)",
    )
    sums = int8_product(x1, x2)
    if bias is not None:
        check_dtype(
            op,
            "bias",
            bias,
            (torch.int32,)
            if wanted is torch.int32
            else (torch.int32, torch.bfloat16, torch.float32),
        )
        check(
            tuple(bias.shape) == (columns,),
            op,
            "bias",
            f"shape {tuple(bias.shape)} must be ({columns},)",
        )
        sums = sums + bias if bias.dtype == torch.int32 else sums
    if wanted is torch.int32:
        check(
            pertoken_scale is None, op, "pertoken_scale", "must not be given for a result of int32"
        )
        return sums
    y = sums.float() * scale.float()
    if pertoken_scale is not None:
        check_dtype(op, "pertoken_scale", pertoken_scale, (torch.float32,))
        given = tuple(pertoken_scale.shape)
        check(given == (rows,), op, "pertoken_scale", f"shape {given} must be ({rows},)")
        y = y * pertoken_scale.unsqueeze(1)
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float()
    return y.to(torch.bfloat16)
