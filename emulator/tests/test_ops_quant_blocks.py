"""Test the quantisation of blocks of 128 elements, one element at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulated import random, scenarios

from ascend_npu_emulator.ops.quantization.blocks import npu_dynamic_block_quant

BLOCK = 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 1, 512), (3, 256)], ids=str)
def test_largest_magnitude_of_each_block_becomes_127(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = random(*shape, dtype=dtype)
    y, scale = npu_dynamic_block_quant(x)
    assert (y.dtype, y.shape, scale.dtype) == (torch.int8, x.shape, torch.float32)
    assert scale.shape == (*shape[:-1], shape[-1] // BLOCK)
    for block, made, factor in zip(
        x.reshape(-1, BLOCK).tolist(),
        y.reshape(-1, BLOCK).tolist(),
        scale.flatten().tolist(),
        strict=True,
    ):
        largest = max(abs(value) for value in block)
        assert factor == pytest.approx(largest / 127, rel=1e-6)
        exact = [127 * value / largest for value in block]
        assert max(abs(made[i] - exact[i]) for i in range(BLOCK)) < 0.5001
        assert max(abs(number) for number in made) == 127


def test_block_of_zeros_gives_zeros_and_scale_zero() -> None:
    x = random(2, 256, dtype=torch.bfloat16)
    x[1, :BLOCK] = 0
    y, scale = npu_dynamic_block_quant(x)
    assert not y[1, :BLOCK].any() and y[1, BLOCK:].any()
    assert scale[1, 0] == 0 and scale[1, 1] > 0


def test_dst_type_may_be_a_torch_dtype() -> None:
    x = random(2, 256, dtype=torch.bfloat16)
    assert torch.equal(
        npu_dynamic_block_quant(x, dst_type=torch.int8)[0], npu_dynamic_block_quant(x)[0]
    )


def wrong(x: torch.Tensor | None = None, **options: object) -> Callable[[], object]:
    given = random(2, 256, dtype=torch.bfloat16) if x is None else x
    return lambda: npu_dynamic_block_quant(given, **options)  # type: ignore[arg-type]


@scenarios("call, message", {
    "float32": (wrong(random(2, 256)), "x: dtype torch.float32"),
    "one dimension": (wrong(random(256, dtype=torch.float16)), "x: shape"),
    "float8": (wrong(dst_type=24), "dst_type: 24 must be 1"),
    "another rounding": (wrong(round_mode="floor"), "round_mode: 'floor' must be"),
    "a negative scale": (wrong(min_scale=-1.0), "min_scale: -1.0 must not be negative"),
    "blocks of two rows": (wrong(row_block_size=2), "row_block_size: 2 must be 1"),
    "blocks of 64": (wrong(col_block_size=64), "col_block_size: 64 must be 128"),
    "another largest number": (wrong(dst_type_max=100.0), "dst_type_max: 100.0 must be 0"),
})  # fmt: skip
def test_error_names_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"npu_dynamic_block_quant: {message}"):
        call()


@scenarios("call", {
    "a smallest scale": wrong(min_scale=0.1),
    "a width that is no multiple of 128": wrong(random(2, 200, dtype=torch.bfloat16)),
})  # fmt: skip
def test_unsupported_option_is_named(call: Callable[[], object]) -> None:
    with pytest.raises(NotImplementedError, match="npu_dynamic_block_quant"):
        call()
