"""Test MoE routing, permutation, grouped products and unpermutation against definitions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import close, int32, random, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_npu_emulator.ops import moe_experts, moe_gating
from ascend_npu_emulator.ops.poison import POISON


def scores_of(row: list[float], softmax: bool) -> list[float]:
    if softmax:
        top = max(row)
        total = sum(math.exp(value - top) for value in row)
        return [math.exp(value - top) / total for value in row]
    return [1 / (1 + math.exp(-value)) for value in row]


def route(
    row: list[float],
    k: int,
    *,
    softmax: bool,
    normalise: bool,
    bias: list[float] | None = None,
    factor: float = 1.0,
    groups: int = 1,
    best_groups: int = 1,
    top_two: bool = False,
) -> tuple[list[float], list[int]]:
    """Return the weights and experts of one token, as the operator documentation defines them."""
    scores = scores_of(row, softmax)
    choice = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = len(row) // groups
    merit = []
    for group in range(groups):
        members = sorted(choice[group * size : (group + 1) * size], reverse=True)
        merit.append(members[0] + members[1] if top_two else members[0])
    kept = sorted(range(groups), key=lambda g: -merit[g])[:best_groups]
    experts = sorted((i for i in range(len(row)) if i // size in kept), key=lambda i: -choice[i])[
        :k
    ]
    weights = [scores[i] for i in experts]
    total = sum(weights) + 1e-20 if normalise else 1.0
    return [weight / total * factor for weight in weights], experts


ROUTERS: dict[str, dict[str, Any]] = {
    "MiniMax-M2: sigmoid with a correction bias": {"norm_type": 1, "renorm": 1, "bias": True},
    "sigmoid, renorm 0: still normalised": {"norm_type": 1, "renorm": 0},
    "softmax": {"norm_type": 0, "renorm": 0},
    "softmax, renorm 1": {"norm_type": 0, "renorm": 1},
    "groups by their best expert": {"norm_type": 1, "renorm": 1, "bias": True, "groups": (4, 2, 0)},
    "groups by their two best experts": {
        "norm_type": 1,
        "renorm": 1,
        "bias": True,
        "groups": (4, 2, 1),
    },
    "a scaling factor": {"norm_type": 1, "renorm": 1, "factor": 2.5},
}


@scenarios("router", ROUTERS)
def test_router_selects_by_biased_score_and_weighs_by_unbiased_score(
    router: dict[str, Any],
) -> None:
    logits, bias = random(9, 16), random(16, seed=1) if "bias" in router else None
    (groups, best, mode), softmax = router.get("groups", (1, 1, 0)), router["norm_type"] == 0
    factor = router.get("factor", 1.0)
    weights, experts, scores = moe_gating.moe_gating_top_k(
        logits,
        3,
        best,
        groups,
        mode,
        router["renorm"],
        router["norm_type"],
        True,
        factor,
        1e-20,
        bias,
    )
    assert experts.dtype == torch.int32
    for token, row in enumerate(logits.double().tolist()):
        expected, chosen = route(
            row,
            3,
            bias=None if bias is None else bias.double().tolist(),
            softmax=softmax,
            factor=factor,
            normalise=not softmax or router["renorm"] == 1,
            groups=groups,
            best_groups=best,
            top_two=mode == 1,
        )
        assert experts[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)
        assert scores[token].tolist() == pytest.approx(scores_of(row, softmax), rel=1e-5)


def test_first_expert_wins_a_tie() -> None:
    _, experts, _ = moe_gating.npu_moe_gating_top_k(
        torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, norm_type=1
    )
    assert experts.tolist() == [[1, 2]]


def test_softmax_router_numbers_rows_column_by_column() -> None:
    logits = random(3, 5)
    weights, experts, rows = moe_gating.npu_moe_gating_top_k_softmax(logits, None, 2)
    for token, row in enumerate(logits.double().tolist()):
        expected, chosen = route(row, 2, softmax=True, normalise=False)
        assert experts[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)
    assert rows.tolist() == [[0, 3], [1, 4], [2, 5]]


ROUTING = {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1}
PRODUCT = {"split_item": 2, "group_type": 0, "group_list_type": 1}


def init_routing(
    x: torch.Tensor, experts: torch.Tensor, count: int, active: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    return moe_experts.npu_moe_init_routing_custom(
        x,
        experts,
        active_num=experts.numel(),
        expert_num=count,
        active_expert_range=list(active),
        **ROUTING,
    )


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, tuple[int, int]]:
    """Draw distinct experts per token, the number of experts, and the experts of this rank."""
    count = draw(st.integers(2, 8))
    tokens, top_k, first = (
        draw(st.integers(1, 7)),
        draw(st.integers(1, count)),
        draw(st.integers(0, count - 1)),
    )
    rows = [draw(st.permutations(range(count)))[:top_k] for _ in range(tokens)]
    return (
        torch.tensor(rows, dtype=torch.int32),
        count,
        (first, draw(st.integers(first + 1, count))),
    )


@given(routing=routings())
@settings(max_examples=60, deadline=None)
def test_tokens_are_copied_once_per_active_expert_in_expert_order(
    routing: tuple[torch.Tensor, int, tuple[int, int]],
) -> None:
    experts, count, (first, last) = routing
    tokens, top_k = experts.shape
    x, pairs = (
        random(tokens, 4),
        [(token, choice) for token in range(tokens) for choice in range(top_k)],
    )
    rows, place, per_expert, _ = init_routing(x, experts, count, (first, last))
    expected = [pair for expert in range(first, last) for pair in pairs if experts[pair] == expert]
    assert rows.shape == (tokens * top_k, 4)
    for row, (token, _) in enumerate(expected):
        assert torch.equal(rows[row], x[token])
    assert (rows[len(expected) :] == POISON).all(), (
        "rows past the active ones are undefined, not zero"
    )
    assert per_expert.tolist() == [int((experts == expert).sum()) for expert in range(first, last)]
    where = {pair: row for row, pair in enumerate(expected)}
    assert place.tolist() == [where.get(pair, -1) for pair in pairs]


def test_both_init_routing_operators_agree() -> None:
    x, experts = random(4, 6), int32(0, 3, 3, 1, 2, 0, 1, 2).view(4, 2)
    options = {name: value for name, value in ROUTING.items() if name != "quant_mode"}
    second = moe_experts.npu_moe_init_routing_v2(
        x, experts, expert_num=4, active_expert_range=[1, 3], **options
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(init_routing(x, experts, 4, (1, 3)), second, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("list_type", "groups"), [(1, [2, 0, 3]), (0, [2, 2, 5]), (1, [0, 0, 0])])
def test_each_group_of_rows_is_multiplied_by_its_matrix(
    list_type: int, groups: list[int], bias: bool, dtype: torch.dtype
) -> None:
    x, weight, addend = (
        random(6, 4, dtype=dtype),
        random(3, 4, 5, seed=1, dtype=dtype),
        random(3, 5, seed=2) if bias else None,
    )
    (y,) = moe_experts.npu_grouped_matmul(
        [x],
        [weight],
        bias=[addend] if bias else None,
        group_list=torch.tensor(groups),
        **PRODUCT | {"group_list_type": list_type},
    )
    counts = (
        groups
        if list_type == 1
        else [b - a for a, b in zip([0, *groups[:-1]], groups, strict=True)]
    )
    owners = [group for group, count in enumerate(counts) for _ in range(count)]
    for row, group in enumerate(owners):
        exact = x[row].double() @ weight[group].double() + (
            0 if addend is None else addend[group].double()
        )
        torch.testing.assert_close(
            y[row].double(), exact, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=2**-7
        )
    assert (y[len(owners) :] == POISON).all(), "rows past the last group are undefined, not zero"


def test_permute_and_unpermute_give_the_weighted_sum_over_experts() -> None:
    x, indices = random(5, 3), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
    rows, place = moe_experts.npu_moe_token_permute(x, indices)
    for row, source in enumerate(sorted(range(10), key=lambda i: indices.flatten()[i].item())):
        assert torch.equal(rows[row], x[source // 2])
        assert place[source] == row
    probabilities = random(5, 2, seed=1).abs()
    close(
        moe_experts.npu_moe_token_unpermute(rows, place, probabilities),
        x.double() * probabilities.double().sum(1, keepdim=True),
    )


@pytest.mark.parametrize(("kept", "rows"), [(None, 4), (0, 4), (3, 3), (9, 4), (-1, 3)])
def test_permute_keeps_the_given_number_of_rows(kept: int | None, rows: int) -> None:
    permuted, place = moe_experts.npu_moe_token_permute(
        random(2, 3), torch.tensor([[1, 0], [0, 1]]), kept
    )
    assert (permuted.shape, place.shape) == ((rows, 3), (4,))


def test_unpermute_adds_bfloat16_rows_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256. Only a float32 sum gives 258."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    # Without padding, restore_shape has no effect.
    for shape in (None, [7, 7]):
        assert moe_experts.npu_moe_token_unpermute(
            rows, int32(0, 1, 2), torch.ones(1, 3), restore_shape=shape
        ).tolist() == [[258.0]]


def test_partial_sums_of_two_ranks_add_up_to_the_layer() -> None:
    """Each rank gives rows of remote experts weight 0, as vllm-ascend's all-gather path does."""
    x, logits, weight = random(6, 4), random(6, 8, seed=1), random(8, 4, 4, seed=2)
    weights, experts, _ = moe_gating.moe_gating_top_k(
        logits, 2, 1, 1, 1, 1, 1, False, 1.0, 1e-20, None
    )
    total = torch.zeros(6, 4)
    for first, last in ((0, 4), (4, 8)):
        rows, place, counts, _ = init_routing(x, experts, 8, (first, last))
        (y,) = moe_experts.npu_grouped_matmul(
            [rows], [weight[first:last]], group_list=counts, **PRODUCT
        )
        mine = ((experts >= first) & (experts < last)).float()
        total += moe_experts.npu_moe_token_unpermute(y, place.abs(), weights * mine)
    products = torch.einsum("ti,tkio->tko", x.double(), weight[experts].double())
    close(total, (weights.double()[..., None] * products).sum(1), roundings=5)


X, EXPERTS, STACK = random(2, 4), int32(0, 1, 1, 2).view(2, 2), random(3, 4, 5)


def grouped(
    x: torch.Tensor = X, stack: torch.Tensor = STACK, **changes: Any
) -> Callable[[], object]:
    return lambda: moe_experts.npu_grouped_matmul(
        [x], [stack], **{"group_list": torch.tensor([1, 1, 0]), **PRODUCT, **changes}
    )


def routing(expert_idx: torch.Tensor = EXPERTS, **changes: Any) -> Callable[[], object]:
    return lambda: moe_experts.npu_moe_init_routing_custom(
        X, expert_idx, **{"expert_num": 3, **ROUTING, **changes}
    )


def gating(k: int = 1, **changes: Any) -> Callable[[], object]:
    return lambda: moe_gating.npu_moe_gating_top_k(X, k, **changes)


def unpermute(places: torch.Tensor) -> Callable[[], object]:
    return lambda: moe_experts.npu_moe_token_unpermute(X, places)


BFLOAT = torch.bfloat16
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "router bias of another dtype": (gating(bias=torch.zeros(4, dtype=BFLOAT)), ValueError, "bias"),
    "more choices than experts": (gating(5), ValueError, "k: 5 must lie in 1..4"),
    "renorm of torch_npu's operator": (gating(renorm=1), ValueError, "renorm"),
    "finished rows": (
        lambda: moe_gating.npu_moe_gating_top_k_softmax(X, torch.zeros(2, dtype=torch.bool)),
        NotImplementedError,
        "finished",
    ),
    "int64 experts": (routing(EXPERTS.long()), ValueError, "expert_idx: dtype"),
    "a range past the experts": (
        routing(active_expert_range=[0, 4]),
        ValueError,
        "active_expert_range",
    ),
    "quantisation by a given scale": (routing(quant_mode=0), NotImplementedError, "quant_mode=0"),
    "scatter indices": (routing(row_idx_type=1), NotImplementedError, "row_idx_type=1"),
    "running totals of experts": (
        routing(expert_tokens_num_type=0),
        NotImplementedError,
        "expert_tokens_num_type",
    ),
    "fewer rows than routed": (routing(active_num=1), NotImplementedError, "active_num=1"),
    "int32 groups": (grouped(group_list=int32(1, 1, 0)), ValueError, "group_list: dtype"),
    "another number of groups": (
        grouped(group_list=torch.tensor([1, 1])),
        ValueError,
        r"group_list: shape \(2,\)",
    ),
    "more rows in groups than in x": (
        grouped(group_list=torch.tensor([1, 1, 1])),
        ValueError,
        "group_list: 3 rows",
    ),
    "decreasing running totals": (
        grouped(group_list=torch.tensor([2, 1, 2]), group_list_type=0),
        ValueError,
        "group_list",
    ),
    "bias of the weights' dtype": (
        grouped(X.to(BFLOAT), STACK.to(BFLOAT), bias=[torch.zeros(3, 5, dtype=BFLOAT)]),
        ValueError,
        "bias: dtype",
    ),
    "scale of a product that is not quantised": (
        grouped(scale=[torch.ones(5)]),
        NotImplementedError,
        "scale",
    ),
    "activation": (grouped(act_type=5), NotImplementedError, "act_type=5"),
    "many results": (grouped(split_item=0), NotImplementedError, "split_item=0"),
    "place -1": (unpermute(int32(0, -1)), ValueError, r"\[-1\]"),
    "int64 places": (unpermute(torch.tensor([0, 1])), ValueError, "sorted_indices: dtype"),
    "padded mode": (
        lambda: moe_experts.npu_moe_token_permute(X, EXPERTS, padded_mode=True),
        NotImplementedError,
        "padded_mode=True",
    ),
}


@scenarios("call, error, message", REFUSED)
def test_error_names_argument(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
