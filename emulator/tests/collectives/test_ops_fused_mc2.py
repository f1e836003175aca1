"""Fused MC2 across processes, with W8A8 experts, against the definition."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch_npu
from emulated import capture, int32, random, scenarios
from hccl_ranks import Ranks

from ascend_npu_emulator.ops.collectives.fused_mc2 import dispatch_ffn_combine
from ascend_npu_emulator.ops.poison import POISON

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 5, 64, 24, 8, 2
NO_LIMIT = 1 << 16  # rows


class Given(NamedTuple):
    """The inputs of one rank. Only tokens with `active` set take part."""

    x: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor
    active: torch.Tensor


class Weights(NamedTuple):
    up: torch.Tensor
    down: torch.Tensor
    up_scale: torch.Tensor
    down_scale: torch.Tensor


def given(rank: int, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    chosen = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]
    ).int()
    x = random(TOKENS, HIDDEN, seed=10 * seed + rank, dtype=torch.bfloat16)
    return Given(
        x, chosen, torch.rand(TOKENS, TOP_K, generator=generator), torch.arange(TOKENS) % 4 != rank
    )


def weights() -> Weights:
    """Return the weights of all experts."""
    generator = torch.Generator().manual_seed(7)
    up, down = (torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
                for shape in ((EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, INNER, HIDDEN)))  # fmt: skip
    return Weights(
        up,
        down,
        *(
            0.002 + 0.002 * torch.rand(EXPERTS, columns, generator=generator)
            for columns in (2 * INNER, HIDDEN)
        ),
    )


def as_bits(scale: torch.Tensor) -> torch.Tensor:
    """Return float32 scales in vllm-ascend's format: the bits in int64, in one dimension."""
    return scale.contiguous().view(torch.int32).long().flatten()


def arguments(rank: int, size: int, mine: Given, **changes: Any) -> dict[str, Any]:
    """Return the arguments in vllm-ascend's format, on the device."""
    os.environ["NPU_EMULATOR_SOC"] = "a3"
    local = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    own = [tensor[local] for tensor in weights()]
    named = {
        "x": mine.x, "weight1": [own[0]], "weight2": [own[1]], "expert_idx": mine.chosen, "scale1": [as_bits(own[2])],
        "scale2": [as_bits(own[3])], "bias1": [torch.tensor([])], "bias2": [torch.tensor([])], "probs": mine.shares,
        "x_active_mask": mine.active, "out": torch.zeros_like(mine.x),
        "expert_token_nums": torch.zeros(EXPERTS // size, dtype=torch.int32),
    } | changes  # fmt: skip
    on_device = {
        name: [each.npu() for each in value]
        if isinstance(value, list)
        else value.npu()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in named.items()
    }
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    return {"group": name, "max_output_size": NO_LIMIT, "swiglu_limit": 0.0} | on_device


def fused(rank: int, size: int, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Return the result, the number of rows per expert, and the indices after the call."""
    named = arguments(rank, size, given(rank), **changes)
    out, numbers = torch.ops._C_ascend.dispatch_ffn_combine(**named)
    assert (out.data_ptr(), numbers.data_ptr()) == (
        named["out"].data_ptr(),
        named["expert_token_nums"].data_ptr(),
    )
    return out.cpu(), numbers.cpu(), named["expert_idx"].cpu()


def to_int8(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = row.abs().max() / 127
    return (row / scale).round().double(), scale


def made_of(row: torch.Tensor, expert: int, limit: float) -> torch.Tensor:
    """Return the output of an expert for a row."""
    held = weights()
    integers, scale = to_int8(row.float())
    product = (
        (integers @ held.up[expert].double()).float() * held.up_scale[expert]
    ).half().float() * scale
    gate, other = product.chunk(2)
    if limit:
        gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    integers, scale = to_int8(gate / (1 + (-gate).exp()) * other)
    return (
        ((integers @ held.down[expert].double()).float() * held.down_scale[expert]).half().float()
        * scale
    ).bfloat16()


def check_rows(mine: Given, result: torch.Tensor, limit: float = 0.0) -> None:
    """Compare with the definition. The definition uses all bits of the scales."""
    for token in mine.active.nonzero().flatten().tolist():
        rows = [
            made_of(mine.x[token], expert, limit).float() for expert in mine.chosen[token].tolist()
        ]
        expected = sum(share * row for share, row in zip(mine.shares[token], rows, strict=True))
        assert (result[token].float() - expected).norm() < 0.01 * expected.norm()
    assert (result[~mine.active] == POISON).all()


@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_token_gets_the_weighted_sum_of_expert_results(
    ranks: Ranks, late_ranks: bool, limit: float
) -> None:
    received = torch.zeros(EXPERTS, dtype=torch.int64)
    for rank in range(ranks.size):
        received += torch.bincount(
            given(rank).chosen[given(rank).active].flatten(), minlength=EXPERTS
        )
    results = ranks.run(partial(fused, swiglu_limit=limit), late_ranks)
    for rank, (result, _, chosen) in enumerate(results):
        mine = given(rank)
        check_rows(mine, result, limit)
        assert torch.equal(
            chosen, torch.where(mine.active[:, None], mine.chosen, EXPERTS)
        )  # the kernel overwrites the indices of inactive tokens
    assert torch.cat([numbers for _, numbers, _ in results]).tolist() == received.tolist()


def replayed(rank: int, size: int) -> torch.Tensor:
    named = arguments(rank, size, given(rank))
    graph = capture(lambda: torch.ops._C_ascend.dispatch_ffn_combine(**named))
    new = given(rank, seed=1)
    for name, tensor in (("x", new.x), ("expert_idx", new.chosen), ("probs", new.shares)):
        named[name].copy_(tensor)
    graph.replay()
    torch_npu.npu.synchronize()
    return named["out"].cpu()


def test_replay_of_fused_mc2_reads_current_inputs(ranks: Ranks, late_ranks: bool) -> None:
    for rank, result in enumerate(ranks.run(replayed, late_ranks)):
        check_rows(given(rank, seed=1), result)


def test_rows_beyond_max_output_size_are_undefined(ranks: Ranks) -> None:
    """Each rank computes one row only: the first row of the first expert with rows."""
    defined = 0
    for rank, (result, _, _) in enumerate(ranks.run(partial(fused, max_output_size=1))):
        mine = given(rank)
        assert all(
            (row.abs() > 10).all() for row in result[mine.active].float()
        )  # each sum includes an undefined row
        defined += int((result[mine.active] != POISON).any(1).sum())
    assert defined


def unread_bits(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results for scales that differ only in bits the hardware does not read."""
    local = EXPERTS // size
    low = torch.full((local * HIDDEN,), 0x3B000000)
    with_more = low | 0x1FFF | 5 << 32
    return fused(rank, size, scale2=[low])[0], fused(rank, size, scale2=[with_more])[0]


def test_only_the_upper_19_bits_of_a_scale_are_used(ranks: Ranks) -> None:
    for one, other in ranks.run(unread_bits):
        assert torch.equal(one, other)


def one_differs(rank: int, size: int, changes: dict[str, Any]) -> Any:
    return fused(rank, size, **(changes if rank == 1 else {}))


def test_all_ranks_name_the_ranks_that_disagree(ranks: Ranks, late_ranks: bool) -> None:
    for state, text in ranks.outcomes(
        partial(one_differs, changes={"max_output_size": 9}), late_ranks
    ):
        assert state == "error"
        assert (
            "rank 1 calls dispatch_ffn_combine(moe_expert_num=8, max_output_size=9, "
            "swiglu_limit=0.0) of"
        ) in text


def test_error_names_unknown_expert(ranks: Ranks) -> None:
    wrong = given(1).chosen.clone()
    wrong[0, 1] = EXPERTS
    state, text = ranks.outcomes(partial(only_rank_1, changes={"expert_idx": wrong}))[1]
    assert state == "error"
    assert "dispatch_ffn_combine: expert_idx: [" in text


def only_rank_1(rank: int, size: int, changes: dict[str, Any]) -> Any:
    return fused(rank, size, **changes) if rank == 1 else None


INT8, SCALE = torch.ones(2, 64, 48, dtype=torch.int8), torch.ones(96, dtype=torch.int64)
DEFAULTS: dict[str, Any] = {
    "x": torch.ones(4, 64).bfloat16(), "weight1": [INT8], "weight2": [torch.ones(2, 24, 64, dtype=torch.int8)],
    "expert_idx": int32(*range(8)).view(4, 2), "scale1": [SCALE], "scale2": [torch.ones(128, dtype=torch.int64)], "bias1": [],
    "bias2": [], "probs": torch.ones(4, 2), "group": "hccl", "max_output_size": NO_LIMIT, "out": torch.ones(4, 64).bfloat16(),
    "expert_token_nums": int32(0, 0),
}  # fmt: skip
WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "scales of float32": ({"scale1": [SCALE.float()]}, "scale1: dtype torch.float32"),
    "scales of one expert": ({"scale1": [SCALE[:48]]}, "scale1: shape"),
    "a first product wider than x": ({"weight1": [torch.ones(2, 64, 66, dtype=torch.int8)]}, "weight1: last dimension 66"),
    "indices of another dtype": ({"expert_idx": int32(*range(8)).view(4, 2).long()}, "expert_idx: dtype torch.int64"),
    "shares of another dtype": ({"probs": torch.ones(4, 2).bfloat16()}, "probs: dtype torch.bfloat16"),
    "counts of another dtype": ({"expert_token_nums": torch.zeros(2, dtype=torch.int64)}, "expert_token_nums: dtype torch.int64"),
    "more bytes than the buffer": (
        {"x": torch.ones(1 << 19, 64).bfloat16(), "expert_idx": int32(0, 1).repeat(1 << 19, 1), "probs": torch.ones(1 << 19, 2),
         "out": torch.ones(1 << 19, 64).bfloat16()}, "x: 211812352 bytes exceed HCCL_BUFFSIZE, 200 MB: set 202"),
    "a group that does not exist": ({}, "group: this process has no hccl group 'hccl'"),
}  # fmt: skip


@scenarios("changes, message", WRONG_ARGUMENTS)
def test_error_names_argument(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"dispatch_ffn_combine: {message}"):
        dispatch_ffn_combine(**DEFAULTS | changes)


LACKING = {
    "experts in lists": {"weight1": list(INT8)},
    "W4A8": {"weight1": [INT8.int()]},
    "the number of ranks of vllm-ascend 0.30": {"world_size": 2},
}


@pytest.mark.parametrize("changes", LACKING.values(), ids=list(LACKING))
def test_unsupported_option_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"dispatch_ffn_combine: .*{next(iter(changes))}"):
        dispatch_ffn_combine(**DEFAULTS | changes)
