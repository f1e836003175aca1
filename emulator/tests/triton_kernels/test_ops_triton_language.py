"""Functions of the emulated Triton language that model runner V2 uses, against definitions."""

from typing import Any

import pytest
import torch
from emulated import random

from ascend_npu_emulator.ops.triton.kernels import Autotuner, Config, make_triton
from ascend_npu_emulator.ops.triton.language import tl
from ascend_npu_emulator.ops.triton.random import philox

triton = make_triton()
ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ALL_ONES, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_known_answers_of_random123(word: int, expected: list[int]) -> None:
    counter = [torch.tensor([word])] * 4
    assert [int(each) for each in philox(counter, (word, word))] == expected


def test_random_numbers_depend_only_on_seed_and_offset_and_fill_the_range() -> None:
    offsets = torch.arange(4096, dtype=torch.int32)
    numbers = tl.rand(2**40 + 7, offsets)
    assert numbers.dtype == torch.float32
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    assert torch.equal(tl.rand(2**40 + 7, offsets[5:9]), numbers[5:9])
    assert not torch.equal(tl.rand(7, offsets), numbers), "the upper half of a seed counts"
    assert tl.randint(0, torch.tensor(0)) == 0x6627E8D5


def test_functions_on_blocks_follow_their_definitions() -> None:
    block = torch.tensor([[3, 1, 3], [0, 5, 2]], dtype=torch.int32)
    assert tl.cumsum(block, 1).tolist() == [[3, 4, 7], [0, 5, 7]]
    assert tl.cumsum(block, 1, reverse=True).tolist() == [[7, 4, 3], [7, 7, 2]]
    assert tl.cumsum(block, 1).dtype == torch.int32
    assert tl.cumsum(block > 2, 1).tolist() == [[1, 1, 2], [0, 1, 1]]
    values, places = tl.max(block, axis=1, return_indices=True)
    assert (values.tolist(), places.tolist()) == ([3, 5], [0, 1]), "the left one of equal values"
    with pytest.raises(NotImplementedError, match="tl.max"):
        tl.max(block, return_indices=True)
    assert tl.gather(block, torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), 1).tolist() == [
        [3, 3],
        [5, 5],
    ]
    assert (
        tl.reshape(block, 3, 2).tolist()
        == tl.reshape(block, (3, 2)).tolist()
        == [[3, 1], [3, 0], [5, 2]]
    )
    assert torch.equal(tl.trans(block), block.T)
    assert tl.trans(block.view(1, 2, 3), 2, 0, 1).shape == (3, 1, 2)
    assert tl.cast(torch.tensor(1.0), tl.int32, bitcast=True) == 0x3F800000
    with pytest.raises(AssertionError, match="too narrow"):
        tl.static_assert(2 > 3, "too narrow")


def test_atomic_or_sets_all_bits_at_a_shared_offset() -> None:
    @triton.jit
    def set_bits(memory: Any, tokens: Any, before: Any, count: Any, SIZE: tl.constexpr) -> None:
        lanes = tl.arange(0, SIZE)
        token = tl.load(tokens + lanes, mask=lanes < count)
        bit = tl.full((SIZE,), 1, tl.int32) << (token % 32)
        tl.store(
            before + lanes,
            tl.atomic_or(memory + token // 32, bit, mask=lanes < count),
            mask=lanes < count,
        )

    tokens = torch.tensor([0, 3, 31, 3, 40, 33, 95, 63], dtype=torch.int32)
    memory = torch.tensor([1 << 5, 0, 1, 7], dtype=torch.int32)
    before = torch.full((8,), 99, dtype=torch.int32)
    set_bits[(1,)](memory, tokens, before, 6, SIZE=8)  # the last two are masked
    assert memory.tolist() == [
        (1 << 5 | 1 << 0 | 1 << 3 | 1 << 31) - (1 << 32),
        1 << 8 | 1 << 1,
        1,
        7,
    ]
    assert before.tolist() == [1 << 5] * 4 + [0, 0, 99, 99]


def test_maximum_ignores_nan_by_default() -> None:
    x, y = torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 3.0])
    assert tl.maximum(x, y).tolist() == [2.0, 3.0]
    assert tl.minimum(x, y).tolist() == [2.0, 1.0]
    assert tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL).isnan().tolist() == [True, False]
    assert tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL).isnan().tolist() == [True, False]


@triton.jit
def copy_kernel(addresses_ptr, out_ptr, count, CAST: tl.constexpr):
    address = tl.load(addresses_ptr + tl.program_id(0))
    kind = tl.pointer_type(out_ptr.dtype.element_ty)
    source = tl.multiple_of(tl.cast(address, kind) if CAST else address.to(kind), 16)
    offsets = tl.arange(0, 4)
    row = tl.load(source + offsets, mask=offsets < count, other=-1.0)
    tl.store(out_ptr + tl.program_id(0) * 4 + offsets, row)
    tl.store(source + count, row * 0 + 9, mask=offsets == 0)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_kernel_uses_pointers_cast_from_addresses(cast: bool, dtype: torch.dtype) -> None:
    sources = [random(5).to("npu"), random(5).to("npu")]
    before = [source.cpu() for source in sources]
    addresses = torch.tensor([source.data_ptr() for source in sources]).view(dtype).to("npu")
    out = torch.zeros(2, 4, device="npu")
    copy_kernel[(2,)](addresses, out, 3, CAST=cast)
    for row, source, was in zip(out.cpu(), sources, before, strict=True):
        assert row.tolist() == [*was[:3].tolist(), -1.0]
        assert source.cpu().tolist() == [*was[:3].tolist(), 9.0, float(was[4])]


@triton.jit
def move_kernel(addresses_ptr, row, stride: tl.int64):
    source = tl.load(addresses_ptr) + row.to(tl.int64) * stride
    target = (tl.load(addresses_ptr + 1) + 8).to(tl.pointer_type(tl.uint64))
    offsets = tl.arange(0, 4)
    tl.store(
        target + offsets,
        tl.load(source.to(tl.pointer_type(tl.uint64)) + offsets, mask=offsets < 3),
        mask=offsets < 3,
    )


def test_kernel_casts_computed_addresses_to_pointers() -> None:
    """The kernel moves eight bytes at a time, of any dtype."""
    source, target = torch.arange(24.0).view(3, 8).to("npu"), torch.zeros(10, device="npu")
    addresses = torch.tensor([source.data_ptr(), target.data_ptr()]).to("npu")
    move_kernel[(1,)](addresses, 2, 32)
    assert target.cpu().tolist() == [0.0, 0.0, *range(16, 22), 0.0, 0.0]


def test_autotuned_kernel_is_an_autotuner_and_runs_its_first_configuration() -> None:
    @triton.autotune([Config({"BLOCK": 3}), Config({"BLOCK": 5})], key=["count"])
    @triton.jit
    def fill_kernel(out_ptr: Any, count: Any, BLOCK: tl.constexpr):
        tl.store(out_ptr + tl.arange(0, BLOCK), 1.0)

    out = torch.zeros(6)
    fill_kernel[(1,)](out, 6)
    assert out.tolist() == [1, 1, 1, 0, 0, 0]
    assert isinstance(fill_kernel, triton.runtime.autotuner.Autotuner)
    assert Autotuner is triton.runtime.autotuner.Autotuner
    assert not isinstance(copy_kernel, Autotuner)
