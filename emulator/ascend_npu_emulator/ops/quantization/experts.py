"""References for W8A8 experts: grouped products of int8 rows and int8 matrices."""

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
from ascend_npu_emulator.ops.quantization.linear import dtype_of, int8_product, rows_to_int8

_LONGEST_INNER, _LONGEST_OUTER = (
    65535,
    10240,
)  # of a weight [groups, inner, outer], aclnnGroupedMatmulSwigluQuantWeightNZ


def _check_factors(op: str, rows: torch.Tensor, matrices: torch.Tensor) -> None:
    for name, tensor, rank in (("x", rows, 2), ("weight", matrices, 3)):
        check_dtype(op, name, tensor, (torch.int8,))
        check_rank(op, name, tensor, rank)
    check(
        matrices.shape[1] == rows.shape[1],
        op,
        "weight",
        f"shape {tuple(matrices.shape)} does not fit x {tuple(rows.shape)}",
    )
    check(
        rows.shape[1] <= _LONGEST_INNER,
        op,
        "x",
        f"last dimension {rows.shape[1]} must not exceed {_LONGEST_INNER}",
    )


def _check_scale(
    op: str, name: str, scale: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
) -> None:
    check_dtype(op, name, scale, dtypes)
    check(tuple(scale.shape) == shape, op, name, f"shape {tuple(scale.shape)} must be {shape}")


def quantised_grouped_matmul(
    op: str,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    scale: Sequence[torch.Tensor] | None,
    per_token_scale: Sequence[torch.Tensor] | None,
    groups: Sequence[tuple[int, int]],
    output_dtype: int | None,
) -> torch.Tensor:
    """Multiply int8 rows of each group by its int8 matrix in int32, and scale in float32.

    Returns bfloat16 [M, n], rounded once; rows after the last group are undefined. The definition
    is CANN's aclnnGroupedMatmulV4.

    Args:
        rows: int8 [M, k].
        matrices: int8 [groups, k, n].
        scale: one tensor of float32 or bfloat16 [groups, n].
        per_token_scale: one tensor of float32 [M].
        groups: rows [first, end) of each group.
    """
    _check_factors(op, rows, matrices)
    if dtype_of(output_dtype) is not torch.bfloat16:
        raise unsupported(op, "output_dtype", output_dtype)
    if scale is None or per_token_scale is None:
        raise unsupported(op, "x of int8 without scale or per_token_scale", None)
    check(len(scale) == 1, op, "scale", f"{len(scale)} tensors must be 1")
    check(
        len(per_token_scale) == 1,
        op,
        "per_token_scale",
        f"{len(per_token_scale)} tensors must be 1",
    )
    _check_scale(
        op, "scale", scale[0], (matrices.shape[0], matrices.shape[2]), torch.float32, torch.bfloat16
    )
    _check_scale(op, "per_token_scale", per_token_scale[0], (rows.shape[0],), torch.float32)
    y = poisoned((rows.shape[0], matrices.shape[2]), rows, torch.bfloat16)
    for group, (start, end) in enumerate(groups):
        sums = int8_product(rows[start:end], matrices[group]).float()
        y[start:end] = (sums * scale[0][group].float() * per_token_scale[0][start:end, None]).to(
            torch.bfloat16
        )
    return y


def grouped_matmul_swiglu_quant_weight_nz(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multiply int8 rows by their group's matrix, scale, apply SwiGLU, and quantise each row again.

    The sums are int32, the rest is float32; see ``rows_to_int8`` for the last step. Rows after the
    last group are undefined, and so is the third result, float32 []. The definition is CANN's
    aclnnGroupedMatmulSwigluQuantWeightNZ; this is vllm-ascend's form. The hardware reads the
    weight's bytes as FRACTAL_NZ in any format; the emulator has one layout only.

    Args:
        x: int8 [M, K].
        weight: int8 [groups, K, N].
        weight_scale: float32, float16 or bfloat16 [groups, N].
        x_scale: float32 [M].
        group_list: int64 [groups], running totals of rows.

    Returns:
        int8 [M, N / 2] and the scales, float32 [M].
    """
    op = "grouped_matmul_swiglu_quant_weight_nz"
    refuse_options(op, bias=bias, offset=offset, swiglu_limit=swiglu_limit)
    _check_factors(op, x, weight)
    count, _, outer = weight.shape
    check(
        outer <= _LONGEST_OUTER,
        op,
        "weight",
        f"last dimension {outer} must not exceed {_LONGEST_OUTER}",
    )
    check(outer % 2 == 0, op, "weight", f"last dimension {outer} must be even")
    _check_scale(
        op,
        "weight_scale",
        weight_scale,
        (count, outer),
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
    _check_scale(op, "x_scale", x_scale, (x.shape[0],), torch.float32)
    y, scale = poisoned((x.shape[0], outer // 2), x), poisoned((x.shape[0],), x, torch.float32)
    for group, (start, end) in enumerate(
        row_groups(op, group_list, count, x.shape[0], cumulative=True)
    ):
        if start < end:
            product = (
                int8_product(x[start:end], weight[group]).float()
                * x_scale[start:end, None]
                * weight_scale[group].float()
            )
            gate, up = product.chunk(2, 1)
            y[start:end], scale[start:end] = rows_to_int8(gate * torch.sigmoid(gate) * up)
    return y, scale, poisoned((), x, torch.float32)
