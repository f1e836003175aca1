"""Reference for fused MC2: dispatch, W8A8 experts and combine in one operator.

The definition is vllm-ascend's kernel (csrc/mc2/dispatch_ffn_combine in v0.23.0). Of the limits of
MC2's two operators, only the buffer size applies.
"""

from collections.abc import Sequence

import torch

from ascend_npu_emulator.ops.checks import (
    check,
    check_dtype,
    check_rank,
    refuse_options,
    unsupported,
)
from ascend_npu_emulator.ops.collectives.exchange import Exchange
from ascend_npu_emulator.ops.collectives.groups import buffer_size, group_called
from ascend_npu_emulator.ops.poison import poisoned
from ascend_npu_emulator.ops.quantization.linear import (
    int8_product,
    matrix_unit_scale,
    rows_to_int8,
)

_OP = "dispatch_ffn_combine"
_RESERVED = 10 << 20  # bytes of the buffer that hold no rows
_ALIGNMENT = 32  # bytes that the kernel copies at once


def dispatch_ffn_combine(
    x: torch.Tensor,
    weight1: Sequence[torch.Tensor],
    weight2: Sequence[torch.Tensor],
    expert_idx: torch.Tensor,
    scale1: Sequence[torch.Tensor],
    scale2: Sequence[torch.Tensor],
    bias1: Sequence[torch.Tensor],
    bias2: Sequence[torch.Tensor],
    probs: torch.Tensor,
    group: str,
    max_output_size: int,
    out: torch.Tensor,
    expert_token_nums: torch.Tensor,
    x_active_mask: torch.Tensor | None = None,
    swiglu_limit: float = 1000000.0,
    *more: object,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write to ``out`` [BS, H] the sum of each row's expert results, times ``probs``.

    Each row of ``x`` is quantised by its own scale and sent to the ranks of its experts. There it
    is multiplied by ``weight1`` in int32 and scaled to float16. After SwiGLU in float32 it is
    quantised again, multiplied by ``weight2`` in int32, scaled to float16 and rounded to bfloat16.
    The sums are float32, rounded once. Rank r has the experts ``r * E .. r * E + E - 1``.

    Rows of tokens that take no part are undefined. So are rows with an expert whose rows, together
    with the rows of the preceding experts on the same rank, exceed ``max_output_size``. As on
    hardware, ``expert_idx`` is overwritten with the number of experts where a token takes no part,
    and ``bias1`` and ``bias2`` are not read. The hardware reads the weights' bytes as FRACTAL_NZ in
    any format; the emulator has one layout only. Supported: bfloat16, W8A8, and one tensor of each
    weight for all experts.

    Args:
        x: bfloat16 [BS, H].
        weight1, weight2: one tensor of int8 [E, H, N] and one of int8 [E, N / 2, H], with N <= H,
            because the kernel gives the rows of the first product the layout of ``x``.
        expert_idx: int32 [BS, K], K different experts for each token.
        scale1, scale2: one tensor of int64 with E * N and one with E * H numbers. The low half of
            each number has the bits of a float32; the 13 lowest bits are ignored.
        probs: float32 [BS, K].
        expert_token_nums: int32 [E], written: number of rows for each expert of this rank.
        x_active_mask: bool [BS], false for tokens that take no part.
        swiglu_limit: if positive, the upper bound of the gate and of the other factor's magnitude.

    Returns:
        ``out`` and ``expert_token_nums``.
    """
    refuse_options(_OP, more=more, **others)  # world_size, from 0.30 on
    for name, tensors in (
        ("weight1", weight1),
        ("weight2", weight2),
        ("scale1", scale1),
        ("scale2", scale2),
    ):
        if len(tensors) != 1:
            raise unsupported(_OP, name, f"{len(tensors)} tensors")
    (up, down), scales = (weight1[0], weight2[0]), (scale1[0], scale2[0])
    if x.dtype != torch.bfloat16 or up.dtype != torch.int8:
        raise unsupported(_OP, "x and weight1 of", (x.dtype, up.dtype))
    check_rank(_OP, "x", x, 2)
    check_rank(_OP, "weight1", up, 3)
    check_rank(_OP, "expert_idx", expert_idx, 2)
    (tokens, hidden), (local, _, outer), top_k = x.shape, up.shape, expert_idx.shape[1]
    check(
        outer % 2 == 0 and outer <= hidden,
        _OP,
        "weight1",
        f"last dimension {outer} must be even, and not exceed {hidden} of x",
    )
    check(
        hidden % _ALIGNMENT == 0, _OP, "x", f"{hidden} columns must be a multiple of {_ALIGNMENT}"
    )
    expected = {
        "weight1": (up, torch.int8, (local, hidden, outer)),
        "weight2": (down, torch.int8, (local, outer // 2, hidden)),
        "expert_idx": (expert_idx, torch.int32, (tokens, top_k)),
        "scale1": (scales[0].flatten(), torch.int64, (local * outer,)),
        "scale2": (scales[1].flatten(), torch.int64, (local * hidden,)),
        "probs": (probs, torch.float32, (tokens, top_k)),
        "out": (out, torch.bfloat16, (tokens, hidden)),
        "expert_token_nums": (expert_token_nums, torch.int32, (local,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        check_dtype(_OP, name, tensor, (dtype,))
        check(
            tuple(tensor.shape) == shape, _OP, name, f"shape {tuple(tensor.shape)} must be {shape}"
        )
    needed, buffer = 3 * tokens * top_k * hidden + _RESERVED, buffer_size()
    check(
        needed <= buffer,
        _OP,
        "x",
        f"{needed} bytes exceed HCCL_BUFFSIZE, {buffer >> 20} MB: set {-(-needed >> 20)}",
    )
    ranks = group_called(_OP, "group", group)
    agreed = {
        "moe_expert_num": local * ranks.size(),
        "max_output_size": max_output_size,
        "swiglu_limit": swiglu_limit,
    }
    call = Exchange(
        _OP, expert_idx, hidden, x_active_mask, ranks, local * ranks.size(), "expert_idx", **agreed
    )

    rows, row_scales = rows_to_int8(x)
    rows, row_scales = call.gather(rows), call.gather(row_scales)
    copies, live, counts = call.receive(expert_idx)
    source, ends = copies // top_k, counts.sum(1).cumsum(0)
    place = torch.arange(call.capacity, device=x.device)
    expert = (place[:, None] >= ends).sum(1)  # expert of each row; E after the last expert
    rows, row_scales = rows[source], row_scales[source]
    gate, other = (_product(rows, up, scales[0], expert) * row_scales[:, None]).chunk(2, 1)
    if swiglu_limit > 0:
        gate, other = gate.clamp(max=swiglu_limit), other.clamp(-swiglu_limit, swiglu_limit)
    rows, row_scales = rows_to_int8(gate * torch.sigmoid(gate) * other)
    made = (_product(rows, down, scales[1], expert) * row_scales[:, None]).to(x.dtype)
    made = torch.where((live & (place < max_output_size))[:, None], made, poisoned((), made))
    returned, _ = call.bring_back(made, live, call.origins(copies))
    out.copy_(call.add(returned, probs))
    expert_token_nums.copy_(counts.sum(1))
    if x_active_mask is not None:
        expert_idx.masked_fill_(~x_active_mask[:, None], call.experts)
    return out, expert_token_nums


def _product(
    rows: torch.Tensor, matrices: torch.Tensor, scales: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """Return each row times its expert's matrix, scaled, rounded to float16, as float32."""
    factors = matrix_unit_scale(scales.reshape(matrices.shape[0], 1, -1))
    result = poisoned((rows.shape[0], matrices.shape[2]), rows, torch.float32)
    for index, (matrix, factor) in enumerate(zip(matrices, factors, strict=True)):
        product = (int8_product(rows, matrix).float() * factor).half().float()
        result = torch.where((expert == index)[:, None], product, result)
    return result
