"""torch.autocast("npu") runs each operation in the type that torch's lists name, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("any_mode")
LOWER = [torch.bfloat16, torch.float16]


def matrix(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Each with what it is applied to on the CPU, without autocast, to give the same.
IN_LOWER_PRECISION: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": lambda a, b: a @ b,
    "linear": F.linear,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
}
IN_FLOAT32: dict[str, Callable[..., torch.Tensor]] = {
    "exp": lambda a, b: a.exp(),
    "rsqrt": lambda a, b: a.rsqrt(),
    "power": lambda a, b: a.pow(3),
    "softmax": lambda a, b: a.softmax(-1),
    "sum": lambda a, b: a.sum(),
    "norm": lambda a, b: torch.norm(a, 2, -1, False),
    "layer_norm": lambda a, b: F.layer_norm(a, (6,)),
    "mse_loss": F.mse_loss,
}
IN_THE_WIDEST: dict[str, Callable[..., torch.Tensor]] = {
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(6, 6, dtype=torch.int64, device=a.device), b),
}


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("name", IN_LOWER_PRECISION)
def test_what_multiplies_runs_in_the_lower_precision(name: str, dtype: torch.dtype) -> None:
    operation = IN_LOWER_PRECISION[name]
    with torch.autocast("npu", dtype=dtype):
        found = operation(matrix(1).npu(), matrix(2).npu())
    expected = operation(matrix(1, dtype), matrix(2, dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_needs_the_range_runs_in_float32(name: str) -> None:
    operation = IN_FLOAT32[name]
    rows = matrix(1, torch.bfloat16), matrix(2, torch.bfloat16)
    with torch.autocast("npu", dtype=torch.bfloat16):
        found = operation(*(each.npu() for each in rows))
    expected = operation(*(each.float() for each in rows))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("name", IN_THE_WIDEST)
def test_what_takes_one_type_only_takes_the_widest(name: str) -> None:
    operation = IN_THE_WIDEST[name]
    with torch.autocast("npu", dtype=torch.bfloat16):
        found = operation(matrix(1).npu(), matrix(2, torch.bfloat16).npu())
    torch.testing.assert_close(found.cpu(), operation(matrix(1), matrix(2, torch.bfloat16).float()))


def test_what_is_unsafe_is_refused() -> None:
    with torch.autocast("npu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(matrix(1).npu(), matrix(2).npu())


def test_other_operations_and_other_places_are_left_alone() -> None:
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (matrix(1).npu() + matrix(2).npu()).dtype == torch.float32
        assert (matrix(1) @ matrix(2)).dtype == torch.float32  # on the CPU
        with torch.autocast("npu", enabled=False):
            assert (matrix(1).npu() @ matrix(2).npu()).dtype == torch.float32
    assert (matrix(1).npu() @ matrix(2).npu()).dtype == torch.float32


def test_a_step_of_training_is_the_cpu_s() -> None:
    def step(device: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model: Any = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU(), torch.nn.Linear(6, 6)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with torch.autocast(device, dtype=torch.bfloat16):
            predicted = model(matrix(1).to(device))
        F.mse_loss(predicted.float(), matrix(2).to(device)).backward()
        optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for found, expected in zip(step("npu"), step("cpu"), strict=True):
        torch.testing.assert_close(found, expected)
