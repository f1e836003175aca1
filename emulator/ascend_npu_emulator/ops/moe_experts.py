"""References for experts (MoE): sort tokens by expert, multiply by group, restore the order."""

from collections.abc import Sequence

import torch

from ascend_npu_emulator.ops.checks import (
    FLOATS,
    check,
    check_dtype,
    check_rank,
    refuse_options,
    row_groups,
    unsupported,
)
from ascend_npu_emulator.ops.poison import poisoned
from ascend_npu_emulator.ops.quantization.experts import quantised_grouped_matmul
from ascend_npu_emulator.ops.quantization.int4 import int4_grouped_matmul
from ascend_npu_emulator.ops.quantization.linear import rows_to_int8

_COUNT, _CUMULATIVE = 1, 0
_UNQUANTISED, _DYNAMIC = -1, 1  # quant_mode


def _init_routing(
    op: str,
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    active_num: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: Sequence[int],
    row_idx_type: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rank(op, "x", x, 2)
    check_rank(op, "expert_idx", expert_idx, 2)
    check_dtype(op, "x", x, FLOATS if quant_mode == _DYNAMIC else (*FLOATS, torch.int8))
    check_dtype(op, "expert_idx", expert_idx, (torch.int32,))
    check(
        x.shape[0] == expert_idx.shape[0],
        op,
        "expert_idx",
        f"{expert_idx.shape[0]} rows for {x.shape[0]} rows of x",
    )
    check(expert_num > 0, op, "expert_num", f"{expert_num} must be positive")
    check(
        expert_tokens_num_type in (0, 1, 2),
        op,
        "expert_tokens_num_type",
        f"{expert_tokens_num_type} is not one of 0, 1, 2",
    )
    refuse_options(op, offset=offset, drop_pad_mode=drop_pad_mode, row_idx_type=row_idx_type)
    if quant_mode not in (_UNQUANTISED, _DYNAMIC):
        raise unsupported(op, "quant_mode", quant_mode)
    if quant_mode == _DYNAMIC:
        refuse_options(op, scale=scale)
    if not expert_tokens_num_flag or expert_tokens_num_type != _COUNT:
        raise unsupported(
            op,
            "expert_tokens_num_type, expert_tokens_num_flag",
            (expert_tokens_num_type, expert_tokens_num_flag),
        )
    first, last = active_expert_range or (0, expert_num)
    check(
        0 <= first < last <= expert_num,
        op,
        "active_expert_range",
        f"[{first}, {last}) must lie in [0, {expert_num})",
    )
    tokens, top_k = expert_idx.shape
    if 0 < active_num < tokens * top_k:
        raise unsupported(op, "active_num", active_num)
    experts = expert_idx.flatten()
    active = (experts >= first) & (experts < last)
    # Tokens for other ranks' experts are last. Within an expert tokens keep their order.
    order = torch.sort(torch.where(active, experts, expert_num), stable=True).indices
    count = int(active.sum())
    source = order[:count]
    if quant_mode == _DYNAMIC:
        x, scale = rows_to_int8(x)
    expanded = poisoned((tokens * top_k, x.shape[1]), x)
    expanded[:count] = x[source // top_k]
    row_idx = torch.full_like(experts, -1)
    row_idx[source] = torch.arange(count, dtype=torch.int32, device=x.device)
    per_expert = torch.bincount((experts[active] - first).long(), minlength=last - first)
    expanded_scale = poisoned((tokens * top_k,), x, torch.float32)
    if scale is not None:
        check_dtype(op, "scale", scale, (torch.float32,))
        check(
            tuple(scale.shape) == (tokens,),
            op,
            "scale",
            f"shape {tuple(scale.shape)} must be ({tokens},)",
        )
        expanded_scale[:count] = scale[source // top_k]
    return expanded, row_idx, per_expert, expanded_scale


def npu_moe_init_routing_custom(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy each token once per expert, sorted by expert: vllm-ascend's form of the v2 operator.

    Rows and scales after the active ones are undefined (see poison.py). Supported: quant_mode -1,
    and 1 to quantise each row with a scale per row (see ``rows_to_int8``); counts
    (expert_tokens_num_type 1), gather indices (row_idx_type 0). ``expert_capacity`` matters in
    drop-pad mode only.

    Args:
        x: [T, H]; int8 for quant_mode -1 only.
        expert_idx: int32 [T, K].
        scale: float32 [T], copied like the rows; for quant_mode -1 only.

    Returns:
        Rows [T*K, H] like x, int8 if quantised, place int32 [T*K], tokens per expert int64
            [active experts] and scale float32 [T*K]. ``place[t*K + k]`` is the row of token t for
            its k-th expert, -1 if that expert is outside ``active_expert_range``.
    """
    return _init_routing(
        "npu_moe_init_routing_custom",
        x,
        expert_idx,
        scale,
        offset,
        active_num,
        expert_num,
        drop_pad_mode,
        expert_tokens_num_type,
        expert_tokens_num_flag,
        quant_mode,
        active_expert_range,
        row_idx_type,
    )


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same as ``npu_moe_init_routing_custom``: torch_npu's form."""
    op = "npu_moe_init_routing_v2"
    if x_dtype is not None:
        raise unsupported(op, "x_dtype", x_dtype)
    return _init_routing(
        op,
        x,
        expert_idx,
        scale,
        offset,
        active_num,
        expert_num,
        drop_pad_mode,
        expert_tokens_num_type,
        expert_tokens_num_flag,
        quant_mode,
        active_expert_range,
        row_idx_type,
    )


def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
    **quantisation_and_tuning: object,
) -> list[torch.Tensor]:
    """Multiply the rows of each group g of ``x[0]`` [M, k] by ``weight[0][g]`` [groups, k, n].

    ``bias[0][g]`` [groups, n] is added if given. Products are summed in float32 and rounded to x's
    dtype. Rows after the last group are undefined (see poison.py). For int8 weights see
    ``quantised_grouped_matmul``, for int4 weights ``int4_grouped_matmul``. Supported: one x, one
    weight, ``split_item`` 2 or 3, ``group_type`` 0, no other quantisation, no activation.

    Args:
        group_list: int64 [groups]: running totals of rows (``group_list_type`` 0) or rows per group
            (1).

    Returns:
        [y], with y [M, n].
    """
    op = "npu_grouped_matmul"
    refuse_options(op, act_type=act_type, **quantisation_and_tuning)
    if len(x) != 1 or len(weight) != 1 or weight[0].dim() != 3:
        shapes = [tuple(tensor.shape) for tensor in (*x, *weight)]
        raise unsupported(
            op, "x and weight other than one matrix and one stack of matrices", shapes
        )
    if split_item not in (2, 3):
        raise unsupported(op, "split_item", split_item)
    if group_type != 0:
        raise unsupported(op, "group_type", group_type)
    check(group_list_type in (0, 1), op, "group_list_type", f"{group_list_type} is not one of 0, 1")
    rows, matrices = x[0], weight[0]
    check(group_list is not None, op, "group_list", "must be given for group_type 0")
    assert group_list is not None
    check_rank(op, "x", rows, 2)
    groups = row_groups(
        op, group_list, matrices.shape[0], rows.shape[0], group_list_type == _CUMULATIVE
    )
    if rows.dtype == torch.int8 and matrices.dtype == torch.int32:
        # The kernel reads running totals as rows per group, without a check.
        check(
            group_list_type == _COUNT,
            op,
            "group_list_type",
            f"{group_list_type} must be {_COUNT} for a weight of int4",
        )
        return [
            int4_grouped_matmul(
                op, rows, matrices, bias, scale, per_token_scale, groups, output_dtype
            )
        ]
    if rows.dtype == torch.int8:
        refuse_options(op, bias=bias)
        return [
            quantised_grouped_matmul(
                op, rows, matrices, scale, per_token_scale, groups, output_dtype
            )
        ]
    refuse_options(op, scale=scale, per_token_scale=per_token_scale, output_dtype=output_dtype)
    check_dtype(op, "x", rows, FLOATS)
    check(
        matrices.dtype == rows.dtype,
        op,
        "weight",
        f"dtype {matrices.dtype} must equal x's {rows.dtype}",
    )
    check(
        matrices.shape[1] == rows.shape[1],
        op,
        "weight",
        f"shape {tuple(matrices.shape)} does not fit x {tuple(rows.shape)}",
    )
    if bias is not None:
        wanted = torch.float16 if rows.dtype == torch.float16 else torch.float32
        check_dtype(op, "bias", bias[0], (wanted,))
    y = poisoned((rows.shape[0], matrices.shape[2]), rows)
    for group, (start, end) in enumerate(groups):
        if start < end:
            product = rows[start:end].float() @ matrices[group].float()
            y[start:end] = (product if bias is None else product + bias[0][group].float()).to(
                rows.dtype
            )
    return [y]


def npu_moe_token_permute(
    tokens: torch.Tensor,
    indices: torch.Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat ``tokens`` [T, H] once per expert in ``indices`` [T, K], sorted by expert.

    Returns the rows, and their positions as int32 [T*K]. ``num_out_tokens`` is the number of rows
    to keep; None or 0 keeps all, -n drops the last n.
    """
    op = "npu_moe_token_permute"
    refuse_options(op, padded_mode=padded_mode)
    check_rank(op, "tokens", tokens, 2)
    check_rank(op, "indices", indices, 1, 2)
    check_dtype(op, "indices", indices, (torch.int32, torch.int64))
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    check(
        indices.shape[0] == tokens.shape[0],
        op,
        "indices",
        f"{indices.shape[0]} rows for {tokens.shape[0]} tokens",
    )
    order = torch.sort(indices.flatten(), stable=True).indices
    total = indices.numel()
    wanted = num_out_tokens or 0
    kept = min(wanted, total) if wanted > 0 else total + wanted
    place = torch.empty(total, dtype=torch.int32, device=tokens.device)
    place[order] = torch.arange(total, dtype=torch.int32, device=tokens.device)
    return tokens[order[:kept] // top_k], place


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the sum over k of ``probs[t, k] * permuted_tokens[sorted_indices[t*K + k]]``, [T, H].

    Computed in float32 and returned in the dtype of ``permuted_tokens``. ``sorted_indices`` is
    int32 [T*K]; ``probs`` is [T, K], or None for K = 1 and weight 1. ``restore_shape`` matters in
    padded mode only.
    """
    op = "npu_moe_token_unpermute"
    refuse_options(op, padded_mode=padded_mode)
    check_rank(op, "permuted_tokens", permuted_tokens, 2)
    check_dtype(op, "permuted_tokens", permuted_tokens, FLOATS)
    check_rank(op, "sorted_indices", sorted_indices, 1)
    check_dtype(op, "sorted_indices", sorted_indices, (torch.int32,))
    top_k = 1
    if probs is not None:
        check_rank(op, "probs", probs, 2)
        check_dtype(op, "probs", probs, FLOATS)
        check(
            probs.numel() == sorted_indices.numel(),
            op,
            "probs",
            f"shape {tuple(probs.shape)} does not fit {sorted_indices.numel()} indices",
        )
        top_k = probs.shape[1]
    outside = sorted_indices[(sorted_indices < 0) | (sorted_indices >= permuted_tokens.shape[0])]
    check(
        outside.numel() == 0,
        op,
        "sorted_indices",
        f"{outside.tolist()[:8]} lie outside {permuted_tokens.shape[0]} rows of permuted_tokens",
    )
    rows = permuted_tokens[sorted_indices].float().view(-1, top_k, permuted_tokens.shape[1])
    if probs is not None:
        rows = rows * probs.float().unsqueeze(-1)
    return rows.sum(1).to(permuted_tokens.dtype)
