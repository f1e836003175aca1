"""The reference for int8 with a scale for each block of 128 elements of a row."""

import torch

from ascend_npu_emulator.ops.checks import (
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.quantization.linear import dtype_of, to_int8

_BLOCK = 128
_LARGEST = 127.0  # the quantised value of a block's largest magnitude


def npu_dynamic_block_quant(
    x: torch.Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` [..., H] with one scale for each block of 128 elements.

    The scale is the block's largest magnitude * (1 / 127), and the result round(x * (127 * (1 /
    largest))), in float32. A block of zeros gives scale 0 and zeros. (ops-nn of 22 Aug 2026,
    quant/dynamic_block_quant: op_kernel/dynamic_block_quant.h:347 and 427, checks in
    op_host/dynamic_block_quant_i8_tiling.cpp.) Supported: rows of whole blocks, ``min_scale`` 0.

    Args:
        x: float16 or bfloat16, of 2 or 3 dimensions.

    Returns:
        int8 like ``x``, and float32 [..., H / 128].
    """
    op = "npu_dynamic_block_quant"
    check_dtype(op, "x", x, (torch.float16, torch.bfloat16))
    check_rank(op, "x", x, 2, 3)
    check(dtype_of(dst_type) is torch.int8, op, "dst_type", f"{dst_type} must be 1, int8")
    check(round_mode == "rint", op, "round_mode", f"{round_mode!r} must be 'rint'")
    check(min_scale >= 0, op, "min_scale", f"{min_scale} must not be negative")
    for name, given, wanted in (
        ("row_block_size", row_block_size, 1),
        ("col_block_size", col_block_size, _BLOCK),
    ):
        check(given == wanted, op, name, f"{given} must be {wanted}")
    check(dst_type_max == 0, op, "dst_type_max", f"{dst_type_max} must be 0")
    refuse_options(op, min_scale=min_scale)
    if x.shape[-1] % _BLOCK:
        raise unsupported(op, "x", x)
    blocks = x.float().view(*x.shape[:-1], -1, _BLOCK)
    largest = blocks.abs().amax(-1)
    quantised = to_int8(blocks * (1 / largest * _LARGEST).unsqueeze(-1))
    return quantised.view(x.shape), largest * torch.tensor(1 / _LARGEST)
