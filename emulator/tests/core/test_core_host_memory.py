"""Pinned memory is rounded to powers of two and cached, as in torch's CachingHostAllocator."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from emulated import MIB, scenarios

from ascend_npu_emulator.native import core

pytestmark = pytest.mark.usefixtures("any_mode")


@pytest.fixture(autouse=True)
def no_kept_blocks() -> Iterator[None]:
    gc.collect()
    torch.npu.host_empty_cache()
    yield
    core.set_pinned_fault(core.PinnedFault.NONE)
    torch.npu.host_empty_cache()


def pinned_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def held(counter: str = "active_bytes") -> int:
    return torch.npu.host_memory_stats()[f"{counter}.current"]


@scenarios(
    "asked, got",
    {
        "a power of two": (4 * MIB, 4 * MIB),
        "a byte more": (4 * MIB + 1, 8 * MIB),
        "a ring with room for a page": (4 * MIB + 4096, 8 * MIB),
        "one byte": (1, 1),
    },
)
def test_a_pinned_allocation_is_rounded_up_to_a_power_of_two(asked: int, got: int) -> None:
    """See CachingHostAllocatorImpl::allocate in ATen/core/CachingHostAllocator.h (torch 2.10.0)."""
    before, asked_before = held(), core.pinned_bytes_asked()
    block = pinned_bytes(asked)
    assert held() - before == got
    assert core.pinned_bytes_asked() - asked_before == asked
    del block
    assert (held(), core.pinned_bytes_asked()) == (before, asked_before)


def test_freed_block_is_reused_for_the_same_rounded_size() -> None:
    before = held("allocated_bytes")
    first = pinned_bytes(3 * MIB)
    address = first.data_ptr()
    del first
    assert held("allocated_bytes") - before == 4 * MIB, "not given back to the host"
    again = pinned_bytes(4 * MIB)
    assert again.data_ptr() == address
    assert held("allocated_bytes") - before == 4 * MIB
    other = pinned_bytes(MIB)
    assert other.data_ptr() != address
    del again, other
    torch.npu.host_empty_cache()
    assert held("allocated_bytes") == before


def test_freed_block_is_not_reused_while_a_queued_copy_writes_it() -> None:
    if not core.late():
        pytest.skip("in prompt mode the host waits for each operator")
    source = torch.ones(MIB, dtype=torch.uint8, device="npu")
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    target = pinned_bytes(MIB)
    address = target.data_ptr()
    with torch.npu.stream(side):
        target.copy_(source, non_blocking=True)
    del target
    assert pinned_bytes(MIB).data_ptr() != address
    side.synchronize()


@scenarios(
    "size",
    {"64 TiB": (1 << 46,), "1 PiB": (1 << 50,), "twice what the machine has": (2 * 4096 * 2**24,)},
)
def test_more_pinned_memory_than_the_machine_has_is_refused(size: int) -> None:
    with pytest.raises(RuntimeError, match="aclrtMallocHostWithCfg, error code is 207001"):
        pinned_bytes(size)


def test_pinned_memory_is_page_aligned_by_default() -> None:
    """The documentation of aclrtMallocHost promises an alignment of 64 bytes, not of a page."""
    assert pinned_bytes(100).data_ptr() % 4096 == 0
    core.set_pinned_fault(core.PinnedFault.UNALIGNED)
    assert pinned_bytes(32 * MIB).data_ptr() % 4096 == 64


def test_failed_pinned_allocation_may_return_a_null_pointer() -> None:
    """See csrc/core/npu/CachingHostAllocator.cpp:259 in torch_npu 2.10.0.post4.

    With a driver before 25.5, an error of aclrtMallocHost is dropped if it has no handler.
    """
    core.set_pinned_fault(core.PinnedFault.NULL)
    assert pinned_bytes(MIB).data_ptr() == 0
