"""Pools of device memory, and sleep, with vllm-ascend's own CaMemAllocator.

The rules follow csrc/camem_allocator.cpp (vllm-ascend 0.23.0 and 0.30.0rc2) and
core/npu/NPUCachingAllocator.cpp (torch_npu 2.10.0.post4).
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from emulated import MIB
from vllm_ascend.device_allocator.camem import CaMemAllocator

from ascend_npu_emulator import memory
from ascend_npu_emulator.native import core

DEVICE = 6  # no other test leaves tensors there
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


@pytest.fixture(autouse=True)
def on_a_device_of_its_own(any_mode: None) -> Iterator[None]:
    with torch.npu.device(DEVICE):
        yield


@pytest.fixture
def camem(monkeypatch: pytest.MonkeyPatch) -> CaMemAllocator:
    monkeypatch.setattr(CaMemAllocator, "instance", None)
    return CaMemAllocator.get_instance()


def free() -> int:
    return torch.npu.mem_get_info()[0]


def bytes_of(num: int, value: int = 1) -> torch.Tensor:
    return torch.full((num,), value, dtype=torch.uint8, device="npu")


def sizes(camem: CaMemAllocator, tag: str) -> list[int]:
    """Return the sizes of the segments of a tag, in MiB."""
    return sorted(
        data.handle[1] // MIB for data in camem.pointer_to_data.values() if data.tag == tag
    )


def sleep(camem: CaMemAllocator, *offloaded: str) -> None:
    torch.npu.synchronize()  # CaMemAllocator.sleep does so in 0.30.0rc2
    camem.sleep(offloaded)


def test_offloaded_memory_is_restored_and_other_memory_holds_garbage(camem: CaMemAllocator) -> None:
    """See camem.py:180-246 in 0.23.0."""
    with camem.use_memory_pool("weights"):
        weights = torch.arange(300_000.0, device="npu")
        result = weights + 1  # computed by a CPU kernel
    with camem.use_memory_pool("kv_cache"):
        cache = torch.ones(1000, device="npu")
    outside = torch.ones(1000, device="npu")
    addresses = [each.data_ptr() for each in (weights, result, cache)]
    sleep(camem, "weights")
    camem.wake_up()
    assert [each.data_ptr() for each in (weights, result, cache)] == addresses
    assert torch.equal(weights.cpu(), torch.arange(300_000.0))
    assert torch.equal(result.cpu(), torch.arange(300_000.0) + 1)
    assert cache.isnan().all()
    sleep(camem)
    camem.wake_up()
    assert weights.isnan().all() and result.isnan().all() and cache.isnan().all()
    assert (outside == 1).all()
    weights.copy_(torch.arange(300_000.0))
    cache.zero_()
    assert float(weights[-1]) == 299_999
    assert not cache.any()


def test_wake_up_maps_only_memory_of_the_given_tags(camem: CaMemAllocator) -> None:
    tensors = {}
    for tag in ("weights", "kv_cache"):
        with camem.use_memory_pool(tag):
            tensors[tag] = torch.ones(10, device="npu")
    sleep(camem, "weights")
    camem.wake_up(["weights"])
    assert (tensors["weights"] == 1).all()
    with pytest.raises(RuntimeError, match="unmapped"):
        tensors["kv_cache"].sum()
    camem.wake_up(["kv_cache"])
    tensors["kv_cache"].zero_()


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda t: t.sum(),
    "written": lambda t: t.fill_(1),
    "an argument in a list": lambda t: torch.stack([t, t]),
    "copied to the host": lambda t: t.cpu(),
    "copied from the host": lambda t: t.copy_(torch.ones(t.shape)),
    "one number": lambda t: t[0].item(),
    "zeroed": lambda t: t.zero_(),
    "copied on another stream": lambda t: _on_another_stream(
        lambda: t.to("cpu", non_blocking=True)
    ),
}


def _on_another_stream(action: Callable[[], object]) -> None:
    with torch.npu.stream(torch.npu.Stream()):
        action()
    torch.npu.synchronize()


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_use_of_unmapped_memory_is_an_error(
    use: Callable[[torch.Tensor], object], camem: CaMemAllocator
) -> None:
    with camem.use_memory_pool("weights"):
        tensor = torch.ones(10, device="npu")
        large = torch.ones(8 * MIB, device="npu")
    sleep(camem, "weights")
    for each in (tensor, large):
        with pytest.raises(
            RuntimeError, match=r"NPU error: aten::\w+.* uses device memory that is unmapped"
        ):
            use(each)
    view = tensor.view(2, 5).transpose(
        0, 1
    )  # a view is allowed: NPUWorker.wake_up makes views (worker.py:260 in 0.23.0)
    camem.wake_up()
    assert (view == 1).all()


def test_sleep_frees_device_memory_for_other_tensors(
    camem: CaMemAllocator, set_hbm: Callable[[int], None]
) -> None:
    gc.collect()
    torch.npu.empty_cache()
    used = torch.npu.mem_get_info()[1] - free()
    set_hbm(used + 64 * MIB)
    with camem.use_memory_pool("weights"):
        weights = bytes_of(40 * MIB)
    assert free() == 24 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        bytes_of(30 * MIB)
    sleep(camem, "weights")
    assert free() == 64 * MIB
    assert torch.npu.memory_allocated() >= 40 * MIB  # torch_npu still counts the memory
    others = bytes_of(30 * MIB)
    with pytest.raises(
        RuntimeError, match="aclrtMallocPhysical failed with acl error code: 207001"
    ):
        camem.wake_up()
    del others
    torch.npu.empty_cache()
    camem.wake_up()
    assert free() == 24 * MIB
    assert int(weights[-1]) == 1
    del weights


def test_out_of_memory_in_a_pool_does_not_empty_the_cache(
    camem: CaMemAllocator, set_hbm: Callable[[int], None]
) -> None:
    """The cache is not emptied while a pool is in use (NPUCachingAllocator.cpp:1261)."""
    torch.npu.empty_cache()
    set_hbm(torch.npu.mem_get_info()[1] - free() + 32 * MIB)
    cached = bytes_of(20 * MIB)
    del cached
    with pytest.raises(RuntimeError, match="aclrtMallocPhysical"), camem.use_memory_pool("weights"):
        bytes_of(20 * MIB)
    camem.pointer_to_data.clear()


def test_blocks_share_segments_and_a_segment_has_the_tag_of_its_first_block(
    camem: CaMemAllocator,
) -> None:
    """use_allocation_tag keeps no block in an earlier segment (NPUCachingAllocator.cpp:2534)."""
    with camem.use_memory_pool("weights"):
        small, middle = bytes_of(MIB // 4), bytes_of(3 * MIB)
        with camem.use_allocation_tag(CaMemAllocator.sleep_persistent_tag):
            small_too, middle_too, large = bytes_of(MIB // 4), bytes_of(3 * MIB), bytes_of(21 * MIB)
    assert sizes(camem, "weights") == [2, 20]
    assert sizes(camem, CaMemAllocator.sleep_persistent_tag) == [22]
    sleep(camem)
    assert (large == 1).all()
    camem.wake_up()
    assert (small_too == 255).all()
    assert (middle_too == 255).all()
    assert (large == 1).all()
    del small, middle


def test_freed_memory_stays_in_its_pool_for_reuse(camem: CaMemAllocator) -> None:
    with camem.use_memory_pool("weights"):
        first, second = bytes_of(2 * MIB), bytes_of(2 * MIB)
        address = first.data_ptr()
        del first, second
        whole = bytes_of(4 * MIB)  # in the memory of both
        assert whole.data_ptr() == address
    torch.npu.empty_cache()
    before = free()
    del whole
    torch.npu.empty_cache()
    assert free() == before
    assert bytes_of(4 * MIB).data_ptr() != address
    assert sizes(camem, "weights") == [20]


def test_other_threads_use_the_pool_without_its_allocator(
    camem: CaMemAllocator,
) -> None:
    """The pool of MemPoolContext belongs to one thread (NPUCachingAllocator.cpp:2721 and 3982)."""
    made: list[torch.Tensor] = []

    def allocate() -> None:
        torch.npu.set_device(DEVICE)
        made.extend((bytes_of(MIB // 4), bytes_of(3 * MIB)))
        torch.npu.synchronize()

    with camem.use_memory_pool("weights"):
        small = bytes_of(MIB // 4)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    assert sizes(camem, "weights") == [2]
    sleep(camem)
    camem.wake_up()
    assert (made[0] == 255).all()
    assert (made[1] == 1).all()
    assert (small == 255).all()


def test_the_cache_cannot_be_emptied_within_a_pool(camem: CaMemAllocator) -> None:
    """See NPUCachingAllocator.cpp:2996."""
    with (
        camem.use_memory_pool("weights"),
        pytest.raises(RuntimeError, match="INTERNAL ASSERT FAILED"),
    ):
        torch.npu.empty_cache()


def test_memory_that_a_stream_still_uses_is_neither_unmapped_nor_copied() -> None:
    """CaMemAllocator.sleep waits in 0.30.0rc2 (camem.py:207), but not in 0.23.0."""
    if not core.late():
        pytest.skip("in prompt mode the host waits for each operator")
    camem = CaMemAllocator()
    with camem.use_memory_pool("weights"):
        tensor = torch.ones(10, device="npu")
    host = torch.empty(10, pin_memory=True)
    torch.npu.synchronize()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        host.copy_(tensor, non_blocking=True)
    ((handle,),) = ([data.handle for data in camem.pointer_to_data.values()],)
    with pytest.raises(
        RuntimeError, match=r"the host unmaps memory that aten::copy_ on stream .* may still read"
    ):
        core.unmap_and_release(*handle)
    with pytest.raises(RuntimeError, match="the host copies memory"):
        core.memcpy(handle[2], 40, host.data_ptr(), 40, HOST_TO_DEVICE)
    stream.synchronize()
    core.unmap_and_release(*handle)
    assert (host == 1).all()


def test_calls_that_cann_rejects_are_errors(camem: CaMemAllocator) -> None:
    with camem.use_memory_pool("weights"):
        tensor = torch.ones(10, device="npu")
    torch.npu.synchronize()
    ((device, size, address, handle),) = (data.handle for data in camem.pointer_to_data.values())
    with pytest.raises(RuntimeError, match="aclrtMapMem failed: memory is mapped"):
        core.create_and_map(device, size, address, handle)
    with pytest.raises(RuntimeError, match="aclrtUnmapMem failed: no memory was allocated"):
        core.unmap_and_release(device, size, address + 512, handle)
    host = torch.empty(10, pin_memory=True)
    with pytest.raises(RuntimeError, match="do not fit"):
        core.memcpy(host.data_ptr(), 39, address, 40, DEVICE_TO_HOST)
    with pytest.raises(RuntimeError, match="knows no device memory"):
        core.memcpy(host.data_ptr(), 40, host.data_ptr(), 40, DEVICE_TO_HOST)
    core.unmap_and_release(device, size, address, handle)
    with pytest.raises(RuntimeError, match="aclrtUnmapMem failed: nothing is mapped"):
        core.unmap_and_release(device, size, address, handle)
    with pytest.raises(RuntimeError, match=r"acl\.rt\.memcpy: nothing is mapped"):
        core.memcpy(host.data_ptr(), 40, address, 40, DEVICE_TO_HOST)
    assert torch.frombuffer(_raw(address, 40), dtype=torch.float32).isnan().all(), (
        "unmapped memory must hold garbage"
    )
    core.create_and_map(device, size, address, handle)
    assert tensor.isnan().all()


def _raw(address: int, num_bytes: int) -> bytearray:
    return bytearray(ctypes.string_at(address, num_bytes))


def test_unknown_allocator_raises_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match="mine and yours"):
        memory.NPUPluggableAllocator(None, "mine", "yours")


def test_pool_without_an_allocator_uses_device_memory() -> None:
    pool = torch.npu.memory.MemPool()
    before = torch.npu.memory_reserved()
    with torch.npu.memory.use_mem_pool(pool):
        tensor = bytes_of(3 * MIB)
        with (
            pytest.raises(RuntimeError, match="already recording"),
            torch.npu.memory.use_mem_pool(pool),
        ):
            pass
    assert torch.npu.memory_reserved() == before + 20 * MIB
    assert (tensor == 1).all()
