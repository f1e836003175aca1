"""Routing, sorting by expert, grouped products and bringing back, against their definitions written as loops in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.emulator.ops import moe_experts, moe_gating
from vllm_ascend_hsx.emulator.ops.poison import POISON


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scores_of(row: list[float], softmax: bool) -> list[float]:
    if softmax:
        top = max(row)
        total = sum(math.exp(value - top) for value in row)
        return [math.exp(value - top) / total for value in row]
    return [1 / (1 + math.exp(-value)) for value in row]


def route(
    row: list[float], k: int, *, bias: list[float] | None, softmax: bool, normalise: bool, factor: float,
    groups: int = 1, best_groups: int = 1, top_two: bool = False,
) -> tuple[list[float], list[int]]:
    """Weights and experts of one token, by the words of the operator's documentation."""
    scores = scores_of(row, softmax)
    choice = [score + (bias[i] if bias else 0.0) for i, score in enumerate(scores)]
    size = len(row) // groups
    merit = []
    for group in range(groups):
        members = sorted(choice[group * size : (group + 1) * size], reverse=True)
        merit.append(members[0] + members[1] if top_two else members[0])
    kept = sorted(range(groups), key=lambda g: -merit[g])[:best_groups]
    allowed = [i for i in range(len(row)) if i // size in kept]
    experts = sorted(allowed, key=lambda i: -choice[i])[:k]
    weights = [scores[i] for i in experts]
    if normalise:
        total = sum(weights) + 1e-20
        weights = [weight / total for weight in weights]
    return [weight * factor for weight in weights], experts


ROUTERS = {
    "MiniMax-M2: sigmoid with a correction bias": {"norm_type": 1, "renorm": 1, "bias": True},
    "sigmoid, renorm 0: normalised all the same": {"norm_type": 1, "renorm": 0, "bias": False},
    "softmax": {"norm_type": 0, "renorm": 0, "bias": False},
    "softmax, renorm 1": {"norm_type": 0, "renorm": 1, "bias": False},
    "groups by their best expert": {"norm_type": 1, "renorm": 1, "bias": True, "groups": (4, 2, 0)},
    "groups by their two best experts": {"norm_type": 1, "renorm": 1, "bias": True, "groups": (4, 2, 1)},
    "a scaling factor": {"norm_type": 1, "renorm": 1, "bias": False, "factor": 2.5},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_chooses_by_biased_score_and_weighs_by_score(name: str) -> None:
    router: dict[str, Any] = ROUTERS[name]
    logits, bias = random(9, 16), random(16, seed=1) if router["bias"] else None
    groups, best, mode = router.get("groups", (1, 1, 0))
    weights, experts, scores = moe_gating.moe_gating_top_k(
        logits, 3, best, groups, mode, router["renorm"], router["norm_type"], True, router.get("factor", 1.0), 1e-20, bias
    )
    assert experts.dtype == torch.int32
    for token, row in enumerate(logits.double().tolist()):
        expected, chosen = route(
            row, 3, bias=bias.double().tolist() if bias is not None else None, softmax=router["norm_type"] == 0,
            normalise=router["norm_type"] == 1 or router["renorm"] == 1, factor=router.get("factor", 1.0),
            groups=groups, best_groups=best, top_two=mode == 1,
        )
        assert experts[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)
        assert scores[token].tolist() == pytest.approx(scores_of(row, router["norm_type"] == 0), rel=1e-5)


def test_of_two_experts_with_equal_scores_the_first_is_chosen() -> None:
    _, experts, _ = moe_gating.npu_moe_gating_top_k(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2, norm_type=1)
    assert experts.tolist() == [[1, 2]]


def test_the_softmax_router_numbers_its_rows_by_choice_first() -> None:
    logits = random(3, 5)
    weights, experts, rows = moe_gating.npu_moe_gating_top_k_softmax(logits, None, 2)
    for token, row in enumerate(logits.double().tolist()):
        expected, chosen = route(row, 2, bias=None, softmax=True, normalise=False, factor=1.0)
        assert experts[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-5)
    assert rows.tolist() == [[0, 3], [1, 4], [2, 5]]


def init_routing(x: torch.Tensor, experts: torch.Tensor, count: int, active: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return moe_experts.npu_moe_init_routing_custom(
        x, experts, active_num=experts.numel(), expert_num=count, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=list(active), quant_mode=-1,
    )


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, tuple[int, int]]:
    """Distinct experts for each token, the number of experts, and the half-open range of those on this rank."""
    count = draw(st.integers(2, 8))
    tokens, top_k = draw(st.integers(1, 7)), draw(st.integers(1, count))
    rows = [draw(st.permutations(range(count)))[:top_k] for _ in range(tokens)]
    first = draw(st.integers(0, count - 1))
    return torch.tensor(rows, dtype=torch.int32), count, (first, draw(st.integers(first + 1, count)))


@given(routing=routings())
@settings(max_examples=60, deadline=None)
def test_tokens_are_copied_once_per_active_expert_in_expert_order(routing: tuple[torch.Tensor, int, tuple[int, int]]) -> None:
    experts, count, (first, last) = routing
    tokens, top_k = experts.shape
    x = random(tokens, 4)
    rows, place, per_expert, _ = init_routing(x, experts, count, (first, last))
    expected = [
        (token, choice)
        for expert in range(first, last)
        for token in range(tokens)
        for choice in range(top_k)
        if experts[token, choice] == expert
    ]
    assert rows.shape == (tokens * top_k, 4)
    for row, (token, _) in enumerate(expected):
        assert torch.equal(rows[row], x[token])
    assert (rows[len(expected) :] == POISON).all(), "rows past the active ones are undefined, not zero"
    assert per_expert.tolist() == [int((experts == expert).sum()) for expert in range(first, last)]
    where = {pair: row for row, pair in enumerate(expected)}
    assert place.tolist() == [where.get((token, choice), -1) for token in range(tokens) for choice in range(top_k)]


def test_both_forms_of_the_sorting_operator_agree() -> None:
    x, experts = random(4, 6), torch.tensor([[0, 3], [3, 1], [2, 0], [1, 2]], dtype=torch.int32)
    second = moe_experts.npu_moe_init_routing_v2(
        x, experts, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True, active_expert_range=[1, 3]
    )
    for first_form, second_form in zip(init_routing(x, experts, 4, (1, 3)), second, strict=True):
        assert torch.equal(first_form, second_form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("list_type", "groups"), [(1, [2, 0, 3]), (0, [2, 2, 5]), (1, [0, 0, 0])])
def test_each_group_of_rows_is_multiplied_by_its_own_matrix(
    list_type: int, groups: list[int], bias: bool, dtype: torch.dtype
) -> None:
    x, weight = random(6, 4, dtype=dtype), random(3, 4, 5, seed=1, dtype=dtype)
    addend = random(3, 5, seed=2) if bias else None
    (y,) = moe_experts.npu_grouped_matmul(
        [x], [weight], bias=None if addend is None else [addend], group_list=torch.tensor(groups), split_item=2, group_type=0,
        group_list_type=list_type,
    )
    counts = groups if list_type == 1 else [b - a for a, b in zip([0, *groups[:-1]], groups, strict=True)]
    row = 0
    for group, count in enumerate(counts):
        for _ in range(count):
            exact = x[row].double() @ weight[group].double() + (0 if addend is None else addend[group].double())
            torch.testing.assert_close(y[row].double(), exact, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=2**-7)
            row += 1
    assert (y[row:] == POISON).all(), "rows past the last group are undefined, not zero"


def test_permuting_and_bringing_back_is_a_weighted_sum_over_each_tokens_experts() -> None:
    x, indices = random(5, 3), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
    rows, place = moe_experts.npu_moe_token_permute(x, indices)
    order = sorted(range(10), key=lambda i: indices.flatten()[i].item())
    for row, source in enumerate(order):
        assert torch.equal(rows[row], x[source // 2])
        assert place[source] == row
    probabilities = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    back = moe_experts.npu_moe_token_unpermute(rows, place, probabilities)
    exact = x.double() * probabilities.double().sum(1, keepdim=True)
    torch.testing.assert_close(back.double(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("kept", "rows"), [(None, 4), (0, 4), (3, 3), (9, 4), (-1, 3)])
def test_permute_keeps_as_many_rows_as_it_is_told(kept: int | None, rows: int) -> None:
    permuted, place = moe_experts.npu_moe_token_permute(random(2, 3), torch.tensor([[1, 0], [0, 1]]), kept)
    assert permuted.shape == (rows, 3)
    assert place.shape == (4,)


def test_bringing_back_adds_in_float32_whatever_the_dtype() -> None:
    """In bfloat16 256 + 1 is 256: only a float32 sum gives 258."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    back = moe_experts.npu_moe_token_unpermute(rows, torch.tensor([0, 1, 2], dtype=torch.int32), torch.ones(1, 3))
    assert back.tolist() == [[258.0]]


def test_a_whole_layer_on_two_ranks_adds_up_to_the_layer() -> None:
    """Each rank computes its experts and weighs the others' rows by 0, as vllm-ascend's all-gather path does."""
    x, logits, weight = random(6, 4), random(6, 8, seed=1), random(8, 4, 4, seed=2)
    weights, experts, _ = moe_gating.moe_gating_top_k(logits, 2, 1, 1, 1, 1, 1, False, 1.0, 1e-20, None)
    parts = []
    for first, last in ((0, 4), (4, 8)):
        rows, place, counts, _ = init_routing(x, experts, 8, (first, last))
        (y,) = moe_experts.npu_grouped_matmul(
            [rows], [weight[first:last]], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )
        mine = ((experts >= first) & (experts < last)).float()
        parts.append(moe_experts.npu_moe_token_unpermute(y, place.abs(), weights * mine))
    exact = torch.stack(
        [
            sum(weights[t, k].double() * (x[t].double() @ weight[experts[t, k]].double()) for k in range(2))
            for t in range(6)
        ]
    )
    torch.testing.assert_close((parts[0] + parts[1]).double(), exact, atol=1e-5, rtol=1e-5)


X, EXPERTS = random(2, 4), torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
STACK = random(3, 4, 5)


def grouped(**changes: Any) -> Callable[[], object]:
    options = {"group_list": torch.tensor([1, 1, 0]), "split_item": 2, "group_type": 0, "group_list_type": 1, **changes}
    return lambda: moe_experts.npu_grouped_matmul([X], [STACK], **options)


def routing(**changes: Any) -> Callable[[], object]:
    options = {"expert_num": 3, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": -1, **changes}
    return lambda: moe_experts.npu_moe_init_routing_custom(options.pop("x", X), options.pop("expert_idx", EXPERTS), **options)


WRONG_CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "router bias of another dtype": (
        lambda: moe_gating.npu_moe_gating_top_k(X, 1, bias=torch.zeros(4, dtype=torch.bfloat16)), ValueError, "bias"),
    "more experts than there are": (lambda: moe_gating.npu_moe_gating_top_k(X, 5), ValueError, "k: 5 must lie in 1..4"),
    "renorm of torch_npu's operator": (lambda: moe_gating.npu_moe_gating_top_k(X, 1, renorm=1), ValueError, "renorm"),
    "finished rows": (
        lambda: moe_gating.npu_moe_gating_top_k_softmax(X, torch.zeros(2, dtype=torch.bool)), NotImplementedError, "finished"),
    "int64 experts": (routing(expert_idx=EXPERTS.long()), ValueError, "expert_idx: dtype"),
    "a range past the experts": (routing(active_expert_range=[0, 4]), ValueError, "active_expert_range"),
    "quantisation in the routing": (routing(quant_mode=1), NotImplementedError, "quant_mode=1"),
    "scatter indices": (routing(row_idx_type=1), NotImplementedError, "row_idx_type=1"),
    "running totals of experts": (routing(expert_tokens_num_type=0), NotImplementedError, "expert_tokens_num_type"),
    "fewer rows than routed": (routing(active_num=1), NotImplementedError, "active_num=1"),
    "int32 groups": (grouped(group_list=torch.tensor([1, 1, 0], dtype=torch.int32)), ValueError, "group_list: dtype"),
    "groups of another number": (grouped(group_list=torch.tensor([1, 1])), ValueError, r"group_list: shape \(2,\)"),
    "more rows in groups than in x": (grouped(group_list=torch.tensor([1, 1, 1])), ValueError, "group_list: 3 rows"),
    "running totals that fall": (grouped(group_list=torch.tensor([2, 1, 2]), group_list_type=0), ValueError, "group_list"),
    "bias of the weights' dtype": (
        lambda: moe_experts.npu_grouped_matmul(
            [X.bfloat16()], [STACK.bfloat16()], bias=[torch.zeros(3, 5, dtype=torch.bfloat16)],
            group_list=torch.tensor([1, 1, 0]), split_item=2, group_type=0, group_list_type=1),
        ValueError, "bias: dtype"),
    "quantised product": (grouped(scale=[torch.ones(5)]), NotImplementedError, "scale"),
    "activation": (grouped(act_type=5), NotImplementedError, "act_type=5"),
    "many results": (grouped(split_item=0), NotImplementedError, "split_item=0"),
    "place -1": (
        lambda: moe_experts.npu_moe_token_unpermute(X, torch.tensor([0, -1], dtype=torch.int32)), ValueError, r"\[-1\]"),
    "int64 places": (lambda: moe_experts.npu_moe_token_unpermute(X, torch.tensor([0, 1])), ValueError, "sorted_indices: dtype"),
    "padded mode": (
        lambda: moe_experts.npu_moe_token_permute(X, EXPERTS, padded_mode=True), NotImplementedError, "padded_mode=True"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    call, error, message = WRONG_CALLS[name]
    with pytest.raises(error, match=message):
        call()
