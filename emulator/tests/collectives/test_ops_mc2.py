"""MC2 across processes, against the definition: dispatch to the experts' ranks, and combine."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch_npu
from emulated import capture, close, int32, random, scenarios
from hccl_ranks import Ranks

from ascend_npu_emulator.ops.collectives.mc2 import npu_moe_distribute_dispatch_v2
from ascend_npu_emulator.ops.poison import POISON

TOKENS, HIDDEN, EXPERTS, TOP_K = 5, 32, 8, 2
SOCS = pytest.mark.parametrize("soc", ["a2", "a3"])


class Given(NamedTuple):
    """The inputs of one rank. Only the first `active` tokens take part."""

    x: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor
    active: Any


def given(rank: int, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    chosen = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]
    ).int()
    shares = torch.rand(TOKENS, TOP_K, generator=generator)
    return Given(
        random(TOKENS, HIDDEN, seed=10 * seed + rank, dtype=torch.bfloat16),
        chosen,
        shares,
        TOKENS - rank,
    )


def group_of(rank: int, size: int, soc: str) -> dict[str, Any]:
    """Return the arguments that both operators share, in vllm-ascend's format."""
    os.environ["NPU_EMULATOR_SOC"] = soc
    name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    shared = {
        "group_ep": name,
        "ep_world_size": size,
        "ep_rank_id": rank,
        "moe_expert_num": EXPERTS,
        "global_bs": 0,
    }
    return shared | ({"group_tp": name, "tp_world_size": 1, "tp_rank_id": 0} if soc == "a3" else {})


def mask(active: int) -> torch.Tensor:
    return (torch.arange(TOKENS) < active).npu()


def dispatch(rank: int, size: int, soc: str = "a2", **changes: Any) -> list[torch.Tensor]:
    mine = given(rank)
    options = {
        "x": mine.x.npu(),
        "expert_ids": mine.chosen.npu(),
        "x_active_mask": mask(mine.active),
        **group_of(rank, size, soc),
    }
    return [
        result.cpu() for result in torch_npu.npu_moe_distribute_dispatch_v2(**options | changes)
    ]


def arrivals(rank: int, size: int, expert: int) -> list[tuple[int, int, int]]:
    """Return (rank, token, place) of each row for one expert of a rank, in order."""
    wanted = rank * (EXPERTS // size) + expert
    return [
        (sender, token, place)
        for sender in range(size)
        for token in range(given(sender).active)
        for place in range(TOP_K)
        if given(sender).chosen[token, place] == wanted
    ]


@SOCS
@pytest.mark.parametrize("quant_mode", [0, 2], ids=["bfloat16", "int8"])
def test_rank_receives_rows_of_its_experts_without_padding(
    ranks: Ranks, late_ranks: bool, soc: str, quant_mode: int
) -> None:
    size, local = ranks.size, EXPERTS // ranks.size
    for rank, results in enumerate(
        ranks.run(partial(dispatch, soc=soc, quant_mode=quant_mode), late_ranks)
    ):
        rows, scales, info, per_expert, totals, tp_counts, _ = results
        by_expert = [arrivals(rank, size, expert) for expert in range(local)]
        expected = [arrival for found in by_expert for arrival in found]
        capacity = TOKENS * size * min(local, TOP_K)
        assert rows.shape == (capacity, HIDDEN)
        assert info.shape == (128 * capacity,)
        assert per_expert.tolist() == [len(found) for found in by_expert]
        sent = [
            sum(arrival[0] == sender for arrival in found)
            for found in by_expert
            for sender in range(size)
        ]
        assert totals.tolist() == torch.tensor(sent).cumsum(0).tolist()
        assert (per_expert.dtype, totals.dtype) == (torch.int64, torch.int32)
        assert tp_counts.shape == ((1,) if soc == "a3" else (0,))
        for row, scale, (sender, token, _) in zip(rows, scales, expected, strict=False):
            exact = given(sender).x[token]
            if quant_mode == 0:
                assert torch.equal(row, exact)
            else:
                assert row.dtype == torch.int8
                torch.testing.assert_close(scale, exact.float().abs().max() / 127)
                assert (row.float() * scale - exact.float()).abs().max() <= 0.5001 * scale
        undefined = rows[len(expected) :]
        assert undefined.numel()
        assert (undefined == (POISON if quant_mode == 0 else 127)).all()


def test_expert_token_nums_type_0_gives_running_totals(ranks: Ranks) -> None:
    counts = ranks.run(dispatch)
    totals = ranks.run(partial(dispatch, expert_token_nums_type=0))
    assert [total[3].tolist() for total in totals] == [
        count[3].cumsum(0).tolist() for count in counts
    ]


def there_and_back(mine: Given, shared: dict[str, Any], lost: bool = False) -> torch.Tensor:
    """Dispatch rows, multiply the rows of expert e by e + 1, and return the combined result.

    Args:
        mine: tensors on the device; `active` is the mask.
        lost: whether to assign all rows to token 0 of rank 0 before the combine.
    """
    common = {"expert_ids": mine.chosen, "x_active_mask": mine.active, **shared}
    rows, _, info, per_expert, totals, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
        x=mine.x, **common
    )
    local = per_expert.shape[0]
    place = torch.arange(rows.shape[0], device=rows.device)
    expert = (place[:, None] >= per_expert.cumsum(0)).sum(1).clamp(max=local - 1) + shared[
        "ep_rank_id"
    ] * local
    info = torch.zeros_like(info) if lost else info
    made = rows * (expert + 1)[:, None].to(rows.dtype)
    returned = {"assist_info_for_combine": info, "ep_send_counts": totals}
    return torch_npu.npu_moe_distribute_combine_v2(
        expand_x=made, expert_scales=mine.shares, **returned, **common
    )


def on_device(mine: Given) -> Given:
    return Given(mine.x.npu(), mine.chosen.npu(), mine.shares.npu(), mask(mine.active))


def round_trip(rank: int, size: int, soc: str = "a2", lost: bool = False) -> torch.Tensor:
    return there_and_back(on_device(given(rank)), group_of(rank, size, soc), lost).cpu()


def check_sums(mine: Given, result: torch.Tensor) -> None:
    # bfloat16 holds x * (e + 1) up to one rounding.
    rows = (mine.x.double()[:, None] * (mine.chosen + 1)[..., None]).bfloat16().double()
    close(result[: mine.active], (rows * mine.shares.double()[..., None]).sum(1)[: mine.active])
    assert (result[mine.active :] == POISON).all()


@SOCS
def test_token_gets_the_weighted_sum_of_expert_results(
    ranks: Ranks, late_ranks: bool, soc: str
) -> None:
    for rank, result in enumerate(ranks.run(partial(round_trip, soc=soc), late_ranks)):
        check_sums(given(rank), result)


def replayed(rank: int, size: int) -> torch.Tensor:
    held, shared = on_device(given(rank)), group_of(rank, size, "a3")
    results = []
    graph = capture(lambda: results.append(there_and_back(held, shared)))
    for to, new in zip(held[:3], given(rank, seed=1)[:3], strict=True):
        to.copy_(new)
    graph.replay()
    torch.npu.synchronize()
    return results[0].cpu()


def test_replay_of_dispatch_and_combine_reads_current_inputs(
    ranks: Ranks, late_ranks: bool
) -> None:
    for rank, result in enumerate(ranks.run(replayed, late_ranks)):
        check_sums(given(rank, seed=1)._replace(active=given(rank).active), result)


def test_error_names_rows_without_a_result(ranks: Ranks) -> None:
    for state, text in ranks.outcomes(partial(round_trip, lost=True)):
        assert state == "error"
        assert "combine_v2: assist_info_for_combine: must return each row once" in text


# ---- ranks that disagree ----


def with_another(rank: int, size: int, on_rank_1: Any) -> Any:
    """Call `on_rank_1` on rank 1, and dispatch on all other ranks."""
    return on_rank_1(rank, size) if rank == 1 else dispatch(rank, size)


def count_tokens(rank: int, size: int) -> Any:
    """Begin an all-to-all as vllm-ascend does: gather the number of tokens for each expert."""
    return dist.all_gather_into_tensor(
        torch.empty(size * EXPERTS, device="npu"), torch.zeros(EXPERTS, device="npu")
    )


def skip(rank: int, size: int) -> Any:
    """Skip the experts, and continue with a barrier."""
    return dist.barrier()


def fewer_rows(rank: int, size: int) -> Any:
    mine = given(rank)
    return dispatch(
        rank, size, x=mine.x[:4].npu(), expert_ids=mine.chosen[:4].npu(), x_active_mask=None
    )


CALL = "npu_moe_distribute_dispatch_v2(moe_expert_num="
DISAGREEING = {
    "another collective": (count_tokens, f"rank 0 calls {CALL}8, global_bs=0, quant_mode=0) of [5, 32] BFloat16, "
                                     "rank 1 calls all_gather_into_tensor of [8] Float"),
    "a rank that skips the call": (skip, "rank 1 calls barrier"),
    "another quant_mode": (partial(dispatch, quant_mode=2), f"rank 1 calls {CALL}8, global_bs=0, quant_mode=2) of"),
    "another number of experts": (partial(dispatch, moe_expert_num=16), f"rank 1 calls {CALL}16"),
    "another number of rows": (fewer_rows, f"rank 1 calls {CALL}8, global_bs=0, quant_mode=0) of [4, 32]"),
}  # fmt: skip


@scenarios("on_rank_1, message", DISAGREEING)
def test_all_ranks_name_the_ranks_that_disagree(
    ranks: Ranks, late_ranks: bool, on_rank_1: Any, message: str
) -> None:
    for state, text in ranks.outcomes(partial(with_another, on_rank_1=on_rank_1), late_ranks):
        assert state == "error"
        assert "hccl: ranks do not call the same operator" in text
        assert message in text


# ---- wrong arguments ----

WRONG_VALUES = {
    "padding before a token": ({"x_active_mask": torch.tensor([True, False, True, True, True])}, "x_active_mask: true must precede false"),
    "an expert that does not exist": ({"expert_ids": int32(0, 1, 2, 3, 8, 0, 1, 2, 3, 4).view(5, 2)}, "expert_ids: [8, 0] of token 2"),
    "an expert twice": ({"expert_ids": int32(0, 1, 2, 3, 4, 4, 1, 2, 3, 4).view(5, 2)}, "expert_ids: [4, 4] of token 2"),
    "the id of another rank": ({"ep_rank_id": 0}, "ep_rank_id: 0 must be 1"),
}  # fmt: skip


def with_values(rank: int, size: int, changes: dict[str, Any]) -> Any:
    moved = {
        name: value.npu() if isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }
    return dispatch(rank, size, **moved) if rank == 1 else None


@scenarios("changes, message", WRONG_VALUES)
def test_error_names_argument_with_wrong_value(
    ranks: Ranks, changes: dict[str, Any], message: str
) -> None:
    outcomes = ranks.outcomes(partial(with_values, changes=changes))
    assert outcomes[1][0] == "error"
    assert f"npu_moe_distribute_dispatch_v2: {message}" in outcomes[1][1]


ROWS, CHOSEN = torch.ones(4, 32).bfloat16(), int32(*range(8)).view(4, 2)
GROUP = ("hccl", 4, 0, 8)
WRONG_ARGUMENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "more rows than an A2 takes": ("a2", {"x": ROWS.repeat(65, 1), "expert_ids": CHOSEN.repeat(65, 1)}, "x: 260 rows must lie in 1..256"),
    "more rows than an A3 takes": ("a3", {"x": ROWS.repeat(129, 1), "expert_ids": CHOSEN.repeat(129, 1)}, "x: 516 rows must lie in 1..512"),
    "more bytes than the buffer": (
        "a3", {"x": ROWS.repeat(128, 256), "expert_ids": CHOSEN.repeat(128, 1), "moe_expert_num": 16},
        "x: 310378496 bytes exceed HCCL_BUFFSIZE, 200 MB: set 296"),
    "an unsupported group size": ("a2", {"ep_world_size": 9, "moe_expert_num": 9}, "ep_world_size: 9 is not supported on A2"),
    "experts that ranks cannot share": ("a3", {"moe_expert_num": 6}, "moe_expert_num: 6 must be a multiple"),
    "another dtype": ("a3", {"x": ROWS.float()}, "x: dtype torch.float32"),
    "indices of another dtype": ("a3", {"expert_ids": CHOSEN.long()}, "expert_ids: dtype torch.int64"),
    "indices of other rows": ("a3", {"expert_ids": CHOSEN[:3]}, "expert_ids: 3 rows for 4"),
    "a TP domain": ("a2", {"tp_world_size": 1}, "group_tp: A2 has no TP domain"),
    "a group that does not exist": ("a3", {}, "group_ep: this process has no hccl group 'hccl'"),
}  # fmt: skip


@scenarios("soc, changes, message", WRONG_ARGUMENTS)
def test_error_names_argument(
    soc: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMULATOR_SOC", soc)
    names = ("group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num")
    with pytest.raises(ValueError, match=f"npu_moe_distribute_dispatch_v2: {message}"):
        npu_moe_distribute_dispatch_v2(
            **{"x": ROWS, "expert_ids": CHOSEN, **dict(zip(names, GROUP, strict=True)), **changes}
        )


@pytest.mark.parametrize(
    "options",
    [{"quant_mode": 4}, {"tp_world_size": 2}, {"global_bs": 64}, {"comm_alg": "hierarchy"}],
)
def test_unsupported_option_is_named(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMULATOR_SOC", "a3")
    (name,) = options
    with pytest.raises(NotImplementedError, match=f"npu_moe_distribute_dispatch_v2: {name}="):
        npu_moe_distribute_dispatch_v2(ROWS, CHOSEN, *GROUP, **options)
