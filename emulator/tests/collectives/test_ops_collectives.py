"""Matrix products fused with a collective, across processes, against the definition."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_npu
from emulated import close, random, scenarios
from hccl_ranks import Ranks

from ascend_npu_emulator.ops.collectives.matmul import npu_mm_reduce_scatter_base


def factors(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(8, 5, seed=rank), random(5, 3, seed=10 + rank)


def fused(rank: int, size: int, hcom: str | None = None) -> torch.Tensor:
    x, weight = factors(rank)
    name = hcom or dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    return torch_npu.npu_mm_reduce_scatter_base(
        x.npu(), weight.npu(), name, size, reduce_op="sum", comm_mode="aiv"
    ).cpu()


def test_each_rank_gets_its_share_of_the_summed_products(ranks: Ranks, late_ranks: bool) -> None:
    exact = sum(x.double() @ weight.double() for x, weight in map(factors, range(ranks.size)))
    for share, rows in zip(ranks.run(fused, late_ranks), exact.chunk(ranks.size), strict=True):
        close(share, rows)


def test_error_names_unknown_communicator(ranks: Ranks) -> None:
    for state, text in ranks.outcomes(partial(fused, hcom="hccl_nowhere")):
        assert state == "error"
        assert (
            "npu_mm_reduce_scatter_base: hcom: this process has no hccl group 'hccl_nowhere'"
            in text
        )


WRONG_CALLS = {
    "rows that the ranks cannot share": (
        torch.ones(5, 256),
        torch.ones(256, 2),
        {},
        "input: 5 rows",
    ),
    "another inner size": (torch.ones(4, 256), torch.ones(128, 2), {}, "x2: shape"),
    "another dtype": (torch.ones(4, 256), torch.ones(256, 2).half(), {}, "x2: dtype"),
    "few columns without aiv": (torch.ones(4, 8), torch.ones(8, 2), {}, "input: 8 columns"),
    "another reduction": (
        torch.ones(4, 256),
        torch.ones(256, 2),
        {"reduce_op": "max"},
        "reduce_op: 'max'",
    ),
}


@scenarios("x, weight, options, message", WRONG_CALLS)
def test_error_names_argument(
    x: torch.Tensor, weight: torch.Tensor, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        npu_mm_reduce_scatter_base(x, weight, "hccl", 2, **options)
