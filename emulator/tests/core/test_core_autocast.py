"""torch.autocast("npu") runs each operation in the dtype that torch's lists name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import scenarios

pytestmark = pytest.mark.usefixtures("any_mode")
LOWER = [torch.bfloat16, torch.float16]


def matrix(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


BFLOAT, FLOAT = torch.bfloat16, torch.float32
# The operation, the dtypes of the arguments, and the dtype of the computation.
OPERATIONS: dict[
    str, tuple[Callable[..., torch.Tensor], tuple[torch.dtype, torch.dtype], torch.dtype | None]
] = {
    # None, the lower precision: matrix products.
    "matmul": (lambda a, b: a @ b, (FLOAT, FLOAT), None),
    "linear": (F.linear, (FLOAT, FLOAT), None),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (FLOAT, FLOAT), None),
    "attention": (
        lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
        (FLOAT, FLOAT),
        None,
    ),
    # float32: operations that need the range.
    "exp": (lambda a, b: a.exp(), (BFLOAT, BFLOAT), FLOAT),
    "rsqrt": (lambda a, b: a.rsqrt(), (BFLOAT, BFLOAT), FLOAT),
    "power": (lambda a, b: a.pow(3), (BFLOAT, BFLOAT), FLOAT),
    "softmax": (lambda a, b: a.softmax(-1), (BFLOAT, BFLOAT), FLOAT),
    "sum": (lambda a, b: a.sum(), (BFLOAT, BFLOAT), FLOAT),
    "norm": (lambda a, b: torch.norm(a, 2, -1, False), (BFLOAT, BFLOAT), FLOAT),
    "layer_norm": (lambda a, b: F.layer_norm(a, (6,)), (BFLOAT, BFLOAT), FLOAT),
    "mse_loss": (F.mse_loss, (BFLOAT, BFLOAT), FLOAT),
    # The widest dtype of the arguments: operations that need one dtype.
    "dot": (lambda a, b: torch.dot(a[0], b[0]), (FLOAT, BFLOAT), FLOAT),
    "scatter_add": (
        lambda a, b: a.scatter_add(0, torch.zeros(6, 6, dtype=torch.int64, device=a.device), b),
        (FLOAT, BFLOAT),
        FLOAT,
    ),
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@scenarios("operation, given, runs_in", OPERATIONS)
def test_operation_runs_in_the_dtype_of_its_autocast_list(
    operation: Callable[..., torch.Tensor],
    given: tuple[torch.dtype, torch.dtype],
    runs_in: torch.dtype | None,
    lower: torch.dtype,
) -> None:
    arguments = [matrix(seed, dtype) for seed, dtype in enumerate(given, 1)]
    with torch.autocast("npu", dtype=lower):
        found = operation(*(argument.npu() for argument in arguments))
    expected = operation(*(argument.to(runs_in or lower) for argument in arguments))
    assert found.dtype == (runs_in or lower)
    torch.testing.assert_close(found.cpu(), expected)


def test_unsafe_operation_is_refused_under_autocast() -> None:
    with (
        torch.autocast("npu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        F.binary_cross_entropy(matrix(1).npu(), matrix(2).npu())


def test_autocast_does_not_change_other_operations_or_devices() -> None:
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (matrix(1).npu() + matrix(2).npu()).dtype == torch.float32
        assert (matrix(1) @ matrix(2)).dtype == torch.float32  # on the CPU
        with torch.autocast("npu", enabled=False):
            assert (matrix(1).npu() @ matrix(2).npu()).dtype == torch.float32
    assert (matrix(1).npu() @ matrix(2).npu()).dtype == torch.float32


def test_training_step_under_autocast_equals_the_cpu() -> None:
    def step(device: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.Linear(6, 6)
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch.autocast(device, dtype=torch.bfloat16):
            predicted = model(matrix(1).to(device))
        F.mse_loss(predicted.float(), matrix(2).to(device)).backward()
        optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for found, expected in zip(step("npu"), step("cpu"), strict=True):
        torch.testing.assert_close(found, expected)
