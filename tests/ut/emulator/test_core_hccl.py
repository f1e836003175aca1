"""hccl between processes: every collective against its definition, and what ranks that disagree are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hccl_ranks import Ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
REDUCED = (torch.float32, torch.float16, torch.bfloat16, torch.int64)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("hccl"))
    yield group
    group.close()


@pytest.fixture(params=[False, True], ids=["prompt", "late"])
def late(request: pytest.FixtureRequest) -> bool:
    return request.param


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank `rank` puts in, as a CPU tensor; every rank can work it out."""
    g = torch.Generator().manual_seed(100 + rank)
    drawn = torch.randn(shape, generator=g) * 3
    return drawn.to(dtype) if dtype.is_floating_point else drawn.abs().to(dtype)


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, rounded once; integers exactly."""
    wide = torch.float32 if parts[0].dtype.is_floating_point else parts[0].dtype
    return torch.stack([p.to(wide) for p in parts]).sum(0).to(parts[0].dtype)


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.device.type == "npu"
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)


# One small enough to travel inside the frame, one that is not, one empty.
SHAPES = ((5, 3), (70, 65), (0, 4))


def all_reduce(rank: int, size: int) -> None:
    for shape in SHAPES:
        for dtype in REDUCED:
            parts = [values(r, shape, dtype) for r in range(size)]
            for op, wanted in (
                (dist.ReduceOp.SUM, total(parts)),
                (dist.ReduceOp.MAX, torch.stack(parts).amax(0)),
                (dist.ReduceOp.MIN, torch.stack(parts).amin(0)),
            ):
                x = parts[rank].npu()
                dist.all_reduce(x, op=op)
                check(x, wanted)


def all_reduce_bits(rank: int, size: int) -> bytes:
    x = values(rank, (97,), torch.bfloat16).npu()
    dist.all_reduce(x)
    return x.cpu().view(torch.uint8).numpy().tobytes()


def reduce(rank: int, size: int) -> None:
    parts = [values(r, (5, 3), torch.bfloat16) for r in range(size)]
    x = parts[rank].npu()
    dist.reduce(x, dst=size - 1)
    check(x, total(parts) if rank == size - 1 else parts[rank])


def broadcast(rank: int, size: int) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            x = values(rank, shape, dtype).npu()
            dist.broadcast(x, src=1)
            check(x, values(1, shape, dtype))


def all_gather(rank: int, size: int) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            x = values(rank, shape, dtype).npu()
            listed = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(listed, x)
            flat = torch.empty((size * shape[0], *shape[1:]), dtype=dtype, device="npu")
            dist.all_gather_into_tensor(flat, x)
            for r in range(size):
                check(listed[r], values(r, shape, dtype))
            check(flat, torch.cat([values(r, shape, dtype) for r in range(size)]))


def all_gather_uneven(rank: int, size: int) -> None:
    x = values(rank, (rank + 1, 2), torch.float32).npu()
    listed = [torch.empty(r + 1, 2, device="npu") for r in range(size)]
    dist.all_gather(listed, x)
    for r in range(size):
        check(listed[r], values(r, (r + 1, 2), torch.float32))


def reduce_scatter(rank: int, size: int) -> None:
    for rows in (1, 3, 40):
        for dtype in REDUCED:
            shape = (rows * size, 33)
            wanted = total([values(r, shape, dtype) for r in range(size)])[rank * rows : (rank + 1) * rows]
            x = values(rank, shape, dtype).npu()
            out = torch.empty(rows, 33, dtype=dtype, device="npu")
            dist.reduce_scatter_tensor(out, x)
            check(out, wanted)
            out = torch.empty(rows, 33, dtype=dtype, device="npu")
            dist.reduce_scatter(out, [c.contiguous() for c in x.chunk(size)])
            check(out, wanted)


def all_to_all(rank: int, size: int) -> None:
    def sent(source: int, to: int) -> torch.Tensor:
        return values(10 * source + to, (source + 2 * to, 3), torch.bfloat16)

    out = torch.empty(sum(len(sent(r, rank)) for r in range(size)), 3, dtype=torch.bfloat16, device="npu")
    x = torch.cat([sent(rank, r) for r in range(size)]).npu()
    dist.all_to_all_single(out, x, [len(sent(r, rank)) for r in range(size)], [len(sent(rank, r)) for r in range(size)])
    check(out, torch.cat([sent(r, rank) for r in range(size)]))
    listed = [torch.empty(len(sent(r, rank)), 3, dtype=torch.bfloat16, device="npu") for r in range(size)]
    dist.all_to_all(listed, [sent(rank, r).npu() for r in range(size)])
    for r in range(size):
        check(listed[r], sent(r, rank))
    even = torch.empty(2 * size, 2, device="npu")
    dist.all_to_all_single(even, values(rank, (2 * size, 2), torch.float32).npu())
    check(even, torch.cat([values(r, (2 * size, 2), torch.float32)[2 * rank : 2 * rank + 2] for r in range(size)]))


def gather_and_scatter(rank: int, size: int) -> None:
    x = values(rank, (4, 2), torch.float16).npu()
    listed = [torch.empty_like(x) for _ in range(size)] if rank == 1 else None
    dist.gather(x, listed, dst=1)
    for r, got in enumerate(listed or []):
        check(got, values(r, (4, 2), torch.float16))
    y = torch.empty(3, device="npu")
    dist.scatter(y, [values(r, (3,), torch.float32).npu() for r in range(size)] if rank == 0 else None, src=0)
    check(y, values(rank, (3,), torch.float32))


def barrier(rank: int, size: int) -> None:
    dist.barrier()


def objects(rank: int, size: int) -> None:
    got: list[Any] = [None] * size
    dist.all_gather_object(got, {"rank": rank, "text": "x" * rank})
    assert got == [{"rank": r, "text": "x" * r} for r in range(size)]


def send_and_receive(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for shape in ((3,), (80, 80)):
        x, y = values(rank, shape, torch.bfloat16).npu(), torch.zeros(shape, dtype=torch.bfloat16, device="npu")
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, before), dist.P2POp(dist.isend, x, after)])
        for work in works:
            work.wait()
        check(y, values(before, shape, torch.bfloat16))
        first, second = torch.empty(2, device="npu"), torch.empty(2, device="npu")
        if rank == 0:
            dist.send(torch.tensor([1.0, 2.0], device="npu"), 1)
            dist.send(torch.tensor([3.0, 4.0], device="npu"), 1)
        elif rank == 1:
            dist.recv(first, 0)
            dist.recv(second, 0)
            assert (first.tolist(), second.tolist()) == ([1, 2], [3, 4])


def subgroups(rank: int, size: int) -> None:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 200}
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(half, backend="hccl", pg_options=options) for half in halves]
    mine = 0 if rank in halves[0] else 1
    x = torch.ones(3, device="npu")
    dist.all_reduce(x, group=groups[mine])
    assert x.tolist() == [size // 2] * 3
    names: list[Any] = [None] * size
    dist.all_gather_object(names, groups[mine]._get_backend(torch.device("npu")).get_hccl_comm_name(rank))
    assert len(set(names)) == 2
    assert len({names[r] for r in halves[mine]}) == 1
    assert groups[mine]._get_backend(torch.device("npu")).name() == "hccl"


def async_work(rank: int, size: int) -> None:
    x, y = torch.full((4,), float(rank), device="npu"), torch.full((4,), 1.0, device="npu")
    work = dist.all_reduce(x, async_op=True)
    other = dist.all_reduce(y, async_op=True)
    other.wait()
    work.wait()
    assert (x + y).tolist() == [size * (size - 1) / 2 + size] * 4
    assert work.get_future().wait()[0].tolist() == x.tolist()
    assert work.is_completed()


def side_stream(rank: int, size: int) -> None:
    stream = torch.npu.Stream()
    x = torch.full((4,), float(rank), device="npu")
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        x.add_(1)
        dist.all_reduce(x)
        x.mul_(2)
    torch.npu.current_stream().wait_stream(stream)
    assert x.tolist() == [size * (size + 1)] * 4


SCENARIOS = (
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_uneven,
    reduce_scatter,
    all_to_all,
    gather_and_scatter,
    barrier,
    objects,
    send_and_receive,
    subgroups,
    async_work,
    side_stream,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_collectives_give_what_their_definition_says(ranks: Ranks, scenario: Any, late: bool) -> None:
    ranks.run(scenario, late)


def test_all_ranks_get_the_same_bits(ranks: Ranks) -> None:
    assert len(set(ranks.run(all_reduce_bits))) == 1


# ---- in graphs ----

# Each writes to out [size * 2] from x [size * 2]; parts are of 2.
CAPTURED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all_reduce": lambda x, out: dist.all_reduce(out.copy_(x)),
    "reduce": lambda x, out: dist.reduce(out.copy_(x), dst=1),
    "broadcast": lambda x, out: dist.broadcast(out.copy_(x), src=1),
    "all_gather": lambda x, out: dist.all_gather(list(out.split(2)), x[:2]),
    "all_gather_into_tensor": lambda x, out: dist.all_gather_into_tensor(out, x[:2]),
    "gather": lambda x, out: dist.gather(x[:2], list(out.split(2)) if dist.get_rank() == 1 else None, dst=1),
    "scatter": lambda x, out: dist.scatter(out[:2], list(x.split(2)) if dist.get_rank() == 1 else None, src=1),
    "reduce_scatter": lambda x, out: dist.reduce_scatter(out[:2], list(x.split(2))),
    "reduce_scatter_tensor": lambda x, out: dist.reduce_scatter_tensor(out[:2], x),
    "all_to_all_single": lambda x, out: dist.all_to_all_single(out, x),
    "all_to_all": lambda x, out: dist.all_to_all(list(out.split(2)), list(x.split(2))),
}


def captured(rank: int, size: int) -> None:
    for name, collective in CAPTURED.items():
        x, out = torch.zeros(2 * size, device="npu"), torch.zeros(2 * size, device="npu")
        graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph):
            before = x + 1
            collective(before, out)
            after = out * 2
        assert out.tolist() == [0] * 2 * size
        for seed in (0, 10):
            x.copy_(values(rank + seed, (2 * size,), torch.float32))
            expected = torch.zeros(2 * size, device="npu")
            collective(x + 1, expected)
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                graph.replay()
            torch.npu.current_stream().wait_stream(side)
            assert out.tolist() == expected.tolist(), name
            assert after.tolist() == (expected * 2).tolist(), name


def test_collectives_are_captured_and_meet_at_the_replays(ranks: Ranks, late: bool) -> None:
    ranks.run(captured, late)


def asynchronous(rank: int, size: int) -> None:
    with torch.npu.graph(torch.npu.NPUGraph()):
        dist.all_reduce(torch.zeros(2, device="npu"), async_op=True)


def test_an_asynchronous_collective_in_a_graph_is_refused(ranks: Ranks) -> None:
    for state, text in ranks.outcomes(asynchronous):
        assert state == "error"
        assert text.startswith("NotImplementedError: a graph capture that takes in a second stream")


# ---- ranks that disagree ----


def mismatched(kind: str, rank: int, size: int) -> None:
    odd = rank == 1
    x = torch.ones(3 if odd and kind == "shape" else 2, 4, device="npu")
    if kind == "dtype" and odd:
        x = x.bfloat16()
    if kind == "operator" and odd:
        dist.broadcast(x, src=0)
    elif kind == "root":
        dist.broadcast(x, src=rank % 2)
    elif kind == "reduction":
        dist.all_reduce(x, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif kind == "gather shape":
        x = torch.ones(3 if odd else 2, 4, device="npu")
        dist.all_gather_into_tensor(torch.empty(x.shape[0] * size, 4, device="npu"), x)
    elif kind == "gather list":
        dist.all_gather([torch.empty(2, 4, device="npu") for _ in range(size)], torch.ones(3 if odd else 2, 4, device="npu"))
    elif kind == "splits":
        splits = [1] * size if not odd else [2] + [1] * (size - 2) + [0]
        dist.all_to_all_single(torch.empty(size, 2, device="npu"), torch.ones(size, 2, device="npu"), [1] * size, splits)
    else:
        dist.all_reduce(x)


MISMATCHES = {
    "shape": ("rank 0 calls all_reduce of [2, 4] Float", "rank 1 calls all_reduce of [3, 4] Float"),
    "dtype": ("rank 0 calls all_reduce of [2, 4] Float", "rank 1 calls all_reduce of [2, 4] BFloat16"),
    "operator": ("rank 0 calls all_reduce", "rank 1 calls broadcast"),
    "root": ("rank 0 calls broadcast of [2, 4] Float, root 0", "rank 1 calls broadcast of [2, 4] Float, root 1"),
    "reduction": ("rank 0 calls all_reduce", "another reduction"),
    "gather shape": ("all_gather_into_tensor of [2, 4]", "all_gather_into_tensor of [3, 4]"),
    "gather list": ("rank 1 gives 12 elements", "has an output of [2, 4]"),
    "splits": ("rank 1 sends", "which expects"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_disagree_are_all_told_and_can_go_on(ranks: Ranks, kind: str, late: bool) -> None:
    for rank, (state, text) in enumerate(ranks.outcomes(partial(mismatched, kind), late)):
        assert state == "error", f"rank {rank} went on"
        for part in MISMATCHES[kind]:
            assert part in text
    ranks.run(all_reduce, late)


def received_wrongly(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(2, 3, device="npu"), 1)
    elif rank == 1:
        dist.recv(torch.empty(3, 2, device="npu"), 0)


def test_a_receiver_that_expects_something_else_is_told(ranks: Ranks) -> None:
    state, text = ranks.outcomes(received_wrongly)[1]
    assert state == "error"
    assert "rank 1 calls send of [3, 2] Float, rank 0 calls send of [2, 3] Float" in text


def wrong_sizes(kind: str, rank: int, size: int) -> None:
    if kind == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.empty(2, device="npu"), torch.ones(2 * size + 1, device="npu"))
    elif kind == "all_gather":
        dist.all_gather_into_tensor(torch.empty(2 * size + 1, device="npu"), torch.ones(2, device="npu"))
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty(size + 1, device="npu"), torch.ones(size + 1, device="npu"))
    elif kind == "layout":
        dist.all_reduce(torch.ones(2, 3, device="npu").t())
    elif kind == "average":
        dist.all_reduce(torch.ones(2, device="npu"), op=dist.ReduceOp.AVG)
    else:
        dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("reduce_scatter", "input tensor must be the same size as output size times world size"),
        ("all_gather", "output tensor size must be equal to world_size times input tensor size"),
        ("all_to_all", "does not divide equally across group size"),
        ("layout", "Tensors must be contiguous"),
        ("average", "hccl supports the reductions SUM, PRODUCT, MAX and MIN only"),
        ("cpu tensor", "cpu"),
    ],
)
def test_calls_that_hardware_refuses_are_refused_at_the_caller(ranks: Ranks, kind: str, message: str) -> None:
    for state, text in ranks.outcomes(partial(wrong_sizes, kind)):
        assert state == "error"
        assert message in text


def unordered(kind: str, rank: int, size: int) -> None:
    x = torch.zeros(4, device="npu")
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    if kind == "input":
        with torch.npu.stream(stream):
            x.fill_(1)
        dist.all_reduce(x)
    else:
        work = dist.all_reduce(x, async_op=True)
        try:
            x.add_(1)
        finally:
            work.wait()


@pytest.mark.parametrize("kind", ["input", "result"])
def test_a_collective_without_the_wait_it_needs_is_an_error(ranks: Ranks, kind: str) -> None:
    for state, text in ranks.outcomes(partial(unordered, kind), late=True):
        assert state == "error"
        assert "NPU stream race" in text
        assert "hccl::all_reduce" in text
