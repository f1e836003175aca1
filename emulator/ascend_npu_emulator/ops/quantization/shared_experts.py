"""The reference for SwiGLU between two int8 products, as in shared experts."""

import math

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
from ascend_npu_emulator.ops.quantization.linear import to_int8

_MULTIPLE = 64  # of the last dimension: two halves of 32 bytes of int8
_LONGEST = {
    0: 10496,
    1: 9280,
}  # the largest last dimension that fits 192 KiB of a core's memory, by swiglu_mode
_OF_LARGEST = torch.tensor(1 / 127)  # the float32 by which the kernel multiplies


def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale sums of int8 products, apply SwiGLU, and quantise each row with a scale per row.

    The definition is vllm-ascend's kernel: csrc/moe/dequant_swiglu_quant of 0.23.0.post1, the same
    in 0.30.0rc2 (op_kernel/dequant_swiglu_quant.h:374, 432, 630, 677; checks in
    op_host/dequant_swiglu_quant_tiling.cpp:110, 178, 194, 396, 515, 597, and in
    csrc/torch_binding.cpp:2044). All steps are float32. Rows after the last group are undefined.
    Supported: int32 sums, ``quant_mode`` 1 and ``activate_left``, with groups or ``swiglu_mode`` 1.
    Other calls run another kernel.

    With ``swiglu_mode`` 1 the gate is limited to ``clamp_limit`` and multiplied by ``glu_alpha`` in
    the exponent. The other half is limited on both sides, and ``glu_bias`` is added to it. Mode 0
    ignores the three arguments.

    Args:
        x: int32 [..., 2 H].
        weight_scale: float32 [2 H], or [groups, 2 H].
        activation_scale: float32, one element per row.
        group_index: int64 [groups], number of rows of each group.

    Returns:
        int8 [..., H] and the scales, float32 [...].
    """
    op = "npu_dequant_swiglu_quant"
    _check_options(op, quant_mode, swiglu_mode, clamp_limit, glu_alpha, glu_bias)
    refuse_options(op, bias=bias, quant_scale=quant_scale, quant_offset=quant_offset)
    if quant_mode != 1:
        raise unsupported(op, "quant_mode", quant_mode)
    if not activate_left:
        raise unsupported(op, "activate_left", activate_left)
    if group_index is None and swiglu_mode == 0:
        raise unsupported(op, "group_index", None)
    sums = _sums(op, x, _LONGEST[swiglu_mode])
    rows, width = sums.shape
    columns = _weight_scales(
        op, weight_scale, 1 if group_index is None else group_index.shape[0], width
    )
    scales = _row_scales(op, activation_scale, rows)
    groups = (
        [(0, rows)]
        if group_index is None
        else row_groups(op, group_index, len(columns), rows, cumulative=False)
    )
    y, y_scale = poisoned((rows, width // 2), x, torch.int8), poisoned((rows,), x, torch.float32)
    limit, alpha, shift = (
        (clamp_limit or math.inf, glu_alpha, glu_bias) if swiglu_mode == 1 else (math.inf, 1.0, 0.0)
    )
    for column, (start, end) in zip(columns, groups, strict=True):
        if start < end:
            gate, up = (sums[start:end].float() * column * scales[start:end]).chunk(2, 1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + shift
            y[start:end], y_scale[start:end] = _rows_to_int8(
                up * (gate / ((-alpha * gate).exp() + 1))
            )
    return y.view(*x.shape[:-1], width // 2), y_scale.view(x.shape[:-1])


def _sums(op: str, x: torch.Tensor, longest: int) -> torch.Tensor:
    """Return x as [rows, width]."""
    check_rank(op, "x", x, *range(2, 9))
    if x.dtype is torch.bfloat16:
        raise unsupported(op, "x", x)
    check_dtype(op, "x", x, (torch.int32,))
    width = x.shape[-1]
    check(
        width % _MULTIPLE == 0, op, "x", f"last dimension {width} must be a multiple of {_MULTIPLE}"
    )
    check(width <= longest, op, "x", f"last dimension {width} must not exceed {longest}")
    check(x.numel() > 0, op, "x", f"shape {tuple(x.shape)} must have rows")
    return x.reshape(-1, width)


def _check_options(
    op: str,
    quant_mode: int,
    swiglu_mode: int,
    clamp_limit: float,
    glu_alpha: float,
    glu_bias: float,
) -> None:
    for name, mode in (("quant_mode", quant_mode), ("swiglu_mode", swiglu_mode)):
        check(mode in (0, 1), op, name, f"{mode} is not one of 0, 1")
    check(
        math.isfinite(clamp_limit) and clamp_limit >= 0,
        op,
        "clamp_limit",
        f"{clamp_limit} must be finite and not negative",
    )
    for name, number in (("glu_alpha", glu_alpha), ("glu_bias", glu_bias)):
        check(math.isfinite(number), op, name, f"{number} must be finite")


def _weight_scales(op: str, scale: torch.Tensor | None, groups: int, width: int) -> torch.Tensor:
    """Return the scales as [groups, width]."""
    check(scale is not None, op, "weight_scale", "must be given for x of int32")
    assert scale is not None
    check_dtype(op, "weight_scale", scale, (torch.float32,))
    allowed = ((groups, width), (width,)) if groups == 1 else ((groups, width),)
    check(
        tuple(scale.shape) in allowed,
        op,
        "weight_scale",
        f"shape {tuple(scale.shape)} must be {' or '.join(map(str, allowed))}",
    )
    return scale.view(groups, width)


def _row_scales(op: str, scale: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return the scale of each row, [rows, 1]."""
    if scale is None:
        return torch.ones(rows, 1)
    check_dtype(op, "activation_scale", scale, (torch.float32,))
    check(
        scale.numel() == rows,
        op,
        "activation_scale",
        f"shape {tuple(scale.shape)} must have {rows} elements",
    )
    return scale.reshape(rows, 1)


def _rows_to_int8(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of float32 [M, H] with a scale per row, rounded as by this kernel."""
    scale = exact.abs().amax(-1) * _OF_LARGEST
    return to_int8(exact / scale.unsqueeze(-1)), scale
