"""Helpers of the emulator's tests: tensors, streams, graphs, test tables and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.npu; conftest.py makes it importable

NPU = torch.device("npu:0")
MIB = 1 << 20
RACE = "NPU stream race"
# (absolute, relative) errors: one rounding to the dtype, and another order of float32 sums.
TOLERANCE = {
    torch.float32: (2e-6, 1e-5),
    torch.bfloat16: (2**-12, 2**-8),
    torch.float16: (2**-12, 2**-10),
}


def scenarios(names: str, table: Mapping[str, object]) -> pytest.MarkDecorator:
    """Run a test once per entry of `table`. The key is the id, the value the arguments `names`."""
    return pytest.mark.parametrize(names, list(table.values()), ids=list(table))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers on the host. Equal seeds give equal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def full(value: float, *shape: int) -> torch.Tensor:
    """Return a device tensor filled with `value`. The default shape is [4]."""
    return torch.full(shape or (4,), value, device=NPU)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


@contextmanager
def side_stream() -> Iterator[torch.npu.Stream]:
    """Switch to a new stream, ordered after the work of the current stream."""
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        yield stream


def capture(body: Callable[[], object], **options: object) -> torch.npu.NPUGraph:
    """Capture the work that `body` launches and return the graph."""
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
    """Assert that `actual` equals `exact` (float64), up to `roundings` roundings to the dtype."""
    absolute, relative = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.double(), exact, atol=roundings * absolute, rtol=roundings * relative
    )
