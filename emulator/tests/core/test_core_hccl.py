"""hccl across processes: collectives against their definitions, and ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated import RACE, capture, replay_aside, scenarios, side_stream
from hccl_ranks import Ranks, Scenario

REDUCED = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
# (rows for each rank, columns): data inside the frame, data outside the frame, and no data.
SHAPES = ((2, 3), (35, 65), (0, 4))
Parts = list[torch.Tensor]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the input of a rank, as a CPU tensor. Every rank can compute it."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)) * 3
    return drawn.to(dtype) if dtype.is_floating_point else drawn.abs().to(dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="npu")


def total(parts: Parts) -> torch.Tensor:
    """Return the sum, computed in float32 and rounded once. The sum of integers is exact."""
    wide = torch.float32 if parts[0].dtype.is_floating_point else parts[0].dtype
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == "npu"
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)


# ---- definitions ----


def shares(x: torch.Tensor) -> Parts:
    """Return the rows of each rank, as views."""
    size = dist.get_world_size()
    return list(x.unflatten(0, (size, len(x) // size)).unbind())


def own(x: torch.Tensor) -> torch.Tensor:
    return shares(x)[dist.get_rank()]


def in_first(share: torch.Tensor) -> torch.Tensor:
    return torch.cat([share, torch.zeros_like(share).repeat(dist.get_world_size() - 1, 1)])


def gathered(parts: Parts) -> torch.Tensor:
    return torch.cat([shares(part)[0] for part in parts])


def exchanged(parts: Parts) -> torch.Tensor:
    return torch.cat([own(part) for part in parts])


def on_rank_1(value: Any) -> Any:
    return value if dist.get_rank() == 1 else None


# (call, definition): the call reads x and writes out, both with rows for each rank. The definition
# gives the expected out for the x of all ranks.
COLLECTIVES: dict[
    str, tuple[Callable[[torch.Tensor, torch.Tensor], object], Callable[[Parts], torch.Tensor]]
] = {
    "all_reduce": (lambda x, out: dist.all_reduce(out.copy_(x)), total),
    "all_reduce, max": (
        lambda x, out: dist.all_reduce(out.copy_(x), op=dist.ReduceOp.MAX),
        lambda parts: torch.stack(parts).amax(0),
    ),
    "all_reduce, min": (
        lambda x, out: dist.all_reduce(out.copy_(x), op=dist.ReduceOp.MIN),
        lambda parts: torch.stack(parts).amin(0),
    ),
    "reduce": (
        lambda x, out: dist.reduce(out.copy_(x), dst=1),
        lambda parts: total(parts) if dist.get_rank() == 1 else parts[dist.get_rank()],
    ),
    "reduce_scatter": (
        lambda x, out: dist.reduce_scatter(shares(out)[0], shares(x)),
        lambda parts: in_first(own(total(parts))),
    ),
    "reduce_scatter_tensor": (
        lambda x, out: dist.reduce_scatter_tensor(shares(out)[0], x),
        lambda parts: in_first(own(total(parts))),
    ),
    "broadcast": (lambda x, out: dist.broadcast(out.copy_(x), src=1), lambda parts: parts[1]),
    "all_gather": (lambda x, out: dist.all_gather(shares(out), shares(x)[0]), gathered),
    "all_gather_into_tensor": (
        lambda x, out: dist.all_gather_into_tensor(out, shares(x)[0]),
        gathered,
    ),
    "gather": (
        lambda x, out: dist.gather(shares(x)[0], on_rank_1(shares(out)), dst=1),
        lambda parts: gathered(parts) if dist.get_rank() == 1 else torch.zeros_like(parts[0]),
    ),
    "scatter": (
        lambda x, out: dist.scatter(shares(out)[0], on_rank_1(shares(x)), src=1),
        lambda parts: in_first(own(parts[1])),
    ),
    "all_to_all_single": (lambda x, out: dist.all_to_all_single(out, x), exchanged),
    "all_to_all": (lambda x, out: dist.all_to_all(shares(out), shares(x)), exchanged),
}


def defined(name: str, rank: int, size: int) -> None:
    collective, definition = COLLECTIVES[name]
    dtypes = REDUCED if "reduce" in name else (*REDUCED, torch.int32, torch.uint8)
    for (rows, columns), dtype in [(SHAPES[0], dtype) for dtype in dtypes] + [
        (shape, torch.bfloat16) for shape in SHAPES[1:]
    ]:
        parts = [values(r, (size * rows, columns), dtype) for r in range(size)]
        out = zeros(size * rows, columns, dtype=dtype)
        collective(parts[rank].npu(), out)
        check(out, definition(parts))


def captured(name: str, rank: int, size: int) -> None:
    collective, definition = COLLECTIVES[name]
    x, out, after = zeros(2 * size, 1), zeros(2 * size, 1), zeros(2 * size, 1)
    graph = capture(lambda: (collective(x + 1, out), after.copy_(out * 2)))
    assert not out.any()
    for seed in (0, 10):
        parts = [values(r + seed, (2 * size, 1)) for r in range(size)]
        x.copy_(parts[rank])
        torch.npu.current_stream().wait_stream(replay_aside(graph))
        expected = definition([part + 1 for part in parts])
        check(out, expected)
        check(after, expected * 2)


@pytest.mark.parametrize("run", [defined, captured])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_equals_its_definition_when_called_or_captured(
    ranks: Ranks, name: str, run: Scenario, late_ranks: bool
) -> None:
    ranks.run(partial(run, name), late_ranks)


def replayed_beside_an_idle_host(mode: str, rank: int, size: int) -> None:
    summed, event, store = (
        zeros(4) + 1,
        torch.npu.ExternalEvent(),
        dist.distributed_c10d._get_default_store(),
    )
    graph = capture(lambda: (event.wait(), dist.all_reduce(summed)))
    graph.replay()
    event.record(torch.npu.Stream())
    if rank == 0:  # the host launches no more work, and waits for the other hosts
        store.wait(
            [f"{mode} {other} has seen it" for other in range(1, size)], timedelta(seconds=30)
        )
    check(summed, torch.full((4,), float(size)))
    store.set(f"{mode} {rank} has seen it", "")


def test_replayed_collective_runs_while_the_host_waits_for_other_ranks(
    ranks: Ranks, late_ranks: bool
) -> None:
    ranks.run(partial(replayed_beside_an_idle_host, f"late={late_ranks}"), late_ranks)


def all_reduce_bits(rank: int, size: int) -> bytes:
    x = values(rank, (97,), torch.bfloat16).npu()
    dist.all_reduce(x)
    return x.cpu().view(torch.uint8).numpy().tobytes()


def test_all_reduce_gives_the_same_bits_on_all_ranks(ranks: Ranks) -> None:
    assert len(set(ranks.run(all_reduce_bits))) == 1


# ---- other uses ----


def all_gather_uneven(rank: int, size: int) -> None:
    listed = [zeros(r + 1, 2) for r in range(size)]
    dist.all_gather(listed, values(rank, (rank + 1, 2)).npu())
    for r in range(size):
        check(listed[r], values(r, (r + 1, 2)))


def all_to_all_uneven(rank: int, size: int) -> None:
    def sent(source: int, to: int) -> torch.Tensor:
        return values(10 * source + to, (source + 2 * to, 3))

    sending, receiving = [sent(rank, r) for r in range(size)], [sent(r, rank) for r in range(size)]
    out = zeros(sum(map(len, receiving)), 3)
    dist.all_to_all_single(
        out, torch.cat(sending).npu(), list(map(len, receiving)), list(map(len, sending))
    )
    check(out, torch.cat(receiving))
    listed = [zeros(len(part), 3) for part in receiving]
    dist.all_to_all(listed, [part.npu() for part in sending])
    for got, expected in zip(listed, receiving, strict=True):
        check(got, expected)


def barrier(rank: int, size: int) -> None:
    dist.barrier()


def objects(rank: int, size: int) -> None:
    got: list[Any] = [None] * size
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert got == [{"rank": r, "text": "x" * r} for r in range(size)]


def send_and_receive(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for shape in ((3,), (80, 80)):
        x, y = values(rank, shape).npu(), zeros(*shape)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, y, before), dist.P2POp(dist.isend, x, after)]
        ):
            work.wait()
        check(y, values(before, shape))
    for value in (1.0, 2.0):
        if rank == 0:
            dist.send(zeros(2) + value, 1)
        elif rank == 1:
            dist.recv(received := zeros(2), 0)
            assert received.tolist() == [value] * 2


def subgroups(rank: int, size: int) -> None:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 200}
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(half, backend="hccl", pg_options=options) for half in halves]
    mine = 0 if rank in halves[0] else 1
    x, backend = zeros(3) + 1, groups[mine]._get_backend(torch.device("npu"))
    dist.all_reduce(x, group=groups[mine])
    assert x.tolist() == [size // 2] * 3
    names: list[Any] = [None] * size
    dist.all_gather_object(names, backend.get_hccl_comm_name(rank))
    assert len(set(names)) == 2
    assert len({names[r] for r in halves[mine]}) == 1
    assert backend.name() == "hccl"


def async_work(rank: int, size: int) -> None:
    x, y = zeros(4) + rank, zeros(4) + 1
    work, other = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    other.wait()
    work.wait()
    assert (x + y).tolist() == [size * (size - 1) / 2 + size] * 4
    assert work.get_future().wait()[0].tolist() == x.tolist()
    assert work.is_completed()


def on_a_side_stream(rank: int, size: int) -> None:
    x = zeros(4) + rank
    with side_stream() as stream:
        x.add_(1)
        dist.all_reduce(x)
        x.mul_(2)
    torch.npu.current_stream().wait_stream(stream)
    assert x.tolist() == [size * (size + 1)] * 4


USES = (
    all_gather_uneven,
    all_to_all_uneven,
    barrier,
    objects,
    send_and_receive,
    subgroups,
    async_work,
    on_a_side_stream,
)


@pytest.mark.parametrize("scenario", USES, ids=lambda use: use.__name__)
def test_all_ranks_get_the_expected_result(
    ranks: Ranks, scenario: Scenario, late_ranks: bool
) -> None:
    ranks.run(scenario, late_ranks)


# ---- errors ----


def mismatched(kind: str, rank: int, size: int) -> None:
    odd = rank == 1
    x = zeros(3 if odd and kind in ("shape", "gather shape", "gather list") else 2, 4)
    if kind == "operator" and odd:
        dist.broadcast(x, src=0)
    elif kind == "root":
        dist.broadcast(x, src=rank % 2)
    elif kind == "reduction":
        dist.all_reduce(x, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif kind == "gather shape":
        dist.all_gather_into_tensor(zeros(len(x) * size, 4), x)
    elif kind == "gather list":
        dist.all_gather([zeros(2, 4) for _ in range(size)], x)
    elif kind == "splits":
        dist.all_to_all_single(
            zeros(size, 2),
            zeros(size, 2),
            [1] * size,
            [2] + [1] * (size - 2) + [0] if odd else [1] * size,
        )
    else:
        dist.all_reduce(x.bfloat16() if odd and kind == "dtype" else x)


MISMATCHES = {
    "shape": ("rank 0 calls all_reduce of [2, 4] Float", "rank 1 calls all_reduce of [3, 4] Float"),
    "dtype": (
        "rank 0 calls all_reduce of [2, 4] Float",
        "rank 1 calls all_reduce of [2, 4] BFloat16",
    ),
    "operator": ("rank 0 calls all_reduce", "rank 1 calls broadcast"),
    "root": (
        "rank 0 calls broadcast of [2, 4] Float, root 0",
        "rank 1 calls broadcast of [2, 4] Float, root 1",
    ),
    "reduction": ("rank 0 calls all_reduce", "another reduction"),
    "gather shape": ("all_gather_into_tensor of [2, 4]", "all_gather_into_tensor of [3, 4]"),
    "gather list": ("rank 1 gives 12 elements", "has an output of [2, 4]"),
    "splits": ("rank 1 sends", "which expects"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_all_ranks_get_the_error_of_a_mismatch_and_can_continue(
    ranks: Ranks, kind: str, late_ranks: bool
) -> None:
    for rank, (state, text) in enumerate(ranks.outcomes(partial(mismatched, kind), late_ranks)):
        assert state == "error", f"rank {rank} went on"
        assert all(part in text for part in MISMATCHES[kind]), text
    ranks.run(partial(defined, "all_reduce"), late_ranks)


def received_wrongly(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(zeros(2, 3), 1)
    elif rank == 1:
        dist.recv(zeros(3, 2), 0)


def test_receiver_with_another_shape_gets_an_error(ranks: Ranks) -> None:
    state, text = ranks.outcomes(received_wrongly)[1]
    assert state == "error"
    assert "rank 1 calls send of [3, 2] Float, rank 0 calls send of [2, 3] Float" in text


WRONG_CALLS: dict[str, tuple[Callable[[int], object], str]] = {
    "reduce_scatter": (
        lambda size: dist.reduce_scatter_tensor(zeros(2), zeros(2 * size + 1)),
        "input tensor must be the same size as output size times world size",
    ),
    "all_gather": (
        lambda size: dist.all_gather_into_tensor(zeros(2 * size + 1), zeros(2)),
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "all_to_all": (
        lambda size: dist.all_to_all_single(zeros(size + 1), zeros(size + 1)),
        "does not divide equally across group size",
    ),
    "layout": (lambda size: dist.all_reduce(zeros(2, 3).t()), "Tensors must be contiguous"),
    "average": (
        lambda size: dist.all_reduce(zeros(2), op=dist.ReduceOp.AVG),
        "hccl supports the reductions SUM, PRODUCT, MAX and MIN only",
    ),
    "cpu tensor": (lambda size: dist.all_reduce(torch.ones(2)), "cpu"),
    "an asynchronous collective in a graph": (
        lambda size: capture(lambda: dist.all_reduce(zeros(2), async_op=True)),
        "NotImplementedError: a graph capture that takes in the default stream, a stream of hccl",
    ),
}


def wrong_call(name: str, rank: int, size: int) -> None:
    WRONG_CALLS[name][0](size)


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_invalid_collective_calls_raise_at_the_caller(ranks: Ranks, name: str) -> None:
    for state, text in ranks.outcomes(partial(wrong_call, name)):
        assert state == "error"
        assert WRONG_CALLS[name][1] in text


def unordered_input(rank: int, size: int) -> None:
    x = zeros(4)
    with side_stream():
        x.fill_(1)
    dist.all_reduce(x)


def unordered_result(rank: int, size: int) -> None:
    x = zeros(4)
    work = dist.all_reduce(x, async_op=True)
    try:
        x.add_(1)
    finally:
        work.wait()


@scenarios("scenario", {"input": unordered_input, "result": unordered_result})
def test_collective_without_a_required_wait_is_an_error(ranks: Ranks, scenario: Scenario) -> None:
    for state, text in ranks.outcomes(scenario, late=True):
        assert state == "error"
        assert RACE in text
        assert "hccl::all_reduce" in text
