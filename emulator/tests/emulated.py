"""Shared by the tests of the emulated NPU: tensors, streams, graphs, tables and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu; conftest.py has made it importable

NPU = torch.device("npu:0")
MIB = 1 << 20
RACE = "NPU stream race"
# (absolute, relative): one rounding to the dtype, and the order of sums in float32.
TOLERANCE = {
    torch.float32: (2e-6, 1e-5),
    torch.bfloat16: (2**-12, 2**-8),
    torch.float16: (2**-12, 2**-10),
}


def scenarios(names: str, table: Mapping[str, object]) -> pytest.MarkDecorator:
    """Run a test once per entry of `table`: its key is the id, its value the arguments `names`."""
    return pytest.mark.parametrize(names, list(table.values()), ids=list(table))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers on the host, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def full(value: float, *shape: int) -> torch.Tensor:
    """Return a tensor of `value` on the device, [4] by default."""
    return torch.full(shape or (4,), value, device=NPU)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


@contextmanager
def side_stream() -> Iterator[torch.npu.Stream]:
    """Make a new stream current, ordered after the work of the stream that was current."""
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        yield stream


def capture(body: Callable[[], object], **options: object) -> torch.npu.NPUGraph:
    """Return a graph of what `body` launches."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        body()
    return graph


def replay_aside(graph: torch.npu.NPUGraph) -> torch.npu.Stream:
    """Replay `graph` on a side stream and return the stream."""
    with side_stream() as stream:
        graph.replay()
    return stream


def close(actual: torch.Tensor, exact: torch.Tensor, roundings: float = 1) -> None:
    """Assert that `actual` is `exact` (float64), up to `roundings` roundings of its dtype."""
    absolute, relative = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.double(), exact, atol=roundings * absolute, rtol=roundings * relative
    )
