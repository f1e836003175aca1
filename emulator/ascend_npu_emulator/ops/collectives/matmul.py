"""References for products fused with a collective over a group."""

import torch
import torch.distributed as dist

from ascend_npu_emulator.ops.checks import (
    FLOATS,
    check,
    check_dtype,
    check_rank,
    refuse_options,
)
from ascend_npu_emulator.ops.collectives.groups import group_called


def npu_mm_reduce_scatter_base(
    input: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: torch.dtype | None = None,
    comm_mode: str | None = None,
) -> torch.Tensor:
    """Sum ``input`` [m, k] @ ``x2`` [k, n] over the ranks; return this rank's share.

    The share is [m / world_size, n]. Each rank computes the product in float32 and rounds it to the
    input's dtype before the ranks' products are added. Unlike hardware, this also accepts float32
    (the exactness mode).
    """
    op = "npu_mm_reduce_scatter_base"
    refuse_options(op, bias=bias, x1_scale=x1_scale, x2_scale=x2_scale, output_dtype=output_dtype)
    check(reduce_op == "sum", op, "reduce_op", f"{reduce_op!r} is not supported; supported: sum")
    check(comm_turn == 0, op, "comm_turn", f"{comm_turn} is not supported; supported: 0")
    check(
        comm_mode in (None, "ai_cpu", "aiv"),
        op,
        "comm_mode",
        f"{comm_mode!r} is not one of ai_cpu, aiv",
    )
    check(world_size in (2, 4, 8), op, "world_size", f"{world_size} is not one of 2, 4, 8")
    for name, tensor in (("input", input), ("x2", x2)):
        check_rank(op, name, tensor, 2)
        check_dtype(op, name, tensor, FLOATS)
    check(x2.dtype == input.dtype, op, "x2", f"dtype {x2.dtype} must equal input's {input.dtype}")
    rows, inner = input.shape
    check(
        x2.shape[0] == inner,
        op,
        "x2",
        f"shape {tuple(x2.shape)} does not fit input {tuple(input.shape)}",
    )
    check(
        rows % world_size == 0,
        op,
        "input",
        f"{rows} rows must be divisible by world_size={world_size}",
    )
    check(
        comm_mode == "aiv" or 256 <= inner < 65535,
        op,
        "input",
        f"{inner} columns must lie in 256..65534 unless comm_mode is aiv",
    )
    group = group_called(op, "hcom", hcom, world_size)
    product = (input.float() @ x2.float()).to(input.dtype)
    share = torch.empty(rows // world_size, x2.shape[1], dtype=input.dtype, device=input.device)
    dist.reduce_scatter_tensor(share, product, group=group)
    return share
