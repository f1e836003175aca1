"""References for routers: select the experts of each token, and compute the weights."""

import torch

from ascend_npu_emulator.ops.checks import FLOATS, check, check_dtype, check_rank, unsupported

_SOFTMAX, _SIGMOID = 0, 1


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of each row's ``count`` largest values, descending; ties by index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def _only_best_groups(
    choice: torch.Tensor, group_count: int, k_group: int, top_two: bool
) -> torch.Tensor:
    """Set ``choice`` [T, E] to -inf outside the ``k_group`` best of ``group_count`` groups."""
    grouped = choice.view(choice.shape[0], group_count, -1)
    merit = grouped.topk(2, -1).values.sum(-1) if top_two else grouped.amax(-1)
    kept = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, _best(merit, k_group), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(choice)


def _route(
    op: str,
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_rank(op, "x", x, 2)
    check_dtype(op, "x", x, FLOATS)
    experts = x.shape[1]
    check(experts <= 2048, op, "x", f"{experts} experts exceed 2048")
    check(
        norm_type in (_SOFTMAX, _SIGMOID),
        op,
        "norm_type",
        f"{norm_type} is not one of 0 (softmax), 1 (sigmoid)",
    )
    check(renorm in (0, 1), op, "renorm", f"{renorm} is not one of 0, 1")
    check(
        group_select_mode in (0, 1),
        op,
        "group_select_mode",
        f"{group_select_mode} is not one of 0, 1",
    )
    check(
        group_count > 0 and experts % group_count == 0,
        op,
        "group_count",
        f"{group_count} must divide {experts} experts",
    )
    check(
        group_count == 1 or experts // group_count > 2,
        op,
        "group_count",
        "a group must have more than two experts",
    )
    check(1 <= k_group <= group_count, op, "k_group", f"{k_group} must lie in 1..{group_count}")
    check(
        1 <= k <= experts // group_count * k_group,
        op,
        "k",
        f"{k} must lie in 1..{experts // group_count * k_group}",
    )
    scores = torch.softmax(x.float(), -1) if norm_type == _SOFTMAX else torch.sigmoid(x.float())
    choice = scores
    if bias is not None:
        check(
            tuple(bias.shape) == (experts,),
            op,
            "bias",
            f"shape {tuple(bias.shape)} must be ({experts},)",
        )
        check(bias.dtype == x.dtype, op, "bias", f"dtype {bias.dtype} must equal x's {x.dtype}")
        choice = scores + bias.float()
    if group_count > 1:
        choice = _only_best_groups(choice, group_count, k_group, top_two=group_select_mode == 1)
    chosen = _best(choice, k)
    weights = scores.gather(1, chosen)
    if norm_type == _SIGMOID or renorm == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    return weights.to(x.dtype), chosen.to(torch.int32), scores if out_flag else scores.new_empty(0)


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose k experts per token from router logits ``x`` [T, E].

    Scores are a softmax (``norm_type`` 0) or a sigmoid (1). Experts are chosen by score + ``bias``
    and weighted by the score alone. Sigmoid weights are divided by their sum + ``eps``.

    Returns:
        Weights [T, k] like x, experts int32 [T, k] and scores float32 [T, E], empty unless
            ``out_flag``.
    """
    op = "npu_moe_gating_top_k"
    check(renorm == 0, op, "renorm", f"{renorm} is not supported by this operator; supported: 0")
    return _route(
        op,
        x,
        k,
        k_group,
        group_count,
        group_select_mode,
        renorm,
        norm_type,
        out_flag,
        routed_scaling_factor,
        eps,
        bias,
    )


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run ``npu_moe_gating_top_k``; ``renorm`` 1 also divides softmax weights by their sum."""
    op = "moe_gating_top_k"
    return _route(
        op,
        x,
        k,
        k_group,
        group_count,
        group_select_mode,
        renorm,
        norm_type,
        out_flag,
        routed_scaling_factor,
        eps,
        bias_opt,
    )


def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose k experts per token with a softmax router.

    Returns:
        Weights [T, k] like x, experts int32 [T, k] and rows int32 [T, k], where row (t, i) is i * T
            + t.
    """
    op = "npu_moe_gating_top_k_softmax"
    if finished is not None:
        raise unsupported(op, "finished", finished)
    check_rank(op, "x", x, 2)
    check_dtype(op, "x", x, FLOATS)
    check(1 <= k <= min(x.shape[1], 1024), op, "k", f"{k} must lie in 1..{min(x.shape[1], 1024)}")
    scores = torch.softmax(x.float(), -1)
    chosen = _best(scores, k)
    rows = (
        torch.arange(x.shape[0] * k, device=x.device, dtype=torch.int32)
        .view(k, x.shape[0])
        .t()
        .contiguous()
    )
    return scores.gather(1, chosen).to(x.dtype), chosen.to(torch.int32), rows
