"""References for MC2: send rows to the ranks of their experts, and back.

The definitions are CANN's aclnnMoeDistributeDispatchV2 and -CombineV2, without shared experts and
without a TP domain. Every rank must call them with the same arguments and the same number of rows;
`groups.gather` names ranks that disagree. See exchange.py for the exchange of rows.
"""

from typing import Any

import torch

from ascend_npu_emulator.devices import soc
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
from ascend_npu_emulator.ops.quantization.linear import rows_to_int8

_UNQUANTISED, _DYNAMIC = 0, 2  # quant_mode
_RUNNING_TOTALS, _COUNTS = 0, 1  # expert_token_nums_type
_INFO = 128  # int32 of assist_info_for_combine per row; used are three, Exchange.origins
_MOST_ROWS = {"a2": 256, "a3": 512}  # of x
_WIDEST = {"a2": 7168, "a3": 8192}
_MOST_EXPERTS = {"a2": 512, "a3": 1024}
_EP_SIZES = {"a2": {*range(2, 9), 16, 32, 64, 128, 192, 256, 384}, "a3": range(2, 769)}
_MOST_CHOSEN = 16


class _Call(Exchange):
    """The checked arguments that both operators share."""

    def __init__(
        self, op: str, expert_ids: torch.Tensor, hidden: int, x_active_mask: torch.Tensor | None, group_ep: str, ep_world_size: int,
        ep_rank_id: int, moe_expert_num: int, global_bs: int, group_tp: str, tp_world_size: int, tp_rank_id: int, **agreed: object,
    ) -> None:  # fmt: skip
        check_rank(op, "expert_ids", expert_ids, 2)
        check_dtype(op, "expert_ids", expert_ids, (torch.int32,))
        tokens, top_k = expert_ids.shape
        chip = soc()
        check(
            ep_world_size in _EP_SIZES[chip],
            op,
            "ep_world_size",
            f"{ep_world_size} is not supported on {chip.upper()}",
        )
        check(
            0 < moe_expert_num <= _MOST_EXPERTS[chip],
            op,
            "moe_expert_num",
            f"{moe_expert_num} must lie in 1..{_MOST_EXPERTS[chip]}",
        )
        check(
            moe_expert_num % ep_world_size == 0,
            op,
            "moe_expert_num",
            f"{moe_expert_num} must be a multiple of {ep_world_size} ranks",
        )
        check(
            0 < tokens <= _MOST_ROWS[chip],
            op,
            "x",
            f"{tokens} rows must lie in 1..{_MOST_ROWS[chip]}",
        )
        check(
            0 < hidden <= _WIDEST[chip], op, "x", f"{hidden} columns must lie in 1..{_WIDEST[chip]}"
        )
        most = min(_MOST_CHOSEN, moe_expert_num)
        check(
            0 < top_k <= most, op, "expert_ids", f"{top_k} experts per token must lie in 1..{most}"
        )
        if tp_world_size > 1:
            raise unsupported(op, "tp_world_size", tp_world_size)
        check(tp_rank_id == 0, op, "tp_rank_id", f"{tp_rank_id} must be 0 without a TP domain")
        if chip == "a2":
            check(
                (group_tp, tp_world_size) == ("", 0),
                op,
                "group_tp",
                "A2 has no TP domain: give '' and tp_world_size=0",
            )
        if global_bs not in (0, tokens * ep_world_size):
            raise unsupported(op, "global_bs", global_bs)  # ranks with different numbers of rows
        _check_window(
            op, chip, tokens, top_k, hidden, ep_world_size, moe_expert_num // ep_world_size
        )
        group = group_called(op, "group_ep", group_ep, ep_world_size)
        check(
            ep_rank_id == group.rank(),
            op,
            "ep_rank_id",
            f"{ep_rank_id} must be {group.rank()}, this process's rank in {group_ep}",
        )
        agreed = {"moe_expert_num": moe_expert_num, "global_bs": global_bs, **agreed}
        super().__init__(
            op, expert_ids, hidden, x_active_mask, group, moe_expert_num, "expert_ids", **agreed
        )

    def _check_values(self, expert_ids: torch.Tensor) -> None:
        active = self.active.tolist()
        check(
            all(active[: sum(active)]),
            self.op,
            "x_active_mask",
            f"true must precede false, got {active}",
        )
        super()._check_values(expert_ids)


def _check_window(
    op: str, chip: str, tokens: int, top_k: int, hidden: int, size: int, local: int
) -> None:
    """Raise an error if the rows exceed half of the group's buffer. The two halves alternate."""
    row = 2 * hidden
    if chip == "a2":
        needed = 2 * (tokens * size * min(local, top_k) * row + (2 << 20))
    else:
        arriving = local * tokens * size * _aligned(_aligned(row, 32) + 64, 512)
        needed = 2 * (arriving + top_k * tokens * _aligned(row, 512))
    buffer = buffer_size()
    check(
        needed <= buffer,
        op,
        "x",
        f"{needed} bytes exceed HCCL_BUFFSIZE, {buffer >> 20} MB: set {-(-needed >> 20)}",
    )


def _aligned(number: int, to: int) -> int:
    return -(-number // to) * to


def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **others: object,
) -> tuple[torch.Tensor, ...]:
    """Send each row of ``x`` [BS, H] to the ranks of its experts, and return the received rows.

    Rank r has the experts ``r * E .. r * E + E - 1`` with ``E = moe_expert_num / ep_world_size``.
    Received rows are sorted by expert, then by the rank that sent them, then by token. The results
    have ``A = BS * ep_world_size * min(E, K)`` rows. Rows after the received ones are undefined
    (see poison.py), and so are the scales of experts and the counts of a TP domain. Unlike
    hardware, an A3 accepts fewer than 1024 columns, because tiny models have fewer.

    Args:
        x: float16 or bfloat16.
        expert_ids: int32 [BS, K], K different experts for each token.
        x_active_mask: bool [BS], true before false; tokens with false are sent to no expert.
        quant_mode: 0, or 2 to quantise each row with a scale per row (see ``rows_to_int8``).
        global_bs: 0, or BS * ep_world_size.
        expert_token_nums_type: 1 for rows per expert, 0 for their running totals.

    Returns:
        Rows [A, H], int8 if quantised; scales of the rows, float32 [A]; assist info for combine,
            int32 [max(BS * K, 128 * A)]; rows of each expert, int64 [E]; running totals of rows by
            expert and then rank, int32 [E * ep_world_size]; counts of a TP domain, int32
            [tp_world_size]; scales of experts, float32 [A].
    """
    op = "npu_moe_distribute_dispatch_v2"
    refuse_options(op, scales=scales, expert_scales=expert_scales, expert_shard_type=expert_shard_type,
                   shared_expert_rank_num=shared_expert_rank_num, **others)  # fmt: skip
    if quant_mode not in (_UNQUANTISED, _DYNAMIC):
        raise unsupported(op, "quant_mode", quant_mode)
    counting = expert_token_nums_type
    check(
        counting in (_RUNNING_TOTALS, _COUNTS),
        op,
        "expert_token_nums_type",
        f"{counting} is not one of 0, 1",
    )
    check_rank(op, "x", x, 2)
    check_dtype(op, "x", x, (torch.float16, torch.bfloat16))
    check(
        x.shape[0] == expert_ids.shape[0],
        op,
        "expert_ids",
        f"{expert_ids.shape[0]} rows for {x.shape[0]} rows of x",
    )
    call = _Call(
        op, expert_ids, x.shape[1], x_active_mask, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs, group_tp,
        tp_world_size, tp_rank_id, quant_mode=quant_mode,
    )  # fmt: skip
    capacity = call.capacity
    rows, row_scales = (x, None) if quant_mode == _UNQUANTISED else rows_to_int8(x)
    rows = call.gather(rows)
    everyones_scales = None if row_scales is None else call.gather(row_scales)
    copies, live, counts = call.receive(expert_ids)
    source = copies // call.top_k
    expanded = torch.where(live[:, None], rows[source], poisoned((), rows))
    scale = poisoned((capacity,), x, torch.float32)
    if everyones_scales is not None:
        scale = torch.where(live, everyones_scales[source], scale)
    info = poisoned((max(call.tokens * call.top_k, capacity * _INFO),), x, torch.int32)
    info[: capacity * _INFO].view(capacity, _INFO)[:, :3] = torch.where(
        live[:, None], call.origins(copies), poisoned((), x, torch.int32)
    )
    per_expert = counts.sum(1)
    totals = counts.flatten().cumsum(0).int()
    numbers = per_expert if counting == _COUNTS else per_expert.cumsum(0)
    return (
        expanded,
        scale,
        info,
        numbers,
        totals,
        poisoned((tp_world_size,), x, torch.int32),
        poisoned((capacity,), x, torch.float32),
    )


def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    **others: object,
) -> torch.Tensor:
    """Send each row of ``expand_x`` [A, H] back; return the sums of each token's rows, [BS, H].

    The rows of a token are multiplied by ``expert_scales`` and added in float32, and the sum is
    rounded once. Rows of tokens that take no part are undefined.

    Args:
        expand_x: the experts' results for the rows that dispatch returned, float16 or bfloat16.
        expert_ids, x_active_mask: the arguments of dispatch.
        assist_info_for_combine, ep_send_counts: the third and fifth result of dispatch.
        expert_scales: float32 [BS, K].
    """
    op = "npu_moe_distribute_combine_v2"
    refuse_options(
        op,
        expert_shard_type=expert_shard_type,
        shared_expert_rank_num=shared_expert_rank_num,
        **others,
    )
    check_rank(op, "expand_x", expand_x, 2)
    check_dtype(op, "expand_x", expand_x, (torch.float16, torch.bfloat16))
    call = _Call(
        op, expert_ids, expand_x.shape[1], x_active_mask, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs, group_tp,
        tp_world_size, tp_rank_id,
    )  # fmt: skip
    tokens, top_k, capacity = call.tokens, call.top_k, call.capacity
    expected: dict[str, tuple[Any, torch.Tensor, torch.dtype]] = {
        "expand_x": ((capacity, call.hidden), expand_x, expand_x.dtype),
        "assist_info_for_combine": (
            (max(tokens * top_k, capacity * _INFO),),
            assist_info_for_combine,
            torch.int32,
        ),
        "ep_send_counts": ((call.local * ep_world_size,), ep_send_counts, torch.int32),
        "expert_scales": ((tokens, top_k), expert_scales, torch.float32),
    }
    for name, (shape, tensor, dtype) in expected.items():
        check_dtype(op, name, tensor, (dtype,))
        check(
            tuple(tensor.shape) == shape, op, name, f"shape {tuple(tensor.shape)} must be {shape}"
        )
    live = torch.arange(capacity, device=expand_x.device) < ep_send_counts[-1]
    origin = assist_info_for_combine[: capacity * _INFO].view(capacity, _INFO)[:, :3]
    returned, place = call.bring_back(expand_x, live, origin)
    if not call.captured(expand_x):
        arrived = torch.bincount(place, minlength=tokens * top_k + 1)[:-1].view(tokens, top_k)[
            call.active
        ]
        check(
            bool((arrived == 1).all()),
            op,
            "assist_info_for_combine",
            f"must return each row once; rows were returned {arrived.tolist()} times",
        )
    return call.add(returned, expert_scales)
